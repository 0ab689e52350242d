"""JAX -> records: asks JAX once about everything a save or a target says.

A sharding is recorded whole or refused by leaf name: `record_sharding` rebuilds what it recorded and compares,
so that a fact that JAX adds one day is refused rather than lost. All refusals of a tree come in one error.

Nothing here reads ambient state (the context mesh, the present devices); that is `_binding.read_present`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orbax_explicit import _compat
from orbax_explicit._containers import tree_of_paths
from orbax_explicit._errors import MeshMismatchError, Problem, RestoreRefusedError, SaveRefusedError
from orbax_explicit._records import (
    UNCONSTRAINED,
    ArrayRecord,
    AxisType,
    ContainerRecord,
    Inventory,
    Key,
    LeafPath,
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
    ValueType,
    path_text,
    storage_name,
)
from orbax_explicit._targets import TargetRecord
from orbax_explicit._wire_schema import INT_MAX, INT_MIN, MAX_TEXT_NBYTES

PyTree: TypeAlias = Any

MAX_DEPTH = 100
"""Containers within containers that a tree may have; the file format allows a little more."""

_NUMERIC_DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128", "float4_e2m1fn", "float8_e8m0fnu"),
    *("float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
)


def _is_known_to_tensorstore(dtype: str) -> bool:
    try:
        return bool(ts.dtype(dtype).name == dtype)
    except (ValueError, TypeError):
        return False


STORABLE_DTYPES = frozenset(filter(_is_known_to_tensorstore, _NUMERIC_DTYPES))
"""Names of the dtypes that NumPy and TensorStore's Zarr drivers hold without loss."""

_ODD_TILDE = re.compile("~(?![01])")

ALLOWED_LEAVES = (
    "jax.Array, numpy.ndarray, NumPy scalars, int, float, bool, complex, str, bytes, None and empty containers"
)


