"""Stored arrays -> `jax.Array`s and NumPy arrays: each distinct block is read once, into the memory it stays in.

What reading needs beside what lands is bounded. TensorStore holds a chunk encoded and decoded until it is copied, so
blocks are read in pieces, along the borders of chunks, and the pieces in flight may need no more than a share of the
bytes that land. A chunk in which several blocks lie is read once for all of them.

Small arrays are read many at a time, as keys of the store (`_small_arrays`): opening each would take longer than
reading it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding

from orbax_explicit._allocator import keep_freed_memory
from orbax_explicit._blocks import Blocks
from orbax_explicit._boxes import Box, Shape, box_size, chunks_of, cut, intersect, whole_box
from orbax_explicit._budget import Budget, batches, gather_all
from orbax_explicit._digests import Digests
from orbax_explicit._errors import FormatError, Problem
from orbax_explicit._garbage import paused_collection
from orbax_explicit._records import dtype_itemsize
from orbax_explicit._small_arrays import SMALL_NBYTES, decode_chunk, fill_block
from orbax_explicit._stock_json import UnreadableError
from orbax_explicit._storage import ArrayStore, StoredValue, error_text, key_of, new_context, read_keys
from orbax_explicit._zarr import ZarrArray, parse_zarr

# Reading may need one sixteenth of what lands. A restore is to take no more than 1.2 times what lands; the rest of that
# is for what an allocator keeps back (glibc 64 MiB, see `_allocator`; of chunks of 32 MB, twice what was in flight), and
# for Python's and JAX's own objects.
_SHARE = 16

# So much may always be in flight: a share of a small state would read its arrays one after the other.
_MIN_IN_FLIGHT_NBYTES = 16 << 20

# A piece is made no larger than this part of what may be in flight, so that several are read at a time.
_PIECES_IN_FLIGHT = 4

# An open array takes some 14 kB whatever its size, which is more than many a tiny one holds.
_OPEN_ARRAYS = 64

# Small arrays are read until there are so many bytes, or so many arrays, in a batch.
_BATCH_NBYTES = 4 << 20
_BATCH_ARRAYS = 4096


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

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return math.prod(self.shape) * dtype_itemsize(self.dtype)

    def check(self, name: str, shape: Shape, dtype: str) -> None:
        """Compares an array that is stored with its record, before any memory is taken for it.

        Raises:
            FormatError: It is another one.
        """
        if (shape, dtype) != (self.shape, self.dtype):
            raise FormatError(other_array_problem(name, f"{dtype}{shape}", f"{self.dtype}{self.shape}"))

    def flags(self) -> contextlib.AbstractContextManager[Any]:
        """JAX's flags as they are where the restore was called: a running event loop has Orbax read in another thread."""
        flags: contextlib.AbstractContextManager[Any] = jax.enable_x64(self.x64)
        return flags


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead:
    """One array to read.

    Attributes:
        name: Name of the array in the store.
        sharding: Where it lands: a concrete sharding, an `UncommittedSharding`, or None for NumPy on the host.
        dtype: Dtype of the result; None for the stored one.
        shape: Shape of the result; None for the stored one.
        strict: Whether the shape must be the stored one; otherwise the array is cut off, or padded with zeros, at the
            end of each dimension.
        known: What is known of it beside; None for nothing.
        leaf: Path of the leaf, for errors; empty for the name.
    """

    name: str
    sharding: Sharding | None
    dtype: Any = None
    shape: Shape | None = None
    strict: bool = True
    known: Known | None = None
    leaf: str = ""

    @property
    def text(self) -> str:
        """The leaf, for people."""
        return self.leaf or self.name

    def blocks(self, stored_shape: Shape, stored_dtype: np.dtype[Any]) -> Blocks:
        """The blocks that land, of a stored array.

        Raises:
            FormatError: It has another shape.
        """
        shape = stored_shape if self.shape is None else tuple(self.shape)
        if len(shape) != len(stored_shape) or (self.strict and shape != stored_shape):
            raise FormatError(
                Problem(
                    could_not=f"cannot read {self.text}: shape {shape} is not compatible with the stored shape",
                    recorded=f"{stored_shape}",
                    affects=(self.text,),
                    fix="ask for the stored shape, or with strict=False for one of as many dimensions",
                )
            )
        dtype = np.dtype(stored_dtype if self.dtype is None else self.dtype)
        with self.flags():
            if self.sharding is not None:
                # As `jax.device_put` would: while `jax_enable_x64` is off, JAX has no dtypes of 64 bits.
                dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
            return Blocks(shape, dtype, self.sharding, stored_shape)

    def flags(self) -> contextlib.AbstractContextManager[Any]:
        """JAX's flags as they are where the restore was called."""
        return self.known.flags() if self.known is not None else contextlib.nullcontext()


