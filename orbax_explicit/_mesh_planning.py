"""Which mesh takes a spec: recorded, requested, passed and context meshes -> a `PlannedMesh`.

The part of a plan that is about meshes; `_planning` decides leaf by leaf with its answers. Meshes are compared by
axis names, sizes and types, never as objects; a mesh that contradicts what it is to stand for is refused, never
picked silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from orbax_explicit._errors import Problem
from orbax_explicit._plan import MeshSource, PlannedMesh
from orbax_explicit._policy import RestorePolicy
from orbax_explicit._records import AxisType, Inventory, Manifest, MeshRecord, NamedShardingRecord, plural


class Refused(Exception):
    """Control flow of a planning: something cannot be done, for this reason. The plan lists it.

    Attributes:
        problem: The reason, without the leaves that it affects.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.could_not)
        self.problem = problem


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
    ) -> None:
        """Creates the planner.

        Args:
            manifest: What was recorded.
            present: The devices that are here now.
            policy: The caller's choices.
            mesh: The concrete mesh that the caller passed.
            context: The concrete mesh of `jax.set_mesh`.
            target_meshes: The meshes, concrete and abstract, of the target's leaves.
        """
        self._saved = manifest.inventory
        self._recorded_meshes = manifest.meshes
        self._present = present
        self._policy = policy
        self._mesh = mesh
        self._context = context
        self._target_meshes = tuple(dict.fromkeys(target_meshes))
        # By identity: hashing a mesh costs O(devices). The manifest and the target keep the keys alive.
        self._answers: dict[tuple[str, int, int], PlannedMesh | Problem] = {}

    def for_target(self, wanted: MeshRecord, recorded: MeshRecord | None) -> PlannedMesh:
        """The concrete mesh for the abstract mesh of a target's leaf.

        Args:
            wanted: The abstract mesh.
            recorded: The mesh on which the leaf was recorded, if it was on one.

        Raises:
            Refused: A passed or context mesh contradicts it, or it is larger than the machine.
        """
        return self._once(("target", id(wanted), id(recorded)), lambda: self._for_target(wanted, recorded))

    def for_recorded(self, recorded: NamedShardingRecord) -> PlannedMesh:
        """The mesh that takes a recorded spec.

        Raises:
            Refused: A passed or context mesh cannot take it, or the recorded mesh does not fit the present devices.
        """
        return self._once(("recorded", id(recorded), 0), lambda: self._for_recorded(recorded))

    def _once(self, question: tuple[str, int, int], answer: Callable[[], PlannedMesh]) -> PlannedMesh:
        if question not in self._answers:
            try:
                self._answers[question] = answer()
            except Refused as refused:
                self._answers[question] = refused.problem
        found = self._answers[question]
        if isinstance(found, Problem):
            raise Refused(found)
        return found

    def _for_target(self, wanted: MeshRecord, recorded: MeshRecord | None) -> PlannedMesh:
        if self._mesh is not None:
            return self._agreeing(self._mesh, "given", "the mesh that was passed", wanted)
        if self._context is not None:
            return self._agreeing(self._context, "context", "the mesh of jax.set_mesh", wanted)
        own = () if recorded is None else (recorded,)
        for candidate in (*own, *self._recorded_meshes):
            if (candidate.axis_names, candidate.axis_sizes) == (wanted.axis_names, wanted.axis_sizes):
                try:
                    rebuilt = self._rebuilt(candidate)
                except Refused:
                    continue
                return PlannedMesh(
                    mesh=dataclasses.replace(rebuilt.mesh, axis_types=wanted.axis_types), source=rebuilt.source
                )
        if wanted.size > self._present.device_count:
            raise Refused(
                Problem(
                    could_not=f"cannot resolve the target's mesh {wanted} on {self._present}",
                    present=str(self._present),
                    fix=f"give the target a mesh of at most {plural(self._present.device_count, 'device')}",
                    about="mesh",
                )
            )
        return self._new(wanted)

    def _agreeing(self, mesh: MeshRecord, source: MeshSource, name: str, wanted: MeshRecord) -> PlannedMesh:
        if same_axes(mesh, wanted):
            return PlannedMesh(mesh=mesh, source=source)
        raise Refused(
            Problem(
                could_not=f"cannot resolve the target's mesh {wanted} on {name} {mesh}",
                present=f"{name} is {mesh}",
                fix="make the two agree in axis names, sizes and types"
                + ("" if source == "given" else ", pass mesh=, or restore outside jax.set_mesh"),
                about="mesh",
            )
        )

    def _for_recorded(self, recorded: NamedShardingRecord) -> PlannedMesh:
        mesh = recorded.mesh
        if self._mesh is not None:
            missing = sorted(recorded.spec.axes() - set(self._mesh.axis_names))
            if missing:
                raise Refused(
                    Problem(
                        could_not=f"cannot place the recorded {recorded.spec}: the mesh that was passed lacks {missing}",
                        recorded=str(mesh),
                        present=str(self._mesh),
                        fix="pass a mesh that has these axes, or a target with shardings",
                        about="mesh",
                    )
                )
            return PlannedMesh(mesh=self._mesh, source="given", recorded=mesh)
        if self._context is not None:
            if not _has_axes(self._context, mesh, self._types(mesh)):
                raise self._contradicted(mesh, self._context)
            return PlannedMesh(mesh=self._context, source="context", recorded=mesh)
        own = self._of_target(mesh)
        if own is None:
            return self._rebuilt(mesh)
        if own.device_ids is not None:
            return PlannedMesh(mesh=own, source="target", recorded=mesh)
        return dataclasses.replace(self.for_target(own, mesh), recorded=mesh)

    def _contradicted(self, mesh: MeshRecord, context: MeshRecord) -> Refused:
        """A context mesh that lacks the axes of a recorded one, or types them otherwise than it is to be rebuilt."""
        wanted = dataclasses.replace(mesh, axis_types=self._types(mesh))
        what, retype = f"a recorded mesh {mesh}", ""
        if wanted.axis_types != mesh.axis_types:
            what += f", retyped {wanted} by the policy,"
        elif set(mesh.axis_names) <= set(context.axis_names):
            retype = ", axis_types= in the policy to retype the recorded axes"
        return Refused(
            Problem(
                could_not=f"cannot place {what} on the mesh of jax.set_mesh {context}",
                recorded=str(mesh),
                present=str(context),
                fix=f"pass mesh= to place the recorded specs on a mesh of your own{retype}, or restore outside "
                "jax.set_mesh",
                about="mesh",
            )
        )

    def _of_target(self, recorded: MeshRecord) -> MeshRecord | None:
        """The mesh of the target's other leaves that has the recorded axis names and types, if there is one.

        Of several, the one of the recorded sizes and devices; where that leaves a choice, none.
        """
        fitting = [mesh for mesh in self._target_meshes if _has_axes(mesh, recorded, self._types(recorded))]
        same_sizes = [mesh for mesh in fitting if mesh.axis_sizes == recorded.axis_sizes]
        same_devices = [mesh for mesh in same_sizes if mesh.device_ids == recorded.device_ids]
        for candidates in (same_devices, same_sizes, fitting):
            if candidates:
                return candidates[0] if len(candidates) == 1 else None
        return None

    # Rebuilding a recorded mesh on the present devices.

    def _types(self, mesh: MeshRecord) -> tuple[AxisType, ...] | None:
        """The axis types that a recorded mesh is rebuilt with; None where neither record nor policy says."""
        if mesh.axis_types is None and self._policy.axis_types is None:
            return None
        return self._policy.typed(mesh.axis_names, mesh.axis_types or _all_auto(mesh))

    def _rebuilt(self, mesh: MeshRecord) -> PlannedMesh:
        return self._once(("rebuilt", id(mesh), 0), lambda: self._rebuild(mesh))

    def _rebuild(self, mesh: MeshRecord) -> PlannedMesh:
        typed = dataclasses.replace(mesh, axis_types=self._types(mesh) or _all_auto(mesh))
        ids = mesh.device_ids or ()
        same_platform = mesh.platform in (None, self._present.platform)
        same_count = self._saved is None or self._saved.device_count == self._present.device_count
        if ids and same_platform and same_count and set(self._present.device_ids).issuperset(ids):
            return self._placed(typed, ids, "recorded devices", mesh)
        recorded_count = self._saved.device_count if self._saved is not None else self._devices_recorded()
        if recorded_count == self._present.device_count:
            if mesh.size == recorded_count:
                return dataclasses.replace(self._new(typed), recorded=mesh)
            if (positions := self._positions(mesh)) is not None:
                ids = tuple(self._present.device_ids[i] for i in positions)
                return self._placed(typed, ids, "recorded positions", mesh)
        raise self._does_not_fit(mesh)

    def _does_not_fit(self, mesh: MeshRecord) -> Refused:
        """The place of adapting a recorded mesh to a machine of another size, which is refused as yet."""
        recorded = str(self._saved) if self._saved is not None else f"{plural(mesh.size, 'device')} in the mesh"
        return Refused(
            Problem(
                could_not=f"cannot rebuild mesh {mesh} on {plural(self._present.device_count, 'device')}",
                recorded=recorded,
                present=str(self._present),
                fix=f"pass mesh= with the axes {', '.join(mesh.axis_names)} over present devices, "
                "or a target with shardings",
                about="mesh",
            )
        )

    def _placed(self, mesh: MeshRecord, ids: tuple[int, ...], source: MeshSource, recorded: MeshRecord) -> PlannedMesh:
        mesh = dataclasses.replace(mesh, device_ids=ids, platform=self._present.platform)
        return PlannedMesh(mesh=mesh, source=source, recorded=recorded)

    def _new(self, mesh: MeshRecord) -> PlannedMesh:
        mesh = dataclasses.replace(mesh, device_ids=None, platform=self._present.platform)
        return PlannedMesh(mesh=mesh, source="new")

    def _devices_recorded(self) -> int:
        """How many devices a checkpoint without an inventory speaks of."""
        return len({i for mesh in self._recorded_meshes for i in mesh.device_ids or ()})

    def _positions(self, mesh: MeshRecord) -> tuple[int, ...] | None:
        """Where the devices of a mesh stood in `jax.devices()` when it was saved."""
        if self._saved is None or mesh.device_ids is None:
            return None
        position = {device_id: i for i, device_id in enumerate(self._saved.device_ids)}
        ids = mesh.device_ids
        return tuple(position[i] for i in ids) if all(i in position for i in ids) else None


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


def _all_auto(mesh: MeshRecord) -> tuple[AxisType, ...]:
    """What a mesh whose axis types were not recorded was: JAX had no other type then."""
    return tuple("auto" for _ in mesh.axis_names)
