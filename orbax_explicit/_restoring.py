"""The one road that every restore takes: manifest + target + what is here -> plan -> bound plan.

The v0 handler, the array handler under `register` and `plan_restore` all come through here, so that what is
executed is what would have been printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, Sharding

from orbax_explicit._binding import Present, bind_plan, is_x64, read_present
from orbax_explicit._containers import container_notes
from orbax_explicit._leaf_capture import record_mesh
from orbax_explicit._outcomes import AsFallback
from orbax_explicit._plan import RestorePlan
from orbax_explicit._planning import plan_from_records
from orbax_explicit._policy import RestorePolicy, checked_policy
from orbax_explicit._records import Inventory, LeafPath, Manifest
from orbax_explicit._sidecar import read_manifest
from orbax_explicit._target_capture import CapturedTarget, describe_sharding, record_target

PyTree: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPlan:
    """A plan that is ready to be executed.

    Attributes:
        plan: The plan.
        shardings: Where each leaf lands, by its path in the result: an `UncommittedSharding` for an uncommitted
            array, None for a value on the host.
        target: The target; None for none.
        x64: Whether `jax_enable_x64` was on when it was made.
    """

    plan: RestorePlan
    shardings: Mapping[LeafPath, Sharding | None]
    target: CapturedTarget | None
    x64: bool


def checked_mesh(mesh: Any) -> Mesh | None:
    """The mesh, if it is one to place arrays on, or None.

    Raises:
        TypeError: It is something else, such as an abstract mesh.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, not {mesh!r}; resolve_mesh makes one of an AbstractMesh")
    return mesh


def _make_plan(
    manifest: Manifest,
    present: Present | Inventory,
    *,
    target: CapturedTarget | None = None,
    mesh: Mesh | None = None,
    policy: RestorePolicy | None = None,
    strict: bool = True,
    fallback: Sharding | None = None,
) -> RestorePlan:
    """Plans a restore with what JAX says.

    Args:
        manifest: What was recorded.
        present: What is here now; of devices that need not be here, their inventory alone.
        target: The tree to restore into; None for the recorded one.
        mesh: The mesh to place recorded specs on; None for the one that the order of `_planning` finds.
        policy: The caller's choices.
        strict: Whether a target's shape must be the saved one.
        fallback: The sharding of arrays whose recorded mesh does not fit as it is.
    """
    mesh = checked_mesh(mesh)
    here = present if isinstance(present, Present) else None
    plan = plan_from_records(
        manifest,
        target.records if target is not None else None,
        present.inventory if isinstance(present, Present) else present,
        checked_policy(policy),
        mesh=record_mesh(mesh) if mesh is not None else None,
        context=record_mesh(here.context) if here is not None and here.context is not None else None,
        strict=strict,
        fallback=AsFallback(sharding=describe_sharding(fallback).sharding) if fallback is not None else None,
        x64=here.x64 if here is not None else is_x64(),
        default_device_ids=here.default_device_ids if here is not None else None,
    )
    if plan.tree is None:
        return plan
    notes = container_notes(plan.tree)
    if manifest.inventory is None:
        # What stock Orbax keeps of a tree.
        notes = (
            *notes,
            "stock Orbax records no containers: tuples come back as lists, NamedTuples and other nodes as dicts, int keys as "
            "text; restore into a target to keep them",
        )
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))


def bind_restore(
    manifest: Manifest,
    present: Present,
    *,
    target: PyTree = None,
    mesh: Mesh | None = None,
    policy: RestorePolicy | None = None,
    strict: bool = True,
    fallback: Sharding | None = None,
) -> BoundPlan:
    """Plans a restore and binds the plan to the present devices.

    Args:
        manifest: What was recorded.
        present: What is here now.
        target: The tree to restore into; None for the recorded one.
        mesh: The mesh to place recorded specs on.
        policy: The caller's choices.
        strict: Whether a target's shape must be the saved one.
        fallback: The sharding of arrays whose recorded mesh does not fit as it is, as in `ocp.args.StandardRestore`.

    Raises:
        RestoreRefusedError: Something cannot be done; lists every problem.
    """
    captured = _capture_target(manifest, target)
    plan = _make_plan(manifest, present, target=captured, mesh=mesh, policy=policy, strict=strict, fallback=fallback)
    plan.raise_if_refused()
    shardings = bind_plan(plan, present, mesh=mesh, target=captured, fallback=fallback)
    return BoundPlan(plan=plan, shardings=shardings, target=captured, x64=present.x64)


def plan_restore(
    path: str | PathLike[str],
    target: PyTree = None,
    mesh: Mesh | None = None,
    devices: Sequence[jax.Device] | Inventory | None = None,
    policy: RestorePolicy | None = None,
) -> RestorePlan:
    """Says what a restore would do, before any array is read. `print` it.

    Any process may call it; each plans the same. Call it where the restore would be called: the mesh of
    `jax.set_mesh` counts. With an `Inventory` it plans for devices that need not be here, and starts no backend.

    Args:
        path: The directory of an item, as for `read_manifest`.
        target: The tree to restore into; None for the recorded one.
        mesh: The mesh to place recorded specs on.
        devices: The devices to restore onto, or an inventory of them, such as `orbax_explicit.testing.fake_inventory`
            makes; None for `jax.devices()`.
        policy: The caller's choices.

    Returns:
        The plan; `plan.refused` lists everything that could not be done.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there is no checkpoint item, or several.
        FormatError: The record is damaged or from a newer version.
    """
    present = devices if isinstance(devices, Inventory) else read_present(devices)
    return plan_manifest(read_manifest(path), present, target=target, mesh=mesh, policy=policy)


def plan_manifest(
    manifest: Manifest,
    present: Present | Inventory,
    *,
    target: PyTree = None,
    mesh: Mesh | None = None,
    policy: RestorePolicy | None = None,
    strict: bool = True,
    fallback: Sharding | None = None,
) -> RestorePlan:
    """Says what a restore would do, refused or not; takes what `bind_restore` takes, or the inventory of other devices."""
    captured = _capture_target(manifest, target)
    return _make_plan(manifest, present, target=captured, mesh=mesh, policy=policy, strict=strict, fallback=fallback)


def _capture_target(manifest: Manifest, target: PyTree) -> CapturedTarget | None:
    if target is None:
        return None
    if isinstance(target, RestorePolicy | Mesh):
        name = "policy" if isinstance(target, RestorePolicy) else "mesh"
        raise TypeError(f"the target is a {type(target).__name__}: pass it as {name}=")
    impls = {record.prng.impl for record in manifest.arrays.values() if record.prng is not None}
    return record_target(target, impls)
