"""`_array_reading`: what is read, how often, into which memory, and how much of it at a time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pathlib
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_explicit as oxe
from orbax_explicit import _array_reading
from orbax_explicit._array_reading import ArrayRead, read_arrays
from orbax_explicit._binding import UncommittedSharding
from tests.trees import assert_same_tree, matrix, place


def stored(path: pathlib.Path, values: Any, chunk: tuple[int, ...], driver: str = "zarr3") -> dict[str, Any]:
    """Writes an array in chunks of a shape; gives the spec to read it with, in which missing chunks are errors."""
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}
    layout = {"read_chunk": {"shape": list(chunk)}, "write_chunk": {"shape": list(chunk)}}
    schema = {"dtype": values.dtype.name, "domain": {"shape": list(values.shape)}, "chunk_layout": layout}
    store = ts.open({**spec, "schema": schema, "store_data_equal_to_fill_value": True}, create=True).result()
    store.write(values).result()
    return {**spec, "fill_missing_data_reads": False}


def read(spec: dict[str, Any], sharding: Any, **options: Any) -> Any:
    """Reads one array."""
    limit = options.pop("max_in_flight_nbytes", None)
    array = ArrayRead(name="w", spec=spec, context=None, sharding=sharding, **options)
    (result,) = asyncio.run(read_arrays([array], max_in_flight_nbytes=limit))
    return result


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def pointers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.fixture(params=[False, True], ids=["devices that share memory with the host", "devices that do not"])
def either_way(request, monkeypatch):
    """As on CPUs, and as on accelerators, where a block is copied to its devices as soon as it is there."""
    if request.param:
        monkeypatch.setattr(_array_reading, "_is_copied_to", lambda device: True)


# Values, shardings and memory.


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("spec", [P("d", "m"), P(("d", "m")), P(None, "m"), P("m"), P()], ids=str)
@pytest.mark.parametrize("chunk", [(16, 8), (4, 3), (1, 8), (16, 1)], ids=lambda chunk: f"chunks of {chunk}")
def test_an_array_lands_with_its_values_on_its_sharding(tmp_path, mesh, chunk, spec, kind):
    """However its chunks and its blocks lie to each other, and however little is read at a time."""
    values = numbers(16, 8)
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    array = read(stored(tmp_path, values, chunk), sharding, max_in_flight_nbytes=256)
    np.testing.assert_array_equal(np.asarray(array), values)
    assert array.sharding == sharding
    assert array.sharding.memory_kind == kind
    assert array.committed
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (8, 0)], ids=str)
@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_a_scalar_and_an_array_of_size_zero(tmp_path, mesh, driver, shape):
    """They have one chunk, and none."""
    values = np.full(shape, 7, np.int32)
    spec = stored(tmp_path, values, tuple(max(1, n) for n in shape), driver)
    for sharding in (NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[3])):
        array = read(spec, sharding)
        np.testing.assert_array_equal(np.asarray(array), values)
        assert (array.sharding, array.dtype) == (sharding, np.int32)
    assert read(spec, None).shape == shape


@pytest.mark.usefixtures("either_way")
def test_an_uncommitted_array_stays_uncommitted(tmp_path, mesh):
    """Under `jax.set_mesh` too."""
    spec = stored(tmp_path, numbers(4), (4,))
    with jax.set_mesh(mesh):
        array = read(spec, UncommittedSharding(jax.devices()[0]))
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
def test_elements_are_cast_while_they_are_read(tmp_path, mesh, stored_dtype, asked, got):
    """The buffer is of the final dtype: nothing of the array's size is made for another one."""
    values = (numbers(8, 8) % 5).astype(jnp.dtype(stored_dtype))
    array = read(stored(tmp_path, values, (3, 8)), NamedSharding(mesh, P("d", "m")), dtype=asked)
    assert array.dtype == jnp.dtype(got)
    np.testing.assert_array_equal(np.asarray(array), values.astype(jnp.dtype(got)))


def test_on_the_host_dtypes_are_numpys(tmp_path):
    """64 bits come back as 64 bits, and the array is the caller's to write to."""
    array = read(stored(tmp_path, numbers(6, 4, dtype=np.float64), (2, 2)), None, max_in_flight_nbytes=64)
    assert type(array) is np.ndarray
    assert array.flags.writeable
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, numbers(6, 4))


@pytest.fixture
def buffers(monkeypatch):
    """The memory that is read into."""
    made: list[np.ndarray[Any, Any]] = []
    aligned = _array_reading._aligned

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(aligned(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(_array_reading, "_aligned", spy)
    return made


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_replicas_share_the_memory_that_was_read_into(tmp_path, mesh, buffers, kind):
    """On CPU devices: JAX takes the buffers over, one for each distinct block."""
    sharding = NamedSharding(mesh, P(None, "m"), memory_kind=kind)
    array = read(stored(tmp_path, numbers(8, 64), (8, 64)), sharding)
    assert len(buffers) == 4
    assert pointers(array) == {buffer.ctypes.data for buffer in buffers}


@pytest.mark.parametrize("spec", [P(), P("d"), P("d", "m")], ids=str)
def test_what_was_read_may_be_donated(tmp_path, mesh, buffers, spec):
    """JAX writes to no buffer that it took over, which replicas may share: it copies what is donated."""
    array = read(stored(tmp_path, numbers(8, 64), (8, 64)), NamedSharding(mesh, spec))
    before = [buffer.copy() for buffer in buffers]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(3):
        donated, array = array, add(array)
        assert donated.is_deleted()
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), numbers(8, 64)[shard.index] + 3)
    assert not pointers(array) & {buffer.ctypes.data for buffer in buffers}
    for buffer, values in zip(buffers, before, strict=True):
        np.testing.assert_array_equal(buffer, values)


