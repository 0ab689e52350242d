"""Which saved leaf becomes which leaf of the result: renames, and leaves that one side lacks.

Leaves are matched by the text of their keys, so that a class that was saved as attributes may come back into a dict, as
in stock Orbax. Where a leaf lands, and as what, is for `_planning`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from orbax_explicit import _refusals
from orbax_explicit._errors import Problem
from orbax_explicit._policy import LeafNames, RestorePolicy
from orbax_explicit._records import (
    ContainerRecord,
    Key,
    LeafPath,
    LeafRecord,
    Manifest,
    Tree,
    iterate_containers,
    iterate_leaves,
    path_names,
)
from orbax_explicit._targets import TargetRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A leaf of the result.

    Attributes:
        path: Its path in the result.
        source: Its path in the checkpoint; None where it is not to be read from there.
        recorded: What was saved there.
        target: What the target asks for; None for no target.
        renamed: The entry of `rename_leaves` that it follows, as path in the result and in the checkpoint; None for none.
        problem: Why it cannot be had at all; None where there is no such reason.
    """

    path: LeafPath
    source: LeafPath | None
    recorded: LeafRecord | None
    target: TargetRecord | None
    renamed: tuple[LeafNames, LeafNames] | None = None
    problem: Problem | None = None


@dataclass(slots=True, kw_only=True)
class Matching:
    """Both sides of a restore, brought together.

    Attributes:
        matches: One for each leaf of the result, in tree order.
        left_out: Saved leaves that are no part of the result.
        extra: Those of them that were not to be left out, which is a problem.
        tree: The tree of the result, where there is no target.
        problems: What is wrong with the policy, and no leaf of the result alone.
    """

    matches: list[Match] = field(default_factory=list)
    left_out: list[LeafPath] = field(default_factory=list)
    extra: list[LeafPath] = field(default_factory=list)
    tree: Tree | None = None
    problems: list[Problem] = field(default_factory=list)


def match_leaves(
    manifest: Manifest, targets: Mapping[LeafPath, TargetRecord] | None, policy: RestorePolicy
) -> Matching:
    """Brings the saved leaves and those of the result together.

    Args:
        manifest: What was saved.
        targets: What each leaf of the target asks for, by its path; None for no target.
        policy: The caller's choices: `rename_leaves`, `missing` and `extra` count.
    """
    renames: Mapping[LeafNames, LeafNames] = policy.rename_leaves
    if targets is None and not renames:
        matches = [Match(path=p, source=p, recorded=leaf, target=None) for p, leaf in manifest.leaves.items()]
        return Matching(matches=matches, tree=manifest.tree)
    saved = {path_names(path): (path, leaf) for path, leaf in manifest.leaves.items()}
    below = {names[:length] for names in saved for length in range(1, len(names) + 1)} if renames else set()
    lost = {result: source for result, source in renames.items() if source not in below}
    found = Matching(problems=[_refusals.renamed_leaf_is_not_saved(*renaming) for renaming in lost.items()])
    if targets is None:
        kept = {result: source for result, source in renames.items() if result not in lost}
        _rearrange(found, manifest.tree, saved, kept)
    else:
        _follow_target(found, manifest.tree, saved, targets, policy, lost)
    return found


_Saved: TypeAlias = Mapping[LeafNames, tuple[LeafPath, LeafRecord]]


def _rearrange(found: Matching, tree: Tree, saved: _Saved, renames: Mapping[LeafNames, LeafNames]) -> None:
    """Matches the leaves of the recorded tree, when it has been rearranged."""
    found.tree, stuck = _moved(tree, renames)
    if stuck:
        # Refused as a whole, with the leaves as they were.
        found.tree, renames = tree, {}
    found.problems += stuck
    for path, leaf in iterate_leaves(found.tree):
        names = path_names(path)
        source, _ = saved[_source(names, renames)]
        found.matches.append(
            Match(path=path, source=source, recorded=leaf, target=None, renamed=_renaming(names, renames))
        )


