"""`Manifest` -> the payload of version 1 of `explicit_sharding.msgpack`.

Two steps. The first walks the tree and gives each distinct container, leaf, sharding, mesh and spec its
number; the second writes the tables out in the order of the file and numbers texts and device lists as it
meets them. So every table stands in the order of first mention, and equal manifests have equal bytes.

Records are told apart by `id()` first and by value second: a capture shares one `MeshRecord` among its
arrays, and to hash it costs O(devices).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgpack

from orbax_explicit._errors import Problem, RecordError
from orbax_explicit._records import (
    UNCONSTRAINED,
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    LeafPath,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    ShardingRecord,
    SpecRecord,
    Tree,
    ValueType,
    partition_axes,
    path_text,
)
from orbax_explicit._wire_schema import (
    ARRAY,
    COUNTED_KINDS,
    DEVICE_ID_MAX,
    INT_MAX,
    INT_MIN,
    KEY_ATTR,
    KEY_DICT_INT,
    KEY_DICT_TEXT,
    KEY_INDEX,
    MAX_DEPTH,
    MAX_DEVICE_IDS,
    MAX_ENTRY_LENGTH,
    MAX_MESH_DEVICES,
    MAX_PAYLOAD_NBYTES,
    MAX_PROBLEMS,
    MAX_TEXT_NBYTES,
    NAMED_SHARDING,
    SINGLE_DEVICE,
    VALUE,
    pack_device_ids,
    pack_process_indices,
)

T = TypeVar("T")
U = TypeVar("U")
Entry: TypeAlias = Sequence[object]
_ArrayKey: TypeAlias = tuple[tuple[int, ...], str, int | None, bool, PrngRecord | None]
_ValueKey: TypeAlias = tuple[tuple[int, ...], str, ValueType]
_LeafKey: TypeAlias = _ArrayKey | _ValueKey

_SHOWN: Final = 80


def encode_payload(manifest: Manifest) -> bytes:
    """The payload that records `manifest`.

    Raises:
        RecordError: The manifest holds what the format cannot: notes, an integer beyond 64 bits, a key that is
            neither text nor an integer, or more of something than `docs/format.md` allows. Lists all, up to a hundred.
    """
    if manifest.notes:
        raise RecordError("a manifest with notes says what could not be read of a stock checkpoint; it is not recorded")
    sections = _Sections(_Records(manifest.tree)).of(manifest)
    payload: bytes = msgpack.packb(sections, use_bin_type=True)
    if len(payload) > MAX_PAYLOAD_NBYTES:
        raise RecordError(f"the record takes {len(payload)} bytes; at most {MAX_PAYLOAD_NBYTES} can be written")
    return payload


class _Numbering(Generic[T]):
    """Distinct values, numbered in the order in which they come."""

    def __init__(self, key: Callable[[T], Hashable]) -> None:
        self.values: list[T] = []
        self._key = key
        self._by_key: dict[Hashable, int] = {}
        self._by_id: dict[int, int] = {}

    def number(self, value: T) -> int:
        """The number of `value`; the caller keeps it alive, so that its `id()` stays its own."""
        number = self._by_id.get(id(value))
        if number is None:
            number = self._by_key.setdefault(self._key(value), len(self.values))
            self._by_id[id(value)] = number
            if number == len(self.values):
                self.values.append(value)
        return number


class _Records:
    """The distinct records of a tree, and the tree as their numbers in preorder.

    A leaf is its number, 0 or more; a container of structure `s` is `-1 - s`.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.meshes = _Numbering[MeshRecord](lambda mesh: mesh)
        self.specs = _Numbering[SpecRecord](lambda spec: spec)
        self.shardings = _Numbering[ShardingRecord](self._sharding_key)
        self.leaves: dict[_LeafKey, int] = {}
        self.structures = _Numbering[ContainerRecord](_structure_key)
        self.codes = list(self._codes(tree))

    def _codes(self, tree: Tree) -> Iterator[int]:
        # A stack of ours: a tree must not be able to exhaust Python's.
        leaves, leaf_key, structure_number = self.leaves, self.leaf_key, self.structures.number
        stack = [iter((tree,))]
        while stack:
            for node in stack[-1]:
                if not isinstance(node, ContainerRecord):
                    yield leaves.setdefault(leaf_key(node), len(leaves))
                    continue
                if len(stack) > MAX_DEPTH:
                    raise RecordError(f"containers lie within one another more than {MAX_DEPTH} deep")
                yield -1 - structure_number(node)
                stack.append(iter(node.children))
                break
            else:
                stack.pop()

    def _sharding_key(self, sharding: ShardingRecord) -> Hashable:
        if isinstance(sharding, NamedShardingRecord):
            return self.meshes.number(sharding.mesh), self.specs.number(sharding.spec), sharding.memory_kind
        return sharding

    def leaf_key(self, leaf: LeafRecord) -> _LeafKey:
        """All that a leaf is, with the number of its sharding in place of the sharding."""
        if isinstance(leaf, ArrayRecord):
            sharding = None if leaf.sharding is None else self.shardings.number(leaf.sharding)
            return leaf.shape, leaf.dtype, sharding, leaf.committed, leaf.prng
        return leaf.shape, leaf.dtype, leaf.type


