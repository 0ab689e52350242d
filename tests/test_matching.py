"""`_matching`: which saved leaf becomes which leaf of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from plans import HERE, wanted

from orbax_explicit import RestorePlan, RestorePolicy
from orbax_explicit._containers import rebuild_tree
from orbax_explicit._outcomes import Kept, NotPlaced, OnHost
from orbax_explicit._planning import TargetRecord, plan_from_records
from orbax_explicit._records import ContainerRecord, Key, LeafPath, Manifest, Tree, ValueRecord, path_text

NUMBER = ValueRecord(type="int", dtype="int64")
ANY = TargetRecord()


def recorded(tree: Any) -> Tree:
    """The record of a tree of dicts, lists, tuples, Nones and numbers, in the order in which JAX flattens it."""
    if tree is None:
        return ContainerRecord(kind="none")
    if isinstance(tree, dict):
        names = sorted(tree)
        children = tuple(recorded(tree[name]) for name in names)
        return ContainerRecord(kind="dict", keys=tuple(Key("dict", name) for name in names), children=children)
    if isinstance(tree, list | tuple):
        keys = tuple(Key("index", i) for i in range(len(tree)))
        return ContainerRecord(kind=type(tree).__name__, keys=keys, children=tuple(map(recorded, tree)))
    return NUMBER


def text_path(text: str) -> LeafPath:
    """A path through dicts, of the text of its keys."""
    return tuple(Key("dict", name) for name in text.split("/"))


def plan_of(tree: Any, targets: Mapping[str, TargetRecord] | None = None, **choices: Any) -> RestorePlan:
    """The plan of a tree of numbers; leaves of the target go by the text of their paths."""
    by_path = None if targets is None else {text_path(name): target for name, target in targets.items()}
    return plan_from_records(Manifest(tree=recorded(tree), inventory=HERE), by_path, HERE, RestorePolicy(**choices))


def sources(plan: RestorePlan) -> dict[str, str | None]:
    """Path in the result -> path in the checkpoint, where the leaf is read."""
    return {path_text(o.path): None if o.source is None else path_text(o.source) for o in plan.outcomes}


def result(plan: RestorePlan) -> Any:
    """The tree of the result, with the path in the checkpoint at each leaf."""
    assert plan.tree is not None
    return rebuild_tree(plan.tree, lambda leaf: path_text(plan.by_path[leaf].source))


def could_nots(plan: RestorePlan) -> dict[str, tuple[str, ...]]:
    """Each problem, with what it affects."""
    return {problem.could_not: problem.affects for problem in plan.refused}


# Renaming without a target: the recorded tree, rearranged.


@pytest.mark.parametrize(
    ("tree", "renames", "expected"),
    [
        pytest.param({"old": 1, "z": 2}, {"new": "old"}, {"new": "old", "z": "z"}, id="a leaf gets another name"),
        pytest.param(
            {"a": {"b": 1, "c": 2}, "z": 3},
            {"params": "a"},
            {"params": {"b": "a/b", "c": "a/c"}, "z": "z"},
            id="a subtree gets another name",
        ),
        pytest.param(
            {"a": {"b": 1, "c": 2}},
            {"b": "a/b"},
            {"a": {"c": "a/c"}, "b": "a/b"},
            id="a leaf moves up, and its neighbours stay",
        ),
        pytest.param({"w": 1}, {"x/y/w": "w"}, {"x": {"y": {"w": "w"}}}, id="a leaf moves into dicts that are new"),
        pytest.param(
            {"w": 1, "x": {"z": 2}}, {"x/y/w": "w"}, {"x": {"y": {"w": "w"}, "z": "x/z"}}, id="and into one that is not"
        ),
        pytest.param({"a": 1, "b": 2}, {"a": "b", "b": "a"}, {"a": "b", "b": "a"}, id="two leaves swap"),
        pytest.param(
            {"l": {0: 1, 1: 2}},
            {"l/0": "l/1", "l/1": "l/0"},
            {"l": {0: "l/1", 1: "l/0"}},
            id="all leaves of a dict with int keys swap, and the keys stay int",
        ),
        pytest.param(
            {"a": {"x": 1}, "b": {"x": 2}},
            {"a/x": "b/x", "b/x": "a/x"},
            {"a": {"x": "b/x"}, "b": {"x": "a/x"}},
            id="the only leaves of two dicts swap",
        ),
        pytest.param(
            {"a": {"x": 1, "y": 2}},
            {"b": "a", "c": "a/y"},
            {"b": {"x": "a/x"}, "c": "a/y"},
            id="a subtree moves without a part of it that moves elsewhere",
        ),
        pytest.param(
            {"a": {"x": 1}, "y": 2},
            {"b": "a", "b/y": "y"},
            {"b": {"x": "a/x", "y": "y"}},
            id="a leaf moves into a subtree that moves too",
        ),
        pytest.param({"a": {"x": 1}}, {"a/b/x": "a/x"}, {"a": {"b": {"x": "a/x"}}}, id="a leaf moves further down"),
        pytest.param({"a": {"x": 1}}, {"a/b": "a"}, {"a": {"b": {"x": "a/x"}}}, id="a subtree moves within itself"),
        pytest.param({"a": {"a": 1}}, {"a": "a/a"}, {"a": "a/a"}, id="a leaf takes the place of its own dict"),
        pytest.param({0: 1, 1: 2}, {"7": "0"}, {1: "1", 7: "0"}, id="beside int keys a key is an int"),
        pytest.param({0: 1, 1: 2}, {(-3,): (0,)}, {-3: "0", 1: "1"}, id="and in a tuple of keys it is written so"),
        pytest.param({"a/b": 1}, {("c/d",): ("a/b",)}, {"c/d": "a/b"}, id="keys with slashes go in tuples"),
        pytest.param({"a": {"x": 1}, "b": 2}, {"c": "a/x"}, {"b": "b", "c": "a/x"}, id="a dict that is emptied goes"),
        pytest.param(
            {"a": {"b": {"x": 1}}, "c": 2}, {"d": "a/b/x"}, {"c": "c", "d": "a/b/x"}, id="and the dict around it"
        ),
        pytest.param(
            {"a": {}, "b": {"x": 1, "n": {}}, "n": None},
            {"c": "b/x"},
            {"a": {}, "c": "b/x", "n": None},
            id="a dict that was saved empty stays, outside of one that goes",
        ),
        pytest.param(
            {"t": ({"x": 1, "y": 2}, [3])},
            {"u": "t"},
            {"u": ({"x": "t/0/x", "y": "t/0/y"}, ["t/1/0"])},
            id="a tuple moves as a whole",
        ),
        pytest.param(
            {"opt": ({"mu": {"old": 1, "z": 2}}, [{"old": 3}]), "w": 4},
            {"opt/0/mu/new": "opt/0/mu/old", "opt/1/0/new": "opt/1/0/old"},
            {"opt": ({"mu": {"new": "opt/0/mu/old", "z": "opt/0/mu/z"}}, [{"new": "opt/1/0/old"}]), "w": "w"},
            id="an entry of a dict within a tuple or a list gets another name",
        ),
        pytest.param(
            {"t": ({"x": 1}, {"y": 2})},
            {"x": "t/0/x"},
            {"t": ({}, {"y": "t/1/y"}), "x": "t/0/x"},
            id="a dict that is emptied within a tuple stays, for the tuple keeps its entries",
        ),
    ],
)
def test_without_a_target_the_recorded_tree_is_rearranged(tree, renames, expected):
    """Containers and leaves; the plan says which path each leaf is read from."""
    plan = plan_of(tree, rename_leaves=renames)
    assert plan.refused == ()
    assert result(plan) == expected
    assert {path_text(o.path): o.notes for o in plan.outcomes if o.notes} == _notes(plan, renames)


def _notes(plan: RestorePlan, renames: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """What the plan says of each leaf that is read from another path: the entry, of several the longest."""
    texts = {
        name if isinstance(name, str) else "/".join(map(str, name)): old
        if isinstance(old, str)
        else "/".join(map(str, old))
        for name, old in renames.items()
    }
    found = {}
    for new in map(path_text, (outcome.path for outcome in plan.outcomes)):
        entries = [name for name in texts if new == name or new.startswith(f"{name}/")]
        if entries:
            entry = max(entries, key=len)
            found[new] = (f"{entry} is read from {texts[entry]}",)
    return found


def test_a_tree_without_renames_is_the_recorded_one():
    """The very record, and not a copy of it."""
    saved = Manifest(tree=recorded({"a": {}, "b": [1, (2,)]}), inventory=HERE)
    assert plan_from_records(saved, None, HERE).tree is saved.tree


@pytest.mark.parametrize(
    ("tree", "renames", "could_not"),
    [
        pytest.param({"a": 1}, {"x": "b"}, "cannot read x from b, as rename_leaves says", id="from where nothing is"),
        pytest.param(
            {"a": 1, "b": 2},
            {"a": "b"},
            "cannot move b to a, as rename_leaves says: there is something at 'a' already",
            id="to where something is",
        ),
        pytest.param(
            {"a": [1, 2], "b": 3},
            {"c": "a/0"},
            "cannot move a/0 to c, as rename_leaves says: '0' is in a list, which keeps its entries",
            id="out of a list",
        ),
        pytest.param(
            {"a": (1, 2), "b": 3},
            {"a/2": "b"},
            "cannot move b to a/2, as rename_leaves says: '2' is in a tuple, which keeps its entries",
            id="into a tuple",
        ),
        pytest.param(
            {"a": 1, "b": 2},
            {"a/x": "b"},
            "cannot move b to a/x, as rename_leaves says: 'x' would be within a leaf",
            id="into a leaf",
        ),
        pytest.param(
            {"a": 1, "b": 2},
            {"x": "a", "y": "a"},
            "cannot move a to y, as rename_leaves says: another entry of rename_leaves moves it too",
            id="one leaf to two places",
        ),
        pytest.param(
            {"a": {"x": 1}, "b": 2},
            {"x": "a/x", "y": "a"},
            "cannot move a to y, as rename_leaves says: another entry of rename_leaves moves it too",
            id="a subtree of which all leaves move elsewhere",
        ),
        pytest.param(
            {"l": {0: 1, 1: 2}, "w": 3},
            {"l/x": "w"},
            "cannot move w to l/x, as rename_leaves says: the keys beside 'x' are int",
            id="a name among int keys",
        ),
        pytest.param(
            {"l": {0: 1, 1: 2}, "w": 3},
            {"l/01": "w"},
            "cannot move w to l/01, as rename_leaves says: the keys beside '01' are int",
            id="a number that is not written as one, and would hide another leaf",
        ),
        pytest.param(
            {"l": {0: 1, 1: 2}, "w": 3},
            {"l/²": "w"},
            "cannot move w to l/², as rename_leaves says: the keys beside '²' are int",
            id="a digit that is no number",
        ),
    ],
)
def test_without_a_target_a_leaf_cannot_be_moved(tree, renames, could_not):
    """One problem, about the policy; the leaves are planned where they were, so that the rest can be read."""
    plan = plan_of(tree, rename_leaves=renames)
    assert could_nots(plan) == {could_not: ()}
    assert result(plan) == result(plan_of(tree))


# Renaming with a target: where each of its leaves is read from.


@pytest.mark.parametrize(
    ("tree", "targets", "renames", "expected"),
    [
        pytest.param({"old": 1}, ["new"], {"new": "old"}, {"new": "old"}, id="a leaf"),
        pytest.param({"a": {"b": 1, "c": 2}}, ["p/b", "p/c"], {"p": "a"}, {"p/b": "a/b", "p/c": "a/c"}, id="a subtree"),
        pytest.param({"a": 1, "b": 2}, ["a", "b"], {"a": "b", "b": "a"}, {"a": "b", "b": "a"}, id="a swap"),
        pytest.param(
            {"a": {"x": 1, "y": 2}, "b": 3},
            ["p/x", "p/y"],
            {"p": "a", "p/y": "b"},
            {"p/x": "a/x", "p/y": "b"},
            id="the longest path that matches wins",
        ),
        pytest.param(
            {"a": 1}, ["x", "y"], {"x": "a", "y": "a"}, {"x": "a", "y": "a"}, id="a saved leaf for two leaves"
        ),
        pytest.param(
            {"a": {"x": 1}},
            ["ema/x", "a/x"],
            {"ema": "a"},
            {"ema/x": "a/x", "a/x": "a/x"},
            id="a saved subtree for its own place and another",
        ),
        pytest.param({"l": {0: 1}}, ["m/0"], {("m", 0): ("l", 0)}, {"m/0": "l/0"}, id="int keys in a tuple"),
        pytest.param({"l": [1, 2]}, ["x"], {"x": "l/1"}, {"x": "l/1"}, id="a leaf of a list"),
        pytest.param({"a": {"b": 1}}, ["b"], {"b": "a/b"}, {"b": "a/b"}, id="a leaf of another depth"),
    ],
)
def test_with_a_target_leaves_are_read_from_elsewhere(tree, targets, renames, expected):
    """In the target's order; the plan says so of each."""
    plan = plan_of(tree, dict.fromkeys(targets, ANY), rename_leaves=renames, extra="ignore")
    assert plan.refused == ()
    assert sources(plan) == expected
    assert plan.tree is None
    assert {path_text(o.path): o.notes for o in plan.outcomes if o.notes} == _notes(plan, renames)


