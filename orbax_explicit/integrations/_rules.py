"""Rules: which spec a parameter gets, from its name, its shape and the order of access."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from jax.sharding import PartitionSpec as P

Unmatched: TypeAlias = Literal["error", "ignore"]
"""What becomes of an expression that is found in no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What a rule is told of a parameter, or of an entry of state.

    Attributes:
        name: The module's name and its own, as in the tree that `init` returns: `mlp/~/linear_0/w`. Of an entry of state
            that is a tree, with the keys of the leaf behind.
        shape: The shape that its module asked for; of a stack of layers, that of one layer.
        dtype: The dtype that its module asked for.
        index: How many parameters were accessed before it; of an entry of state, how many entries.
        matrix_index: How many of those are matrices.
        axis_sizes: The size of each axis of the mesh, by name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    index: int
    matrix_index: int
    axis_sizes: Mapping[str, int]

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions, of more than one element each: what is `(1, n)` to broadcast is no matrix."""
        return len(self.shape) == 2 and min(self.shape) > 1


Rule: TypeAlias = Callable[[Parameter], P | None]
"""Gives the spec of a parameter; None where it has nothing to say."""


def replicated(parameter: Parameter) -> P:
    """Every device has the whole parameter. As `used`: gathered for each use, as in fully sharded data parallelism."""
    del parameter
    return P()


def alternate(axis: str) -> Rule:
    """Splits every other matrix by columns, the first one so, and those between by rows.

    In a chain of layers the product with the one, whose columns are split, is what the product with the other, whose rows
    are, wants. Matrices that are used side by side, such as those of attention, are better told apart `by_name`.
    """

    def rule(parameter: Parameter) -> P | None:
        if not parameter.is_matrix:
            return None
        return P(axis, None) if parameter.matrix_index % 2 else P(None, axis)

    return rule


def by_name(rules: Sequence[tuple[str, P]], *, unmatched: Unmatched = "error") -> Rule:
    """Gives the spec of the first pair whose regular expression `re.search` finds in the full name.

    Args:
        rules: Pairs of an expression and a spec.
        unmatched: Where an expression is found in the name of nothing that `init` makes: `"error"`, or `"ignore"` for
            rules that serve several models.

    Raises:
        ValueError: Something in them is no such pair.
    """
    if unmatched not in get_args(Unmatched):
        raise ValueError(f"unmatched must be one of {list(get_args(Unmatched))}, not {unmatched!r}")
    return _ByName(tuple(map(_compiled, rules)), unmatched)


def largest_dimension(axis: str, *, min_size: int = 1) -> Rule:
    """Splits the largest of the dimensions that the axis divides, the last of equals.

    Args:
        axis: The axis.
        min_size: The least number of elements of a parameter that is worth to be split.
    """

    def rule(parameter: Parameter) -> P | None:
        # An axis that the mesh lacks divides whatever there is: the spec that names it is refused, and says so.
        shape, size = parameter.shape, parameter.axis_sizes.get(axis, 1)
        divided = [dimension for dimension, length in enumerate(shape) if length and length % size == 0]
        if not divided or math.prod(shape) < min_size:
            return None
        largest = max(divided, key=lambda dimension: (shape[dimension], dimension))
        return P(*(axis if dimension == largest else None for dimension in range(len(shape))))

    return rule


def first_of(*rules: Rule) -> Rule:
    """Gives what the first rule says that has something to say."""
    return _FirstOf(rules)


def unmatched_expressions(rule: Rule, names: Collection[str]) -> Iterable[str]:
    """The expressions of a rule that are found in none of the names, and are to be."""
    match rule:
        case _FirstOf(rules=rules):
            for each in rules:
                yield from unmatched_expressions(each, names)
        case _ByName(rules=pairs, unmatched="error"):
            yield from (expression.pattern for expression, _ in pairs if not any(map(expression.search, names)))


@dataclass(frozen=True, slots=True)
class _ByName:
    rules: tuple[tuple[re.Pattern[str], P], ...]
    unmatched: Unmatched

    def __call__(self, parameter: Parameter) -> P | None:
        return next((spec for expression, spec in self.rules if expression.search(parameter.name)), None)


@dataclass(frozen=True, slots=True)
class _FirstOf:
    rules: tuple[Rule, ...]

    def __call__(self, parameter: Parameter) -> P | None:
        return next((spec for rule in self.rules if (spec := rule(parameter)) is not None), None)


def _compiled(pair: Any) -> tuple[re.Pattern[str], P]:
    match pair:
        case (str() as expression, P() as spec):
            try:
                return re.compile(expression), spec
            except re.error as error:
                raise ValueError(f"by_name has {expression!r}, which is no regular expression: {error}") from error
    raise ValueError(f"by_name wants pairs of a regular expression and a PartitionSpec, not {pair!r}")
