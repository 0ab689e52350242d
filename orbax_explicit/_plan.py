"""`RestorePlan`: a decision about a whole restore, as a frozen value.

It has exactly one `Outcome` for every leaf of the result. It is made before any array is read, it can be printed, and
what is executed is the very plan that was printed. `_planning` makes plans, `_report` words them, `_binding` turns
them into JAX shardings.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from orbax_explicit._errors import MeshMismatchError, Problem, RestoreRefusedError
from orbax_explicit._outcomes import (
    AsFallback,
    AsTarget,
    NotPlaced,
    OnDevice,
    OnHost,
    OnMesh,
    Outcome,
    PlannedMesh,
    Uncommitted,
)
from orbax_explicit._records import Inventory, LeafPath, NamedShardingRecord, Tree
from orbax_explicit._report import plan_json, plan_text


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """Everything that a restore will do, or every reason why it will not.

    Attributes:
        outcomes: One for each leaf of the result, in tree order; a refused leaf has one too.
        present: The devices that it is planned for.
        recorded: The devices of the run that saved the checkpoint; None where they were not recorded.
        tree: Containers and leaves of the result, where there is no target to take them from.
        left_out: Paths of saved leaves that the result lacks. They are not read.
        refused: Everything that cannot be done; a plan with any is not executed.
        notes: What concerns the checkpoint as a whole, each a sentence.
        default_device_ids: `jax.Device.id` of the default device of each process.
    """

    outcomes: tuple[Outcome, ...]
    present: Inventory
    recorded: Inventory | None = None
    tree: Tree | None = None
    left_out: tuple[LeafPath, ...] = ()
    refused: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    default_device_ids: tuple[int, ...] = ()

    @functools.cached_property
    def by_path(self) -> Mapping[LeafPath, Outcome]:
        """Each outcome by the path of its leaf in the result."""
        return {outcome.path: outcome for outcome in self.outcomes}

    @functools.cached_property
    def meshes(self) -> tuple[PlannedMesh, ...]:
        """The distinct meshes of the result, in order of first use; each knows the one that it was."""
        used = {id(o.placement.mesh): o.placement.mesh for o in self.outcomes if isinstance(o.placement, OnMesh)}
        return tuple(dict.fromkeys(used.values()))

    @functools.cached_property
    def idle_device_ids(self) -> tuple[int, ...]:
        """Present devices that no mesh is on, of the plan or of the target; empty where the plan has none."""
        if not self.meshes:
            return ()
        on_meshes = (o for o in self.outcomes if isinstance(o.placement, OnMesh | AsTarget | AsFallback))
        landing = {id(ids): ids for outcome in on_meshes for _, ids in self._lands(outcome)}.values()
        used = set(itertools.chain.from_iterable(landing))
        return tuple(i for i in self.present.device_ids if i not in used)

    @functools.cached_property
    def bytes_read(self) -> int:
        """Bytes of one whole copy, as it was saved, of every leaf that is read; text is not counted."""
        return sum(outcome.bytes_read for outcome in self.outcomes)

    @functools.cached_property
    def bytes_on_host(self) -> int:
        """Bytes of the values that land on the host of each process; text is not counted."""
        return sum(outcome.nbytes for outcome in self.outcomes if isinstance(outcome.placement, OnHost))

    @property
    def bytes_per_device(self) -> Mapping[int, int]:
        """Bytes that land in the default memory of each present device, by `jax.Device.id`."""
        landing = self.bytes_by_memory.get(self.present.default_memory_kind, {})
        return {**dict.fromkeys(self.present.device_ids, 0), **landing}

    @functools.cached_property
    def bytes_by_memory(self) -> Mapping[str, Mapping[int, int]]:
        """Bytes that land in each memory kind of each device: kind -> `jax.Device.id` -> bytes.

        Leaves that `unaccounted` lists are not among them.
        """
        # Leaves of one placement get equal shares on the same devices: summed first, it costs leaves + meshes x devices.
        leaves: dict[int, Outcome] = {}
        totals: Counter[int] = Counter()
        for outcome in self.outcomes:
            leaves.setdefault(id(outcome.placement), outcome)
            totals[id(outcome.placement)] += outcome.nbytes
        landing: dict[str, Counter[int]] = {}
        for placement, nbytes in totals.items():
            share = nbytes // leaves[placement].shards
            for kind, ids in self._lands(leaves[placement]):
                of_kind = landing.setdefault(kind, Counter())
                for device_id in ids:
                    of_kind[device_id] += share
        return {kind: dict(sorted(of_kind.items())) for kind, of_kind in sorted(landing.items())}

    @functools.cached_property
    def unaccounted(self) -> tuple[LeafPath, ...]:
        """Paths of arrays whose sharding is of a kind that has no record: what they cost is not known."""
        return tuple(outcome.path for outcome in self.outcomes if outcome.bytes_per_device is None)

    def _lands(self, outcome: Outcome) -> list[tuple[str, tuple[int, ...]]]:
        """The memory kind and the devices of one leaf; none for a value on the host."""
        default = self.present.default_memory_kind
        match outcome.placement:
            case OnMesh(mesh=planned, memory_kind=kind):
                return [(kind, planned.device_ids)]
            case AsTarget(sharding=sharding) | AsFallback(sharding=sharding) if sharding is not None:
                ids = sharding.mesh.device_ids if isinstance(sharding, NamedShardingRecord) else (sharding.device_id,)
                return [(sharding.memory_kind or default, ids or ())]
            case OnDevice(device_id=device_id, memory_kind=kind):
                return [(kind, self.default_device_ids[:1] if device_id is None else (device_id,))]
            case Uncommitted(memory_kind=kind):
                return [(kind, self.default_device_ids)]
            case _:
                return []

    def raise_if_refused(self) -> None:
        """Raises one error that lists every problem, if there is any.

        Raises:
            MeshMismatchError: Every problem is about a mesh.
            RestoreRefusedError: Some problem is about something else.
        """
        if self.refused:
            only_meshes = all(problem.about == "mesh" for problem in self.refused)
            raise (MeshMismatchError if only_meshes else RestoreRefusedError)(*self.refused)

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole plan as a JSON object: every leaf, mesh, device, byte, change and problem.

        A placement's `"mesh"` is a position in the list `"meshes"`, a recorded sharding's one in `"recorded_meshes"`.
        `"bytes_by_memory"` has memory kind -> device id -> bytes. `"version"` is that of this form, 1.

        Args:
            indent: Spaces for each level; None for one line.
        """
        return plan_json(self, indent=indent)

    def __str__(self) -> str:
        """The plan as a person reads it: meshes, then leaves grouped by what decided, then changes, then problems."""
        return plan_text(self)

    def problems_of(self, outcome: Outcome) -> tuple[Problem, ...]:
        """Why a leaf is refused; empty where it is not."""
        positions = outcome.placement.problems if isinstance(outcome.placement, NotPlaced) else ()
        return tuple(self.refused[i] for i in positions)
