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
   else in the same shape on as many others, else resized by the rule of `_topology`.
4. The array has no recorded spec, or one that the mesh at hand cannot take, and `RestorePolicy.rules` has one for it.
5. The array was recorded on one device or uncommitted: so again, and uncommitted in each of several processes.
6. Nothing was recorded: a value on the host.

With `RestorePolicy(arrays="numpy")` every array is a value on the host. Meshes are compared by axis names, sizes and
types, never as objects.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbax_explicit import _refusals
from orbax_explicit._errors import Problem
from orbax_explicit._matching import Match, match_leaves
from orbax_explicit._mesh_planning import Answers, MeshPlanner, Refused
from orbax_explicit._outcomes import (
    AsFallback,
    AsTarget,
    Change,
    Kept,
    NotPlaced,
    OnDevice,
    OnHost,
    OnMesh,
    Outcome,
    Placement,
    PlannedMesh,
    Rule,
    Uncommitted,
)
from orbax_explicit._plan import RestorePlan
from orbax_explicit._policy import RECORDED, RestorePolicy, SpecRule
from orbax_explicit._records import (
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
    path_text,
)
from orbax_explicit._spec_planning import check_spec, whole_where_indivisible
from orbax_explicit._targets import Fit, TargetRecord, describes_key_data, fit, is_python_int, is_text