def _follow_target(
    found: Matching,
    tree: Tree,
    saved: _Saved,
    targets: Mapping[LeafPath, TargetRecord],
    policy: RestorePolicy,
    lost: Mapping[LeafNames, LeafNames],
) -> None:
    """Matches the leaves of a target; `lost` are the renames from where nothing is saved."""
    renames: Mapping[LeafNames, LeafNames] = policy.rename_leaves
    nodes: set[LeafNames] = set()
    if any(target.placeholder for target in targets.values()):
        nodes = {path_names(path) for path, _ in iterate_containers(tree)} | set(saved)
    used: set[LeafNames] = set()
    skipped: set[LeafNames] = set()
    applied: set[LeafNames] = set()
    for path, target in targets.items():
        names = path_names(path)
        renaming = _renaming(names, renames)
        source = _source(names, renames)
        if renaming is not None:
            applied.add(renaming[0])
        known = saved.get(source)
        if target.placeholder and source in nodes:  # For a leaf, or for all that is below.
            skipped.update(other for other in saved if other[: len(source)] == source)
            found.matches.append(Match(path=path, source=None, recorded=None, target=target))
        elif known is not None:
            used.add(source)
            found.matches.append(Match(path=path, source=known[0], recorded=known[1], target=target, renamed=renaming))
        else:
            problem = _missing_problem(target, policy)
            if renaming is not None and renaming[0] in lost:
                problem = _refusals.renamed_leaf_is_not_saved(*renaming)
            found.matches.append(Match(path=path, source=None, recorded=None, target=target, problem=problem))
    unused = (renaming for renaming in renames.items() if renaming[0] not in applied and renaming[0] not in lost)
    found.problems += [_refusals.renamed_leaf_is_not_wanted(*renaming) for renaming in unused]
    for names, (path, _) in saved.items():
        if names not in used:
            found.left_out.append(path)
            if names not in skipped and policy.extra == "error":
                found.extra.append(path)


def _missing_problem(target: TargetRecord, policy: RestorePolicy) -> Problem | None:
    if policy.missing == "error":
        return _refusals.leaves_are_missing()
    return None if target.keepable else _refusals.leaves_have_no_value()


def _renaming(names: LeafNames, renames: Mapping[LeafNames, LeafNames]) -> tuple[LeafNames, LeafNames] | None:
    """The entry that a leaf of the result follows: the one for the longest path that it is, or is below."""
    if not renames:
        return None
    lengths = range(len(names), 0, -1)
    return next(((names[:n], renames[names[:n]]) for n in lengths if names[:n] in renames), None)


def _source(names: LeafNames, renames: Mapping[LeafNames, LeafNames]) -> LeafNames:
    """The text of the keys under which a leaf of the result is saved."""
    renaming = _renaming(names, renames)
    return names if renaming is None else renaming[1] + names[len(renaming[0]) :]


# Moving leaves and subtrees of the recorded tree, where no target says what the result looks like.


class _Immovable(Exception):
    """Control flow of a move: why it cannot be made."""


_GONE = ContainerRecord(kind="none")
"""What stands where a subtree was, known by its identity: its key, and the dict around it, may yet be needed."""


def _moved(tree: Tree, renames: Mapping[LeafNames, LeafNames]) -> tuple[Tree, list[Problem]]:
    """The tree with each subtree at its new place, and what cannot be moved."""
    if not renames:
        return tree, []
    problems: list[Problem] = []
    taken: list[tuple[LeafNames, Tree]] = []
    for result, source in sorted(renames.items(), key=lambda item: -len(item[1])):
        try:
            tree, subtree = _detached(tree, source)
            taken.append((result, subtree))
        except _Immovable as why:
            problems.append(_refusals.leaf_cannot_be_moved(result, source, str(why)))
    for result, subtree in sorted(taken, key=lambda item: len(item[0])):
        try:
            tree = _attached(tree, result, subtree)
        except _Immovable as why:
            problems.append(_refusals.leaf_cannot_be_moved(result, renames[result], str(why)))
    return _pruned(tree), problems


