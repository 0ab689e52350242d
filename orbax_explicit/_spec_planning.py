"""Whether a spec fits an array and a mesh, and what becomes of it where the mesh does not divide a dimension.

What JAX would refuse to place is refused in the plan, in words of ours. Which mesh and which spec it is has been decided
before, in `_planning` and `_mesh_planning`.
"""

from __future__ import annotations

import dataclasses

from orbax_explicit import _refusals
from orbax_explicit._mesh_planning import Refused
from orbax_explicit._outcomes import Change
from orbax_explicit._records import (
    UNCONSTRAINED,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    SpecRecord,
    partition_axes,
)


def check_spec(shape: tuple[int, ...], mesh: MeshRecord, spec: SpecRecord, *, asked: bool) -> None:
    """Refuses what JAX would not place: a spec that does not fit the rank, or the axis types of a mesh that is asked for."""
    types = dict(zip(mesh.axis_names, mesh.axis_types or (), strict=True))
    if asked and "manual" in types.values():
        raise Refused(_refusals.axes_are_manual(mesh))
    if spec.unreduced:
        raise Refused(_refusals.spec_is_unreduced(spec))
    if any(types[axis] != "explicit" for axis in spec.reduced):
        raise Refused(_refusals.reduced_axes_are_not_explicit(spec, mesh))
    if any(p is UNCONSTRAINED for p in spec.partitions) and "auto" not in types.values():
        raise Refused(_refusals.open_dimension_needs_auto(spec, mesh))
    if len(spec.partitions) > len(shape):
        raise Refused(_refusals.spec_is_too_long(spec, shape))


def whole_where_indivisible(
    shape: tuple[int, ...], mesh: MeshRecord, spec: SpecRecord, *, by_target: bool, replicate: bool
) -> tuple[SpecRecord, tuple[Change, ...]]:
    """The spec, with the dimensions that the mesh does not divide whole; and what to say about these.

    Raises:
        Refused: There is one, and it is not to be whole.
    """
    sharding = NamedShardingRecord(mesh=mesh, spec=spec)
    partitions: list[Partition] = list(spec.partitions)
    changes = []
    problems = []
    for dimension, partition in enumerate(spec.partitions):
        shards = sharding.shards_along(dimension)
        if shape[dimension] % shards:
            if not replicate:
                axes = partition_axes(partition)
                problems.append(_refusals.dimension_is_indivisible(shape[dimension], axes, mesh, by_target=by_target))
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in partition_axes(partition))
            text = f"whole along dimension {dimension} of {shape}, which {sizes} does not divide"
            changes.append(Change(kind="replicated", text=text))
            partitions[dimension] = None
    if problems:
        raise Refused(*problems)
    return dataclasses.replace(spec, partitions=tuple(partitions)) if changes else spec, tuple(changes)
