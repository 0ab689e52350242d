"""Every program in `examples/`, as a reader would run it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PRINTED = {
    "explicit_axes_with_target.py": """\
bias: float32[4@model] on ['Explicit', 'Explicit'] axes
kernel: float32[8@data,4@model] on ['Explicit', 'Explicit'] axes
y: float32[2,4@model] on ['Explicit', 'Explicit'] axes
y = [[113.0, 121.0, 129.0, 137.0], [113.0, 121.0, 129.0, 137.0]]
""",
}
PRINTED["explicit_axes_without_target.py"] = PRINTED["explicit_axes_with_target.py"]


@pytest.mark.parametrize("arguments", [(), ("--stock",)], ids=["with ours", "with stock's checkpointer under register"])
@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_what_it_shows(tmp_path, example, arguments):
    """It ends well, and the restored arrays are sharded over explicit axes."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS" and not name.startswith("JAX_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == PRINTED[example]


def test_every_example_is_run():
    """A new program needs its line in the table above."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTED.keys()