class Unrecordable(Exception):
    """Why a leaf cannot be recorded, as clauses of the error that will name it.

    Attributes:
        reason: What cannot be recorded.
        fix: What the caller can do.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTree:
    """A tree that is about to be saved.

    Attributes:
        manifest: Its record.
        values: Its leaves by path, in tree order.
    """

    manifest: Manifest
    values: Mapping[LeafPath, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTarget:
    """A tree to restore into.

    Attributes:
        records: What each leaf asks for, by its path.
        leaves: The leaves themselves, by path.
        treedef: The structure of the result.
    """

    records: Mapping[LeafPath, TargetRecord]
    leaves: Mapping[LeafPath, Any]
    treedef: jax.tree_util.PyTreeDef


# Trees.


def record_tree(
    tree: PyTree, save_dtypes: Mapping[LeafPath, Any] | None = None, *, in_directories: bool = False
) -> CapturedTree:
    """Records a tree that is about to be saved.

    Called by every process; each records the same.

    Args:
        tree: Any PyTree of the leaves that are allowed.
        save_dtypes: The dtype to store a leaf in, for leaves that are cast while they are saved.
        in_directories: Whether Orbax will store each array in a directory of its name, rather than in OCDBT.

    Returns:
        The manifest, and the leaves by path.

    Raises:
        SaveRefusedError: A leaf or a container could not come back as it is. Lists all of them.
    """
    walk = _Walk(save_dtypes or {})
    root = walk.record(tree, ())
    if not walk.refused:
        if not isinstance(root, ContainerRecord):
            walk.refuse((), Unrecordable("cannot save a tree that is a single leaf", "put it into a dict"))
        elif not root.children:
            walk.refuse((), Unrecordable("cannot save an empty tree", "save a tree with at least one leaf"))
    walk.refuse_shared_names()
    walk.refuse_text_that_orbax_cannot_address()
    if in_directories:
        walk.refuse_names_that_are_no_directories()
    walk.raise_if_refused()
    return CapturedTree(manifest=_make_manifest(root, "tree"), values=walk.values)


def record_arrays(
    arrays: Sequence[tuple[LeafPath, jax.Array]], save_dtypes: Mapping[LeafPath, Any] | None = None
) -> Manifest:
    """Records arrays that are about to be saved, of a tree that is not seen.

    Called by every process; each records the same.

    Args:
        arrays: Each array with its path.
        save_dtypes: The dtype to store an array in, for arrays that are cast while they are saved.

    Raises:
        SaveRefusedError: An array could not come back as it is. Lists all of them.
    """
    walk = _Walk(save_dtypes or {})
    leaves = {path: walk.record(array, path) for path, array in arrays}
    walk.refuse_shared_names()
    walk.raise_if_refused()
    return _make_manifest(tree_of_paths(leaves), "arrays")


def _make_manifest(tree: Tree, scope: Scope) -> Manifest:
    """The manifest of a recorded tree: with the devices and the software of this run."""
    return Manifest(tree=tree, scope=scope, inventory=record_inventory(jax.devices()), writer=_writer())


class _Walk:
    """One walk over a tree that is about to be saved, collecting every refusal."""

    def __init__(self, save_dtypes: Mapping[LeafPath, Any]) -> None:
        self.save_dtypes = save_dtypes
        self.values: dict[LeafPath, Any] = {}
        self.refused: dict[tuple[str, str], list[str]] = {}
        self.recorder = LeafRecorder()

    def record(self, node: PyTree, path: LeafPath) -> Tree:
        try:
            level = _one_level(node)
            if level is None:
                self.values[path] = node
                return self.recorder.record(node, self.save_dtypes.get(path))
            if len(path) >= MAX_DEPTH:
                raise Unrecordable(f"cannot save a tree deeper than {MAX_DEPTH} levels", "save a flatter tree")
        except Unrecordable as why:
            self.refuse(path, why)
            return ValueRecord(type="int")  # Only stands in until the error is raised.
        keys, children, container = level
        return container(keys, tuple(self.record(c, (*path, k)) for k, c in zip(keys, children, strict=True)))

    def refuse(self, path: LeafPath, why: Unrecordable) -> None:
        self.refused.setdefault((why.reason, why.fix), []).append(path_text(path))

    def refuse_shared_names(self) -> None:
        by_name: dict[str, list[LeafPath]] = {}
        for path in self.values:
            by_name.setdefault(storage_name(path), []).append(path)
        for name, paths in by_name.items():
            if len(paths) > 1:
                why = _shared_name(name)
                for path in paths:
                    self.refuse(path, why)

    def refuse_text_that_orbax_cannot_address(self) -> None:
        """Orbax keeps text in one JSON file and addresses it by a JSON pointer (RFC 6901) that it makes of the name."""
        pointers = {}
        for path, value in self.values.items():
            if isinstance(value, str):
                name = storage_name(path)
                if _ODD_TILDE.search(name):
                    self.refuse(path, Unrecordable("cannot save a str under a key with '~'", "rename the key"))
                else:
                    pointers[tuple(name.split("/"))] = path
        for pointer, path in pointers.items():
            for above in (pointers.get(pointer[:i]) for i in range(1, len(pointer))):
                if above is not None:
                    why = Unrecordable(
                        f"cannot save a str at {path_text(path)} beside one at {path_text(above)}: Orbax would take the "
                        "one for a part of the other",
                        "use keys without '/'",
                    )
                    self.refuse(path, why)

    def refuse_names_that_are_no_directories(self) -> None:
        """Without OCDBT a name is a path below the checkpoint: it must not leave it, nor lead into another array."""
        stored = {storage_name(path): path for path, value in self.values.items() if not isinstance(value, str)}
        for name, path in stored.items():
            parts = name.split("/")
            if any(part in ("", ".", "..") or "\0" in part or len(part.encode()) > 255 for part in parts):
                why = f"cannot save a leaf in a directory of the name {name!r}"
                self.refuse(path, Unrecordable(why, "rename the key, or save with OCDBT"))
            for above in ("/".join(parts[:i]) for i in range(1, len(parts))):
                if above in stored:
                    why = f"cannot save a leaf in the directory of another: {name!r} lies in {above!r}"
                    self.refuse(path, Unrecordable(why, "rename the key, or save with OCDBT"))

    def raise_if_refused(self) -> None:
        if self.refused:
            raise SaveRefusedError(*_problems(self.refused, of=len(self.values)))


def _problems(refused: Mapping[tuple[str, str], Sequence[str]], *, of: int) -> list[Problem]:
    """One problem for each reason and fix, with the leaves that it affects."""
    return [
        Problem(could_not=reason, affects=tuple(paths), of=max(of, len(paths)), fix=fix)
        for (reason, fix), paths in refused.items()
    ]


def _shared_name(name: str) -> Unrecordable:
    return Unrecordable(
        f"cannot save leaves under one name: Orbax would store all of them as {name!r}",
        "rename a key, so that the keys joined by dots differ",
    )


_Container: TypeAlias = Callable[[tuple[Key, ...], tuple[Tree, ...]], ContainerRecord]


def _one_level(node: PyTree) -> tuple[tuple[Key, ...], Sequence[PyTree], _Container] | None:
    """The keys and children of a container, and how to record it; None for a leaf."""
    kind: Literal["none", "dict", "list", "tuple", "namedtuple", "node"]
    if node is None:
        return (), (), lambda keys, children: ContainerRecord(kind="none")
    if type(node) is dict:
        names = _sorted_keys(node)
        keys = tuple(_dict_key(name) for name in names)
        return keys, [node[name] for name in names], _of_kind("dict")
    if type(node) in (list, tuple):
        keys = tuple(Key("index", i) for i in range(len(node)))
        return keys, node, _of_kind("list" if type(node) is list else "tuple")
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    if len(flat) == 1 and flat[0][0] == ():
        return None
    if not flat and isinstance(node, Mapping):
        # Orbax keeps an empty mapping of any class as an empty dict.
        return (), (), _of_kind("dict")
    keys = tuple(_key(path[0]) for path, _ in flat)
    if len(set(keys)) < len(keys):
        raise Unrecordable(
            f"cannot save a {type(node).__qualname__} that gives two children one key", "register it with distinct keys"
        )
    children = [child for _, child in flat]
    cls = type(node)
    fields = [Key("attr", name) for name in getattr(node, "_fields", ())]
    kind = "namedtuple" if isinstance(node, tuple) and hasattr(node, "_fields") and list(keys) == fields else "node"
    return keys, children, _of_kind(kind, module=cls.__module__, qualname=cls.__qualname__)


def _of_kind(
    kind: Literal["dict", "list", "tuple", "namedtuple", "node"], *, module: str = "", qualname: str = ""
) -> _Container:
    return lambda keys, children: ContainerRecord(
        kind=kind, keys=keys, children=children, module=module, qualname=qualname
    )


def _sorted_keys(node: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(node)
    except TypeError:
        kinds = sorted({type(key).__name__ for key in node})
        raise Unrecordable(f"cannot save a dict whose keys do not sort ({', '.join(kinds)})", _KEY_FIX) from None


_KEY_FIX = "use str keys throughout, or int keys throughout"


def _dict_key(name: Any) -> Key:
    if type(name) not in (str, int):
        raise Unrecordable(f"cannot save a dict key of type {type(name).__name__}", _KEY_FIX)
    if isinstance(name, int) and not INT_MIN <= name <= INT_MAX:
        raise Unrecordable("cannot save an int key beyond 64 bits", "use it as a str key")
    if isinstance(name, str):
        _check_name(name)
    return Key("dict", name)


def _check_name(name: str) -> None:
    """Orbax and TensorStore hold names as UTF-8; the record limits their length."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Unrecordable("cannot save a str key with lone surrogates", "use a key that encodes to UTF-8") from None
    if size > MAX_TEXT_NBYTES:
        raise Unrecordable(f"cannot save a str key of more than {MAX_TEXT_NBYTES} bytes", "use a shorter key")


