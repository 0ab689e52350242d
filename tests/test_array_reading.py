"""`_array_reading`: what is read, how often, into which memory, and how much of it at a time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from stored_arrays import ZSTD, numbers, spec_by_hand, stored, write_by_driver
from trees import assert_same_tree, matrix, place

import orbax_explicit as oxe
from orbax_explicit import _array_reading, _array_shares, _blocks
from orbax_explicit._array_reading import ArrayRead, Known, read_arrays
from orbax_explicit._binding import UncommittedSharding
from orbax_explicit._digests import Digests
from orbax_explicit._storage import ArrayStore

VERSIONS = pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])


def known_of(values: np.ndarray[Any, Any]) -> Known:
    """What a record says of an array."""
    return Known(shape=values.shape, dtype=values.dtype.name, x64=False)


def read(store: ArrayStore, sharding: Any, **options: Any) -> Any:
    """Reads one array."""
    limit = options.pop("max_in_flight_nbytes", None)
    array = ArrayRead(name="w", sharding=sharding, **options)
    (result,) = asyncio.run(read_arrays([array], store, max_in_flight_nbytes=limit))
    return result


@pytest.fixture(params=[False, True], ids=["devices that share memory with the host", "devices that do not"])
def either_way(request, monkeypatch):
    """As on CPUs, and as on accelerators, where a block is copied to its devices as soon as it is there."""
    if request.param:
        monkeypatch.setattr(_blocks, "_is_copied_to", lambda device: True)


@pytest.fixture(params=[False, True], ids=["by the driver", "as keys"])
def known(request, monkeypatch):
    """What is known of an array with these values: nothing, or that it is small. Each way the other reads nothing."""

    async def fail(*args: Any) -> Any:
        raise AssertionError("the array was read the other way")

    monkeypatch.setattr(_array_reading._Reading, "read_large" if request.param else "read_small", fail)
    return known_of if request.param else lambda values: None


# Values, shardings and memory.


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("spec", [P("d", "m"), P(("d", "m")), P(None, "m"), P("m"), P()], ids=str)
@pytest.mark.parametrize("chunk", [(16, 8), (4, 3), (1, 8), (16, 1)], ids=lambda chunk: f"chunks of {chunk}")
def test_an_array_lands_with_its_values_on_its_sharding(tmp_path, mesh, known, chunk, spec, kind):
    """However its chunks and its blocks lie to each other, and however little is read at a time."""
    values = numbers(16, 8)
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    array = read(stored(tmp_path, {"w": values}, chunk), sharding, known=known(values), max_in_flight_nbytes=256)
    np.testing.assert_array_equal(np.asarray(array), values)
    assert array.sharding == sharding
    assert array.sharding.memory_kind == kind
    assert array.committed
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (8, 0)], ids=str)
@VERSIONS
def test_a_scalar_and_an_array_of_size_zero(tmp_path, mesh, known, use_zarr3, shape):
    """They have one chunk, and none."""
    values = np.full(shape, 7, np.int32)
    store = stored(tmp_path, {"w": values}, tuple(max(1, n) for n in shape), use_zarr3=use_zarr3)
    for sharding in (NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[3])):
        array = read(store, sharding, known=known(values))
        np.testing.assert_array_equal(np.asarray(array), values)
        assert (array.sharding, array.dtype) == (sharding, np.int32)
    assert read(store, None, known=known(values)).shape == shape


@pytest.mark.usefixtures("either_way")
def test_an_uncommitted_array_stays_uncommitted(tmp_path, mesh, known):
    """Under `jax.set_mesh` too."""
    store = stored(tmp_path, {"w": numbers(4)}, (4,))
    with jax.set_mesh(mesh):
        array = read(store, UncommittedSharding(jax.devices()[0]), known=known(numbers(4)))
    assert not array.committed
    np.testing.assert_array_equal(np.asarray(array), numbers(4))


@pytest.mark.parametrize(
    ("stored_dtype", "asked", "got"),
    [
        pytest.param("float32", None, "float32", id="the stored dtype"),
        pytest.param("float32", jnp.bfloat16, "bfloat16", id="a narrower one"),
        pytest.param("bfloat16", np.float32, "float32", id="a wider one"),
        pytest.param("float64", None, "float32", id="64 bits, which JAX has not while x64 is off"),
        pytest.param("int32", np.float32, "float32", id="another kind"),
        pytest.param("bool", None, "bool", id="truth values"),
        pytest.param("complex64", None, "complex64", id="complex numbers"),
        pytest.param("float8_e4m3fn", None, "float8_e4m3fn", id="8 bits"),
        pytest.param("int4", None, "int4", id="4 bits"),
    ],
)
def test_elements_are_cast_while_they_are_read(tmp_path, mesh, known, stored_dtype, asked, got):
    """The buffer is of the final dtype: nothing of the array's size is made for another one."""
    values = (numbers(8, 8) % 5).astype(jnp.dtype(stored_dtype))
    store = stored(tmp_path, {"w": values}, (3, 8))
    array = read(store, NamedSharding(mesh, P("d", "m")), dtype=asked, known=known(values))
    assert array.dtype == jnp.dtype(got)
    np.testing.assert_array_equal(np.asarray(array), values.astype(jnp.dtype(got)))


