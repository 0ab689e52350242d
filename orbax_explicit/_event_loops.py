"""Coroutines, run to their end by code that is none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine returns. It runs in a thread of its own: an event loop may be running in this one, as in a notebook."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()
