"""`_boxes`: parts of arrays, against what NumPy's indexing and single elements say of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import array_shapes, boxes, chunk_shapes

from orbax_explicit._boxes import (
    Box,
    Shape,
    box_of,
    box_shape,
    box_size,
    chunks_of,
    cut,
    intersect,
    slices_within,
    whole_box,
)


def elements(box: Box) -> set[tuple[int, ...]]:
    """The positions of all elements of a box."""
    return set(itertools.product(*(range(a, b) for a, b in box)))


@pytest.mark.parametrize(
    ("index", "shape", "box"),
    [
        pytest.param((), (), (), id="a scalar"),
        pytest.param((slice(None), slice(None)), (4, 6), ((0, 4), (0, 6)), id="all of an array"),
        pytest.param((slice(2, 4), slice(0, 3, None)), (4, 6), ((2, 4), (0, 3)), id="a part"),
        pytest.param((slice(2, None), slice(None, 3)), (4, 6), ((2, 4), (0, 3)), id="a part with open ends"),
        pytest.param((slice(None),), (0,), ((0, 0),), id="an array of size zero"),
    ],
)
def test_an_index_is_a_box(index: tuple[slice, ...], shape: Shape, box: Box) -> None:
    """As JAX writes indices: slices without steps."""
    assert box_of(index, shape) == box


def test_an_index_of_other_dimensions_is_an_error() -> None:
    """Rather than a box of too few."""
    with pytest.raises(ValueError, match="zip"):
        box_of((slice(None),), (4, 6))


@given(st.data())
def test_the_size_of_a_box_is_the_number_of_its_elements(data: st.DataObject) -> None:
    """Also where it stops before it starts: then there is none."""
    box = data.draw(boxes(data.draw(array_shapes()))) if data.draw(st.booleans()) else ((3, 1), (0, 4))
    assert box_size(box) == len(elements(box)) == math.prod(box_shape(box))
    assert all(n >= 0 for n in box_shape(box))


@given(array_shapes())
def test_the_whole_box_has_the_shape_of_the_array(shape: Shape) -> None:
    """And is what an index of all elements stands for."""
    assert box_shape(whole_box(shape)) == shape
    assert whole_box(shape) == box_of((slice(None),) * len(shape), shape)


@given(st.data())
def test_an_intersection_holds_the_common_elements(data: st.DataObject) -> None:
    """Whichever of the two comes first."""
    shape = data.draw(array_shapes())
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    assert elements(intersect(one, other)) == elements(one) & elements(other)
    assert intersect(one, other) == intersect(other, one)


@given(st.data())
def test_slices_find_a_box_within_another_one(data: st.DataObject) -> None:
    """The same elements as in the whole array."""
    shape = data.draw(array_shapes())
    outer = data.draw(boxes(shape))
    box = intersect(outer, data.draw(boxes(shape)))
    if not box_size(box):
        return
    whole = np.arange(math.prod(shape)).reshape(shape)
    held = whole[slices_within(outer, whole_box(shape))]
    np.testing.assert_array_equal(held[slices_within(box, outer)], whole[slices_within(box, whole_box(shape))])


@given(st.data())
def test_a_cut_splits_a_box_in_two(data: st.DataObject) -> None:
    """What is on one side of a position is not on the other, and nothing is lost."""
    shape = data.draw(array_shapes(min_dims=1))
    box = data.draw(boxes(shape))
    dimension = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[dimension]))
    low, high = cut(box, dimension, 0, at), cut(box, dimension, at, shape[dimension])
    assert elements(low) | elements(high) == elements(box)
    assert not elements(low) & elements(high)
    assert all(position[dimension] < at for position in elements(low))


@given(st.data())
def test_the_chunks_of_a_box_are_those_that_hold_its_elements(data: st.DataObject) -> None:
    """Each once, in order, and no other."""
    shape = data.draw(array_shapes())
    box, chunk = data.draw(boxes(shape)), data.draw(chunk_shapes(len(shape)))
    found = list(chunks_of(box, chunk))
    places = [place for place, _ in found]
    assert places == sorted({tuple(i // c for i, c in zip(at, chunk, strict=True)) for at in elements(box)})
    for place, covered in found:
        assert box_shape(covered) == chunk
        assert tuple(start for start, _ in covered) == tuple(i * c for i, c in zip(place, chunk, strict=True))
    assert sum(box_size(intersect(box, covered)) for _, covered in found) == box_size(box)


def test_chunks_may_stand_out_beyond_the_array() -> None:
    """Those at its end: their boxes are whole."""
    assert list(chunks_of(((3, 5),), (4,))) == [((0,), ((0, 4),)), ((1,), ((4, 8),))]
