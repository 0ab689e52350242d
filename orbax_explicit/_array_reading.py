"""Stored arrays -> `jax.Array`s and NumPy arrays: each distinct block is read once, into the memory it stays in.

A block is what one shard holds. Its elements are read, and cast, straight into a buffer of their final dtype. On CPU
devices JAX takes that buffer over as the shard, of all replicas at once; it never writes to it (what is donated is
copied by the runtime first), so that replicas keep their values. On accelerators one buffer feeds all local replicas
and is dropped when they have it.

What reading needs beside that is bounded. TensorStore holds a chunk encoded and decoded until it is copied, so blocks
are read in pieces, along the borders of chunks, and the pieces in flight may need no more than a share of the bytes
that land. A chunk in which several blocks lie is read once for all of them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding, SingleDeviceSharding

from orbax_explicit._binding import UncommittedSharding
from orbax_explicit._errors import FormatError, Problem

_T = TypeVar("_T")

# Where a part of an array starts and stops, along each of its dimensions.
Box: TypeAlias = tuple[tuple[int, int], ...]

# XLA takes over a buffer on the host only if it starts at a multiple of this; any other one it copies.
_ALIGNMENT_NBYTES = 64

# Reading may need one sixteenth of what lands. A restore is to take no more than 1.2 times what lands; the rest of that
# is for what an allocator keeps back (for glibc, of chunks of 32 MB, twice what was in flight), and for Python's and
# JAX's own objects.
_SHARE = 16

# So much may always be in flight: a share of a small state would read its arrays one after the other.
_MIN_IN_FLIGHT_NBYTES = 16 << 20

# A piece is made no larger than this part of what may be in flight, so that several are read at a time.
_PIECES_IN_FLIGHT = 4

# An open array takes some 14 kB whatever its size, which is more than many a tiny one holds.
_OPEN_ARRAYS = 64


def other_array_problem(name: str, stored: str, recorded: str) -> Problem:
    """What is wrong where a stored array is not the one that was recorded."""
    return Problem(
        could_not=f"cannot restore {name}: what is stored is {stored}",
        recorded=recorded,
        affects=(name,),
        fix="restore the checkpoint from a copy: its record and its arrays are not of one save",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a reader is told that neither the storage nor its own thread can be asked for.

    Attributes:
        shape: The shape that is stored, as it was recorded.
        dtype: Name of the dtype that is stored, as it was recorded.
        x64: Whether `jax_enable_x64` is on where the restore was called.
    """

    shape: tuple[int, ...]
    dtype: str
    x64: bool

    def check(self, name: str, store: ts.TensorStore) -> None:
        """Compares an array that has been opened with its record, before any memory is taken for it.

        Raises:
            FormatError: It is another one.
        """
        found = (tuple(store.shape), store.dtype.numpy_dtype.name)
        if found != (self.shape, self.dtype):
            raise FormatError(other_array_problem(name, f"{found[1]}{found[0]}", f"{self.dtype}{self.shape}"))

    def flags(self) -> contextlib.AbstractContextManager[Any]:
        """JAX's flags as they are where the restore was called: a running event loop has Orbax read in another thread."""
        flags: contextlib.AbstractContextManager[Any] = jax.enable_x64(self.x64)
        return flags


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead:
    """One array to read.

    Attributes:
        name: Name of the array, for errors.
        spec: TensorStore spec of the stored array.
        context: TensorStore context to open it in; None for a new one.
        sharding: Where it lands: a concrete sharding, an `UncommittedSharding`, or None for NumPy on the host.
        dtype: Dtype of the result; None for the stored one.
        shape: Shape of the result; None for the stored one.
        strict: Whether the shape must be the stored one; otherwise the array is cut off, or padded with zeros, at the
            end of each dimension.
        known: What is known of it beside; None for nothing.
    """

    name: str
    spec: Mapping[str, Any]
    context: ts.Context | None
    sharding: Sharding | None
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    strict: bool = True
    known: Known | None = None


