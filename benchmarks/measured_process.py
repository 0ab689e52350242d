"""A fresh process for each measurement: how it is started and answers.

What one measurement leaves behind, memory that an allocator keeps or a program that JAX has compiled, would be a gift
to the next one in the same process.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from peak import peak_of

__all__ = ["peak_of", "run_child"]


def run_child(script: str, *arguments: str) -> Any:
    """What the script, run with these arguments, prints as JSON in its last line.

    Raises:
        SystemExit: It failed; with all that it printed.
    """
    result = subprocess.run([sys.executable, script, *arguments], check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{arguments}\n{result.stdout}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])
