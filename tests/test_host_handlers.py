"""`_host_handlers`: NumPy arrays and numbers, stored with their bytes checked and described from the record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath
from stored_arrays import numbers

import orbax_explicit as oxe
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._host_handlers import ExplicitNumpyHandler, ExplicitScalarHandler
from orbax_explicit._storage import ArrayStore, new_context, open_store
from orbax_explicit._zarr import parse_zarr


def infos_of(directory: Path, *names: str) -> list[ocp.type_handlers.ParamInfo]:
    """What Orbax says of leaves of an item that is stored in directories."""
    return [
        ocp.type_handlers.ParamInfo(
            name=name,
            path=epath.Path(directory) / name,
            parent_dir=epath.Path(directory),
            is_ocdbt_checkpoint=False,
            use_zarr3=False,
            use_compression=True,
            ts_context=new_context(),
        )
        for name in names
    ]


def write(handler: Any, values: list[Any], infos: list[Any], meanwhile: Callable[[], object] = lambda: None) -> int:
    """Saves values as Orbax does; gives the number of futures that it waits for."""

    async def serialize() -> int:
        futures = await handler.serialize(values, infos)
        meanwhile()
        for future in futures:
            future.result()
        return len(futures)

    return asyncio.run(serialize())


def read(directory: Path, name: str) -> np.ndarray[Any, Any]:
    """What TensorStore's driver reads."""
    store = ArrayStore(directory=str(directory), use_ocdbt=False, use_zarr3=False)
    array = ts.open(ts.Spec(store.array_spec()), kvstore=open_store(store) / f"{name}/", open=True).result()
    values: np.ndarray[Any, Any] = array.read().result()
    return values


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(numbers(3, 4), id="a matrix"),
        pytest.param(np.zeros((0, 3)), id="an array of size zero"),
        pytest.param(np.arange(4, dtype=">i8"), id="the highest byte first"),
        pytest.param(numbers(4, dtype=ml_dtypes.bfloat16), id="a dtype that NumPy has not"),
        pytest.param(np.asarray(3.5), id="an array without dimensions"),
    ],
)
def test_an_array_of_numpy_is_written_with_checks(tmp_path: Path, value) -> None:
    """Also what stock's handler refuses."""
    assert write(ExplicitNumpyHandler(codec_policy=CodecPolicy()), [value], infos_of(tmp_path, "n")) == 1
    found = read(tmp_path, "n")
    assert found.shape == value.shape
    assert found.dtype == value.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, value)
    assert parse_zarr((tmp_path / "n" / ".zarray").read_bytes()).is_checked


@pytest.mark.parametrize(
    ("value", "dtype"), [(3, np.int64), (2.5, np.float64), (True, np.bool_), (np.float32(1.5), np.float32)], ids=str
)
def test_a_number_is_an_array_without_dimensions(tmp_path: Path, value, dtype) -> None:
    """As stock stores it, and with checks."""
    handler = ExplicitScalarHandler(codec_policy=CodecPolicy())
    write(handler, [value], infos_of(tmp_path, "n"))
    found = read(tmp_path, "n")
    assert (found.shape, found.dtype, found.item()) == ((), np.dtype(dtype), value)
    assert parse_zarr((tmp_path / "n" / ".zarray").read_bytes()).is_checked


def test_an_array_may_be_changed_while_it_is_written(tmp_path: Path) -> None:
    """What is saved are the values at the time of the call."""
    value = numbers(300, 300)
    write(ExplicitNumpyHandler(codec_policy=CodecPolicy()), [value], infos_of(tmp_path, "n"), lambda: value.fill(-1))
    np.testing.assert_array_equal(read(tmp_path, "n"), numbers(300, 300))


@pytest.mark.parametrize(
    ("primary_host", "futures"),
    [
        pytest.param(0, 1, id="this process writes"),
        pytest.param(1, 0, id="another one does"),
        pytest.param(None, 1, id="each has a storage"),
    ],
)
@pytest.mark.parametrize("handler", [ExplicitNumpyHandler, ExplicitScalarHandler])
def test_one_process_writes_values_on_the_host(tmp_path: Path, handler, primary_host, futures) -> None:
    """All have the same."""
    made = handler(codec_policy=CodecPolicy(), primary_host=primary_host)
    assert write(made, [np.asarray(1)], infos_of(tmp_path, "n")) == futures
    assert (tmp_path / "n").exists() == bool(futures)


def test_the_types_are_those_of_stock() -> None:
    """By which `_METADATA` names each leaf, and stock's readers choose how to read it."""
    for ours, stocks in (
        (ExplicitNumpyHandler, ocp.type_handlers.NumpyHandler),
        (ExplicitScalarHandler, ocp.type_handlers.ScalarHandler),
    ):
        assert ours(codec_policy=CodecPolicy()).typestr() == stocks().typestr()


@pytest.mark.parametrize("gone", [False, True], ids=["as written", "when the arrays are gone"])
def test_values_are_described_from_the_record(tmp_path: Path, gone: bool) -> None:
    """Without opening them: shapes and dtypes as they are stored."""
    tree = {"n": numbers(3, 4), "b": b"octets", "i": 3, "f": np.float32(2), "empty": np.zeros((0, 2), np.int8)}
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
        checkpointer.wait_until_finished()
    if gone:
        for name in tree:
            (tmp_path / "a" / name / ".zarray").unlink()
    arrays = asyncio.run(
        ExplicitNumpyHandler(codec_policy=CodecPolicy()).metadata(infos_of(tmp_path / "a", "n", "b", "empty"))
    )
    assert [(array.name, array.shape, array.dtype, array.sharding) for array in arrays] == [
        ("n", (3, 4), np.float32, None),
        ("b", (6,), np.uint8, None),
        ("empty", (0, 2), np.int8, None),
    ]
    scalars = asyncio.run(
        ExplicitScalarHandler(codec_policy=CodecPolicy()).metadata(infos_of(tmp_path / "a", "f", "i"))
    )
    assert [(scalar.name, scalar.dtype) for scalar in scalars] == [("f", np.float32), ("i", np.int64)]
