"""`_array_writing`: what is written is the array, however large, in parts that are bounded."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from stored_arrays import GZIP, contents, numbers, spec_by_hand, write_by_driver

from orbax_explicit import _array_writing
from orbax_explicit._array_writing import ArrayWrite, write_arrays
from orbax_explicit._boxes import Box, slices_within, whole_box
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._small_arrays import SMALL_NBYTES
from orbax_explicit._storage import ArrayStore, new_context
from orbax_explicit._zarr import parse_zarr

VERSIONS = pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
STORES = pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
HALVES: list[Box] = [((0, 8), (0, 4)), ((0, 8), (4, 8))]


def write_of(
    values: np.ndarray[Any, Any],
    chunk: tuple[int, ...],
    *,
    name: str = "w",
    dtype: str | None = None,
    blocks: list[Box] | None = None,
) -> ArrayWrite:
    """Writing an array, or some blocks of it."""
    whole = whole_box(values.shape)
    return ArrayWrite(
        name=name,
        shape=values.shape,
        dtype=dtype or values.dtype.name,
        chunk=chunk,
        blocks={block: values[slices_within(block, whole)] for block in ([whole] if blocks is None else blocks)},
    )


def write(store: ArrayStore, *writes: ArrayWrite, policy: CodecPolicy | None = None, **options: Any) -> None:
    """Writes as one process does."""
    options = {"process": 0, "context": new_context(), **options}
    asyncio.run(write_arrays(writes, store, policy=policy or CodecPolicy(), **options))


def keys_of(store: ArrayStore, process: int = 0) -> ts.KvStore:
    return ts.KvStore.open(store.writing_spec(process), context=new_context()).result()


def read(store: ArrayStore, name: str = "w") -> np.ndarray[Any, Any]:
    """What TensorStore's driver reads; a chunk that is missing is an error."""
    array = ts.open(ts.Spec(store.array_spec()), kvstore=keys_of(store) / f"{name}/", open=True).result()
    values: np.ndarray[Any, Any] = array.read().result()
    return values


@pytest.fixture(params=[False, True], ids=["by the driver", "as keys"])
def either_way(request, monkeypatch):
    """However small an array is, and however large. Each way the other writes nothing."""

    def fail(*args: Any) -> Any:
        raise AssertionError("the array was written the other way")

    monkeypatch.setattr(_array_writing, "_write_large" if request.param else "_write_small", fail)
    monkeypatch.setattr(_array_writing, "SMALL_NBYTES", 1 << 40 if request.param else -1)


@pytest.mark.usefixtures("either_way")
@STORES
@VERSIONS
@pytest.mark.parametrize(
    ("shape", "chunk", "blocks"),
    [
        pytest.param((), (), None, id="a scalar"),
        pytest.param((8, 8), (8, 8), None, id="one chunk"),
        pytest.param((8, 8), (3, 5), None, id="chunks that stand out beyond the array"),
        pytest.param((8, 8), (4, 2), HALVES, id="two blocks"),
        pytest.param((0, 8), (1, 8), [], id="nothing"),
    ],
)
def test_what_is_written_is_read(tmp_path, shape, chunk, blocks, use_ocdbt, use_zarr3) -> None:
    """By TensorStore's driver, as stock reads it."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    write(store, write_of(numbers(*shape) + 1, chunk, blocks=blocks))
    np.testing.assert_array_equal(read(store), numbers(*shape) + 1)


@pytest.mark.usefixtures("either_way")
@STORES
@VERSIONS
def test_an_array_without_a_name_lies_at_the_root(tmp_path, use_ocdbt, use_zarr3) -> None:
    """A tree that is one array."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    write(store, write_of(numbers(4), (4,), name=""))
    keys = contents(keys_of(store))
    assert {store.metadata_file, store.chunk_key((0,))} == {key for key in keys if "ocdbt" not in key}


