"""`orbax-explicit demo`, and what it takes to trust its verdicts."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import subprocess
import sys

import pytest
from rich.console import Console

from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    SpecRecord,
)
from orbax_explicit.cli.demo._rendering import render_curves, render_manifest
from orbax_explicit.cli.demo._verdict import judge
from orbax_explicit.cli.demo._worker import TrainingRun
from orbax_explicit.testing import fake_inventory


def run_cli(*arguments: str, hide: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command line in a new process, as if the module `hide` were not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hide.split()!r})); from orbax_explicit.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        check=False,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    )


def manifest(*, devices: int = 8, processes: int = 1, memory_kind: str = "pinned_host") -> Manifest:
    """Two layers of a weight that is split over "model", as a run on those devices records them."""
    inventory = fake_inventory(devices // processes, processes=processes)
    mesh = MeshRecord(
        axis_names=("data", "model"),
        axis_sizes=(2, 4),
        axis_types=("explicit", "explicit"),
        device_ids=inventory.device_ids,
        platform="cpu",
    )
    sharding = NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=(None, "model")), memory_kind=memory_kind)
    weight = ArrayRecord(shape=(8, 16), dtype="float32", sharding=sharding)
    layer = ContainerRecord(kind="dict", keys=(Key("dict", "kernel"),), children=(weight,))
    layers = ContainerRecord(kind="list", keys=(Key("index", 0), Key("index", 1)), children=(layer, layer))
    tree = ContainerRecord(kind="dict", keys=(Key("dict", "params"),), children=(layers,))
    return Manifest(tree=tree, inventory=inventory)


def training_run(start: Manifest, *losses: float) -> TrainingRun:
    """A run that trained steps 0, 1, 2, ... with these losses."""
    return TrainingRun(losses=dict(enumerate(losses)), start=start, training_seconds=1.0)


def test_the_demo_resumes_three_times_and_says_so(tmp_path: pathlib.Path) -> None:
    """The demo, shortened, ends with three verdicts that pass, and keeps its checkpoint where it was told to."""
    kept = tmp_path / "kept"
    result = run_cli("demo", "--steps", "6", "--checkpoint-at", "3", "--keep", str(kept))
    assert result.returncode == 0, result.stdout + result.stderr
    verdicts = [line.split("  ", 2) for line in result.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert [(mark, title) for mark, title, _ in verdicts] == [
        ("PASS", "no target"),
        ("PASS", "abstract target"),
        ("PASS", "2 processes"),
    ]
    assert all("3/3 losses bitwise equal" in text for _, _, text in verdicts[:2])
    assert [path.name for path in kept.iterdir() if path.name.isdigit()] == ["3"]


@pytest.mark.parametrize("missing", ["typer", "rich", "flax", "optax", "sklearn"])
def test_a_missing_extra_is_one_line_that_says_what_to_install(missing: str) -> None:
    """Without one of the packages of its extra the demo prints no traceback but the command that installs them."""
    result = run_cli("demo", hide=missing)
    assert result.returncode != 0
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert missing in line
    assert "pip install 'orbax-explicit[demo]'" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(
            ("--steps", "5", "--checkpoint-at", "5"), "no step after 5", id="a checkpoint after the last step"
        ),
        pytest.param(("--keep", "."), "not an empty directory", id="a directory that has something in it"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_runs(arguments: tuple[str, ...], said: str) -> None:
    """An option that makes no sense is an error of usage that names the option."""
    result = run_cli("demo", *arguments)
    assert result.returncode == 2
    assert arguments[-2] in result.stderr
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_on_the_same_devices_losses_must_be_the_same_bits() -> None:
    """A loss that is off by its last bit fails there; where floats are summed in another order it passes."""
    first = training_run(manifest(), 2.0, 1.0)
    same = judge(first=first, recorded=manifest(), resumed=training_run(manifest(), 2.0, 1.0))
    assert (same.ok, same.equal_losses, same.as_recorded) == (True, 2, 2)
    off = judge(first=first, recorded=manifest(), resumed=training_run(manifest(), 2.0, 1.0000001))
    assert (off.ok, off.equal_losses) == (False, 1)
    elsewhere = judge(first=first, recorded=manifest(), resumed=training_run(manifest(processes=2), 2.0, 1.0000001))
    assert (elsewhere.ok, elsewhere.as_recorded) == (True, 2)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("loss", [float("nan"), 1.1])
def test_a_loss_that_is_no_number_or_far_off_never_passes(processes: int, loss: float) -> None:
    """On any devices."""
    first = training_run(manifest(), 2.0, 1.0)
    assert not judge(
        first=first, recorded=manifest(), resumed=training_run(manifest(processes=processes), 2.0, loss)
    ).ok


@pytest.mark.parametrize("processes", [1, 2])
def test_an_array_in_another_memory_fails_whatever_the_losses(processes: int) -> None:
    """The layout is half of the verdict, also where the devices are others."""
    start = manifest(processes=processes, memory_kind="device")
    verdict = judge(first=training_run(manifest(), 1.0), recorded=manifest(), resumed=training_run(start, 1.0))
    assert (verdict.ok, verdict.equal_losses, verdict.as_recorded) == (False, 1, 0)


def test_a_run_that_trained_nothing_fails() -> None:
    """No loss at all is not a loss that agrees."""
    first = training_run(manifest(), 1.0)
    assert not judge(first=first, recorded=manifest(), resumed=dataclasses.replace(first, losses={})).ok


def test_layers_that_are_alike_share_a_row() -> None:
    """The table of what was recorded grows with the kinds of arrays, not with the layers."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_manifest(manifest(), width=100))
    assert "params/{0,1}/kernel" in console.export_text()


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("steps", [2, 80, 1000])
def test_curves_fit_and_line_up(steps: int, width: int) -> None:
    """A resumed run's bars stand below the same steps of the first run, and no line is folded."""
    first = {step: 1 / (1 + step) for step in range(steps)}
    checkpoint = steps - 1
    console = Console(width=width, record=True, file=io.StringIO())
    resumed = {"no target": {checkpoint: first[checkpoint]}}
    console.print(render_curves(first, resumed, checkpoint=checkpoint, width=width))
    above, below, mark = (line.rstrip() for line in console.export_text().splitlines())
    assert len(below) in (len(above), len("no target"))
    assert len(mark) <= width
    assert f"checkpoint of step {checkpoint}" in mark
