"""Plans and abstract meshes -> concrete meshes and shardings: asks JAX once what is here.

`read_present` is the only place that reads ambient state. It is called in the caller's thread, before anything
is awaited: in a running event loop (a notebook) Orbax calls type handlers from another thread, where the context
mesh is empty. What it read is passed on as a value.

`bind_plan` makes one `Mesh` for each mesh of a plan. Axis types and memory kinds are always passed: upstream's
defaults differ between `Mesh`, `AbstractMesh` and `jax.make_mesh`, and have changed between releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from orbax_explicit._capture import record_inventory
from orbax_explicit._errors import MeshMismatchError, Problem
from orbax_explicit._leaf_capture import partition_spec_of, record_mesh
from orbax_explicit._mesh_planning import same_axes
from orbax_explicit._outcomes import (
    AsFallback,
    AsTarget,
    Kept,
    NotPlaced,
    OnDevice,
    OnHost,
    OnMesh,
    Outcome,
    PlannedMesh,
    Uncommitted,
)
from orbax_explicit._plan import RestorePlan
from orbax_explicit._records import AxisType, Inventory, LeafPath, MeshRecord, plural
from orbax_explicit._target_capture import CapturedTarget
from orbax_explicit._topology import first_devices


class UncommittedSharding(SingleDeviceSharding):
    """The default device, for an array that is to stay uncommitted.

    JAX has no sharding that says so. This one travels through Orbax's restore arguments as a mark; an array never
    carries it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """What is here now.

    Attributes:
        devices: The devices to restore onto, in the order of `jax.devices()`.
        inventory: The record of these devices.
        context: The concrete mesh of `jax.set_mesh`; None where there is none.
        default_device: The device of this process on which an uncommitted array is.
        x64: Whether `jax_enable_x64` is on.
    """

    devices: tuple[jax.Device, ...]
    inventory: Inventory
    context: Mesh | None
    default_device: jax.Device
    x64: bool

    @property
    def default_device_ids(self) -> tuple[int, ...]:
        """`jax.Device.id` of the default device of each process; of other processes their first device is assumed."""
        first = {process: ids[0] for process, ids in self.inventory.device_ids_by_process().items()}
        first[self.default_device.process_index] = self.default_device.id
        return tuple(first.values())


def read_present(devices: Sequence[jax.Device] | None = None) -> Present:
    """Reads the ambient state that a restore depends on. Call it in the caller's thread, once.

    Args:
        devices: The devices to restore onto; None for `jax.devices()`.
    """
    context = jax.sharding.get_mesh()
    devices = tuple(jax.devices() if devices is None else devices)
    return Present(
        devices=devices,
        inventory=record_inventory(devices),
        context=None if context.empty else context,
        default_device=_default_device(),
        x64=is_x64(),
    )