@VERSIONS
@pytest.mark.parametrize("policy", [CodecPolicy(), CodecPolicy(checksum=None)], ids=["gzip", "no codec"])
@pytest.mark.parametrize("small", [False, True], ids=["by the driver", "as keys"])
def test_both_ways_write_the_same(tmp_path, monkeypatch, small, policy, use_zarr3) -> None:
    """The keys that TensorStore's driver writes of the array, and under each the same bytes."""
    monkeypatch.setattr(_array_writing, "SMALL_NBYTES", 1 << 40 if small else -1)
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=False, use_zarr3=use_zarr3)
    write(store, write_of(numbers(8, 7), (3, 4)), policy=policy)
    memory = ts.KvStore.open("memory://").result()
    codec = GZIP if policy.checksum else None
    write_by_driver(memory, "w", numbers(8, 7), (3, 4), spec_by_hand(use_zarr3, (3, 4), codec))
    assert contents(keys_of(store)) == contents(memory)


@pytest.mark.usefixtures("either_way")
@VERSIONS
@pytest.mark.parametrize(("values", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("int32", "int8")])
def test_elements_are_cast_while_they_are_written(tmp_path, values, dtype, use_zarr3) -> None:
    """To the dtype that is stored."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=False, use_zarr3=use_zarr3)
    array = numbers(8, 7, dtype=values)
    write(store, write_of(array, (4, 4), dtype=dtype))
    assert read(store).dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(read(store), array.astype(jnp.dtype(dtype)))


@pytest.mark.usefixtures("either_way")
@STORES
def test_processes_write_their_blocks(tmp_path, use_ocdbt) -> None:
    """Each the same metadata; together they are the array."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=use_ocdbt, use_zarr3=False)
    for process, block in enumerate(HALVES):
        write(store, write_of(numbers(8, 8), (4, 2), blocks=[block]), process=process)
    written = [contents(keys_of(store, process)) for process in (0, 1)]
    assert written[0]["w/.zarray"] == written[1]["w/.zarray"]
    if use_ocdbt:
        assert [sorted(keys) for keys in written] == [
            ["w/.zarray", *(f"w/{i}.{j}" for i in (0, 1) for j in columns)] for columns in ((0, 1), (2, 3))
        ]
    else:
        np.testing.assert_array_equal(read(store), numbers(8, 8))


