"""Every program in `examples/`, as a reader would run it."""

from __future__ import annotations

import math
import os
import pathlib
import re
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


MESH = "on {'data': 4, 'model': 2}"
RESTORED = {
    "haiku_digits.py": [f"P(None, 'model') {MESH}", f"P('model', None) {MESH}"],
    "nnx_digits.py": [f"P(None, 'model') {MESH}"],
    "linen_digits.py": [f"Partitioned of (None, 'model'), P(None, 'model') {MESH}"],
    "equinox_digits.py": [f"P('model', None) {MESH}"],
}


def run(example: str, directory: pathlib.Path, *arguments: str) -> str:
    """What it prints."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS" and not name.startswith("JAX_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("arguments", [(), ("--stock",)], ids=["with ours", "with stock's checkpointer under register"])
@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_what_it_shows(tmp_path, example, arguments):
    """It ends well, and the restored arrays are sharded over explicit axes."""
    assert run(example, tmp_path, *arguments) == PRINTED[example]


@pytest.mark.parametrize("example", RESTORED)
def test_a_training_resumed_on_another_mesh_ends_as_it_would_have(tmp_path, example):
    """Laid out as meant there; with the loss of the one that was not interrupted, which is less than that of a guess."""
    *restored, losses = run(example, tmp_path).splitlines()
    assert restored == [f"restored: {line}" for line in RESTORED[example]]
    through, resumed = re.fullmatch(r"loss (\d\.\d+), resumed (\d\.\d+)", losses).groups()
    assert float(through) < math.log(10) / 2
    assert float(resumed) == pytest.approx(float(through), abs=5e-4)


@pytest.mark.parametrize("example", RESTORED)
def test_an_example_is_short(example):
    """So that it is read."""
    assert len((EXAMPLES / example).read_text().splitlines()) < 80


def test_every_example_is_run():
    """A new program needs its line in one of the tables above."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTED.keys() | RESTORED.keys()