def _key(key: Any) -> Key:
    if isinstance(key, jax.tree_util.DictKey):
        return _dict_key(key.key)
    if isinstance(key, jax.tree_util.SequenceKey):
        return Key("index", key.idx)
    if isinstance(key, jax.tree_util.GetAttrKey):
        _check_name(key.name)
        return Key("attr", key.name)
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return Key("index", key.key)
    raise Unrecordable(
        f"cannot save a tree key of type {type(key).__name__}", "register the node with keys of JAX's own"
    )


def record_path(keypath: Sequence[Any]) -> LeafPath:
    """The path of a leaf from JAX's key path.

    Raises:
        Unrecordable: A key has no record.
    """
    return tuple(_key(key) for key in keypath)


# Leaves.


class LeafRecorder:
    """Records the leaves of one tree; shardings and meshes that are shared are recorded once."""

    def __init__(self) -> None:
        self._shardings: dict[Any, ShardingRecord | Unrecordable] = {}
        self._meshes: dict[Any, MeshRecord] = {}
        self._spanning: dict[Any, bool] = {}
        self._arrays: dict[Hashable, ArrayRecord] = {}

    def record(self, value: Any, save_dtype: Any = None) -> LeafRecord:
        """Records one leaf that is about to be saved.

        Args:
            value: The leaf.
            save_dtype: The dtype that it is cast to while it is saved; None for its own.

        Raises:
            Unrecordable: It could not come back as it is.
        """
        if isinstance(value, jax.Array):
            return self._array(value, save_dtype)
        return _value(value, save_dtype)

    def sharding(self, sharding: jax.sharding.Sharding) -> ShardingRecord:
        """Records a sharding whole.

        Raises:
            Unrecordable: It says something that has no record.
        """
        known = self._shardings.get(sharding)
        if known is None:
            try:
                known = self._record_sharding(sharding)
            except Unrecordable as why:
                known = why
            self._shardings[sharding] = known
        if isinstance(known, Unrecordable):
            raise Unrecordable(known.reason, known.fix)
        return known

    def mesh(self, mesh: Mesh | AbstractMesh) -> MeshRecord:
        """Records a mesh, concrete or abstract."""
        if mesh not in self._meshes:
            self._meshes[mesh] = _record_mesh(mesh)
        return self._meshes[mesh]

    def _array(self, value: jax.Array, save_dtype: Any) -> ArrayRecord:
        if isinstance(value, jax.core.Tracer):
            raise Unrecordable("cannot save a value that is being traced", "save outside jax.jit")
        if value.is_deleted():
            raise Unrecordable("cannot save an array that was deleted or donated", "save before it is donated")
        sharding = self.sharding(value.sharding)
        if isinstance(sharding, NamedShardingRecord) and sharding.spec.unreduced:
            raise Unrecordable(
                f"cannot save an array with a pending reduction, {sharding.spec}",
                "reduce it first: jax.reshard(x, spec) with a spec that has no unreduced axes",
            )
        committed = value.committed
        if committed and not self._spans_all_processes(value.sharding):
            raise Unrecordable(
                "cannot save an array that is committed to devices of some processes only",
                "place it on a mesh over all processes, or leave it uncommitted",
            )
        key = (value.shape, value.dtype, save_dtype, id(sharding), committed)
        if key not in self._arrays:
            prng = record_prng(value)
            dtype = _storable_dtype("uint32" if prng else save_dtype or value.dtype)
            if prng is not None:
                dtype = jax.random.key_data(value).dtype.name
            self._arrays[key] = ArrayRecord(
                shape=tuple(value.shape), dtype=dtype, sharding=sharding, committed=committed, prng=prng
            )
        return self._arrays[key]

    def _spans_all_processes(self, sharding: jax.sharding.Sharding) -> bool:
        """Whether every process holds a part; the same answer in every process, so that all refuse or none."""
        if sharding not in self._spanning:
            processes = {device.process_index for device in cast(set[jax.Device], sharding.device_set)}
            self._spanning[sharding] = len(processes) == jax.process_count()
        return self._spanning[sharding]

    def _record_sharding(self, sharding: jax.sharding.Sharding) -> ShardingRecord:
        record: ShardingRecord
        if isinstance(sharding, NamedSharding):
            record = NamedShardingRecord(
                mesh=self.mesh(sharding.mesh), spec=_record_spec(sharding.spec), memory_kind=sharding.memory_kind
            )
            spec = partition_spec_of(record.spec)
            rebuilt: jax.sharding.Sharding = NamedSharding(sharding.mesh, spec, memory_kind=record.memory_kind)
        elif isinstance(sharding, SingleDeviceSharding):
            (device,) = cast(set[jax.Device], sharding.device_set)
            record = SingleDeviceRecord(device_id=device.id, platform=device.platform, memory_kind=sharding.memory_kind)
            rebuilt = SingleDeviceSharding(device, memory_kind=record.memory_kind)
        else:
            raise Unrecordable(
                f"cannot record a sharding of type {type(sharding).__name__}", "place the array by a NamedSharding"
            )
        if rebuilt != sharding:
            raise Unrecordable(
                f"cannot record all of the sharding {sharding}", "place the array by a plain NamedSharding"
            )
        return record


