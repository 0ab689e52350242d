"""`RestorePlan`: a decision about a restore, as frozen values.

A plan has exactly one `Outcome` for every leaf of the result: where it lands, and which line of the order
decided so. It is made before any array is read, it can be printed, and what is executed is the very plan
that was printed. `_planning` makes plans, `_binding` turns them into JAX shardings.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from orbax_explicit._errors import MeshMismatchError, Problem, RestoreRefusedError
from orbax_explicit._records import (
    Inventory,
    LeafPath,
    LeafRecord,
    MeshRecord,
    ShardingRecord,
    SpecRecord,
    ValueType,
    path_text,
)

MeshSource: TypeAlias = Literal["given", "context", "target", "recorded devices", "recorded positions", "new"]
"""Where the devices of a mesh come from.

- `"given"`: the `mesh=` argument.
- `"context"`: the mesh of `jax.set_mesh`.
- `"target"`: the concrete mesh of other leaves of the target.
- `"recorded devices"`: the recorded device ids, all of which are present.
- `"recorded positions"`: the devices that stand in `jax.devices()` where the recorded ones stood.
- `"new"`: `jax.make_mesh` over the first devices.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMesh:
    """A mesh of the result.

    Attributes:
        mesh: Its axes; and its devices, unless `source` is `"new"` and `jax.make_mesh` orders them.
        source: Where its devices come from.
        recorded: The mesh that it stands for in the checkpoint; None where the target asked for it.
    """

    mesh: MeshRecord
    source: MeshSource
    recorded: MeshRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMesh:
    """Placed over a mesh.

    Attributes:
        mesh: The mesh.
        spec: How each array dimension is split over it.
        memory_kind: The memory kind, always named.
    """

    mesh: PlannedMesh
    spec: SpecRecord
    memory_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """Committed to one device.

    Attributes:
        device_id: `jax.Device.id`; None for the default device.
        memory_kind: The memory kind, always named.
    """

    device_id: int | None
    memory_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncommitted:
    """On the default device, free to follow the arrays that it is used with.

    Attributes:
        memory_kind: The memory kind, always named.
    """

    memory_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AsTarget:
    """The concrete sharding of the target's leaf, as it is.

    Attributes:
        sharding: A record of it, for people; None where it is of a kind that has no record.
    """

    sharding: ShardingRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AsFallback:
    """The sharding that the caller gave for arrays whose recorded mesh does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHost:
    """A value on the host.

    Attributes:
        type: The type of value that comes back.
    """

    type: ValueType


Placement: TypeAlias = OnMesh | OnDevice | Uncommitted | AsTarget | AsFallback | OnHost

Rule: TypeAlias = Literal[
    "target", "target's abstract mesh", "recorded", "fallback", "one device", "uncommitted", "host"
]
"""Which line of the order decided: the first that applies, as listed."""
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happens to one leaf.

    Attributes:
        path: Its path in the result.
        source: Its path in the checkpoint.
        recorded: What was saved.
        placement: Where it lands.
        rule: Which line of the order decided.
        dtype: Name of the dtype that it is cast to; None where it keeps the saved one.
        notes: What differs from what was recorded or asked for, each a clause.
    """

    path: LeafPath
    source: LeafPath
    recorded: LeafRecord
    placement: Placement
    rule: Rule
    dtype: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """Everything that a restore will do, or every reason why it will not.

    Attributes:
        outcomes: One for each leaf of the result, in tree order.
        present: The devices that it is planned for.
        recorded: The devices of the run that saved the checkpoint; None where they were not recorded.
        refused: Everything that cannot be done; a plan with any is not executed.
        notes: What concerns the checkpoint as a whole, each a sentence.
    """

    outcomes: tuple[Outcome, ...]
    present: Inventory
    recorded: Inventory | None = None
    refused: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def by_path(self) -> Mapping[LeafPath, Outcome]:
        """Each outcome by the path of its leaf in the result."""
        return {outcome.path: outcome for outcome in self.outcomes}

    @functools.cached_property
    def meshes(self) -> tuple[PlannedMesh, ...]:
        """The distinct meshes of the result, in order of first use."""
        used = {id(o.placement.mesh): o.placement.mesh for o in self.outcomes if isinstance(o.placement, OnMesh)}
        return tuple(dict.fromkeys(used.values()))

    def raise_if_refused(self) -> None:
        """Raises one error that lists every problem, if there is any.

        Raises:
            MeshMismatchError: Every problem is about a mesh.
            RestoreRefusedError: Some problem is about something else.
        """
        if self.refused:
            only_meshes = all(problem.about == "mesh" for problem in self.refused)
            raise (MeshMismatchError if only_meshes else RestoreRefusedError)(*self.refused)

    def __str__(self) -> str:
        """The plan as a person reads it: meshes, then outcomes grouped by what decided, then problems."""
        count = f"{len(self.outcomes)} {'leaf' if len(self.outcomes) == 1 else 'leaves'}"
        lines = [f"restore of {count}"]
        if self.refused:
            problems = f"{len(self.refused)} {'problem' if len(self.refused) == 1 else 'problems'}"
            lines = [f"restore REFUSED for {problems}; {count} could be restored"]
        lines.append(f"  present   {self.present}")
        lines.append(f"  recorded  {self.recorded if self.recorded is not None else 'not which devices'}")
        lines.extend(dict.fromkeys(f"  mesh      {_mesh_text(planned)}" for planned in self.meshes))
        rules = Counter(outcome.rule for outcome in self.outcomes)
        lines.extend(f"  {rules[rule]:>7} x {_RULE_TEXT[rule]}" for rule in RULES if rule in rules)
        noted: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            for note in outcome.notes:
                noted.setdefault(note, []).append(path_text(outcome.path))
        lines.extend(f"  note      {note}: {_some(paths)}" for note, paths in noted.items())
        lines.extend(f"  note      {note}" for note in self.notes)
        for problem in self.refused:
            first, *rest = str(problem).splitlines()
            lines.append(f"  refused   {first}")
            lines.extend(f"          {line}" for line in rest)
        return "\n".join(lines)


_SOURCE_TEXT: Mapping[MeshSource, str] = {
    "given": "the mesh that was passed",
    "context": "the mesh of jax.set_mesh",
    "target": "the target's own mesh",
    "recorded devices": "the recorded devices",
    "recorded positions": "the devices at the recorded positions",
    "new": "the present devices, in the order of jax.make_mesh",
}

_RULE_TEXT: Mapping[Rule, str] = {
    "target": "the target's sharding",
    "target's abstract mesh": "the target's spec, its abstract mesh made concrete",
    "recorded": "the recorded spec",
    "fallback": "the fallback sharding",
    "one device": "on one device, as recorded",
    "uncommitted": "uncommitted, as recorded",
    "host": "a value on the host",
}


def _mesh_text(planned: PlannedMesh) -> str:
    before, after = str(planned.recorded), str(planned.mesh)
    origin = f"{before} -> " if planned.recorded is not None and before != after else ""
    return f"{origin}{after} on {_SOURCE_TEXT[planned.source]}"


def _some(paths: list[str]) -> str:
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"