def _detached(tree: Tree, names: LeafNames) -> tuple[Tree, Tree]:
    """The tree without a subtree, and that subtree."""
    children = dict(_children(tree, names[0], moves=len(names) == 1))
    key = next(key for key in children if str(key.name) == names[0])
    if not any(iterate_leaves(children[key])):
        raise _Immovable("another entry of rename_leaves moves it too")
    if len(names) == 1:
        children[key], subtree = _GONE, children[key]
    else:
        children[key], subtree = _detached(children[key], names[1:])
    assert isinstance(tree, ContainerRecord)
    return dataclasses.replace(tree, keys=tuple(children), children=tuple(children.values())), subtree


def _attached(tree: Tree, names: LeafNames, subtree: Tree) -> Tree:
    """The tree with a subtree at a new place, within new dicts where need be."""
    children = dict(_children(tree, names[0], moves=False))
    key = next((key for key in children if str(key.name) == names[0]), None)
    if key is None or len(names) == 1:
        _children(tree, names[0], moves=True)
    if key is None:
        ints = bool(children) and all(isinstance(key.name, int) for key in children)
        if ints and not re.fullmatch(r"0|-?[1-9][0-9]*", names[0]):
            raise _Immovable(f"the keys beside {names[0]!r} are int")
        key = Key("dict", int(names[0]) if ints else names[0])
        children[key] = _nested(names[1:], subtree)
    elif children[key] is _GONE or (len(names) == 1 and _is_emptied(children[key])):
        children[key] = _nested(names[1:], subtree)
    elif len(names) == 1:
        raise _Immovable(f"there is something at {names[0]!r} already")
    else:
        children[key] = _attached(children[key], names[1:], subtree)
    assert isinstance(tree, ContainerRecord)
    # As JAX flattens a dict; keys of both types, which it could not, stand apart.
    ordered = list(children)
    if tree.kind == "dict":
        ordered.sort(key=lambda key: (isinstance(key.name, str), key.name))
    return dataclasses.replace(tree, keys=tuple(ordered), children=tuple(children[key] for key in ordered))


def _nested(names: LeafNames, subtree: Tree) -> Tree:
    for name in reversed(names):
        subtree = ContainerRecord(kind="dict", keys=(Key("dict", name),), children=(subtree,))
    return subtree


def _pruned(tree: Tree) -> Tree:
    """The tree without what is gone, and without dicts that nothing is left in because of it."""
    if not isinstance(tree, ContainerRecord):
        return tree
    # Only a dict can lose an entry.
    kept = {
        key: _pruned(child)
        for key, child in zip(tree.keys, tree.children, strict=True)
        if tree.kind != "dict" or not _is_emptied(child)
    }
    return dataclasses.replace(tree, keys=tuple(kept), children=tuple(kept.values()))


def _is_emptied(tree: Tree) -> bool:
    """Whether a subtree is gone, or a dict in which nothing is left because of what is gone."""
    return _lost_something(tree) and not any(iterate_leaves(tree))


def _lost_something(tree: Tree) -> bool:
    return tree is _GONE or (isinstance(tree, ContainerRecord) and any(map(_lost_something, tree.children)))


def _children(tree: Tree, name: str, *, moves: bool) -> Iterator[tuple[Key, Tree]]:
    """The children of a container, of which one is to be entered, or is to come or go: only a dict can lose or gain one."""
    if not isinstance(tree, ContainerRecord):
        raise _Immovable(f"{name!r} would be within a leaf")
    if tree.kind == "none":
        raise _Immovable(f"{name!r} would be within None")
    if moves and tree.kind != "dict":
        raise _Immovable(f"{name!r} is in a {tree.class_text or tree.kind}, which keeps its entries")
    return zip(tree.keys, tree.children, strict=True)