def _structure_key(container: ContainerRecord) -> Hashable:
    keys = len(container.keys) if container.kind in COUNTED_KINDS else container.keys
    return container.kind, container.module, container.qualname, keys


class _UnwritableError(Exception):
    """What an entry holds that the format cannot."""


class _Sections:
    """The sections of the payload, as what msgpack packs."""

    def __init__(self, found: _Records) -> None:
        self._found = found
        self._texts: dict[str, int] = {}
        self._encoded_texts: list[str | bytes] = []
        self._device_lists = _Numbering[tuple[int, ...]](lambda ids: ids)
        self._device_entries: list[Entry] = []
        self._device_count = 0
        self._mesh_device_count = 0
        self._problems: list[Problem] = []

    def of(self, manifest: Manifest) -> Sequence[object]:
        """Every section in its place.

        Raises:
            RecordError: Lists everything that the format cannot hold.
        """
        found = self._found
        scope = self._text(manifest.scope)
        inventory = self._entries("inventory", [manifest.inventory], self._inventory)
        writer = self._entries("writer", [manifest.writer], self._writer)
        tables = (
            self._entries("mesh", found.meshes.values, self._mesh),
            self._entries("spec", found.specs.values, self._spec),
            self._entries("sharding", found.shardings.values, self._sharding),
            self._entries("container", found.structures.values, self._structure),
            self._entries("leaf", found.leaves, self._leaf),
        )
        if self._problems:
            raise RecordError(*self._problems)
        # Texts and device lists are numbered while the others are written, and stand before them.
        return (self._encoded_texts, self._device_entries, scope, *inventory, *writer, *tables, found.codes)

    def _entries(self, kind: str, values: Iterable[T], write: Callable[[T], U]) -> list[U]:
        entries: list[U] = []
        for value in values:
            try:
                entries.append(write(value))
            except _UnwritableError as unwritable:
                self._problems.append(self._problem(kind, value, str(unwritable)))
                if len(self._problems) == MAX_PROBLEMS:
                    raise RecordError(*self._problems) from unwritable
        return entries

    def _problem(self, kind: str, value: object, wrong: str) -> Problem:
        """What is wrong, with the path of the first leaf or container that has it."""
        if kind not in ("leaf", "container"):
            return Problem(could_not=f"cannot record {kind} {_short(value)}: {wrong}")
        path = next(path for path, node in _iterate_nodes(self._found.tree) if self._is(node, value))
        return Problem(could_not=f"cannot record a {kind}: {wrong}", affects=(path_text(path),))

    def _is(self, node: Tree, value: object) -> bool:
        return node is value if isinstance(node, ContainerRecord) else self._found.leaf_key(node) == value

    def _inventory(self, inventory: Inventory | None) -> Entry:
        if inventory is None:
            return ()
        return (
            self._text(inventory.platform),
            self._text(inventory.device_kind),
            self._device_list(inventory.device_ids),
            [self._text(kind) for kind in _few(inventory.memory_kinds, "memory kinds")],
            self._text(inventory.default_memory_kind),
            pack_process_indices(map(_integer, inventory.process_indices)),
        )

    def _writer(self, writer: tuple[tuple[str, str], ...]) -> Entry:
        return [self._text(text) for pair in writer for text in pair]

    def _mesh(self, mesh: MeshRecord) -> Entry:
        if mesh.device_ids is not None:
            self._mesh_device_count += len(mesh.device_ids)
            if self._mesh_device_count > MAX_MESH_DEVICES:
                raise _UnwritableError(f"all meshes together have more than {MAX_MESH_DEVICES} devices")
        return (
            [self._text(name) for name in _few(mesh.axis_names, "mesh axes")],
            [_integer(size) for size in mesh.axis_sizes],
            None if mesh.axis_types is None else [self._text(kind) for kind in mesh.axis_types],
            None if mesh.device_ids is None else self._device_list(mesh.device_ids),
            self._optional_text(mesh.platform),
        )

    def _spec(self, spec: SpecRecord) -> Entry:
        _few((*spec.partitioned_axes(), *spec.unreduced, *spec.reduced), "mesh axes")
        return (
            [self._partition(partition) for partition in _few(spec.partitions, "partitions")],
            [self._text(axis) for axis in spec.unreduced],
            [self._text(axis) for axis in spec.reduced],
            self._optional_text(spec.unreduced_kind),
        )

    def _partition(self, partition: Partition) -> object:
        if partition is None:
            return None
        if partition is UNCONSTRAINED:
            return True
        if isinstance(partition, str):
            return self._text(partition)
        return [self._text(axis) for axis in partition_axes(partition)]

    def _sharding(self, sharding: ShardingRecord) -> Entry:
        if isinstance(sharding, NamedShardingRecord):
            mesh = self._found.meshes.number(sharding.mesh)
            spec = self._found.specs.number(sharding.spec)
            return NAMED_SHARDING, mesh, spec, self._optional_text(sharding.memory_kind)
        platform, memory_kind = self._optional_text(sharding.platform), self._optional_text(sharding.memory_kind)
        return SINGLE_DEVICE, _integer(sharding.device_id), platform, memory_kind

    def _structure(self, container: ContainerRecord) -> Entry:
        names = [self._text(text) for text in (container.kind, container.module, container.qualname)]
        if container.kind in COUNTED_KINDS:
            return *names, len(container.keys), ()
        groups: list[list[int]] = []
        for key in container.keys:
            code = _key_code(key)
            value = self._text(key.name) if isinstance(key.name, str) else _integer(key.name)
            if not groups or groups[-1][0] != code:
                groups.append([code])
            groups[-1].append(value)
        return *names, 0, groups

    def _leaf(self, key: _LeafKey) -> Entry:
        if len(key) == 3:
            shape, dtype, kind = key
            return VALUE, self._text(kind), self._text(dtype), _shape(shape)
        shape, dtype, sharding, committed, prng = key
        array = ARRAY, self._text(dtype), _shape(shape), sharding, bool(committed)
        return array if prng is None else (*array, self._text(prng.impl), _shape(prng.key_shape))

    def _text(self, text: str) -> int:
        number = self._texts.get(text)
        if number is None:
            self._encoded_texts.append(_encoded(text))
            number = self._texts[text] = len(self._texts)
        return number

    def _optional_text(self, text: str | None) -> int | None:
        return None if text is None else self._text(text)

    def _device_list(self, device_ids: tuple[int, ...]) -> int:
        number = self._device_lists.number(device_ids)
        if number == len(self._device_entries):
            self._device_count += len(device_ids)
            if self._device_count > MAX_DEVICE_IDS:
                raise _UnwritableError(f"all lists of devices together hold more than {MAX_DEVICE_IDS} ids")
            ids = tuple(map(operator.index, device_ids))
            if min(ids) < INT_MIN or max(ids) > DEVICE_ID_MAX:
                raise _UnwritableError("a device id has more than 64 bits")
            self._device_entries.append(pack_device_ids(ids))
        return number