def record_mesh(mesh: Mesh | AbstractMesh) -> MeshRecord:
    """Records a mesh that a caller passed or set.

    Raises:
        MeshMismatchError: It has no record.
    """
    try:
        return _record_mesh(mesh)
    except Unrecordable as why:
        raise MeshMismatchError(Problem(could_not=why.reason, fix=why.fix, about="mesh")) from None


def _record_mesh(mesh: Mesh | AbstractMesh) -> MeshRecord:
    names = tuple(mesh.axis_names)
    if not all(isinstance(name, str) for name in names):
        raise Unrecordable(f"cannot record mesh axis names that are not str: {names}", "name the mesh axes by str")
    types = tuple(_axis_type(kind) for kind in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return MeshRecord(axis_names=names, axis_sizes=tuple(mesh.axis_sizes), axis_types=types)
    devices = mesh.devices.flatten().tolist()
    return MeshRecord(
        axis_names=names,
        axis_sizes=tuple(mesh.devices.shape),
        axis_types=types,
        device_ids=tuple(device.id for device in devices),
        platform=devices[0].platform,
    )


def _axis_type(kind: Any) -> AxisType:
    return cast(AxisType, kind.name.lower())


def _record_spec(spec: PartitionSpec) -> SpecRecord:
    partitions = _compat.partitions(spec)
    names = (*spec.unreduced, *spec.reduced)
    for partition in partitions:
        names += partition if isinstance(partition, tuple) else (partition,)
    odd = [n for n in names if not (n is None or isinstance(n, str) or n is PartitionSpec.UNCONSTRAINED)]
    if odd:
        raise Unrecordable(f"cannot record mesh axis names that are not str: {odd}", "name the mesh axes by str")
    return SpecRecord(
        partitions=tuple(UNCONSTRAINED if p is PartitionSpec.UNCONSTRAINED else cast(Partition, p) for p in partitions),
        unreduced=tuple(sorted(spec.unreduced)),
        reduced=tuple(sorted(spec.reduced)),
        unreduced_kind=_compat.unreduced_kind(spec),
    )


def partition_spec_of(record: SpecRecord) -> PartitionSpec:
    """The `PartitionSpec` that a record describes, verbatim."""
    return _compat.partition_spec(
        (PartitionSpec.UNCONSTRAINED if p is UNCONSTRAINED else p for p in record.partitions),
        unreduced=record.unreduced,
        reduced=record.reduced,
        unreduced_kind=record.unreduced_kind,
    )


def record_prng(value: Any) -> PrngRecord | None:
    """How to make typed keys of key data; None where `value` holds no typed keys.

    Raises:
        Unrecordable: The implementation has no name that `jax.random.wrap_key_data` would take.
    """
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None
    impl = jax.random.key_impl(value)
    if not isinstance(impl, str):
        raise Unrecordable(
            f"cannot record the PRNG implementation {impl}, which has no registered name",
            "save jax.random.key_data(keys) instead",
        )
    one = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), value.dtype))
    return PrngRecord(impl=impl, key_shape=tuple(one.shape))


