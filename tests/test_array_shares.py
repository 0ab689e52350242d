"""`_array_shares`: what of each array is written by whom, and that the elements are those of the call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from stored_arrays import numbers
from trees import place

from orbax_explicit import _array_shares
from orbax_explicit._array_shares import StoredArray, share_arrays, share_host_arrays
from orbax_explicit._array_writing import ArrayWrite
from orbax_explicit._boxes import box_size, chunks_of, intersect, slices_within, whole_box
from orbax_explicit._chunking import MAX_CHUNK_NBYTES, ONE_CHUNK_NBYTES
from orbax_explicit._small_arrays import SMALL_NBYTES

LARGE = (1024, 128)  # of 512 KiB as float32: more than is one chunk, or copied
assert math.prod(LARGE) * 4 > max(ONE_CHUNK_NBYTES, SMALL_NBYTES)


def share(value: jax.Array, primary: int | None = 0, **options: Any) -> tuple[StoredArray, ArrayWrite | None]:
    """How one array is stored, and what this process writes of it."""
    (stored,), writes = share_arrays([value], ["w"], [ocp.SaveArgs(**options)], primary)
    return stored, writes[0] if writes else None


def check(value: jax.Array, write: ArrayWrite | None) -> None:
    """What is written is all of an array: each element once, and each in its place."""
    assert write is not None
    expected = np.asarray(value)
    assert write.shape == expected.shape
    seen = np.zeros(expected.shape, int)
    for block, elements in write.blocks.items():
        index = slices_within(block, whole_box(expected.shape))
        np.testing.assert_array_equal(elements, expected[index])
        assert elements.dtype == expected.dtype
        seen[index] += 1
    assert (seen == 1).all()
    chunks = [place for block in write.blocks for place, _ in chunks_of(block, write.chunk)]
    assert len(set(chunks)) == len(chunks)


def reversed_mesh() -> jax.sharding.Mesh:
    """The devices in an order of their own: positions of shards are not ids of devices."""
    return jax.sharding.Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("d", "m"))


def shuffled_mesh() -> jax.sharding.Mesh:
    devices = [jax.devices()[i] for i in (3, 0, 6, 1, 7, 2, 5, 4)]
    return jax.sharding.Mesh(np.array(devices).reshape(2, 4), ("d", "m"))


MESHES = pytest.mark.parametrize(
    "make_mesh",
    [
        pytest.param(lambda: jax.make_mesh((2, 4), ("d", "m")), id="devices in order"),
        pytest.param(reversed_mesh, id="devices in reverse"),
        pytest.param(shuffled_mesh, id="devices in any order"),
    ],
)


@MESHES
@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        pytest.param(P("d", "m"), 8, id="sharded over all devices"),
        pytest.param(P("m", "d"), 8, id="the other way round"),
        pytest.param(P(("d", "m")), 8, id="along one dimension"),
        pytest.param(P(None, "m"), 4, id="partly replicated"),
        pytest.param(P("d"), 2, id="replicated fourfold"),
        pytest.param(P(), 1, id="replicated"),
    ],
)
@pytest.mark.parametrize("primary", [0, None], ids=["one storage", "a storage each"])
def test_each_distinct_block_is_written_once(make_mesh, spec, blocks, primary) -> None:
    """With the values that are at its place, whatever the order of the devices."""
    mesh = make_mesh()
    value = place(mesh, numbers(*LARGE), spec)
    stored, write = share(value, primary)
    check(value, write)
    assert write is not None
    assert len(write.blocks) == blocks
    assert stored == StoredArray(
        name="w", shape=LARGE, dtype="float32", chunk=value.sharding.shard_shape(LARGE), prng_impl=None
    )
    assert (write.name, write.shape, write.dtype, write.chunk) == ("w", LARGE, "float32", stored.chunk)


@MESHES
@pytest.mark.parametrize("spec", [P("d", "m"), P(None, "m"), P()], ids=str)
def test_a_small_array_is_one_chunk(make_mesh, spec) -> None:
    """Put together of its blocks; a chunk for each would cost more than it saves."""
    value = place(make_mesh(), numbers(8, 8), spec)
    stored, write = share(value)
    check(value, write)
    assert write is not None
    assert list(write.blocks) == [((0, 8), (0, 8))]
    assert stored.chunk == (8, 8)


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [
        pytest.param(ONE_CHUNK_NBYTES // 16, 1, id="as many bytes as one chunk may have"),
        pytest.param(ONE_CHUNK_NBYTES // 16 + 8, 8, id="more"),
    ],
)
def test_how_large_an_array_may_be_to_be_one_chunk(mesh, rows, blocks) -> None:
    """By its bytes."""
    value = place(mesh, numbers(rows, 4), P(("d", "m")))
    _, write = share(value)
    check(value, write)
    assert write is not None
    assert len(write.blocks) == blocks


@pytest.mark.parametrize(
    ("make", "value"),
    [
        pytest.param(lambda: jnp.float32(7), 7.0, id="a scalar"),
        pytest.param(lambda: jnp.arange(6), np.arange(6, dtype=np.int32), id="a vector"),
        pytest.param(lambda: jax.device_put(jnp.ones((2, 3)), jax.devices()[5]), np.ones((2, 3)), id="on one device"),
        pytest.param(
            lambda: jax.device_put(numbers(*LARGE), SingleDeviceSharding(jax.devices()[6])),
            numbers(*LARGE),
            id="a large one on one device",
        ),
        pytest.param(lambda: jnp.asarray(numbers(*LARGE)), numbers(*LARGE), id="a large one on none"),
    ],
)
def test_an_array_on_one_device_is_one_block(make, value) -> None:
    """Committed to it or not."""
    array = make()
    _, write = share(array)
    check(array, write)
    assert write is not None
    assert list(write.blocks) == [whole_box(array.shape)]
    np.testing.assert_array_equal(write.blocks[whole_box(array.shape)], value)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)], ids=str)
def test_an_array_of_size_zero_has_metadata_alone(mesh, shape) -> None:
    """The primary process writes them; each does where every process has a storage."""
    value = place(mesh, np.zeros(shape, np.int8), P())
    for primary in (0, None):
        stored, write = share(value, primary)
        assert stored.chunk == tuple(max(1, n) for n in shape)
        assert write is not None
        assert (write.shape, write.dtype, dict(write.blocks), write.nbytes) == (shape, "int8", {}, 0)
    stored, write = share(value, primary=1)
    assert stored.shape == shape
    assert write is None


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("count", [(), (8,), (8, 4096)], ids=["one key", "a few keys", "many keys"])
def test_keys_are_stored_as_their_data(mesh, impl, count) -> None:
    """With the dimension of the data, and the implementation beside it."""
    keys = jax.random.split(jax.random.key(3, impl=impl), count) if count else jax.random.key(3, impl=impl)
    spec = P(("d", "m")) if count else P()
    keys = jax.device_put(keys, NamedSharding(mesh, spec))
    data = jax.random.key_data(keys)
    stored, write = share(keys)
    check(data, write)
    assert (stored.shape, stored.dtype, stored.prng_impl) == (data.shape, "uint32", impl)


def test_keys_of_size_zero_have_an_implementation() -> None:
    """Though there is no key."""
    stored, write = share(jax.random.split(jax.random.key(0, impl="rbg"), 0))
    assert stored == StoredArray(name="w", shape=(0, 4), dtype="uint32", chunk=(1, 4), prng_impl="rbg")
    assert write is not None
    assert not write.blocks


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("shape", [(8, 8), LARGE], ids=["small", "large"])
def test_elements_come_from_any_kind_of_memory(mesh, kind, shape) -> None:
    """Also out of the host's."""
    value = place(mesh, numbers(*shape), P("d", "m"), memory_kind=kind)
    check(value, share(value)[1])


