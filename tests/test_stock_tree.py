"""Stock Orbax's `_METADATA` file: trees that no stock save of today writes."""

import json
from typing import Any

import pytest

from orbax_explicit._errors import FormatError
from orbax_explicit._records import ContainerRecord, Key, LeafPath, Tree, ValueRecord
from orbax_explicit._stock_json import UnreadableError
from orbax_explicit._stock_tree import StockLeaf, StockTree, StoreFlags, build_tree, parse_tree_metadata

X, Y = ValueRecord(type="int", dtype="int64"), ValueRecord(type="str")
EMPTY = ContainerRecord(kind="dict")
NONE = ContainerRecord(kind="none")


def _path(*names: str | int) -> LeafPath:
    return tuple(Key("dict" if isinstance(name, str) else "index", name) for name in names)


def _entry(*keys: tuple[str, int], value_type: str = "jax.Array") -> dict[str, Any]:
    return {
        "key_metadata": [{"key": name, "key_type": kind} for name, kind in keys],
        "value_metadata": {"value_type": value_type, "skip_deserialize": False},
    }


def _dict(**children: Tree) -> ContainerRecord:
    return ContainerRecord(
        kind="dict", keys=tuple(Key("dict", name) for name in children), children=tuple(children.values())
    )


def test_what_the_file_says() -> None:
    """Paths, types, the kind of store, and nothing about the order of leaves."""
    metadata = {
        "tree_metadata": {"b": _entry(("a", 2), ("10", 1)), "a": _entry(("b", 2), value_type="None")},
        "use_zarr3": True,
        "value_metadata_tree": "{}",
    }
    assert parse_tree_metadata(json.dumps(metadata).encode()) == StockTree(
        leaves=(
            StockLeaf(path=_path("a", 10), value_type="jax.Array"),
            StockLeaf(path=_path("b"), value_type="None"),
        ),
        flags=StoreFlags(use_ocdbt=None, use_zarr3=True, fills_missing=True),
        rich_containers="{}",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "not a JSON object but []"),
        ("[" * 100_000, "not JSON"),
        ('{"tree_metadata": []}', "without any entry in tree_metadata"),
        ('{"tree_metadata": {}}', "without any entry in tree_metadata"),
    ],
)
def test_no_tree_metadata(text: str, reason: str) -> None:
    """A file that lists no leaf has one reason."""
    with pytest.raises(UnreadableError) as caught:
        parse_tree_metadata(text.encode())
    assert str(caught.value) == reason


def test_every_bad_entry_is_listed() -> None:
    """Each distinct reason is one problem, with all the entries it concerns."""
    entries = {
        "a": _entry(("a", 3)),
        "b": _entry(("b", 3)),
        "c": _entry(("-1", 1)),
        "\ud800": _entry(("\ud800", 2)),
        "e": _entry(value_type="custom"),
        "f": _entry(value_type="custom"),
        "g": {"key_metadata": []},
        "h": _entry(*[("x", 2)] * 101),
        "i": 3,
        "j": _entry(("j", 2)),
    }
    with pytest.raises(FormatError) as caught:
        parse_tree_metadata(json.dumps({"tree_metadata": entries}).encode())
    start = "cannot read entries of _METADATA: "
    assert [(problem.could_not.removeprefix(start), problem.affects) for problem in caught.value.problems] == [
        ("unknown key {'key': 'a', 'key_type': 3}", ("a",)),
        ("unknown key {'key': 'b', 'key_type': 3}", ("b",)),
        ("unknown key {'key': '-1', 'key_type': 1}", ("c",)),
        (r"unknown key {'key': '\ud800', 'key_type': 2}", (r"'\ud800'",)),
        ("unknown type of value 'custom'", ("e", "f")),
        ("no key_metadata or no value_metadata", ("g", "i")),
        ("more than 100 keys in a path", ("h",)),
    ]


