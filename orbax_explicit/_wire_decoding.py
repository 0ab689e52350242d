"""The payload of version 1 of `explicit_sharding.msgpack` -> `Manifest`.

The payload may be anything. What makes the rest unreadable ends the reading. Anything else is noted with its
place and reading goes on, so that one `FormatError` lists it all. Whether a record can be true is for the
records to say; how bytes that may be anything are read at all is for `_wire_stream`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Literal, cast

from orbax_explicit._records import (
    SCOPES,
    UNCONSTRAINED,
    ArrayRecord,
    AxisType,
    ContainerKind,
    ContainerRecord,
    Inventory,
    Key,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    ReductionKind,
    Scope,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    Tree,
    ValueRecord,
    ValueType,
)
from orbax_explicit._wire_schema import (
    ARRAY,
    COUNTED_KINDS,
    DEVICE_ID_MAX,
    KEY_ATTR,
    KEY_DICT_INT,
    KEY_DICT_TEXT,
    KEY_INDEX,
    MAX_DEPTH,
    MAX_DEVICE_IDS,
    MAX_ENTRY_LENGTH,
    MAX_MESH_DEVICES,
    MAX_TEXT_NBYTES,
    NAMED_SHARDING,
    PACKED,
    RUNS,
    SECTIONS,
    SINGLE_DEVICE,
    VALUE,
    is_width,
    pack_device_ids,
    pack_process_indices,
    pairs,
    unpack_integers,
    unpack_runs,
)
from orbax_explicit._wire_stream import (
    EntryError,
    Problems,
    Source,
    all_integers,
    array,
    built,
    fields,
    integer,
    integers,
    read_table,
    stream_table,
)

_KEY_KINDS: Final[dict[int, Literal["dict", "index", "attr"]]] = {
    KEY_DICT_TEXT: "dict",
    KEY_DICT_INT: "dict",
    KEY_INDEX: "index",
    KEY_ATTR: "attr",
}
_TEXT_KEYS: Final = frozenset({KEY_DICT_TEXT, KEY_ATTR})
_ANY_LEAF: Final = ValueRecord(type="int")


def decode_payload(payload: bytes) -> Manifest:
    """The manifest that `payload` records.

    Raises:
        FormatError: The payload is not one that a writer writes. Lists every problem, up to a hundred.
    """
    problems = Problems()
    return _Sections(Source(payload, problems), problems).manifest()


class _Structure:
    """A container without its children, checked once however often the tree has it."""

    def __init__(self, like: ContainerRecord, count: int, keys: tuple[Key, ...] | None) -> None:
        self.count = count
        self._like = like
        self._keys = keys

    def container(self, children: Sequence[Tree]) -> ContainerRecord:
        """The container that has these children."""
        if self.count == 0:
            return self._like
        if self._keys is None:
            # Not before there are so many children: a file can declare any number of them in a few bytes.
            self._keys = tuple([Key("index", i) for i in range(self.count)])
        like = self._like
        return ContainerRecord(
            kind=like.kind, keys=self._keys, children=tuple(children), module=like.module, qualname=like.qualname
        )


class _Sections:
    """Reads one section after the other."""

    def __init__(self, source: Source, problems: Problems) -> None:
        self._source = source
        self._problems = problems
        self._mesh_device_count = 0
        self._device_id_count = 0

    def manifest(self) -> Manifest:
        """The manifest, from a source that stands at its first byte."""
        source, problems = self._source, self._problems
        count = source.array_length()
        if count != len(SECTIONS):
            source.end(f"{count} sections; version 1 has {len(SECTIONS)}")
        self._texts = read_table("texts", source, problems, _text)
        self._device_lists = stream_table("device_lists", source, problems, self._device_list)
        scope = self._scope()
        inventory = self._inventory()
        writer = self._writer()
        self._meshes = read_table("meshes", source, problems, self._mesh)
        self._specs = read_table("specs", source, problems, self._spec)
        self._shardings = read_table("shardings", source, problems, self._sharding)
        structures = stream_table("structures", source, problems, self._structure)
        leaves = read_table("leaves", source, problems, self._leaf)
        codes = self._codes(len(leaves.entries), len(structures.entries))
        source.expect_end()
        if not problems:
            # Where an entry was refused, what it mentions was not all seen.
            for table in (self._texts, self._device_lists, self._meshes, self._specs, self._shardings):
                table.check_order(problems)
        problems.end_if_any()
        # Without a problem no entry is None.
        tree = self._tree(
            codes, cast(Sequence[LeafRecord], leaves.entries), cast(Sequence[_Structure], structures.entries)
        )
        return Manifest(tree=tree, scope=scope, inventory=inventory, writer=writer)

    def _device_list(self, _: int) -> tuple[tuple[int, ...], Hashable]:
        form, *rest = entry = self._source.array() or [None]
        runs = packed = False
        if all_integers(entry[:3]):
            runs = form == RUNS and len(entry) >= 3 and len(entry) % 2 == 1 and all_integers(rest)
            packed = form == PACKED and len(entry) == 4 and is_width(entry[2]) and type(entry[3]) is bytes
        if runs:
            starts_and_counts = cast(list[int], rest)
            if any(count < 1 for count in starts_and_counts[1::2]):
                raise EntryError("a run of no devices")
            self._add_device_ids(sum(starts_and_counts[1::2]))
            ids = unpack_runs(starts_and_counts)
        elif packed:
            base, width, data = cast(tuple[int, int, bytes], rest)
            if not data or len(data) % width:
                raise EntryError(f"{len(data)} bytes of packed device ids of {width} bytes each")
            self._add_device_ids(len(data) // width)
            ids = unpack_integers(base, width, data)
        else:
            raise EntryError("neither runs of device ids nor packed ones")
        if max(ids) > DEVICE_ID_MAX:
            raise EntryError("a device id of more than 64 bits")
        if pack_device_ids(ids) != tuple(entry):
            raise EntryError("device ids in another form than the one in which they are written")
        return ids, ids

    def _add_device_ids(self, count: int) -> None:
        self._device_id_count += count
        if self._device_id_count > MAX_DEVICE_IDS:
            self._source.end(f"all lists of devices together hold more than {MAX_DEVICE_IDS} ids")

    def _scope(self) -> Scope:
        self._source.place = "scope"
        (position,) = self._source.values(1)
        return built("scope", self._problems, self._known_scope, position) or "tree"

    def _known_scope(self, position: object) -> Scope:
        scope = self._texts.get(position)
        if scope not in SCOPES:
            raise EntryError(f"unknown scope {scope!r}; known are {list(SCOPES)}")
        return scope

    def _inventory(self) -> Inventory | None:
        source = self._source
        source.place = "inventory"
        count = source.array_length()
        if count not in (0, 6):
            source.end(f"an inventory of {count} fields; it has 0 or 6")
        if count == 0:
            return None
        first_five, processes = source.values(5), source.array()
        return built("inventory", self._problems, lambda entry: self._inventory_record(*entry), (first_five, processes))

    def _inventory_record(self, first_five: Sequence[object], processes: Sequence[object]) -> Inventory:
        platform, device_kind, device_list, memory_kinds, default_memory_kind = first_five
        texts = self._texts
        # In the order of the file, which is that of first mention.
        platform_text, device_kind_text = texts.get(platform), texts.get(device_kind)
        device_ids = self._device_lists.get(device_list)
        return Inventory(
            platform=platform_text,
            device_kind=device_kind_text,
            device_ids=device_ids,
            memory_kinds=texts.all(memory_kinds),
            default_memory_kind=texts.get(default_memory_kind),
            process_indices=_process_indices(processes, len(device_ids)),
        )

    def _writer(self) -> tuple[tuple[str, str], ...]:
        self._source.place = "writer"
        return built("writer", self._problems, self._writer_pairs, self._source.array()) or ()

    def _writer_pairs(self, positions: Sequence[object]) -> tuple[tuple[str, str], ...]:
        if len(positions) % 2:
            raise EntryError("a name without a version")
        texts = [self._texts.get(position) for position in positions]
        return tuple(zip(texts[::2], texts[1::2], strict=True))

    def _mesh(self, entry: object) -> MeshRecord:
        axis_names, axis_sizes, axis_types, device_list, platform = fields(entry, 5)
        texts = self._texts
        names, sizes = texts.all(axis_names), integers(axis_sizes)
        # What is no axis type the record refuses, by name.
        types = None if axis_types is None else cast(tuple[AxisType, ...], texts.all(axis_types))
        device_ids = self._device_lists.optional(device_list)
        self._mesh_device_count += len(device_ids or ())
        if self._mesh_device_count > MAX_MESH_DEVICES:
            self._source.end(f"all meshes together have more than {MAX_MESH_DEVICES} devices")
        return MeshRecord(
            axis_names=names,
            axis_sizes=sizes,
            axis_types=types,
            device_ids=device_ids,
            platform=texts.optional(platform),
        )

    def _spec(self, entry: object) -> SpecRecord:
        partitions, unreduced, reduced, unreduced_kind = fields(entry, 4)
        texts = self._texts
        record = [self._partition(partition) for partition in array(partitions)]
        named = sum(1 if isinstance(p, str) else len(p) for p in record if isinstance(p, str | tuple))
        if named + len(array(unreduced)) + len(array(reduced)) > MAX_ENTRY_LENGTH:
            # Before the record looks at them: to tell which ones repeat takes it quadratic time.
            raise EntryError(f"a spec names more than {MAX_ENTRY_LENGTH} mesh axes")
        return SpecRecord(
            partitions=tuple(record),
            unreduced=texts.all(unreduced),
            reduced=texts.all(reduced),
            unreduced_kind=cast(ReductionKind | None, texts.optional(unreduced_kind)),
        )

    def _partition(self, partition: object) -> Partition:
        if partition is None:
            return None
        if partition is True:
            return UNCONSTRAINED
        return self._texts.all(partition) if type(partition) is tuple else self._texts.get(partition)

    def _sharding(self, entry: object) -> ShardingRecord:
        form, first, second, memory_kind = fields(entry, 4)
        if integer(form) == NAMED_SHARDING:
            return NamedShardingRecord(
                mesh=self._meshes.get(first),
                spec=self._specs.get(second),
                memory_kind=self._texts.optional(memory_kind),
            )
        if form == SINGLE_DEVICE:
            return SingleDeviceRecord(
                device_id=integer(first),
                platform=self._texts.optional(second),
                memory_kind=self._texts.optional(memory_kind),
            )
        raise EntryError(f"no sharding is of form {form}")

    def _structure(self, _: int) -> tuple[_Structure, Hashable]:
        source = self._source
        count = source.array_length()
        if count != 5:
            source.end(f"a structure of {count} fields; it has 5")
        *names, positions = source.values(4)
        # All of it, before any of it can be refused.
        groups = [source.array() for _ in range(source.array_length())]
        kind, module, qualname = (self._texts.get(name) for name in names)
        keys = self._keys(groups)
        children = integer(positions)
        counted = kind in COUNTED_KINDS
        if children < 0 or (children and not counted) or (keys and counted):
            raise EntryError(f"a {kind} of {children} positions and {len(keys)} keys")
        like = ContainerRecord(
            kind=cast(ContainerKind, kind),
            keys=keys,
            children=(_ANY_LEAF,) * len(keys),
            module=module,
            qualname=qualname,
        )
        structure = _Structure(like, children or len(keys), None if counted else keys)
        return structure, (kind, module, qualname, children, keys)

    def _keys(self, groups: Sequence[Sequence[object]]) -> tuple[Key, ...]:
        keys: list[Key] = []
        before: object = None
        for group in groups:
            if len(group) < 2:
                raise EntryError("a group of no keys")
            code, *values = group
            if integer(code) not in _KEY_KINDS:
                raise EntryError(f"no group of keys is of code {code}")
            if code == before:
                raise EntryError(f"two neighbouring groups of keys are of code {code}")
            before = code
            code = cast(int, code)
            names = [self._texts.get(value) for value in values] if code in _TEXT_KEYS else integers(tuple(values))
            kind = _KEY_KINDS[code]
            keys += [Key(kind, name) for name in names]
        return tuple(keys)

    def _leaf(self, entry: object) -> LeafRecord:
        values = array(entry)
        length = len(values)
        form = integer(values[0]) if values else None
        if form == ARRAY and length in (5, 7):
            dtype, shape = self._texts.get(values[1]), integers(values[2])
            sharding = self._shardings.optional(values[3])
            committed = values[4]
            if type(committed) is not bool:
                raise EntryError("committed is no bool")
            prng = PrngRecord(impl=self._texts.get(values[5]), key_shape=integers(values[6])) if length == 7 else None
            return ArrayRecord(shape=shape, dtype=dtype, sharding=sharding, committed=committed, prng=prng)
        if form == VALUE and length == 4:
            kind, dtype = self._texts.get(values[1]), self._texts.get(values[2])
            return ValueRecord(type=cast(ValueType, kind), shape=integers(values[3]), dtype=dtype)
        raise EntryError(f"no leaf of {length} fields is of form {form}")

    def _codes(self, leaf_count: int, structure_count: int) -> Sequence[int]:
        """The nodes of the tree, each of which mentions what there is, in the order of first mention."""
        self._source.place = "tree"
        values = self._source.array()
        if not all_integers(values):
            self._problems.note("tree", "something else among the integers")
            return ()
        codes = cast(list[int], values)
        firsts = dict.fromkeys(codes)
        for name, count, mentioned in (
            ("leaves", leaf_count, [code for code in firsts if code >= 0]),
            ("structures", structure_count, [-1 - code for code in firsts if code < 0]),
        ):
            if mentioned == list(range(count)):
                continue
            absent = [n for n in mentioned if n >= count]
            for n in absent:
                node = codes.index(n if name == "leaves" else -1 - n)
                self._problems.note(f"tree[{node}]", f"mentions {name}[{n}] of {count}")
            if not absent and not self._problems:
                self._problems.note("tree", f"does not mention all {count} {name} in their order")
        return codes

    def _tree(self, codes: Sequence[int], leaves: Sequence[LeafRecord], structures: Sequence[_Structure]) -> Tree:
        # A stack of ours: a file must not be able to exhaust Python's. Each open container has its children so far.
        stack: list[tuple[_Structure, list[Tree]]] = []
        trees: list[Tree] = []
        children = trees
        for position, code in enumerate(codes):
            if not stack and trees:
                self._problems.end(f"tree[{position}]", f"{len(codes) - position} nodes follow the tree")
            if code >= 0:
                children.append(leaves[code])
            elif len(stack) == MAX_DEPTH:
                self._problems.end(f"tree[{position}]", f"containers lie within one another more than {MAX_DEPTH} deep")
            else:
                children = []
                stack.append((structures[-1 - code], children))
            while stack and len(children) == stack[-1][0].count:
                container = stack.pop()[0].container(children)
                children = stack[-1][1] if stack else trees
                children.append(container)
        if stack or not trees:
            self._problems.end("tree", f"ends after {len(codes)} nodes, before all containers are full")
        return trees[0]


def _text(entry: object) -> str:
    if type(entry) is str:
        # Few texts are so long that their bytes have to be counted.
        if 4 * len(entry) > MAX_TEXT_NBYTES and len(entry.encode()) > MAX_TEXT_NBYTES:
            raise EntryError(f"a text of more than {MAX_TEXT_NBYTES} bytes")
        return entry
    if type(entry) is not bytes:
        raise EntryError(f"a value of type {type(entry).__name__} where a text belongs")
    if len(entry) > MAX_TEXT_NBYTES:
        raise EntryError(f"a text of more than {MAX_TEXT_NBYTES} bytes")
    try:
        text = entry.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise EntryError(f"bytes that are no text: {error.reason}") from error
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        raise EntryError("a text as bytes without a lone surrogate")
    return text


def _process_indices(runs: Sequence[object], count: int) -> tuple[int, ...]:
    if len(runs) % 2 or not all_integers(runs):
        raise EntryError("processes are no pairs of integers")
    pairs_of = cast(list[int], runs)
    if any(length < 1 for length in pairs_of[1::2]) or sum(pairs_of[1::2]) != count:
        raise EntryError(f"processes do not own the {count} devices")
    indices = [index for index, length in pairs(pairs_of) for _ in range(length)]
    if pack_process_indices(indices) != pairs_of:
        raise EntryError("neighbouring runs of one process")
    return tuple(indices)
