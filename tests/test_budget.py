"""`_budget`: how much is in flight, in which order, and what becomes of the rest when one transfer fails."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_explicit._budget import Budget, NotStarted, batches, gather_all


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=12), st.randoms(use_true_random=False))
def test_never_more_is_in_flight_than_may_be(limit, sizes, random) -> None:
    """But for what needs more by itself; and everything gets its turn, whatever ends first."""
    in_flight: list[int] = []
    served: list[int] = []

    async def transfer(budget: Budget, i: int) -> None:
        async with budget.reserved(sizes[i]):
            in_flight.append(sizes[i])
            served.append(i)
            assert sum(in_flight) <= limit or [size for size in in_flight if size] == [sizes[i]]
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            in_flight.remove(sizes[i])

    async def run() -> None:
        budget = Budget(limit)
        await asyncio.gather(*(transfer(budget, i) for i in range(len(sizes))))

    asyncio.run(run())
    assert served == list(range(len(sizes)))


def test_several_are_in_flight_where_they_fit() -> None:
    """The bound is one of bytes, not of transfers."""

    async def run() -> int:
        budget, most, now = Budget(10), 0, 0

        async def transfer() -> None:
            nonlocal most, now
            async with budget.reserved(3):
                now += 1
                most = max(most, now)
                await asyncio.sleep(0)
                now -= 1

        await asyncio.gather(*(transfer() for _ in range(9)))
        return most

    assert asyncio.run(run()) == 3


def test_what_waits_is_served_in_order() -> None:
    """A large request is not passed by small ones for ever; one that gives up leaves the queue."""

    async def run() -> list[str]:
        budget = Budget(10)
        served: list[str] = []

        async def request(name: str, nbytes: int) -> None:
            async with budget.reserved(nbytes):
                served.append(name)
                await asyncio.sleep(0.01)

        first, gives_up, *rest = [
            asyncio.ensure_future(request(name, nbytes))
            for name, nbytes in (("a", 6), ("gives up", 10), ("large", 100), ("b", 5), ("c", 5))
        ]
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.gather(first, *rest)
        assert budget._in_flight_nbytes == 0
        return served

    assert asyncio.run(run()) == ["a", "large", "b", "c"]


def test_a_larger_bound_lets_in_what_waits() -> None:
    """At once: what is in flight need not end first."""

    async def run() -> list[str]:
        budget = Budget(10)
        served: list[str] = []
        done = asyncio.Event()

        async def request(name: str) -> None:
            async with budget.reserved(10):
                served.append(name)
                await done.wait()

        requests = [asyncio.ensure_future(request(name)) for name in "abc"]
        await asyncio.sleep(0)
        before = list(served)
        budget.nbytes = 20
        assert budget.nbytes == 20
        await asyncio.sleep(0)
        between = list(served)
        done.set()
        await asyncio.gather(*requests)
        return [*before, "|", *between, "|", *served]

    assert asyncio.run(run()) == [*"a|ab|abc"]


def test_after_a_failure_nothing_starts() -> None:
    """What waits is left out, what is in flight ends, and the failure is what is raised."""
    started, ended = [], []

    async def run() -> None:
        budget = Budget(2)

        async def transfer(i: int) -> int:
            async with budget.reserved(1):
                started.append(i)
                if i == 1:
                    raise OSError("the disk is full")
                await asyncio.sleep(0.01)
                ended.append(i)
                return i

        try:
            await gather_all(transfer(i) for i in range(6))
        finally:
            assert budget._in_flight_nbytes == 0

    with pytest.raises(OSError, match="the disk is full"):
        asyncio.run(run())
    assert (started, ended) == ([0, 1], [0])


def test_a_failure_beside_the_bound_counts_too() -> None:
    """Opening an array, say, needs no bytes: nothing starts after that either."""
    budget = Budget(10)
    with budget.unless_failed():
        pass
    with pytest.raises(KeyError), budget.unless_failed():
        raise KeyError("name")
    with pytest.raises(NotStarted), budget.unless_failed():
        pytest.fail("started")

    async def transfer() -> None:
        async with budget.reserved(1):
            pytest.fail("started")

    with pytest.raises(NotStarted):
        asyncio.run(transfer())


def returns(value: int):
    async def run() -> int:
        await asyncio.sleep(0)
        return value

    return run()


def raises(error: Exception, rounds: int = 0):
    async def run() -> int:
        for _ in range(rounds):
            await asyncio.sleep(0)
        raise error

    return run()


def test_results_come_in_the_order_of_the_coroutines() -> None:
    """Whichever ends first."""
    assert asyncio.run(gather_all([])) == []
    assert asyncio.run(gather_all(returns(i) for i in range(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("coroutines", "error"),
    [
        pytest.param(lambda: [returns(1), raises(OSError())], OSError, id="the only one"),
        pytest.param(lambda: [raises(OSError(), 3), raises(KeyError())], OSError, id="the first of two"),
        pytest.param(lambda: [raises(NotStarted()), raises(OSError())], OSError, id="rather than what was left out"),
        pytest.param(lambda: [returns(1), raises(NotStarted())], NotStarted, id="what was left out, where it is all"),
    ],
)
def test_the_first_error_of_its_own_is_raised(coroutines, error) -> None:
    """What was left out because of another one is no reason."""
    with pytest.raises(error):
        asyncio.run(gather_all(coroutines()))


def test_an_error_is_raised_when_all_have_ended() -> None:
    """TensorStore calls back into the event loop of a transfer: nothing may outlive it."""
    ended = []

    async def slow() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(True)

    with pytest.raises(OSError, match="early"):
        asyncio.run(gather_all([raises(OSError("early")), slow()]))
    assert ended == [True]


@pytest.mark.parametrize(
    ("items", "limits", "expected"),
    [
        pytest.param([], (10, 10), [], id="nothing"),
        pytest.param([3, 3, 3, 3], (6, 10), [[3, 3], [3, 3]], id="a batch ends when it has so many bytes"),
        pytest.param([9, 1], (6, 10), [[9], [1]], id="an item that has more is in one"),
        pytest.param([1, 1, 1], (6, 2), [[1, 1], [1]], id="or so many items"),
        pytest.param([0, 0, 0], (6, 10), [[0, 0, 0]], id="the last one ends with the items"),
    ],
)
def test_batches(items, limits, expected) -> None:
    """Consecutive items, each in one batch."""
    assert list(batches(items, lambda nbytes: nbytes, max_nbytes=limits[0], max_items=limits[1])) == expected
