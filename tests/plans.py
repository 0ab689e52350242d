"""Records of runs that could have been, and their plans: by hand, and by Hypothesis.

The recorded run has 8 CPU devices; `w` is an 8x8 float32 on `P('d', 'm')` of a mesh (d=2, m=4), both axes explicit, unless
said otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from trees import path

from orbax_explicit import RestorePlan, RestorePolicy
from orbax_explicit._errors import Problem
from orbax_explicit._outcomes import (
    AsFallback,
    MeshSource,
    NotPlaced,
    Outcome,
    PlannedMesh,
)
from orbax_explicit._planning import TargetRecord, plan_from_records
from orbax_explicit._records import (
    AXIS_TYPES,
    UNCONSTRAINED,
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    LeafPath,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    PrngRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    path_text,
)
from orbax_explicit._topology import first_devices, is_in_every_process
from orbax_explicit.testing import fake_inventory

HERE = fake_inventory(8)


def mesh_of(
    sizes: Mapping[str, int] | None = None,
    types: str | Sequence[str] | None = "explicit",
    ids: Sequence[int] | None = None,
    platform: str | None = "cpu",
) -> MeshRecord:
    """A concrete mesh, (d=2, m=4) on the first devices unless said otherwise; one type stands for every axis."""
    sizes = {"d": 2, "m": 4} if sizes is None else sizes
    return MeshRecord(
        axis_names=tuple(sizes),
        axis_sizes=tuple(sizes.values()),
        axis_types=(types,) * len(sizes) if isinstance(types, str) else types if types is None else tuple(types),
        device_ids=tuple(range(math.prod(sizes.values())) if ids is None else ids),
        platform=platform,
    )


MESH = mesh_of()


def abstract(mesh: MeshRecord) -> MeshRecord:
    """The same axes on no devices."""
    return dataclasses.replace(mesh, device_ids=None, platform=None)


def on(mesh: MeshRecord, *partitions: Any, kind: str | None = "device", **spec: Any) -> NamedShardingRecord:
    """A sharding on a mesh."""
    return NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions, **spec), memory_kind=kind)


def array(sharding: ShardingRecord | None, shape: tuple[int, ...] = (8, 8), **fields: Any) -> ArrayRecord:
    """A float32 array."""
    return ArrayRecord(shape=shape, dtype=fields.pop("dtype", "float32"), sharding=sharding, **fields)


def manifest_of(leaves: Mapping[str, LeafRecord], inventory: Inventory | None = HERE, **fields: Any) -> Manifest:
    """The record of a dict."""
    keys = tuple(Key("dict", name) for name in leaves)
    return Manifest(
        tree=ContainerRecord(kind="dict", keys=keys, children=tuple(leaves.values())), inventory=inventory, **fields
    )


SAVED = manifest_of({"w": array(on(MESH, "d", "m"))})


def plan_of(
    manifest: Manifest = SAVED,
    targets: Mapping[str, TargetRecord] | None = None,
    present: Inventory = HERE,
    policy: RestorePolicy | None = None,
    **options: Any,
) -> RestorePlan:
    """A plan; leaves of the target are named by their key."""
    by_path = None if targets is None else {path(name): target for name, target in targets.items()}
    return plan_from_records(manifest, by_path, present, policy, **options)


def only(plan: RestorePlan) -> Outcome:
    """The one outcome of a plan that refuses nothing."""
    assert plan.refused == ()
    (outcome,) = plan.outcomes
    return outcome


def placed(plan: RestorePlan) -> list[Outcome]:
    """The outcomes of a plan that are not refused."""
    return [outcome for outcome in plan.outcomes if not isinstance(outcome.placement, NotPlaced)]


def refused(plan: RestorePlan) -> Problem:
    """The one problem of a plan that places nothing."""
    assert placed(plan) == []
    (problem,) = plan.refused
    return problem


def planned(
    mesh: MeshRecord, source: MeshSource, recorded: MeshRecord | None = None, present: Inventory = HERE
) -> PlannedMesh:
    """A planned mesh; one that `jax.make_mesh` arranges is on the first devices of each process."""
    devices = first_devices(present, mesh.size) or ()
    return PlannedMesh(mesh=mesh, source=source, recorded=recorded, device_ids=devices)


def wanted(sharding: ShardingRecord | None = None, **fields: Any) -> TargetRecord:
    """A target leaf that agrees with `w` in shape and dtype."""
    return TargetRecord(**{"shape": (8, 8), "dtype": "float32", "sharding": sharding, **fields})


KEYS = array(
    SingleDeviceRecord(device_id=0), (8,), dtype="uint32", prng=PrngRecord(impl="threefry2x32", key_shape=(2,))
)


# Runs that could have been. `strategies` has any record that is valid.

AXES = ("d", "m", "x", "y")


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """Up to eight devices of one or two processes, with other ids and kinds of memory."""
    kinds = draw(st.sets(st.sampled_from(["device", "pinned_host", "unpinned_host"]), min_size=1))
    return fake_inventory(
        draw(st.sampled_from([1, 2, 3, 4, 8])),
        processes=draw(st.sampled_from([1, 2])),
        platform=draw(st.sampled_from(["cpu", "tpu"])),
        first_id=draw(st.sampled_from([0, 1, 100])),
        memory_kinds=tuple(kinds),
        default_memory_kind=draw(st.sampled_from(sorted(kinds))),
    )


@st.composite
def meshes(draw: st.DrawFn, inventory: Inventory, typed: bool = False) -> MeshRecord:
    """A mesh over some devices of an inventory, in any order."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        sizes.append(draw(st.integers(1, inventory.device_count // math.prod(sizes))))
    ids = draw(st.permutations(inventory.device_ids))[: math.prod(sizes)]
    types = draw(
        st.lists(st.sampled_from([*AXIS_TYPES[:2] * 4, *AXIS_TYPES]), min_size=len(sizes), max_size=len(sizes))
    )
    return MeshRecord(
        axis_names=tuple(draw(st.permutations(AXES))[: len(sizes)]),
        axis_sizes=tuple(sizes),
        axis_types=tuple(types) if typed or draw(st.booleans()) else None,
        device_ids=tuple(ids),
        platform=inventory.platform,
    )