def test_on_the_host_dtypes_are_numpys(tmp_path, known):
    """64 bits come back as 64 bits, and the array is the caller's to write to."""
    values = numbers(6, 4, dtype=np.float64)
    array = read(stored(tmp_path, {"w": values}, (2, 2)), None, known=known(values), max_in_flight_nbytes=64)
    assert type(array) is np.ndarray
    assert array.flags.writeable
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, numbers(6, 4))


@pytest.mark.parametrize("x64", [False, True], ids=["while x64 is off", "while x64 is on"])
def test_what_jax_holds_is_as_where_the_restore_was_called(tmp_path, x64):
    """Whatever the flags of the thread that reads."""
    values = numbers(4, dtype=np.float64)
    store, sharding = stored(tmp_path, {"w": values}, (4,)), SingleDeviceSharding(jax.devices()[1])
    known = Known(shape=(4,), dtype="float64", x64=x64)
    array = read(store, sharding, known=known)
    assert array.dtype == (np.float64 if x64 else np.float32)
    np.testing.assert_array_equal(np.asarray(array), values)
    assert read(store, None, known=known).dtype == np.float64


# Shapes.


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(4, 8), (16, 8), (8, 12), (16, 4), (24, 24)], ids=str)
@pytest.mark.parametrize("spec", [P("d", "m"), P()], ids=str)
def test_without_strictness_an_array_is_cut_off_or_padded(tmp_path, mesh, known, spec, shape):
    """With zeros, at the end of each dimension, as in Orbax; also where whole blocks are of them."""
    values = numbers(8, 8) + 1
    store, sharding = stored(tmp_path, {"w": values}, (3, 3)), NamedSharding(mesh, spec)
    array = read(store, sharding, shape=shape, strict=False, known=known(values))
    expected = np.zeros(shape, np.float32)
    rows, columns = (min(n, 8) for n in shape)
    expected[:rows, :columns] = values[:rows, :columns]
    np.testing.assert_array_equal(np.asarray(array), expected)


@pytest.mark.parametrize(
    ("shape", "strict"),
    [
        pytest.param((8, 4), True, id="another shape"),
        pytest.param((8,), False, id="fewer dimensions"),
    ],
)
def test_another_shape_is_an_error(tmp_path, mesh, known, shape, strict):
    """That says both shapes."""
    store, sharding = stored(tmp_path, {"w": numbers(8, 8)}, (8, 8)), NamedSharding(mesh, P())
    with pytest.raises(oxe.FormatError, match="is not compatible with the stored shape") as error:
        read(store, sharding, shape=shape, strict=strict, known=known(numbers(8, 8)))
    assert str(shape) in str(error.value)
    assert "(8, 8)" in str(error.value)


