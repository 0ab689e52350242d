"""The bytes of `explicit_sharding.msgpack`: what is written, and that anything else is refused."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgpack
import pytest
from fuzz_wire import payload_of, seal
from golden.make_v1 import DIRECTORY as GOLDEN
from golden.make_v1 import MANIFESTS, array, mesh, on, train_state, tree
from hypothesis import given
from strategies import inventories, manifests, meshes, specs

from orbax_explicit import _wire_decoding
from orbax_explicit import _wire_schema as schema
from orbax_explicit._errors import FormatError, RecordError
from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    Tree,
    ValueRecord,
)
from orbax_explicit._wire import FRAME, decode, encode

MEMORY_NBYTES = 64 * 2**20
FUZZ_EACH_WAY = 7_000

LEAF = ValueRecord(type="int", dtype="int64")

# The sections of a payload, by position.
TEXTS, DEVICE_LISTS, SCOPE, INVENTORY, WRITER, MESHES, SPECS, SHARDINGS, STRUCTURES, LEAVES, TREE = range(11)


def small() -> Manifest:
    """One array on four devices and one host value: something in every section."""
    devices = MeshRecord(
        axis_names=("d", "m"),
        axis_sizes=(2, 2),
        axis_types=("explicit", "auto"),
        device_ids=(0, 1, 2, 3),
        platform="cpu",
    )
    inventory = Inventory(
        platform="cpu",
        device_kind="cpu",
        device_ids=(0, 1, 2, 3),
        process_indices=(0, 0, 1, 1),
        memory_kinds=("device", "pinned_host"),
        default_memory_kind="device",
    )
    return Manifest(
        tree=tree({"n": LEAF, "w": array(8, 4, sharding=on(devices, ("d", "m")))}),
        inventory=inventory,
        writer=(("jax", "0.10.2"),),
    )


# `small()`, written by hand from docs/format.md, where it is the example.
SMALL: list[Any] = [
    [
        *("tree", "cpu", "device", "pinned_host", "jax", "0.10.2", "d", "m", "explicit", "auto", "dict", "", "n", "w"),
        *("int", "int64", "float32"),
    ],
    [[0, 0, 4]],
    0,
    [1, 1, 0, [2, 3], 2, [0, 2, 1, 2]],
    [4, 5],
    [[[6, 7], [2, 2], [8, 9], 0, 1]],
    [[[[6, 7]], [], [], None]],
    [[0, 0, 0, 2]],
    [[10, 11, 11, 0, [[0, 12, 13]]]],
    [[1, 14, 15, []], [0, 16, [8, 4], 0, True]],
    [-1, 0, 1],
]


def sections(manifest: Manifest) -> list[Any]:
    """The sections of the payload that records `manifest`."""
    return cast(list[Any], msgpack.unpackb(payload_of(encode(manifest))))


def edited(edit: Callable[[list[Any]], object], manifest: Manifest | None = None) -> bytes:
    """A well-framed file whose sections are those of `manifest` (`small()`) after `edit`."""
    changed = sections(manifest or small())
    edit(changed)
    return seal(msgpack.packb(changed))


def setter(value: object, *path: int) -> Callable[[list[Any]], None]:
    """An edit that puts `value` at `path`."""

    def edit(changed: list[Any]) -> None:
        for step in path[:-1]:
            changed = changed[step]
        changed[path[-1]] = value

    return edit


def problems_of(data: bytes) -> list[str]:
    """What is wrong with a file, as one `FormatError` lists it."""
    with pytest.raises(FormatError) as caught:
        decode(data)
    return [str(problem) for problem in caught.value.problems]


def nested(depth: int) -> Tree:
    """A leaf within `depth` containers."""
    node: Tree = LEAF
    for _ in range(depth):
        node = tree({"a": node})
    return node


# What is written.


@given(manifests())
def test_what_is_decoded_is_what_was_encoded(manifest: Manifest) -> None:
    """decode(encode(m)) = m, for every valid manifest."""
    assert decode(encode(manifest)) == manifest


@given(manifests())
def test_equal_manifests_have_equal_bytes(manifest: Manifest) -> None:
    """The bytes follow from what the records say, not from which objects they share."""
    data = encode(manifest)
    unshared = unshare(manifest)
    assert unshared == manifest
    assert encode(unshared) == data
    assert encode(decode(data)) == data


def unshare(manifest: Manifest) -> Manifest:
    """An equal manifest no two leaves of which share a record."""

    def unshared(node: Tree) -> Tree:
        if isinstance(node, ContainerRecord):
            keys = tuple(Key(*key) for key in node.keys)
            return replace(node, keys=keys, children=tuple(unshared(child) for child in node.children))
        if isinstance(node, ArrayRecord) and isinstance(node.sharding, NamedShardingRecord):
            device_ids = node.sharding.mesh.device_ids
            mesh = replace(node.sharding.mesh, device_ids=None if device_ids is None else (*device_ids,))
            return replace(node, sharding=replace(node.sharding, mesh=mesh, spec=replace(node.sharding.spec)))
        return replace(node)

    return replace(manifest, tree=unshared(manifest.tree))


@given(meshes())
def test_every_mesh_round_trips(mesh: MeshRecord) -> None:
    """Abstract and concrete, typed and not, with device ids in any order."""
    leaf = ArrayRecord(shape=(), dtype="int8", sharding=NamedShardingRecord(mesh=mesh, spec=SpecRecord()))
    assert decode(encode(Manifest(tree=leaf))).meshes == (mesh,)


@given(specs())
def test_every_spec_round_trips(spec: SpecRecord) -> None:
    """Unconstrained, nested and empty partitions, and pending reductions, verbatim."""
    devices = MeshRecord(axis_names=tuple(sorted(spec.axes())), axis_sizes=(2,) * len(spec.axes()), axis_types=None)
    sharding = NamedShardingRecord(mesh=devices, spec=spec)
    leaf = ArrayRecord(shape=(8,) * len(spec.partitions), dtype="int8", sharding=sharding)
    assert decode(encode(Manifest(tree=leaf))).tree == leaf


@given(inventories())
def test_every_inventory_round_trips(inventory: Inventory) -> None:
    """Processes that own their devices in blocks or in turns."""
    assert decode(encode(Manifest(tree=LEAF, inventory=inventory))).inventory == inventory


def test_the_bytes_are_those_of_the_page() -> None:
    """A file written by hand from docs/format.md is what `encode` writes and what `decode` reads."""
    assert bytes.fromhex("894F58450D0A1A0A") == FRAME.magic
    assert sections(small()) == SMALL
    assert encode(small()) == seal(msgpack.packb(SMALL))
    assert decode(seal(msgpack.packb(SMALL))) == small()


def test_the_page_shows_the_example() -> None:
    """docs/format.md has the example that the test above reads."""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "format.md").read_text()
    example = page.split("```json\n")[1].split("```")[0]
    assert json.loads(example) == SMALL


def test_decoded_records_are_shared() -> None:
    """One object for each entry of a table, however many arrays have it."""
    manifest = decode(encode(train_state()))
    arrays = list(manifest.arrays.values())
    assert len(arrays) == 21
    assert len({id(a) for a in arrays}) == len(set(arrays)) == 4
    shardings = [a.sharding for a in arrays if isinstance(a.sharding, NamedShardingRecord)]
    assert len({id(s) for s in shardings}) == len(set(shardings)) == 3
    assert len({id(s.mesh) for s in shardings}) == 1
    assert manifest.inventory is not None
    assert shardings[0].mesh.device_ids is manifest.inventory.device_ids


def test_the_size_does_not_depend_on_devices_times_arrays() -> None:
    """An array more costs the same few bytes on 8 and on 4,096 devices, and a plain range of ids costs nothing."""

    def nbytes(devices: int, arrays: int) -> int:
        sharding = on(mesh(("x", devices)), "x")
        leaves: dict[str | int, Tree] = {f"{i:05}": array(devices, i, sharding=sharding) for i in range(arrays)}
        return len(encode(Manifest(tree=tree(leaves))))

    few, many = (nbytes(devices, 2_000) - nbytes(devices, 1_000) for devices in (8, 4_096))
    assert abs(many - few) <= 2 * 1_000
    assert few / 1_000 <= 40 + 5
    assert nbytes(4_096, 1) - nbytes(8, 1) <= 8


@pytest.mark.parametrize(
    ("ids", "form"),
    [
        pytest.param((7,), [0, 7, 1], id="one device is a run"),
        pytest.param(tuple(range(-2, 500)), [0, -2, 502], id="a range is one run"),
        pytest.param((*range(8), *range(100, 108)), [0, 0, 8, 100, 8], id="two hosts are two runs"),
        pytest.param((3, 2), [1, 2, 1, bytes([1, 0])], id="a short list out of order is packed"),
        pytest.param((300, 0), [1, 0, 2, bytes([44, 1, 0, 0])], id="two bytes each where one does not hold them"),
        pytest.param((-1, 65535), [1, -1, 4, bytes([0, 0, 0, 0, 0, 0, 1, 0])], id="ids count from the smallest"),
        pytest.param(
            (2**63 - 1, -(2**63)), [1, -(2**63), 8, bytes([255] * 8 + [0] * 8)], id="ids as far apart as can be"
        ),
    ],
)
def test_a_list_of_devices_has_one_form(ids: tuple[int, ...], form: list[Any]) -> None:
    """Runs where they are much shorter than the list, else integers of the width that they need."""
    manifest = Manifest(tree=array(sharding=on(mesh(("x", len(ids)), ids=ids))))
    assert sections(manifest)[DEVICE_LISTS] == [form]
    assert decode(encode(manifest)) == manifest


# The golden files.


def test_there_is_a_golden_file_for_each_manifest() -> None:
    """Neither set is empty, and neither has what the other lacks."""
    files = {path.name for path in GOLDEN.iterdir()}
    assert len(files) >= 10
    assert files == {f"{name}.msgpack" for name in MANIFESTS}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_golden_file_is_read_and_written_as_ever(name: str) -> None:
    """It decodes to the manifest that was built by hand, and that one encodes to its very bytes."""
    data = (GOLDEN / f"{name}.msgpack").read_bytes()
    assert decode(data) == MANIFESTS[name]
    assert encode(MANIFESTS[name]) == data


# What cannot be written.


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        pytest.param(Manifest(tree=LEAF, notes=("x",)), "notes", id="notes"),
        pytest.param(Manifest(tree=tree({2**64: LEAF})), "64 bits", id="a dict key above 64 bits"),
        pytest.param(Manifest(tree=tree({-(2**63) - 1: LEAF})), "64 bits", id="a dict key below 64 bits"),
        pytest.param(Manifest(tree=tree({"a": tree({10**5_000: LEAF})})), "64 bits", id="an integer too long to print"),
        pytest.param(Manifest(tree=array(2**64, sharding=None)), "64 bits", id="a dimension"),
        pytest.param(
            Manifest(tree=array(sharding=SingleDeviceRecord(device_id=2**64))), "64 bits", id="a single device"
        ),
        pytest.param(Manifest(tree=array(sharding=on(mesh(("x", 1), ids=(2**63,))))), "64 bits", id="a device id"),
        pytest.param(
            Manifest(
                tree=ContainerRecord(kind="node", keys=(Key("index", "a"),), children=(LEAF,), module="m", qualname="N")
            ),
            "a key of kind 'index' cannot be a",
            id="a position that is text",
        ),
        pytest.param(
            Manifest(
                tree=ContainerRecord(
                    kind="namedtuple", keys=(Key("attr", 1),), children=(LEAF,), module="m", qualname="N"
                )
            ),
            "a key of kind 'attr' cannot be 0x1",
            id="a field whose name is a number",
        ),
        pytest.param(Manifest(tree=tree({"x" * (2**14 + 1): LEAF})), "16385 bytes", id="a text too long"),
        pytest.param(Manifest(tree=array(*[1] * 65, sharding=None)), "65 dimensions", id="too many dimensions"),
        pytest.param(
            Manifest(tree=array(sharding=on(mesh(*((f"a{i}", 1) for i in range(65)))))), "65 mesh axes", id="many axes"
        ),
        pytest.param(Manifest(tree=nested(129)), "128 deep", id="a tree too deep"),
        pytest.param(
            Manifest(tree=array(sharding=on(mesh(("x", 2**19 + 1))))), "hold more than 524288 ids", id="many devices"
        ),
        pytest.param(
            Manifest(
                tree=tree({i: array(sharding=on(replace(mesh(("x", 2**17)), platform=str(i)))) for i in range(33)})
            ),
            "more than 4194304 devices",
            id="too many devices over all meshes",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused(manifest: Manifest, says: str) -> None:
    """By a `RecordError`, before there are any bytes."""
    with pytest.raises(RecordError) as caught:
        encode(manifest)
    assert says in str(caught.value)


def test_everything_that_cannot_be_written_is_listed_with_its_leaf() -> None:
    """One error, with the path of each leaf or container."""
    bad = array(2**64, sharding=None)
    manifest = Manifest(tree=tree({"ok": LEAF, "a": tree({"b": bad}), "c": tree({2**64: LEAF})}))
    with pytest.raises(RecordError) as caught:
        encode(manifest)
    assert [problem.affects for problem in caught.value.problems] == [("c",), ("a/b",)]


def test_a_list_of_what_cannot_be_written_has_an_end() -> None:
    """A hundred problems are enough."""
    bad: dict[str | int, Tree] = {str(i): array(2**64 + i, sharding=None) for i in range(300)}
    with pytest.raises(RecordError) as caught:
        encode(Manifest(tree=tree(bad)))
    assert len(caught.value.problems) == schema.MAX_PROBLEMS


@pytest.mark.parametrize(
    "tree_at_limit",
    [
        pytest.param(nested(schema.MAX_DEPTH), id="depth"),
        pytest.param(array(*[1] * 64, sharding=None), id="dimensions"),
        pytest.param(array(sharding=on(mesh(*((f"a{i}", 1) for i in range(64))))), id="mesh axes"),
        pytest.param(tree({"x" * 2**14: LEAF, "é" * 2**13: LEAF}), id="bytes of a text"),
        pytest.param(array(sharding=on(mesh(("x", 2**19)))), id="devices"),
    ],
)
def test_what_is_just_within_a_limit_round_trips(tree_at_limit: Tree) -> None:
    """The limits of writer and reader are the same."""
    assert decode(encode(Manifest(tree=tree_at_limit))).tree == tree_at_limit


def test_numbers_that_are_equal_are_written_alike() -> None:
    """True is 1 to Python, so that two manifests with one and the other are equal: their bytes must be, too."""
    one, true = (tree({key: array(key, sharding=None)}) for key in (1, True))
    assert Manifest(tree=one) == Manifest(tree=true)
    assert encode(Manifest(tree=one)) == encode(Manifest(tree=true))


# Damage.


def test_every_flipped_bit_is_noticed() -> None:
    """No bit of a file is left uncovered."""
    data = encode(train_state())
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(FormatError):
            decode(bytes(flipped))


def test_every_truncation_is_noticed() -> None:
    """A file that ends anywhere before its end is refused, the empty one too."""
    data = encode(train_state())
    for end in range(len(data)):
        with pytest.raises(FormatError):
            decode(data[:end])


def test_a_newer_version_is_refused_by_name() -> None:
    """By its number and the newest that is known."""
    newer = FRAME.version + 1
    (problem,) = problems_of(seal(payload_of(encode(small())), version=newer))
    assert f"version {newer}" in problem
    assert f"versions up to {FRAME.version}" in problem


# Well-framed files whose payload is wrong.


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        pytest.param(setter("dreist", TEXTS, 8), "meshes[0]: unknown mesh axis types ['dreist']", id="an axis type"),
        pytest.param(setter("set", TEXTS, 10), "structures[0]: unknown kind of container 'set'", id="a container"),
        pytest.param(setter("long", TEXTS, 14), "leaves[0]: unknown type of value 'long'", id="a type of value"),
        pytest.param(setter("half", TEXTS, 0), "scope: unknown scope 'half'", id="a scope"),
        pytest.param(setter(7, TEXTS, 3), "texts[3]: a value of type int where a text belongs", id="a text"),
        pytest.param(setter(b"x", TEXTS, 3), "texts[3]: a text as bytes without a lone surrogate", id="plain bytes"),
        pytest.param(setter(b"\xff", TEXTS, 3), "texts[3]: bytes that are no text", id="bytes that are no text"),
        pytest.param(setter("x" * 2**15, TEXTS, 5), "texts[5]: a text of more than 16384 bytes", id="a long text"),
        pytest.param(setter(b"x" * 2**15, TEXTS, 5), "texts[5]: a text of more than 16384 bytes", id="many bytes"),
        pytest.param(setter("cpu", TEXTS, 5), "texts[5]: repeats texts[1]", id="a text that is there twice"),
        pytest.param(setter([], DEVICE_LISTS, 0), "device_lists[0]: neither runs", id="no device list"),
        pytest.param(setter([0, 0, 0], DEVICE_LISTS, 0), "device_lists[0]: a run of no devices", id="an empty run"),
        pytest.param(setter([0, 0, 4, 4], DEVICE_LISTS, 0), "device_lists[0]: neither runs", id="half a run"),
        pytest.param(setter([0, 0, 2, 2, 2], DEVICE_LISTS, 0), "another form", id="two runs that are one"),
        pytest.param(setter([0, 1, 2, 0, 2], DEVICE_LISTS, 0), "another form", id="runs too short"),
        pytest.param(setter([1, 0, 1, b"\0\1\2\3"], DEVICE_LISTS, 0), "another form", id="a range that is packed"),
        pytest.param(setter([1, 0, 2, b"\0\1\2"], DEVICE_LISTS, 0), "3 bytes of packed", id="half a packed id"),
        pytest.param(setter([1, 0, 3, b"\0\1\2"], DEVICE_LISTS, 0), "neither runs", id="ids of three bytes"),
        pytest.param(setter([1, 0, 1, b"\0\0\1\3"], DEVICE_LISTS, 0), "a device appears twice", id="a device twice"),
        pytest.param(setter([0, 2**63 - 1, 4], DEVICE_LISTS, 0), "more than 64 bits", id="ids that overflow"),
        pytest.param(setter([0, 2, 1, 1, 1, 1], INVENTORY, 5), "inventory: neighbouring runs", id="runs of a process"),
        pytest.param(setter([0, 5], INVENTORY, 5), "inventory: processes do not own the 4", id="too many processes"),
        pytest.param(setter([0, 2**62], INVENTORY, 5), "inventory: processes do not own the 4", id="a huge process"),
        pytest.param(setter([0, 4, 0], INVENTORY, 5), "inventory: processes are no pairs", id="half a process"),
        pytest.param(setter([-1, 4], INVENTORY, 5), "process indices must not be negative", id="a negative process"),
        pytest.param(setter([4], WRITER), "writer: a name without a version", id="a writer without a version"),
        pytest.param(setter(99, MESHES, 0, 4), "meshes[0]: mentions texts[99] of 17", id="no such text"),
        pytest.param(setter(-1, MESHES, 0, 4), "meshes[0]: mentions texts[-1] of 17", id="a text from the end"),
        pytest.param(setter(True, MESHES, 0, 4), "a position in texts is of type bool", id="a bool as a position"),
        pytest.param(setter([2, 2.0], MESHES, 0, 1), "something else in an array of integers", id="a float as a size"),
        pytest.param(setter([2, 3], MESHES, 0, 1), "lists 4 devices", id="sizes that are not those of the devices"),
        pytest.param(setter([0, 2], MESHES, 0, 1), "sizes must be at least 1", id="an axis of no devices"),
        pytest.param(setter([6, 6], MESHES, 0, 0), "mesh axis names repeat", id="two axes of one name"),
        pytest.param(setter(5, MESHES, 0), "meshes[0]: a value of type int where an array belongs", id="no mesh"),
        pytest.param(setter([], MESHES, 0), "meshes[0]: 0 fields where 5 belong", id="a mesh without fields"),
        pytest.param(setter([6, 6], SPECS, 0, 0), "specs[0]: a spec uses mesh axes more than once", id="an axis twice"),
        pytest.param(setter([False], SPECS, 0, 0), "a position in texts is of type bool", id="false as a partition"),
        pytest.param(setter([[6] * 40, [7] * 40], SPECS, 0, 0), "more than 64 mesh axes", id="too many axes"),
        pytest.param(setter([7, 6], SPECS, 0, 1), "must be sorted", id="unreduced axes that are not sorted"),
        pytest.param(setter(0, SPECS, 0, 3), "unknown reduction 'tree'", id="a reduction"),
        pytest.param(setter([0], SPECS, 0, 0), "that mesh (d=2 explicit, m=2 auto) lacks", id="a spec off its mesh"),
        pytest.param(setter(3, SHARDINGS, 0, 0), "shardings[0]: no sharding is of form 3", id="no form of a sharding"),
        pytest.param(setter([1, None, None, None], SHARDINGS, 0), "where an integer belongs", id="no device id"),
        pytest.param(setter(2, STRUCTURES, 0, 3), "a dict of 2 positions", id="a dict with positions"),
        pytest.param(setter([[0, 12, 12]], STRUCTURES, 0, 4), "a key appears twice", id="a repeated key"),
        pytest.param(setter([[0, 12], [0, 13]], STRUCTURES, 0, 4), "neighbouring groups", id="groups that are one"),
        pytest.param(setter([[0]], STRUCTURES, 0, 4), "structures[0]: a group of no keys", id="an empty group"),
        pytest.param(setter([[4, 1, 2]], STRUCTURES, 0, 4), "no group of keys is of code 4", id="no code of keys"),
        pytest.param(setter([[3, 12, 13]], STRUCTURES, 0, 4), "a dict has keys that it cannot", id="keys of a dict"),
        pytest.param(setter(12, STRUCTURES, 0, 2), "a dict with class name 'n'", id="a dict with a class"),
        pytest.param(setter([-1, 4], LEAVES, 1, 2), "must not be negative", id="a negative dimension"),
        pytest.param(setter([], LEAVES, 1, 2), "more entries than shape", id="a spec longer than the shape"),
        pytest.param(setter(False, LEAVES, 1, 4), "is always committed", id="an uncommitted array on a mesh"),
        pytest.param(setter(1, LEAVES, 1, 4), "leaves[1]: committed is no bool", id="a committed that is no bool"),
        pytest.param(setter(2, LEAVES, 1, 0), "no leaf of 5 fields is of form 2", id="no form of a leaf"),
        pytest.param(setter([8, 4], LEAVES, 0, 3), "has no shape", id="a scalar with a shape"),
        pytest.param(setter(7, TREE, 1), "tree[1]: mentions leaves[7] of 2", id="no such leaf"),
        pytest.param(setter(-9, TREE, 0), "tree[0]: mentions structures[8] of 1", id="no such structure"),
        pytest.param(setter(None, TREE, 0), "tree: something else among the integers", id="a node that is nil"),
        pytest.param(setter([-1, 1, 0], TREE), "tree: does not mention all 2 leaves in their order", id="leaf order"),
        pytest.param(setter([-1, 0, 1, 1], TREE), "tree[3]: 1 nodes follow the tree", id="a node too many"),
        pytest.param(setter([0, 1, -1], TREE), "tree[1]: 2 nodes follow the tree", id="two trees"),
        pytest.param(setter([-1, 0, -1, 1], TREE), "ends after 4 nodes", id="a node too few"),
        pytest.param(setter([], TREE), "does not mention all 2 leaves", id="no tree"),
        pytest.param(lambda s: s[TEXTS].append("x"), "texts[17]: is mentioned nowhere", id="a text too many"),
        pytest.param(
            lambda s: s[SPECS].append([[], [], [], None]), "specs[1]: is mentioned nowhere", id="a spare spec"
        ),
        pytest.param(lambda s: s[SPECS].append(s[SPECS][0]), "specs[1]: repeats specs[0]", id="a spec twice"),
        pytest.param(lambda s: s[LEAVES].append(s[LEAVES][0]), "leaves[2]: repeats leaves[0]", id="a leaf twice"),
        pytest.param(setter([5, 4], WRITER), "texts[5]: is mentioned before texts[4]", id="texts out of order"),
    ],
)
def test_a_wrong_payload_is_refused_with_its_place(edit: Callable[[list[Any]], object], problem: str) -> None:
    """The digest is right, the content is not."""
    found = problems_of(edited(edit))
    assert any(problem in one for one in found), found


def test_every_problem_is_listed() -> None:
    """Problems in five sections make one error; what only mentions a refused entry is none of them."""

    def edit(changed: list[Any]) -> None:
        setter("dreist", TEXTS, 8)(changed)
        setter([0, 4, 0], INVENTORY, 5)(changed)
        setter([6, 6], SPECS, 0, 0)(changed)
        setter([[0, 12, 12]], STRUCTURES, 0, 4)(changed)
        setter([-1], LEAVES, 0, 3)(changed)
        setter(7, TREE, 1)(changed)

    places = [problem.split(":")[0] for problem in problems_of(edited(edit))]
    assert places == ["inventory", "meshes[0]", "specs[0]", "structures[0]", "leaves[0]", "leaves[0]", "tree[1]"]


def test_all_that_is_wrong_with_one_record_is_listed() -> None:
    """A record lists all that is wrong with it, and each is a problem of the file."""
    found = problems_of(edited(setter([[6, 6], [0, 2], [8], 0, 1], MESHES, 0)))
    assert len([problem for problem in found if problem.startswith("meshes[0]: ")]) == 4


def test_a_list_of_problems_has_an_end() -> None:
    """Reading ends after a hundred problems, and says so."""
    found = problems_of(edited(setter([[[], [], []]] * 5_000, SPECS)))
    assert len(found) == schema.MAX_PROBLEMS + 1
    assert "there may be more" in found[-1]


@pytest.mark.parametrize("name", ["\ud800", "x" * 10_000], ids=["a lone surrogate", "a long text"])
def test_a_problem_can_be_printed(name: str) -> None:
    """Whatever text the file puts into a message, it is short and can be written to a terminal."""
    data = name.encode("utf-8", "surrogatepass") if name == "\ud800" else name
    (problem, *_) = problems_of(edited(lambda s: (setter(data, TEXTS, 6)(s), setter([0], SPECS, 0, 0)(s))))
    assert len(problem.encode()) < 1_000


# Bytes that mean harm.

DEEP = 100_000


def deep(depth: int) -> list[Any]:
    """A list within `depth` lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def container_bomb(changed: list[Any]) -> None:
    """Lists that declare a billion children each, one within the other."""
    changed[STRUCTURES] = [[10, 11, 11, 10**9 + i, []] for i in range(5_000)]
    changed[TEXTS][10] = "list"
    changed[TREE] = [-1 - i for i in range(5_000)]


