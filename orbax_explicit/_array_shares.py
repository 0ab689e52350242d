"""`jax.Array`s -> what this process writes of each: how they are stored, who writes which block, and the elements.

Every distinct block is written once, by one of the processes that hold it, and all processes come to the same division
of the work, since they all see every sharding. The elements are taken before a save returns: on accelerators they are
copied to the host; on CPU devices they are looked at where they are, and JAX does not give that memory to anything else,
not even to a donation, while somebody looks at it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from orbax_explicit._array_writing import ArrayWrite
from orbax_explicit._boxes import Box, Shape, box_of, box_size, whole_box
from orbax_explicit._chunking import MAX_CHUNK_NBYTES, ONE_CHUNK_NBYTES, choose_chunk, share_out
from orbax_explicit._leaf_capture import record_prng
from orbax_explicit._small_arrays import SMALL_NBYTES

# Who writes what one process can write: the process of this index, or each process in a storage of its own.
Primary: TypeAlias = "int | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """How an array is stored. Every process finds the same.

    Attributes:
        name: Its name in the store.
        shape: Shape of what is stored: of keys, that of their data.
        dtype: Name of the dtype that is stored.
        chunk: Shape of its chunks.
        prng_impl: PRNG implementation of the keys whose data it is; None for an ordinary array.
    """

    name: str
    shape: Shape
    dtype: str
    chunk: Shape
    prng_impl: str | None = None

    def write(self, blocks: Mapping[Box, np.ndarray[Any, Any]]) -> ArrayWrite:
        """Writing some blocks of it."""
        return ArrayWrite(name=self.name, shape=self.shape, dtype=self.dtype, chunk=self.chunk, blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A distinct block of an array.

    Attributes:
        box: Which part of the array it is.
        index: The same, as an index of slices.
        holders: Indices of the processes that hold it, ascending.
        sources: Where this process has it: positions among its shards, each with the id of the device.
    """

    box: Box
    index: tuple[slice, ...]
    holders: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the blocks of an array are. Many arrays of a tree share theirs.

    Attributes:
        blocks: The distinct blocks.
        shard: Shape of a shard.
        everybody: Indices of the processes that hold the whole array, ascending.
        is_on_host: Whether the devices of this process have their memory there.
    """

    blocks: Mapping[Box, _Block]
    shard: Shape
    everybody: tuple[int, ...]
    is_on_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """An array that is about to be written.

    Attributes:
        stored: How it is stored.
        data: Its elements; of keys, their data.
        layout: Where its blocks are.
        parts: The parts in which it is written, each by one process: its blocks, or all of it.
        holders: Indices of the processes that hold each part, ascending.
    """

    stored: StoredArray
    data: jax.Array
    layout: _Layout
    parts: Sequence[Box]
    holders: Sequence[tuple[int, ...]]


def share_arrays(
    values: Sequence[jax.Array], names: Sequence[str], args: Sequence[ocp.SaveArgs], primary: Primary
) -> tuple[list[StoredArray], list[ArrayWrite]]:
    """How arrays are stored, and what this process writes of them.

    Called by every process, with the same arrays in the same order.

    Args:
        values: The arrays; those that are local to one process are written by the primary one.
        names: Their names in the store.
        args: Their save arguments.
        primary: Index of the process that writes what each of them could write; None where every process has a storage
            of its own, and writes all that it holds.
    """
    shares = [_share(*leaf, primary) for leaf in zip(values, names, args, strict=True)]
    own_parts = _share_out(shares)
    fetched = _fetch(list(zip(shares, own_parts, strict=True)))
    writes = [
        share.stored.write(blocks)
        for share, blocks in zip(shares, fetched, strict=True)
        # One of size zero has no block: its metadata are all there is to write.
        if blocks or (not share.parts and primary in (None, jax.process_index()))
    ]
    return [share.stored for share in shares], writes


def share_host_arrays(
    values: Sequence[np.ndarray[Any, Any]], names: Sequence[str], args: Sequence[ocp.SaveArgs]
) -> list[ArrayWrite]:
    """Writing arrays of NumPy whole. Copies are taken, so that the values may be changed while they are written."""
    writes = []
    for value, name, arg in zip(values, names, args, strict=True):
        stored = _stored(name, value.shape, value.shape, value.dtype, arg)
        native = value.dtype.newbyteorder("=") if value.dtype.byteorder == ">" else value.dtype
        writes.append(stored.write({whole_box(value.shape): np.array(value, native)} if value.size else {}))
    return writes


def _share(value: jax.Array, name: str, arg: ocp.SaveArgs, primary: Primary) -> _Share:
    prng = record_prng(value)
    data = jax.random.key_data(value) if prng is not None else value
    impl = prng.impl if prng is not None else None
    if data.size == 0:
        stored = _stored(name, data.shape, data.shape, data.dtype, arg, impl)
        nothing = _Layout(blocks={}, shard=data.shape, everybody=(), is_on_host=True)
        return _Share(stored=stored, data=data, layout=nothing, parts=(), holders=())
    layout = _layout(data.sharding, data.shape, *_reach(data, primary))
    if layout.everybody and data.size * data.dtype.itemsize <= ONE_CHUNK_NBYTES:
        stored = _stored(name, data.shape, data.shape, data.dtype, arg, impl)
        whole = [whole_box(data.shape)]
        return _Share(stored=stored, data=data, layout=layout, parts=whole, holders=[layout.everybody])
    stored = _stored(name, data.shape, layout.shard, data.dtype, arg, impl)
    holders = [block.holders for block in layout.blocks.values()]
    return _Share(stored=stored, data=data, layout=layout, parts=list(layout.blocks), holders=holders)


def _stored(
    name: str, shape: Shape, shard: Shape, dtype: Any, arg: ocp.SaveArgs, prng_impl: str | None = None
) -> StoredArray:
    stored_dtype = np.dtype(arg.dtype if arg.dtype is not None else dtype)
    chunk = choose_chunk(
        shape,
        shard,
        stored_dtype.itemsize,
        max_nbytes=arg.chunk_byte_size or MAX_CHUNK_NBYTES,
        prefer=tuple(arg.shard_axes or ()),
    )
    return StoredArray(name=name, shape=shape, dtype=stored_dtype.name, chunk=chunk, prng_impl=prng_impl)


_Reach: TypeAlias = Literal["shared", "primary", "own"]


def _reach(data: jax.Array, primary: Primary) -> tuple[_Reach, int]:
    """Who could write an array, and the process to ask for it where that is one."""
    if primary is None:
        return "own", jax.process_index()
    if jax.process_count() > 1 and data.is_fully_addressable:
        # Uncommitted, and local to each process: the value of the primary one is kept.
        return "primary", primary
    return "shared", primary


@functools.lru_cache(maxsize=4096)
def _layout(sharding: Sharding, shape: Shape, reach: _Reach, process: int) -> _Layout:
    me = jax.process_index()
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    holders: dict[Box, set[int]] = {}
    sources: dict[Box, list[tuple[int, int]]] = {}
    here = 0
    for device, index in indices.items():
        box = box_of(index or (), shape)
        if device.process_index == me:
            sources.setdefault(box, []).append((here, device.id))
            here += 1
        elif reach == "own":
            continue
        holders.setdefault(box, set()).add(device.process_index if reach == "shared" else process)
    blocks = {
        box: _Block(
            box=box,
            index=tuple(slice(*span) for span in box),
            holders=tuple(sorted(holding)),
            sources=tuple(sources.get(box, ())),
        )
        for box, holding in holders.items()
    }
    is_whole = sum(map(box_size, blocks)) == math.prod(shape)
    return _Layout(
        blocks=blocks,
        shard=sharding.shard_shape(shape),
        everybody=tuple(sorted(set.intersection(*holders.values()))) if is_whole and holders else (),
        is_on_host=all(device.platform == "cpu" for device in indices if device.process_index == me),
    )


def _share_out(shares: Sequence[_Share]) -> list[Sequence[Box]]:
    """The parts of each array that this process writes."""
    if jax.process_count() == 1:
        return [share.parts for share in shares]
    owners = iter(
        share_out(
            [holders for share in shares for holders in share.holders],
            [box_size(part) * share.data.dtype.itemsize for share in shares for part in share.parts],
        )
    )
    me = jax.process_index()
    return [[part for part in share.parts if next(owners) == me] for share in shares]


def _fetch(wanted: Sequence[tuple[_Share, Sequence[Box]]]) -> list[dict[Box, np.ndarray[Any, Any]]]:
    """The elements of these parts of arrays, on the host."""
    copied: Counter[int] = Counter()
    fetched: list[list[tuple[_Block, jax.Array]]] = []
    for share, parts in wanted:
        layout = share.layout
        shards = []
        for block in _made_of(share, parts):
            # From the device that has been asked for least so far.
            position, _ = min(block.sources, key=lambda source: copied[source[1]])
            shard = share.data.addressable_data(position)
            if not layout.is_on_host:
                copied[_start_copy(shard)] += box_size(block.box) * share.data.dtype.itemsize
            shards.append((block, shard))
        fetched.append(shards)
    return [_elements(share, parts, shards) for (share, parts), shards in zip(wanted, fetched, strict=True)]


def _start_copy(shard: jax.Array) -> int:
    """Starts to copy a shard to the host; gives the id of its device.

    Of an array that every device has whole JAX gives the first shard, whichever is asked for.
    """
    shard.copy_to_host_async()
    (device,) = shard.devices()
    return int(device.id)


def _made_of(share: _Share, parts: Sequence[Box]) -> Iterable[_Block]:
    """The blocks that these parts of an array are made of: themselves, or all of them where it is written as one."""
    blocks = share.layout.blocks
    is_one = len(share.parts) < len(blocks)
    return blocks.values() if parts and is_one else [blocks[part] for part in parts]


def _elements(
    share: _Share, parts: Sequence[Box], shards: Sequence[tuple[_Block, jax.Array]]
) -> dict[Box, np.ndarray[Any, Any]]:
    if len(shards) != len(parts):
        (part,) = parts
        whole = np.empty(share.data.shape, share.data.dtype)
        for block, shard in shards:
            whole[block.index] = shard
        return {part: whole}
    # Small ones are copied: looking at memory would keep a donation from taking it over.
    is_copied = share.data.size * share.data.dtype.itemsize <= SMALL_NBYTES
    return {block.box: np.array(shard) if is_copied else np.asarray(shard) for block, shard in shards}
