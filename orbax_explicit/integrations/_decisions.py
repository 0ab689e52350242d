"""How each parameter lies and is used: decided once, from what `init` accesses, and remembered by name.

The parameters that a trace of `init` makes are numbered from 0, so that another trace of it, on another mesh too, comes to
the same. What it makes takes the place of what was known by these names; other names stay. A trace that fails leaves nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec as P

from orbax_explicit._policy import Indivisible
from orbax_explicit.integrations._laying_out import AnyMesh, Unfit, fitting
from orbax_explicit.integrations._rules import Parameter, Rule, unmatched_expressions


class Name(NamedTuple):
    """What something is called.

    Attributes:
        module: The name of its module; of what `hk.lift` lifts, within the function that is lifted.
        own: Its own name.
        prefix: What `hk.lift` puts before the name, which it tells `init` alone: `apply` knows the name within.
        keys: The keys of the leaf, where an entry of state is a tree.
    """

    module: str
    own: str
    prefix: str = ""
    keys: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All of it, as rules see it."""
        return "/".join((self.prefix + self.module, self.own, *self.keys))

    @property
    def in_tree(self) -> Name:
        """As in the tree that `init` returns."""
        return Name(self.prefix + self.module, self.own, keys=self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one parameter, or entry of state, is placed.

    Attributes:
        parameter: What it was decided from.
        stored: How it lies.
        used: How its module sees it.
    """

    parameter: Parameter
    stored: P
    used: P

    def fitting(self, spec: P, mesh: AnyMesh, indivisible: Indivisible) -> P:
        """One of the two, as it fits the mesh.

        Raises:
            Unfit: It does not.
        """
        return fitting(self.parameter.name, self.parameter.shape, spec, mesh, indivisible)


_Sizes: TypeAlias = tuple[tuple[str, int], ...]


class Decisions:
    """What has been decided.

    Args:
        stored: The rule for how something lies.
        used: The rule for how it is used; None for as it lies.
        reshapes: Whether something may have another shape when it is accessed again, as state may.
    """

    def __init__(self, stored: Rule, used: Rule | None = None, *, reshapes: bool = False) -> None:
        for name, rule in (("stored" if not reshapes else "state", stored), ("used", used)):
            if rule is not None and not callable(rule):
                raise TypeError(f"{name} must be a rule, such as alternate(axis), not {rule!r}")
        self.stored = stored
        self.used = used
        self.reshapes = reshapes
        self.parameters: dict[Name, Parameter] = {}
        self.lifted: dict[Name, dict[Name, None]] = {}  # in order, each once
        self._decided: dict[tuple[Name, tuple[int, ...], _Sizes], Decision] = {}

    def find(self, name: Name, shape: tuple[int, ...], mesh: AnyMesh) -> Decision | None:
        """What was decided of what `init` returns by this name; None of a name that has not been accessed."""
        known = self.parameters.get(name)
        if known is None:
            return None
        return self.decision(name, dataclasses.replace(known, shape=shape) if self.reshapes else known, mesh)

    def access(self, *, is_init: bool) -> Access:
        """What one call of the function accesses."""
        return Access(self, is_init=is_init)

    def decision(self, name: Name, parameter: Parameter, mesh: AnyMesh) -> Decision:
        """What the rules say, which are asked once of a name, a shape and a mesh."""
        sizes = tuple(mesh.shape.items())
        parameter = dataclasses.replace(parameter, axis_sizes=dict(sizes))
        key = (name, parameter.shape, sizes)
        known = self._decided.get(key)
        if known is not None and known.parameter == parameter:
            return known
        stored = _said(self.stored, parameter)
        used = _said(self.used, parameter) if self.used is not None else None
        stored = P() if stored is None else stored
        decision = Decision(parameter=parameter, stored=stored, used=stored if used is None else used)
        self._decided[key] = decision
        return decision


class Access:
    """What one call of a function accesses: in `init` numbered from 0, in `apply` what is known from `init`."""

    def __init__(self, decisions: Decisions, *, is_init: bool) -> None:
        self._of = decisions
        self._is_init = is_init
        self._parameters = {} if is_init else dict(decisions.parameters)
        self._lifted: dict[Name, dict[Name, None]] = {} if is_init else decisions.lifted
        self._matrices = sum(parameter.is_matrix for parameter in self._parameters.values())

    def decide(
        self, name: Name, shape: tuple[int, ...], dtype: Any, mesh: AnyMesh, *, is_whole_name: bool
    ) -> tuple[Decision, ...]:
        """How something lies that is accessed.

        Args:
            name: Its name.
            shape: The shape that its module asked for.
            dtype: The dtype that its module asked for.
            mesh: The mesh.
            is_whole_name: Whether the name has its prefix, as in an `init`.

        Returns:
            The decision; several where `hk.lift` has lifted several by one name.

        Raises:
            Unfit: It had another shape before.
        """
        names = [name.in_tree, *(() if is_whole_name else self._lifted.get(name, ()))]
        known = [each for each in names if each in self._parameters]
        if not known:
            self._add(name, shape, dtype)
            known = [name.in_tree]
        parameters = {each: self._parameters[each] for each in known}
        if self._of.reshapes:
            parameters = {each: dataclasses.replace(known, shape=shape) for each, known in parameters.items()}
        same = {each: parameter for each, parameter in parameters.items() if parameter.shape == shape}
        if not same:
            raise Unfit(self._other_shape(name, shape, next(iter(parameters.values())).shape))
        return tuple(self._of.decision(each, parameter, mesh) for each, parameter in same.items())

    def _add(self, name: Name, shape: tuple[int, ...], dtype: Any) -> None:
        parameter = Parameter(
            name=name.text,
            shape=shape,
            dtype=dtype,
            index=len(self._parameters),
            matrix_index=self._matrices,
            axis_sizes={},  # Those of the mesh, when the rules are asked.
        )
        self._parameters[name.in_tree] = parameter
        self._matrices += parameter.is_matrix
        if name.prefix:
            self._lifted.setdefault(name._replace(prefix=""), {})[name.in_tree] = None

    def _other_shape(self, name: Name, shape: tuple[int, ...], before: tuple[int, ...]) -> str:
        if self._is_init:
            return (
                f"{name.text} has the shape {shape} and the shape {before}; lift an inner transform by `hk.lift`, or name apart "
                "what it makes"
            )
        return (
            f"{name.text} has the shape {shape}, and had {before} when `init` made it; a Placement is for one model, whose "
            "`init` it has traced"
        )

    def unmatched(self) -> list[str]:
        """What is wrong with the rules, when all of an `init` has been accessed: expressions that are found in no name."""
        names = [parameter.name for parameter in self._parameters.values()]
        if not self._is_init or not names:
            return []
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return [
            f'{expression!r} is found in none of the names {shown}; correct it, or pass unmatched="ignore" to by_name'
            for rule in (self._of.stored, self._of.used)
            if rule is not None
            for expression in unmatched_expressions(rule, names)
        ]

    def keep(self) -> None:
        """Has later calls know what this one has accessed."""
        self._of.parameters.update(self._parameters)
        for within, lifted in self._lifted.items():
            self._of.lifted.setdefault(within, {}).update(lifted)


def _said(rule: Rule, parameter: Parameter) -> P | None:
    spec = rule(parameter)
    if spec is not None and not isinstance(spec, P):
        raise TypeError(f"a rule must give a PartitionSpec or None, and gave {spec!r} for {parameter.name}")
    return spec