async def read_arrays(
    reads: Sequence[ArrayRead],
    store: ArrayStore,
    *,
    context: ts.Context | None = None,
    max_in_flight_nbytes: int | None = None,
    digests: Digests | None = None,
) -> list[Any]:
    """Reads arrays; of each the blocks that land on this process's devices.

    Args:
        reads: The arrays.
        store: Where they lie.
        context: TensorStore context to open the store in; None for a new one.
        max_in_flight_nbytes: Bytes that reading may need at a time beside what lands, if that is less than a share of
            what lands. A single chunk may need more.
        digests: Digests of the item's small files: without OCDBT the Zarr metadata are such files; None for none.

    Returns:
        A `jax.Array` for each, or a NumPy array where it has no sharding.

    Raises:
        FormatError: An array, or a part of it, is missing, damaged, or of another shape.
    """
    if not reads:
        return []
    context = context or new_context()
    with _naming(reads[0].text if len(reads) == 1 else "the arrays"):
        keys = await ts.KvStore.open(store.spec(), context=context)
    reading = _Reading(store, keys, context, max_in_flight_nbytes, digests or Digests(files=None))
    small = [i for i, read in enumerate(reads) if _is_small(read)]
    arrays: dict[int, Any] = {}
    together = batches(small, lambda i: _known_nbytes(reads[i]), max_nbytes=_BATCH_NBYTES, max_items=_BATCH_ARRAYS)
    for read in await gather_all(reading.read_small([(i, reads[i]) for i in batch]) for batch in together):
        arrays.update(read)
    large = [i for i in range(len(reads)) if i not in arrays]
    if large:
        keep_freed_memory()
    arrays.update(zip(large, await gather_all(reading.read_large(reads[i]) for i in large), strict=True))
    return [arrays[i] for i in range(len(reads))]


def _is_small(read: ArrayRead) -> bool:
    """Whether an array is known to be small."""
    return read.known is not None and read.known.nbytes <= SMALL_NBYTES


def _known_nbytes(read: ArrayRead) -> int:
    return read.known.nbytes if read.known is not None else 0


