"""What was recorded, what is asked for and what is here -> a `RestorePlan`.

A pure function of frozen values: no JAX, no device, no file. Every leaf is decided by the first line of this
order that applies:

1. The target's leaf has a concrete sharding: that one, as it is.
2. The target's leaf has a sharding on an abstract mesh: its spec, axis types and memory kind, on the mesh that
   was passed; else on the mesh of `jax.set_mesh` if that equals it; else on the recorded mesh's devices if names
   and sizes are equal; else on a new mesh over the present devices. A passed or context mesh that contradicts
   the target is refused, never picked silently.
3. The array was recorded on a mesh: the recorded spec, on the mesh that was passed; else on the mesh of
   `jax.set_mesh` if it has the recorded axis names and types; else on the target's own mesh if other leaves have
   one with these names and types; else on the recorded mesh, rebuilt: on the same devices if all are present,
   else in the same shape on as many others. A mesh that does not fit the present devices is refused.
4. The array was recorded on one device or uncommitted: so again.
5. Nothing was recorded: a value on the host.

Meshes are compared by axis names, sizes and types, never as objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from orbax_explicit._errors import Problem
from orbax_explicit._plan import (
    AsFallback,
    AsTarget,
    MeshSource,
    OnDevice,
    OnHost,
    OnMesh,
    Outcome,
    Placement,
    PlannedMesh,
    RestorePlan,
    Rule,
    Uncommitted,
)
from orbax_explicit._policy import RECORDED, RestorePolicy
from orbax_explicit._records import (
    UNCONSTRAINED,
    ArrayRecord,
    AxisType,
    Inventory,
    LeafPath,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    ShardingRecord,
    SingleDeviceRecord,
    ValueRecord,
    ValueType,
    partition_axes,
    path_text,
    plural,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """What one leaf of a target asks for.

    Attributes:
        shape: The shape it expects; None for any.
        dtype: Name of the dtype it expects, of the key data for PRNG keys; None for any.
        prng_impl: The PRNG implementation it expects; None for an ordinary leaf.
        sharding: The sharding it names, on a concrete or abstract mesh; None for none.
        concrete: Whether it names a concrete sharding, perhaps of a kind that has no record.
        committed: False for an uncommitted `jax.Array`, which names no place.
        value_type: The type of host value it is; None for an array.
    """

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    prng_impl: str | None = None
    sharding: ShardingRecord | None = None
    concrete: bool = False
    committed: bool = True
    value_type: ValueType | None = None

    @property
    def abstract_mesh(self) -> MeshRecord | None:
        """The abstract mesh that it names, if it does."""
        if self.concrete or not isinstance(self.sharding, NamedShardingRecord):
            return None
        return self.sharding.mesh


def plan_from_records(
    manifest: Manifest,
    targets: Mapping[LeafPath, TargetRecord] | None,
    present: Inventory,
    policy: RestorePolicy | None = None,
    *,
    mesh: MeshRecord | None = None,
    context: MeshRecord | None = None,
    strict: bool = True,
    has_fallback: bool = False,
) -> RestorePlan:
    """Decides where every leaf of a restore lands.

    Args:
        manifest: What was recorded.
        targets: What each leaf of the target asks for, by its path in the result; None for no target.
        present: The devices that are here now.
        policy: The caller's choices.
        mesh: The concrete mesh that the caller passed.
        context: The concrete mesh of `jax.set_mesh`.
        strict: Whether a target's shape must be the saved one; otherwise Orbax truncates or pads.
        has_fallback: Whether the caller gave a sharding for arrays whose recorded mesh does not fit.

    Returns:
        A plan with one outcome for every leaf that is not refused, and every problem there is.
    """
    return _Planner(manifest, targets, present, policy or RestorePolicy(), mesh, context, strict, has_fallback).plan()


class _Refused(Exception):
    """Control flow within this module: a leaf cannot be placed, for this reason."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Decision:
    rule: Rule
    placement: Placement
    notes: tuple[str, ...] = ()


