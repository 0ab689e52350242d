"""How much memory a call takes at its highest, for tests and for benchmarks."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """How many bytes the resident set grew by at its highest during a call, and what the call gave. Linux."""
    # Resets the high-water mark, so nothing between two samples is missed.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = call()
    return resident("VmHWM") - before, result


def resident(name: str) -> int:
    """Bytes of `VmRSS` or `VmHWM` of this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
