"""`_containers`: trees as they were, without a target; and as stock Orbax would have stored them."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from nodes import Keyed, Layer, Plain, host_trees
from trees import Moments, Nothing, path

from orbax_explicit._capture import record_tree
from orbax_explicit._containers import container_notes, find_namedtuple, rebuild_tree, storage_tree, tree_of_paths
from orbax_explicit._records import ContainerRecord, Key, Manifest, Tree, ValueRecord, iterate_leaves

INT = ValueRecord(type="int", dtype="int64")


class Outer:
    """A class that holds a NamedTuple."""

    class Inner(NamedTuple):
        """Its qualified name has a dot."""

        x: Any


def round_trip(tree: Any) -> Any:
    """The tree, recorded and made again of its record and its values."""
    captured = record_tree({"tree": tree, "other": 0})
    return rebuild_tree(captured.manifest.tree, captured.values.__getitem__)["tree"]


def namedtuple_record(module: str, qualname: str, *fields: str) -> ContainerRecord:
    """A NamedTuple as it was recorded, perhaps elsewhere, with an int in each field."""
    return ContainerRecord(
        kind="namedtuple",
        keys=tuple(Key("attr", field) for field in fields),
        children=(INT,) * len(fields),
        module=module,
        qualname=qualname,
    )


def values_of(tree: Tree) -> Mapping[Any, int]:
    """A distinct value for each leaf."""
    return {leaf_path: i for i, (leaf_path, _) in enumerate(iterate_leaves(tree))}


def rebuilt(record: ContainerRecord) -> Any:
    """The container of a record, with 0, 1, 2, ... for its leaves."""
    return rebuild_tree(record, values_of(record).__getitem__)


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param({"b": 1, "a": {"c": 2}}, id="dicts with str keys"),
        pytest.param({10: 1, 9: 2, -1: 3}, id="a dict with int keys"),
        pytest.param({"0": 1, "1": 2}, id="a dict whose str keys are numbers"),
        pytest.param([1, [2, []], ()], id="lists, and an empty tuple"),
        pytest.param((1, (2,), [3], {}), id="tuples, and an empty dict"),
        pytest.param([None, {"a": None}], id="None within containers"),
        pytest.param(Moments(mean=1, variance=(2, {3: 4})), id="a NamedTuple"),
        pytest.param(Nothing(), id="a NamedTuple without fields, which is not None"),
        pytest.param(Outer.Inner(x=1), id="a NamedTuple within a class"),
    ],
)
def test_a_tree_comes_back_as_it_was(tree):
    """Without a target: the same containers and keys, of the same types."""
    again = round_trip(tree)
    assert again == tree
    assert jax.tree.structure(again) == jax.tree.structure(tree)


@pytest.mark.parametrize(
    ("node", "plain"),
    [
        pytest.param(Layer(w=1, b=2), {"w": 1, "b": 2}, id="a registered dataclass as a dict"),
        pytest.param(Plain(1, [2]), [1, [2]], id="a node without keys as a list"),
        pytest.param(Keyed((jax.tree_util.DictKey(3), 1)), {3: 1}, id="a node with dict keys as a dict"),
        pytest.param(
            Keyed((jax.tree_util.SequenceKey(0), 1), (jax.tree_util.GetAttrKey("a"), 2)),
            {0: 1, "a": 2},
            id="a node with keys of several kinds as a dict",
        ),
        pytest.param(
            Keyed((jax.tree_util.SequenceKey(1), "a"), (jax.tree_util.SequenceKey(3), "b")),
            {1: "a", 3: "b"},
            id="a node with positions that are not 0, 1, 2 as a dict, which keeps them",
        ),
        pytest.param(
            collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}, id="an OrderedDict as a dict in the same order"
        ),
        pytest.param(Plain(), {}, id="a node without children as an empty dict"),
    ],
)
def test_a_node_comes_back_without_its_class(node, plain):
    """Its class is not known to be safe to make; every child keeps its key."""
    again = round_trip(node)
    assert again == plain
    assert type(again) is type(plain)
    if isinstance(plain, dict):
        assert list(again) == list(plain)


def plain_of(tree: Any) -> Any:
    """What comes back of a tree: nodes other than NamedTuples lose their class."""
    match tree:
        case Plain():
            return [plain_of(child) for child in tree.children] or {}
        case Layer():
            return {"w": plain_of(tree.w), "b": plain_of(tree.b)}
        case dict():
            return {key: plain_of(child) for key, child in tree.items()}
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*map(plain_of, tree))
        case list() | tuple():
            return type(tree)(map(plain_of, tree))
        case _:
            return tree


@given(host_trees())
def test_every_tree_comes_back_but_for_the_classes_of_its_nodes(tree):
    """Whatever containers it is of."""
    again, plain = round_trip(tree), plain_of(tree)
    assert again == plain
    assert jax.tree.structure(again) == jax.tree.structure(plain)


# NamedTuples: the class where that is certain, else a dict.


@pytest.fixture
def saved_module(monkeypatch):
    """An imported module that has `State(x, y)`, as it was when a checkpoint was saved."""
    module = types.ModuleType("saved_module")
    module.State = collections.namedtuple("State", "x y")
    module.State.__module__ = "saved_module"
    monkeypatch.setitem(sys.modules, "saved_module", module)
    return module


STATE = namedtuple_record("saved_module", "State", "x", "y")
NOT_THE_CLASS = "saved_module.State is not the class that was saved; it comes back as a dict (1 node, first .)"


def test_a_namedtuple_of_an_imported_module_is_its_class(saved_module):
    """With nothing to note."""
    assert record_tree({"s": saved_module.State(1, 2)}).manifest.tree.children == (STATE,)
    assert rebuilt(STATE) == saved_module.State(x=0, y=1)
    assert type(rebuilt(STATE)) is saved_module.State
    assert container_notes(STATE) == ()


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(collections.namedtuple("State", "x y z"), id="a NamedTuple with a field more"),
        pytest.param(collections.namedtuple("State", "y x"), id="a NamedTuple with its fields in another order"),
        pytest.param(tuple, id="a tuple without fields"),
        pytest.param(type("State", (), {"_fields": ("x", "y")}), id="a class that is no tuple"),
        pytest.param(lambda x, y: (x, y), id="a function"),
        pytest.param(collections.namedtuple("State", "x y")(1, 2), id="an object of the class"),
        pytest.param(None, id="nothing"),
    ],
)
def test_a_namedtuple_whose_name_leads_to_something_else_is_a_dict(saved_module, found):
    """And the plan says so: what is there is not what was saved."""
    saved_module.State = found
    assert rebuilt(STATE) == {"x": 0, "y": 1}
    assert find_namedtuple(STATE) is None
    assert container_notes(STATE) == (NOT_THE_CLASS,)


def test_a_namedtuple_whose_name_leads_nowhere_is_a_dict(saved_module):
    """Its module is imported, but lacks it."""
    del saved_module.State
    assert rebuilt(STATE) == {"x": 0, "y": 1}
    assert container_notes(STATE) == (NOT_THE_CLASS,)


def test_a_namedtuple_of_a_module_that_is_not_imported_is_a_dict(tmp_path, monkeypatch):
    """The note names the module; and it is not imported, though it could be: a file must not run code."""
    (tmp_path / "importable_module.py").write_text(
        "import collections\nState = collections.namedtuple('State', 'x y')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    record = namedtuple_record("importable_module", "State", "x", "y")
    assert rebuilt(record) == {"x": 0, "y": 1}
    assert container_notes(record) == (
        "importable_module.State comes back as a dict (1 node, first .); "
        "import importable_module first to get the class",
    )
    assert "importable_module" not in sys.modules


def test_looking_for_a_namedtuple_runs_no_code_of_its_module(saved_module):
    """A module's `__getattr__` (PEP 562) may import or do anything: a file must not reach it."""
    asked = []
    saved_module.__getattr__ = asked.append
    del saved_module.State
    assert rebuilt(STATE) == {"x": 0, "y": 1}
    assert asked == []