def mesh_bomb(changed: list[Any]) -> None:
    """Thousands of meshes that share one long list of devices."""
    changed[DEVICE_LISTS][0] = [0, 0, 2**18]
    changed[MESHES] = [[[6, 7], [2**18 - i, 2], [8, 9], 0, 1] for i in range(20_000)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(bytes(range(256)) * 1_000, id="bytes that are no file"),
        pytest.param(seal(bytes(range(256)) * 1_000), id="bytes in a valid frame"),
        pytest.param(seal(b""), id="an empty payload"),
        pytest.param(seal(b"\x91" * DEEP), id="a deep nest"),
        pytest.param(seal(b"\x9b\x91" + b"\x91" * DEEP), id="a deep nest in a table"),
        pytest.param(edited(lambda s: s[WRITER].append(deep(500))), id="a deep nest in a position"),
        pytest.param(edited(lambda s: s[SPECS].extend([deep(500), deep(500)])), id="two equal deep nests"),
        pytest.param(seal(b"\xdd\xff\xff\xff\xff"), id="a huge declared array"),
        pytest.param(seal(b"\x9b\xdd\xff\xff\xff\xff"), id="a huge declared table"),
        pytest.param(seal(b"\x9b\xdd\x00\x01\x00\x00" + bytes(2**16 - 1)), id="a table longer than the bytes"),
        pytest.param(seal(b"\x9b\x91\xdb\xff\xff\xff\xff"), id="a huge declared text"),
        pytest.param(seal(b"\x9b\x91\xc6\xff\xff\xff\xff"), id="huge declared bytes"),
        pytest.param(seal(b"\x9b\x91\xdf\xff\xff\xff\xff"), id="a huge declared map"),
        pytest.param(seal(b"\x9b\x91\xc9\xff\xff\xff\xff\x01"), id="a huge declared extension"),
        pytest.param(seal(b"\x9b\x91\xd6\xff\0\0\0\0"), id="a timestamp"),
        pytest.param(seal(b"\x9b\x91\xc7\x00\x05"), id="an empty extension"),
        pytest.param(seal(b"\x9b\x91\x80"), id="an empty map"),
        pytest.param(seal(b"\x9b\x91\xa1\xff"), id="a text that is no UTF-8"),
        pytest.param(seal(b"\x9b\x91\xc1"), id="a byte that msgpack never uses"),
        pytest.param(seal(b"\xc1"), id="no array"),
        pytest.param(seal(payload_of(encode(small())) + b"\0"), id="a byte after the last section"),
        pytest.param(edited(lambda s: s.append(0)), id="a section too many"),
        pytest.param(edited(lambda s: s.pop()), id="a section too few"),
        pytest.param(edited(setter([0] * 5, INVENTORY)), id="an inventory of five fields"),
        pytest.param(edited(setter([10, 11], STRUCTURES, 0)), id="a structure of two fields"),
        pytest.param(edited(setter([[1] * 65, [], [], None], SPECS, 0)), id="an entry that is too long"),
        pytest.param(edited(setter([0, 0, 2**60], DEVICE_LISTS, 0)), id="a run of 2^60 devices"),
        pytest.param(edited(setter([0, 0, 2**19 + 1], DEVICE_LISTS, 0)), id="a run just beyond the limit"),
        pytest.param(edited(setter([[0, i, 2**18] for i in range(5_000)], DEVICE_LISTS)), id="many long runs"),
        pytest.param(edited(setter([0, 2**18], INVENTORY, 5)), id="a process with more devices than there are"),
        pytest.param(edited(mesh_bomb), id="many meshes of one long list"),
        pytest.param(edited(container_bomb), id="lists of a billion children"),
        pytest.param(edited(setter([-1] * DEEP, TREE)), id="containers deep within one another"),
        pytest.param(edited(setter([[[6, 7] * 32] * 64, [], [], None], SPECS, 0)), id="a spec of 4,096 axes"),
        pytest.param(
            edited(lambda s: s[SPECS].extend([[[6, 7] * 32, [], [], None]] * 10_000)), id="many specs that are wrong"
        ),
        pytest.param(edited(setter([["x" * 2**14] * 10], WRITER)), id="texts where positions belong"),
        pytest.param(seal(payload_of(encode(small())), version=FRAME.version + 1), id="a newer version"),
    ],
)
def test_harmful_bytes_are_refused_in_little_memory(data: bytes) -> None:
    """One `FormatError` and never another exception; no more memory than the length of the file justifies."""
    assert len(data) < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_NBYTES


