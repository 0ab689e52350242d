"""What each process of the demo runs: train and checkpoint, or restore and train on.

Every function here starts in a fresh process whose devices are set up already; with several processes, every one of
them calls it. What it returns travels back to the process that tells the story.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import orbax.checkpoint as ocp

import orbax_explicit as oxe
from orbax_explicit._capture import record_tree
from orbax_explicit._records import Manifest
from orbax_explicit.cli.demo._training import State, abstract_state, advance, load_data, mesh_of, new_state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What one run of training reports.

    Attributes:
        losses: The loss of each step, by the step's number.
        start: The layout of the state that the run began with, on the devices that it ran on.
        training_seconds: Wall time of the training loop, compilation and saving included.
        saving_seconds: Wall time after which each call of `save` returned.
        steps_while_writing: Steps that were trained while a checkpoint was being written.
    """

    losses: dict[int, float]
    start: Manifest
    training_seconds: float
    saving_seconds: tuple[float, ...] = ()
    steps_while_writing: int = 0


def train_and_checkpoint(directory: str, checkpoint_every: int, steps: int) -> TrainingRun:
    """Trains from the first step on; saves before each step whose number `checkpoint_every` divides, except the first."""
    state = new_state()
    start = record_tree(state).manifest
    images, labels = load_data(mesh_of(state))
    losses: dict[int, float] = {}
    saving_seconds: list[float] = []
    steps_while_writing = 0
    started = time.perf_counter()
    with ocp.CheckpointManager(directory, item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        for step in range(steps):
            if step > 0 and step % checkpoint_every == 0:
                called = time.perf_counter()
                manager.save(step, args=oxe.args.ExplicitSave(state))
                saving_seconds.append(time.perf_counter() - called)
            state, losses[step] = advance(state, images, labels)
            steps_while_writing += manager.is_saving_in_progress()
    return TrainingRun(
        losses=losses,
        start=start,
        training_seconds=time.perf_counter() - started,
        saving_seconds=tuple(saving_seconds),
        steps_while_writing=steps_while_writing,
    )


def resume_without_target(directory: str, step: int, steps: int) -> TrainingRun:
    """Restores the checkpoint of `step` as it was recorded, and trains on up to step `steps`."""
    with ocp.CheckpointManager(directory, item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        state = manager.restore(step)
    return _train_on(state, steps)


def resume_with_abstract_target(directory: str, step: int, steps: int) -> TrainingRun:
    """Restores the checkpoint of `step` into a target that names no device, and trains on up to step `steps`."""
    target = abstract_state()
    with ocp.CheckpointManager(directory, item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        state = manager.restore(step, args=oxe.args.ExplicitRestore(target))
    return _train_on(state, steps)


def _train_on(state: State, steps: int) -> TrainingRun:
    start = record_tree(state).manifest
    images, labels = load_data(mesh_of(state))
    losses: dict[int, float] = {}
    started = time.perf_counter()
    for step in range(int(state["step"]), steps):
        state, losses[step] = advance(state, images, labels)
    return TrainingRun(losses=losses, start=start, training_seconds=time.perf_counter() - started)