@pytest.mark.parametrize("dtype", ["bool", "int4", "int8", "bfloat16", "float8_e4m3fn", "complex64", "uint32"])
@pytest.mark.parametrize("spec", [P("d", "m"), P()], ids=str)
def test_elements_keep_their_dtype(mesh, dtype, spec) -> None:
    """They are cast when they are stored."""
    value = place(mesh, (numbers(8, 8) % 5).astype(jnp.dtype(dtype)), spec)
    stored, write = share(value)
    check(value, write)
    assert stored.dtype == dtype


@pytest.mark.parametrize(
    ("options", "dtype", "chunk"),
    [
        pytest.param({}, "float32", (512, 32), id="nothing"),
        pytest.param({"dtype": np.dtype(jnp.bfloat16)}, "bfloat16", (512, 32), id="a dtype"),
        pytest.param({"chunk_byte_size": 1024}, "float32", (16, 16), id="bytes of a chunk"),
        pytest.param({"chunk_byte_size": 1024, "dtype": np.dtype(np.int8)}, "int8", (32, 32), id="of the stored dtype"),
        pytest.param({"chunk_byte_size": 1024, "shard_axes": (0,)}, "float32", (8, 32), id="a dimension to cut"),
    ],
)
def test_save_arguments_are_followed(mesh, options, dtype, chunk) -> None:
    """The elements themselves are those of the array."""
    value = place(mesh, numbers(*LARGE), P("d", "m"))
    stored, write = share(value, **options)
    check(value, write)
    assert (stored.dtype, stored.chunk) == (dtype, chunk)


