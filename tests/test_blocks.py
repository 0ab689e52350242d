"""`_blocks`: the memory that an array is read into, and what JAX makes of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from stored_arrays import numbers

from orbax_explicit import _blocks
from orbax_explicit._binding import UncommittedSharding
from orbax_explicit._blocks import Blocks
from orbax_explicit._boxes import Box

KINDS = pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])


def pointers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def filled(values: np.ndarray[Any, Any], sharding: Any, stored_shape: Any = None) -> Blocks:
    """Blocks of an array, with its values in them."""
    stored_shape = values.shape if stored_shape is None else stored_shape
    blocks = Blocks(values.shape, values.dtype, sharding, stored_shape)
    for block in blocks.devices:
        covered = tuple(slice(a, min(b, n)) for (a, b), n in zip(block, stored_shape, strict=True))
        part = values[covered]
        blocks.buffer(block)[tuple(slice(n) for n in part.shape)] = part
    return blocks


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """The memory that is read into."""
    made: list[np.ndarray[Any, Any]] = []
    aligned = _blocks._aligned

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(aligned(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(_blocks, "_aligned", spy)
    return made


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices whose memory is elsewhere than the host's."""
    monkeypatch.setattr(_blocks, "_is_copied_to", lambda device: True)


@pytest.mark.parametrize(
    ("spec", "count", "replicas"),
    [
        pytest.param(P("d", "m"), 8, 1, id="sharded over all devices"),
        pytest.param(P(None, "m"), 4, 2, id="replicated over an axis"),
        pytest.param(P(), 1, 8, id="replicated"),
    ],
)
def test_each_distinct_block_has_memory_once(mesh, spec, count, replicas) -> None:
    """Whatever the number of devices that hold it; its bytes are counted once, too."""
    blocks = Blocks((8, 64), np.dtype(np.int16), NamedSharding(mesh, spec), (8, 64))
    assert len(blocks.devices) == count
    assert {len(devices) for devices in blocks.devices.values()} == {replicas}
    assert {device for devices in blocks.devices.values() for device in devices} == set(jax.devices())
    assert blocks.nbytes == count * (8 * 64 * 2 // count)
    for block in blocks.devices:
        assert blocks.buffer(block) is blocks.buffer(block)


@pytest.mark.parametrize("sharding", [None, "uncommitted"])
def test_without_a_layout_there_is_one_block_of_no_device(sharding) -> None:
    """On the host, and where JAX may move the array."""
    where = UncommittedSharding(jax.devices()[5]) if sharding else None
    blocks = filled(numbers(3, 4), where)
    assert blocks.devices == {((0, 3), (0, 4)): ()}
    result = blocks.result()
    np.testing.assert_array_equal(np.asarray(result), numbers(3, 4))
    if sharding:
        assert (result.devices(), result.committed) == ({jax.devices()[5]}, False)
    else:
        assert type(result) is np.ndarray
        assert result.flags.writeable


@pytest.mark.parametrize("spec", [P("d", "m"), P(("d", "m")), P("m"), P()], ids=str)
@pytest.mark.parametrize("copied", [False, True], ids=["devices that share memory with the host", "that do not"])
def test_the_result_has_the_values_of_the_blocks(mesh, request, spec, copied) -> None:
    """Each on its devices."""
    if copied:
        request.getfixturevalue("away")
    array = filled(numbers(16, 8), NamedSharding(mesh, spec)).result()
    assert array.sharding == NamedSharding(mesh, spec)
    assert array.committed
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), numbers(16, 8)[shard.index])


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "int8", "float16", "bfloat16", "float8_e5m2", "float32", "complex64", "uint32"]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (65,)], ids=str)
def test_memory_starts_where_xla_takes_it_over(dtype: str, shape) -> None:
    """At a multiple of 64 bytes, for every dtype and size."""
    for zeros in (False, True):
        buffer = _blocks._aligned(shape, jnp.dtype(dtype), zeros=zeros)
        assert (buffer.shape, buffer.dtype) == (shape, jnp.dtype(dtype))
        assert buffer.ctypes.data % 64 == 0 or not buffer.size
        assert buffer.flags.writeable
        assert buffer.flags.c_contiguous
        assert not zeros or not any(buffer.tobytes())