def _iterate_nodes(tree: Tree, prefix: LeafPath = ()) -> Iterator[tuple[LeafPath, Tree]]:
    yield prefix, tree
    if isinstance(tree, ContainerRecord):
        for key, child in zip(tree.keys, tree.children, strict=True):
            yield from _iterate_nodes(child, (*prefix, key))


def _key_code(key: Key) -> int:
    kind, name = key
    if isinstance(name, str) and kind in ("dict", "attr"):
        return KEY_DICT_TEXT if kind == "dict" else KEY_ATTR
    if isinstance(name, int) and kind in ("dict", "index"):
        return KEY_DICT_INT if kind == "dict" else KEY_INDEX
    raise _UnwritableError(f"a key of kind {kind!r} cannot be {_short(name)}")


def _encoded(text: str) -> str | bytes:
    """`text`, or its bytes where UTF-8 cannot express it because of lone surrogates."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MAX_TEXT_NBYTES:
        raise _UnwritableError(f"the text {_short(text)} takes {len(data)} bytes, more than {MAX_TEXT_NBYTES}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return data
    return text


def _integer(value: int) -> int:
    # index: True becomes 1, which it equals, and a float is no integer.
    value = operator.index(value)
    if not INT_MIN <= value <= INT_MAX:
        raise _UnwritableError(f"the integer {_short(value)} has more than 64 bits")
    return value


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([_integer(size) for size in _few(shape, "dimensions")])


def _few(values: Sequence[T], noun: str) -> Sequence[T]:
    if len(values) > MAX_ENTRY_LENGTH:
        raise _UnwritableError(f"{len(values)} {noun}, more than {MAX_ENTRY_LENGTH}")
    return values


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, int) else hex(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
