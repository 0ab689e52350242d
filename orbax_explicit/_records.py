"""What is known about a saved tree, as frozen values.

These are facts: how each mesh, sharding, array and container was when the tree was saved. They know
neither JAX nor a device, so that they can be read, compared and planned with anywhere. `_capture` makes
them from JAX, `_wire` turns them into bytes and back, `_planning` decides with them.

A record refers to another by value (`ArrayRecord.sharding.mesh`); tables and indices exist only on the
wire. Every record checks its own invariants when it is made and raises one `RecordError` that lists all
that are broken.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from orbax_explicit._errors import RecordError

AxisType: TypeAlias = Literal["explicit", "auto", "manual"]
AXIS_TYPES: tuple[AxisType, ...] = get_args(AxisType)

ReductionKind: TypeAlias = Literal["sum", "max", "min"]
REDUCTION_KINDS: tuple[ReductionKind, ...] = get_args(ReductionKind)


class Unconstrained(enum.Enum):
    """The partition of a dimension that the compiler may choose: `PartitionSpec.UNCONSTRAINED`."""

    UNCONSTRAINED = "unconstrained"

    def __repr__(self) -> str:
        return "UNCONSTRAINED"


UNCONSTRAINED = Unconstrained.UNCONSTRAINED

Partition: TypeAlias = str | tuple[str, ...] | None | Unconstrained
"""How one array dimension is split: over a mesh axis, several, none, or as the compiler likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRecord:
    """A mesh: named and typed axes and, where it was concrete, the devices in it.

    Attributes:
        axis_names: Names of the mesh axes, outermost first.
        axis_sizes: Devices along each mesh axis.
        axis_types: Type of each mesh axis; None where none was recorded (Orbax before 0.11.26).
        device_ids: `jax.Device.id` of each device in row-major order; None for an abstract mesh.
        platform: `jax.Device.platform` of the devices; None where it is not known.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_types: tuple[AxisType, ...] | None
    device_ids: tuple[int, ...] | None = None
    platform: str | None = None

    def __post_init__(self) -> None:
        wrong = []
        if len(set(self.axis_names)) != len(self.axis_names):
            wrong.append(f"mesh axis names repeat: {self.axis_names}")
        if len(self.axis_sizes) != len(self.axis_names):
            wrong.append(f"{len(self.axis_names)} mesh axis names but {len(self.axis_sizes)} sizes")
        if any(size < 1 for size in self.axis_sizes):
            wrong.append(f"mesh axis sizes must be at least 1, not {self.axis_sizes}")
        if self.axis_types is not None:
            if len(self.axis_types) != len(self.axis_names):
                wrong.append(f"{len(self.axis_names)} mesh axis names but {len(self.axis_types)} axis types")
            unknown = sorted({t for t in self.axis_types if t not in AXIS_TYPES})
            if unknown:
                wrong.append(f"unknown mesh axis types {unknown}; known are {list(AXIS_TYPES)}")
        if self.device_ids is not None:
            if len(self.device_ids) != math.prod(self.axis_sizes):
                wrong.append(f"a mesh of shape {self.axis_sizes} lists {len(self.device_ids)} devices")
            if len(set(self.device_ids)) != len(self.device_ids):
                wrong.append("a device appears twice in a mesh")
        _raise_if(wrong)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axis_sizes)

    @property
    def shape(self) -> dict[str, int]:
        """Devices along each mesh axis, by its name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def __str__(self) -> str:
        types = self.axis_types or ("untyped",) * len(self.axis_names)
        axes = zip(self.axis_names, self.axis_sizes, types, strict=True)
        return "(" + ", ".join(f"{name}={size} {kind}" for name, size, kind in axes) + ")"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRecord:
    """A `PartitionSpec`, verbatim: `P('d')` and `P('d', None)` are different specs.

    Attributes:
        partitions: One entry for each leading array dimension.
        unreduced: Mesh axes over which the value is a pending reduction, sorted.
        reduced: Mesh axes over which the value's cotangent is a pending reduction, sorted.
        unreduced_kind: The pending reduction; None where nothing is unreduced.
    """

    partitions: tuple[Partition, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    unreduced_kind: ReductionKind | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name, axes in (("unreduced", self.unreduced), ("reduced", self.reduced)):
            if list(axes) != sorted(set(axes)):
                wrong.append(f"{name} axes must be sorted and distinct, not {axes}")
        used = Counter((*self.partitioned_axes(), *self.unreduced, *self.reduced))
        repeated = sorted(axis for axis, times in used.items() if times > 1)
        if repeated:
            wrong.append(f"a spec uses mesh axes more than once: {repeated}")
        if self.unreduced_kind is not None and self.unreduced_kind not in REDUCTION_KINDS:
            wrong.append(f"unknown reduction {self.unreduced_kind!r}; known are {list(REDUCTION_KINDS)}")
        if (self.unreduced_kind is not None) != bool(self.unreduced):
            wrong.append("unreduced axes and their reduction must come together")
        _raise_if(wrong)

    def partitioned_axes(self) -> tuple[str, ...]:
        """Mesh axes that split some array dimension, in the order of the dimensions."""
        axes: list[str] = []
        for partition in self.partitions:
            axes.extend(partition_axes(partition))
        return tuple(axes)

    def axes(self) -> frozenset[str]:
        """Every mesh axis that the spec names."""
        return frozenset((*self.partitioned_axes(), *self.unreduced, *self.reduced))

    def __str__(self) -> str:
        parts = [repr(p) for p in self.partitions]
        if self.unreduced:
            parts.append(f"unreduced={{{', '.join(map(repr, self.unreduced))}}}")
            if self.unreduced_kind != "sum":
                parts.append(f"unreduced_kind={self.unreduced_kind}")
        if self.reduced:
            parts.append(f"reduced={{{', '.join(map(repr, self.reduced))}}}")
        return f"P({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShardingRecord:
    """A `NamedSharding`: a spec over a mesh.

    Attributes:
        mesh: The mesh, abstract or concrete.
        spec: How each array dimension is split over it.
        memory_kind: `NamedSharding.memory_kind`; None where it was left to the platform.
    """

    mesh: MeshRecord
    spec: SpecRecord
    memory_kind: str | None = None

    def __post_init__(self) -> None:
        missing = sorted(self.spec.axes() - set(self.mesh.axis_names))
        _raise_if([f"spec {self.spec} names axes {missing} that mesh {self.mesh} lacks"] if missing else [])

    def shards_along(self, dimension: int) -> int:
        """Number of shards that array dimension `dimension` is split into."""
        if dimension >= len(self.spec.partitions):
            return 1
        shape = self.mesh.shape
        return math.prod(shape[axis] for axis in partition_axes(self.spec.partitions[dimension]))

    def __str__(self) -> str:
        kind = f" in {self.memory_kind}" if self.memory_kind is not None else ""
        return f"{self.spec} on {self.mesh}{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceRecord:
    """A `SingleDeviceSharding`: the whole array on one device.

    Attributes:
        device_id: `jax.Device.id`.
        platform: `jax.Device.platform`; None where it is not known.
        memory_kind: `SingleDeviceSharding.memory_kind`; None where it was left to the platform.
    """

    device_id: int
    platform: str | None = None
    memory_kind: str | None = None

    def __str__(self) -> str:
        kind = f" in {self.memory_kind}" if self.memory_kind is not None else ""
        return f"{self.platform or 'device'}:{self.device_id}{kind}"


ShardingRecord: TypeAlias = NamedShardingRecord | SingleDeviceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PrngRecord:
    """What turns stored key data back into typed PRNG keys.

    Attributes:
        impl: Name of the implementation, as `jax.random.wrap_key_data(..., impl=)` takes it.
        key_shape: Shape of the data of one key, the trailing dimensions of what is stored.
    """

    impl: str
    key_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.key_shape, default=0) < 0:
            raise RecordError(f"the dimensions of key data must not be negative: {self.key_shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """A `jax.Array`.

    Attributes:
        shape: Shape of the array; for PRNG keys the shape of the array of keys.
        dtype: Name of the dtype of the stored elements; for PRNG keys that of the key data.
        sharding: Its layout; None where none was recorded or what was recorded cannot be read.
        committed: Whether the array was committed to its devices.
        prng: How to make typed keys of the stored data; None for an ordinary array.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: ShardingRecord | None = None
    committed: bool = True
    prng: PrngRecord | None = None

    def __post_init__(self) -> None:
        wrong = []
        if min(self.shape, default=0) < 0:
            wrong.append(f"array dimensions must not be negative: {self.shape}")
        if isinstance(self.sharding, NamedShardingRecord):
            if len(self.sharding.spec.partitions) > len(self.shape):
                wrong.append(f"spec {self.sharding.spec} has more entries than shape {self.shape} has dimensions")
            if not self.committed and self.sharding.mesh.size > 1:
                wrong.append("an array on several devices is always committed")
        _raise_if(wrong)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored elements: for PRNG keys, with the dimensions of the key data."""
        return self.shape + (self.prng.key_shape if self.prng else ())

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy of the array."""
        return math.prod(self.stored_shape) * dtype_itemsize(self.dtype)

    @property
    def dtype_text(self) -> str:
        """The dtype as a person reads it."""
        return f"key<{self.prng.impl}>" if self.prng else self.dtype

    def __str__(self) -> str:
        where = "no recorded sharding" if self.sharding is None else str(self.sharding)
        return f"{_typed(self.dtype_text, self.shape)}  {where}{'' if self.committed else ', uncommitted'}"


ValueType: TypeAlias = Literal["int", "float", "bool", "complex", "str", "bytes", "np.generic", "np.ndarray"]
VALUE_TYPES: tuple[ValueType, ...] = get_args(ValueType)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRecord:
    """A leaf that lives on the host: a Python scalar, text, bytes, or a NumPy value.

    Attributes:
        type: Which of them.
        shape: Shape of a NumPy array; `(length,)` of bytes; otherwise `()`.
        dtype: Name of the dtype of the stored elements; empty for `str`.
    """

    type: ValueType
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        wrong = []
        if self.type not in VALUE_TYPES:
            wrong.append(f"unknown type of value {self.type!r}; known are {list(VALUE_TYPES)}")
        if any(n < 0 for n in self.shape):
            wrong.append(f"array dimensions must not be negative: {self.shape}")
        if self.type == "str" and self.dtype:
            wrong.append(f"a str has no dtype, yet {self.dtype!r} is given")
        if self.shape and self.type not in ("np.ndarray", "bytes"):
            wrong.append(f"a value of type {self.type} has no shape, yet {self.shape} is given")
        _raise_if(wrong)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored elements."""
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the value; 0 for text, whose length is not recorded."""
        return math.prod(self.shape) * dtype_itemsize(self.dtype) if self.dtype else 0

    @property
    def dtype_text(self) -> str:
        """The dtype as a person reads it."""
        return self.dtype if self.type in ("np.generic", "np.ndarray") else self.type

    def __str__(self) -> str:
        return f"{_typed(self.dtype_text, self.shape)}  on the host"


LeafRecord: TypeAlias = ArrayRecord | ValueRecord


class Key(NamedTuple):
    """One step of a leaf path.

    Attributes:
        kind: `"dict"` for a dict key, `"index"` for a position, `"attr"` for an attribute or field name.
        name: The key: a str or int dict key, an int position, or a str name.
    """

    kind: Literal["dict", "index", "attr"]
    name: str | int


LeafPath: TypeAlias = tuple[Key, ...]


def path_text(path: LeafPath) -> str:
    """The path as a person reads it: `params/layer_0/kernel`; `.` for a tree that is one leaf."""
    return "/".join(str(key.name) for key in path) or "."


def path_names(path: LeafPath) -> tuple[str, ...]:
    """The keys as text, by which Orbax tells leaves apart."""
    return tuple(str(key.name) for key in path)


def storage_name(path: LeafPath) -> str:
    """The name under which Orbax stores the leaf: its keys joined by dots."""
    return ".".join(str(key.name) for key in path)


ContainerKind: TypeAlias = Literal["none", "dict", "list", "tuple", "namedtuple", "node"]
CONTAINER_KINDS: tuple[ContainerKind, ...] = get_args(ContainerKind)

_KEY_KINDS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "dict": frozenset({"dict"}),
    "list": frozenset({"index"}),
    "tuple": frozenset({"index"}),
    "namedtuple": frozenset({"attr"}),
    "node": frozenset({"dict", "index", "attr"}),
}
_NAMED_KINDS = frozenset({"namedtuple", "node"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRecord:
    """An inner node of the tree, with its children in the order in which JAX flattens them.

    Attributes:
        kind: `None`, dict, list, tuple, NamedTuple, or any other node that is registered with JAX.
        keys: The key of each child; for a NamedTuple these are its fields, in order.
        children: The child under each key.
        module: Module of the class of a NamedTuple or other node; empty for the rest.
        qualname: Qualified name of that class; empty for the rest.
    """

    kind: ContainerKind
    keys: tuple[Key, ...] = ()
    children: tuple[Tree, ...] = ()
    module: str = ""
    qualname: str = ""

    def __post_init__(self) -> None:
        wrong = []
        if self.kind not in CONTAINER_KINDS:
            wrong.append(f"unknown kind of container {self.kind!r}; known are {list(CONTAINER_KINDS)}")
        if len(self.keys) != len(self.children):
            wrong.append(f"a container has {len(self.keys)} keys but {len(self.children)} children")
        if len(set(self.keys)) != len(self.keys):
            wrong.append("a key appears twice in a container")
        if any(key.kind not in _KEY_KINDS.get(self.kind, ()) for key in self.keys):
            wrong.append(f"a {self.kind} has keys that it cannot have")
        if self.kind in ("list", "tuple") and any(key.name != i for i, key in enumerate(self.keys)):
            wrong.append(f"the positions in a {self.kind} are not 0, 1, 2, ...")
        if (self.kind in _NAMED_KINDS) != bool(self.qualname):
            wrong.append(f"a {self.kind} with class name {self.qualname!r}")
        elif self.module and not self.qualname:
            wrong.append(f"a {self.kind} with a module, {self.module!r}, but no class name")
        _raise_if(wrong)

    @property
    def class_text(self) -> str:
        """The class as `module.qualname`; empty where there is none."""
        return f"{self.module}.{self.qualname}" if self.qualname else ""


Tree: TypeAlias = ContainerRecord | LeafRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The devices of a run: those of the default backend, over all processes.

    Attributes:
        platform: `jax.Device.platform`.
        device_kind: `jax.Device.device_kind` of the first device.
        device_ids: `jax.Device.id` of each device, in the order of `jax.devices()`.
        process_indices: Index of the process that owns each device, in the same order.
        memory_kinds: Memory kinds that the devices offer, sorted.
        default_memory_kind: The kind that an array gets when none is named.
    """

    platform: str
    device_kind: str
    device_ids: tuple[int, ...]
    process_indices: tuple[int, ...]
    memory_kinds: tuple[str, ...]
    default_memory_kind: str

    def __post_init__(self) -> None:
        wrong = []
        if not self.device_ids:
            wrong.append("an inventory has no devices")
        if len(set(self.device_ids)) != len(self.device_ids):
            wrong.append("a device appears twice in an inventory")
        if len(self.process_indices) != len(self.device_ids):
            wrong.append(f"{len(self.device_ids)} devices but {len(self.process_indices)} process indices")
        if any(i < 0 for i in self.process_indices):
            wrong.append("process indices must not be negative")
        if list(self.memory_kinds) != sorted(set(self.memory_kinds)):
            wrong.append(f"memory kinds must be sorted and distinct, not {self.memory_kinds}")
        if self.default_memory_kind not in self.memory_kinds:
            wrong.append(f"default memory kind {self.default_memory_kind!r} is not one of {self.memory_kinds}")
        _raise_if(wrong)

    @property
    def device_count(self) -> int:
        """Number of devices over all processes."""
        return len(self.device_ids)

    @property
    def process_count(self) -> int:
        """Number of processes that own devices."""
        return len(set(self.process_indices))

    def device_ids_by_process(self) -> dict[int, list[int]]:
        """The device ids of each process, in the order of `jax.devices()`."""
        owned: dict[int, list[int]] = {}
        for device_id, process in zip(self.device_ids, self.process_indices, strict=True):
            owned.setdefault(process, []).append(device_id)
        return owned

    def __str__(self) -> str:
        return f"{plural(self.device_count, f'{self.platform} device')}, {plural(self.process_count, 'process')}"


_LEAVES_SHOWN = 50

Scope: TypeAlias = Literal["tree", "arrays"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that is recorded about one saved tree.

    Attributes:
        tree: Containers and leaves.
        scope: `"tree"` where the whole tree was recorded; `"arrays"` where a type handler saw its `jax.Array`s alone,
            so that `tree` has these and their paths, and no other leaf or container of it is certain.
        inventory: The devices of the run that saved it; None in a stock checkpoint.
        writer: Names and versions of the software that wrote it, as pairs.
        notes: What could not be read of a stock checkpoint's layout, each a sentence; never on the wire.
    """

    tree: Tree
    scope: Scope = "tree"
    inventory: Inventory | None = None
    writer: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise RecordError(f"unknown scope {self.scope!r}; known are {list(SCOPES)}")

    def __str__(self) -> str:
        """The manifest as a person reads it: totals, then a line for each leaf, of many the first ones."""
        saved_on = str(self.inventory) if self.inventory is not None else "devices that were not recorded"
        count = len(self.leaves)
        lines = [f"{count} {'leaf' if count == 1 else 'leaves'} of {self.nbytes:,} bytes, saved on {saved_on}"]
        lines.extend(f"  note  {note}" for note in self.notes)
        lines.extend(
            f"  {path_text(path)}  {leaf}" for path, leaf in itertools.islice(self.leaves.items(), _LEAVES_SHOWN)
        )
        if count > _LEAVES_SHOWN:
            lines.append(f"  and {count - _LEAVES_SHOWN} more")
        return "\n".join(lines)

    @functools.cached_property
    def leaves(self) -> Mapping[LeafPath, LeafRecord]:
        """Every leaf by its path, in the order in which JAX flattens the tree."""
        return dict(iterate_leaves(self.tree))

    @functools.cached_property
    def arrays(self) -> Mapping[LeafPath, ArrayRecord]:
        """Every `jax.Array` by its path."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, ArrayRecord)}

    @functools.cached_property
    def meshes(self) -> tuple[MeshRecord, ...]:
        """The distinct meshes, in order of first use."""
        # By identity first: hashing a mesh costs O(devices), and a capture shares one object among its arrays.
        shardings = {id(leaf.sharding): leaf.sharding for leaf in self.arrays.values()}.values()
        meshes = {id(s.mesh): s.mesh for s in shardings if isinstance(s, NamedShardingRecord)}.values()
        return tuple(dict.fromkeys(meshes))

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy of every leaf, without text."""
        return sum(leaf.nbytes for leaf in self.leaves.values())


def iterate_leaves(tree: Tree, prefix: LeafPath = ()) -> Iterator[tuple[LeafPath, LeafRecord]]:
    """Yields each leaf with its path, in the order in which JAX flattens the tree."""
    if not isinstance(tree, ContainerRecord):
        yield prefix, tree
        return
    for key, child in zip(tree.keys, tree.children, strict=True):
        yield from iterate_leaves(child, (*prefix, key))


def iterate_containers(tree: Tree, prefix: LeafPath = ()) -> Iterator[tuple[LeafPath, ContainerRecord]]:
    """Yields each container with its path, outer ones first."""
    if isinstance(tree, ContainerRecord):
        yield prefix, tree
        for key, child in zip(tree.keys, tree.children, strict=True):
            yield from iterate_containers(child, (*prefix, key))


def replace_leaves(tree: Tree, leaf: Callable[[LeafPath, LeafRecord], LeafRecord], path: LeafPath = ()) -> Tree:
    """The same containers, with `leaf(path, old)` at each leaf."""
    if not isinstance(tree, ContainerRecord):
        return leaf(path, tree)
    children = (replace_leaves(c, leaf, (*path, k)) for k, c in zip(tree.keys, tree.children, strict=True))
    return dataclasses.replace(tree, children=tuple(children))


def partition_axes(partition: Partition) -> tuple[str, ...]:
    """The mesh axes that one array dimension is split over."""
    if partition is None or partition is UNCONSTRAINED:
        return ()
    return (partition,) if isinstance(partition, str) else tuple(partition)


def _typed(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]" if shape else dtype


@functools.cache
def dtype_itemsize(dtype: str) -> int:
    """Bytes of one element in memory: of `"float8_e4m3fn"` 1, of `"int4"` 1, of `"complex64"` 8."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def plural(count: int, noun: str) -> str:
    """`1 device`, `2 devices`, `2 processes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'sh')) else 's'}"


def _raise_if(wrong: list[str]) -> None:
    if wrong:
        raise RecordError(*wrong)