def test_keys_with_slashes_are_not_paths():
    """`("a/b",)` is one key, `"a/b"` two."""
    saved = Manifest(tree=recorded({"a/b": 1, "a": {"b": 2}}), inventory=HERE)
    policy = RestorePolicy(rename_leaves={"one": ("a/b",), "two": "a/b"})
    plan = plan_from_records(saved, {text_path("one"): ANY, text_path("two"): ANY}, HERE, policy)
    assert plan.refused == ()
    assert [len(outcome.source) for outcome in plan.outcomes] == [1, 2]


def test_a_saved_leaf_read_into_two_leaves_is_counted_twice():
    """It is read twice, and lands twice."""
    plan = plan_of({"a": 1}, {"x": ANY, "y": ANY}, rename_leaves={"x": "a", "y": "a"})
    assert (plan.left_out, plan.bytes_read, plan.bytes_on_host) == ((), 16, 16)


def test_a_rename_of_what_the_target_lacks_is_refused():
    """A misspelt path would change nothing, silently."""
    plan = plan_of({"a": 1}, {"a": ANY}, rename_leaves={"b": "a"})
    assert could_nots(plan) == {"cannot restore a as b, as rename_leaves says": ()}


def test_a_rename_that_longer_ones_hide_is_refused():
    """No leaf of the target follows it, and the reader of the policy believes one does."""
    plan = plan_of({"a": {"x": 1}, "b": 2}, {"p/x": ANY}, rename_leaves={"p": "a", "p/x": "b"}, extra="ignore")
    assert could_nots(plan) == {"cannot restore a as p, as rename_leaves says": ()}


