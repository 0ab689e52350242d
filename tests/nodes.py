"""Nodes that are registered with JAX, and trees of every kind of container."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
from hypothesis import strategies as st
from trees import Moments, Nothing


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """A node whose children have the keys that it is given."""

    def __init__(self, *children: tuple[Any, Any]) -> None:
        self.children = children

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return list(self.children), tuple(key for key, _ in self.children)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Any, ...], children: Any) -> Keyed:
        return cls(*zip(keys, children, strict=True))


@jax.tree_util.register_pytree_node_class
class Plain:
    """A node without keys of its own: JAX numbers its children."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Plain:
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A dataclass that is a node."""

    w: Any
    b: Any


Registered = collections.namedtuple("Registered", "x y")
jax.tree_util.register_pytree_node(
    Registered, lambda node: (tuple(node), None), lambda _, children: Registered(*children)
)


@st.composite
def host_trees(draw: st.DrawFn, depth: int = 3) -> Any:
    """Trees of every container kind, with ints for leaves."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.integers(-5, 5))
    children = draw(st.lists(host_trees(depth=depth - 1), max_size=3))
    names = st.lists(st.sampled_from(["a", "b", "c0", "", "z/y"]), min_size=3, max_size=3, unique=True)
    match draw(st.integers(0, 8)):
        case 0:
            return children
        case 1:
            return tuple(children)
        case 2:
            return dict(zip(draw(names), children, strict=False))
        case 3:
            return dict(zip(draw(st.permutations([0, 1, 10, -3])), children, strict=False))
        case 4:
            return Moments(*(*children, None, None)[:2])
        case 5:
            return Plain(*children)
        case 6:
            return Layer(*(*children, 0, {})[:2])
        case 7:
            return collections.OrderedDict(zip(draw(names), children, strict=False))
        case _:
            return draw(st.sampled_from([None, Nothing()]))