@st.composite
def specs(draw: st.DrawFn, mesh: MeshRecord) -> SpecRecord:
    """A spec that JAX could have had: each axis at most once, reduced ones explicit, no open dimension without auto."""
    free = list(draw(st.permutations(mesh.axis_names)))
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types or (), strict=False) if kind == "explicit"}
    partitions: list[Any] = []
    for _ in range(draw(st.integers(0, 3))):
        axes = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
        alone = [None, UNCONSTRAINED] if "auto" in (mesh.axis_types or ()) else [None]
        partitions.append(draw(st.sampled_from(alone)) if not axes else axes[0] if len(axes) == 1 else axes)
    reduced = sorted(explicit.intersection(free)) if draw(st.booleans()) else ()
    return SpecRecord(partitions=tuple(partitions), reduced=tuple(reduced))


@st.composite
def named_arrays(draw: st.DrawFn, inventory: Inventory, mesh: MeshRecord) -> ArrayRecord:
    """An array on a mesh that divides it."""
    kind = draw(st.sampled_from([None, *inventory.memory_kinds]))
    sharding = NamedShardingRecord(mesh=mesh, spec=draw(specs(mesh)), memory_kind=kind)
    rank = len(sharding.spec.partitions) + draw(st.integers(0, 1))
    shape = tuple(sharding.shards_along(i) * draw(st.integers(0, 3)) for i in range(rank))
    return ArrayRecord(shape=shape, dtype=draw(st.sampled_from(["float32", "int8", "float64"])), sharding=sharding)


@st.composite
def manifests(draw: st.DrawFn, recorded: bool = False) -> Manifest:
    """A dict of leaves of every kind; `recorded` for one of which everything is known."""
    inventory = draw(inventories())
    on_meshes = draw(st.lists(meshes(inventory, typed=recorded), min_size=1, max_size=3))
    if recorded and not all(is_in_every_process(mesh.device_ids or (), inventory) for mesh in on_meshes):
        # An array that some process has no part of cannot be saved.
        inventory = dataclasses.replace(inventory, process_indices=(0,) * inventory.device_count)
    single = st.builds(
        SingleDeviceRecord,
        device_id=st.sampled_from(inventory.device_ids),
        platform=st.just(inventory.platform),
        memory_kind=st.sampled_from([None, *inventory.memory_kinds]),
    )
    on_a_mesh = st.sampled_from(on_meshes).flatmap(lambda mesh: named_arrays(inventory, mesh))
    kinds = [
        *[on_a_mesh] * 4,
        # An array that is committed to a device of one process of several cannot be saved.
        st.builds(
            array, single, st.just((2,)), committed=st.booleans() if inventory.process_count == 1 else st.just(False)
        ),
        st.sampled_from([ValueRecord(type="int", dtype="int64"), ValueRecord(type="str")]),
    ]
    if not recorded:
        kinds += [st.just(array(None)), st.just(KEYS)]
    leaves = draw(st.lists(st.one_of(kinds), max_size=8))
    return manifest_of(
        {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)},
        inventory if recorded or draw(st.booleans()) else None,
    )


