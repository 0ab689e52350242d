"""How a recorded mesh is made to fit other devices: sizes, and which devices.

The rule, for one mesh. The mesh axes are taken one at a time, in the order of `RestorePolicy.resize`, else outermost
first, the others at their present size. If the others alone have more devices than there are, the axis becomes 1 and the
next one is taken. Else it gets the largest size that fits the devices and divides every array dimension that it splits,
and that is all. With several processes, each contributes equally many devices; where no size of one axis alone gives
that, the next axis is tried, and after the last one axes become 1 in the same order until another gives it.

An axis grows only where the mesh had every device, and only where it splits an array: one that splits none would but make
more copies.

(data=2, model=4) over all of 8 devices, with an array of 24 x 8 on P('data', 'model'), becomes

=======  ===============  ==========================================================
devices  sizes            why
=======  ===============  ==========================================================
1        data=1, model=1  model=4 alone is too many: data=1, and model gets what fits
3        data=1, model=2  model=3 fits and does not divide 8
4, 6, 7  data=1, model=4  data=1 fits beside model=4; of 6 devices two are idle
12       data=3, model=4  3 divides 24
16       data=4, model=4  4 divides 24
20       data=4, model=4  5 does not divide 24; four devices are idle
=======  ===============  ==========================================================

Meshes that were on the same devices stay on the same devices, or arrays that were used together could no longer be: if
their own sizes differ, all of them are fitted again to the smallest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from orbax_explicit._records import (
    ArrayRecord,
    Inventory,
    MeshRecord,
    NamedShardingRecord,
    partition_axes,
)


@dataclass(frozen=True, slots=True)
class Split:
    """An array dimension that is split over mesh axes.

    Attributes:
        length: Length of the dimension.
        axes: The mesh axes.
    """

    length: int
    axes: tuple[str, ...]


def splits_by_mesh(arrays: Iterable[ArrayRecord]) -> dict[MeshRecord, frozenset[Split]]:
    """The distinct ways in which arrays use each recorded mesh."""
    # By identity first: hashing a mesh costs O(devices), and a manifest shares one sharding among its arrays.
    seen = {
        (id(array.sharding), array.shape): array for array in arrays if isinstance(array.sharding, NamedShardingRecord)
    }
    by_identity: dict[int, tuple[MeshRecord, set[Split]]] = {}
    for array in seen.values():
        assert isinstance(array.sharding, NamedShardingRecord)
        _, splits = by_identity.setdefault(id(array.sharding.mesh), (array.sharding.mesh, set()))
        # A spec is as long as the shape, or shorter.
        for length, partition in zip(array.shape, array.sharding.spec.partitions, strict=False):
            if axes := partition_axes(partition):
                splits.add(Split(length, axes))
    by_mesh: dict[MeshRecord, frozenset[Split]] = {}
    for mesh, splits in by_identity.values():
        by_mesh[mesh] = by_mesh.get(mesh, frozenset()) | splits
    return by_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The devices that a mesh may have.

    Attributes:
        devices: How many at most.
        processes: How many processes contribute equally many of them.
    """

    devices: int
    processes: int

    @classmethod
    def of(cls, present: Inventory) -> Room:
        """All that each process has as many of."""
        owned = present.device_ids_by_process().values()
        return cls(devices=min(map(len, owned)) * len(owned), processes=len(owned))

    def fits(self, devices: int) -> bool:
        """Whether a mesh may have so many."""
        return devices <= self.devices and devices % self.processes == 0


def resized(
    mesh: MeshRecord, splits: Collection[Split], room: Room, *, resize: Sequence[str] = (), grows: bool
) -> tuple[int, ...] | None:
    """The sizes of a mesh's axes that fit, by the rule above; None where none do.

    Args:
        mesh: The recorded mesh.
        splits: How arrays use it.
        room: The devices that it may have.
        resize: The axes that may change size, most willing first; empty for all, outermost first.
        grows: Whether it may become larger than it was.
    """
    if not grows and room.fits(mesh.size):
        return mesh.axis_sizes
    sizes = mesh.shape
    axes = [name for name in resize if name in sizes] if resize else list(mesh.axis_names)

    def fit(axis: str, *, may_grow: bool) -> bool:
        """Gives an axis the largest size that fits, if one does."""
        others = math.prod(sizes.values()) // sizes[axis]
        most = room.devices // others
        if not may_grow or not any(axis in split.axes for split in splits):
            most = min(most, sizes[axis])
        step = _divisor(axis, sizes, splits)
        fitting = (size for size in range(most, 0, -1) if step % size == 0 and room.fits(size * others))
        sizes[axis] = next(fitting, sizes[axis])
        return room.fits(math.prod(sizes.values()))

    for axis in axes:
        if math.prod(sizes.values()) // sizes[axis] > room.devices:
            sizes[axis] = 1
        elif fit(axis, may_grow=grows):
            return tuple(sizes.values())
    for i, axis in enumerate(axes):
        sizes[axis] = 1
        # What was split over this axis is whole now: the others do not grow to make more copies of it.
        if any(fit(other, may_grow=False) for other in axes[i + 1 :]):
            return tuple(sizes.values())
    return tuple(sizes.values()) if room.fits(math.prod(sizes.values())) else None