def test_looking_for_a_namedtuple_runs_no_code_of_its_class(saved_module):
    """Nor a metaclass, nor a descriptor."""
    asked = []

    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    class Descriptor:
        def __get__(self, instance: Any, owner: Any) -> Any:
            asked.append(owner)

    saved_module.Lazy = Meta("Lazy", (), {"described": Descriptor()})
    for qualname in ("Lazy.State", "Lazy.described.State"):
        assert find_namedtuple(namedtuple_record("saved_module", qualname, "x")) is None
    assert asked == []


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        pytest.param("", "State", id="no module"),
        pytest.param("builtins", "tuple", id="a builtin"),
        pytest.param("saved_module", "make.<locals>.State", id="a class made in a function"),
        pytest.param("saved_module", "State.", id="an empty name"),
        pytest.param("saved_module", "State.__mro__", id="a name that leads on from a class"),
        pytest.param("not_imported", "__class__", id="a name that nothing at all has"),
        pytest.param("saved_module", "State.__new__.__globals__", id="a name that leads into the module's dict"),
    ],
)
def test_an_odd_name_leads_to_no_class(saved_module, module, qualname):
    """Nor to an exception: the name comes from a file."""
    assert find_namedtuple(namedtuple_record(module, qualname, "x", "y")) is None


