"""JAX -> records, leaf by leaf: arrays with their shardings and meshes, and host values.

A sharding is recorded whole or refused: `LeafRecorder.sharding` rebuilds what it recorded and compares, so that a fact
that JAX adds one day is refused rather than lost. Refusals are `Unrecordable`, without a leaf name; who walks the tree
(`_capture`, `_target_capture`) knows the name, and lists all of them in one error.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orbax_explicit import _compat
from orbax_explicit._errors import MeshMismatchError, Problem
from orbax_explicit._records import (
    UNCONSTRAINED,
    ArrayRecord,
    AxisType,
    LeafRecord,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    ValueType,
)
from orbax_explicit._targets import dtype_kind
from orbax_explicit._wire_schema import MAX_TEXT_NBYTES

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


def check_name(name: str) -> None:
    """Refuses a name that Orbax and TensorStore could not hold, which is UTF-8, or the record, which limits its length.

    Raises:
        Unrecordable: It is one.
    """
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Unrecordable("cannot save a name with lone surrogates", "use a name that encodes to UTF-8") from None
    if size > MAX_TEXT_NBYTES:
        raise Unrecordable(f"cannot save a name of more than {MAX_TEXT_NBYTES} bytes", "use a shorter name")


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
                "unreduced='reduce' sums it first, in save or in v1.context; or jax.reshard(x, spec) with a spec without unreduced axes",
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
            _check_save_cast("a PRNG key" if prng else "", value.dtype, save_dtype)
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


def reduce_pending(value: Any) -> Any:
    """The same leaf with its pending reduction made, where it is an array that has one.

    Collective: every process that holds a part of the array calls it.
    """
    sharding = getattr(value, "sharding", None)
    if not isinstance(value, jax.Array) or not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return value
    spec = _compat.partition_spec(sharding.spec.partitions, reduced=sharding.spec.reduced)
    return jax.reshard(value, NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind))


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
    for name in names:
        check_name(name)
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
    names = (*spec.unreduced, *spec.reduced)
    for partition in spec.partitions:
        names += partition if isinstance(partition, tuple) else (partition,)
    odd = [n for n in names if not (n is None or isinstance(n, str) or n is PartitionSpec.UNCONSTRAINED)]
    if odd:
        raise Unrecordable(f"cannot record mesh axis names that are not str: {odd}", "name the mesh axes by str")
    return SpecRecord(
        partitions=tuple(
            UNCONSTRAINED if p is PartitionSpec.UNCONSTRAINED else cast(Partition, p) for p in spec.partitions
        ),
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


PYTHON_SCALARS: Mapping[type, ValueType] = {int: "int", float: "float", bool: "bool", complex: "complex"}


def _value(value: Any, save_dtype: Any) -> ValueRecord:
    cls = type(value)
    is_array = cls is np.ndarray
    _check_save_cast("" if is_array else f"{cls.__name__}", value.dtype if is_array else None, save_dtype)
    if cls in PYTHON_SCALARS:
        dtype = np.asarray(value).dtype
        if dtype.hasobject:
            raise Unrecordable("cannot save an int beyond 64 bits", "save it as str or bytes")
        return ValueRecord(type=PYTHON_SCALARS[cls], dtype=_storable_dtype(dtype))
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


def _check_save_cast(what: str, dtype: Any, save_dtype: Any) -> None:
    """Refuses `SaveArgs(dtype=)` where it would change more than precision."""
    if save_dtype is None:
        return
    if what:
        raise Unrecordable(f"cannot store {what} in another dtype", "give this leaf SaveArgs without a dtype")
    if dtype_kind(np.dtype(dtype).name) != dtype_kind(np.dtype(save_dtype).name):
        raise Unrecordable(
            f"cannot store {np.dtype(dtype).name} in {np.dtype(save_dtype).name}",
            "give this leaf SaveArgs with a dtype of its own kind, or without",
        )