def test_the_memory_of_a_file_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure that the test above relies on can fail: without its limit, a few bytes take much memory."""
    monkeypatch.setattr(_wire_decoding, "MAX_DEVICE_IDS", 2**21)
    tracemalloc.start()
    try:
        problems_of(edited(setter([0, 0, 2**20], DEVICE_LISTS, 0)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak > MEMORY_NBYTES


# The records alone: what floor 1 needs, without what the root of the package imports.
RECORDS_ALONE = """
import importlib.util, sys, types
package = types.ModuleType("orbax_explicit")
package.__path__ = list(importlib.util.find_spec("orbax_explicit").submodule_search_locations)
sys.modules["orbax_explicit"] = package
"""


def test_mutants_are_refused_or_decode_in_little_memory() -> None:
    """Over 20,000 mutants of the golden files: a manifest that encodes to the same, or a `FormatError`.

    A third are mutated as files, a third as payloads and a third as values of msgpack; the latter two then get a
    right length and digest. The counts show that each kind got where it should.
    """
    script = f"{RECORDS_ALONE}\nimport json, fuzz_wire\nprint(json.dumps(fuzz_wire.run({str(GOLDEN)!r}, {FUZZ_EACH_WAY}, 1)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    report = json.loads(done.stdout)
    assert report["seeds"] >= 8
    assert report["raw"] == {"frame": FUZZ_EACH_WAY, "payload": 0, "decoded": 0}
    for way in ("resealed", "values"):
        assert report[way]["frame"] == 0
        assert report[way]["payload"] > FUZZ_EACH_WAY / 2
        assert report[way]["decoded"] > FUZZ_EACH_WAY / 100
        assert sum(report[way].values()) == FUZZ_EACH_WAY
    assert report["several"] > FUZZ_EACH_WAY / 10
    assert report["grown_nbytes"] < MEMORY_NBYTES