def _storable_dtype(dtype: Any) -> str:
    dtype = np.dtype(dtype)
    if dtype.name not in STORABLE_DTYPES:
        raise Unrecordable(f"cannot save dtype {dtype.name}", "cast it to a numeric dtype that Zarr holds")
    if not dtype.isnative:
        raise Unrecordable(
            f"cannot save the foreign byte order of dtype {dtype.str}", "x.astype(x.dtype.newbyteorder('='))"
        )
    return str(dtype.name)


_PYTHON_SCALARS: Mapping[type, ValueType] = {int: "int", float: "float", bool: "bool", complex: "complex"}


def _value(value: Any, save_dtype: Any) -> ValueRecord:
    cls = type(value)
    if cls in _PYTHON_SCALARS:
        dtype = np.asarray(value).dtype
        if dtype.hasobject:
            raise Unrecordable("cannot save an int beyond 64 bits", "save it as str or bytes")
        return ValueRecord(type=_PYTHON_SCALARS[cls], dtype=_storable_dtype(dtype))
    if cls is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unrecordable("cannot save a str with lone surrogates", "save it as bytes") from None
        return ValueRecord(type="str")
    if cls is bytes:
        return ValueRecord(type="bytes", dtype="uint8", shape=(len(value),))
    if cls is np.ndarray:
        return ValueRecord(type="np.ndarray", dtype=_storable_dtype(save_dtype or value.dtype), shape=value.shape)
    if isinstance(value, np.generic):
        return ValueRecord(type="np.generic", dtype=_storable_dtype(value.dtype))
    if isinstance(value, np.ndarray):
        raise Unrecordable(
            f"cannot save a {cls.__name__}, a subclass of numpy.ndarray", "save its parts as plain arrays"
        )
    raise Unrecordable(f"cannot save a leaf of type {cls.__module__}.{cls.__qualname__}", f"allowed: {ALLOWED_LEAVES}")


# Targets.