def _divisor(axis: str, sizes: dict[str, int], splits: Iterable[Split]) -> int:
    """What the size of an axis must divide, for the dimensions that it splits to be divided; 0 where it is free."""
    step = 0
    for split in splits:
        if axis in split.axes:
            beside = math.prod(sizes[other] for other in split.axes if other != axis)
            # A dimension that the others alone do not divide was not split over this mesh by JAX.
            step = math.gcd(step, split.length // beside if split.length % beside == 0 else 1)
    return step


def resized_together(
    meshes: Sequence[tuple[MeshRecord, Collection[Split], bool]], room: Room, *, resize: Sequence[str] = ()
) -> list[tuple[int, ...] | None]:
    """The sizes of meshes that were on the same devices, so that they have equally many again.

    Args:
        meshes: Each mesh, how arrays use it, and whether it may grow.
        room: The devices that they may have.
        resize: As for `resized`.

    Returns:
        For each mesh its sizes; None for one that fits in no way.
    """
    while True:
        found = [resized(mesh, splits, room, resize=resize, grows=grows) for mesh, splits, grows in meshes]
        counts = {math.prod(sizes) for sizes in found if sizes is not None}
        if len(counts) <= 1:
            return found
        room = Room(devices=min(counts), processes=room.processes)


def first_devices(present: Inventory, count: int) -> tuple[int, ...] | None:
    """The first devices of each process, equally many of each; None where that cannot be.

    Args:
        present: The devices that are here now.
        count: How many.

    Returns:
        Their ids, in the order of `jax.devices()`.
    """
    if count == present.device_count:
        return present.device_ids
    owned = present.device_ids_by_process()
    share, rest = divmod(count, len(owned))
    if rest or share > min(map(len, owned.values())):
        return None
    chosen = {device_id for ids in owned.values() for device_id in ids[:share]}
    return tuple(device_id for device_id in present.device_ids if device_id in chosen)


def is_shared_equally(device_ids: Iterable[int], present: Inventory) -> bool:
    """Whether every process contributes equally many of these devices."""
    chosen = set(device_ids)
    return len({sum(i in chosen for i in ids) for ids in present.device_ids_by_process().values()}) == 1


def is_in_every_process(device_ids: Iterable[int], present: Inventory) -> bool:
    """Whether every process contributes some of these devices. One that has none could not take part in a restore."""
    chosen = set(device_ids)
    return all(any(i in chosen for i in ids) for ids in present.device_ids_by_process().values())


def over_processes(
    mesh: MeshRecord, saved: Inventory | None, sizes: Sequence[int], device_ids: Sequence[int], present: Inventory
) -> tuple[int, ...] | None:
    """Devices in an order in which those axes run over processes that did so when the mesh was recorded.

    `jax.make_mesh` has the outermost axes run over processes. A hybrid mesh may have had others do so, to keep the
    traffic of an axis within a machine.

    Args:
        mesh: The recorded mesh.
        saved: The devices of the run that recorded it.
        sizes: The sizes that its axes have now.
        device_ids: The devices that it has now.
        present: The devices that are here now.

    Returns:
        The ids in row-major order of the mesh; None where the order of `jax.make_mesh` does the same.
    """
    if present.process_count == 1 or saved is None or saved.process_count == 1 or mesh.device_ids is None:
        return None
    outer = _axes_over_processes(mesh, saved)
    order = [*outer, *(i for i in range(len(sizes)) if i not in outer)]
    if not outer or order == sorted(order):
        return None
    owner = dict(zip(present.device_ids, present.process_indices, strict=True))
    by_process = sorted(device_ids, key=lambda device_id: owner[device_id])
    strides = [0] * len(sizes)
    stride = 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= sizes[axis]
    positions = itertools.product(*(range(size) for size in sizes))
    return tuple(by_process[sum(map(int.__mul__, at, strides))] for at in positions)


def _axes_over_processes(mesh: MeshRecord, saved: Inventory) -> list[int]:
    """Positions of the mesh axes along which devices belong to different processes."""
    assert mesh.device_ids is not None
    owner = dict(zip(saved.device_ids, saved.process_indices, strict=True))
    if not all(device_id in owner for device_id in mesh.device_ids):
        return []
    owners = [owner[device_id] for device_id in mesh.device_ids]
    axes = []
    stride = len(owners)
    for axis, size in enumerate(mesh.axis_sizes):
        block, stride = stride, stride // size
        # Along an axis the neighbour is `stride` further on, within the same block of the axes further out.
        if any(owners[i] != owners[i + stride] for i in range(len(owners)) if i % block + stride < block):
            axes.append(axis)
    return axes