@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param(Known(shape=(8, 9), dtype="float32", x64=False), id="another shape"),
        pytest.param(Known(shape=(8, 8), dtype="int32", x64=False), id="another dtype"),
        pytest.param(Known(shape=(1 << 20, 8), dtype="float32", x64=False), id="a shape that was large"),
    ],
)
def test_an_array_that_is_not_the_recorded_one_is_an_error(tmp_path, recorded):
    """Before any memory is taken for it, however it is read."""
    store = stored(tmp_path, {"w": numbers(8, 8)}, (8, 8))
    with pytest.raises(oxe.FormatError, match="cannot restore w: what is stored is") as error:
        read(store, None, known=recorded)
    assert "float32(8, 8)" in str(error.value)
    assert f"{recorded.dtype}{recorded.shape}" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "dtype", "small"),
    [
        pytest.param((), "float32", True, id="a scalar"),
        pytest.param((1 << 16,), "float32", True, id="as many bytes as a small one may have"),
        pytest.param(((1 << 16) + 1,), "float32", False, id="more"),
        pytest.param(((1 << 17) + 1,), "bfloat16", False, id="more, of two bytes each"),
    ],
)
def test_what_is_known_to_be_small_is_read_as_keys(tmp_path, monkeypatch, shape, dtype, small):
    """And nothing else is: an array that nothing is known of may be large."""
    taken = []
    read_small = _array_reading._Reading._read_small

    def spy(self: Any, batch: Any) -> Any:
        taken.extend(array.name for _, array in batch)
        return read_small(self, batch)

    monkeypatch.setattr(_array_reading._Reading, "_read_small", spy)
    values = numbers(*shape, dtype=dtype)
    store = stored(tmp_path, {"w": values}, shape)
    for known, expected in ((known_of(values), ["w"] if small else []), (None, [])):
        taken.clear()
        np.testing.assert_array_equal(read(store, None, known=known), values)
        assert taken == expected


