"""`RestorePolicy`: every choice a user may make about a restore.

Each default is the one that surprises least. A policy is a value: it is checked when it is made, so that a
restore never fails half-way because of it. It knows neither JAX nor a checkpoint; `_planning` applies it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from orbax_explicit._errors import RecordError
from orbax_explicit._records import AXIS_TYPES, UNCONSTRAINED, AxisType, SpecRecord

Topology: TypeAlias = Literal["adapt", "exact"]
Indivisible: TypeAlias = Literal["replicate", "error"]
Missing: TypeAlias = Literal["error", "keep"]
Extra: TypeAlias = Literal["error", "ignore"]
Cast: TypeAlias = Literal["same_kind", "never", "unsafe"]
ArrayType: TypeAlias = Literal["jax", "numpy"]

LeafNames: TypeAlias = tuple[str, ...]
"""A leaf or a subtree by the text of its keys."""

_RESTORABLE = [kind for kind in AXIS_TYPES if kind != "manual"]

RECORDED = "recorded"
"""The memory kind that stands for whatever was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRule:
    """A spec by name.

    Attributes:
        pattern: A regular expression, which `re.search` finds in the path of a leaf (`params/layer_0/kernel`).
        spec: The spec of the leaves that it is found in.
    """

    pattern: str
    spec: SpecRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePolicy:
    """Choices about a restore, keyword-only.

    Mesh axes go by their recorded names, leaves by their paths as `plan_restore` prints them, such as
    `"params/layer_0/kernel"`. A tuple of keys, `("params", "layer/0")`, is a path whose keys have slashes in them.

    Attributes:
        topology: Where a recorded mesh does not fit the present devices: `"adapt"` resizes it, `"exact"` refuses.
        resize: The mesh axes that may change size, most willing first; empty for any axis, outermost first.
        axis_types: Restore recorded meshes with these axis types instead of the recorded ones: a
            `jax.sharding.AxisType` (or its name, such as `"explicit"`) for every axis, or a mapping from axis
            name to one. None keeps what was recorded.
        rename_axes: Recorded mesh axis -> its name on the mesh at hand; None drops it from the specs, so that arrays
            are whole along the dimensions that it split.
        indivisible: Where a mesh does not divide a dimension that the recorded spec, or one of `rules`, splits:
            `"replicate"` makes the array whole along that dimension, `"error"` refuses.
        memory_kind: `"recorded"`, which falls back to the platform's default kind where the platform lacks the
            recorded one (the plan says so), or the name of a kind for every array.
        missing: For a leaf of the target that the checkpoint lacks: `"error"` refuses, `"keep"` keeps the target's
            own value.
        extra: For a saved leaf that the target lacks: `"error"` refuses, `"ignore"` does not read it.
        cast: Where a target's dtype differs from the saved one: `"same_kind"` casts within a kind (float to
            float, signed to wider signed, ...), `"never"` refuses, `"unsafe"` casts whatever NumPy can.
        rename_leaves: Path of a leaf, or of a subtree, in the result -> its path in the checkpoint.
        rules: Pairs of a regular expression and a `jax.sharding.PartitionSpec`, for arrays that have no spec, or one
            whose axes the mesh at hand lacks: the first whose expression `re.search` finds in the leaf's path.
        arrays: What arrays come back as: `"jax"`, or `"numpy"` for the whole tree on the host, where nothing is placed on
            a device; typed PRNG keys then come back as their data.

    Raises:
        ValueError: A choice is none of those above.
    """

    topology: Topology = "adapt"
    resize: tuple[str, ...] = ()
    axis_types: AxisType | Mapping[str, AxisType] | None = None
    rename_axes: Mapping[str, str | None] = field(default_factory=dict)
    indivisible: Indivisible = "replicate"
    memory_kind: str = RECORDED
    missing: Missing = "error"
    extra: Extra = "error"
    cast: Cast = "same_kind"
    rename_leaves: Mapping[Any, Any] = field(default_factory=dict)
    rules: Sequence[tuple[str, Any]] = ()
    arrays: ArrayType = "jax"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {list(choices)}, not {getattr(self, name)!r}")
        if not isinstance(self.memory_kind, str) or not self.memory_kind:
            raise ValueError(f"memory_kind must be {RECORDED!r} or the name of a memory kind, not {self.memory_kind!r}")
        for name, checked in (
            ("resize", _axis_names(self.resize)),
            ("axis_types", _axis_types(self.axis_types)),
            ("rename_axes", _renamed_axes(self.rename_axes)),
            ("rename_leaves", _renamed_leaves(self.rename_leaves)),
            ("rules", _rules(self.rules)),
        ):
            object.__setattr__(self, name, checked)

    def __hash__(self) -> int:
        return hash(tuple(_hashable(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and travels by its arguments: the read-only mappings do neither."""
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in arguments.items()
        }
        return functools.partial(RestorePolicy, **plain), ()

    def typed(self, axis_names: tuple[str, ...], recorded: tuple[AxisType, ...]) -> tuple[AxisType, ...]:
        """The axis types with which a recorded mesh is rebuilt."""
        if self.axis_types is None:
            return recorded
        if isinstance(self.axis_types, Mapping):
            by_axis = self.axis_types
            return tuple(by_axis.get(name, kind) for name, kind in zip(axis_names, recorded, strict=True))
        return (self.axis_types,) * len(axis_names)

    def for_arrays_alone(self) -> RestorePolicy:
        """The same choices about where each array lands, and the defaults of those about the tree and its targets."""
        plain = dataclasses.replace(self, missing="error", extra="error", rename_leaves={}, rules=(), arrays="jax")
        return dataclasses.replace(plain, cast="same_kind")

    def spec_for(self, path: str) -> SpecRule | None:
        """The first of `rules` whose expression is found in the path of a leaf."""
        rules: Sequence[SpecRule] = self.rules  # type: ignore[assignment]  # `__post_init__` made them of the pairs
        return next((rule for rule in rules if re.search(rule.pattern, path)), None)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "topology": get_args(Topology),
    "indivisible": get_args(Indivisible),
    "missing": get_args(Missing),
    "extra": get_args(Extra),
    "cast": get_args(Cast),
    "arrays": get_args(ArrayType),
}


def checked_policy(policy: RestorePolicy | None) -> RestorePolicy | None:
    """The same policy, where it is one.

    Raises:
        TypeError: It is something else.
    """
    if policy is None or isinstance(policy, RestorePolicy):
        return policy
    raise TypeError(f"policy must be a RestorePolicy, not {policy!r}")


def checked_array_policy(policy: RestorePolicy | None) -> RestorePolicy | None:
    """The same policy, where it says nothing about the tree that arrays are in.

    Raises:
        TypeError: It is no policy.
        ValueError: It has fields that only one who restores the whole tree can follow.
    """
    policy = checked_policy(policy)
    if policy is None:
        return None
    plain = policy.for_arrays_alone()
    names = [
        field.name for field in dataclasses.fields(policy) if getattr(policy, field.name) != getattr(plain, field.name)
    ]
    if names:
        raise ValueError(
            f"a handler of arrays alone sees no tree and no target, and cannot follow {', '.join(names)}: restore through an "
            "ExplicitCheckpointHandler"
        )
    return policy


def leaf_names(path: Any) -> LeafNames:
    """The text of the keys of a path that a user wrote.

    Raises:
        ValueError: It is none.
    """
    names = tuple(path.split("/")) if isinstance(path, str) else path
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str | int) for name in names):
        raise ValueError(f"a leaf path must be text such as 'params/kernel', or a tuple of keys, not {path!r}")
    return tuple(map(str, names))


def _hashable(value: Any) -> Any:
    return frozenset(value.items()) if isinstance(value, Mapping) else value


def _axis_names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"resize must be a sequence of mesh axis names, not {names!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"resize names a mesh axis twice: {names!r}")
    return tuple(names)


def _renamed_axes(names: Any) -> Mapping[str, str | None]:
    if not isinstance(names, Mapping) or not all(
        isinstance(old, str) and (new is None or (isinstance(new, str) and new)) for old, new in names.items()
    ):
        raise ValueError(f"rename_axes must map mesh axis names to names or None, not {names!r}")
    kept = [new for new in names.values() if new is not None]
    if len(set(kept)) < len(kept):
        raise ValueError(f"rename_axes gives two mesh axes one name: {dict(names)!r}")
    return MappingProxyType(dict(names))


def _renamed_leaves(paths: Any) -> Mapping[LeafNames, LeafNames]:
    if not isinstance(paths, Mapping):
        raise ValueError(f"rename_leaves must map leaf paths to leaf paths, not {paths!r}")
    named = {leaf_names(new): leaf_names(old) for new, old in paths.items()}
    if len(named) < len(paths):
        raise ValueError(f"rename_leaves gives one path in the result twice: {dict(paths)!r}")
    return MappingProxyType(named)


def _rules(rules: Any) -> tuple[SpecRule, ...]:
    if not isinstance(rules, list | tuple):
        raise ValueError(f"rules must be a sequence of pairs, not {rules!r}")
    return tuple(_rule(rule) for rule in rules)


def _rule(rule: Any) -> SpecRule:
    if isinstance(rule, SpecRule):
        return rule
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise ValueError(f"rules must be pairs of a regular expression and a PartitionSpec, not {rule!r}")
    pattern, spec = rule
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"rules has {pattern!r}, which is no regular expression: {error}") from error
    return SpecRule(pattern=pattern, spec=_spec(spec))


def _spec(spec: Any) -> SpecRecord:
    """A `PartitionSpec`, which this floor may not import, by what it has."""
    if isinstance(spec, SpecRecord):
        return spec
    if not hasattr(spec, "partitions"):
        raise ValueError(f"rules must give each expression a jax.sharding.PartitionSpec, not {spec!r}")
    if getattr(spec, "unreduced", None):
        raise ValueError(f"rules has {spec}: nothing that is read is a pending reduction")
    open_dimension = getattr(type(spec), "UNCONSTRAINED", None)
    partitions = tuple(UNCONSTRAINED if p is open_dimension else p for p in spec.partitions)
    try:
        return SpecRecord(partitions=partitions, reduced=tuple(sorted(getattr(spec, "reduced", ()))))
    except RecordError as error:
        raise ValueError(f"rules has {spec}: {error}") from error


def _axis_types(axis_types: Any) -> Any:
    if isinstance(axis_types, Mapping):
        if not all(isinstance(name, str) for name in axis_types):
            raise ValueError(f"axis_types must map mesh axis names to types, not {axis_types!r}")
        return MappingProxyType({name: _axis_type(value) for name, value in axis_types.items()})
    return None if axis_types is None else _axis_type(axis_types)


def _axis_type(value: Any) -> AxisType:
    # jax.sharding.AxisType is an enum whose member names are our spellings but for the case; this floor may not
    # import it.
    name = str(getattr(value, "name", value)).lower()
    for kind in _RESTORABLE:
        if name == kind:
            return kind
    # A manual axis exists within jax.shard_map alone: no array can be placed on one from outside.
    raise ValueError(f"axis_types must be AxisType members or names among {_RESTORABLE}, not {value!r}")