def test_memory_that_was_read_into_goes_with_the_array(tmp_path, mesh, buffers):
    """Nothing else holds it: donated, or deleted, an array gives it back."""
    spec = stored(tmp_path, numbers(8, 64), (8, 64))
    for let_go in (jax.jit(lambda x: x + 1, donate_argnums=0), lambda x: x.delete()):
        array = read(spec, NamedSharding(mesh, P("d", "m")))
        memories = [weakref.ref(buffer.base) for buffer in buffers]
        assert len(memories) == 8
        buffers.clear()
        gc.collect()
        assert all(memory() is not None for memory in memories)
        jax.block_until_ready(let_go(array))
        gc.collect()
        assert all(memory() is None for memory in memories)


def test_a_donated_shard_takes_nothing_from_its_replicas(tmp_path, mesh):
    """Each is an array of its own to JAX, though they share memory."""
    array = read(stored(tmp_path, numbers(8, 64), (8, 64)), NamedSharding(mesh, P()))
    first, *others = (shard.data for shard in array.addressable_shards)
    jax.jit(lambda x: x * 0, donate_argnums=0)(first).block_until_ready()
    for other in others:
        np.testing.assert_array_equal(np.asarray(other), numbers(8, 64))


# Shapes.


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(4, 8), (16, 8), (8, 12), (16, 4), (24, 24)], ids=str)
@pytest.mark.parametrize("spec", [P("d", "m"), P()], ids=str)
def test_without_strictness_an_array_is_cut_off_or_padded(tmp_path, mesh, spec, shape):
    """With zeros, at the end of each dimension, as in Orbax; also where whole blocks are of them."""
    values = numbers(8, 8) + 1
    array = read(stored(tmp_path, values, (3, 3)), NamedSharding(mesh, spec), shape=shape, strict=False)
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
def test_another_shape_is_an_error(tmp_path, mesh, shape, strict):
    """That says both shapes."""
    with pytest.raises(oxe.FormatError, match="is not compatible with the stored shape") as error:
        read(stored(tmp_path, numbers(8, 8), (8, 8)), NamedSharding(mesh, P()), shape=shape, strict=strict)
    assert str(shape) in str(error.value)
    assert "(8, 8)" in str(error.value)


# Reading once, and a bounded part at a time.