@pytest.mark.parametrize("missing", ["error", "keep"])
def test_a_rename_from_where_nothing_is_affects_its_leaves(missing):
    """The caller said where they are saved: their own values are then not what was meant."""
    targets = {"p/x": wanted(keepable=True), "p/y": wanted(keepable=True)}
    plan = plan_of({"a": 1}, targets, rename_leaves={"p": "nowhere"}, missing=missing, extra="ignore")
    assert could_nots(plan) == {"cannot read p from nowhere, as rename_leaves says": ("p/x", "p/y")}


def test_a_leaf_below_a_renamed_subtree_may_be_missing():
    """The subtree is there, and this leaf of it is not."""
    plan = plan_of({"a": {"x": 1}}, {"p/x": ANY, "p/y": ANY}, rename_leaves={"p": "a"})
    assert could_nots(plan) == {"cannot restore leaves of the target that the checkpoint lacks": ("p/y",)}


# Leaves that one side lacks.


@pytest.mark.parametrize(
    ("target", "missing", "could_not"),
    [
        pytest.param(
            TargetRecord(keepable=True),
            "error",
            "cannot restore leaves of the target that the checkpoint lacks",
            id="a value is not kept unless the policy says so",
        ),
        pytest.param(TargetRecord(keepable=True), "keep", None, id="a value is kept"),
        pytest.param(
            TargetRecord(shape=(2,), dtype="float32"),
            "keep",
            "cannot keep the target's value of leaves that are abstract, and that the checkpoint lacks",
            id="an abstract leaf has none",
        ),
        pytest.param(
            TargetRecord(placeholder=True, keepable=True),
            "error",
            "cannot restore leaves of the target that the checkpoint lacks",
            id="a placeholder for nothing is missing too",
        ),
        pytest.param(TargetRecord(placeholder=True, keepable=True), "keep", None, id="a placeholder is kept"),
        pytest.param(
            TargetRecord(odd=("cannot restore into a leaf of type x", "use another")),
            "error",
            "cannot restore leaves of the target that the checkpoint lacks",
            id="what no leaf can be, and is not saved either, is missing",
        ),
    ],
)
def test_a_leaf_that_the_checkpoint_lacks(target, missing, could_not):
    """Is refused by name, or keeps the target's own value: nothing is read."""
    plan = plan_of({"a": 1}, {"a": ANY, "b": target}, missing=missing)
    outcome = plan.by_path[text_path("b")]
    assert (outcome.source, outcome.recorded, outcome.shape) == (None, None, target.shape or ())
    assert (outcome.bytes_read, outcome.bytes_per_device) == (0, 0)
    if could_not is None:
        assert (plan.refused, outcome.placement, outcome.rule) == ((), Kept(), "kept")
    else:
        assert could_nots(plan) == {could_not: ("b",)}
        assert (outcome.placement, outcome.rule) == (NotPlaced(problems=(0,)), "refused")