def test_chunks_are_bounded(mesh) -> None:
    """Those of a large array, though a shard of it is larger."""
    value = jax.device_put(jnp.zeros((256, 4, 1 << 16), jnp.int8), NamedSharding(mesh, P("d")))
    stored, _ = share(value)
    assert value.sharding.shard_shape(value.shape) == (128, 4, 1 << 16)
    assert stored.chunk == (16, 4, 1 << 16)
    assert math.prod(stored.chunk) == MAX_CHUNK_NBYTES
    assert share(value, chunk_byte_size=1 << 20)[0].chunk == (16, 4, 1 << 14)


# Several arrays, several processes.


def test_arrays_are_stored_in_the_order_of_their_names(mesh) -> None:
    """Those of which this process writes nothing are stored too."""
    values = [jnp.arange(3), place(mesh, np.zeros((0,)), P()), place(mesh, numbers(*LARGE), P("d"))]
    stored, writes = share_arrays(values, ["a", "b", "c"], [ocp.SaveArgs()] * 3, 1)
    assert [array.name for array in stored] == ["a", "b", "c"]
    assert [write.name for write in writes] == ["a", "c"]
    assert share_arrays([], [], [], 0) == ([], [])


def devices_asked(monkeypatch: pytest.MonkeyPatch, values: list[jax.Array]) -> list[int]:
    """The ids of the devices whose shards are taken, in order."""
    asked: list[int] = []
    layout = _array_shares._layout

    def start_copy(shard: jax.Array) -> int:
        asked.append(next(iter(shard.devices())).id)
        return asked[-1]

    def elsewhere(*args: Any) -> Any:
        return dataclasses.replace(layout(*args), is_on_host=False)

    monkeypatch.setattr(_array_shares, "_layout", elsewhere)
    monkeypatch.setattr(_array_shares, "_start_copy", start_copy)
    _, writes = share_arrays(values, [str(i) for i in range(len(values))], [ocp.SaveArgs()] * len(values), 0)
    for value, write in zip(values, writes, strict=True):
        check(value, write)
    return asked


def test_replicas_are_asked_in_turn(mesh, monkeypatch) -> None:
    """So that on accelerators no one device copies everything to the host."""
    values = [place(mesh, numbers(8, 8) + i, P("d")) for i in range(8)]
    assert sorted(devices_asked(monkeypatch, values)) == sorted(2 * [device.id for device in jax.devices()])


def test_a_device_that_was_asked_for_much_is_asked_last(mesh, monkeypatch) -> None:
    """Where all is replicated it is always the first one, which then is left alone by the others."""
    values = [*(place(mesh, numbers(8, 8) + i, P()) for i in range(3)), *(place(mesh, numbers(8, 8), P("d")),) * 6]
    asked = devices_asked(monkeypatch, values)
    assert asked[:3] == [0, 0, 0]
    assert asked[3::2] == [1, 2, 3, 1, 2, 3]
    assert asked[4::2] == [4, 5, 6, 7, 4, 5]


