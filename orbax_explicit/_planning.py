"""What was recorded, what is asked for and what is here -> a `RestorePlan`.

A pure function of frozen values: no JAX, no device, no file. Every leaf is decided by the first line of this
order that applies:

1. The target's leaf has a concrete sharding: that one, as it is. An array that was uncommitted stays so, if the leaf
   is abstract and names the default device.
2. The target's leaf has a sharding on an abstract mesh: its spec, axis types and memory kind, on the mesh that
   was passed; else on the mesh of `jax.set_mesh` if that equals it; else on the recorded mesh's devices if names
   and sizes are equal; else on a new mesh over the present devices. A passed or context mesh that contradicts
   the target is refused, never picked silently.
3. The array was recorded on a mesh: the recorded spec, on the mesh that was passed; else on the mesh of
   `jax.set_mesh` if it has the recorded axis names and types; else on the target's own mesh if other leaves have
   one with these names and types; else on the recorded mesh, rebuilt: on the same devices if all are present,
   else in the same shape on as many others. A mesh that does not fit the present devices is refused.
4. The array was recorded on one device or uncommitted: so again, and uncommitted in each of several processes.
5. Nothing was recorded: a value on the host.

Meshes are compared by axis names, sizes and types, never as objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from orbax_explicit._errors import Problem
from orbax_explicit._mesh_planning import MeshPlanner, Refused
from orbax_explicit._plan import (
    AsFallback,
    AsTarget,
    OnDevice,
    OnHost,
    OnMesh,
    Outcome,
    Placement,
    RestorePlan,
    Rule,
    Uncommitted,
)
from orbax_explicit._policy import RECORDED, RestorePolicy
from orbax_explicit._records import (
    UNCONSTRAINED,
    Inventory,
    LeafPath,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    path_names,
    path_text,
    plural,
)
from orbax_explicit._targets import Fit, TargetRecord, fit


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
    x64: bool = True,
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
        x64: Whether a `jax.Array` can hold 64-bit numbers here.

    Returns:
        A plan with one outcome for every leaf that is not refused, and every problem there is.
    """
    return _Planner(
        manifest, targets, present, policy or RestorePolicy(), mesh, context, strict, has_fallback, x64
    ).plan()


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
        x64: bool,
    ) -> None:
        self.manifest = manifest
        self.targets = targets
        self.present = present
        self.policy = policy
        self.strict = strict
        self.has_fallback = has_fallback
        self.x64 = x64
        self.problems: dict[Problem, list[str]] = {}
        # Decided once for all leaves that share a sharding record, by identity: hashing a record that holds a mesh
        # costs O(devices). The manifest and the targets keep the records alive.
        self.decided: dict[tuple[int, int, bool], _Decision | Problem] = {}
        shardings = {id(t.sharding): t.sharding for t in (targets or {}).values()}.values()
        meshes = {id(s.mesh): s.mesh for s in shardings if isinstance(s, NamedShardingRecord)}.values()
        self.meshes = MeshPlanner(manifest, present, policy, mesh=mesh, context=context, target_meshes=meshes)

    def plan(self) -> RestorePlan:
        self._check_policy()
        outcomes = []
        for path, source, recorded, target in self._matched():
            outcome = self._outcome(path, source, recorded, target)
            if outcome is not None:
                outcomes.append(outcome)
        total = len(self.targets if self.targets is not None else self.manifest.leaves)
        refused = tuple(
            dataclasses.replace(problem, affects=tuple(paths), of=problem.of or (total if paths else 0))
            for problem, paths in self.problems.items()
        )
        return RestorePlan(
            outcomes=tuple(outcomes),
            present=self.present,
            recorded=self.manifest.inventory,
            refused=refused,
            notes=self.manifest.notes,
        )

    def _check_policy(self) -> None:
        """Axes that the policy retypes must be recorded somewhere: a misspelt one would change nothing, silently."""
        if isinstance(self.policy.axis_types, Mapping):
            recorded = {axis for mesh in self.manifest.meshes for axis in mesh.axis_names}
            unknown = sorted(set(self.policy.axis_types) - recorded)
            if recorded and unknown:
                problem = Problem(
                    could_not=f"cannot retype mesh axes {unknown}, which no recorded mesh has",
                    recorded=f"mesh axes {sorted(recorded)}",
                    fix="name recorded axes in axis_types",
                )
                self.problems[problem] = []

    def _matched(self) -> list[tuple[LeafPath, LeafPath, LeafRecord, TargetRecord | None]]:
        """Each leaf of the result, its path in the checkpoint, what was saved and what is asked for.

        Reports the leaves on either side that have no partner.
        """
        if self.targets is None:
            return [(path, path, leaf, None) for path, leaf in self.manifest.leaves.items()]
        # By the text of the keys: a class that was saved as attributes may come back into a dict, as in stock Orbax.
        saved = {path_names(path): (path, leaf) for path, leaf in self.manifest.leaves.items()}
        wanted = {path_names(path): path for path in self.targets}
        for path in self.manifest.leaves:
            if path_names(path) not in wanted:
                problem = Problem(
                    could_not="cannot leave out saved leaves that the target lacks",
                    of=len(self.manifest.leaves),
                    fix="give the target a leaf for each",
                )
                self._report(problem, path)
        matched: list[tuple[LeafPath, LeafPath, LeafRecord, TargetRecord | None]] = []
        for path, target in self.targets.items():
            found = saved.get(path_names(path))
            if found is None:
                problem = Problem(
                    could_not="cannot restore leaves of the target that the checkpoint lacks",
                    fix="take them off the target",
                )
                self._report(problem, path)
            else:
                matched.append((path, *found, target))
        return matched

    def _report(self, problem: Problem, path: LeafPath) -> None:
        self.problems.setdefault(problem, []).append(path_text(path))

    def _outcome(
        self, path: LeafPath, source: LeafPath, recorded: LeafRecord, target: TargetRecord | None
    ) -> Outcome | None:
        """What happens to one leaf; None where it is refused, with every problem that it has."""
        fitted = fit(recorded, target, self.policy.cast, strict=self.strict) if target is not None else Fit()
        problems = list(fitted.problems)
        decision = None
        try:
            decision = self._decide(recorded, target)
            shape = recorded.shape
            if target is not None and target.shape is not None and not self.strict:
                shape = target.shape
            placement = decision.placement
            if isinstance(placement, OnMesh):
                _check_spec(shape, placement.mesh.mesh, placement.spec, asked=placement.mesh.recorded is None)
            elif isinstance(placement, AsTarget) and isinstance(placement.sharding, NamedShardingRecord):
                _check_spec(shape, placement.sharding.mesh, placement.sharding.spec, asked=True)
            if not isinstance(placement, OnHost):
                self._check_x64(fitted.dtype or recorded.dtype)
        except Refused as refused:
            problems.append(refused.problem)
        for problem in problems:
            self._report(problem, path)
        if problems or decision is None:
            return None
        return Outcome(
            path=path,
            source=source,
            recorded=recorded,
            placement=decision.placement,
            rule=decision.rule,
            dtype=fitted.dtype,
            notes=decision.notes,
        )

    def _check_x64(self, dtype: str) -> None:
        if not self.x64 and dtype in _X64_DTYPES:
            raise Refused(
                Problem(
                    could_not=f"cannot hold {dtype} in a jax.Array while jax_enable_x64 is off",
                    fix="switch jax_enable_x64 on, or restore into a target of 32 bits",
                )
            )

    # Which sharding.

    def _decide(self, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            sharding, committed = None, True
        else:
            sharding, committed = recorded.sharding, recorded.committed
        if target is not None and target.value_type is not None:
            return _Decision("host", OnHost(type=target.value_type))
        if target is not None and (target.committed is False or self._stays_uncommitted(committed, target)):
            return self._uncommitted("target", self.present.default_memory_kind)
        if target is not None and target.concrete:
            return _Decision("target", AsTarget(sharding=target.sharding))
        key = (id(sharding), id(target.sharding) if target is not None else 0, committed)
        if sharding is None and (target is None or target.sharding is None):
            return self._unrecorded(recorded, target)
        if key not in self.decided:
            try:
                self.decided[key] = self._decide_sharding(sharding, committed, target)
            except Refused as refused:
                self.decided[key] = refused.problem
        decision = self.decided[key]
        if isinstance(decision, Problem):
            raise Refused(decision)
        return decision

    def _stays_uncommitted(self, committed: bool, target: TargetRecord) -> bool:
        """Whether an array that was uncommitted goes where the target's abstract leaf says without being committed.

        A `jax.ShapeDtypeStruct` that was made of an uncommitted array names the default device, and cannot say that the
        array was free to leave it. There it has the very sharding that is asked for.
        """
        return (
            not committed
            and target.committed is None
            and isinstance(target.sharding, SingleDeviceRecord)
            and (self.present.process_count > 1 or target.sharding.device_id == self.present.device_ids[0])
        )

    def _decide_sharding(
        self, recorded: ShardingRecord | None, committed: bool, target: TargetRecord | None
    ) -> _Decision:
        if target is not None and isinstance(target.sharding, NamedShardingRecord):
            return self._on_abstract_target(target.sharding, recorded)
        assert recorded is not None
        if committed and isinstance(recorded, NamedShardingRecord):
            try:
                return self._on_recorded_mesh(recorded)
            except Refused as refused:
                if self.has_fallback and refused.problem.about == "mesh":
                    return _Decision("fallback", AsFallback(), (refused.problem.could_not,))
                raise
        kind, notes = self._memory_kind(recorded.memory_kind)
        if not committed:
            return self._uncommitted("uncommitted", kind, notes)
        assert isinstance(recorded, SingleDeviceRecord)
        if self.present.process_count > 1:
            # Committed to a device of one process it would be out of reach of the others, and committed to one of each
            # it could not be saved again.
            notes = (*notes, "recorded on one device; each of several processes holds it, uncommitted")
            return self._uncommitted("one device", kind, notes)
        here = recorded.device_id in self.present.device_ids and recorded.platform in (None, self.present.platform)
        if not here:
            notes = (*notes, f"{recorded} is not present; placed on the default device")
        return _Decision(
            "one device", OnDevice(device_id=recorded.device_id if here else None, memory_kind=kind), notes
        )

    def _uncommitted(self, rule: Rule, kind: str, notes: tuple[str, ...] = ()) -> _Decision:
        """Uncommitted, which in JAX is always in the default memory, whatever kind was recorded or asked for."""
        default = self.present.default_memory_kind
        if kind != default:
            notes = (*notes, f"an uncommitted array is in the default memory: {default}, not {kind}")
        return _Decision(rule, Uncommitted(memory_kind=default), notes)

    def _unrecorded(self, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            as_array = target is not None and target.dtype is not None
            return _Decision("host", OnHost(type="np.ndarray" if as_array else recorded.type))
        if recorded.prng is not None:
            note = "no sharding was recorded; the keys are uncommitted"
            return self._uncommitted("uncommitted", self.present.default_memory_kind, (note,))
        return _Decision("host", OnHost(type="np.ndarray"), ("no sharding was recorded; restored to the host",))

    def _on_abstract_target(self, target: NamedShardingRecord, recorded: ShardingRecord | None) -> _Decision:
        own = recorded.mesh if isinstance(recorded, NamedShardingRecord) else None
        planned = self.meshes.for_target(target.mesh, own)
        kind = target.memory_kind or self.present.default_memory_kind
        if kind not in self.present.memory_kinds:
            raise Refused(self._lacks_memory_kind(kind, "the target's memory kind"))
        notes: tuple[str, ...] = ()
        if target.memory_kind is None and recorded is not None:
            recorded_kind, _ = self._memory_kind(recorded.memory_kind)
            if recorded_kind != kind:
                # `jax.eval_shape` gives no memory kind, whatever the function that it evaluates would.
                notes = (f"recorded in {recorded_kind}, restored to {kind}: the target names no memory kind",)
        return _Decision("target's abstract mesh", OnMesh(mesh=planned, spec=target.spec, memory_kind=kind), notes)

    def _on_recorded_mesh(self, recorded: NamedShardingRecord) -> _Decision:
        planned = self.meshes.for_recorded(recorded)
        notes: tuple[str, ...] = ()
        if recorded.mesh.axis_types is None and planned.source not in ("given", "context", "target"):
            if self.policy.axis_types is None:
                notes = ("no axis types were recorded; the mesh axes are auto",)
            else:
                notes = ("no axis types were recorded; those of the policy are used",)
        kind, kind_notes = self._memory_kind(recorded.memory_kind)
        return _Decision("recorded", OnMesh(mesh=planned, spec=recorded.spec, memory_kind=kind), (*notes, *kind_notes))

    # Memory kinds, shapes and dtypes.

    def _memory_kind(self, recorded: str | None) -> tuple[str, tuple[str, ...]]:
        """The memory kind to restore into, and what to say about it."""
        wanted = self.policy.memory_kind
        if wanted != RECORDED:
            if wanted not in self.present.memory_kinds:
                raise Refused(self._lacks_memory_kind(wanted, "the policy's memory kind"))
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


_X64_DTYPES = frozenset({"int64", "uint64", "float64", "complex128"})


def _check_spec(shape: tuple[int, ...], mesh: MeshRecord, spec: SpecRecord, *, asked: bool) -> None:
    """Refuses what JAX would not place: a spec that does not fit the shape, or the axis types of its mesh."""
    types = dict(zip(mesh.axis_names, mesh.axis_types or (), strict=True))
    if asked and "manual" in types.values():
        raise Refused(
            Problem(
                could_not=f"cannot place an array on {mesh}: manual axes exist within jax.shard_map alone",
                fix="give the target a mesh with explicit or auto axes",
            )
        )
    if spec.unreduced:
        raise Refused(
            Problem(
                could_not=f"cannot restore into a sharding with pending reductions, {spec}",
                fix="give the target's leaf a spec without unreduced axes",
            )
        )
    if any(types[axis] != "explicit" for axis in spec.reduced):
        raise Refused(
            Problem(
                could_not=f"cannot place {spec} on {mesh}: reduced axes must be explicit",
                fix="keep these axes explicit, or give the target's leaf another spec",
            )
        )
    if any(p is UNCONSTRAINED for p in spec.partitions) and "auto" not in types.values():
        raise Refused(
            Problem(
                could_not=f"cannot place {spec} on {mesh}: an unconstrained dimension takes an auto axis",
                fix="keep an axis auto, or give the target's leaf another spec",
            )
        )
    if len(spec.partitions) > len(shape):
        raise Refused(
            Problem(
                could_not=f"cannot place an array of {plural(len(shape), 'dimension')} by {spec}",
                fix="give the target's leaf a spec that is no longer than its shape",
            )
        )
    sharding = NamedShardingRecord(mesh=mesh, spec=spec)
    for dimension in range(len(spec.partitions)):
        shards = sharding.shards_along(dimension)
        if shape[dimension] % shards:
            raise Refused(
                Problem(
                    could_not=f"cannot split dimension {dimension} of {shape} into {shards} shards by {spec}",
                    present=f"mesh {mesh}",
                    fix="pass a mesh whose axes divide the dimension, or a target with another sharding",
                )
            )