@pytest.mark.parametrize("extra", ["error", "ignore"])
def test_a_placeholder_asks_that_nothing_be_read(extra):
    """`ocp.PLACEHOLDER`: the leaf is saved, is not read, and is not extra."""
    plan = plan_of({"a": 1, "b": 2}, {"a": ANY, "b": TargetRecord(placeholder=True, keepable=True)}, extra=extra)
    assert plan.refused == ()
    assert sources(plan) == {"a": "a", "b": None}
    assert plan.by_path[text_path("b")].placement == Kept()
    assert plan.left_out == (text_path("b"),)
    assert plan.bytes_read == 8


@pytest.mark.parametrize("extra", ["error", "ignore"])
def test_a_placeholder_stands_for_a_subtree(extra):
    """All that is below it is not read, and is not extra; a path that merely begins alike is another."""
    saved = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "bb": 4}
    target = {"a": ANY, "b": TargetRecord(placeholder=True, keepable=True), "bb": ANY}
    plan = plan_of(saved, target, extra=extra)
    assert plan.refused == ()
    assert sources(plan) == {"a": "a", "b": None, "bb": "bb"}
    assert plan.left_out == (text_path("b/c"), text_path("b/d/e"))


def test_a_placeholder_stands_for_a_node_without_leaves():
    """Such as an `optax.EmptyState`."""
    plan = plan_of({"a": 1, "b": {}}, {"a": ANY, "b": TargetRecord(placeholder=True, keepable=True)})
    assert (plan.refused, plan.left_out) == ((), ())


def test_a_leaf_that_one_place_skips_and_another_reads_is_not_left_out():
    """By a rename, beside a placeholder at its own place."""
    targets = {"a": TargetRecord(placeholder=True, keepable=True), "b": ANY}
    plan = plan_of({"a": 1}, targets, rename_leaves={"b": "a"})
    assert (plan.refused, plan.left_out) == ((), ())
    assert sources(plan) == {"a": None, "b": "a"}


@pytest.mark.parametrize("extra", ["error", "ignore"])
def test_a_saved_leaf_that_the_target_lacks(extra):
    """Is refused by name, or not read; in both cases the plan lists it."""
    plan = plan_of({"a": 1, "b": {"c": 2, "d": 3}}, {"a": ANY}, extra=extra)
    assert plan.left_out == (text_path("b/c"), text_path("b/d"))
    assert plan.bytes_read == 8
    if extra == "ignore":
        assert plan.refused == ()
    else:
        (problem,) = plan.refused
        assert problem.could_not == "cannot restore into a target that lacks saved leaves"
        assert (problem.affects, problem.of) == (("b/c", "b/d"), 3)
    assert plan.by_path[text_path("a")].placement == OnHost(type="int")