class Device:
    """A device of some process, as little of one as is looked at."""

    def __init__(self, device_id: int, process_index: int) -> None:
        self.id = device_id
        self.process_index = process_index
        self.platform = "cpu"


class Layout:
    """A sharding of a vector over devices of several processes, by the span that each device holds."""

    def __init__(self, spans: list[tuple[Device, tuple[int, int]]]) -> None:
        self._spans = spans

    def devices_indices_map(self, shape: Any) -> dict[Device, tuple[slice, ...]]:
        return {device: (slice(*span),) for device, span in self._spans}

    def shard_shape(self, shape: Any) -> tuple[int, ...]:
        start, stop = self._spans[0][1]
        return (stop - start,)


def layout(*processes: int, parts: int) -> Layout:
    """Devices of these processes, that hold the parts of a vector of 12 in turn."""
    n = 12 // parts
    spans = [(n * (i % parts), n * (i % parts) + n) for i in range(len(processes))]
    return Layout([(Device(i, process), span) for i, (process, span) in enumerate(zip(processes, spans, strict=True))])


@pytest.mark.parametrize(
    ("where", "reach", "expected"),
    [
        pytest.param(
            layout(0, 0, 1, 1, parts=4),
            ("shared", 0),
            [((0, 3), (0,), [0]), ((3, 6), (0,), [1]), ((6, 9), (1,), []), ((9, 12), (1,), [])],
            id="a part on each device",
        ),
        pytest.param(
            layout(1, 1, 0, 0, parts=4),
            ("shared", 0),
            [((0, 3), (1,), []), ((3, 6), (1,), []), ((6, 9), (0,), [0]), ((9, 12), (0,), [1])],
            id="this process comes second",
        ),
        pytest.param(
            layout(1, 0, 1, 0, parts=2),
            ("shared", 0),
            [((0, 6), (1,), []), ((6, 12), (0,), [0, 1])],
            id="replicas within a process",
        ),
        pytest.param(
            layout(1, 1, 0, 0, parts=2),
            ("shared", 0),
            [((0, 6), (0, 1), [0]), ((6, 12), (0, 1), [1])],
            id="replicas on another process",
        ),
        pytest.param(
            layout(0, 0, 1, 1, parts=4),
            ("own", 0),
            [((0, 3), (0,), [0]), ((3, 6), (0,), [1])],
            id="a storage of its own",
        ),
        pytest.param(layout(0, parts=1), ("primary", 1), [((0, 12), (1,), [0])], id="local to each process"),
    ],
)
def test_who_holds_each_block_and_where_it_is_here(where, reach, expected) -> None:
    """Holders are processes; sources are positions among this one's shards."""
    found = _array_shares._layout(where, (12,), *reach).blocks.values()
    assert [(block.box[0], block.holders, [position for position, _ in block.sources]) for block in found] == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from((1, 2, 3, 4)))
def test_every_process_comes_to_the_same_division(processes, parts) -> None:
    """Each block is written by exactly one process, which holds it, whoever asks."""
    if len(processes) < parts:
        processes = [*processes, *[0] * (parts - len(processes))]
    where = layout(*processes, parts=parts)
    blocks = _array_shares._layout(where, (12,), "shared", 0).blocks.values()
    assert sum(box_size(block.box) for block in blocks) == 12
    assert not any(
        box_size(intersect(one.box, other.box)) for one in blocks for other in blocks if one.box != other.box
    )
    for block in blocks:
        holding = {device.process_index for device, span in where._spans if span == block.box[0]}
        assert set(block.holders) == holding
        assert bool(block.sources) == (0 in holding)


# The elements are those of the call.


def donate(value: jax.Array) -> None:
    """Gives the memory of an array to a computation that writes to it. JAX copies what somebody looks at."""
    jax.block_until_ready(jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(value))