@st.composite
def targets(draw: st.DrawFn, manifest: Manifest) -> dict[LeafPath, TargetRecord]:
    """Some leaves of a manifest and some that it lacks, as asked for in every way."""
    wanted_leaves = {}
    on_meshes = draw(st.lists(meshes(HERE, typed=True), min_size=1, max_size=2))
    for leaf_path, leaf in (*manifest.leaves.items(), (path("unknown"), array(None))):
        mesh = draw(st.sampled_from(on_meshes))
        sharding = draw(
            st.sampled_from(
                [
                    None,
                    None,
                    NamedShardingRecord(mesh=abstract(mesh), spec=SpecRecord()),
                    NamedShardingRecord(mesh=abstract(mesh), spec=SpecRecord(partitions=mesh.axis_names[:1])),
                    on(mesh),
                    SingleDeviceRecord(device_id=0),
                ]
            )
        )
        abstractly = isinstance(sharding, NamedShardingRecord) and sharding.mesh.device_ids is None
        target = TargetRecord(
            shape=draw(st.sampled_from([*[None, leaf.shape] * 3, (5,)])),
            dtype=draw(st.sampled_from([*[None, leaf.dtype] * 2, "float32", "float16", "int8"])) or None,
            sharding=sharding,
            concrete=not abstractly and (sharding is not None or draw(st.integers(0, 3)) == 0),
            committed=draw(st.sampled_from([*[None] * 4, True, False])),
            value_type=draw(st.sampled_from([*[None] * 6, "np.ndarray", "int"])),
            keepable=draw(st.booleans()),
        )
        odd = TargetRecord(odd=("cannot restore into a leaf of type set", "use arrays"))
        placeholder = TargetRecord(placeholder=True, keepable=True)
        if draw(st.integers(0, 4)):
            kinds = [*[target] * 6, TargetRecord(), TargetRecord(), odd, placeholder]
            wanted_leaves[leaf_path] = draw(st.sampled_from(kinds))
    return wanted_leaves


def renamings(draw: st.DrawFn, manifest: Manifest) -> dict[Any, Any]:
    """Names of leaves in the result -> in the checkpoint: some that are there, some that are not."""
    saved = [path_text(leaf) for leaf in manifest.leaves]
    names = st.sampled_from([*saved, "unknown", "new", "sub/new", "sub/other", "leaf_0/x"])
    renamed = st.dictionaries(names, st.sampled_from([*saved, *saved, "gone"]), min_size=1, max_size=3)
    return draw(renamed) if draw(st.sampled_from([True, False, False])) else {}


NEW_NAMES = {"d": ["d", "m", "z", None], "m": ["d", "m", "y", None], "x": ["x", None], "q": ["q"]}
RULES_BY_NAME = [
    ("leaf_[012]", SpecRecord(partitions=("d",))),
    ("leaf", SpecRecord(partitions=(None, "m"))),
    ("5|unknown", SpecRecord()),
]


@st.composite
def policies(draw: st.DrawFn, manifest: Manifest) -> RestorePolicy:
    """A policy; each field has the default as often as not, or more often where any other value refuses much."""

    def choice(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    some_axes = st.lists(st.sampled_from([*NEW_NAMES]), unique=True, max_size=2)
    axes = draw(some_axes) if draw(st.sampled_from([True, False, False])) else []
    renamed_axes: dict[str, str | None] = {}
    for axis in axes:
        new = draw(st.sampled_from(NEW_NAMES[axis]))
        if new is None or new not in renamed_axes.values():
            renamed_axes[axis] = new
    return RestorePolicy(
        topology=choice("adapt", "adapt", "exact"),
        resize=choice(*[()] * 4, ("d",), ("m", "d"), ("x", "y", "m")),
        axis_types=choice(*[None] * 4, "auto", "explicit", {"d": "explicit"}, {"m": "auto"}),
        rename_axes=renamed_axes,
        indivisible=choice("replicate", "error"),
        memory_kind=choice(*["recorded"] * 4, "device", "pinned_host"),
        missing=choice("error", "keep"),
        extra=choice("error", "ignore", "ignore"),
        cast=choice("same_kind", "never", "unsafe"),
        rename_leaves=renamings(draw, manifest),
        rules=RULES_BY_NAME[: draw(st.sampled_from([0, 0, 1, 2, 3]))],
        arrays=choice(*["jax"] * 6, "numpy"),
    )


@st.composite
def restores(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of `plan_from_records`: everything that a restore may depend on."""
    manifest = draw(manifests())
    present = draw(st.one_of(inventories(), st.just(manifest.inventory or HERE)))
    return {
        "manifest": manifest,
        "targets": draw(st.one_of(st.none(), targets(manifest))),
        "present": present,
        "policy": draw(st.one_of(st.none(), policies(manifest), policies(manifest))),
        "mesh": draw(st.one_of(st.none(), st.none(), meshes(present, typed=True))),
        "context": draw(st.one_of(st.none(), st.none(), meshes(present, typed=True))),
        "strict": draw(st.booleans()),
        "fallback": draw(
            st.sampled_from([*[None] * 4, AsFallback(), AsFallback(sharding=SingleDeviceRecord(device_id=0))])
        ),
        "x64": draw(st.sampled_from([True, True, False])),
    }