class _Planner:
    """One planning. Holds the inputs, and remembers what was decided once for many leaves."""

    def __init__(
        self,
        manifest: Manifest,
        targets: Mapping[LeafPath, TargetRecord] | None,
        present: Inventory,
        policy: RestorePolicy,
        mesh: MeshRecord | None,
        context: MeshRecord | None,
        strict: bool,
        has_fallback: bool,
    ) -> None:
        self.manifest = manifest
        self.targets = targets
        self.present = present
        self.policy = policy
        self.mesh = mesh
        self.context = context
        self.strict = strict
        self.has_fallback = has_fallback
        self.problems: dict[Problem, list[str]] = {}
        # Decided once for all leaves that share a sharding record, by identity: hashing a record that holds a mesh
        # costs O(devices). The manifest and the targets keep the records alive.
        self.decided: dict[tuple[int, int, bool], _Decision | Problem] = {}
        self.rebuilt: dict[int, PlannedMesh | Problem] = {}
        self.made_concrete: dict[tuple[int, int], PlannedMesh | Problem] = {}
        shardings = {id(t.sharding): t for t in (targets or {}).values() if t.sharding is not None}.values()
        self.target_meshes = tuple(
            {id(t.sharding.mesh): t for t in shardings if isinstance(t.sharding, NamedShardingRecord)}.values()
        )

    def plan(self) -> RestorePlan:
        outcomes = []
        for path, source, recorded, target in self._matched():
            try:
                outcomes.append(self._outcome(path, source, recorded, target))
            except _Refused as refused:
                self.problems.setdefault(refused.problem, []).append(path_text(path))
        total = len(self.targets if self.targets is not None else self.manifest.leaves)
        refused = tuple(
            dataclasses.replace(problem, affects=tuple(paths), of=total) for problem, paths in self.problems.items()
        )
        return RestorePlan(
            outcomes=tuple(outcomes),
            present=self.present,
            recorded=self.manifest.inventory,
            refused=refused,
            notes=self.manifest.notes,
        )

    def _matched(self) -> list[tuple[LeafPath, LeafPath, LeafRecord, TargetRecord | None]]:
        """Each leaf of the result, its path in the checkpoint, what was saved and what is asked for.

        Reports the leaves on either side that have no partner.
        """
        if self.targets is None:
            return [(path, path, leaf, None) for path, leaf in self.manifest.leaves.items()]
        # By the text of the keys: a class that was saved as attributes may come back into a dict, as in stock Orbax.
        saved = {_names(path): (path, leaf) for path, leaf in self.manifest.leaves.items()}
        wanted = {_names(path): path for path in self.targets}
        for path in self.manifest.leaves:
            if _names(path) not in wanted:
                self._report_unmatched(
                    "cannot leave out saved leaves that the target lacks", path, "give the target a leaf for each"
                )
        matched = []
        for path, target in self.targets.items():
            found = saved.get(_names(path))
            if found is None:
                self._report_unmatched(
                    "cannot restore leaves of the target that the checkpoint lacks", path, "take them off the target"
                )
            else:
                matched.append((path, *found, target))
        return matched

    def _report_unmatched(self, could_not: str, path: LeafPath, fix: str) -> None:
        self.problems.setdefault(Problem(could_not=could_not, fix=fix), []).append(path_text(path))

    def _outcome(
        self, path: LeafPath, source: LeafPath, recorded: LeafRecord, target: TargetRecord | None
    ) -> Outcome:
        self._check_shape(recorded, target)
        dtype = self._cast(recorded, target)
        decision = self._decide(recorded, target)
        placement = decision.placement
        if isinstance(placement, OnMesh):
            shape = target.shape if target is not None and target.shape is not None else recorded.shape
            self._check_divisible(shape, placement)
        return Outcome(
            path=path,
            source=source,
            recorded=recorded,
            placement=placement,
            rule=decision.rule,
            dtype=dtype,
            notes=decision.notes,
        )

    # Which sharding.

    def _decide(self, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            sharding, committed = None, True
        else:
            sharding, committed = recorded.sharding, recorded.committed
        if target is not None and target.value_type is not None:
            return _Decision("host", OnHost(type=target.value_type))
        if target is not None and not target.committed:
            return _Decision("target", Uncommitted(memory_kind=self.present.default_memory_kind))
        if target is not None and target.concrete:
            return _Decision("target", AsTarget(sharding=target.sharding))
        key = (id(sharding), id(target.sharding) if target is not None else 0, committed)
        if sharding is None and (target is None or target.sharding is None):
            return self._unrecorded(recorded, target)
        if key not in self.decided:
            try:
                self.decided[key] = self._decide_sharding(sharding, committed, target)
            except _Refused as refused:
                self.decided[key] = refused.problem
        decision = self.decided[key]
        if isinstance(decision, Problem):
            raise _Refused(decision)
        return decision

    def _decide_sharding(
        self, recorded: ShardingRecord | None, committed: bool, target: TargetRecord | None
    ) -> _Decision:
        if target is not None and isinstance(target.sharding, NamedShardingRecord):
            return self._on_abstract_target(target.sharding, recorded)
        assert recorded is not None
        if committed and isinstance(recorded, NamedShardingRecord):
            try:
                return self._on_recorded_mesh(recorded)
            except _Refused as refused:
                if self.has_fallback and refused.problem.about == "mesh":
                    return _Decision("fallback", AsFallback(), (refused.problem.could_not,))
                raise
        kind, notes = self._memory_kind(recorded.memory_kind)
        if not committed:
            return _Decision("uncommitted", Uncommitted(memory_kind=kind), notes)
        assert isinstance(recorded, SingleDeviceRecord)
        here = recorded.device_id in self.present.device_ids and recorded.platform in (None, self.present.platform)
        if not here:
            notes = (*notes, f"{recorded} is not present; placed on the default device")
        return _Decision("one device", OnDevice(device_id=recorded.device_id if here else None, memory_kind=kind), notes)

    def _unrecorded(self, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            as_array = target is not None and target.dtype is not None
            return _Decision("host", OnHost(type="np.ndarray" if as_array else recorded.type))
        if recorded.prng is not None:
            note = "no sharding was recorded; the keys are uncommitted"
            return _Decision("uncommitted", Uncommitted(memory_kind=self.present.default_memory_kind), (note,))
        return _Decision("host", OnHost(type="np.ndarray"), ("no sharding was recorded; restored to the host",))

    def _on_abstract_target(self, target: NamedShardingRecord, recorded: ShardingRecord | None) -> _Decision:
        key = (id(target.mesh), id(recorded))
        if key not in self.made_concrete:
            try:
                self.made_concrete[key] = self._concrete(target.mesh, recorded)
            except _Refused as refused:
                self.made_concrete[key] = refused.problem
        planned = self.made_concrete[key]
        if isinstance(planned, Problem):
            raise _Refused(planned)
        if target.spec.unreduced:
            raise _Refused(
                Problem(
                    could_not=f"cannot restore into a sharding with pending reductions, {target.spec}",
                    fix="drop unreduced= from the target's spec",
                )
            )
        kind = target.memory_kind or self.present.default_memory_kind
        if kind not in self.present.memory_kinds:
            raise _Refused(self._lacks_memory_kind(kind, "the target's memory kind"))
        return _Decision("target's abstract mesh", OnMesh(mesh=planned, spec=target.spec, memory_kind=kind))

    def _concrete(self, wanted: MeshRecord, recorded: ShardingRecord | None) -> PlannedMesh:
        """The concrete mesh for a target's abstract one."""
        if (at_hand := self._mesh_at_hand()) is not None:
            mesh, source, name = at_hand
            if same_axes(mesh, wanted):
                return PlannedMesh(mesh=mesh, source=source)
            raise _Refused(
                Problem(
                    could_not=f"cannot resolve the target's mesh {wanted} on {name} {mesh}",
                    recorded=str(recorded) if recorded is not None else "",
                    present=f"{name} is {mesh}",
                    fix="make the two agree in axis names, sizes and types"
                    + ("" if source == "given" else ", pass mesh=, or restore outside jax.set_mesh"),
                    about="mesh",
                )
            )
        own = recorded.mesh if isinstance(recorded, NamedShardingRecord) else None
        for candidate in (*((own,) if own is not None else ()), *self.manifest.meshes):
            if candidate.shape == wanted.shape and candidate.axis_names == wanted.axis_names:
                rebuilt = self._rebuild(candidate)
                if isinstance(rebuilt, PlannedMesh):
                    mesh = dataclasses.replace(rebuilt.mesh, axis_types=wanted.axis_types)
                    return PlannedMesh(mesh=mesh, source=rebuilt.source)
        if wanted.size > self.present.device_count:
            raise _Refused(
                Problem(
                    could_not=f"cannot resolve the target's mesh {wanted} on {self.present}",
                    present=str(self.present),
                    fix=f"give the target a mesh of at most {plural(self.present.device_count, 'device')}",
                    about="mesh",
                )
            )
        return self._new_mesh(wanted)

    def _mesh_at_hand(self) -> tuple[MeshRecord, MeshSource, str] | None:
        """The mesh that the caller passed, or else that of the context, if there is either."""
        if self.mesh is not None:
            return self.mesh, "given", "the mesh that was passed"
        if self.context is not None:
            return self.context, "context", "the mesh of jax.set_mesh"
        return None

    def _on_recorded_mesh(self, recorded: NamedShardingRecord) -> _Decision:
        planned = self._mesh_for(recorded)
        notes: tuple[str, ...] = ()
        if recorded.mesh.axis_types is None and planned.source not in ("given", "context", "target"):
            if self.policy.axis_types is None:
                notes = ("no axis types were recorded; the mesh axes are auto",)
            else:
                notes = ("no axis types were recorded; those of the policy are used",)
        if any(p is UNCONSTRAINED for p in recorded.spec.partitions) and "auto" not in (planned.mesh.axis_types or ()):
            raise _Refused(
                Problem(
                    could_not=f"cannot place a recorded {recorded.spec} on a mesh without an auto axis",
                    recorded=str(recorded.mesh),
                    present=str(planned.mesh),
                    fix="keep an axis auto, or give the target a sharding",
                )
            )
        kind, kind_notes = self._memory_kind(recorded.memory_kind)
        return _Decision(
            "recorded", OnMesh(mesh=planned, spec=recorded.spec, memory_kind=kind), (*notes, *kind_notes)
        )

    def _mesh_for(self, recorded: NamedShardingRecord) -> PlannedMesh:
        """The mesh that takes a recorded spec."""
        mesh = recorded.mesh
        if self.mesh is not None:
            missing = sorted(recorded.spec.axes() - set(self.mesh.axis_names))
            if missing:
                raise _Refused(
                    Problem(
                        could_not=f"cannot place the recorded {recorded.spec}: the mesh that was passed lacks {missing}",
                        recorded=str(mesh),
                        present=str(self.mesh),
                        fix="pass a mesh that has these axes, or a target with shardings",
                        about="mesh",
                    )
                )
            return PlannedMesh(mesh=self.mesh, source="given", recorded=mesh)
        if self.context is not None:
            if not _has_axes(self.context, mesh, self._types(mesh)):
                raise _Refused(
                    Problem(
                        could_not=f"cannot place a recorded mesh {mesh} on the mesh of jax.set_mesh {self.context}",
                        recorded=str(mesh),
                        present=str(self.context),
                        fix="pass mesh= to place the recorded specs on that mesh, axis_types= in the policy to retype "
                        "the recorded one, or restore outside jax.set_mesh",
                        about="mesh",
                    )
                )
            return PlannedMesh(mesh=self.context, source="context", recorded=mesh)
        if (own := self._target_mesh(mesh)) is not None:
            return own
        rebuilt = self._rebuild(mesh)
        if isinstance(rebuilt, Problem):
            raise _Refused(rebuilt)
        return rebuilt

    def _target_mesh(self, recorded: MeshRecord) -> PlannedMesh | None:
        """The mesh of the target's other leaves, if it has the recorded axis names and types."""
        fitting = [t for t in self.target_meshes if _has_axes(_mesh_of(t), recorded, self._types(recorded))]
        same_size = [t for t in fitting if _mesh_of(t).shape == recorded.shape]
        chosen = (same_size or fitting)[:1]
        if not chosen:
            return None
        target = chosen[0]
        if target.concrete:
            return PlannedMesh(mesh=_mesh_of(target), source="target", recorded=recorded)
        assert isinstance(target.sharding, NamedShardingRecord)
        decision = self._on_abstract_target(target.sharding, None)
        assert isinstance(decision.placement, OnMesh)
        return dataclasses.replace(decision.placement.mesh, recorded=recorded)

    # Rebuilding a recorded mesh on the present devices.

    def _types(self, mesh: MeshRecord) -> tuple[AxisType, ...] | None:
        """The axis types that a recorded mesh is rebuilt with; None where neither record nor policy says."""
        if mesh.axis_types is None and self.policy.axis_types is None:
            return None
        return self.policy.typed(mesh.axis_names, mesh.axis_types or ("auto",) * len(mesh.axis_names))

    def _rebuild(self, mesh: MeshRecord) -> PlannedMesh | Problem:
        if id(mesh) not in self.rebuilt:
            self.rebuilt[id(mesh)] = self._rebuild_once(mesh)
        return self.rebuilt[id(mesh)]

    def _rebuild_once(self, mesh: MeshRecord) -> PlannedMesh | Problem:
        typed = dataclasses.replace(mesh, axis_types=self._types(mesh) or ("auto",) * len(mesh.axis_names))
        present, saved = self.present, self.manifest.inventory
        ids = mesh.device_ids or ()
        here = set(present.device_ids)
        same_platform = mesh.platform in (None, present.platform)
        same_count = saved is None or saved.device_count == present.device_count
        if ids and same_platform and same_count and here.issuperset(ids):
            return self._placed(typed, ids, "recorded devices", mesh)
        recorded_count = saved.device_count if saved is not None else self._devices_recorded()
        if recorded_count == present.device_count:
            if mesh.size == recorded_count:
                return dataclasses.replace(self._new_mesh(typed), recorded=mesh)
            if (positions := self._positions(mesh)) is not None:
                return self._placed(typed, tuple(present.device_ids[i] for i in positions), "recorded positions", mesh)
        return self._does_not_fit(mesh)

    def _does_not_fit(self, mesh: MeshRecord) -> Problem:
        """The place of `topology="adapt"`: a recorded mesh that fits the present devices in no way yet."""
        saved = self.manifest.inventory
        count = plural(self.present.device_count, "device")
        return Problem(
            could_not=f"cannot rebuild mesh {mesh} on {count}",
            recorded=str(saved) if saved is not None else f"{plural(mesh.size, 'device')} in the mesh",
            present=str(self.present),
            fix=f"pass mesh= with the axes {', '.join(mesh.axis_names)} over the present devices, "
            "or a target with shardings",
            about="mesh",
        )

    def _placed(
        self, mesh: MeshRecord, ids: tuple[int, ...], source: MeshSource, recorded: MeshRecord
    ) -> PlannedMesh:
        return PlannedMesh(
            mesh=dataclasses.replace(mesh, device_ids=ids, platform=self.present.platform),
            source=source,
            recorded=recorded,
        )

    def _new_mesh(self, mesh: MeshRecord) -> PlannedMesh:
        return PlannedMesh(
            mesh=dataclasses.replace(mesh, device_ids=None, platform=self.present.platform), source="new"
        )

    def _devices_recorded(self) -> int:
        """How many devices a checkpoint without an inventory speaks of."""
        return len({i for mesh in self.manifest.meshes for i in mesh.device_ids or ()})

    def _positions(self, mesh: MeshRecord) -> tuple[int, ...] | None:
        """Where the devices of a mesh stood in `jax.devices()` when it was saved."""
        saved = self.manifest.inventory
        if saved is None:
            return None
        position = {device_id: i for i, device_id in enumerate(saved.device_ids)}
        if any(i not in position for i in mesh.device_ids or ()):
            return None
        return tuple(position[i] for i in mesh.device_ids or ())

    # Memory kinds, shapes and dtypes.

    def _memory_kind(self, recorded: str | None) -> tuple[str, tuple[str, ...]]:
        """The memory kind to restore into, and what to say about it."""
        wanted = self.policy.memory_kind
        if wanted != RECORDED:
            if wanted not in self.present.memory_kinds:
                raise _Refused(self._lacks_memory_kind(wanted, "the policy's memory kind"))
            return wanted, ()
        default = self.present.default_memory_kind
        saved = self.manifest.inventory
        # A platform's default kind may have another name elsewhere ("device", "unpinned_host"): what was in the
        # default kind stays in the default kind.
        if recorded is None or (saved is not None and recorded == saved.default_memory_kind):
            return default, ()
        if recorded in self.present.memory_kinds:
            return recorded, ()
        return default, (f"{self.present.platform} has no {recorded} memory; restored to {default}",)

    def _lacks_memory_kind(self, kind: str, whose: str) -> Problem:
        return Problem(
            could_not=f"cannot restore into {kind!r}, {whose}",
            present=f"{self.present.platform} devices with {', '.join(self.present.memory_kinds)}",
            fix="name one of these, or leave it out for the default",
        )

    def _check_shape(self, recorded: LeafRecord, target: TargetRecord | None) -> None:
        if target is None or target.shape is None or not self.strict:
            return
        saved = recorded.shape
        if isinstance(recorded, ValueRecord) and recorded.type in ("str", "bytes"):
            return
        if target.shape != saved:
            raise _Refused(
                Problem(
                    could_not=f"cannot restore shape {saved} into shape {target.shape}",
                    fix="give the target's leaf the saved shape",
                )
            )

    def _cast(self, recorded: LeafRecord, target: TargetRecord | None) -> str | None:
        """The dtype to cast to; None where none is needed."""
        if target is None:
            return None
        saved_impl = recorded.prng.impl if isinstance(recorded, ArrayRecord) and recorded.prng else None
        if target.prng_impl is not None or (saved_impl is not None and target.dtype is not None):
            if target.prng_impl != saved_impl:
                raise _Refused(
                    Problem(
                        could_not=f"cannot restore {recorded.dtype_text} as "
                        + (f"key<{target.prng_impl}>" if target.prng_impl else str(target.dtype)),
                        fix="give the target's leaf the saved PRNG implementation",
                    )
                )
            return None
        if target.dtype is None or target.dtype == recorded.dtype or not recorded.dtype:
            return None
        allowed = self.policy.cast == "unsafe" or (
            self.policy.cast == "same_kind" and _dtype_kind(target.dtype) == _dtype_kind(recorded.dtype)
        )
        if not allowed:
            raise _Refused(
                Problem(
                    could_not=f"cannot cast {recorded.dtype} to {target.dtype} under cast={self.policy.cast!r}",
                    fix=f"give the target's leaf dtype {recorded.dtype}, or cast='unsafe' in the policy",
                )
            )
        return target.dtype

    def _check_divisible(self, shape: tuple[int, ...], placement: OnMesh) -> None:
        sizes = placement.mesh.mesh.shape
        if len(placement.spec.partitions) > len(shape):
            raise _Refused(
                Problem(
                    could_not=f"cannot place an array of {plural(len(shape), 'dimension')} by {placement.spec}",
                    fix="give the target's leaf a spec that is no longer than its shape",
                )
            )
        for dimension, partition in enumerate(placement.spec.partitions):
            shards = 1
            for axis in partition_axes(partition):
                shards *= sizes[axis]
            if shape[dimension] % shards:
                raise _Refused(
                    Problem(
                        could_not=f"cannot split dimension {dimension} of {shape} into {shards} shards by "
                        f"{placement.spec}",
                        present=f"mesh {placement.mesh.mesh}",
                        fix="pass a mesh whose axes divide the dimension, or a target with another sharding",
                    )
                )


def same_axes(a: MeshRecord, b: MeshRecord) -> bool:
    """Whether two meshes agree in axis names, sizes and types, whatever their devices."""
    return (a.axis_names, a.axis_sizes, a.axis_types) == (b.axis_names, b.axis_sizes, b.axis_types)


def _has_axes(mesh: MeshRecord, recorded: MeshRecord, types: tuple[AxisType, ...] | None) -> bool:
    """Whether a mesh has the recorded axis names, with these types where they are known."""
    if not set(recorded.axis_names) <= set(mesh.axis_names):
        return False
    if types is None or mesh.axis_types is None:
        return True
    have = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return all(have[name] == kind for name, kind in zip(recorded.axis_names, types, strict=True))


def _mesh_of(target: TargetRecord) -> MeshRecord:
    assert isinstance(target.sharding, NamedShardingRecord)
    return target.sharding.mesh


def _names(path: LeafPath) -> tuple[str, ...]:
    return tuple(str(key.name) for key in path)


def _dtype_kind(dtype: str) -> str:
    """`"float"` of `"bfloat16"`, `"uint"` of `"uint8"`: the dtypes between which a cast is harmless."""
    for kind in ("float", "complex", "uint", "int"):
        if dtype.startswith((kind, f"b{kind}")):
            return kind
    return dtype
