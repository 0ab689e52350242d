"""What lands of an array while it is read: a buffer for each distinct block, and in the end a `jax.Array`.

On CPU devices JAX takes a buffer over as the shard, of all replicas at once; it never writes to it (what is donated is
copied by the runtime first), so that replicas keep their values. On accelerators one buffer feeds all local replicas
and is dropped when they have it.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from orbax_explicit._binding import UncommittedSharding
from orbax_explicit._boxes import Box, Shape, box_of, box_shape, box_size, whole_box

# XLA takes over a buffer on the host only if it starts at a multiple of this; any other one it copies.
_ALIGNMENT_NBYTES = 64


class Blocks:
    """The blocks of one array that land on this process's devices, or on the host, while they are filled.

    Attributes:
        devices: The devices of each distinct block; none on the host.
        dtype: Dtype of the result.
        nbytes: Bytes that land, each distinct block counted once.

    Args:
        shape: Shape of the result.
        dtype: Dtype of the result.
        sharding: Where it lands: a concrete sharding, an `UncommittedSharding`, or None for NumPy on the host.
        stored_shape: Shape of the stored array; what it does not cover is zeros.
    """

    def __init__(self, shape: Shape, dtype: np.dtype[Any], sharding: Sharding | None, stored_shape: Shape) -> None:
        self.dtype = dtype
        self.devices: Mapping[Box, Sequence[jax.Device]] = {whole_box(shape): ()}
        if sharding is not None and not isinstance(sharding, UncommittedSharding):
            self.devices = _devices_by_block(sharding, shape)
        self.nbytes = dtype.itemsize * sum(map(box_size, self.devices))
        self._shape = shape
        self._stored_shape = stored_shape
        self._sharding = sharding
        self._is_copied = any(_is_copied_to(device) for devices in self.devices.values() for device in devices)
        self._buffers: dict[Box, np.ndarray[Any, Any]] = {}
        self._unread: collections.Counter[Box] = collections.Counter()
        self._shards: dict[Box, list[jax.Array]] = {}

    def buffer(self, block: Box) -> np.ndarray[Any, Any]:
        """The memory of a block. Zeros where the stored array does not cover it."""
        if block not in self._buffers:
            covered = all(stop <= n for (_, stop), n in zip(block, self._stored_shape, strict=True))
            self._buffers[block] = _aligned(box_shape(block), self.dtype, zeros=not covered)
        return self._buffers[block]

    def expect(self, blocks: Iterable[Box]) -> None:
        """Counts a part of each of these blocks that is going to be read."""
        self._unread.update(iter(blocks))

    async def finish(self, blocks: Iterable[Box]) -> None:
        """Hands over those of these blocks whose last part has been read, where they need not wait for the others."""
        for block in blocks:
            self._unread[block] -= 1
            if self._is_copied and not self._unread[block]:
                # They are in flight until the devices have them.
                await asyncio.to_thread(jax.block_until_ready, self._copied(block))

    def result(self) -> Any:
        """The array, when all of it has been read."""
        if self._sharding is None or isinstance(self._sharding, UncommittedSharding):
            (block,) = self.devices
            if self._sharding is None:
                return self.buffer(block)
            # No device is named to `device_put`: it stays free. `jnp.asarray` would commit it under `jax.set_mesh`. The
            # default device is the caller's; in a running event loop this is another thread, which has its own.
            (device,) = cast(set[jax.Device], self._sharding.device_set)
            with jax.default_device(device):
                return jax.device_put(self.buffer(block), may_alias=True)
        if self._is_copied:
            shards = [shard for block in self.devices for shard in self._copied(block)]
            return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards, dtype=self.dtype)
        # One call whatever the number of devices. JAX takes aligned buffers over as they are.
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self.buffer(box_of(index or (), self._shape)), dtype=self.dtype
        )

    def _copied(self, block: Box) -> list[jax.Array]:
        """A block on each of its devices; its memory on the host is given up."""
        if block not in self._shards:
            assert self._sharding is not None
            kind = self._sharding.memory_kind
            targets = [SingleDeviceSharding(device, memory_kind=kind) for device in self.devices[block]]
            buffer = self.buffer(block)
            self._shards[block] = jax.device_put([buffer] * len(targets), targets)
            del self._buffers[block]
        return self._shards[block]


@functools.lru_cache(maxsize=4096)
def _devices_by_block(sharding: Sharding, shape: Shape) -> Mapping[Box, Sequence[jax.Device]]:
    """The devices of this process that hold each distinct block. Many arrays of a tree share theirs."""
    devices: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(box_of(index or (), shape), []).append(device)
    return devices


def _is_copied_to(device: jax.Device) -> bool:
    """Whether the memory of a device is elsewhere than the host's."""
    return bool(device.platform != "cpu")


def _aligned(shape: Shape, dtype: np.dtype[Any], *, zeros: bool) -> np.ndarray[Any, Any]:
    """An array, uninitialised or of zeros, whose memory XLA takes over as it is."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if zeros else np.empty)(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT_NBYTES
    return memory[start : start + nbytes].view(dtype).reshape(shape)
