"""The commands and their options. What a command does is in the module that it imports when it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="orbax-explicit",
    help="Checkpoints that come back laid out the way they were meant, on whatever devices are here now.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    # With a callback Typer keeps the name of a command even while there is only one.
    """Checkpoints that come back laid out the way they were meant, on whatever devices are here now."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Steps to train.", min=2)] = 80,
    checkpoint_at: Annotated[int, typer.Option(help="Save every so many steps; resume from the first.", min=1)] = 30,
    keep: Annotated[Path | None, typer.Option(help="Keep the checkpoints in this new directory.")] = None,
) -> None:
    """Train a small transformer, checkpoint it, and resume it three times in new processes.

    Takes a minute or two on a laptop and needs no accelerator: the devices are virtual. Exits with 1 if a resumed run
    does not go on exactly where the first one was.
    """
    _require("demo", "flax", "optax", "sklearn", "rich")
    if checkpoint_at >= steps:
        raise typer.BadParameter(f"there is no step after {checkpoint_at} among {steps}", param_hint="--checkpoint-at")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise typer.BadParameter(f"{keep} exists and is not an empty directory", param_hint="--keep")

    from rich.console import Console

    with Console().status("Importing JAX ..."):
        from orbax_explicit.cli.demo import run_demo

    raise typer.Exit(0 if run_demo(steps=steps, checkpoint_at=checkpoint_at, keep=keep) else 1)


def _require(extra: str, *modules: str) -> None:
    """Exits with one line that says what to install if a module of the extra is not there."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        typer.echo(f"orbax-explicit: {', '.join(missing)} not found: pip install 'orbax-explicit[{extra}]'", err=True)
        raise typer.Exit(2)
