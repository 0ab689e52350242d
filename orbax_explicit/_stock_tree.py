"""Stock Orbax's `_METADATA` file: which leaves a tree has, and in which containers.

The file lists, for every leaf and every empty container, the keys that lead to it and the type of its value
(`orbax/checkpoint/_src/metadata/tree.py`). `parse_tree_metadata` reads it; `build_tree` nests the leaves, once their
shapes are known, as stock does without a target: tuples are lists, NamedTuples are dicts, int keys are texts. A
checkpoint that was saved with Orbax's rich types also holds the containers themselves, and they are then used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orbax_explicit._errors import FormatError, Problem, RecordError
from orbax_explicit._records import ContainerKind, ContainerRecord, Key, LeafPath, Tree, path_names, path_text
from orbax_explicit._stock_json import Json, UnreadableError, is_text, parse_json, parse_json_object, shown

ARRAY = "jax.Array"
NUMPY = "np.ndarray"
SCALAR = "scalar"
STRING = "string"

# An empty NamedTuple comes back as None where rich types are off, which is stock's default.
EMPTY_CONTAINERS: Mapping[str, ContainerKind] = {
    "None": "none",
    "NamedTuple": "none",
    "Dict": "dict",
    "List": "list",
    "Tuple": "tuple",
}
_VALUE_TYPES = frozenset({ARRAY, NUMPY, SCALAR, STRING, *EMPTY_CONTAINERS})

_KEY_KINDS: Mapping[int, Literal["index", "dict"]] = {1: "index", 2: "dict"}
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StockLeaf:
    """A leaf or an empty container, as `_METADATA` lists it.

    Attributes:
        path: Its path in the tree that stock gives back without a target.
        value_type: `jax.Array`, `np.ndarray`, `scalar`, `string`, or a key of `EMPTY_CONTAINERS`.
    """

    path: LeafPath
    value_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFlags:
    """What `_METADATA` says of how the arrays are stored.

    Attributes:
        use_ocdbt: Whether they are in one OCDBT store; None where it does not say (early releases).
        use_zarr3: Whether they are Zarr version 3, else 2.
        fills_missing: Whether a chunk that holds zeros may be missing (early releases).
    """

    use_ocdbt: bool | None
    use_zarr3: bool
    fills_missing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StockTree:
    """What `_METADATA` says.

    Attributes:
        leaves: Leaves and empty containers, in no particular order.
        flags: How the arrays are stored.
        rich_containers: JSON text of the containers themselves; None where it was saved without rich types.
    """

    leaves: tuple[StockLeaf, ...]
    flags: StoreFlags
    rich_containers: str | None


def parse_tree_metadata(data: bytes) -> StockTree:
    """What the bytes of a `_METADATA` file say.

    Raises:
        UnreadableError: They are no such file.
        FormatError: Entries of it cannot be read; lists all of them.
    """
    metadata = parse_json_object(data)
    entries = metadata.get("tree_metadata")
    if not isinstance(entries, dict) or not entries:
        raise UnreadableError("without any entry in tree_metadata")
    leaves: list[StockLeaf] = []
    wrong: dict[str, list[str]] = {}
    for label, entry in entries.items():
        try:
            leaves.append(_parse_entry(entry))
        except UnreadableError as error:
            wrong.setdefault(str(error), []).append(label if is_text(label) else ascii(label))
    raise_format_error("cannot read entries of _METADATA", wrong, of=len(entries))
    rich = metadata.get("value_metadata_tree")
    return StockTree(
        leaves=tuple(leaves),
        flags=_flags(metadata),
        rich_containers=rich if isinstance(rich, str) else None,
    )


def parse_store_flags(data: bytes) -> StoreFlags:
    """What the bytes of a `_METADATA` file say of how the arrays are stored.

    Raises:
        UnreadableError: They are no such file.
    """
    return _flags(parse_json_object(data))


def _flags(metadata: dict[str, Json]) -> StoreFlags:
    use_ocdbt = metadata.get("use_ocdbt")
    return StoreFlags(
        use_ocdbt=None if use_ocdbt is None else bool(use_ocdbt),
        use_zarr3=bool(metadata.get("use_zarr3")),
        fills_missing=not metadata.get("store_array_data_equal_to_fill_value"),
    )


def build_tree(leaves: Mapping[LeafPath, Tree], rich_containers: str | None) -> tuple[Tree, str]:
    """The tree of these leaves, and why the rich containers could not be used; empty where they were or are absent.

    Args:
        leaves: Leaves and empty containers by path.
        rich_containers: `StockTree.rich_containers`.

    Raises:
        FormatError: The paths do not make a tree.
    """
    reason = ""
    if rich_containers is not None:
        try:
            return _build_rich_tree(leaves, rich_containers), ""
        except (UnreadableError, RecordError) as error:
            reason = str(error)
    wrong: dict[str, list[str]] = {}
    tree = _nest(list(leaves.items()), 0, wrong)
    raise_format_error("the paths in _METADATA do not make a tree", wrong, of=len(leaves))
    return tree, reason


def raise_format_error(could_not: str, wrong: Mapping[str, Sequence[str]], *, of: int) -> None:
    """Raises one `FormatError` with a problem for each reason, if there is any.

    Args:
        could_not: What could not be done.
        wrong: Reason -> paths of the leaves that it concerns.
        of: Number of leaves in all.
    """
    if wrong:
        fix = "restore the files from a copy: the checkpoint was damaged or not written completely"
        raise FormatError(
            *(
                Problem(could_not=f"{could_not}: {reason}", affects=tuple(paths), of=of, fix=fix)
                for reason, paths in wrong.items()
            )
        )


def _parse_entry(entry: Json) -> StockLeaf:
    keys = entry.get("key_metadata") if isinstance(entry, dict) else None
    value = entry.get("value_metadata") if isinstance(entry, dict) else None
    if not isinstance(keys, list) or not isinstance(value, dict):
        raise UnreadableError("no key_metadata or no value_metadata")
    if len(keys) > _MAX_DEPTH:
        raise UnreadableError(f"more than {_MAX_DEPTH} keys in a path")
    value_type = value.get("value_type")
    if not isinstance(value_type, str) or value_type not in _VALUE_TYPES:
        raise UnreadableError(f"unknown type of value {shown(value_type)}")
    return StockLeaf(path=tuple(_parse_key(key) for key in keys), value_type=value_type)


def _parse_key(key: Json) -> Key:
    name, key_type = (key.get("key"), key.get("key_type")) if isinstance(key, dict) else (None, None)
    kind = _KEY_KINDS.get(key_type) if isinstance(key_type, int) else None
    if kind == "dict" and is_text(name):
        return Key(kind, name)
    if kind == "index" and is_text(name) and re.fullmatch(r"[0-9]{1,9}", name):
        return Key(kind, int(name))
    raise UnreadableError(f"unknown key {shown(key)}")


def _nest(leaves: Sequence[tuple[LeafPath, Tree]], depth: int, wrong: dict[str, list[str]]) -> Tree:
    """The subtree of leaves that agree in their first `depth` keys; problems are added to `wrong`."""
    deeper = [(path, leaf) for path, leaf in leaves if len(path) > depth]
    # A partial save can fill a container that an earlier one listed as empty; both entries stay in the file.
    here = [(path, leaf) for path, leaf in leaves if len(path) == depth]
    if not deeper:
        return here[0][1]
    for path, leaf in here:
        if not isinstance(leaf, ContainerRecord):
            wrong.setdefault("a leaf is also a container", []).append(path_text(path))
    groups: dict[Key, list[tuple[LeafPath, Tree]]] = {}
    for path, leaf in deeper:
        groups.setdefault(path[depth], []).append((path, leaf))
    container = path_text(deeper[0][0][:depth])
    if len({key.kind for key in groups}) > 1:
        wrong.setdefault("a container has positions and names", []).append(container)
        return ContainerRecord(kind="none")
    # JAX flattens a dict in the order of its sorted keys.
    keys = tuple(sorted(groups, key=lambda key: key.name))
    children = tuple(_nest(groups[key], depth + 1, wrong) for key in keys)
    if keys[0].kind == "dict":
        return ContainerRecord(kind="dict", keys=keys, children=children)
    if [key.name for key in keys] != list(range(len(keys))):
        wrong.setdefault("a sequence lacks positions", []).append(container)
        return ContainerRecord(kind="none")
    return ContainerRecord(kind="list", keys=keys, children=children)


def _build_rich_tree(leaves: Mapping[LeafPath, Tree], containers: str) -> Tree:
    by_names = {path_names(path): leaf for path, leaf in leaves.items()}
    used: list[tuple[str, ...]] = []
    tree = _rich_node(parse_json(containers), (), by_names, used)
    if len(used) != len(by_names):
        raise UnreadableError(f"{len(by_names)} leaves, but {len(used)} in value_metadata_tree")
    return tree


def _rich_node(
    node: Json, names: tuple[str, ...], leaves: Mapping[tuple[str, ...], Tree], used: list[tuple[str, ...]]
) -> Tree:
    """One node of `value_metadata_tree` (`orbax/checkpoint/_src/metadata/tree_rich_types.py`)."""
    if len(names) > _MAX_DEPTH:
        raise UnreadableError(f"more than {_MAX_DEPTH} keys in a path of value_metadata_tree")
    category = node.get("category") if isinstance(node, dict) else None
    kind: ContainerKind
    module = qualname = ""
    if isinstance(node, dict) and category == "custom" and node.get("clazz") == "ValueMetadataEntry":
        if names not in leaves:
            raise UnreadableError(f"value_metadata_tree has a leaf {'/'.join(names)} that tree_metadata lacks")
        used.append(names)
        return leaves[names]
    if isinstance(node, dict) and category == "custom" and node.get("clazz") == "tuple":
        kind, keys, nodes = "tuple", *_positions(node.get("entries"))
    elif isinstance(node, dict) and category == "namedtuple":
        kind, keys, nodes = "namedtuple", *_fields(node.get("entries"))
        module, qualname = _text(node.get("module")), _text(node.get("clazz"))
    elif isinstance(node, dict):
        kind = "dict"
        keys = tuple(Key("dict", _text(name)) for name in sorted(node))
        nodes = tuple(node[name] for name in sorted(node))
    else:
        kind, keys, nodes = "list", *_positions(node)
    children = tuple(
        _rich_node(child, (*names, str(key.name)), leaves, used) for key, child in zip(keys, nodes, strict=True)
    )
    return ContainerRecord(kind=kind, keys=keys, children=children, module=module, qualname=qualname)


def _positions(entries: Json) -> tuple[tuple[Key, ...], tuple[Json, ...]]:
    if not isinstance(entries, list):
        raise UnreadableError(f"value_metadata_tree holds {shown(entries)}")
    return tuple(Key("index", i) for i in range(len(entries))), tuple(entries)


def _fields(entries: Json) -> tuple[tuple[Key, ...], tuple[Json, ...]]:
    keys: list[Key] = []
    nodes: list[Json] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or "value" not in entry:
            raise UnreadableError(f"value_metadata_tree holds {shown(entry)}")
        keys.append(Key("attr", _text(entry.get("key"))))
        nodes.append(entry["value"])
    return tuple(keys), tuple(nodes)


def _text(value: Json) -> str:
    if not is_text(value):
        raise UnreadableError(f"value_metadata_tree holds {shown(value)} for a name")
    return value