def is_x64() -> bool:
    """Whether a `jax.Array` can hold 64-bit numbers here."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # JAX adds its flags at run time


def _default_device() -> jax.Device:
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX adds its flags at run time
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default if isinstance(default, jax.Device) else jax.local_devices()[0]


def bind_plan(
    plan: RestorePlan,
    present: Present,
    *,
    mesh: Mesh | None = None,
    target: CapturedTarget | None = None,
    fallback: Sharding | None = None,
) -> dict[LeafPath, Sharding | None]:
    """Makes the shardings that a plan describes. All leaves of one planned mesh get one `Mesh`.

    Args:
        plan: A plan that is not refused.
        present: What it was planned for.
        mesh: The mesh that it was planned with, if one was passed.
        target: The target that it was planned for, if there was one.
        fallback: The sharding for arrays whose recorded mesh does not fit, if there was one.

    Returns:
        The sharding of each leaf by its path: an `UncommittedSharding` for an uncommitted array, None for a value on
        the host and for one that the target keeps.
    """
    binder = _Binder(present, mesh, target, fallback)
    return {outcome.path: binder.sharding(outcome) for outcome in plan.outcomes}


class _Binder:
    """Binds one plan: each mesh and each sharding once."""

    def __init__(
        self, present: Present, mesh: Mesh | None, target: CapturedTarget | None, fallback: Sharding | None
    ) -> None:
        self.present = present
        self.mesh = mesh
        self.target = target
        self.fallback = fallback
        # By identity: hashing a planned mesh costs O(devices). The plan keeps the keys alive.
        self.meshes: dict[int, Mesh] = {}
        self.shardings: dict[tuple[int, Any, str], NamedSharding] = {}
        self.by_id = {device.id: device for device in present.devices}

    def sharding(self, outcome: Outcome) -> Sharding | None:
        placement = outcome.placement
        match placement:
            case OnHost() | Kept() | NotPlaced():
                return None
            case AsTarget():
                assert self.target is not None
                sharding: Sharding = self.target.leaves[outcome.path].sharding
                return sharding
            case AsFallback():
                return self.fallback
            case Uncommitted():
                return UncommittedSharding(self.present.default_device, memory_kind=placement.memory_kind)
            case OnDevice():
                device_id = placement.device_id
                device = self.present.default_device if device_id is None else self.by_id[device_id]
                return SingleDeviceSharding(device, memory_kind=placement.memory_kind)
            case OnMesh():
                key = (id(placement.mesh), placement.spec, placement.memory_kind)
                if key not in self.shardings:
                    self.shardings[key] = NamedSharding(
                        self._mesh(placement.mesh), partition_spec_of(placement.spec), memory_kind=placement.memory_kind
                    )
                return self.shardings[key]

    def _mesh(self, planned: PlannedMesh) -> Mesh:
        if id(planned) not in self.meshes:
            self.meshes[id(planned)] = self._bind_mesh(planned)
        return self.meshes[id(planned)]

    def _bind_mesh(self, planned: PlannedMesh) -> Mesh:
        if planned.source == "given":
            assert self.mesh is not None
            return self.mesh
        if planned.source == "context":
            assert self.present.context is not None
            return self.present.context
        if planned.source == "new":
            return _make_mesh(planned.mesh, [self.by_id[i] for i in planned.device_ids])
        ids = planned.mesh.device_ids
        assert ids is not None
        if planned.source == "target":
            devices = {d.id: d for leaf in self._target_meshes() for d in leaf.devices.flat}
        else:
            devices = self.by_id
        grid = np.array([devices[i] for i in ids], dtype=object).reshape(planned.mesh.axis_sizes)
        return Mesh(grid, planned.mesh.axis_names, axis_types=axis_types_of(planned.mesh))

    def _target_meshes(self) -> list[Mesh]:
        assert self.target is not None
        meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in self.target.leaves.values())
        return list(dict.fromkeys(mesh for mesh in meshes if isinstance(mesh, Mesh)))


def resolve_mesh(abstract_mesh: AbstractMesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The concrete mesh for an abstract one, on the devices that are here now.

    The mesh of `jax.set_mesh` if it equals `abstract_mesh` in axis names, sizes and types; else a new one by
    `jax.make_mesh` over the first devices, with the same names, sizes and types. Every process calls it, and gets
    the same mesh.

    Args:
        abstract_mesh: Axis names, sizes (devices along each) and types.
        devices: The devices to choose from, in order; None for `jax.devices()`, and for the context mesh.

    Raises:
        MeshMismatchError: It has more devices than there are, or the context mesh contradicts it.
    """
    wanted = record_mesh(abstract_mesh)
    if not wanted.axis_names:
        raise MeshMismatchError(
            Problem(could_not="cannot resolve an empty abstract mesh", fix="pass one with axes", about="mesh")
        )
    present = read_present(devices)
    if devices is None and present.context is not None:
        context = record_mesh(present.context)
        if same_axes(context, wanted):
            return present.context
        raise MeshMismatchError(
            Problem(
                could_not=f"cannot resolve mesh {wanted} on the mesh of jax.set_mesh {context}",
                present=f"the mesh of jax.set_mesh is {context}",
                fix="make the two agree in axis names, sizes and types, or pass devices=",
                about="mesh",
            )
        )
    chosen = first_devices(present.inventory, wanted.size) if wanted.size <= len(present.devices) else None
    if chosen is None:
        raise MeshMismatchError(
            Problem(
                could_not=f"cannot resolve mesh {wanted} on {plural(len(present.devices), 'device')}",
                present=str(present.inventory),
                fix="ask for a smaller mesh",
                about="mesh",
            )
        )
    by_id = {device.id: device for device in present.devices}
    return _make_mesh(wanted, [by_id[i] for i in chosen])


def _make_mesh(mesh: MeshRecord, devices: Sequence[jax.Device]) -> Mesh:
    """A new mesh over these devices, in the order that suits their interconnect."""
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=axis_types_of(mesh), devices=list(devices))


def axis_types_of(mesh: MeshRecord) -> tuple[jax.sharding.AxisType, ...] | None:
    """JAX's axis types of a recorded mesh; None where none were recorded, which no planned mesh is."""
    return None if mesh.axis_types is None else tuple(_AXIS_TYPES[kind] for kind in mesh.axis_types)


_AXIS_TYPES: Mapping[AxisType, jax.sharding.AxisType] = {
    "explicit": jax.sharding.AxisType.Explicit,
    "auto": jax.sharding.AxisType.Auto,
    "manual": jax.sharding.AxisType.Manual,
}
