"""Keeping Python from looking for garbage while many objects are made that are none.

Python looks through all objects whenever so many more have been made. Taking 2,000 arrays took 0.24 s with it and 0.10 s
without; what is looked for, cycles that nobody refers to, is not made there.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Looks for no garbage, in any thread, until the context ends; briefly, please."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
