"""`RestorePolicy`: every choice a user may make about a restore.

Each default is the one that surprises least. A policy is a value: it is checked when it is made, so that a
restore never fails half-way because of it. It knows neither JAX nor a checkpoint; `_planning` applies it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from orbax_explicit._records import AXIS_TYPES, AxisType

Cast: TypeAlias = Literal["same_kind", "never", "unsafe"]

_RESTORABLE = [kind for kind in AXIS_TYPES if kind != "manual"]

RECORDED = "recorded"
"""The memory kind that stands for whatever was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePolicy:
    """Choices about a restore, keyword-only.

    Attributes:
        axis_types: Restore recorded meshes with these axis types instead of the recorded ones: a
            `jax.sharding.AxisType` (or its name, such as `"explicit"`) for every axis, or a mapping from axis
            name to one. None keeps what was recorded.
        memory_kind: `"recorded"`, which falls back to the platform's default kind where the platform lacks the
            recorded one (the plan says so), or the name of a kind for every array.
        cast: Where a target's dtype differs from the saved one: `"same_kind"` casts within a kind (float to
            float, signed to wider signed, ...), `"never"` refuses, `"unsafe"` casts whatever NumPy can.

    Raises:
        ValueError: A choice is none of those above.
    """

    axis_types: AxisType | Mapping[str, AxisType] | None = None
    memory_kind: str = RECORDED
    cast: Cast = "same_kind"

    def __post_init__(self) -> None:
        axis_types = self.axis_types
        if isinstance(axis_types, Mapping):
            by_axis = {name: _axis_type(value) for name, value in axis_types.items()}
            object.__setattr__(self, "axis_types", MappingProxyType(by_axis))
        elif axis_types is not None:
            object.__setattr__(self, "axis_types", _axis_type(axis_types))
        if not isinstance(self.memory_kind, str) or not self.memory_kind:
            raise ValueError(f"memory_kind must be {RECORDED!r} or the name of a memory kind, not {self.memory_kind!r}")
        if self.cast not in get_args(Cast):
            raise ValueError(f"cast must be one of {list(get_args(Cast))}, not {self.cast!r}")

    def __hash__(self) -> int:
        types = frozenset(self.axis_types.items()) if isinstance(self.axis_types, Mapping) else self.axis_types
        return hash((types, self.memory_kind, self.cast))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and travels by its arguments: the read-only mapping does neither."""
        axis_types = dict(self.axis_types) if isinstance(self.axis_types, Mapping) else self.axis_types
        made = functools.partial(RestorePolicy, axis_types=axis_types, memory_kind=self.memory_kind, cast=self.cast)
        return made, ()

    def typed(self, axis_names: tuple[str, ...], recorded: tuple[AxisType, ...]) -> tuple[AxisType, ...]:
        """The axis types with which a recorded mesh is rebuilt."""
        if self.axis_types is None:
            return recorded
        if isinstance(self.axis_types, Mapping):
            by_axis = self.axis_types
            return tuple(by_axis.get(name, kind) for name, kind in zip(axis_names, recorded, strict=True))
        return (self.axis_types,) * len(axis_names)


def checked_policy(policy: RestorePolicy | None) -> RestorePolicy | None:
    """The same policy, where it is one.

    Raises:
        TypeError: It is something else.
    """
    if policy is None or isinstance(policy, RestorePolicy):
        return policy
    raise TypeError(f"policy must be a RestorePolicy, not {policy!r}")


def _axis_type(value: Any) -> AxisType:
    # jax.sharding.AxisType is an enum whose member names are our spellings but for the case; this floor may not
    # import it.
    name = str(getattr(value, "name", value)).lower()
    for kind in _RESTORABLE:
        if name == kind:
            return kind
    # A manual axis exists within jax.shard_map alone: no array can be placed on one from outside.
    raise ValueError(f"axis_types must be AxisType members or names among {_RESTORABLE}, not {value!r}")