@pytest.mark.parametrize(
    ("use_zarr3", "spec"),
    [
        pytest.param(False, spec_by_hand(False, (2, 3), ZSTD), id="another codec in Zarr 2"),
        pytest.param(True, spec_by_hand(True, (2, 3), ZSTD), id="another codec in Zarr 3"),
        pytest.param(
            False, {"driver": "zarr", "metadata": {"chunks": [2, 3], "order": "F"}}, id="the first dimension fastest"
        ),
        pytest.param(
            False, {"driver": "zarr", "metadata": {"chunks": [2, 3], "dimension_separator": "/"}}, id="other keys"
        ),
        pytest.param(
            True,
            {
                "driver": "zarr3",
                "metadata": {
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
                    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                },
            },
            id="other keys in Zarr 3",
        ),
    ],
)
def test_a_small_array_that_only_the_driver_can_read_is_read_by_it(tmp_path, mesh, use_zarr3, spec):
    """Beside others that are read as keys, and in their places."""
    store = stored(tmp_path, {"a": numbers(4, 6), "z": numbers(4, 6) + 2}, (2, 3), use_zarr3=use_zarr3)
    write_by_driver(ts.KvStore.open(store.spec()).result(), "w", numbers(4, 6) + 1, (2, 3), spec)
    reads = [
        ArrayRead(name=name, sharding=NamedSharding(mesh, P("d")), known=known_of(numbers(4, 6))) for name in "awz"
    ]
    for i, array in enumerate(asyncio.run(read_arrays(reads, store))):
        np.testing.assert_array_equal(np.asarray(array), numbers(4, 6) + i)


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        pytest.param({}, [7], id="all together"),
        pytest.param({"_BATCH_ARRAYS": 3}, [3, 3, 1], id="so many arrays"),
        pytest.param({"_BATCH_NBYTES": 40}, [3, 3, 1], id="so many bytes, of 16 each"),
        pytest.param({"_BATCH_NBYTES": 1}, [1] * 7, id="each by itself"),
    ],
)
def test_small_arrays_are_read_many_at_a_time(tmp_path, monkeypatch, limits, batches):
    """Until there are enough; each lands in its place, beside large ones."""
    for name, value in limits.items():
        monkeypatch.setattr(_array_reading, name, value)
    sizes = []
    read_small = _array_reading._Reading._read_small

    def spy(self: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        return read_small(self, batch)

    monkeypatch.setattr(_array_reading._Reading, "_read_small", spy)
    store = stored(tmp_path, {str(i): numbers(4) + i for i in range(9)}, (4,))
    reads = [
        ArrayRead(name=str(i), sharding=None, known=None if i in (2, 5) else known_of(numbers(4))) for i in range(9)
    ]
    for i, array in enumerate(asyncio.run(read_arrays(reads, store))):
        np.testing.assert_array_equal(array, numbers(4) + i)
    assert sorted(sizes, reverse=True) == batches
    assert asyncio.run(read_arrays([], store)) == []


# Reading once, and a bounded part at a time.


def file_nbytes_read() -> int:
    """Bytes that TensorStore has read of files, in this process."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
    return sum(v["value"] for m in metrics if m["name"].endswith("/bytes_read") for v in m["values"])


@VERSIONS
@pytest.mark.parametrize("limit", [None, 1 << 14], ids=["at once", "piece by piece"])
@pytest.mark.parametrize("spec", [P("d", "m"), P(None, "m"), P()], ids=str)
@pytest.mark.parametrize("chunk", [(64, 128), (32, 32), (64, 32), (10, 50)], ids=lambda c: f"chunks of {c}")
def test_each_chunk_is_read_once(tmp_path, mesh, known, chunk, spec, limit, use_zarr3):
    """By one process, however many replicas there are, and however many blocks lie in the chunk."""
    values = numbers(64, 128)
    store = stored(tmp_path, {"w": values}, chunk, use_zarr3=use_zarr3)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    before = file_nbytes_read()
    array = read(store, NamedSharding(mesh, spec), known=known(values), max_in_flight_nbytes=limit)
    np.testing.assert_array_equal(np.asarray(array), values)
    assert file_nbytes_read() - before == sum(file.stat().st_size for file in files)


def opened(store: ArrayStore) -> ts.TensorStore:
    """The array of a store, by the driver."""
    return ts.open(ts.Spec(store.array_spec()), kvstore=ts.KvStore.open(store.spec()).result() / "w/").result()


def test_only_the_chunks_of_ones_own_blocks_are_read(tmp_path):
    """As in a process that holds a part of the array."""
    store = opened(stored(tmp_path, {"w": numbers(64, 128)}, (16, 128)))
    blocks = [((0, 16), (0, 128)), ((48, 64), (0, 128))]
    parts = [part for piece in _array_reading._pieces(blocks, store, 1) for part in piece.parts.values()]
    assert parts == blocks


@pytest.mark.parametrize("chunk", [(64, 128), (16, 32), (7, 11), (1, 128)], ids=str)
@pytest.mark.parametrize("max_nbytes", [1, 5_000, 1 << 20])
def test_pieces_cover_each_block_once_along_the_borders_of_chunks(tmp_path, chunk, max_nbytes):
    """Each is as large as it may be at most, or one chunk; no chunk lies in two."""
    store = opened(stored(tmp_path, {"w": numbers(64, 128)}, chunk))
    blocks = [((32 * i, 32 * i + 32), (32 * j, 32 * j + 32)) for i in range(2) for j in range(4)]
    seen = np.zeros((64, 128), int)
    chunks: set[tuple[int, ...]] = set()
    for piece in _array_reading._pieces(blocks, store, max_nbytes):
        mine: set[tuple[int, ...]] = set()
        for block, part in piece.parts.items():
            assert all(a <= c < d <= b for (a, b), (c, d) in zip(block, part, strict=True))
            (a, b), (c, d) = part
            seen[a:b, c:d] += 1
            mine |= {(i // chunk[0], j // chunk[1]) for i in range(a, b) for j in range(c, d)}
        assert piece.nbytes >= 2 * 4 * chunk[0] * chunk[1] * len(mine)
        assert piece.nbytes <= max_nbytes or len(mine) == 1
        assert not mine & chunks
        chunks |= mine
    assert (seen == 1).all()


@pytest.mark.parametrize("limit", [100, 4_096, 20_000])
def test_what_is_in_flight_is_bounded(tmp_path, mesh, monkeypatch, limit):
    """Over all arrays; a chunk that needs more is read by itself."""
    in_flight: list[int] = []
    most = [0, 0]
    fill = _array_reading._fill

    async def spy(blocks: Any, store: Any, piece: Any) -> None:
        in_flight.append(piece.nbytes)
        most[:] = max(most[0], sum(in_flight)), max(most[1], len(in_flight))
        await asyncio.sleep(0)
        await fill(blocks, store, piece)
        in_flight.remove(piece.nbytes)

    monkeypatch.setattr(_array_reading, "_fill", spy)
    # A chunk needs 512 bytes.
    store = stored(tmp_path, {f"w{i}": numbers(16, 16) + i for i in range(20)}, (4, 16))
    reads = [ArrayRead(name=f"w{i}", sharding=NamedSharding(mesh, P("d", "m"))) for i in range(20)]
    arrays = asyncio.run(read_arrays(reads, store, max_in_flight_nbytes=limit))
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(np.asarray(array), numbers(16, 16) + i)
    assert most[0] <= max(limit, 512)
    assert (most[1] == 1) == (limit < 1024)


def test_what_may_be_in_flight_is_a_share_of_what_lands():
    """And never more than `restore_concurrent_gb`, nor less than what keeps small arrays from queueing."""
    least = _array_reading._MIN_IN_FLIGHT_NBYTES
    store = ArrayStore(directory="/nowhere", use_ocdbt=False, use_zarr3=True)
    keys = ts.KvStore.open("memory://").result()
    reading = _array_reading._Reading(store, keys, ts.Context(), 10 * least, Digests(files=None))
    budget = reading._budget
    assert budget.nbytes == least
    reading._add_landing(2 * least * _array_reading._SHARE)
    assert budget.nbytes == 2 * least
    reading._add_landing(100 * least * _array_reading._SHARE)
    assert budget.nbytes == 10 * least


# Damage.


@contextlib.contextmanager
def raises_for(name: str) -> Any:
    with pytest.raises(oxe.FormatError, match=f"cannot read {name}: ") as error:
        yield
    assert error.value.problems[0].affects == (name,)


DAMAGES = ["a missing chunk", "a short chunk", "a flipped bit", "a missing array", "damaged metadata"]


@VERSIONS
@pytest.mark.parametrize("sharding", ["sharded", "uncommitted", "on the host"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_or_damaged_is_an_error(tmp_path, mesh, known, damage, sharding, use_zarr3):
    """By the name of the array, and never zeros."""
    store = stored(tmp_path, {"w": numbers(16, 16)}, (8, 8), use_zarr3=use_zarr3)
    chunk, metadata = tmp_path / "w" / store.chunk_key((1, 0)), tmp_path / "w" / store.metadata_file
    data = chunk.read_bytes()
    match damage:
        case "a missing chunk":
            chunk.unlink()
        case "a short chunk":
            # By one byte TensorStore's driver reads in Zarr 2: a checksum that is cut off is not looked at.
            chunk.write_bytes(data[: -len(data) // 4])
        case "a flipped bit":
            chunk.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        case "a missing array":
            metadata.unlink()
        case "damaged metadata":
            metadata.write_bytes(metadata.read_bytes()[:-1])
    where = {
        "sharded": NamedSharding(mesh, P("d", "m")),
        "uncommitted": UncommittedSharding(jax.devices()[0]),
        "on the host": None,
    }
    with raises_for("w"):
        read(store, where[sharding], known=known(numbers(16, 16)), max_in_flight_nbytes=1)


@VERSIONS
def test_a_chunk_that_orbax_left_out_is_zeros(tmp_path, known, use_zarr3):
    """Before 0.5 it did so where a chunk was all zeros. Nothing else that is missing is."""
    store = stored(tmp_path, {"w": numbers(4, 4)}, (2, 4), use_zarr3=use_zarr3, fills_missing=True)
    (tmp_path / "w" / store.chunk_key((1, 0))).unlink()
    expected = numbers(4, 4)
    expected[2:] = 0
    np.testing.assert_array_equal(read(store, None, known=known(expected)), expected)
    (tmp_path / "w" / store.metadata_file).unlink()
    with raises_for("w"):
        read(store, None, known=known(expected))


def test_all_that_is_wrong_with_small_arrays_is_listed(tmp_path):
    """By what is wrong with each: one error for all that are read together."""
    store = stored(tmp_path, {name: numbers(4) for name in "abcde"}, (2,))
    (tmp_path / "b" / "c" / "0").unlink()
    (tmp_path / "c" / "zarr.json").unlink()
    (tmp_path / "d" / "c" / "1").write_bytes(b"no gzip")
    reads = [ArrayRead(name=name, sharding=None, known=known_of(numbers(4))) for name in "abcde"]
    reads.append(ArrayRead(name="e", sharding=None, known=known_of(numbers(5))))
    with pytest.raises(oxe.FormatError) as error:
        asyncio.run(read_arrays(reads, store))
    assert {problem.affects: problem.could_not.split(": ")[1] for problem in error.value.problems} == {
        ("b",): "its chunk c/0 is missing",
        ("c",): "its Zarr metadata are missing",
        ("d",): "its chunk c/1 is damaged",
        ("e",): "what is stored is float32(4,)",
    }


@pytest.mark.parametrize("known", [known_of(numbers(4)), None], ids=["as keys", "by the driver"])
def test_a_store_that_cannot_be_opened_is_an_error(tmp_path, known):
    """Or has nothing in it: by the name of the array, where it is one."""
    store = ArrayStore(directory=str(tmp_path), use_ocdbt=True, use_zarr3=False)
    with raises_for("w"):
        read(store, None, known=known)


@pytest.mark.parametrize("gone", ["zarr.json", "c/1/0"], ids=["an array", "a chunk"])
def test_one_failure_ends_the_other_reads(tmp_path, mesh, monkeypatch, gone):
    """What is raised is the failure, by itself, and what has not started by then is not read."""
    monkeypatch.setattr(_array_reading, "_OPEN_ARRAYS", 2)
    filled = []
    fill = _array_reading._fill

    async def spy(blocks: Any, store: Any, piece: Any) -> None:
        filled.append(piece)
        await fill(blocks, store, piece)

    monkeypatch.setattr(_array_reading, "_fill", spy)
    store = stored(tmp_path, {f"w{i}": numbers(16, 16) for i in range(10)}, (4, 4))
    reads = [ArrayRead(name=f"w{i}", sharding=NamedSharding(mesh, P("d", "m"))) for i in range(10)]
    (tmp_path / "w3" / gone).unlink()
    with raises_for("w3"):
        asyncio.run(read_arrays(reads, store, max_in_flight_nbytes=1))
    assert len(filled) < 6 * 16  # of 10 arrays of 16 chunks


# Through Orbax.


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
def test_stocks_reader_is_not_needed(tmp_path, mesh, monkeypatch, use_ocdbt, use_zarr3):
    """For any array of a tree that is restored as it was."""
    state = {
        "w": place(mesh, matrix(), P("d", "m")),
        "half": place(mesh, matrix().astype(jnp.bfloat16), P("m")),
        "host": jax.device_put(matrix(), NamedSharding(mesh, P("d"), memory_kind="pinned_host")),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, P("d"))),
        "key": jax.random.key(2, impl="rbg"),
        "step": jnp.int32(3),
        "empty": place(mesh, jnp.zeros((0, 8)), P()),
        "numpy": matrix(),
    }

    async def stocks(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("stock's handler was asked to read")

    monkeypatch.setattr(ocp.type_handlers.ArrayHandler, "deserialize", stocks)
    monkeypatch.setattr(ocp.type_handlers.NumpyHandler, "deserialize", stocks)
    with oxe.StandardCheckpointer(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3) as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "a")
    assert_same_tree(restored, state)
    assert not restored["step"].committed
    assert not restored["key"].committed


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
@pytest.mark.parametrize("chunk", ["w/1.2", "n/0.0"], ids=["of a jax.Array", "of a NumPy array"])
def test_a_chunk_that_is_gone_is_missed(tmp_path, mesh, monkeypatch, chunk, use_ocdbt):
    """Through the handler too, which knows whether data may be missing."""
    monkeypatch.setattr(_array_shares, "ONE_CHUNK_NBYTES", 0)
    state = {"w": place(mesh, matrix(), P("d", "m")), "n": matrix()}
    with oxe.StandardCheckpointer(use_ocdbt=use_ocdbt) as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        base = {"driver": "file", "path": f"{tmp_path / 'a'}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base} if use_ocdbt else base).result()
        assert chunk.encode() in store.list().result()
        store.delete_range(ts.KvStore.KeyRange(chunk, chunk + "\0")).result()
        with raises_for(chunk[0]):
            checkpointer.restore(tmp_path / "a")
