"""What happens to one leaf of a restore, and to one mesh, as frozen values.

A leaf of the result has exactly one `Outcome`: where it lands, which line of the order decided so, and what differs
from what was recorded. `_planning` makes outcomes, `_plan` gathers them, `_binding` turns them into JAX shardings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from orbax_explicit._records import (
    ArrayRecord,
    LeafPath,
    LeafRecord,
    MeshRecord,
    NamedShardingRecord,
    ShardingRecord,
    SpecRecord,
    ValueType,
    dtype_itemsize,
)

MeshSource: TypeAlias = Literal[
    "given", "context", "target", "recorded devices", "recorded positions", "recorded processes", "new"
]
"""Where the devices of a mesh come from.

- `"given"`: the `mesh=` argument.
- `"context"`: the mesh of `jax.set_mesh`.
- `"target"`: the concrete mesh of other leaves of the target.
- `"recorded devices"`: the recorded device ids, all of which are present.
- `"recorded positions"`: the devices that stand in `jax.devices()` where the recorded ones stood.
- `"recorded processes"`: present devices, in an order in which those mesh axes run over processes that did so before.
- `"new"`: present devices, in the order in which `jax.make_mesh` arranges them.
"""
MESH_SOURCES: tuple[MeshSource, ...] = get_args(MeshSource)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMesh:
    """A mesh of the result.

    Attributes:
        mesh: Its axes; and its devices in row-major order, unless `source` is `"new"` and `jax.make_mesh` orders them.
        source: Where its devices come from.
        recorded: The mesh that it stands for in the checkpoint; None where the target asked for it.
        device_ids: The devices that it is on: those of `mesh` where it names them, else in the order of `jax.devices()`.
    """

    mesh: MeshRecord
    source: MeshSource
    recorded: MeshRecord | None = None
    device_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mesh.device_ids is not None:
            object.__setattr__(self, "device_ids", self.mesh.device_ids)

    @property
    def is_at_hand(self) -> bool:
        """Whether the caller had it: it was passed, set or on the target, and is taken as it is."""
        return self.source in ("given", "context", "target")

    @property
    def resized(self) -> bool:
        """Whether it is a recorded mesh, rebuilt with other sizes."""
        return self.recorded is not None and not self.is_at_hand and self.mesh.axis_sizes != self.recorded.axis_sizes


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
    """On the default device of each process, free to follow the arrays that it is used with.

    Attributes:
        memory_kind: The memory kind, always named.
    """

    memory_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AsTarget:
    """The concrete sharding of the target's leaf, as it is.

    Attributes:
        sharding: A record of it; None where it is of a kind that has no record.
    """

    sharding: ShardingRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AsFallback:
    """The sharding that the caller gave for arrays whose recorded mesh does not fit.

    Attributes:
        sharding: A record of it; None where it is of a kind that has no record.
    """

    sharding: ShardingRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHost:
    """A value on the host.

    Attributes:
        type: The type of value that comes back.
    """

    type: ValueType


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The value that the target has, since the checkpoint has none. Nothing is read, and nothing moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlaced:
    """Nowhere: the leaf is refused.

    Attributes:
        problems: Position of each of its problems in `RestorePlan.refused`.
    """

    problems: tuple[int, ...]


Placement: TypeAlias = OnMesh | OnDevice | Uncommitted | AsTarget | AsFallback | OnHost | Kept | NotPlaced

Rule: TypeAlias = Literal[
    "target",
    "target's abstract mesh",
    "recorded",
    "rules",
    "fallback",
    "one device",
    "uncommitted",
    "host",
    "kept",
    "refused",
]
"""Which line of the order decided: the first that applies, as listed."""
RULES: tuple[Rule, ...] = get_args(Rule)

ChangeKind: TypeAlias = Literal[
    "resized",
    "retyped",
    "axes renamed",
    "untyped",
    "replicated",
    "memory kind",
    "cast",
    "renamed",
    "another device",
    "no sharding",
    "fallback",
    "key data",
    "typed keys",
]
"""What is not as it was recorded.

- `"resized"`: its mesh has other sizes.
- `"retyped"`: the policy gave its mesh other axis types.
- `"axes renamed"`: the policy renamed or dropped axes of its spec.
- `"untyped"`: no axis types were recorded.
- `"replicated"`: it is whole along a dimension that the mesh does not divide.
- `"memory kind"`: it lands in another memory kind.
- `"cast"`: it comes back in another dtype.
- `"renamed"`: it has another path in the checkpoint.
- `"another device"`: the device that it was on is not there, or is not one device any more.
- `"no sharding"`: nothing was recorded of where it was.
- `"fallback"`: the caller's fallback sharding takes it, since its recorded mesh does not fit.
- `"key data"`: PRNG keys come back as their data.
- `"typed keys"`: PRNG keys that the target describes by their data come back as keys.
"""
CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing about a leaf that is not as it was recorded.

    Attributes:
        kind: Which.
        text: What exactly, a clause.
    """

    kind: ChangeKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happens to one leaf.

    Attributes:
        path: Its path in the result.
        source: Its path in the checkpoint; None where the checkpoint lacks it.
        recorded: What was saved; None where the checkpoint lacks it.
        placement: Where it lands.
        rule: Which line of the order decided.
        shape: Shape of what comes back; of PRNG keys that of the array of keys.
        dtype: Name of the dtype that it is cast to; None where it keeps the saved one.
        changes: What differs from what was recorded.
    """

    path: LeafPath
    source: LeafPath | None
    recorded: LeafRecord | None
    placement: Placement
    rule: Rule
    shape: tuple[int, ...] = ()
    dtype: str | None = None
    changes: tuple[Change, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The text of each change."""
        return tuple(change.text for change in self.changes)

    @property
    def is_read(self) -> bool:
        """Whether it is read from the checkpoint."""
        return not isinstance(self.placement, Kept | NotPlaced)

    @property
    def bytes_read(self) -> int:
        """Bytes of one whole copy as it was saved; 0 where nothing is read, and of text."""
        return self.recorded.nbytes if self.recorded is not None and self.is_read else 0

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy as it comes back; 0 of text, and where nothing is read."""
        if self.recorded is None or not self.is_read:
            return 0
        dtype = self.dtype or self.recorded.dtype
        shape = self.shape
        if isinstance(self.recorded, ArrayRecord) and self.recorded.prng is not None:
            shape = (*shape, *self.recorded.prng.key_shape)
        return math.prod(shape) * dtype_itemsize(dtype) if dtype else 0

    @property
    def shards(self) -> int:
        """How many parts it is split into; 1 where it is whole."""
        match self.placement:
            case OnMesh(mesh=planned, spec=spec):
                return _shards(planned.mesh, spec)
            case AsTarget(sharding=NamedShardingRecord() as sharding):
                return _shards(sharding.mesh, sharding.spec)
            case AsFallback(sharding=NamedShardingRecord() as sharding):
                return _shards(sharding.mesh, sharding.spec)
            case _:
                return 1

    @property
    def bytes_per_device(self) -> int | None:
        """Bytes on each device that it is on: 0 on the host, None where the sharding has no record."""
        match self.placement:
            case AsTarget(sharding=None) | AsFallback(sharding=None):
                return None
            case OnHost() | Kept() | NotPlaced():
                return 0
            case _:
                return self.nbytes // self.shards


def _shards(mesh: MeshRecord, spec: SpecRecord) -> int:
    sizes = mesh.shape
    return math.prod(sizes[axis] for axis in spec.partitioned_axes())