@pytest.mark.parametrize(
    ("leaves", "tree"),
    [
        pytest.param({(): X}, X, id="one leaf is a tree"),
        pytest.param({_path("b"): X, _path("B"): Y, _path("a"): NONE}, _dict(B=Y, a=NONE, b=X), id="keys are sorted"),
        pytest.param(
            {_path(i): X for i in (10, *range(10))},
            ContainerRecord(kind="list", keys=_path(*range(11)), children=(X,) * 11),
            id="positions are sorted as numbers",
        ),
        pytest.param(
            {_path("a"): EMPTY, _path("a", "b"): X},
            _dict(a=_dict(b=X)),
            id="a container listed as empty was filled by a later partial save",
        ),
    ],
)
def test_leaves_are_nested_as_stock_nests_them(leaves: dict[LeafPath, Tree], tree: Tree) -> None:
    """Dicts and lists, in the order in which JAX flattens them."""
    assert build_tree(leaves, None) == (tree, "")


def test_every_impossible_path_is_listed() -> None:
    """Paths that do not make a tree are refused together."""
    paths = [("leaf",), ("leaf", "x"), ("mixed", 0), ("mixed", "x"), ("gap", 0), ("gap", 2)]
    with pytest.raises(FormatError) as caught:
        build_tree({_path(*names): X for names in paths}, None)
    start = "the paths in _METADATA do not make a tree: "
    assert {problem.could_not.removeprefix(start): problem.affects for problem in caught.value.problems} == {
        "a leaf is also a container": ("leaf",),
        "a container has positions and names": ("mixed",),
        "a sequence lacks positions": ("gap",),
    }


def _rich(value_type: str = "scalar") -> dict[str, Any]:
    return {"category": "custom", "clazz": "ValueMetadataEntry", "data": {"value_type": value_type}}


def test_rich_containers_are_used() -> None:
    """Tuples and NamedTuples are what they were; a NamedTuple keeps the order of its fields."""
    rich = {
        "pair": {
            "category": "namedtuple",
            "module": "m",
            "clazz": "Outer.Pair",
            "entries": [{"key": "z", "value": _rich()}, {"key": "a", "value": _rich()}],
        },
        "category": [{"category": "custom", "clazz": "tuple", "entries": [_rich("string")]}],
    }
    leaves = {_path("pair", "a"): X, _path("pair", "z"): Y, _path("category", 0, 0): Y}
    tree, reason = build_tree(leaves, json.dumps(rich))
    pair = ContainerRecord(
        kind="namedtuple", keys=(Key("attr", "z"), Key("attr", "a")), children=(Y, X), module="m", qualname="Outer.Pair"
    )
    inner = ContainerRecord(kind="tuple", keys=_path(0), children=(Y,))
    assert reason == ""
    assert tree == _dict(category=ContainerRecord(kind="list", keys=_path(0), children=(inner,)), pair=pair)


@pytest.mark.parametrize(
    ("rich", "reason"),
    [
        pytest.param("{", "not JSON", id="not JSON"),
        pytest.param("{}", "1 leaves, but 0 in value_metadata_tree", id="a leaf is missing"),
        pytest.param(
            json.dumps({"a": _rich(), "b": _rich()}),
            "value_metadata_tree has a leaf b that tree_metadata lacks",
            id="a leaf is too many",
        ),
        pytest.param('{"a": 3}', "value_metadata_tree holds 3", id="a node is a number"),
        pytest.param(
            '{"a": {"category": "namedtuple", "entries": [{"key": 1, "value": []}]}}',
            "value_metadata_tree holds 1 for a name",
            id="a field is not named",
        ),
        pytest.param(
            '{"a": {"category": "namedtuple", "module": "m", "clazz": "", "entries": []}}',
            "a namedtuple with class name ''",
            id="a class is not named",
        ),
        pytest.param(
            '{"a":' * 200 + "[]" + "}" * 200, "more than 100 keys in a path of value_metadata_tree", id="too deep"
        ),
    ],
)
def test_unusable_rich_containers_fall_back_to_plain_ones(rich: str, reason: str) -> None:
    """The plain containers are always there; the reason becomes a note."""
    assert build_tree({_path("a"): X}, rich) == (_dict(a=X), reason)
