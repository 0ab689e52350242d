"""`_chunking`: chunks that no two shards share and that are not too large; blocks shared out evenly."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_explicit._boxes import box_size, chunks_of, intersect
from orbax_explicit._chunking import MAX_CHUNK_NBYTES, ONE_CHUNK_NBYTES, choose_chunk, share_out

LARGE_PRIMES = (11, 13, 101)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of an array, and that of its shards."""
    dims = draw(st.lists(st.tuples(st.integers(0, 12), st.sampled_from((1, 1, 2, 3))), max_size=3))
    return tuple(n * parts for n, parts in dims), tuple(n for n, _ in dims)


@given(
    sharded(), st.sampled_from((1, 2, 4, 8)), st.integers(1, 200), st.lists(st.integers(-1, 4), max_size=2).map(tuple)
)
def test_no_chunk_lies_in_two_shards(shapes, itemsize, max_nbytes, prefer) -> None:
    """And all chunks together cover each shard, since every process writes only its own."""
    shape, shard = shapes
    chunk = choose_chunk(shape, shard, itemsize, max_nbytes=max_nbytes, prefer=prefer)
    assert len(chunk) == len(shape)
    assert all(1 <= c <= max(1, n) for c, n in zip(chunk, shard, strict=True))
    if not math.prod(shape):
        return
    grid = [range(0, n, s) for n, s in zip(shape, shard, strict=True)]
    seen: Counter[tuple[int, ...]] = Counter()
    for start in itertools.product(*grid):
        block = tuple((a, a + s) for a, s in zip(start, shard, strict=True))
        parts = list(chunks_of(block, chunk))
        assert sum(box_size(intersect(block, box)) for _, box in parts) == box_size(block)
        seen.update(place for place, _ in parts)
    assert set(seen.values()) == {1}


@given(sharded(), st.sampled_from((1, 2, 4, 8)), st.integers(8, 200))
def test_a_chunk_is_no_larger_than_it_may_be(shapes, itemsize, max_nbytes) -> None:
    """Unless what is left of the shard along a split dimension has only large prime factors."""
    shape, shard = shapes
    chunk = choose_chunk(shape, shard, itemsize, max_nbytes=max_nbytes)
    if itemsize * math.prod(chunk) <= max_nbytes:
        return
    for c, n, s in zip(chunk, shape, shard, strict=True):
        assert c == 1 or (s < n and c in LARGE_PRIMES)


@given(sharded(), st.sampled_from((1, 4)))
def test_a_shard_that_is_small_enough_is_one_chunk(shapes, itemsize) -> None:
    """Dimensions of size 0 get chunks of size 1."""
    shape, shard = shapes
    chunk = tuple(max(1, n) for n in shard)
    assert choose_chunk(shape, shard, itemsize, max_nbytes=itemsize * math.prod(chunk)) == chunk


@pytest.mark.parametrize(
    ("shape", "shard", "options", "chunk"),
    [
        pytest.param((), (), {}, (), id="a scalar"),
        pytest.param((), (), {"max_nbytes": 1}, (), id="a scalar that is too large"),
        pytest.param((0, 8), (0, 8), {}, (1, 8), id="nothing, in chunks of size one"),
        pytest.param((64, 8), (64, 8), {"max_nbytes": 256}, (8, 8), id="the outermost dimension is cut first"),
        pytest.param((64, 64), (64, 64), {"max_nbytes": 4096}, (16, 64), id="to rows that are whole"),
        pytest.param((64, 64), (64, 64), {"max_nbytes": 1024}, (16, 16), id="but not below sixteen of them"),
        pytest.param((64, 64), (64, 64), {"max_nbytes": 256}, (4, 16), id="while an inner dimension can be cut"),
        pytest.param((64, 8), (64, 8), {"max_nbytes": 256, "prefer": (1,)}, (64, 1), id="a dimension preferred"),
        pytest.param((64, 8), (64, 8), {"max_nbytes": 128, "prefer": (1,)}, (32, 1), id="and then the others"),
        pytest.param((64, 8), (64, 8), {"max_nbytes": 256, "prefer": (7, -1)}, (8, 8), id="no such dimension"),
        pytest.param((101,), (101,), {"max_nbytes": 64}, (13,), id="any length, where nothing is split"),
        pytest.param((202,), (101,), {"max_nbytes": 64}, (101,), id="a prime length that is split stays"),
        pytest.param((24,), (12,), {"max_nbytes": 16}, (3,), id="a divisor, where it is split"),
        pytest.param((30,), (15,), {"max_nbytes": 20}, (5,), id="the smallest factor that there is"),
        pytest.param((202, 4), (101, 4), {"max_nbytes": 404}, (101, 1), id="one that can be cut, beside a prime"),
    ],
)
def test_which_chunk_is_chosen(shape, shard, options, chunk) -> None:
    """Of elements of four bytes."""
    assert choose_chunk(shape, shard, 4, **{"max_nbytes": MAX_CHUNK_NBYTES, **options}) == chunk