def record_target(target: PyTree, prng_impls: Iterable[str] = ()) -> CapturedTarget:
    """Records what each leaf of a target asks for.

    Args:
        target: A tree of arrays, `jax.ShapeDtypeStruct`s, host values, or anything with a shape and a dtype.
        prng_impls: Names of PRNG implementations that abstract keys may be of, beside JAX's own.

    Returns:
        The records and the leaves by path, and the structure.

    Raises:
        RestoreRefusedError: A leaf asks for something that has no record. Lists all of them.
    """
    recorder = LeafRecorder()
    impls = _key_dtypes(prng_impls)
    flat, treedef = jax.tree_util.tree_flatten_with_path(target)
    leaves = {_lenient_path(keypath): leaf for keypath, leaf in flat}
    records = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for path, leaf in leaves.items():
        try:
            records[path] = _target_record(leaf, recorder, impls)
        except Unrecordable as why:
            refused.setdefault((why.reason, why.fix), []).append(path_text(path))
    if refused:
        raise RestoreRefusedError(*_problems(refused, of=len(leaves)))
    return CapturedTarget(records=records, leaves=leaves, treedef=treedef)


def _lenient_path(keypath: Sequence[Any]) -> LeafPath:
    """A path even where a key has no record: it then matches nothing, and the plan says so by name."""
    path = []
    for key in keypath:
        try:
            path.append(_key(key))
        except Unrecordable:
            path.append(Key("dict", jax.tree_util.keystr((key,))))
    return tuple(path)


def _target_record(leaf: Any, recorder: LeafRecorder, impls: Mapping[Any, str]) -> TargetRecord:
    if type(leaf) in _PYTHON_SCALARS:
        return TargetRecord(value_type=_PYTHON_SCALARS[type(leaf)])
    if isinstance(leaf, str | bytes):
        return TargetRecord(value_type="str" if isinstance(leaf, str) else "bytes")
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or _is_orbax_metadata(leaf):
        return TargetRecord()
    shape = tuple(leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic):
        value_type: ValueType = "np.ndarray" if isinstance(leaf, np.ndarray) else "np.generic"
        return TargetRecord(shape=shape, dtype=np.dtype(leaf.dtype).name, value_type=value_type)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        described: dict[str, Any] = {"prng_impl": impls.get(leaf.dtype, str(leaf.dtype))}
    else:
        described = {"dtype": np.dtype(leaf.dtype).name}
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return TargetRecord(shape=shape, **described)
    return TargetRecord(
        shape=shape, committed=getattr(leaf, "committed", True), **described, **describe_sharding(sharding, recorder)
    )


def describe_sharding(sharding: jax.sharding.Sharding, recorder: LeafRecorder) -> dict[str, Any]:
    """The fields `sharding` and `concrete` of a `TargetRecord`. An empty abstract mesh counts as no sharding."""
    mesh = getattr(sharding, "mesh", None)
    concrete = not isinstance(mesh, AbstractMesh)
    if isinstance(mesh, AbstractMesh) and mesh.empty:
        return {}
    try:
        return {"sharding": recorder.sharding(sharding), "concrete": concrete}
    except Unrecordable:
        if not concrete:
            raise
        return {"concrete": True}


def _is_orbax_metadata(leaf: Any) -> bool:
    """Whether a leaf is what Orbax's `metadata()` gives: it asks for what was recorded, in stock's own shape."""
    return type(leaf).__module__.startswith("orbax.checkpoint")


def _key_dtypes(more: Iterable[str]) -> dict[Any, str]:
    """The name of each PRNG implementation by the dtype of its keys."""
    names = dict.fromkeys((*_JAX_PRNG_IMPLS, *more))
    dtypes = {}
    for name in names:
        try:
            dtypes[jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype] = name
        except ValueError:
            continue  # Not registered here: a target cannot ask for it either.
    return dtypes


_JAX_PRNG_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


# The machine and the software.


def record_inventory(devices: Sequence[jax.Device]) -> Inventory:
    """Records devices, and the memory kinds that this process can see on them.

    Raises:
        ValueError: There are no devices.
    """
    if not devices:
        raise ValueError("there are no devices to restore onto")
    own = [device for device in devices if device.process_index == jax.process_index()]
    device = own[0] if own else jax.local_devices()[0]
    return Inventory(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        device_ids=tuple(d.id for d in devices),
        process_indices=tuple(d.process_index for d in devices),
        memory_kinds=tuple(sorted(memory.kind for memory in device.addressable_memories())),
        default_memory_kind=device.default_memory().kind,
    )


def _writer() -> tuple[tuple[str, str], ...]:
    names = ("orbax-explicit", "jax", "orbax-checkpoint")
    return tuple((name, importlib.metadata.version(name)) for name in names)