def test_notes_name_each_class_once_with_where_it_is_first():
    """What to do differs: import it, or restore into a target."""
    tree = ContainerRecord(
        kind="dict",
        keys=path("a", "b", "c", "d"),
        children=(
            namedtuple_record("not_imported", "State", "x"),
            ContainerRecord(kind="node", module="flax", qualname="State"),
            namedtuple_record("not_imported", "State", "x"),
            namedtuple_record(__name__, "Moments", "mean", "variance"),
        ),
    )
    assert container_notes(tree) == (
        "not_imported.State comes back as a dict (2 nodes, first a); import not_imported first to get the class",
        "flax.State comes back as a plain dict or list (1 node, first b); restore into a target to keep it",
    )


# As Orbax stores it.


def stored(tree: Any) -> Any:
    """Our storage tree, with the leaves themselves."""
    captured = record_tree(tree)
    return storage_tree(captured.manifest.tree, captured.values.__getitem__)


def as_stock_restores_it(node: Any) -> Any:
    """Stock's own tree, with empty nodes as stock gives them back: empty mappings as {}, other odd ones as None."""
    if type(node) is dict and node:
        return {key: as_stock_restores_it(child) for key, child in node.items()}
    if type(node) is list:
        return [as_stock_restores_it(child) for child in node]
    if isinstance(node, Mapping):
        return {}
    return node if type(node) in (int, tuple) else None


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        pytest.param({"l": {0: 1, 10: 2}}, {"l": {"0": 1, "10": 2}}, id="int keys become text"),
        pytest.param({"t": (1, [2, (3,)])}, {"t": [1, [2, [3]]]}, id="tuples become lists"),
        pytest.param({"m": Moments(1, (2,))}, {"m": {"mean": 1, "variance": [2]}}, id="NamedTuples become dicts"),
        pytest.param({"n": Layer(1, 2)}, {"n": {"w": 1, "b": 2}}, id="dataclasses become dicts"),
        pytest.param({"n": Plain(1, 2)}, {"n": [1, 2]}, id="nodes without keys become lists"),
        pytest.param(
            {"a": {}, "b": [], "c": (), "d": None, "z": 0},
            {"a": {}, "b": [], "c": (), "d": None, "z": 0},
            id="empty containers stay",
        ),
        pytest.param({"n": Nothing(), "p": Plain(), "z": 0}, {"n": None, "p": None, "z": 0}, id="empty nodes are None"),
        pytest.param(
            {"o": collections.OrderedDict(), "d": collections.defaultdict(int), "z": 0},
            {"o": {}, "d": {}, "z": 0},
            id="empty mappings of other classes are empty dicts",
        ),
        pytest.param([1, {"a": 2}], [1, {"a": 2}], id="a list at the root"),
    ],
)
def test_a_tree_is_stored_as_in_stock_orbax(tree, expected):
    """Dicts with str keys, and lists."""
    assert stored(tree) == expected
    assert as_stock_restores_it(ocp.tree.serialize_tree(tree, keep_empty_nodes=True)) == expected


@given(host_trees())
def test_every_tree_is_stored_as_in_stock_orbax(tree):
    """The same names, dicts and lists: what stock reads does not depend on which of the two wrote it."""
    tree = {"tree": tree, "z": 0}
    assert stored(tree) == as_stock_restores_it(ocp.tree.serialize_tree(tree, keep_empty_nodes=True))


# Trees of paths alone.


@pytest.mark.parametrize(
    ("leaves", "kind", "keys"),
    [
        pytest.param((path("a"), path("b")), "dict", path("a", "b"), id="dict keys make a dict"),
        pytest.param((path(0), path(5)), "dict", path(0, 5), id="int keys make a dict"),
        pytest.param(
            ((Key("index", 0),), (Key("index", 1),)),
            "list",
            (Key("index", 0), Key("index", 1)),
            id="positions make a list",
        ),
        pytest.param(((Key("index", 1),),), "node", (Key("index", 1),), id="positions with a gap make a node"),
        pytest.param(((Key("attr", "w"),),), "node", (Key("attr", "w"),), id="attributes make a node"),
        pytest.param(
            ((Key("attr", "w"),), path("a")),
            "node",
            (Key("attr", "w"), *path("a")),
            id="keys of several kinds make a node",
        ),
    ],
)
def test_paths_make_a_tree(leaves, kind, keys):
    """Of containers of which nothing is known but the keys."""
    tree = tree_of_paths(dict.fromkeys(leaves, INT))
    assert (tree.kind, tree.keys, tree.children) == (kind, keys, (INT,) * len(keys))


def test_one_leaf_without_a_path_is_a_tree():
    """A bare leaf."""
    assert tree_of_paths({(): INT}) is INT


@given(host_trees())
def test_a_tree_of_paths_has_the_leaves_of_the_tree(tree):
    """In the same order, under the same paths; empty containers are gone."""
    leaves = record_tree({"tree": tree, "z": 0}).manifest.leaves
    assert list(Manifest(tree=tree_of_paths(leaves)).leaves.items()) == list(leaves.items())
