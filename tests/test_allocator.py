"""`_allocator`: memory of chunks that were freed serves the next ones."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Eight chunks of 3 MiB in use at a time, ten times over; how many pages the kernel had to supply.
_PROGRAM = """
import resource
import sys
from orbax_explicit._allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

bytearray(4 << 20)
before = faults()
for _ in range(10):
    chunks = [bytearray(b"x") * (3 << 20) for _ in range(8)]
    del chunks
print(faults() - before)
"""


def supplied_pages(mode: str) -> int:
    result = subprocess.run([sys.executable, "-c", _PROGRAM, mode], check=True, capture_output=True, text=True)
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the threshold that follows what is freed is glibc's")
def test_chunks_are_not_zeroed_again_by_the_kernel() -> None:
    """Kept, they are supplied once; given back, each of ten times."""
    assert supplied_pages("kept") < 2 * 8 * 768
    assert supplied_pages("given back") > 5 * 8 * 768