@pytest.mark.parametrize("take", [donate, lambda value: value.delete()], ids=["donated", "deleted"])
@pytest.mark.parametrize("spec", [P("d", "m"), P("d"), P()], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), LARGE], ids=["small", "large"])
def test_what_was_taken_stays_when_the_array_goes(mesh, shape, spec, take) -> None:
    """Training goes on while a save writes: a step donates the state, and what it makes of it is not what is saved."""
    for _ in range(3):
        value = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, spec))(numbers(*shape))
        _, write = share(value)
        take(value)
        del value
        # Whatever memory is free now is written to.
        others = [jax.block_until_ready(place(mesh, numbers(*shape) - 7 * i, spec) * 3) for i in range(3)]
        assert write is not None
        for block, elements in write.blocks.items():
            np.testing.assert_array_equal(elements, numbers(*shape)[slices_within(block, whole_box(shape))] + 1)
        del others


def test_large_blocks_are_looked_at_and_small_ones_copied(mesh) -> None:
    """On CPU devices: a copy of a large state would take as much memory again."""
    for shape, is_copied in (((8, 8), True), (LARGE, False)):
        value = place(mesh, numbers(*shape), P())
        _, write = share(value)
        assert write is not None
        (elements,) = write.blocks.values()
        memory = {shard.data.unsafe_buffer_pointer() for shard in value.addressable_shards}
        assert (elements.ctypes.data not in memory) == is_copied
        assert elements.flags.owndata == is_copied


def test_small_blocks_do_not_keep_a_donation_from_their_memory() -> None:
    """A look would: the step after a save would need memory for the state twice."""
    value = jax.block_until_ready(jnp.asarray(numbers(8, 8)) + 1)
    before = value.unsafe_buffer_pointer()
    _, write = share(value)
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(value)
    assert after.unsafe_buffer_pointer() == before
    assert write is not None
    np.testing.assert_array_equal(write.blocks[((0, 8), (0, 8))], numbers(8, 8) + 1)


# Values on the host.


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        pytest.param(numbers(3, 4), "float32", id="a matrix"),
        pytest.param(np.asarray(7), "int64", id="a number"),
        pytest.param(numbers(3, 4)[::2, ::-1], "float32", id="a look with steps"),
        pytest.param(np.asfortranarray(numbers(3, 4)), "float32", id="the first dimension fastest"),
        pytest.param(np.arange(3, dtype=">i4"), "int32", id="the highest byte first"),
        pytest.param(np.arange(3, dtype="<f8"), "float64", id="the lowest byte first"),
        pytest.param(numbers(4, dtype=jnp.bfloat16), "bfloat16", id="a dtype that NumPy has not"),
        pytest.param(np.array([True, False]), "bool", id="truth values"),
    ],
)
def test_a_value_on_the_host_is_one_block(value, dtype) -> None:
    """A copy of its own, with the bytes in the order of the machine."""
    (write,) = share_host_arrays([value], ["n"], [ocp.SaveArgs()])
    assert (write.name, write.shape, write.dtype, write.chunk) == ("n", value.shape, dtype, value.shape)
    ((box, elements),) = write.blocks.items()
    assert box == whole_box(value.shape)
    assert elements.dtype.isnative
    np.testing.assert_array_equal(elements, value)
    assert not np.shares_memory(elements, value)


def test_a_value_on_the_host_may_be_changed_while_it_is_written() -> None:
    """A copy was taken."""
    value = numbers(*LARGE)
    (write,) = share_host_arrays([value], ["n"], [ocp.SaveArgs()])
    value[:] = -1
    np.testing.assert_array_equal(write.blocks[whole_box(LARGE)], numbers(*LARGE))


def test_values_on_the_host_follow_save_arguments() -> None:
    """And of size zero there is nothing to write but the metadata."""
    values = [numbers(64, 8), np.zeros((0, 3)), numbers(2)]
    args = [ocp.SaveArgs(chunk_byte_size=256), ocp.SaveArgs(), ocp.SaveArgs(dtype=np.dtype(np.int8))]
    writes = share_host_arrays(values, ["a", "b", "c"], args)
    assert [write.chunk for write in writes] == [(8, 8), (1, 3), (2,)]
    assert [write.dtype for write in writes] == ["float32", "float64", "int8"]
    assert [len(write.blocks) for write in writes] == [1, 0, 1]
