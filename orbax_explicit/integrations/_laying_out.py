"""Specs that fit an array and a mesh, and arrays laid out by them, whatever the types of the axes."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_explicit._policy import Indivisible
from orbax_explicit._records import partition_axes

AnyMesh: TypeAlias = Mesh | AbstractMesh


class Unfit(Exception):
    """Something cannot be laid out as it was decided."""


def fitting(name: str, shape: tuple[int, ...], spec: P, mesh: AnyMesh, indivisible: Indivisible) -> P:
    """The spec, with the dimensions that the axes do not divide whole.

    Raises:
        Unfit: There are some and they are not to be whole, or the spec is not for this shape and mesh.
    """
    sizes = dict(mesh.shape)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    what = f"{name} {shape}"
    if P.UNCONSTRAINED in spec.partitions or spec.unreduced or spec.reduced:
        raise Unfit(f"{what}: {spec} says more than where it lies; name the axes that split each dimension")
    if len(spec) > len(shape):
        raise Unfit(f"{what}: {spec} is for {len(spec)} dimensions; of a stack of layers, give it for one layer")
    named = [axis for partition in spec.partitions for axis in partition_axes(partition)]
    if twice := sorted({axis for axis in named if named.count(axis) > 1}):
        raise Unfit(f"{what}: {spec} names {twice} more than once")
    partitions = []
    for length, partition in zip(shape, spec, strict=False):
        axes = partition_axes(partition)
        if absent := [axis for axis in axes if axis not in sizes]:
            raise Unfit(f"{what}: {spec} names {absent}, and the mesh has the axes {sizes}")
        if len({kinds[axis] for axis in axes}) > 1:
            raise Unfit(
                f"{what}: {spec} splits one dimension over {axes}, of which some are explicit and some are auto"
            )
        whole = bool(length % math.prod(sizes[axis] for axis in axes))
        if whole and indivisible == "error":
            raise Unfit(
                f"{what}: {spec} splits {length} over {axes}, of {[sizes[axis] for axis in axes]} devices, which does not "
                'divide it; decide otherwise for it, or pass indivisible="replicate"'
            )
        partitions.append(None if whole else partition)
    return P(*partitions)


def axes_of(mesh: AnyMesh, kind: AxisType) -> tuple[str, ...]:
    """The axes of this type."""
    return tuple(axis for axis, each in zip(mesh.axis_names, mesh.axis_types, strict=True) if each == kind)


def only(spec: P, axes: Collection[str]) -> P:
    """The spec as far as it names these axes."""
    kept = (tuple(axis for axis in partition_axes(partition) if axis in axes) for partition in spec)
    return P(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in kept))


def behind(count: int, spec: P) -> P:
    """The spec for an array with so many whole dimensions more in front: those of a stack of layers."""
    return P(*(None,) * count, *spec)


def lay_out(value: jax.Array, mesh: AnyMesh, spec: P) -> jax.Array:
    """The array, laid out so: by its type on Explicit axes, by a constraint on Auto ones."""
    explicit, auto = axes_of(mesh, AxisType.Explicit), axes_of(mesh, AxisType.Auto)

    def typed_and_constrained(value: jax.Array) -> jax.Array:
        if explicit:
            value = jax.sharding.reshard(value, only(spec, explicit))
        if auto:
            value = jax.lax.with_sharding_constraint(value, NamedSharding(mesh, only(spec, auto)))
        return value

    # Within `jit`, for outside of it a constraint on the one kind of axes undoes what is split over the other.
    result: jax.Array = jax.jit(typed_and_constrained)(value) if explicit and auto else typed_and_constrained(value)
    return result
