"""`orbax-explicit demo`: a run is checkpointed, and three new ones go on from there as if nothing had happened.

This file tells the story. What is trained is in `_training`, what each process does in `_worker`, whether a run went on
as it should in `_verdict`, and how that looks in `_rendering`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

import orbax_explicit as oxe
from orbax_explicit._records import plural
from orbax_explicit.cli.demo import _rendering, _worker
from orbax_explicit.cli.demo._verdict import Verdict, judge
from orbax_explicit.cli.demo._worker import TrainingRun
from orbax_explicit.testing import DeviceProcessError, run_on_devices

DEVICES = 8
TIMEOUT_SECONDS = 600
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One way of going on from the checkpoint, in new processes.

    Attributes:
        title: What it is called in the tables.
        call: The call that restores, as one would write it.
        run: What each process runs.
        processes: Processes that run it together, with all devices divided among them.
    """

    title: str
    call: str
    run: Callable[[str, int, int], TrainingRun]
    processes: int


RESUMES = (
    Resume(
        title="no target",
        call="manager.restore(step)",
        run=_worker.resume_without_target,
        processes=1,
    ),
    Resume(
        title="abstract target",
        call="manager.restore(step, args=oxe.args.ExplicitRestore(target))",
        run=_worker.resume_with_abstract_target,
        processes=1,
    ),
    Resume(
        title="2 processes",
        call="manager.restore(step)",
        run=_worker.resume_without_target,
        processes=2,
    ),
)


def run_demo(*, steps: int, checkpoint_at: int, keep: Path | None = None) -> bool:
    """Runs the demo and prints it.

    Args:
        steps: Steps to train.
        checkpoint_at: Save before each step that this divides; resume from the first.
        keep: A directory for the checkpoints; None for one that is removed at the end.

    Returns:
        Whether all resumed runs went on as if nothing had happened.
    """
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    with ExitStack() as stack:
        directory = keep.resolve() if keep else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        ok = _tell(console, directory, steps, checkpoint_at)
    if keep:
        console.print(f"The checkpoints are in {keep}.")
    return ok


def _tell(console: Console, directory: Path, steps: int, checkpoint_at: int) -> bool:
    width = console.width
    console.rule("[bold]orbax-explicit demo[/]")
    console.print(
        "A small transformer learns to read handwritten digits on 8 virtual CPU devices. It is checkpointed while "
        "it trains. New processes then take it up from there, and nobody should be able to tell.\n"
    )

    with console.status("Training the first run ..."):
        try:
            (first,) = _run(_worker.train_and_checkpoint, directory, checkpoint_at, steps)
        except DeviceProcessError as error:
            _print_error(console, error)
            return False
    losses = list(first.losses.values())
    console.print(f"[bold]1  The first run[/]  on mesh {_rendering.mesh_text(first.start)}")
    _print_indented(
        console,
        f"{steps} steps in {first.training_seconds:.0f} s, loss {losses[0]:.2f} -> {losses[-1]:.2f}",
        f"a checkpoint every {plural(checkpoint_at, 'step')}; save() returned after "
        f"{', '.join(f'{seconds:.2f} s' for seconds in first.saving_seconds)} (the first one compiles)",
        f"{plural(first.steps_while_writing, 'step')} of training went on while it wrote",
    )

    recorded = oxe.read_manifest(directory / str(checkpoint_at))
    size = f"{len(recorded.arrays)} arrays, {recorded.nbytes / 1e6:.1f} MB"
    console.print(f"[bold]2  What was recorded[/]  at step {checkpoint_at}: {size}\n")
    console.print(_rendering.render_manifest(recorded, width=width))
    console.print()

    console.print(f"[bold]3  Taken up again[/]  from step {checkpoint_at}, each time in new processes")
    runs: dict[str, TrainingRun] = {}
    verdicts: dict[str, Verdict | None] = {}
    for resume in RESUMES:
        _print_indented(console, f"{resume.title:<15}  {resume.call}", end="")
        with console.status(f"Resuming: {resume.title} ..."):
            try:
                reports = _run(resume.run, directory, checkpoint_at, steps, processes=resume.processes)
            except DeviceProcessError as error:
                _print_error(console, error)
                verdicts[resume.title] = None
                continue
        runs[resume.title] = reports[0]
        # Every process must go on as if nothing had happened: one that does not decides.
        judged = [judge(first=first, recorded=recorded, resumed=report) for report in reports]
        verdicts[resume.title] = min(judged, key=lambda verdict: verdict.ok)
    console.print()
    landings = {title: run.start for title, run in runs.items()}
    console.print(_rendering.render_landings(recorded, landings, width=width))
    console.print()

    console.print("[bold]4  The loss goes on[/]\n")
    curves = {title: run.losses for title, run in runs.items()}
    console.print(_rendering.render_losses(first.losses, curves, width=width))
    console.print()
    console.print(_rendering.render_curves(first.losses, curves, checkpoint=checkpoint_at, width=width))
    console.print()
    console.print(_rendering.render_verdicts(verdicts))
    return all(verdict is not None and verdict.ok for verdict in verdicts.values())


def _print_error(console: Console, error: DeviceProcessError) -> None:
    console.print(Text(str(error), style="red"))


def _print_indented(console: Console, *lines: str, end: str = "\n") -> None:
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 3)))
    console.print(end=end)


def _run(
    function: Callable[[str, int, int], TrainingRun],
    directory: Path,
    checkpoint_at: int,
    steps: int,
    processes: int = 1,
) -> list[TrainingRun]:
    """What each of the new processes reports."""
    return run_on_devices(
        function,
        str(directory),
        checkpoint_at,
        steps,
        devices=DEVICES // processes,
        processes=processes,
        timeout_seconds=TIMEOUT_SECONDS,
    )
