"""Bounding the bytes that are in flight, by batches and by a budget, and ending well when one of many transfers fails.

TensorStore calls back into the event loop in which a transfer was started. So none is ever cancelled: what has failed
keeps the others from starting, and the first error is raised when all have ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class NotStarted(Exception):
    """A transfer that was left out, since another one has failed."""


class Budget:
    """Bytes that may be in flight at a time: first come, first served.

    What needs more than there is in all gets it when nothing else is in flight.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._in_flight_nbytes = 0
        self._has_failed = False
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @property
    def nbytes(self) -> int:
        """What may be in flight."""
        return self._nbytes

    @nbytes.setter
    def nbytes(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._grant()

    @contextlib.contextmanager
    def unless_failed(self) -> Iterator[None]:
        """Starts nothing more once something has failed within one of these contexts."""
        if self._has_failed:
            raise NotStarted
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
                if self._in_flight_nbytes and self._in_flight_nbytes + nbytes > self._nbytes:
                    return
                self._in_flight_nbytes += nbytes
                granted.set_result(None)
            self._waiting.popleft()


def batches(items: Iterable[_T], nbytes: Callable[[_T], int], *, max_nbytes: int, max_items: int) -> Iterator[list[_T]]:
    """Consecutive items in batches, each of at most so many items; it ends when it has so many bytes.

    Args:
        items: The items.
        nbytes: Bytes of an item.
        max_nbytes: Bytes at which a batch ends.
        max_items: Items at which a batch ends.
    """
    batch: list[_T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += nbytes(item)
        if total >= max_nbytes or len(batch) == max_items:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Runs coroutines to their end; then raises what the first one raised that failed of itself."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, NotStarted):
            raise error
    if errors:
        raise errors[0]
    return [result for result in results if not isinstance(result, BaseException)]
