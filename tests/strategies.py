"""Hypothesis strategies for records: any that are valid, common or not; and for parts of small arrays.

Mesh axes, ids, sizes and texts are kept few and small where their number is not the point, so that examples
share records and shrink well; the odd extreme (an id of 64 bits, a lone surrogate, a mesh without axes) is in
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from hypothesis import strategies as st

from orbax_explicit._boxes import Box, Shape
from orbax_explicit._records import (
    AXIS_TYPES,
    CONTAINER_KINDS,
    REDUCTION_KINDS,
    UNCONSTRAINED,
    VALUE_TYPES,
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    Scope,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    Tree,
    ValueRecord,
)

AXES = ("data", "model", "fsdp", "x", "y", "é")
DTYPES = ("float32", "bfloat16", "int8", "uint32", "float8_e4m3fn", "int4")
MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")
PLATFORMS = ("cpu", "gpu", "tpu")
SCOPES: tuple[Scope, ...] = get_args(Scope)


def integers() -> st.SearchStrategy[int]:
    """Integers that a file can hold."""
    return st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**64 - 1))


def sizes() -> st.SearchStrategy[int]:
    """Sizes of an array dimension."""
    return st.one_of(st.integers(0, 8), st.integers(0, 2**64 - 1))


def shapes(min_dims: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of at least `min_dims` dimensions."""
    return st.lists(sizes(), min_size=min_dims, max_size=min_dims + 3).map(tuple)


def texts() -> st.SearchStrategy[str]:
    """Any text, lone surrogates included."""
    return st.one_of(st.sampled_from(("kernel", "bias", "layers_0", "")), st.text(st.characters(), max_size=6))


def device_ids(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """`count` distinct device ids: a range, runs of one, or in any order."""
    ranges = st.integers(-4, 300).map(lambda start: tuple(range(start, start + count)))
    permuted = st.permutations(range(count)).map(tuple)
    gaps = st.integers(1, 2**20).map(lambda gap: tuple(i // 4 * gap * 4 + i % 4 for i in range(count)))
    anything = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=count, max_size=count, unique=True).map(tuple)
    return st.one_of(ranges, permuted, gaps, anything)


@st.composite
def meshes(draw: st.DrawFn, *, abstract: bool | None = None, typed: bool | None = None) -> MeshRecord:
    """Meshes of up to 64 devices; with or without devices and axis types as asked."""
    axis_names = tuple(draw(st.lists(st.sampled_from(AXES), max_size=4, unique=True)))
    if abstract if abstract is not None else draw(st.booleans()):
        axis_sizes = tuple(draw(st.integers(1, 2**40)) for _ in axis_names)
        ids = None
    else:
        axis_sizes = tuple(draw(st.sampled_from((1, 2, 3, 4))) for _ in axis_names)
        ids = draw(device_ids(math.prod(axis_sizes)))
    types = None
    if typed if typed is not None else draw(st.booleans()):
        types = tuple(draw(st.sampled_from(AXIS_TYPES)) for _ in axis_names)
    platform = draw(st.none() | st.sampled_from(PLATFORMS))
    return MeshRecord(axis_names=axis_names, axis_sizes=axis_sizes, axis_types=types, device_ids=ids, platform=platform)


@st.composite
def specs(draw: st.DrawFn, axis_names: Sequence[str] = AXES, *, reductions: bool = True) -> SpecRecord:
    """Specs over some of the mesh axes `axis_names`; with pending reductions unless `reductions` is false."""
    names = draw(st.permutations(axis_names))
    partitions: list[Partition] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("none", "axis", "axes", "unconstrained")))
        if kind == "axis" and names:
            partitions.append(names.pop())
        elif kind == "axes":
            partitions.append(tuple(names.pop() for _ in range(draw(st.integers(0, min(2, len(names)))))))
        else:
            partitions.append(UNCONSTRAINED if kind == "unconstrained" else None)
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    if reductions:
        split = draw(st.integers(0, len(names)))
        unreduced = tuple(sorted(names[: min(split, 2)]))
        reduced = tuple(sorted(names[split : split + draw(st.integers(0, 2))]))
    return SpecRecord(
        partitions=tuple(partitions),
        unreduced=unreduced,
        reduced=reduced,
        unreduced_kind=draw(st.sampled_from(REDUCTION_KINDS)) if unreduced else None,
    )


@st.composite
def shardings(
    draw: st.DrawFn, over: st.SearchStrategy[MeshRecord] | None = None, *, reductions: bool = True
) -> ShardingRecord:
    """Shardings on a mesh that `over` gives (any), or on a single device."""
    memory_kind = draw(st.none() | st.sampled_from(MEMORY_KINDS))
    if draw(st.integers(0, 3)) == 0:
        platform = draw(st.none() | st.sampled_from(PLATFORMS))
        return SingleDeviceRecord(device_id=draw(integers()), platform=platform, memory_kind=memory_kind)
    mesh = draw(meshes() if over is None else over)
    spec = draw(specs(mesh.axis_names, reductions=reductions))
    return NamedShardingRecord(mesh=mesh, spec=spec, memory_kind=memory_kind)