def plan_from_records(
    manifest: Manifest,
    targets: Mapping[LeafPath, TargetRecord] | None,
    present: Inventory,
    policy: RestorePolicy | None = None,
    *,
    mesh: MeshRecord | None = None,
    context: MeshRecord | None = None,
    strict: bool = True,
    fallback: AsFallback | None = None,
    x64: bool = True,
    default_device_ids: tuple[int, ...] | None = None,
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
        fallback: The sharding that the caller gave for arrays whose recorded mesh does not fit as it is; None for none,
            where such a mesh is resized.
        x64: Whether a `jax.Array` can hold 64-bit numbers here.
        default_device_ids: `jax.Device.id` of the default device of each process; None for the first of each.

    Returns:
        A plan with one outcome for every leaf, and every problem there is.
    """
    if default_device_ids is None:
        default_device_ids = tuple(ids[0] for ids in present.device_ids_by_process().values())
    return _Planner(
        manifest, targets, present, policy or RestorePolicy(), mesh, context, strict, fallback, x64, default_device_ids
    ).plan()


@dataclass(frozen=True, slots=True)
class _Decision:
    rule: Rule
    placement: Placement
    changes: tuple[Change, ...] = ()


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
        fallback: AsFallback | None,
        x64: bool,
        default_device_ids: tuple[int, ...],
    ) -> None:
        self.manifest = manifest
        self.targets = targets
        self.present = present
        self.policy = policy
        self.mesh = mesh
        self.strict = strict
        self.fallback = fallback
        self.x64 = x64
        self.default_device_ids = default_device_ids
        self.problems: dict[Problem, list[str]] = {}
        self.positions: dict[Problem, int] = {}
        # Decided once for all leaves that share a sharding record, by identity: hashing a record that holds a mesh
        # costs O(devices). The manifest and the targets keep the records alive.
        self.decided: Answers[_Decision] = Answers()
        self.by_rules: dict[tuple[int, int], _Decision] = {}
        self.rules_used: set[int] = set()
        self.shaped: Answers[_Decision] = Answers()
        shardings = {id(t.sharding): t.sharding for t in (targets or {}).values()}.values()
        meshes = {id(s.mesh): s.mesh for s in shardings if isinstance(s, NamedShardingRecord)}.values()
        self.meshes = MeshPlanner(
            manifest,
            present,
            policy,
            mesh=mesh,
            context=context,
            target_meshes=meshes,
            exact=policy.topology == "exact" or fallback is not None,
        )

    def plan(self) -> RestorePlan:
        matching = match_leaves(self.manifest, self.targets, self.policy)
        self._check_policy()
        for problem in matching.problems:
            self._report(problem)
        for path in matching.extra:
            self._report(_refusals.leaves_are_extra(), path)
        outcomes = tuple(self._outcome(match) for match in matching.matches)
        notes = (*self.manifest.notes, *self._policy_notes(outcomes))
        total = len(outcomes)
        refused = tuple(
            dataclasses.replace(
                problem,
                affects=tuple(paths),
                of=0 if not paths else len(self.manifest.leaves) if problem == _refusals.leaves_are_extra() else total,
            )
            for problem, paths in self.problems.items()
        )
        return RestorePlan(
            outcomes=outcomes,
            present=self.present,
            recorded=self.manifest.inventory,
            tree=matching.tree,
            left_out=tuple(matching.left_out),
            refused=refused,
            notes=notes,
            default_device_ids=self.default_device_ids,
        )

    def _check_policy(self) -> None:
        """What a policy names must be recorded somewhere: a misspelt axis would change nothing, silently."""
        recorded = {axis for mesh in self.manifest.meshes for axis in mesh.axis_names}
        types = self.policy.axis_types
        for field, named in (
            ("axis_types", types if isinstance(types, Mapping) else ()),
            ("resize", self.policy.resize),
            ("rename_axes", self.policy.rename_axes),
        ):
            unknown = sorted(set(named) - recorded)
            if recorded and unknown:
                self._report(_refusals.policy_names_unknown_axes(field, unknown, recorded))
        if self.mesh is not None and self.policy.arrays == "numpy":
            self._report(_refusals.numpy_is_not_on_a_mesh(self.mesh))

    def _policy_notes(self, outcomes: tuple[Outcome, ...]) -> list[str]:
        """What of the policy does not apply, and why; a rule that matches nothing is refused."""
        notes = []
        rules: Sequence[SpecRule] = self.policy.rules  # type: ignore[assignment]  # the policy made them of the pairs
        for rule in rules:
            if id(rule) in self.rules_used or not outcomes:
                continue
            if any(re.search(rule.pattern, path_text(outcome.path)) for outcome in outcomes):
                notes.append(
                    f"rules: {rule.pattern!r} decides nothing: each leaf that it matches has a spec, of its own or of an "
                    "earlier rule"
                )
            else:
                self._report(_refusals.rule_matches_nothing(rule, path_text(outcomes[-1].path)))
        if self.problems:
            return []  # It may apply once they are mended.
        placed = [o.placement.mesh for o in outcomes if isinstance(o.placement, OnMesh)]
        if self.mesh is not None and self.policy.axis_types is not None:
            notes.append("axis_types of the policy do not apply: the mesh that was passed has its own")
        if self.mesh is not None and outcomes and not placed:
            notes.append(
                "the mesh that was passed takes no leaf: none has a spec to place on it; rules gives specs by name"
            )
        if self.policy.arrays == "numpy" and self.policy.memory_kind != RECORDED:
            notes.append("memory_kind of the policy does not apply: arrays come back as NumPy")
        if self.manifest.inventory is None and any(
            planned.source == "recorded devices" and len(planned.device_ids) < self.present.device_count
            for planned in placed
        ):
            notes.append(
                "how many devices there were was not recorded: a mesh stays on its recorded ones; pass mesh= to use all"
            )
        return notes

    def _report(self, problem: Problem, path: LeafPath | None = None) -> int:
        """Lists a problem, and returns its position."""
        affected = self.problems.setdefault(problem, [])
        if path is not None:
            affected.append(path_text(path))
        return self.positions.setdefault(problem, len(self.positions))

    def _outcome(self, match: Match) -> Outcome:
        """What happens to one leaf; where it is refused, with every problem that it has."""
        recorded, target = match.recorded, match.target
        if match.problem is not None or recorded is None:
            problems = [match.problem] if match.problem is not None else []
            return self._finished(match, problems, _Decision("kept", Kept()), Fit())
        if target is not None and target.odd is not None:
            return self._finished(match, [_refusals.leaf_cannot_be_asked_for(*target.odd)], None, Fit())
        fitted = fit(recorded, target, self.policy.cast, strict=self.strict) if target is not None else Fit()
        problems = list(fitted.problems)
        decision = None
        try:
            decision = self._decide(match.path, recorded, target)
            shape = self._shape(recorded, target)
            described = target is not None and describes_key_data(target, recorded)
            if described and target is not None and target.shape is not None:
                shape = target.shape  # Which its spec is for.
            decision = self._on_shape(decision, shape)
            if not described and (uncut := self._uncut(decision.placement, recorded, target)) is not None:
                problems.append(uncut)
            if not isinstance(decision.placement, OnHost):
                self._check_x64(fitted.dtype or recorded.dtype, recorded)
                if fitted.dtype is not None and is_python_int(recorded) and self.policy.cast != "unsafe":
                    # On a device nobody would see whether it fits.
                    problems.append(_refusals.cast_is_not_allowed(recorded, fitted.dtype, self.policy.cast))
        except Refused as refused:
            problems += refused.problems
        return self._finished(match, problems, decision, fitted)

    def _finished(self, match: Match, problems: list[Problem], decision: _Decision | None, fitted: Fit) -> Outcome:
        recorded = match.recorded
        shape = self._shape(recorded, match.target)
        if problems or decision is None:
            positions = tuple(self._report(problem, match.path) for problem in problems)
            placement: Placement = NotPlaced(problems=positions)
            return Outcome(
                path=match.path,
                source=match.source,
                recorded=recorded,
                placement=placement,
                rule="refused",
                shape=shape,
            )
        changes = list(decision.changes)
        if fitted.dtype is not None and recorded is not None:
            changes.append(Change(kind="cast", text=f"{recorded.dtype} -> {fitted.dtype}"))
        on_host = isinstance(decision.placement, OnHost)
        if (
            recorded is not None
            and match.target is not None
            and describes_key_data(match.target, recorded)
            and not on_host
        ):
            text = f"described by their data; they come back as {recorded.dtype_text}"
            changes.append(Change(kind="typed keys", text=text))
        if match.renamed is not None:
            result, source = ("/".join(names) for names in match.renamed)
            changes.append(Change(kind="renamed", text=f"{result} is read from {source}"))
        return Outcome(
            path=match.path,
            source=match.source,
            recorded=recorded,
            placement=decision.placement,
            rule=decision.rule,
            shape=shape,
            dtype=fitted.dtype,
            changes=tuple(changes),
        )

    def _shape(self, recorded: LeafRecord | None, target: TargetRecord | None) -> tuple[int, ...]:
        """The shape of what comes back; `()` where nothing says."""
        if recorded is None:
            return (target.shape if target is not None else None) or ()
        if target is None or target.shape is None or target.value_type is not None or self.strict:
            return recorded.shape
        return recorded.shape if describes_key_data(target, recorded) else target.shape

    def _uncut(self, placement: Placement, recorded: LeafRecord, target: TargetRecord | None) -> Problem | None:
        """What is wrong with another shape than the saved one, where none need be the saved one.

        Only what lands on devices is cut or padded, at the end of each dimension.
        """
        wanted = None if target is None or self.strict or is_text(recorded) else target.shape
        if wanted is None or wanted == recorded.shape:
            return None
        cut = not isinstance(placement, OnHost) and len(wanted) == len(recorded.shape)
        return None if cut else _refusals.shape_is_other(recorded, wanted)

    def _check_x64(self, dtype: str, recorded: LeafRecord) -> None:
        if not self.x64 and dtype in _X64_DTYPES:
            raise Refused(_refusals.dtype_needs_x64(dtype, recorded))

    # Which sharding.

    def _decide(self, path: LeafPath, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            sharding, committed = None, True
        else:
            sharding, committed = recorded.sharding, recorded.committed
        if target is not None and target.value_type is not None:
            return _Decision("host", OnHost(type=target.value_type))
        if self.policy.arrays == "numpy":
            return self._as_numpy(recorded, target)
        if target is not None and (target.committed is False or self._stays_uncommitted(committed, target)):
            return self._uncommitted("target", self.present.default_memory_kind)
        if target is not None and target.concrete:
            return _Decision("target", AsTarget(sharding=target.sharding))
        if target is not None and target.sharding is not None:
            return self._once(sharding, committed, target)
        rule = self._rule(path, recorded)
        if isinstance(sharding, NamedShardingRecord) and committed:
            try:
                return self._once(sharding, committed, None)
            except Refused as refused:
                if rule is None or refused.problem.about != "mesh":
                    raise
        if rule is not None:
            return self._by_rule(rule, sharding)
        if sharding is None:
            return self._unrecorded(recorded, target)
        return self._once(sharding, committed, None)

    def _once(self, sharding: ShardingRecord | None, committed: bool, target: TargetRecord | None) -> _Decision:
        key = (id(sharding), id(target.sharding) if target is not None else 0, committed)
        return self.decided.once(key, lambda: self._decide_sharding(sharding, committed, target))

    def _as_numpy(self, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            return _host_value(recorded, target)
        changes: tuple[Change, ...] = ()
        if recorded.prng is not None:
            changes = (Change(kind="key data", text=f"{recorded.dtype_text} as its data, {recorded.dtype}"),)
        return _Decision("host", OnHost(type="np.ndarray"), changes)

    def _stays_uncommitted(self, committed: bool, target: TargetRecord) -> bool:
        """Whether an array that was uncommitted goes where the target's abstract leaf says without being committed.

        A `jax.ShapeDtypeStruct` that was made of an uncommitted array names the default device, and cannot say that the
        array was free to leave it. There it has the very sharding that is asked for.
        """
        return (
            not committed
            and target.committed is None
            and isinstance(target.sharding, SingleDeviceRecord)
            and target.sharding.device_id in self.default_device_ids
            and target.sharding.memory_kind in (None, self.present.default_memory_kind)
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
                if self.fallback is not None and refused.problem.about == "mesh":
                    change = Change(kind="fallback", text=refused.problem.could_not)
                    return _Decision("fallback", self.fallback, (change,))
                raise
        kind, changes = self._memory_kind(recorded.memory_kind)
        if not committed:
            return self._uncommitted("uncommitted", kind, changes)
        assert isinstance(recorded, SingleDeviceRecord)
        if self.present.process_count > 1:
            # Committed to a device of one process it would be out of reach of the others, and committed to one of each
            # it could not be saved again.
            text = "recorded on one device; each of several processes holds it, uncommitted"
            return self._uncommitted("one device", kind, (*changes, Change(kind="another device", text=text)))
        here = recorded.device_id in self.present.device_ids and recorded.platform in (None, self.present.platform)
        if not here:
            text = f"{recorded} is not present; placed on the default device"
            changes = (*changes, Change(kind="another device", text=text))
        return _Decision(
            "one device", OnDevice(device_id=recorded.device_id if here else None, memory_kind=kind), changes
        )

    def _uncommitted(self, rule: Rule, kind: str, changes: tuple[Change, ...] = ()) -> _Decision:
        """Uncommitted, which in JAX is always in the default memory, whatever kind was recorded or asked for."""
        default = self.present.default_memory_kind
        if kind != default:
            text = f"uncommitted, so in {default} memory, not {kind}"
            changes = (*changes, Change(kind="memory kind", text=text))
        return _Decision(rule, Uncommitted(memory_kind=default), changes)

    def _unrecorded(self, recorded: LeafRecord, target: TargetRecord | None) -> _Decision:
        if isinstance(recorded, ValueRecord):
            return _host_value(recorded, target)
        if recorded.prng is not None:
            change = Change(kind="no sharding", text="no sharding was recorded; the keys are uncommitted")
            return self._uncommitted("uncommitted", self.present.default_memory_kind, (change,))
        change = Change(kind="no sharding", text="no sharding was recorded; restored to the host")
        return _Decision("host", OnHost(type="np.ndarray"), (change,))

    def _on_abstract_target(self, target: NamedShardingRecord, recorded: ShardingRecord | None) -> _Decision:
        own = recorded.mesh if isinstance(recorded, NamedShardingRecord) else None
        planned = self.meshes.for_target(target.mesh, own)
        kind = target.memory_kind or self.present.default_memory_kind
        if kind not in self.present.memory_kinds:
            raise Refused(_refusals.memory_kind_is_not_here(kind, "target", self.present))
        changes: tuple[Change, ...] = ()
        if target.memory_kind is None and recorded is not None:
            recorded_kind, _ = self._memory_kind(recorded.memory_kind)
            if recorded_kind != kind:
                # `jax.eval_shape` gives no memory kind, whatever the function that it evaluates would.
                text = f"recorded in {recorded_kind}, restored to {kind}: the target names no memory kind"
                changes = (Change(kind="memory kind", text=text),)
        return _Decision("target's abstract mesh", OnMesh(mesh=planned, spec=target.spec, memory_kind=kind), changes)

    def _on_recorded_mesh(self, recorded: NamedShardingRecord) -> _Decision:
        try:
            planned = self.meshes.for_recorded(recorded)
        except Refused as refused:
            # With what else is wrong, so that it does not come as a surprise once the mesh is mended.
            self._memory_kind(recorded.memory_kind, beside=refused.problems)
            raise
        spec = self.meshes.renamed(recorded.spec)
        kind, changes = self._memory_kind(recorded.memory_kind)
        changes = (*_mesh_changes(planned, recorded, spec), *changes)
        return _Decision("recorded", OnMesh(mesh=planned, spec=spec, memory_kind=kind), changes)

    # Specs by name.

    def _rule(self, path: LeafPath, recorded: LeafRecord) -> SpecRule | None:
        """The policy's spec for an array; values of other types than arrays have none."""
        if not self.policy.rules or (isinstance(recorded, ValueRecord) and recorded.type != "np.ndarray"):
            return None
        return self.policy.spec_for(path_text(path))

    def _by_rule(self, rule: SpecRule, recorded: ShardingRecord | None) -> _Decision:
        key = (id(rule), id(recorded))
        if key not in self.by_rules:
            planned = self.meshes.for_rule(rule)
            kind, changes = self._memory_kind(recorded.memory_kind if recorded is not None else None)
            placement = OnMesh(mesh=planned, spec=rule.spec, memory_kind=kind)
            self.by_rules[key] = _Decision("rules", placement, changes)
            self.rules_used.add(id(rule))
        return self.by_rules[key]

    # Memory kinds and shapes.

    def _memory_kind(self, recorded: str | None, beside: Sequence[Problem] = ()) -> tuple[str, tuple[Change, ...]]:
        """The memory kind to restore into, and what to say about it.

        Raises:
            Refused: The platform lacks it; with the problems that there are beside.
        """
        wanted = self.policy.memory_kind
        if wanted != RECORDED:
            if wanted not in self.present.memory_kinds:
                raise Refused(*beside, _refusals.memory_kind_is_not_here(wanted, "policy", self.present))
            return wanted, ()
        default = self.present.default_memory_kind
        saved = self.manifest.inventory
        # A platform's default kind may have another name elsewhere ("device", "unpinned_host"): what was in the
        # default kind stays in the default kind.
        if recorded is None or (saved is not None and recorded == saved.default_memory_kind):
            return default, ()
        if recorded in self.present.memory_kinds:
            return recorded, ()
        text = f"{self.present.platform} has no {recorded} memory; restored to {default}"
        return default, (Change(kind="memory kind", text=text),)

    def _on_shape(self, decision: _Decision, shape: tuple[int, ...]) -> _Decision:
        """The decision for an array of this shape: its spec must fit, and dimensions may have to be whole.

        Raises:
            Refused: It cannot be.
        """
        placement = decision.placement
        if not isinstance(placement, OnMesh | AsTarget):
            return decision
        # What lies on a mesh was decided once for many arrays; of a target's sharding the target keeps the record.
        key = (id(decision if isinstance(placement, OnMesh) else placement.sharding), shape)
        return self.shaped.once(key, lambda: self._fitted(decision, shape))

    def _fitted(self, decision: _Decision, shape: tuple[int, ...]) -> _Decision:
        placement = decision.placement
        if isinstance(placement, AsTarget) and isinstance(placement.sharding, NamedShardingRecord):
            mesh, spec = placement.sharding.mesh, placement.sharding.spec
            self.meshes.check_is_in_every_process(mesh)
            check_spec(shape, mesh, spec, asked=True)
            whole_where_indivisible(shape, mesh, spec, by_target=True, replicate=False)
        elif isinstance(placement, OnMesh):
            mesh, spec = placement.mesh.mesh, placement.spec
            by_target = decision.rule == "target's abstract mesh"
            asked = placement.mesh.recorded is None or placement.mesh.is_at_hand
            check_spec(shape, mesh, spec, asked=asked)
            replicate = self.policy.indivisible == "replicate" and not by_target
            fitting, changes = whole_where_indivisible(shape, mesh, spec, by_target=by_target, replicate=replicate)
            if changes:
                placement = dataclasses.replace(placement, spec=fitting)
                return _Decision(decision.rule, placement, (*decision.changes, *changes))
        return decision


def _host_value(recorded: ValueRecord, target: TargetRecord | None) -> _Decision:
    """A value that was on the host: as it was, or as an array where the target names a dtype."""
    as_array = target is not None and target.dtype is not None
    return _Decision("host", OnHost(type="np.ndarray" if as_array else recorded.type))


_X64_DTYPES = frozenset({"int64", "uint64", "float64", "complex128"})


def _mesh_changes(planned: PlannedMesh, recorded: NamedShardingRecord, spec: SpecRecord) -> tuple[Change, ...]:
    """How the mesh of a recorded sharding, and its axes, differ from what was recorded."""
    before, after = recorded.mesh, planned.mesh
    changes = []
    if planned.resized:
        changes.append(Change(kind="resized", text=f"{before} resized to {after}"))
    if not planned.is_at_hand:
        if before.axis_types is None:
            text = (
                "the mesh axes are auto" if set(after.axis_types or ()) <= {"auto"} else "those of the policy are used"
            )
            changes.append(Change(kind="untyped", text=f"no axis types were recorded; {text}"))
        elif before.axis_types != after.axis_types:
            changes.append(Change(kind="retyped", text=f"{before} retyped as {after}"))
    if spec != recorded.spec:
        changes.append(Change(kind="axes renamed", text=f"{recorded.spec} -> {spec}"))
    return tuple(changes)