def test_one_chunk_is_never_larger_than_a_chunk_may_be() -> None:
    """Otherwise an array that is written as one would be cut again."""
    assert ONE_CHUNK_NBYTES <= MAX_CHUNK_NBYTES


@st.composite
def held(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int]]:
    """The processes that hold each block, and its bytes."""
    processes = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True).map(lambda p: tuple(sorted(p)))
    holders = draw(st.lists(processes, max_size=20))
    return holders, draw(st.lists(st.integers(0, 1000), min_size=len(holders), max_size=len(holders)))


@given(held())
def test_each_block_is_written_by_a_process_that_holds_it(blocks) -> None:
    """And every process comes to the same, which knows nothing but the arguments."""
    holders, nbytes = blocks
    owners = share_out(holders, nbytes)
    assert len(owners) == len(holders)
    assert all(owner in holding for owner, holding in zip(owners, holders, strict=True))
    assert share_out(list(holders), tuple(nbytes)) == owners


@given(st.integers(1, 8), st.lists(st.integers(0, 1000), max_size=40))
def test_what_everyone_holds_is_shared_out_evenly(processes, nbytes) -> None:
    """No process writes more than another one by more than the largest block."""
    owners = share_out([tuple(range(processes))] * len(nbytes), nbytes)
    written = dict.fromkeys(range(processes), 0)
    for owner, n in zip(owners, nbytes, strict=True):
        written[owner] += n
    assert max(written.values()) - min(written.values()) <= max(nbytes, default=0)


@given(held())
def test_a_block_goes_to_the_holder_that_has_least(blocks) -> None:
    """Of the blocks that a process writes and another one could, it had least before the last and smallest."""
    holders, nbytes = blocks
    owners = share_out(holders, nbytes)
    written: Counter[int] = Counter()
    last: dict[int, int] = {}
    for i in sorted(range(len(holders)), key=lambda i: (-nbytes[i], i)):
        written[owners[i]] += nbytes[i]
        if len(holders[i]) > 1:
            last[owners[i]] = i
    for owner, i in last.items():
        assert all(written[owner] - nbytes[i] <= written[other] for other in holders[i])


@pytest.mark.parametrize(
    ("holders", "nbytes", "owners"),
    [
        pytest.param([], [], [], id="nothing to write"),
        pytest.param([(3,)], [5], [3], id="one holder"),
        pytest.param([(0, 1), (0, 1)], [5, 5], [0, 1], id="equal blocks go round"),
        pytest.param([(0, 1), (0,)], [5, 5], [1, 0], id="who must write one block leaves the other"),
        pytest.param([(0, 1), (0, 1), (0, 1)], [1, 5, 4], [1, 0, 1], id="the largest first"),
        pytest.param([(0, 1)] * 2, [0, 0], [0, 0], id="blocks of no bytes cost nothing"),
    ],
)
def test_who_writes_what(holders, nbytes, owners) -> None:
    """By example."""
    assert share_out(holders, nbytes) == owners