@pytest.mark.parametrize(
    ("block", "zeros"),
    [
        pytest.param(((0, 4),), False, id="within the stored array"),
        pytest.param(((4, 8),), True, id="partly beyond it"),
        pytest.param(((8, 12),), True, id="beyond it"),
    ],
)
def test_what_the_stored_array_does_not_cover_is_zeros(mesh, monkeypatch, block: Box, zeros: bool) -> None:
    """Memory that is read into whole is not cleared first."""
    cleared = []
    aligned = _blocks._aligned

    def spy(*args: Any, zeros: bool) -> Any:
        cleared.append(zeros)
        return aligned(*args, zeros=zeros)

    monkeypatch.setattr(_blocks, "_aligned", spy)
    sharding = NamedSharding(jax.make_mesh((3,), ("x",), devices=jax.devices()[:3]), P("x"))
    buffer = Blocks((12,), np.dtype(np.float32), sharding, (6,)).buffer(block)
    assert cleared == [zeros]
    assert not zeros or not buffer.any()


# On devices that share memory with the host.


@KINDS
def test_replicas_share_the_memory_that_was_read_into(mesh, buffers, kind) -> None:
    """On CPU devices: JAX takes the buffers over, one for each distinct block."""
    array = filled(numbers(8, 64), NamedSharding(mesh, P(None, "m"), memory_kind=kind)).result()
    assert array.sharding.memory_kind == kind
    assert len(buffers) == 4
    assert pointers(array) == {buffer.ctypes.data for buffer in buffers}


@pytest.mark.parametrize("spec", [P(), P("d"), P("d", "m")], ids=str)
def test_what_was_read_may_be_donated(mesh, buffers, spec) -> None:
    """JAX writes to no buffer that it took over, which replicas may share: it copies what is donated."""
    array = filled(numbers(8, 64), NamedSharding(mesh, spec)).result()
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


def test_memory_that_was_read_into_goes_with_the_array(mesh, buffers) -> None:
    """Nothing else holds it: donated, or deleted, an array gives it back."""
    for let_go in (jax.jit(lambda x: x + 1, donate_argnums=0), lambda x: x.delete()):
        array = filled(numbers(8, 64), NamedSharding(mesh, P("d", "m"))).result()
        memories = [weakref.ref(buffer.base) for buffer in buffers]
        assert len(memories) == 8
        buffers.clear()
        gc.collect()
        assert all(memory() is not None for memory in memories)
        jax.block_until_ready(let_go(array))
        gc.collect()
        assert all(memory() is None for memory in memories)


def test_a_donated_shard_takes_nothing_from_its_replicas(mesh) -> None:
    """Each is an array of its own to JAX, though they share memory."""
    array = filled(numbers(8, 64), NamedSharding(mesh, P())).result()
    first, *others = (shard.data for shard in array.addressable_shards)
    jax.jit(lambda x: x * 0, donate_argnums=0)(first).block_until_ready()
    for other in others:
        np.testing.assert_array_equal(np.asarray(other), numbers(8, 64))


# On devices that do not.


@pytest.mark.usefixtures("away")
def test_a_block_leaves_the_host_when_its_devices_have_it(mesh, buffers) -> None:
    """It does not wait there for the rest of its array, but for the last part of its own."""
    blocks = filled(numbers(8, 8), NamedSharding(mesh, P(None, "m")))
    held = [weakref.ref(buffer.base) for buffer in buffers]
    assert len(held) == 4
    first, *others = blocks.devices
    buffers.clear()
    blocks.expect([first, *others])
    blocks.expect([first])
    lengths = []
    for part in ([first], [first], others):
        asyncio.run(blocks.finish(part))
        lengths.append(len(blocks._buffers))
    assert lengths == [4, 3, 0]
    np.testing.assert_array_equal(np.asarray(blocks.result()), numbers(8, 8))


def test_a_block_on_the_host_stays_until_its_array_is_made(mesh) -> None:
    """Devices that share memory with it need no copy."""
    blocks = filled(numbers(8, 8), NamedSharding(mesh, P(None, "m")))
    blocks.expect(blocks.devices)
    asyncio.run(blocks.finish(blocks.devices))
    assert len(blocks._buffers) == 4
    np.testing.assert_array_equal(np.asarray(blocks.result()), numbers(8, 8))


@KINDS
@pytest.mark.usefixtures("away")
def test_a_block_lands_in_the_memory_that_was_asked_for(mesh, kind) -> None:
    """On each of its devices."""
    for sharding in (
        NamedSharding(mesh, P("d"), memory_kind=kind),
        SingleDeviceSharding(jax.devices()[3], memory_kind=kind),
    ):
        array = filled(numbers(8, 8), sharding).result()
        assert array.sharding == sharding
        assert array.sharding.memory_kind == kind
        np.testing.assert_array_equal(np.asarray(array), numbers(8, 8))
