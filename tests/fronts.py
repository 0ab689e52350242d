"""The doors through which people save and restore: what is true behind one of them is to be true behind each."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
from jax.sharding import Mesh

import orbax_explicit as oxe
from orbax_explicit import v1 as oxe1

STEP = 3


@dataclass(frozen=True)
class Front:
    """One way to save and to restore.

    Attributes:
        save: Saves a tree under a directory that does not exist yet, with options of the handler.
        restore: Restores what `save` saved, perhaps into a target, on a mesh, by a policy.
        item: The directory of the item, for `plan_restore`.
        is_orbaxs: Whether it is v1's own functions, which resolve, and refuse, some leaves before they ask a handler.
    """

    save: Callable[..., None]
    restore: Callable[..., Any]
    item: Callable[[pathlib.Path], pathlib.Path]
    is_orbaxs: bool = False


def save(root: pathlib.Path, state: Any, **options: Any) -> None:
    with oxe.StandardCheckpointer(**options) as checkpointer:
        checkpointer.save(root, state)


def restore(
    root: pathlib.Path, target: Any = None, mesh: Mesh | None = None, policy: oxe.RestorePolicy | None = None
) -> Any:
    with oxe.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(root, target, mesh=mesh, policy=policy)


def save_stock(root: pathlib.Path, state: Any) -> None:
    """By stock Orbax, for us to restore."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root, state)


def save_managed(root: pathlib.Path, state: Any, **options: Any) -> None:
    with ocp.CheckpointManager(root, item_handlers=oxe.ExplicitCheckpointHandler(**options)) as manager:
        manager.save(STEP, args=oxe.args.ExplicitSave(state))


def restore_managed(
    root: pathlib.Path, target: Any = None, mesh: Mesh | None = None, policy: oxe.RestorePolicy | None = None
) -> Any:
    with ocp.CheckpointManager(root, item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        return manager.restore(STEP, args=oxe.args.ExplicitRestore(target, mesh=mesh, policy=policy))


def save_by_registry(root: pathlib.Path, state: Any, **options: Any) -> None:
    registry = oxe.handler_registry("default", handler=oxe.ExplicitCheckpointHandler(**options))
    with ocp.CheckpointManager(root, handler_registry=registry) as manager:
        manager.save(STEP, args=ocp.args.StandardSave(state))


def restore_by_registry(
    root: pathlib.Path, target: Any = None, mesh: Mesh | None = None, policy: oxe.RestorePolicy | None = None
) -> Any:
    """Stock's arguments name no mesh: it is that of `jax.set_mesh`."""
    at_hand = jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()
    registry = oxe.handler_registry("default", policy=policy)
    with at_hand, ocp.CheckpointManager(root, handler_registry=registry) as manager:
        return manager.restore(STEP, args=ocp.args.StandardRestore(target))


def context(*, use_ocdbt: bool = True, use_zarr3: bool = True, **options: Any) -> ocp1.Context:
    """A v1 context with options of the handler, of which Orbax's own are the context's."""
    base = ocp1.Context()
    base.array.saving.use_ocdbt, base.array.saving.use_zarr3 = use_ocdbt, use_zarr3
    return oxe1.context(base=base, **options)


def save_v1(root: pathlib.Path, state: Any, **options: Any) -> None:
    with context(**options):
        oxe1.save(root, state)


def restore_v1(
    root: pathlib.Path, target: Any = None, mesh: Mesh | None = None, policy: oxe.RestorePolicy | None = None
) -> Any:
    return oxe1.load(root, target, mesh=mesh, policy=policy)


def save_in_context(root: pathlib.Path, state: Any, **options: Any) -> None:
    with context(**options):
        ocp1.save(root, state)


def restore_in_context(
    root: pathlib.Path, target: Any = None, mesh: Mesh | None = None, policy: oxe.RestorePolicy | None = None
) -> Any:
    with oxe1.context(policy, mesh=mesh):
        return ocp1.load(root, target)


def save_by_checkpointer(root: pathlib.Path, state: Any, **options: Any) -> None:
    with ocp1.training.Checkpointer(root, context=context(**options)) as checkpointer:
        checkpointer.save(STEP, state)


def restore_by_checkpointer(
    root: pathlib.Path, target: Any = None, mesh: Mesh | None = None, policy: oxe.RestorePolicy | None = None
) -> Any:
    with ocp1.training.Checkpointer(root, context=oxe1.context(policy, mesh=mesh)) as checkpointer:
        return checkpointer.load(STEP, target)


def managed_item(root: pathlib.Path) -> pathlib.Path:
    return root / str(STEP) / "default"


REGISTRY = "CheckpointManager with handler_registry and stock's arguments"
FRONTS = {
    "StandardCheckpointer": Front(save, restore, lambda root: root),
    "CheckpointManager": Front(save_managed, restore_managed, managed_item),
    REGISTRY: Front(save_by_registry, restore_by_registry, managed_item),
    "v1": Front(save_v1, restore_v1, lambda root: root / "state"),
    "v1, Orbax's own functions in a context": Front(
        save_in_context, restore_in_context, lambda root: root / "state", is_orbaxs=True
    ),
    "v1, training.Checkpointer": Front(
        save_by_checkpointer, restore_by_checkpointer, lambda root: root / str(STEP) / "state", is_orbaxs=True
    ),
}
OUR_FRONTS = {name: front for name, front in FRONTS.items() if not front.is_orbaxs}
