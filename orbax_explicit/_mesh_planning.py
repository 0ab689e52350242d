"""Which mesh takes a spec: recorded, requested, passed and context meshes -> a `PlannedMesh`.

The part of a plan that is about meshes; `_planning` decides leaf by leaf with its answers, and `_topology` holds the rule
by which a recorded mesh is resized. Meshes are compared by axis names, sizes and types, never as objects; a mesh that
contradicts what it is to stand for is refused, never picked silently.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from orbax_explicit import _refusals
from orbax_explicit._errors import Problem
from orbax_explicit._outcomes import MeshSource, PlannedMesh
from orbax_explicit._policy import RestorePolicy, SpecRule
from orbax_explicit._records import (
    AxisType,
    Inventory,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    SpecRecord,
    partition_axes,
)
from orbax_explicit._topology import (
    Room,
    first_devices,
    is_in_every_process,
    is_shared_equally,
    over_processes,
    resized_together,
    splits_by_mesh,
)

_Answer = TypeVar("_Answer")


class Refused(Exception):
    """Control flow of a planning: something cannot be done, for these reasons. The plan lists them.

    Attributes:
        problem: The first reason, without the leaves that it affects.
        problems: All of them.
    """

    def __init__(self, problem: Problem, *more: Problem) -> None:
        super().__init__(problem.could_not)
        self.problem = problem
        self.problems = (problem, *more)


class Answers(Generic[_Answer]):
    """What was answered once, a refusal too, by questions that are cheap to compare."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Answer | Refused] = {}

    def once(self, question: Hashable, answer: Callable[[], _Answer]) -> _Answer:
        """The answer to a question, which is worked out when it is asked for the first time.

        Raises:
            Refused: That was the answer.
        """
        if question not in self._known:
            try:
                self._known[question] = answer()
            except Refused as refused:
                self._known[question] = refused
        known = self._known[question]
        if isinstance(known, Refused):
            raise Refused(*known.problems)
        return known