@st.composite
def arrays(draw: st.DrawFn, laid_out: st.SearchStrategy[ShardingRecord] | None = None) -> ArrayRecord:
    """Arrays, with and without a sharding, which `laid_out` gives (any)."""
    sharding = draw(st.none() | (shardings() if laid_out is None else laid_out))
    several = isinstance(sharding, NamedShardingRecord) and sharding.mesh.size > 1
    prng = None
    if draw(st.integers(0, 4)) == 0:
        prng = PrngRecord(impl=draw(st.sampled_from(("threefry2x32", "rbg"))), key_shape=draw(shapes()))
    return ArrayRecord(
        shape=draw(shapes(len(sharding.spec.partitions) if isinstance(sharding, NamedShardingRecord) else 0)),
        dtype=draw(st.sampled_from(DTYPES)),
        sharding=sharding,
        committed=several or draw(st.booleans()),
        prng=prng,
    )


@st.composite
def values(draw: st.DrawFn) -> ValueRecord:
    """Values on the host."""
    kind = draw(st.sampled_from(VALUE_TYPES))
    shape = draw(shapes()) if kind in ("np.ndarray", "bytes") else ()
    dtype = "" if kind == "str" else draw(st.sampled_from(("", *DTYPES)))
    return ValueRecord(type=kind, shape=shape, dtype=dtype)


def keys() -> st.SearchStrategy[Key]:
    """Every kind of key that a path can have."""
    return st.one_of(
        st.builds(Key, st.just("dict"), texts()),
        st.builds(Key, st.just("dict"), integers()),
        st.builds(Key, st.just("index"), integers()),
        st.builds(Key, st.just("attr"), texts()),
    )


@st.composite
def _containers(draw: st.DrawFn, children: st.SearchStrategy[Tree]) -> ContainerRecord:
    kind = draw(st.sampled_from(CONTAINER_KINDS))
    below = () if kind == "none" else tuple(draw(st.lists(children, max_size=4)))
    if kind in ("list", "tuple"):
        names = tuple(Key("index", i) for i in range(len(below)))
    else:
        of_kind = {"dict": lambda key: key.kind == "dict", "namedtuple": lambda key: key.kind == "attr"}
        some = keys().filter(of_kind.get(kind, lambda _: True))
        names = tuple(draw(st.lists(some, min_size=len(below), max_size=len(below), unique=True)))
    named = kind in ("namedtuple", "node")
    return ContainerRecord(
        kind=kind,
        keys=names,
        children=below,
        module=draw(st.sampled_from(("optax", "", "state"))) if named else "",
        qualname=draw(st.sampled_from(("ScaleByAdamState", "Outer.Inner"))) if named else "",
    )


def trees(leaves: st.SearchStrategy[LeafRecord] | None = None) -> st.SearchStrategy[Tree]:
    """Trees of every kind of container over leaves that `leaves` gives (any)."""
    return st.recursive(arrays() | values() if leaves is None else leaves, _containers, max_leaves=12)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """Inventories of up to 24 devices."""
    count = draw(st.integers(1, 24))
    memory_kinds = draw(st.lists(st.sampled_from(MEMORY_KINDS), min_size=1, unique=True))
    per_process = draw(st.integers(1, 8))
    in_order = tuple(i // per_process for i in range(count))
    return Inventory(
        platform=draw(st.sampled_from(PLATFORMS)),
        device_kind=draw(st.sampled_from(("cpu", "NVIDIA H200", "TPU v5p"))),
        device_ids=draw(device_ids(count)),
        process_indices=draw(st.just(in_order) | st.permutations(in_order).map(tuple)),
        memory_kinds=tuple(sorted(memory_kinds)),
        default_memory_kind=draw(st.sampled_from(memory_kinds)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests whose arrays share a few meshes and shardings, as those of a real tree do."""
    few_meshes = draw(st.lists(meshes(), min_size=1, max_size=3))
    few_shardings = draw(st.lists(shardings(st.sampled_from(few_meshes)), min_size=1, max_size=4))
    leaves = arrays(st.sampled_from(few_shardings)) | values()
    return Manifest(
        tree=draw(trees(leaves)),
        scope=draw(st.sampled_from(SCOPES)),
        inventory=draw(st.none() | inventories()),
        writer=tuple(draw(st.lists(st.tuples(texts(), texts()), max_size=3))),
    )


# Parts of arrays, few enough to look at each element.


def array_shapes(min_dims: int = 0) -> st.SearchStrategy[Shape]:
    """Shapes of arrays of at most a few hundred elements."""
    return st.lists(st.integers(0, 7), min_size=min_dims, max_size=3).map(tuple)


def chunk_shapes(dims: int) -> st.SearchStrategy[Shape]:
    """Shapes of chunks."""
    return st.lists(st.integers(1, 9), min_size=dims, max_size=dims).map(tuple)


def boxes(shape: Shape) -> st.SearchStrategy[Box]:
    """Boxes in an array, empty ones among them."""
    spans = (st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple) for n in shape)
    return st.tuples(*spans)
