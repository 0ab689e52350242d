"""What a leaf of a target asks for, and whether a saved leaf can be that.

Types of value, shapes, dtypes and PRNG implementations; where a leaf lands is for `_planning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orbax_explicit import _refusals
from orbax_explicit._errors import Problem
from orbax_explicit._policy import Cast
from orbax_explicit._records import (
    ArrayRecord,
    LeafRecord,
    ShardingRecord,
    ValueRecord,
    ValueType,
    dtype_itemsize,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """What one leaf of a target asks for.

    Attributes:
        shape: The shape it expects; None for any.
        dtype: Name of the dtype it expects; None for any, and for PRNG keys.
        prng_impl: The PRNG implementation it expects; None for an ordinary leaf.
        sharding: The sharding it names, on a concrete or abstract mesh; None for none.
        concrete: Whether it names a concrete sharding, perhaps of a kind that has no record.
        committed: Whether a `jax.Array` is committed; None where it is not one, and cannot say.
        value_type: The type of host value it is; None for an array.
        keepable: Whether it has a value of its own, which is not abstract or deleted.
        placeholder: Whether it asks that nothing be read: `ocp.PLACEHOLDER`.
        odd: Why it cannot be asked for at all, and what to do; None where it can.
    """

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    prng_impl: str | None = None
    sharding: ShardingRecord | None = None
    concrete: bool = False
    committed: bool | None = None
    value_type: ValueType | None = None
    keepable: bool = False
    placeholder: bool = False
    odd: tuple[str, str] | None = None

    @property
    def type_text(self) -> str:
        """What it asks for, as a person reads it; empty where it takes anything."""
        if self.prng_impl is not None:
            return f"key<{self.prng_impl}>"
        if self.value_type is None or self.value_type in ("np.ndarray", "np.generic"):
            return self.dtype or ""
        return self.value_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a saved leaf becomes what a target's leaf asks for.

    Attributes:
        dtype: Name of the dtype that it is cast to; None where it keeps the saved one.
        problems: Every reason why it cannot.
    """

    dtype: str | None = None
    problems: tuple[Problem, ...] = ()


def fit(recorded: LeafRecord, target: TargetRecord, cast: Cast, *, strict: bool) -> Fit:
    """Says how a saved leaf becomes what a target's leaf asks for.

    Args:
        recorded: What was saved.
        target: What is asked for.
        cast: Which casts the caller allows.
        strict: Whether the shape must be the saved one.
    """
    if not target.type_text or describes_key_data(target, recorded):
        return Fit()
    saved_impl = recorded.prng.impl if isinstance(recorded, ArrayRecord) and recorded.prng else None
    shape_problem = _shape_problem(recorded, target.shape if target.value_type is None else _shape_of(target))
    if (
        saved_impl != target.prng_impl
        or (saved_impl is not None and target.value_type is not None)
        or is_text(recorded) != (target.value_type == "str")
        or (target.value_type == "bytes") > _is_bytes(recorded)
    ):
        return Fit(problems=(_refusals.type_is_other(recorded, target.type_text, is_prng=saved_impl is not None),))
    if target.value_type in _PYTHON_KINDS:
        if shape_problem is not None:
            return Fit(problems=(shape_problem,))
        if cast != "unsafe" and dtype_kind(recorded.dtype) not in _PYTHON_KINDS[target.value_type]:
            return Fit(problems=(_refusals.scalar_is_of_another_kind(recorded, target.type_text, cast),))
        return Fit()
    problems = [shape_problem] if shape_problem is not None and strict else []
    if saved_impl is not None or target.dtype in (None, recorded.dtype):
        return Fit(problems=tuple(problems))
    if not _is_known_to_tensorstore(recorded.dtype, str(target.dtype)):
        problems.append(_refusals.cast_does_not_exist(recorded, str(target.dtype)))
    elif cast == "never" or (cast == "same_kind" and not _is_harmless(recorded, str(target.dtype))):
        problems.append(_refusals.cast_is_not_allowed(recorded, str(target.dtype), cast))
    return Fit(dtype=target.dtype, problems=tuple(problems))


_PYTHON_KINDS: Mapping[ValueType | None, frozenset[str]] = {
    "int": frozenset({"int", "uint"}),
    "float": frozenset({"float"}),
    "bool": frozenset({"bool"}),
    "complex": frozenset({"complex"}),
}


def describes_key_data(target: TargetRecord, recorded: LeafRecord) -> bool:
    """Whether an abstract leaf means PRNG keys by their data, as Orbax's `to_shape_dtype_struct` describes them."""
    return (
        isinstance(recorded, ArrayRecord)
        and recorded.prng is not None
        and target.value_type is None
        and (target.shape, target.dtype) == (recorded.stored_shape, recorded.dtype)
    )


def _is_harmless(recorded: LeafRecord, wanted: str) -> bool:
    """Whether a cast changes no more than the precision: within a kind, and of integers to one that holds them all.

    A Python int has no width: whether it fits is seen when it is read.
    """
    kind = dtype_kind(recorded.dtype)
    if is_python_int(recorded):
        return dtype_kind(wanted) in ("int", "uint")
    if kind != dtype_kind(wanted):
        return False
    return kind not in ("int", "uint") or dtype_itemsize(wanted) >= dtype_itemsize(recorded.dtype)


def _is_known_to_tensorstore(saved: str, wanted: str) -> bool:
    """Whether TensorStore, which casts, gives what NumPy would: of float8_e8m0fnu it gives other numbers."""
    if "float8_e8m0fnu" in (saved, wanted):
        return False
    return (dtype_kind(saved), wanted) != ("complex", "bool")


def is_python_int(recorded: LeafRecord | None) -> bool:
    """Whether it was saved as an int of Python's own."""
    return isinstance(recorded, ValueRecord) and recorded.type == "int"


def dtype_kind(dtype: str) -> str:
    """`"float"` of `"bfloat16"`, `"uint"` of `"uint8"`."""
    for kind in ("float", "complex", "uint", "int"):
        if dtype.startswith((kind, f"b{kind}")):
            return kind
    return dtype


def is_text(recorded: LeafRecord) -> bool:
    """Whether it was saved as text."""
    return isinstance(recorded, ValueRecord) and recorded.type == "str"


def _is_bytes(recorded: LeafRecord) -> bool:
    return isinstance(recorded, ValueRecord) and recorded.type == "bytes"


def _shape_of(target: TargetRecord) -> tuple[int, ...] | None:
    return () if target.value_type in _PYTHON_KINDS else target.shape


def _shape_problem(recorded: LeafRecord, wanted: tuple[int, ...] | None) -> Problem | None:
    return None if wanted is None or wanted == recorded.shape else _refusals.shape_is_other(recorded, wanted)
