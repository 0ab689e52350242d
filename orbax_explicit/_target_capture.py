"""JAX -> records, for a tree to restore into: what each of its leaves asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from orbax_explicit._capture import problems_of, record_key
from orbax_explicit._errors import Problem, RestoreRefusedError
from orbax_explicit._leaf_capture import PYTHON_SCALARS, LeafRecorder, Unrecordable
from orbax_explicit._records import (
    Key,
    LeafPath,
    ValueType,
    path_text,
)
from orbax_explicit._targets import TargetRecord

PyTree: TypeAlias = Any


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
    if len(leaves) < len(flat):
        problem = Problem(
            could_not="cannot restore into a node that gives two children one key", fix="register it with distinct keys"
        )
        raise RestoreRefusedError(problem)
    if refused:
        raise RestoreRefusedError(*problems_of(refused, of=len(leaves)))
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
    if type(leaf) in PYTHON_SCALARS:
        return TargetRecord(value_type=PYTHON_SCALARS[type(leaf)])
    if isinstance(leaf, str | bytes):
        return TargetRecord(value_type="str" if isinstance(leaf, str) else "bytes")
    if _is_orbax_metadata(leaf):
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
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return TargetRecord(shape=shape, **described)
    return TargetRecord(
        shape=shape, committed=getattr(leaf, "committed", None), **described, **describe_sharding(sharding, recorder)
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
