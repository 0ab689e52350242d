"""Recorded containers -> Python containers, without a target.

Tuples, lists, dicts with str and int keys and `None` come back as they were. A NamedTuple comes back as its
class only where that is certain: its module is already imported, the recorded name leads to a tuple subclass,
and its fields are the recorded ones. Nothing is ever imported because a file says so. Otherwise it comes back as
a dict, as does every other node that is registered with JAX; `container_notes` says which, and what to do.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from orbax_explicit._records import (
    ContainerRecord,
    Key,
    LeafPath,
    Tree,
    iterate_containers,
    path_text,
    plural,
)

PyTree: TypeAlias = Any


def rebuild_tree(tree: Tree, leaf: Callable[[LeafPath], Any], path: LeafPath = ()) -> PyTree:
    """The tree as it was, with `leaf(path)` at each leaf."""
    if not isinstance(tree, ContainerRecord):
        return leaf(path)
    children = [rebuild_tree(c, leaf, (*path, k)) for k, c in zip(tree.keys, tree.children, strict=True)]
    if tree.kind == "none":
        return None
    if tree.kind in ("list", "tuple"):
        return children if tree.kind == "list" else tuple(children)
    if tree.kind == "namedtuple" and (cls := find_namedtuple(tree)) is not None:
        return cls(*children)
    return _plain_node(tree.keys, children)


def storage_tree(tree: Tree, leaf: Callable[[LeafPath], Any], path: LeafPath = ()) -> PyTree:
    """The tree as Orbax stores it: dicts with str keys and lists only, with `leaf(path)` at each leaf.

    It has the leaf names, and the empty nodes, that Orbax's own tree has for the same state; so what stock Orbax
    would read from a checkpoint does not depend on which of the two it was given.
    """
    if not isinstance(tree, ContainerRecord):
        return leaf(path)
    if not tree.keys:
        return {"dict": {}, "list": [], "tuple": ()}.get(tree.kind)
    children = [storage_tree(c, leaf, (*path, k)) for k, c in zip(tree.keys, tree.children, strict=True)]
    plain = _plain_node(tree.keys, children)
    return {str(name): child for name, child in plain.items()} if isinstance(plain, dict) else plain


def _plain_node(keys: Sequence[Key], children: list[Any]) -> PyTree:
    names = [key.name for key in keys]
    if names and all(key.kind == "index" for key in keys) and names == list(range(len(names))):
        return children
    return dict(zip(names, children, strict=True))


def find_namedtuple(record: ContainerRecord) -> type[tuple[Any, ...]] | None:
    """The class of a recorded NamedTuple; None where it is not imported, or is not what was recorded."""
    found: Any = sys.modules.get(record.module)
    for name in record.qualname.split("."):
        # Not getattr: a module or a class may run code, or import more, when it is asked for a name.
        found = vars(found).get(name) if isinstance(found, type | types.ModuleType) else None
    fields = tuple(key.name for key in record.keys)
    if isinstance(found, type) and issubclass(found, tuple):
        declared = next((vars(cls)["_fields"] for cls in found.__mro__ if "_fields" in vars(cls)), None)
        if declared == fields:
            return found
    return None


def container_notes(tree: Tree) -> tuple[str, ...]:
    """Which containers come back as a dict or list without a target, and what to do; a sentence for each class."""
    by_class: dict[ContainerRecord, list[LeafPath]] = {}
    for path, container in iterate_containers(tree):
        if container.kind == "node" or (container.kind == "namedtuple" and find_namedtuple(container) is None):
            key = ContainerRecord(kind="node", module=container.module, qualname=container.qualname)
            if container.kind == "namedtuple":
                key = ContainerRecord(kind="namedtuple", module=container.module, qualname=container.qualname)
            by_class.setdefault(key, []).append(path)
    return tuple(_note(container, paths) for container, paths in by_class.items())


def _note(container: ContainerRecord, paths: list[LeafPath]) -> str:
    where = f"{plural(len(paths), 'node')}, first {path_text(paths[0])}"
    if container.kind == "node":
        return f"{container.class_text} comes back as a plain dict or list ({where}); restore into a target to keep it"
    if container.module in sys.modules:
        return f"{container.class_text} is not the class that was saved; it comes back as a dict ({where})"
    return f"{container.class_text} comes back as a dict ({where}); import {container.module} first to get the class"


def tree_of_paths(leaves: Mapping[LeafPath, Any]) -> Tree:
    """A tree with these leaves, where only their paths are known: dicts, lists, and nodes with attributes."""
    return _tree_of([(path, leaf) for path, leaf in leaves.items()], 0)


def _tree_of(leaves: list[tuple[LeafPath, Any]], depth: int) -> Tree:
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        leaf: Tree = leaves[0][1]
        return leaf
    groups: dict[Key, list[tuple[LeafPath, Any]]] = {}
    for path, leaf in leaves:
        groups.setdefault(path[depth], []).append((path, leaf))
    keys = tuple(groups)
    children = tuple(_tree_of(group, depth + 1) for group in groups.values())
    kinds = {key.kind for key in keys}
    if kinds == {"dict"}:
        return ContainerRecord(kind="dict", keys=keys, children=children)
    if kinds == {"index"} and [key.name for key in keys] == list(range(len(keys))):
        return ContainerRecord(kind="list", keys=keys, children=children)
    return ContainerRecord(kind="node", keys=keys, children=children, qualname="unknown")