class MeshPlanner:
    """Answers for one restore which mesh takes which spec, and remembers what it was asked."""

    def __init__(
        self,
        manifest: Manifest,
        present: Inventory,
        policy: RestorePolicy,
        *,
        mesh: MeshRecord | None,
        context: MeshRecord | None,
        target_meshes: Iterable[MeshRecord],
        exact: bool,
    ) -> None:
        """Creates the planner.

        Args:
            manifest: What was recorded.
            present: The devices that are here now.
            policy: The caller's choices.
            mesh: The concrete mesh that the caller passed.
            context: The concrete mesh of `jax.set_mesh`.
            target_meshes: The meshes, concrete and abstract, of the target's leaves.
            exact: Whether a recorded mesh that does not fit is refused, rather than resized.
        """
        self._manifest = manifest
        self._saved = manifest.inventory
        self._present = present
        self._policy = policy
        self._mesh = mesh
        self._context = context
        self._target_meshes = tuple(dict.fromkeys(target_meshes))
        self._exact = exact
        # By identity: hashing a mesh costs O(devices). The manifest, the policy and the target keep the keys alive.
        self._answers: Answers[PlannedMesh] = Answers()
        self._as_wanted: dict[int, MeshRecord] = {}
        self._renamed_specs: dict[int, SpecRecord] = {}

    def for_target(self, wanted: MeshRecord, recorded: MeshRecord | None) -> PlannedMesh:
        """The concrete mesh for the abstract mesh of a target's leaf.

        Args:
            wanted: The abstract mesh.
            recorded: The mesh on which the leaf was recorded, if it was on one.

        Raises:
            Refused: A passed or context mesh contradicts it, or it is larger than the machine.
        """
        return self._answers.once(("target", id(wanted), id(recorded)), lambda: self._for_target(wanted, recorded))

    def for_recorded(self, recorded: NamedShardingRecord) -> PlannedMesh:
        """The mesh that takes a recorded spec.

        Raises:
            Refused: A passed or context mesh cannot take it, or the recorded mesh does not fit the present devices.
        """
        return self._answers.once(("recorded", id(recorded), 0), lambda: self._for_recorded(recorded))

    def for_rule(self, rule: SpecRule) -> PlannedMesh:
        """The mesh that takes a spec by name: the one at hand, else the only one of the target or of the checkpoint.

        Raises:
            Refused: There is none, or more than one, or it lacks axes of the spec.
        """
        return self._answers.once(("rule", id(rule), 0), lambda: self._for_rule(rule))

    def renamed(self, spec: SpecRecord) -> SpecRecord:
        """A recorded spec with the names that the policy gives its axes."""
        renames = self._policy.rename_axes
        if not renames:
            return spec
        if id(spec) not in self._renamed_specs:
            self._renamed_specs[id(spec)] = dataclasses.replace(
                spec,
                partitions=tuple(_renamed_partition(p, renames) for p in spec.partitions),
                unreduced=_renamed_names(spec.unreduced, renames),
                reduced=_renamed_names(spec.reduced, renames),
                unreduced_kind=spec.unreduced_kind if _renamed_names(spec.unreduced, renames) else None,
            )
        return self._renamed_specs[id(spec)]

    def check_is_in_every_process(self, mesh: MeshRecord) -> None:
        """Refuses a concrete mesh of which some process has no device: it would wait for the others, or they for it.

        Raises:
            Refused: It is one.
        """
        here = set(self._present.device_ids)
        if here.issuperset(mesh.device_ids or ()) and not is_in_every_process(mesh.device_ids or (), self._present):
            raise Refused(_refusals.mesh_is_not_in_every_process(mesh, self._present))

    def _at_hand(self, mesh: MeshRecord, source: MeshSource, recorded: MeshRecord | None = None) -> PlannedMesh:
        self.check_is_in_every_process(mesh)
        return PlannedMesh(mesh=mesh, source=source, recorded=recorded)

    # A mesh that a target's leaf names.

    def _for_target(self, wanted: MeshRecord, recorded: MeshRecord | None) -> PlannedMesh:
        if self._mesh is not None:
            return self._agreeing(self._mesh, "given", "the mesh that was passed", wanted)
        if self._context is not None:
            return self._agreeing(self._context, "context", "the mesh of jax.set_mesh", wanted)
        own = () if recorded is None else (recorded,)
        for candidate in (*own, *self._manifest.meshes):
            as_wanted = self._wanted(candidate)
            if (as_wanted.axis_names, candidate.axis_sizes) == (wanted.axis_names, wanted.axis_sizes):
                rebuilt = self._as_recorded(candidate)
                if rebuilt is not None:
                    mesh = dataclasses.replace(rebuilt.mesh, axis_types=wanted.axis_types)
                    return dataclasses.replace(rebuilt, mesh=mesh, recorded=None)
        if wanted.size > self._present.device_count:
            raise Refused(_refusals.target_mesh_is_too_large(wanted, self._present))
        devices = first_devices(self._present, wanted.size)
        if devices is None:
            raise Refused(_refusals.target_mesh_is_not_shared_equally(wanted, self._present))
        return self._new(wanted, devices, None)

    def _agreeing(self, mesh: MeshRecord, source: MeshSource, name: str, wanted: MeshRecord) -> PlannedMesh:
        if same_axes(mesh, wanted):
            return self._at_hand(mesh, source)
        raise Refused(_refusals.target_mesh_is_contradicted(wanted, mesh, name, is_context=source == "context"))

    # A mesh that was recorded.

    def _for_recorded(self, recorded: NamedShardingRecord) -> PlannedMesh:
        mesh = recorded.mesh
        self._kept_names(mesh)
        if self._mesh is not None:
            if missing := sorted(self.renamed(recorded.spec).axes() - set(self._mesh.axis_names)):
                raise Refused(_refusals.mesh_lacks_axes(missing, self._mesh, mesh))
            return self._at_hand(self._mesh, "given", mesh)
        if self._context is not None:
            if not self._has_axes(self._context, mesh):
                raise Refused(_refusals.context_mesh_is_other(mesh, self._wanted(mesh), self._context))
            return self._at_hand(self._context, "context", mesh)
        own = self._of_target(mesh)
        if own is None:
            return self._rebuilt(mesh)
        if own.device_ids is not None:
            return self._at_hand(own, "target", mesh)
        return dataclasses.replace(self.for_target(own, mesh), recorded=mesh)

    def _of_target(self, recorded: MeshRecord) -> MeshRecord | None:
        """The mesh of the target's other leaves that has the recorded axis names and types, if there is one.

        Of several, the one of the recorded sizes and devices; where that leaves a choice, none.
        """
        fitting = [mesh for mesh in self._target_meshes if self._has_axes(mesh, recorded)]
        same_sizes = [mesh for mesh in fitting if mesh.axis_sizes == recorded.axis_sizes]
        same_devices = [mesh for mesh in same_sizes if mesh.device_ids == recorded.device_ids]
        for candidates in (same_devices, same_sizes, fitting):
            if candidates:
                return candidates[0] if len(candidates) == 1 else None
        return None

    def _has_axes(self, mesh: MeshRecord, recorded: MeshRecord) -> bool:
        """Whether a mesh has the axis names of a recorded one, as the policy has them, with their types where known."""
        names = self._kept_names(recorded)
        if not set(names.values()) <= set(mesh.axis_names):
            return False
        types = self._wanted_types(recorded)
        if types is None or mesh.axis_types is None:
            return True
        have = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        wanted = dict(zip(recorded.axis_names, types, strict=True))
        return all(have[new] == wanted[old] for old, new in names.items())

    def _kept_names(self, mesh: MeshRecord) -> dict[str, str]:
        """What the axes of a recorded mesh are called, but for those that the policy drops.

        Raises:
            Refused: Two axes would have one name.
        """
        new_names = {name: self._policy.rename_axes.get(name, name) for name in mesh.axis_names}
        kept = {old: new for old, new in new_names.items() if new is not None}
        self._check_names(mesh, kept.values())
        return kept

    def _check_names(self, mesh: MeshRecord, names: Iterable[str]) -> None:
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise Refused(_refusals.policy_gives_two_axes_one_name(mesh, twice))

    def _wanted_types(self, mesh: MeshRecord) -> tuple[AxisType, ...] | None:
        """The types that the policy gives the axes of a recorded mesh; None where neither it nor the record says."""
        if self._policy.axis_types is None:
            return mesh.axis_types
        return self._policy.typed(mesh.axis_names, mesh.axis_types or _all_auto(mesh))

    def _wanted(self, mesh: MeshRecord) -> MeshRecord:
        """A recorded mesh with the names and types that the policy gives its axes; one that is dropped keeps its name.

        Raises:
            Refused: Two axes would have one name.
        """
        if id(mesh) not in self._as_wanted:
            kept = self._kept_names(mesh)
            names = tuple(kept.get(name, name) for name in mesh.axis_names)
            self._check_names(mesh, names)
            types = self._wanted_types(mesh)
            same = (names, types) == (mesh.axis_names, mesh.axis_types)
            self._as_wanted[id(mesh)] = mesh if same else dataclasses.replace(mesh, axis_names=names, axis_types=types)
        return self._as_wanted[id(mesh)]

    # A mesh for a spec by name.

    def _for_rule(self, rule: SpecRule) -> PlannedMesh:
        planned = self._for_specs_by_name()
        if planned is None:
            raise Refused(_refusals.rule_has_no_mesh(rule, len(self._target_meshes or self._manifest.meshes)))
        if missing := sorted(rule.spec.axes() - set(planned.mesh.axis_names)):
            raise Refused(_refusals.rule_names_unknown_axes(rule, missing, planned.mesh))
        return planned

    def _for_specs_by_name(self) -> PlannedMesh | None:
        if self._mesh is not None:
            return self._at_hand(self._mesh, "given")
        if self._context is not None:
            return self._at_hand(self._context, "context")
        if self._target_meshes:
            own = self._target_meshes[0] if len(self._target_meshes) == 1 else None
            if own is None:
                return None
            return self._at_hand(own, "target") if own.device_ids is not None else self.for_target(own, None)
        meshes = self._manifest.meshes
        return self._rebuilt(meshes[0]) if len(meshes) == 1 else None

    # Rebuilding a recorded mesh on the present devices.

    def _rebuilt(self, mesh: MeshRecord) -> PlannedMesh:
        return self._answers.once(("rebuilt", id(mesh), 0), lambda: self._as_recorded(mesh) or self._adapted(mesh))

    def _typed(self, mesh: MeshRecord) -> MeshRecord:
        wanted = self._wanted(mesh)
        return wanted if wanted.axis_types is not None else dataclasses.replace(wanted, axis_types=_all_auto(mesh))

    def _as_recorded(self, mesh: MeshRecord) -> PlannedMesh | None:
        """A recorded mesh in its recorded sizes, on as many devices as there were; None where there are more or fewer."""
        typed = self._typed(mesh)
        ids = mesh.device_ids or ()
        same_platform = mesh.platform in (None, self._present.platform)
        same_count = self._saved is None or self._saved.device_count == self._present.device_count
        all_here = ids and set(self._present.device_ids).issuperset(ids)
        # A mesh on some devices of one process may have ids that are those of one of several processes here.
        if all_here and same_platform and same_count and is_in_every_process(ids, self._present):
            return self._placed(typed, ids, "recorded devices", mesh)
        if self._recorded_count == self._present.device_count:
            if mesh.size == self._recorded_count:
                return self._arranged(typed, self._present.device_ids, mesh)
            if (positions := self._at_positions(mesh)) is not None:
                return self._placed(typed, positions, "recorded positions", mesh)
        return None

    def _adapted(self, mesh: MeshRecord) -> PlannedMesh:
        """A recorded mesh on more or fewer devices than there were, by the rule of `_topology`."""
        if self._exact:
            raise Refused(_refusals.mesh_does_not_fit(mesh, self._saved, self._present))
        sizes = self._sizes[mesh]
        if sizes is None:
            raise Refused(
                _refusals.mesh_cannot_be_resized(
                    mesh, self._saved, self._present, self._policy.resize, Room.of(self._present)
                )
            )
        typed = self._typed(mesh)
        if sizes == mesh.axis_sizes and (positions := self._at_positions(mesh)) is not None:
            return self._placed(typed, positions, "recorded positions", mesh)
        devices = first_devices(self._present, math.prod(sizes))
        assert devices is not None, "the sizes fit"
        return self._arranged(dataclasses.replace(typed, axis_sizes=sizes, device_ids=None), devices, mesh)

    @functools.cached_property
    def _sizes(self) -> Mapping[MeshRecord, tuple[int, ...] | None]:
        """The sizes of each recorded mesh here; meshes that were on the same devices stay on as many."""
        splits = splits_by_mesh(self._manifest.arrays.values())
        together: dict[frozenset[int] | int, list[MeshRecord]] = {}
        for i, mesh in enumerate(splits):
            together.setdefault(i if mesh.device_ids is None else frozenset(mesh.device_ids), []).append(mesh)
        sizes: dict[MeshRecord, tuple[int, ...] | None] = {}
        for meshes in together.values():
            group = [(mesh, splits[mesh], mesh.size == self._recorded_count) for mesh in meshes]
            found = resized_together(group, Room.of(self._present), resize=self._policy.resize)
            sizes.update(zip(meshes, found, strict=True))
        return sizes

    def _placed(self, mesh: MeshRecord, ids: tuple[int, ...], source: MeshSource, recorded: MeshRecord) -> PlannedMesh:
        mesh = dataclasses.replace(mesh, device_ids=ids, platform=self._present.platform)
        return PlannedMesh(mesh=mesh, source=source, recorded=recorded)

    def _arranged(self, mesh: MeshRecord, devices: tuple[int, ...], recorded: MeshRecord) -> PlannedMesh:
        """A recorded mesh on other devices, its axes over processes as they were."""
        ids = over_processes(recorded, self._saved, mesh.axis_sizes, devices, self._present)
        if ids is not None:
            return self._placed(mesh, ids, "recorded processes", recorded)
        return self._new(mesh, devices, recorded)

    def _new(self, mesh: MeshRecord, devices: tuple[int, ...], recorded: MeshRecord | None) -> PlannedMesh:
        mesh = dataclasses.replace(mesh, device_ids=None, platform=self._present.platform)
        return PlannedMesh(mesh=mesh, source="new", recorded=recorded, device_ids=devices)

    @functools.cached_property
    def _recorded_count(self) -> int:
        """How many devices there were; of a checkpoint without an inventory, how many it speaks of."""
        if self._saved is not None:
            return self._saved.device_count
        return len({i for mesh in self._manifest.meshes for i in mesh.device_ids or ()})

    def _at_positions(self, mesh: MeshRecord) -> tuple[int, ...] | None:
        """The devices that stand in `jax.devices()` where those of a mesh stood when it was saved.

        None where these are not known, or not all here, or not equally many of each process.
        """
        if self._saved is None or mesh.device_ids is None:
            return None
        position = {device_id: i for i, device_id in enumerate(self._saved.device_ids)}
        here = self._present.device_ids
        positions = [position.get(device_id, len(here)) for device_id in mesh.device_ids]
        if max(positions, default=0) >= len(here):
            return None
        ids = tuple(here[i] for i in positions)
        return ids if is_shared_equally(ids, self._present) else None


def same_axes(a: MeshRecord, b: MeshRecord) -> bool:
    """Whether two meshes agree in axis names, sizes and types, whatever their devices."""
    return (a.axis_names, a.axis_sizes, a.axis_types) == (b.axis_names, b.axis_sizes, b.axis_types)


def _renamed_partition(partition: Partition, renames: Mapping[str, str | None]) -> Partition:
    axes = partition_axes(partition)
    if not any(axis in renames for axis in axes):
        return partition
    named = _renamed_names(axes, renames, ordered=False)
    if len(named) <= 1:  # As JAX writes it.
        return named[0] if named else None
    return named


def _renamed_names(
    names: tuple[str, ...], renames: Mapping[str, str | None], *, ordered: bool = True
) -> tuple[str, ...]:
    """The names that are not dropped, by their new names; sorted where their order says nothing."""
    kept = (renames.get(name, name) for name in names)
    renamed = tuple(name for name in kept if name is not None)
    return tuple(sorted(renamed)) if ordered else renamed


def _all_auto(mesh: MeshRecord) -> tuple[AxisType, ...]:
    """What a mesh whose axis types were not recorded was: JAX had no other type then."""
    return tuple("auto" for _ in mesh.axis_names)