@pytest.mark.parametrize(
    ("elements", "is_small"),
    [
        pytest.param(SMALL_NBYTES // 4, True, id="as many bytes as a small one may have"),
        pytest.param(SMALL_NBYTES // 4 + 1, False, id="more"),
    ],
)
def test_which_arrays_are_written_as_keys(tmp_path, monkeypatch, elements, is_small) -> None:
    """By what this process writes of them."""
    ways = []
    for name in ("_write_small", "_write_large"):
        function = getattr(_array_writing, name)
        monkeypatch.setattr(
            _array_writing, name, lambda *args, name=name, function=function: (ways.append(name), function(*args))[1]
        )
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=True, use_zarr3=False)
    write(store, write_of(numbers(elements), (elements,)))
    assert ways == ["_write_small" if is_small else "_write_large"]
    np.testing.assert_array_equal(read(store), numbers(elements))


@pytest.mark.usefixtures("either_way")
@STORES
def test_each_array_gets_a_level_of_its_own(tmp_path, use_ocdbt) -> None:
    """Zeros are compressed, what is beside them is not."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=use_ocdbt, use_zarr3=False)
    normals = np.random.default_rng(0).standard_normal((128, 128), np.float32)
    arrays = {"zeros": np.zeros((128, 128), np.float32), "normals": normals}
    write(store, *(write_of(values, (64, 128), name=name) for name, values in arrays.items()))
    stored = contents(keys_of(store))
    for name, values in arrays.items():
        assert parse_zarr(stored[f"{name}/.zarray"]).is_checked
        np.testing.assert_array_equal(read(store, name), values)
    sizes = {name: sum(len(stored[f"{name}/{i}.0"]) for i in (0, 1)) for name in arrays}
    assert sizes["zeros"] < normals.nbytes / 50
    assert normals.nbytes <= sizes["normals"] < normals.nbytes + 200


def test_a_policy_that_the_format_has_not_is_refused(tmp_path) -> None:
    """Before anything is written, if there is anything to write or not."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=False, use_zarr3=False)
    for writes in ([], [write_of(numbers(8, 8), (8, 8))]):
        with pytest.raises(ValueError, match="has no checksum in Zarr version 2"):
            write(store, *writes, policy=CodecPolicy(compression="zstd"))
    assert list(tmp_path.iterdir()) == []


@STORES
def test_who_has_nothing_to_write_writes_nothing(tmp_path, use_ocdbt) -> None:
    """No database either."""
    write(ArrayStore(directory=str(tmp_path), use_ocdbt=use_ocdbt, use_zarr3=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [1, 300, 2000])
def test_what_is_on_its_way_is_bounded(tmp_path, monkeypatch, limit) -> None:
    """Over all arrays; a chunk that has more bytes goes by itself."""
    monkeypatch.setattr(_array_writing, "SMALL_NBYTES", -1)
    in_flight: list[int] = []
    most = [0, 0]
    budget = _array_writing.Budget

    class Spy(budget):  # type: ignore[misc, valid-type]
        def reserved(self, nbytes: int) -> Any:
            return self._spied(super().reserved(nbytes), nbytes)

        @contextlib.asynccontextmanager
        async def _spied(self, reserved: Any, nbytes: int) -> Any:
            async with reserved:
                in_flight.append(nbytes)
                most[:] = max(most[0], sum(in_flight)), max(most[1], len(in_flight))
                try:
                    yield
                finally:
                    in_flight.remove(nbytes)

    monkeypatch.setattr(_array_writing, "Budget", Spy)
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=True, use_zarr3=False)
    # Of 16 chunks of 64 bytes each.
    write(store, *(write_of(numbers(16, 16) + i, (4, 4), name=str(i)) for i in range(4)), max_in_flight_nbytes=limit)
    for i in range(4):
        np.testing.assert_array_equal(read(store, str(i)), numbers(16, 16) + i)
    assert most[0] <= max(64, limit)
    assert most[1] == max(1, min(64, limit // 64))


@pytest.mark.parametrize(
    ("nbytes", "batches"),
    [pytest.param(1 << 20, [5], id="all together"), pytest.param(130, [3, 2], id="until there are so many bytes")],
)
def test_small_arrays_are_committed_together(tmp_path, monkeypatch, nbytes, batches) -> None:
    """A commit for each would cost more than writing them."""
    monkeypatch.setattr(_array_writing, "_BATCH_NBYTES", nbytes)
    sizes = []
    write_small = _array_writing._write_small

    def spy(batch: Any, *args: Any) -> None:
        sizes.append(len(batch))
        write_small(batch, *args)

    monkeypatch.setattr(_array_writing, "_write_small", spy)
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=True, use_zarr3=False)
    write(store, *(write_of(numbers(4, 4) + i, (4, 4), name=str(i)) for i in range(5)))
    assert sorted(sizes, reverse=True) == batches
    for i in range(5):
        np.testing.assert_array_equal(read(store, str(i)), numbers(4, 4) + i)


@pytest.mark.usefixtures("either_way")
@STORES
def test_an_error_is_raised_when_nothing_is_on_its_way_any_more(tmp_path, use_ocdbt) -> None:
    """A directory that is a file, say."""
    (tmp_path / "a").write_bytes(b"in the way")
    store = ArrayStore(directory=str(tmp_path / "a"), use_ocdbt=use_ocdbt, use_zarr3=False)
    with pytest.raises((ValueError, OSError), match=r"(?i)not a directory|exists"):
        write(store, *(write_of(numbers(8, 8), (4, 4), name=str(i)) for i in range(3)))
