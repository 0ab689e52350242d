"""Parts of arrays: geometry in integers, shared by writing and reading.

A *box* is a part of an array. A *block* is the box that one shard holds. *Chunks* are the boxes of the regular grid in
which an array is stored, from its first element; those at its end may stand out beyond it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

# Where a part of an array starts and stops, along each of its dimensions.
Box: TypeAlias = tuple[tuple[int, int], ...]
Shape: TypeAlias = tuple[int, ...]


def whole_box(shape: Shape) -> Box:
    """The box of all of an array."""
    return tuple((0, n) for n in shape)


def box_of(index: tuple[slice, ...], shape: Shape) -> Box:
    """The box that an index of slices stands for."""
    return tuple(slice_.indices(n)[:2] for slice_, n in zip(index, shape, strict=True))


def box_shape(box: Box) -> Shape:
    """Elements along each dimension of a box; 0 where it stops before it starts."""
    return tuple(max(0, stop - start) for start, stop in box)


def box_size(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(box_shape(box))


def intersect(one: Box, other: Box) -> Box:
    """What two boxes have in common; of size 0 where that is nothing."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of a box in an array that holds `outer`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def cut(box: Box, dimension: int, low: int, high: int) -> Box:
    """The part of a box between two positions along one dimension; of size 0 where there is none."""
    start, stop = box[dimension]
    return (*box[:dimension], (max(start, low), min(stop, high)), *box[dimension + 1 :])


def chunks_of(box: Box, chunk: Shape) -> Iterator[tuple[Shape, Box]]:
    """The chunks that a box touches: the place of each in the grid, and its own box, which may stand out beyond it.

    Args:
        box: A part of an array.
        chunk: Elements along each dimension of a chunk.
    """
    if not box_size(box):
        return
    spans = [range(a // c, -(-b // c)) for (a, b), c in zip(box, chunk, strict=True)]
    for place in itertools.product(*spans):
        yield place, tuple((i * c, (i + 1) * c) for i, c in zip(place, chunk, strict=True))
