"""JAX -> records, for a tree that is about to be saved: its containers, its leaves, the machine and the software.

What could not come back as it is, or what Orbax could not store under its name, is refused by leaf name, all of it in
one error. Nothing here reads ambient state (the context mesh, the present devices but for the inventory); that is
`_binding.read_present`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax

from orbax_explicit._containers import tree_of_paths
from orbax_explicit._errors import Problem, SaveRefusedError
from orbax_explicit._leaf_capture import LeafRecorder, Unrecordable, check_name, reduce_pending
from orbax_explicit._records import (
    ContainerRecord,
    Inventory,
    Key,
    LeafPath,
    Manifest,
    Scope,
    Tree,
    ValueRecord,
    path_names,
    path_text,
    storage_name,
)
from orbax_explicit._sidecar import FILE_NAME
from orbax_explicit._wire_schema import INT_MAX, INT_MIN

PyTree: TypeAlias = Any

MAX_DEPTH = 100
"""Containers within containers that a tree may have; the file format allows a little more."""

_ODD_TILDE = re.compile("~(?![01])")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTree:
    """A tree that is about to be saved.

    Attributes:
        manifest: Its record.
        values: Its leaves by path, in tree order.
    """

    manifest: Manifest
    values: Mapping[LeafPath, Any]


# Trees.


def record_tree(
    tree: PyTree,
    save_dtypes: Mapping[tuple[str, ...], Any] | None = None,
    *,
    in_directories: bool = False,
    reduce: bool = False,
) -> CapturedTree:
    """Records a tree that is about to be saved.

    Called by every process; each records the same. With `reduce` it is collective.

    Args:
        tree: Any PyTree of the leaves that are allowed.
        save_dtypes: The dtype to store a leaf in, by the text of its keys, for leaves that are cast while they are saved.
        in_directories: Whether Orbax will store each array in a directory of its name, rather than in OCDBT.
        reduce: Whether pending reductions are made, rather than refused.

    Returns:
        The manifest, and the leaves by path.

    Raises:
        SaveRefusedError: A leaf or a container could not come back as it is. Lists all of them.
    """
    walk = _Walk(save_dtypes or {}, reduce=reduce)
    root = walk.record(tree, ())
    if not walk.refused and isinstance(root, ContainerRecord) and not root.children:
        walk.refuse((), Unrecordable("cannot save an empty tree", "save a tree with at least one leaf"))
    walk.refuse_shared_names()
    walk.refuse_text_that_orbax_cannot_address()
    if in_directories:
        walk.refuse_names_that_are_no_directories()
    walk.raise_if_refused()
    return CapturedTree(manifest=_make_manifest(root, "tree"), values=walk.values)


def record_arrays(
    arrays: Sequence[tuple[LeafPath, jax.Array]], save_dtypes: Mapping[tuple[str, ...], Any] | None = None
) -> Manifest:
    """Records arrays that are about to be saved, of a tree that is not seen.

    Called by every process; each records the same.

    Args:
        arrays: Each array with its path.
        save_dtypes: The dtype to store an array in, by the text of its keys, for arrays that are cast while they are saved.

    Raises:
        SaveRefusedError: An array could not come back as it is. Lists all of them.
    """
    walk = _Walk(save_dtypes or {})
    leaves = {path: walk.record(array, path) for path, array in arrays}
    walk.refuse_shared_names()
    walk.raise_if_refused()
    return _make_manifest(tree_of_paths(leaves), "arrays")


def _make_manifest(tree: Tree, scope: Scope) -> Manifest:
    """The manifest of a recorded tree: with the devices and the software of this run."""
    return Manifest(tree=tree, scope=scope, inventory=record_inventory(jax.devices()), writer=_writer())


_RESERVED_FILES = frozenset(
    {
        *("_METADATA", "_sharding", "_strings.json", "array_metadatas", "_CHECKPOINT_METADATA", "commit_success.txt"),
        *("manifest.ocdbt", "d", FILE_NAME),
    }
)
"""What else lies in the directory of an item."""


class _Walk:
    """One walk over a tree that is about to be saved, collecting every refusal."""

    def __init__(self, save_dtypes: Mapping[tuple[str, ...], Any], *, reduce: bool = False) -> None:
        self.save_dtypes = save_dtypes
        self.reduce = reduce
        self.values: dict[LeafPath, Any] = {}
        self.refused: dict[tuple[str, str], list[str]] = {}
        self.recorder = LeafRecorder()

    def record(self, node: PyTree, path: LeafPath) -> Tree:
        try:
            level = _one_level(node)
            if level is None:
                node = reduce_pending(node) if self.reduce else node
                self.values[path] = node
                return self.recorder.record(node, self.save_dtypes.get(path_names(path)))
            if len(path) >= MAX_DEPTH:
                raise Unrecordable(f"cannot save a tree deeper than {MAX_DEPTH} levels", "save a flatter tree")
        except Unrecordable as why:
            self.refuse(path, why)
            return ValueRecord(type="int")  # Only stands in until the error is raised.
        keys, children, container = level
        return container(keys, tuple(self.record(c, (*path, k)) for k, c in zip(keys, children, strict=True)))

    def refuse(self, path: LeafPath, why: Unrecordable) -> None:
        self.refused.setdefault((why.reason, why.fix), []).append(path_text(path))

    def refuse_shared_names(self) -> None:
        by_name: dict[str, list[LeafPath]] = {}
        for path in self.values:
            # TensorStore sets one "/" behind a name that does not end in one.
            by_name.setdefault(storage_name(path).removesuffix("/"), []).append(path)
        for name, paths in by_name.items():
            if len(paths) > 1:
                why = _shared_name(name)
                for path in paths:
                    self.refuse(path, why)

    def refuse_text_that_orbax_cannot_address(self) -> None:
        """Orbax keeps text in one JSON file and addresses it by a JSON pointer (RFC 6901) that it makes of the name."""
        pointers = {}
        for path, value in self.values.items():
            if isinstance(value, str):
                name = storage_name(path)
                if _ODD_TILDE.search(name):
                    self.refuse(path, Unrecordable("cannot save a str under a key with '~'", "rename the key"))
                else:
                    pointers[tuple(name.split("/"))] = path
        for pointer, path in pointers.items():
            for above in (pointers.get(pointer[:i]) for i in range(1, len(pointer))):
                if above is not None:
                    why = Unrecordable(
                        f"cannot save a str at {path_text(path)} beside one at {path_text(above)}: Orbax would take the "
                        "one for a part of the other",
                        "use keys without '/'",
                    )
                    self.refuse(path, why)

    def refuse_names_that_are_no_directories(self) -> None:
        """Without OCDBT a name is a path below the checkpoint: it must not leave it, nor lead into another array."""
        stored = {storage_name(path): path for path, value in self.values.items() if not isinstance(value, str)}
        for name, path in stored.items():
            parts = name.split("/")
            if parts[0] in _RESERVED_FILES or any(
                part in ("", ".", "..") or "\0" in part or "\\" in part or len(part.encode()) > 255 for part in parts
            ):
                why = f"cannot save a leaf in a directory of the name {name!r}"
                self.refuse(path, Unrecordable(why, "rename the key, or save with OCDBT"))
            for above in ("/".join(parts[:i]) for i in range(1, len(parts))):
                if above in stored:
                    why = f"cannot save a leaf in the directory of another: {name!r} lies in {above!r}"
                    self.refuse(path, Unrecordable(why, "rename the key, or save with OCDBT"))

    def raise_if_refused(self) -> None:
        if self.refused:
            raise SaveRefusedError(*problems_of(self.refused, of=len(self.values)))


def problems_of(refused: Mapping[tuple[str, str], Sequence[str]], *, of: int) -> list[Problem]:
    """One problem for each reason and fix, with the leaves that it affects."""
    return [
        Problem(could_not=reason, affects=tuple(paths), of=max(of, len(paths)), fix=fix)
        for (reason, fix), paths in refused.items()
    ]


def _shared_name(name: str) -> Unrecordable:
    return Unrecordable(
        f"cannot save leaves under one name: Orbax would store all of them as {name!r}",
        "rename a key, so that the keys joined by dots differ",
    )


_Container: TypeAlias = Callable[[tuple[Key, ...], tuple[Tree, ...]], ContainerRecord]


def _one_level(node: PyTree) -> tuple[tuple[Key, ...], Sequence[PyTree], _Container] | None:
    """The keys and children of a container, and how to record it; None for a leaf."""
    kind: Literal["none", "dict", "list", "tuple", "namedtuple", "node"]
    if node is None:
        return (), (), lambda keys, children: ContainerRecord(kind="none")
    if type(node) is dict:
        names = _sorted_keys(node)
        keys = tuple(_dict_key(name) for name in names)
        return keys, [node[name] for name in names], _of_kind("dict")
    if type(node) in (list, tuple):
        keys = tuple(Key("index", i) for i in range(len(node)))
        return keys, node, _of_kind("list" if type(node) is list else "tuple")
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    if len(flat) == 1 and flat[0][0] == ():
        return None
    if not flat and isinstance(node, Mapping):
        # Orbax keeps an empty mapping of any class as an empty dict.
        return (), (), _of_kind("dict")
    keys = tuple(record_key(path[0]) for path, _ in flat)
    if len(set(map(str, (key.name for key in keys)))) < len(keys):
        raise Unrecordable(
            f"cannot save a {type(node).__qualname__} that gives two children one key", "register it with distinct keys"
        )
    children = [child for _, child in flat]
    cls = type(node)
    module = cls.__module__ if isinstance(cls.__module__, str) else ""
    for name in (module, cls.__qualname__):
        check_name(name)
    fields = [Key("attr", name) for name in getattr(node, "_fields", ())]
    kind = "namedtuple" if isinstance(node, tuple) and hasattr(node, "_fields") and list(keys) == fields else "node"
    return keys, children, _of_kind(kind, module=module, qualname=cls.__qualname__)


def _of_kind(
    kind: Literal["dict", "list", "tuple", "namedtuple", "node"], *, module: str = "", qualname: str = ""
) -> _Container:
    return lambda keys, children: ContainerRecord(
        kind=kind, keys=keys, children=children, module=module, qualname=qualname
    )


def _sorted_keys(node: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(node)
    except TypeError:
        kinds = sorted({type(key).__name__ for key in node})
        raise Unrecordable(f"cannot save a dict whose keys do not sort ({', '.join(kinds)})", _KEY_FIX) from None


_KEY_FIX = "use str keys throughout, or int keys throughout"


def _dict_key(name: Any) -> Key:
    if type(name) not in (str, int):
        raise Unrecordable(f"cannot save a dict key of type {type(name).__name__}", _KEY_FIX)
    if isinstance(name, int) and not INT_MIN <= name <= INT_MAX:
        raise Unrecordable("cannot save an int key beyond 64 bits", "use it as a str key")
    if isinstance(name, str):
        check_name(name)
    return Key("dict", name)


def record_key(key: Any) -> Key:
    """One step of a path from a key of JAX; raises `Unrecordable` where it has no record."""
    if isinstance(key, jax.tree_util.DictKey):
        return _dict_key(key.key)
    if isinstance(key, jax.tree_util.SequenceKey):
        return Key("index", key.idx)
    if isinstance(key, jax.tree_util.GetAttrKey):
        check_name(key.name)
        return Key("attr", key.name)
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return Key("index", key.key)
    raise Unrecordable(
        f"cannot save a tree key of type {type(key).__name__}", "register the node with keys of JAX's own"
    )


def record_path(keypath: Sequence[Any]) -> LeafPath:
    """The path of a leaf from JAX's key path.

    Raises:
        Unrecordable: A key has no record.
    """
    return tuple(record_key(key) for key in keypath)


# The machine and the software.


def record_inventory(devices: Sequence[jax.Device]) -> Inventory:
    """Records devices, and the memory kinds that this process can see on them.

    Raises:
        ValueError: There are no devices.
    """
    if not devices:
        raise ValueError("there are no devices to restore onto")
    own = [device for device in devices if device.process_index == jax.process_index()]
    device = own[0] if own else jax.local_devices()[0]
    return Inventory(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        device_ids=tuple(d.id for d in devices),
        process_indices=tuple(d.process_index for d in devices),
        memory_kinds=tuple(sorted(memory.kind for memory in device.addressable_memories())),
        default_memory_kind=device.default_memory().kind,
    )


def _writer() -> tuple[tuple[str, str], ...]:
    names = ("orbax-explicit", "jax", "orbax-checkpoint")
    return tuple((name, _version(name)) for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # On the path, and not installed.
