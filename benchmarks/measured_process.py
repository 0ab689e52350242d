"""A fresh process for each measurement: how it is started and answers, and how much memory it takes.

What one measurement leaves behind, memory that an allocator keeps or a program that JAX has compiled, would be a gift
to the next one in the same process.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def run_child(script: str, *arguments: str) -> Any:
    """What the script, run with these arguments, prints as JSON in its last line.

    Raises:
        SystemExit: It failed; with all that it printed.
    """
    result = subprocess.run([sys.executable, script, *arguments], check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{arguments}\n{result.stdout}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


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