async def read_arrays(reads: Sequence[ArrayRead], *, max_in_flight_nbytes: int | None = None) -> list[Any]:
    """Reads arrays; of each the blocks that land on this process's devices.

    Args:
        reads: The arrays.
        max_in_flight_nbytes: Bytes that reading may need at a time beside what lands, if that is less than a share of
            what lands. A single chunk may need more.

    Returns:
        A `jax.Array` for each, or a NumPy array where it has no sharding.

    Raises:
        FormatError: An array, or a part of it, is missing, damaged, or of another shape.
    """
    budget = _Budget(max_in_flight_nbytes)
    opened = asyncio.Semaphore(_OPEN_ARRAYS)

    async def read(array: ArrayRead) -> Any:
        async with opened:
            with budget.unless_failed():
                return await _read_array(array, budget)

    return await _all(read(array) for array in reads)


async def _read_array(array: ArrayRead, budget: _Budget) -> Any:
    with _naming(array):
        store = await ts.open(ts.Spec(dict(array.spec)), open=True, context=array.context)
    if array.known is not None:
        array.known.check(array.name, store)
    with _flags(array):
        blocks = _Blocks.of(array, store)
    budget.add_landing(blocks.nbytes)
    pieces = list(_pieces(blocks.devices, store, budget.nbytes // _PIECES_IN_FLIGHT))
    for piece in pieces:
        blocks.expect(piece)
    if store.dtype.numpy_dtype != blocks.dtype:
        store = ts.cast(store, ts.dtype(blocks.dtype))

    async def read(piece: _Piece) -> None:
        async with budget.reserved(piece.nbytes):
            with _naming(array):
                await _fill(blocks, store, piece)
            await blocks.finish(piece)

    await _all(read(piece) for piece in pieces)
    with _flags(array):
        return blocks.result()


def _flags(array: ArrayRead) -> contextlib.AbstractContextManager[Any]:
    return array.known.flags() if array.known is not None else contextlib.nullcontext()


async def _fill(blocks: _Blocks, store: ts.TensorStore, piece: _Piece) -> None:
    """Reads a piece. In one batch, so that a chunk is read once for all the blocks that lie in it."""
    writes = []
    with ts.Batch() as batch:
        for block, part in piece.parts.items():
            source, target = store, ts.array(blocks.buffer(block))
            if block:
                region = tuple(slice(*span) for span in part)
                source = source[region]
                target = target[ts.d[:].translate_to[tuple(start for start, _ in block)]][region]
            writes.append(target.write(source, batch=batch))
    # All of them, whatever becomes of one: TensorStore would call back into an event loop that may be closed by then.
    for result in await asyncio.gather(*writes, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _all(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Runs coroutines to their end; then raises what the first one raised that failed of itself.

    None is cancelled: TensorStore would call back into an event loop that may be closed by then.
    """
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, _NotStarted):
            raise error
    if errors:
        raise errors[0]
    return [result for result in results if not isinstance(result, BaseException)]


class _NotStarted(Exception):
    """A read that was left out, since another one has failed."""


@contextlib.contextmanager
def _naming(array: ArrayRead) -> Iterator[None]:
    """Says of an error of TensorStore's which array it is about."""
    try:
        yield
    except ValueError as error:  # Its statuses NOT_FOUND, DATA_LOSS, FAILED_PRECONDITION, INVALID_ARGUMENT.
        raise FormatError(
            Problem(
                could_not=f"cannot read {array.name}: {str(error).partition('[tensorstore_spec=')[0].strip()}",
                affects=(array.name,),
                fix="restore the checkpoint from a copy: what is stored is missing or damaged",
            )
        ) from error
    except Exception as error:
        error.add_note(f"while reading {array.name}")
        raise


# What may be in flight.


class _Budget:
    """Bytes that reading may need at a time: first come, first served.

    What needs more than there is in all gets it when nothing else is in flight.
    """

    def __init__(self, max_nbytes: int | None) -> None:
        self._max_nbytes = max_nbytes
        self._landing_nbytes = 0
        self._in_flight_nbytes = 0
        self._has_failed = False
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @property
    def nbytes(self) -> int:
        """What may be in flight."""
        share = max(_MIN_IN_FLIGHT_NBYTES, self._landing_nbytes // _SHARE)
        return share if self._max_nbytes is None else min(share, self._max_nbytes)

    def add_landing(self, nbytes: int) -> None:
        """Counts bytes that land, whose share may be in flight from now on."""
        self._landing_nbytes += nbytes
        self._grant()

    @contextlib.contextmanager
    def unless_failed(self) -> Iterator[None]:
        """Starts nothing more once something has failed within one of these contexts."""
        if self._has_failed:
            raise _NotStarted
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise

    @contextlib.asynccontextmanager
    async def reserved(self, nbytes: int) -> AsyncIterator[None]:
        """Waits until so many more bytes may be in flight; they are until the context ends."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        self._grant()
        try:
            await granted
            with self.unless_failed():
                yield
        finally:
            if granted.done() and not granted.cancelled():
                self._in_flight_nbytes -= nbytes
                self._grant()

    def _grant(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if not granted.cancelled():
                if self._in_flight_nbytes and self._in_flight_nbytes + nbytes > self.nbytes:
                    return
                self._in_flight_nbytes += nbytes
                granted.set_result(None)
            self._waiting.popleft()


# What is read at once.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What is read at once of one array: parts of blocks that lie in neighbouring chunks.

    Attributes:
        parts: The part of each block, by the block.
        nbytes: Bytes that TensorStore needs for it: each chunk, once encoded and once decoded.
    """

    parts: Mapping[Box, Box]
    nbytes: int


def _pieces(blocks: Iterable[Box], store: ts.TensorStore, max_nbytes: int) -> Iterator[_Piece]:
    """Splits blocks along the borders of chunks; no piece needs more than `max_nbytes`, but for that of one chunk."""
    shape = tuple(store.shape)
    chunk = tuple(store.chunk_layout.read_chunk.shape or (0,) * len(shape))
    stored = {block: tuple((a, min(b, n)) for (a, b), n in zip(block, shape, strict=True)) for block in blocks}
    return _split(
        {block: part for block, part in stored.items() if _size(part)},
        # A driver without chunks has the whole array in one.
        tuple(c or max(1, n) for c, n in zip(chunk, shape, strict=True)),
        store.dtype.numpy_dtype.itemsize,
        max_nbytes,
    )


def _split(parts: Mapping[Box, Box], chunk: tuple[int, ...], itemsize: int, max_nbytes: int) -> Iterator[_Piece]:
    if not parts:
        return
    spans = zip(*parts.values(), strict=True)
    hull = [(min(a for a, _ in span), max(b for _, b in span)) for span in spans]
    firsts = [a // c for (a, _), c in zip(hull, chunk, strict=True)]
    counts = [-(-b // c) - first for (_, b), c, first in zip(hull, chunk, firsts, strict=True)]
    nbytes = 2 * itemsize * math.prod(chunk) * math.prod(counts)
    if nbytes <= max_nbytes or math.prod(counts) == 1:
        yield _Piece(parts=parts, nbytes=nbytes)
        return
    dimension = counts.index(max(counts))
    border = (firsts[dimension] + counts[dimension] // 2) * chunk[dimension]
    for low, high in ((0, border), (border, hull[dimension][1])):
        halves = {block: _cut(part, dimension, low, high) for block, part in parts.items()}
        yield from _split({block: half for block, half in halves.items() if _size(half)}, chunk, itemsize, max_nbytes)


def _cut(box: Box, dimension: int, low: int, high: int) -> Box:
    """The part of a box between two positions along one dimension; of size zero where there is none."""
    start, stop = box[dimension]
    return (*box[:dimension], (max(start, low), min(stop, high)), *box[dimension + 1 :])


def _size(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(max(0, stop - start) for start, stop in box)


# What lands.


class _Blocks:
    """The blocks of one array that land on this process's devices, or on the host, while they are filled.

    Attributes:
        devices: The devices of each distinct block; none on the host.
        dtype: Dtype of the result.
        nbytes: Bytes that land, each distinct block counted once.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding | None, stored_shape: tuple[int, ...]
    ) -> None:
        self.dtype = dtype
        self.devices: dict[Box, list[jax.Device]] = {}
        if sharding is None or isinstance(sharding, UncommittedSharding):
            self.devices[tuple((0, n) for n in shape)] = []
        else:
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                self.devices.setdefault(_box(index or (), shape), []).append(device)
        self.nbytes = dtype.itemsize * sum(map(_size, self.devices))
        self._shape = shape
        self._stored_shape = stored_shape
        self._sharding = sharding
        self._is_copied = any(_is_copied_to(device) for devices in self.devices.values() for device in devices)
        self._buffers: dict[Box, np.ndarray[Any, Any]] = {}
        self._unread: collections.Counter[Box] = collections.Counter()
        self._shards: dict[Box, list[jax.Array]] = {}

    @classmethod
    def of(cls, array: ArrayRead, store: ts.TensorStore) -> _Blocks:
        """The blocks of an array that has been opened.

        Raises:
            FormatError: The stored array is of another shape.
        """
        stored_shape: tuple[int, ...] = tuple(store.shape)
        shape = stored_shape if array.shape is None else tuple(array.shape)
        if len(shape) != len(stored_shape) or (array.strict and shape != stored_shape):
            raise FormatError(
                Problem(
                    could_not=f"cannot read {array.name}: shape {shape} is not compatible with the stored shape",
                    recorded=f"{stored_shape}",
                    affects=(array.name,),
                    fix="ask for the stored shape, or with strict=False for one of as many dimensions",
                )
            )
        dtype = np.dtype(store.dtype.numpy_dtype if array.dtype is None else array.dtype)
        if array.sharding is not None:
            # As `jax.device_put` would: while `jax_enable_x64` is off, JAX has no dtypes of 64 bits.
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
        return cls(shape, dtype, array.sharding, stored_shape)

    def buffer(self, block: Box) -> np.ndarray[Any, Any]:
        """The memory of a block. Zeros where the stored array does not cover it."""
        if block not in self._buffers:
            shape = tuple(stop - start for start, stop in block)
            covered = all(stop <= n for (_, stop), n in zip(block, self._stored_shape, strict=True))
            self._buffers[block] = _aligned(shape, self.dtype, zeros=not covered)
        return self._buffers[block]

    def expect(self, piece: _Piece) -> None:
        """Counts a piece that is going to be read."""
        self._unread.update(piece.parts.keys())

    async def finish(self, piece: _Piece) -> None:
        """Hands over the blocks of which this piece was the last, where they need not wait for the others."""
        for block in piece.parts:
            self._unread[block] -= 1
            if self._is_copied and not self._unread[block]:
                # They are in flight until the devices have them.
                await asyncio.to_thread(jax.block_until_ready, self._copied(block))

    def result(self) -> Any:
        """The array, when every piece has been read."""
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
            self._shape, self._sharding, lambda index: self.buffer(_box(index or (), self._shape)), dtype=self.dtype
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


def _is_copied_to(device: jax.Device) -> bool:
    """Whether the memory of a device is elsewhere than the host's."""
    return bool(device.platform != "cpu")


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box that an index of slices stands for."""
    return tuple(slice_.indices(n)[:2] for slice_, n in zip(index, shape, strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any], *, zeros: bool) -> np.ndarray[Any, Any]:
    """An array, uninitialised or of zeros, whose memory XLA takes over as it is."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if zeros else np.empty)(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT_NBYTES
    return memory[start : start + nbytes].view(dtype).reshape(shape)
