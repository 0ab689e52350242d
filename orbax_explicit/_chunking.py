"""Which chunks an array is stored in, and which process writes what. Integers only.

Every process writes Zarr metadata of its own, and the merge keeps those of one: what is chosen here follows from facts
that every process knows, never from what one of them holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from orbax_explicit._boxes import Shape

MAX_CHUNK_NBYTES = 4 << 20
"""Bytes of a chunk, at most. A chunk is decoded whole: larger ones take more memory at a restore beside what lands, so that
fewer are read at a time, and more reading of what a smaller shard on another mesh wants. Smaller ones are no faster."""

ONE_CHUNK_NBYTES = 256 << 10
"""An array of at most so many bytes that one process holds is one chunk: its shards would cost more than they save."""

# Elements that a chunk keeps along a dimension while another one can be cut.
_MIN_LENGTH = 16

# A shard is not cut into so many parts at once; one whose dimensions have only larger prime factors stays whole.
_MAX_FACTOR = 7


@functools.lru_cache(maxsize=4096)
def choose_chunk(shape: Shape, shard: Shape, itemsize: int, *, max_nbytes: int, prefer: tuple[int, ...] = ()) -> Shape:
    """Elements along each dimension of a chunk.

    No chunk lies in two shards, since two processes could not write it. Along a dimension that is not split a chunk may
    have any length; along another one a divisor of the shard's. The outermost dimension is cut first, so that a chunk is
    one run of a shard's memory (squares took a quarter longer to write); but not below a few elements while an inner
    one can be cut, so that a chunk of wide rows also suits shards of some columns. A dimension of size 0 gets chunks of
    size 1, for Zarr has none of size 0.

    Args:
        shape: Shape of the array.
        shard: Shape of its shards.
        itemsize: Bytes of an element.
        max_nbytes: Bytes that a chunk should not exceed. It does where a shard cannot be cut.
        prefer: Dimensions to cut before the others.
    """
    chunk = [max(1, n) for n in shard]
    preferred = [dimension for dimension in prefer if 0 <= dimension < len(shape)]

    def shorter(dimension: int) -> int:
        length = chunk[dimension]
        if shard[dimension] >= shape[dimension]:
            return -(-length // 2)
        return next((length // p for p in range(2, _MAX_FACTOR + 1) if length % p == 0), length)

    while itemsize * math.prod(chunk) > max_nbytes:
        cuttable = [dimension for dimension in range(len(chunk)) if shorter(dimension) < chunk[dimension]]
        if not cuttable:
            break
        wanted = [dimension for dimension in preferred if dimension in cuttable]
        long = [dimension for dimension in cuttable if shorter(dimension) >= _MIN_LENGTH]
        dimension = (wanted or long or cuttable)[0]
        chunk[dimension] = shorter(dimension)
    return tuple(chunk)


def share_out(holders: Sequence[tuple[int, ...]], nbytes: Sequence[int]) -> list[int]:
    """The process that writes each block: one that holds it, so that all write about equally much.

    Args:
        holders: Indices of the processes that hold each block, in ascending order.
        nbytes: Bytes of each block.
    """
    written = dict.fromkeys({process for holding in holders for process in holding}, 0)
    owners = [0] * len(holders)
    # Blocks that one process alone holds first, then the largest: what can still be chosen evens out the rest.
    for i in sorted(range(len(holders)), key=lambda i: (len(holders[i]) > 1, -nbytes[i], i)):
        owners[i] = min(holders[i], key=lambda process: (written[process], process))
        written[owners[i]] += nbytes[i]
    return owners
