"""`_param_info`: what Orbax says of a leaf, in the terms of this package."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from stored_arrays import contents, numbers

from orbax_explicit._array_writing import ArrayWrite
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._param_info import codec_policy_of, context_of, directory_of, path_of, store_of, write_beside
from orbax_explicit._records import Key
from orbax_explicit._storage import ArrayStore, new_context, open_store


def info_of(directory: Any = "/a/b", **options: Any) -> ocp.type_handlers.ParamInfo:
    """What Orbax says of the leaf `w.x`."""
    path = epath.Path(directory)
    return ocp.type_handlers.ParamInfo(
        **{"name": "w.x", "parent_dir": path, "is_ocdbt_checkpoint": False, "use_zarr3": False, **options}
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, {}, id="directories and Zarr 2"),
        pytest.param({"is_ocdbt_checkpoint": True}, {"use_ocdbt": True}, id="OCDBT"),
        pytest.param({"is_ocdbt_checkpoint": None}, {}, id="OCDBT not said"),
        pytest.param({"use_zarr3": True}, {"use_zarr3": True}, id="Zarr 3"),
        pytest.param({"use_zarr3": None}, {}, id="the version not said"),
        pytest.param({"raise_array_data_missing_error": False}, {"fills_missing": True}, id="data may be missing"),
    ],
)
def test_where_the_arrays_of_an_item_lie(options, expected) -> None:
    """Whatever the leaf."""
    usual = {"directory": "/a/b", "use_ocdbt": False, "use_zarr3": False}
    assert store_of(info_of(**options)) == ArrayStore(**{**usual, **expected})
    assert store_of(info_of(**options), "other.json").metadata_file == "other.json"
    assert directory_of(info_of(**options)) == epath.Path("/a/b")


def test_the_context_is_orbaxs() -> None:
    """One for each save and restore; None where Orbax gave none."""
    context = new_context()
    assert context_of(info_of(ts_context=context)) is context
    assert context_of(info_of(ts_context=None)) is None


@pytest.mark.parametrize(
    ("keypath", "path"),
    [
        pytest.param((jax.tree_util.DictKey("w"),), (Key("dict", "w"),), id="a key of a dict"),
        pytest.param(
            (jax.tree_util.DictKey(3), jax.tree_util.SequenceKey(1)), (Key("dict", 3), Key("index", 1)), id="two keys"
        ),
        pytest.param((jax.tree_util.GetAttrKey("m"),), (Key("attr", "m"),), id="an attribute"),
        pytest.param((), (), id="a tree that is one leaf"),
        pytest.param(None, (), id="no path"),
        pytest.param((jax.tree_util.DictKey(object()),), (Key("dict", "w.x"),), id="a key that has no record"),
    ],
)
def test_the_path_of_a_leaf(keypath, path) -> None:
    """As it is recorded; by Orbax's own text where it has no record."""
    assert path_of(info_of(keypath=keypath)) == path


@pytest.mark.parametrize("checksum", ["crc32", None])
@pytest.mark.parametrize("compression", ["auto", "zstd", None])
def test_a_handler_that_is_not_to_compress_still_checks(checksum, compression) -> None:
    """Stock's `use_compression=False`."""
    policy = CodecPolicy(checksum=checksum, compression=compression)
    assert codec_policy_of(info_of(use_compression=True), policy) == policy
    assert codec_policy_of(info_of(use_compression=False), policy) == CodecPolicy(checksum=checksum, compression=None)


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
def test_what_a_process_writes_goes_into_the_store_of_the_item(tmp_path: Path, use_zarr3: bool) -> None:
    """When Orbax has created its directory, which it does in the background."""
    item = tmp_path / "a"
    info = info_of(item, use_zarr3=use_zarr3, ts_context=new_context(), use_compression=True)
    events = []

    async def create() -> None:
        events.append("created")
        item.mkdir()

    info.await_path_creation = create  # type: ignore[method-assign]
    write = ArrayWrite(name="w.x", shape=(2,), dtype="float32", chunk=(2,), blocks={((0, 2),): numbers(2)})
    asyncio.run(write_beside(info, [write], CodecPolicy(checksum=None), 0))
    assert events == ["created"]
    stored = contents(open_store(store_of(info)))
    chunk, metadata = store_of(info).chunk_key((0,)), store_of(info).metadata_file
    assert stored.keys() == {f"w.x/{chunk}", f"w.x/{metadata}"}
    np.testing.assert_array_equal(np.frombuffer(stored[f"w.x/{chunk}"], np.float32), numbers(2))