def file_nbytes_read() -> int:
    """Bytes that TensorStore has read of files, in this process."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
    return sum(v["value"] for m in metrics if m["name"].endswith("/bytes_read") for v in m["values"])


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("limit", [None, 1 << 14], ids=["at once", "piece by piece"])
@pytest.mark.parametrize("spec", [P("d", "m"), P(None, "m"), P()], ids=str)
@pytest.mark.parametrize("chunk", [(64, 128), (32, 32), (64, 32), (10, 50)], ids=lambda c: f"chunks of {c}")
def test_each_chunk_is_read_once(tmp_path, mesh, chunk, spec, limit, driver):
    """By one process, however many replicas there are, and however many blocks lie in the chunk."""
    stored_spec = stored(tmp_path, numbers(64, 128), chunk, driver)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    before = file_nbytes_read()
    array = read(stored_spec, NamedSharding(mesh, spec), max_in_flight_nbytes=limit)
    np.testing.assert_array_equal(np.asarray(array), numbers(64, 128))
    assert file_nbytes_read() - before == sum(file.stat().st_size for file in files)


def test_only_the_chunks_of_ones_own_blocks_are_read(tmp_path):
    """As in a process that holds a part of the array."""
    stored_spec = stored(tmp_path, numbers(64, 128), (16, 128))
    blocks = [((0, 16), (0, 128)), ((48, 64), (0, 128))]
    store = ts.open(stored_spec, open=True).result()
    parts = [part for piece in _array_reading._pieces(blocks, store, 1) for part in piece.parts.values()]
    assert parts == blocks


@pytest.mark.parametrize("chunk", [(64, 128), (16, 32), (7, 11), (1, 128)], ids=str)
@pytest.mark.parametrize("max_nbytes", [1, 5_000, 1 << 20])
def test_pieces_cover_each_block_once_along_the_borders_of_chunks(tmp_path, chunk, max_nbytes):
    """Each is as large as it may be at most, or one chunk; no chunk lies in two."""
    store = ts.open(stored(tmp_path, numbers(64, 128), chunk), open=True).result()
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
    reads = [
        ArrayRead(
            name=f"w{i}",
            spec=stored(tmp_path / str(i), numbers(16, 16) + i, (4, 16)),  # a chunk needs 512 bytes
            context=None,
            sharding=NamedSharding(mesh, P("d", "m")),
        )
        for i in range(20)
    ]
    arrays = asyncio.run(read_arrays(reads, max_in_flight_nbytes=limit))
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(np.asarray(array), numbers(16, 16) + i)
    assert most[0] <= max(limit, 512)
    assert (most[1] == 1) == (limit < 1024)


def test_what_may_be_in_flight_is_a_share_of_what_lands():
    """And never more than `restore_concurrent_gb`, nor less than what keeps small arrays from queueing."""
    least = _array_reading._MIN_IN_FLIGHT_NBYTES
    budget = _array_reading._Budget(10 * least)
    assert budget.nbytes == least
    budget.add_landing(2 * least * _array_reading._SHARE)
    assert budget.nbytes == 2 * least
    budget.add_landing(100 * least * _array_reading._SHARE)
    assert budget.nbytes == 10 * least


def test_what_waits_is_served_in_order():
    """A large request is not passed by small ones for ever; one that gives up leaves the queue."""

    async def run() -> list[str]:
        budget = _array_reading._Budget(10)
        served: list[str] = []

        async def request(name: str, nbytes: int) -> None:
            async with budget.reserved(nbytes):
                served.append(name)
                await asyncio.sleep(0.01)

        first, gives_up, *rest = [
            asyncio.ensure_future(request(name, nbytes))
            for name, nbytes in (("a", 6), ("gives up", 10), ("large", 100), ("b", 5), ("c", 5))
        ]
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.gather(first, *rest)
        assert budget._in_flight_nbytes == 0
        return served

    assert asyncio.run(run()) == ["a", "large", "b", "c"]


def test_a_block_leaves_the_host_when_its_devices_have_it(tmp_path, mesh, monkeypatch):
    """On accelerators: it does not wait there for the rest of its array."""
    monkeypatch.setattr(_array_reading, "_is_copied_to", lambda device: True)
    held = []
    finish = _array_reading._Blocks.finish

    async def spy(self: Any, piece: Any) -> None:
        await finish(self, piece)
        held.append(len(self._buffers))

    monkeypatch.setattr(_array_reading._Blocks, "finish", spy)
    read(stored(tmp_path, numbers(64, 128), (8, 128)), NamedSharding(mesh, P(("d", "m"))), max_in_flight_nbytes=1)
    assert held == [0] * 8


# Damage.


@contextlib.contextmanager
def raises_for(name: str) -> Any:
    with pytest.raises(oxe.FormatError, match=f"cannot read {name}: ") as error:
        yield
    assert error.value.problems[0].affects == (name,)


@pytest.mark.parametrize("sharding", ["sharded", "uncommitted", "on the host"])
@pytest.mark.parametrize("damage", ["a missing chunk", "a short chunk", "a missing array"])
def test_what_is_missing_or_damaged_is_an_error(tmp_path, mesh, damage, sharding):
    """By the name of the array, and never zeros."""
    spec = stored(tmp_path, numbers(16, 16), (8, 8))
    (chunk,) = (file for file in tmp_path.rglob("*") if file.is_file() and str(file).endswith("1/0"))
    if damage == "a missing chunk":
        chunk.unlink()
    elif damage == "a short chunk":
        chunk.write_bytes(chunk.read_bytes()[:-1])
    else:
        (tmp_path / "zarr.json").unlink()
    where = {
        "sharded": NamedSharding(mesh, P("d", "m")),
        "uncommitted": UncommittedSharding(jax.devices()[0]),
        "on the host": None,
    }
    with raises_for("w"):
        read(spec, where[sharding], max_in_flight_nbytes=1)


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
    reads = [
        ArrayRead(
            name=f"w{i}",
            spec=stored(tmp_path / str(i), numbers(16, 16), (4, 4)),
            context=None,
            sharding=NamedSharding(mesh, P("d", "m")),
        )
        for i in range(10)
    ]
    (tmp_path / "3" / gone).unlink()
    with raises_for("w3"):
        asyncio.run(read_arrays(reads, max_in_flight_nbytes=1))
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
def test_a_chunk_that_is_gone_is_missed(tmp_path, mesh, chunk, use_ocdbt):
    """Through the handler too, which asks Orbax whether data may be missing."""
    # Alone in its tree: when one type handler fails, Orbax closes its event loop under the others.
    state = {"w": place(mesh, matrix(), P("d", "m"))} if chunk.startswith("w") else {"n": matrix()}
    with oxe.StandardCheckpointer(use_ocdbt=use_ocdbt) as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        base = {"driver": "file", "path": f"{tmp_path / 'a'}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base} if use_ocdbt else base).result()
        assert chunk.encode() in store.list().result()
        store.delete_range(ts.KvStore.KeyRange(chunk, chunk + "\0")).result()
        with raises_for(chunk[0]):
            checkpointer.restore(tmp_path / "a")