class _Reading:
    """One call of `read_arrays`: the open store, and what may be in flight."""

    def __init__(
        self,
        store: ArrayStore,
        keys: ts.KvStore,
        context: ts.Context,
        max_in_flight_nbytes: int | None,
        digests: Digests,
    ) -> None:
        self._store = store
        self._digests = digests
        self._keys = keys
        self._context = context
        self._max_nbytes = max_in_flight_nbytes
        self._landing_nbytes = 0
        self._budget = Budget(self._in_flight_nbytes())
        self._opened = asyncio.Semaphore(_OPEN_ARRAYS)

    def _in_flight_nbytes(self) -> int:
        share = max(_MIN_IN_FLIGHT_NBYTES, self._landing_nbytes // _SHARE)
        return share if self._max_nbytes is None else min(share, self._max_nbytes)

    def _add_landing(self, nbytes: int) -> None:
        """Counts bytes that land, whose share may be in flight from now on."""
        self._landing_nbytes += nbytes
        self._budget.nbytes = self._in_flight_nbytes()

    async def read_large(self, array: ArrayRead) -> Any:
        """Reads one array by TensorStore's driver."""
        async with self._opened:
            with self._budget.unless_failed():
                return await self._read_large(array)

    async def _read_large(self, array: ArrayRead) -> Any:
        with _naming(array.text):
            store = await ts.open(
                ts.Spec(self._store.array_spec()),
                kvstore=self._keys / key_of(array.name, ""),
                open=True,
                context=self._context,
            )
        if array.known is not None:
            array.known.check(array.text, tuple(store.shape), store.dtype.name)
            if not self._store.use_ocdbt:
                key = key_of(array.name, self._store.metadata_file)
                self._parse(array, (await asyncio.to_thread(read_keys, self._keys, [key]))[0])
        blocks = array.blocks(tuple(store.shape), store.dtype.numpy_dtype)
        self._add_landing(blocks.nbytes)
        pieces = list(_pieces(blocks.devices, store, self._budget.nbytes // _PIECES_IN_FLIGHT))
        for piece in pieces:
            blocks.expect(piece.parts)
        if store.dtype.numpy_dtype != blocks.dtype:
            store = ts.cast(store, ts.dtype(blocks.dtype))

        async def read(piece: _Piece) -> None:
            async with self._budget.reserved(piece.nbytes):
                with _naming(array.text):
                    await _fill(blocks, store, piece)
                await blocks.finish(piece.parts)

        await gather_all(read(piece) for piece in pieces)
        with array.flags():
            return blocks.result()

    async def read_small(self, batch: Sequence[tuple[int, ArrayRead]]) -> dict[int, Any]:
        """Reads arrays as keys of the store, but for those that only TensorStore's driver can read."""
        async with self._budget.reserved(2 * sum(_known_nbytes(array) for _, array in batch)):
            with paused_collection():
                filled = await asyncio.to_thread(self._read_small, batch)
            for _, _, blocks in filled:
                self._add_landing(blocks.nbytes)
                blocks.expect(blocks.devices)
                await blocks.finish(blocks.devices)
        arrays = {}
        with paused_collection():
            for i, array, blocks in filled:
                with array.flags():
                    arrays[i] = blocks.result()
        return arrays

    def _read_small(self, batch: Sequence[tuple[int, ArrayRead]]) -> list[tuple[int, ArrayRead, Blocks]]:
        file = self._store.metadata_file
        found = read_keys(self._keys, [key_of(array.name, file) for _, array in batch])
        opened: list[tuple[int, ArrayRead, ZarrArray, Blocks, list[Shape]]] = []
        problems: list[Problem] = []
        for (i, array), value in zip(batch, found, strict=True):
            try:
                zarr = self._parse(array, value)
                if zarr.chunk is None or zarr.encoding is None:
                    continue
                blocks = array.blocks(zarr.shape, ts.dtype(zarr.dtype).numpy_dtype)
            except FormatError as error:
                problems.extend(error.problems)
                continue
            stored = [intersect(block, whole_box(zarr.shape)) for block in blocks.devices]
            places = dict.fromkeys(place for part in stored for place, _ in chunks_of(part, zarr.chunk))
            opened.append((i, array, zarr, blocks, list(places)))
        names = [
            key_of(array.name, self._store.chunk_key(place)) for _, array, _, _, touched in opened for place in touched
        ]
        values = iter(read_keys(self._keys, names))
        for _, array, zarr, blocks, touched in opened:
            read = {place: next(values) for place in touched}
            try:
                self._fill_small(array, zarr, blocks, read)
            except FormatError as error:
                problems.extend(error.problems)
        if problems:
            raise FormatError(*problems)
        return [(i, array, blocks) for i, array, _, blocks, _ in opened]

    def _parse(self, array: ArrayRead, value: StoredValue) -> ZarrArray:
        """The Zarr metadata of an array, as it was recorded.

        Raises:
            FormatError: They are missing or damaged, or those of another array.
        """
        if not isinstance(value, bytes):
            raise FormatError(_damage_problem(array.text, f"its Zarr metadata are {_lost_text(value)}"))
        if not self._store.use_ocdbt:
            # A file of its own, which nobody else checks.
            try:
                self._digests.check(key_of(array.name, self._store.metadata_file), value)
            except FormatError as error:
                raise FormatError(_damage_problem(array.text, "its Zarr metadata are not what was written")) from error
        try:
            zarr = _parse_zarr(value)
        except UnreadableError as error:
            raise FormatError(_damage_problem(array.text, f"its Zarr metadata are {error}")) from error
        assert array.known is not None
        # Neither Orbax nor this package writes the highest byte first: one bit of the metadata says that they did.
        order = "" if zarr.is_little_endian else "big-endian "
        array.known.check(array.text, zarr.shape, f"{order}{zarr.dtype}")
        return zarr

    def _fill_small(
        self, array: ArrayRead, zarr: ZarrArray, blocks: Blocks, values: Mapping[Shape, StoredValue]
    ) -> None:
        chunks = {}
        for place, value in values.items():
            key = self._store.chunk_key(place)
            if isinstance(value, bytes):
                try:
                    chunks[place] = decode_chunk(zarr, value)
                except ValueError as error:
                    raise FormatError(_damage_problem(array.text, f"its chunk {key} is damaged: {error}")) from error
            elif value is None and self._store.fills_missing:
                assert zarr.chunk is not None
                chunks[place] = np.zeros(zarr.chunk, ts.dtype(zarr.dtype).numpy_dtype)
            else:
                raise FormatError(_damage_problem(array.text, f"its chunk {key} is {_lost_text(value)}"))
        for block in blocks.devices:
            fill_block(blocks.buffer(block), block, zarr, chunks)


# Many arrays of a tree have the same.
_parse_zarr = functools.lru_cache(maxsize=1024)(parse_zarr)


def _lost_text(value: Exception | None) -> str:
    return "missing" if value is None else f"not readable ({error_text(value)})"


def _damage_problem(name: str, why: str) -> Problem:
    return Problem(
        could_not=f"cannot read {name}: {why}",
        affects=(name,),
        fix="restore the checkpoint from a copy: what is stored is missing or damaged",
    )


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Says of an error of TensorStore's which array it is about."""
    try:
        yield
    except ValueError as error:  # Its statuses NOT_FOUND, DATA_LOSS, FAILED_PRECONDITION, INVALID_ARGUMENT.
        raise FormatError(_damage_problem(name, error_text(error))) from error
    except Exception as error:
        error.add_note(f"while reading {name}")
        raise


async def _fill(blocks: Blocks, store: ts.TensorStore, piece: _Piece) -> None:
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
        {block: part for block, part in stored.items() if box_size(part)},
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
        halves = {block: cut(part, dimension, low, high) for block, part in parts.items()}
        yield from _split(
            {block: half for block, half in halves.items() if box_size(half)}, chunk, itemsize, max_nbytes
        )
