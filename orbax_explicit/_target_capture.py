"""JAX -> records, for a tree to restore into: what each of its leaves asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from orbax_explicit._capture import record_key
from orbax_explicit._errors import Problem, RestoreRefusedError
from orbax_explicit._leaf_capture import PYTHON_SCALARS, LeafRecorder, Unrecordable
from orbax_explicit._records import (
    Key,
    LeafPath,
    ShardingRecord,
    ValueType,
)
from orbax_explicit._targets import TargetRecord

PyTree: TypeAlias = Any


class AsRecorded:
    """A leaf of a target that asks for what was recorded."""

    __slots__ = ()


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


def record_target(target: PyTree, prng_impls: Iterable[str] = ()) -> CapturedTarget:
    """Records what each leaf of a target asks for.

    Args:
        target: A tree of arrays, `jax.ShapeDtypeStruct`s, host values, or anything with a shape and a dtype.
        prng_impls: Names of PRNG implementations that abstract keys may be of, beside JAX's own.

    Returns:
        The records and the leaves by path, and the structure.

    Raises:
        RestoreRefusedError: Two leaves have one path.
    """
    recorder = LeafRecorder()
    impls = _key_dtypes(prng_impls)
    flat, treedef = jax.tree_util.tree_flatten_with_path(target)
    leaves = {_lenient_path(keypath): leaf for keypath, leaf in flat}
    records = {}
    for path, leaf in leaves.items():
        try:
            records[path] = dataclasses.replace(_target_record(leaf, recorder, impls), keepable=_has_value(leaf))
        except Unrecordable as why:
            # For the plan, which lists all that is refused.
            records[path] = TargetRecord(odd=(why.reason, why.fix), keepable=_has_value(leaf))
    if len(leaves) < len(flat):
        problem = Problem(
            could_not="cannot restore into a node that gives two children one key", fix="register it with distinct keys"
        )
        raise RestoreRefusedError(problem)
    return CapturedTarget(records=records, leaves=leaves, treedef=treedef)


def _lenient_path(keypath: Sequence[Any]) -> LeafPath:
    """A path even where a key has no record: it then matches nothing, and the plan says so by name."""
    path = []
    for key in keypath:
        try:
            path.append(record_key(key))
        except Unrecordable:
            path.append(Key("dict", jax.tree_util.keystr((key,))))
    return tuple(path)


def _target_record(leaf: Any, recorder: LeafRecorder, impls: Mapping[Any, str]) -> TargetRecord:
    if leaf is ...:
        return TargetRecord(placeholder=True)
    if type(leaf) in PYTHON_SCALARS:
        return TargetRecord(value_type=PYTHON_SCALARS[type(leaf)])
    if isinstance(leaf, str | bytes):
        return TargetRecord(value_type="str" if isinstance(leaf, str) else "bytes")
    if isinstance(leaf, type):
        return _type_record(leaf)
    if _is_metadata(leaf):
        return TargetRecord()
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise Unrecordable(
            f"cannot restore into a leaf of type {type(leaf).__module__}.{type(leaf).__qualname__}",
            "use arrays, jax.ShapeDtypeStruct, NumPy or Python values",
        )
    shape = tuple(leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic):
        value_type: ValueType = "np.ndarray" if isinstance(leaf, np.ndarray) else "np.generic"
        return TargetRecord(shape=shape, dtype=np.dtype(leaf.dtype).name, value_type=value_type)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        described: dict[str, Any] = {"prng_impl": impls.get(leaf.dtype, str(leaf.dtype))}
    else:
        described = {"dtype": np.dtype(leaf.dtype).name}
    if not hasattr(leaf, "sharding"):
        # A shape and a dtype, of no library that places arrays: NumPy's own.
        return TargetRecord(shape=shape, value_type="np.ndarray", **described)
    sharding = leaf.sharding
    if not isinstance(sharding, jax.sharding.Sharding):
        return TargetRecord(shape=shape, **described)
    asked = describe_sharding(sharding, recorder)
    return TargetRecord(
        shape=shape,
        committed=getattr(leaf, "committed", None),
        sharding=asked.sharding,
        concrete=asked.concrete,
        **described,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSharding:
    """A sharding that a caller names.

    Attributes:
        sharding: Its record; None where it has none, or means none.
        concrete: Whether it is on devices.
    """

    sharding: ShardingRecord | None = None
    concrete: bool = False


def describe_sharding(sharding: jax.sharding.Sharding, recorder: LeafRecorder | None = None) -> AskedSharding:
    """What a sharding that a caller names asks for. An empty abstract mesh counts as no sharding.

    Raises:
        Unrecordable: It is on an abstract mesh, and says something that has no record.
    """
    mesh = getattr(sharding, "mesh", None)
    concrete = not isinstance(mesh, AbstractMesh)
    if isinstance(mesh, AbstractMesh) and mesh.empty:
        return AskedSharding()
    try:
        return AskedSharding(sharding=(recorder or LeafRecorder()).sharding(sharding), concrete=concrete)
    except Unrecordable:
        if not concrete:
            raise
        return AskedSharding(concrete=True)


def _has_value(leaf: Any) -> bool:
    """Whether a leaf of a target has a value of its own."""
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.core.Tracer) and not leaf.is_deleted()
    return leaf is ... or isinstance(leaf, np.ndarray | np.generic | str | bytes) or type(leaf) in PYTHON_SCALARS


def _type_record(leaf: type) -> TargetRecord:
    """What a class asks for, as v1 of Orbax has it: a value of it, whatever shape and dtype were recorded."""
    if leaf in PYTHON_SCALARS:
        return TargetRecord(value_type=PYTHON_SCALARS[leaf])
    if leaf in (str, bytes):
        return TargetRecord(value_type="str" if leaf is str else "bytes")
    if issubclass(leaf, np.ndarray):
        return TargetRecord(value_type="np.ndarray")
    if issubclass(leaf, jax.Array | jax.ShapeDtypeStruct) or _is_metadata_type(leaf):
        return TargetRecord()
    raise Unrecordable(
        f"cannot restore into a leaf that is the class {leaf.__module__}.{leaf.__qualname__}",
        "use int, float, bool, complex, str, bytes, np.ndarray, jax.Array, or a leaf that says its shape and dtype",
    )


def _is_metadata(leaf: Any) -> bool:
    """Whether a leaf is what `metadata()` of a handler gives: it asks for what was recorded, in stock's own shape."""
    return _is_metadata_type(type(leaf))


def _is_metadata_type(cls: type) -> bool:
    return issubclass(cls, AsRecorded) or cls.__module__.startswith("orbax.checkpoint")


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
