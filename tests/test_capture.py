"""`_capture`: what JAX says is recorded whole, or refused by leaf name."""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from nodes import Keyed, Layer, Plain, Registered, host_trees
from trees import Moments, Nothing, host_state, matrix, path, pending_sum, place, training_state

from orbax_explicit import SaveRefusedError
from orbax_explicit._binding import bind_plan, read_present
from orbax_explicit._capture import MAX_DEPTH, record_arrays, record_inventory, record_path, record_tree
from orbax_explicit._leaf_capture import ALLOWED_LEAVES, STORABLE_DTYPES, LeafRecorder, Unrecordable, partition_spec_of
from orbax_explicit._planning import TargetRecord, plan_from_records
from orbax_explicit._records import (
    AXIS_TYPES,
    REDUCTION_KINDS,
    UNCONSTRAINED,
    ArrayRecord,
    ContainerRecord,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    PrngRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    path_text,
)
from orbax_explicit._target_capture import record_target

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
MESH_RECORD = MeshRecord(
    axis_names=("d", "m"),
    axis_sizes=(2, 4),
    axis_types=("explicit", "explicit"),
    device_ids=tuple(range(8)),
    platform="cpu",
)


class OddKey:
    """A tree key of no kind that JAX has."""

    def __str__(self) -> str:
        return "odd"


def record_of(tree: Any) -> ContainerRecord:
    """What is recorded of a node, under the key `node`."""
    root = record_tree({"node": tree, "other": 0}).manifest.tree
    assert isinstance(root, ContainerRecord)
    return root.children[0]


def leaf_of(leaf: Any) -> Any:
    """What is recorded of a leaf."""
    return record_tree({"leaf": leaf}).manifest.leaves[path("leaf")]


def refusals(tree: Any) -> dict[str, tuple[str, ...]]:
    """What a save of the tree is refused for -> the leaves that it concerns."""
    with pytest.raises(SaveRefusedError) as error:
        record_tree(tree)
    assert all(problem.fix for problem in error.value.problems)
    return {problem.could_not: problem.affects for problem in error.value.problems}


# Containers.

INT = ValueRecord(type="int", dtype="int64")


@pytest.mark.parametrize(
    ("node", "kind", "keys", "cls"),
    [
        pytest.param({"b": 1, "a": 2}, "dict", path("a", "b"), "", id="a dict with str keys, sorted"),
        pytest.param({10: 1, 9: 2}, "dict", path(9, 10), "", id="a dict with int keys, sorted as numbers"),
        pytest.param({"": 1}, "dict", path(""), "", id="a dict with an empty key"),
        pytest.param([1, 2], "list", (Key("index", 0), Key("index", 1)), "", id="a list"),
        pytest.param((1,), "tuple", (Key("index", 0),), "", id="a tuple"),
        pytest.param(
            Moments(mean=1, variance=2),
            "namedtuple",
            (Key("attr", "mean"), Key("attr", "variance")),
            "Moments",
            id="a NamedTuple",
        ),
        pytest.param(Nothing(), "namedtuple", (), "Nothing", id="a NamedTuple without fields"),
        pytest.param({}, "dict", (), "", id="an empty dict"),
        pytest.param([], "list", (), "", id="an empty list"),
        pytest.param((), "tuple", (), "", id="an empty tuple"),
        pytest.param(None, "none", (), "", id="None"),
        pytest.param(
            Layer(w=1, b=2), "node", (Key("attr", "w"), Key("attr", "b")), "Layer", id="a registered dataclass"
        ),
        pytest.param(Plain(1, 2), "node", (Key("index", 0), Key("index", 1)), "Plain", id="a node without keys"),
        pytest.param(
            Keyed((jax.tree_util.DictKey("k"), 1), (jax.tree_util.SequenceKey(3), 2)),
            "node",
            (Key("dict", "k"), Key("index", 3)),
            "Keyed",
            id="a node with keys of its own",
        ),
        pytest.param(Plain(), "node", (), "Plain", id="a node without children"),
        pytest.param(
            collections.OrderedDict(b=1, a=2), "node", path("b", "a"), "OrderedDict", id="an OrderedDict, in its order"
        ),
        pytest.param(collections.defaultdict(int, a=1), "node", path("a"), "defaultdict", id="a defaultdict"),
        pytest.param(
            Registered(1, 2),
            "node",
            (Key("index", 0), Key("index", 1)),
            "Registered",
            id="a NamedTuple that is registered with JAX as a node of another kind",
        ),
    ],
)
def test_a_container_is_recorded(node, kind, keys, cls):
    """Its kind, the keys that JAX gives its children, and its class where it has one of its own."""
    record = record_of(node)
    assert (record.kind, record.keys, record.qualname) == (kind, keys, cls)
    assert record.module == (type(node).__module__ if cls else "")
    assert record.children == (INT,) * len(keys)


def test_a_nested_class_is_recorded_by_its_qualified_name():
    """Which leads to it from the module."""

    class Inner(Moments):
        pass

    assert record_of(Inner(1, 2)).class_text == (
        f"{__name__}.test_a_nested_class_is_recorded_by_its_qualified_name.<locals>.Inner"
    )


def test_leaves_are_recorded_under_the_paths_and_in_the_order_of_jax(mesh):
    """Of a whole training state; and the values are the leaves themselves."""
    state = training_state(mesh)
    captured = record_tree(state)
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    assert list(captured.manifest.leaves) == [record_path(keypath) for keypath, _ in flat]
    assert list(captured.values) == list(captured.manifest.leaves)
    assert all(mine is its for mine, (_, its) in zip(captured.values.values(), flat, strict=True))


@given(host_trees())
def test_every_tree_is_recorded_in_the_order_of_jax(tree):
    """Whatever containers it is of."""
    flat, _ = jax.tree_util.tree_flatten_with_path({"tree": tree, "z": 0})
    assert list(record_tree({"tree": tree, "z": 0}).manifest.leaves) == [record_path(keypath) for keypath, _ in flat]


# Leaves.


def test_an_array_on_a_mesh_is_recorded(mesh):
    """Shape, dtype, mesh, spec, memory kind, committed."""
    assert leaf_of(
        place(mesh, matrix(dtype=jnp.bfloat16), P(None, ("d", "m")), memory_kind="pinned_host")
    ) == ArrayRecord(
        shape=(8, 8),
        dtype="bfloat16",
        sharding=NamedShardingRecord(
            mesh=MESH_RECORD, spec=SpecRecord(partitions=(None, ("d", "m"))), memory_kind="pinned_host"
        ),
    )


@pytest.mark.parametrize(
    ("make", "device_id", "committed"),
    [
        pytest.param(lambda: jnp.int32(5), 0, False, id="uncommitted on the default device"),
        pytest.param(lambda: jax.device_put(np.int32(5), jax.devices()[3]), 3, True, id="committed to a device"),
    ],
)
def test_an_array_on_one_device_is_recorded(make, device_id, committed):
    """With whether it is committed."""
    assert leaf_of(make()) == ArrayRecord(
        shape=(),
        dtype="int32",
        sharding=SingleDeviceRecord(device_id=device_id, platform="cpu", memory_kind="device"),
        committed=committed,
    )


@pytest.mark.parametrize(("impl", "size"), [("threefry2x32", 2), ("rbg", 4), ("unsafe_rbg", 4)])
def test_keys_are_recorded_with_their_implementation(impl, size):
    """And with the shape of their data, which is what is stored."""
    record = leaf_of(jax.random.split(jax.random.key(0, impl=impl), 3))
    assert record.prng == PrngRecord(impl=impl, key_shape=(size,))
    assert (record.shape, record.dtype, record.stored_shape) == ((3,), "uint32", (3, size))


HOST_RECORDS: Mapping[str, ValueRecord] = {
    "int": INT,
    "big_int": ValueRecord(type="int", dtype="uint64"),
    "float": ValueRecord(type="float", dtype="float64"),
    "bool": ValueRecord(type="bool", dtype="bool"),
    "complex": ValueRecord(type="complex", dtype="complex128"),
    "str": ValueRecord(type="str"),
    "empty_str": ValueRecord(type="str"),
    "bytes": ValueRecord(type="bytes", dtype="uint8", shape=(25,)),
    "empty_bytes": ValueRecord(type="bytes", dtype="uint8", shape=(0,)),
    "float32": ValueRecord(type="np.generic", dtype="float32"),
    "int8": ValueRecord(type="np.generic", dtype="int8"),
    "np_bool": ValueRecord(type="np.generic", dtype="bool"),
    "complex64": ValueRecord(type="np.generic", dtype="complex64"),
    "bfloat16": ValueRecord(type="np.generic", dtype="bfloat16"),
    "array": ValueRecord(type="np.ndarray", dtype="int64", shape=(3,)),
    "array_0d": ValueRecord(type="np.ndarray", dtype="float64"),
    "array_bf16": ValueRecord(type="np.ndarray", dtype="bfloat16", shape=(3,)),
    "empty_array": ValueRecord(type="np.ndarray", dtype="float64", shape=(0, 2)),
}


@pytest.mark.parametrize("name", HOST_RECORDS)
def test_a_value_on_the_host_is_recorded(name):
    """Its Python type, and how it is stored."""
    assert leaf_of(host_state()[name]) == HOST_RECORDS[name]


@pytest.mark.parametrize("dtype", sorted(STORABLE_DTYPES - {"int64", "uint64", "float64", "complex128"}))
def test_an_array_of_every_storable_dtype_is_recorded(dtype):
    """By the name that `jnp.dtype` takes back."""
    assert leaf_of(jnp.zeros((2,), dtype)).dtype == dtype


def test_a_leaf_that_is_cast_while_it_is_saved_is_recorded_as_it_is_stored(mesh):
    """Arrays of JAX and of NumPy."""
    dtypes = {("w",): jnp.bfloat16, ("n",): np.dtype("float16")}
    leaves = record_tree({"w": place(mesh, matrix()), "n": np.ones(2), "other": np.ones(2)}, dtypes).manifest.leaves
    assert [leaf.dtype for leaf in leaves.values()] == ["float16", "float64", "bfloat16"]


@pytest.mark.parametrize(
    ("value", "dtype", "could_not"),
    [
        pytest.param(lambda: b"ab", jnp.bfloat16, "cannot store bytes in another dtype", id="bytes"),
        pytest.param(lambda: 1001, jnp.bfloat16, "cannot store int in another dtype", id="a Python number"),
        pytest.param(lambda: "ab", jnp.bfloat16, "cannot store str in another dtype", id="text"),
        pytest.param(lambda: jax.random.key(7), jnp.bfloat16, "cannot store a PRNG key in another dtype", id="keys"),
        pytest.param(lambda: jnp.int32(7), jnp.bfloat16, "cannot store int32 in bfloat16", id="an int as a float"),
        pytest.param(lambda: np.ones(2, complex), np.int32, "cannot store complex128 in int32", id="complex as int"),
    ],
)
def test_a_leaf_that_a_cast_would_spoil_is_refused(value, dtype, could_not):
    """Such as where one `SaveArgs(dtype=)` is mapped over a whole tree: more than precision would be lost."""
    with pytest.raises(SaveRefusedError) as error:
        record_tree({"w": value()}, {("w",): dtype})
    assert [problem.could_not for problem in error.value.problems] == [could_not]


def test_arrays_of_one_layout_share_one_record(mesh):
    """So that a save of many arrays costs one mesh, and the wire can intern it."""
    first, second = place(mesh, matrix(), P("d")), place(mesh, -matrix(), P("d"))
    other = place(mesh, matrix(), P("m"))
    leaves = record_tree([first, second, other]).manifest.leaves.values()
    one, two, three = leaves
    assert one is two
    assert one.sharding.mesh is three.sharding.mesh


def test_specs_are_verbatim(mesh):
    """`P('d')` and `P('d', None)` are different."""
    records = record_tree([place(mesh, matrix(), P("d")), place(mesh, matrix(), P("d", None))]).manifest.leaves
    assert [leaf.sharding.spec.partitions for leaf in records.values()] == [("d",), ("d", None)]


def test_a_manifest_names_the_run():
    """Its devices and its software."""
    manifest = record_tree({"n": 1}).manifest
    assert manifest.scope == "tree"
    assert manifest.inventory == record_inventory(jax.devices())
    assert manifest.inventory.device_ids == tuple(range(8))
    assert manifest.inventory.default_memory_kind in manifest.inventory.memory_kinds
    assert dict(manifest.writer)["jax"] == jax.__version__
    assert list(dict(manifest.writer)) == ["orbax-explicit", "jax", "orbax-checkpoint"]


def test_arrays_of_a_tree_that_is_not_seen_are_recorded(mesh):
    """As those of a tree of unknown containers, cast where they are; each leaf as in a tree that is seen."""
    arrays = [(path("params", "w"), place(mesh, matrix(), P("d"))), (path("step"), jnp.int32(5))]
    manifest = record_arrays(arrays, {("step",): jnp.int8})
    assert manifest.scope == "arrays"
    assert manifest.inventory == record_inventory(jax.devices())
    assert manifest.leaves[path("params", "w")] == leaf_of(arrays[0][1])
    assert manifest.leaves[path("step")].dtype == "int8"


def test_refusals_of_arrays_of_a_tree_that_is_not_seen_come_in_one_error():
    """By the names under which Orbax would store them."""
    with pytest.raises(SaveRefusedError) as error:
        record_arrays([(path("a.b"), jnp.ones(1)), (path("a", "b"), jnp.ones(1)), (path("gone"), deleted())])
    assert sorted(problem.affects for problem in error.value.problems) == [("a.b", "a/b"), ("gone",)]


def test_an_inventory_of_some_devices_keeps_their_order():
    """They are the machine, for a restore onto them."""
    inventory = record_inventory(jax.devices()[5:2:-1])
    assert (inventory.device_ids, inventory.process_indices) == ((5, 4, 3), (0, 0, 0))


# Refusals.


class Colour(enum.IntEnum):
    """An int that is not exactly one."""

    RED = 1


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


def donated() -> jax.Array:
    array = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


def unreduced() -> jax.Array:
    return pending_sum(jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT)))


def custom_keys() -> jax.Array:
    """Keys of an implementation that has no registered name."""
    import jax.extend.random

    impl = jax.extend.random.define_prng_impl(
        key_shape=(2,), seed=lambda seed: seed, split=lambda *a: a, random_bits=lambda *a: a, fold_in=lambda *a: a
    )
    return jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl=impl)


def on_numbered_axes() -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), (0,), axis_types=(AUTO,))
    return jax.device_put(matrix(), NamedSharding(mesh, P(0)))


def with_logical_ids() -> jax.Array:
    """An array whose sharding says more than its constructor's public arguments."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    sharding = NamedSharding(mesh, P("d"), _logical_device_ids=tuple(range(7, -1, -1)))
    shards = [jax.device_put(np.ones((1, 8)), device) for device in jax.devices()]
    return jax.make_array_from_single_device_arrays((8, 8), sharding, shards)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(deleted, "cannot save an array that was deleted or donated", id="a deleted array"),
        pytest.param(donated, "cannot save an array that was deleted or donated", id="a donated array"),
        pytest.param(
            unreduced,
            "cannot save an array with a pending reduction, P('d', None, unreduced={'m'})",
            id="a pending sum",
        ),
        pytest.param(
            custom_keys,
            "cannot record the PRNG implementation ?, which has no registered name",
            id="keys of an implementation without a name",
        ),
        pytest.param(
            on_numbered_axes, "cannot record mesh axis names that are not str: (0,)", id="mesh axes that are numbered"
        ),
        pytest.param(lambda: jnp.zeros(2, "uint2"), "cannot save dtype uint2", id="a dtype that Zarr lacks"),
        pytest.param(
            lambda: np.zeros(2, "uint4"), "cannot save dtype uint4", id="a NumPy array of a dtype that Zarr lacks"
        ),
        pytest.param(lambda: np.array([None]), "cannot save dtype object", id="an array of objects"),
        pytest.param(lambda: np.array(["ab"]), "cannot save dtype str64", id="an array of texts"),
        pytest.param(lambda: np.zeros(1, [("a", int)]), "cannot save dtype void64", id="a structured array"),
        pytest.param(lambda: np.zeros(1, "M8[s]"), "cannot save dtype datetime64[s]", id="an array of times"),
        pytest.param(
            lambda: np.ones(2, np.dtype("float32").newbyteorder("S")),
            f"cannot save the foreign byte order of dtype {np.dtype('float32').newbyteorder('S').str}",
            id="foreign byte order",
        ),
        pytest.param(
            lambda: np.ma.ones(2), "cannot save a MaskedArray, a subclass of numpy.ndarray", id="a masked array"
        ),
        pytest.param(
            lambda: np.ones(2).view(np.recarray), "cannot save a recarray, a subclass of numpy.ndarray", id="a recarray"
        ),
        pytest.param(lambda: np.str_("x"), "cannot save dtype str32", id="a NumPy text"),
        pytest.param(lambda: 2**64, "cannot save an int beyond 64 bits", id="an int beyond 64 bits"),
        pytest.param(lambda: -(2**63) - 1, "cannot save an int beyond 64 bits", id="a negative int beyond 64 bits"),
        pytest.param(lambda: "\ud800", "cannot save a str with lone surrogates", id="a text with a lone surrogate"),
        pytest.param(lambda: Colour.RED, f"cannot save a leaf of type {__name__}.Colour", id="a subclass of int"),
        pytest.param(lambda: {1, 2}, "cannot save a leaf of type builtins.set", id="a set"),
        pytest.param(lambda: bytearray(b"x"), "cannot save a leaf of type builtins.bytearray", id="a bytearray"),
        pytest.param(
            lambda: jax.ShapeDtypeStruct((), jnp.float32),
            "cannot save a leaf of type jax.ShapeDtypeStruct",
            id="a shape without a value",
        ),
        pytest.param(lambda: {1.5: 0}, "cannot save a dict key of type float", id="a dict with a float key"),
        pytest.param(lambda: {True: 0}, "cannot save a dict key of type bool", id="a dict with a bool key"),
        pytest.param(lambda: {("a",): 0}, "cannot save a dict key of type tuple", id="a dict with a tuple key"),
        pytest.param(lambda: {np.int64(1): 0}, "cannot save a dict key of type int64", id="a dict with a NumPy key"),
        pytest.param(lambda: {Colour.RED: 0}, "cannot save a dict key of type Colour", id="a dict with an enum key"),
        pytest.param(
            lambda: {0: 1, "0": 2},
            "cannot save a dict whose keys do not sort (int, str)",
            id="a dict of int and str keys",
        ),
        pytest.param(
            lambda: Keyed((OddKey(), 0)),
            "cannot save a tree key of type OddKey",
            id="a node with keys of its own making",
        ),
    ],
)
def test_a_leaf_is_refused_by_name(make, reason):
    """With what is wrong, where, and what to do; the other leaf is not blamed."""
    assert refusals({"good": 1, "bad": make()}) == {reason: ("bad",)}


def test_a_sharding_that_says_more_than_is_recorded_is_refused():
    """What JAX adds one day is refused rather than lost."""
    (reason,) = refusals({"good": 1, "bad": with_logical_ids()})
    assert reason.startswith("cannot record all of the sharding NamedSharding")


def test_a_sharding_of_another_type_is_refused():
    """Only named and single-device shardings have a record."""

    class Scattered(jax.sharding.Sharding):
        """A sharding that is neither named nor on one device."""

    with pytest.raises(Unrecordable, match="cannot record a sharding of type Scattered"):
        LeafRecorder().sharding(Scattered())


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(
            Keyed((jax.tree_util.DictKey("k"), 0), (jax.tree_util.DictKey("k"), 1)),
            id="that gives two children one key",
        ),
        pytest.param(
            Keyed((jax.tree_util.GetAttrKey("k"), 0), (jax.tree_util.DictKey("k"), 1)),
            id="that gives two children keys of one text",
        ),
    ],
)
def test_a_node_is_refused_by_name(node):
    """Orbax would store both children under one name."""
    with pytest.raises(SaveRefusedError) as error:
        record_tree({"good": 1, "bad": node})
    assert all(name.startswith("bad") for problem in error.value.problems for name in problem.affects)


@pytest.mark.parametrize(
    ("tree", "name", "leaves"),
    [
        pytest.param({"a.b": 1, "a": {"b": 2}}, "a.b", ("a/b", "a.b"), id="a dot in a key beside a nested key"),
        pytest.param({"a": {"": 1}, "a.": 2}, "a.", ("a/", "a."), id="an empty key beside a trailing dot"),
        pytest.param(
            {"l": [1, 2], "l.0": 3, "l.1": 4}, "l.0", ("l/0", "l.0"), id="a position beside a dot and a number"
        ),
        pytest.param({"a.b": {"c": 1}, "a": {"b.c": 2}}, "a.b.c", ("a/b.c", "a.b/c"), id="dots in different places"),
    ],
)
def test_leaves_that_orbax_would_store_under_one_name_are_refused(tree, name, leaves):
    """By all their paths: stock Orbax gives one value for all of them."""
    found = refusals(tree)
    assert found[f"cannot save leaves under one name: Orbax would store all of them as {name!r}"] == leaves


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        pytest.param({"a~2": "x", "b": 1}, {"cannot save a str under a key with '~'": ("a~2",)}, id="a tilde in a key"),
        pytest.param(
            {"a": "x", "a/b": "y"},
            {"cannot save a str at a/b beside one at a: Orbax would take the one for a part of the other": ("a/b",)},
            id="a slash in a key beside the part before it",
        ),
    ],
)
def test_text_that_orbax_could_not_find_again_is_refused(tree, found):
    """Orbax keeps all text in one JSON file, by JSON pointers that it makes of the names."""
    assert refusals(tree) == found


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param({"a~2": 1, "b~": np.ones(1)}, id="a tilde in the key of a number"),
        pytest.param({"a~0": "x", "a~1b": "y"}, id="a tilde that is an escape"),
        pytest.param({"a": 1, "a/b": "y"}, id="a slash beside a number"),
        pytest.param({"a": {"b": "x", "c": "y"}}, id="texts beside each other"),
    ],
)
def test_other_keys_of_text_are_fine(tree):
    """Only what would be lost is refused."""
    assert list(record_tree(tree).manifest.leaves.values())


def test_a_traced_value_is_refused_by_name():
    """A save within `jax.jit` would save nothing."""

    def traced(x: jax.Array) -> jax.Array:
        assert refusals({"x": x, "y": 1}) == {"cannot save a value that is being traced": ("x",)}
        return x

    jax.jit(traced)(1)


def nest(levels: int) -> Any:
    tree: Any = 0
    for _ in range(levels):
        tree = {"a": tree}
    return tree


def test_a_tree_has_a_greatest_depth():
    """Up to it it is recorded, beyond it it is refused, however deep: no `RecursionError`."""
    assert len(next(iter(record_tree(nest(MAX_DEPTH)).manifest.leaves))) == MAX_DEPTH
    for levels in (MAX_DEPTH + 1, 100_000):
        (reason,) = refusals(nest(levels))
        assert reason == "cannot save a tree deeper than 100 levels"


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        pytest.param({}, "cannot save an empty tree", id="an empty dict"),
        pytest.param(None, "cannot save an empty tree", id="None"),
    ],
)
def test_a_tree_without_a_leaf_is_refused(tree, reason):
    """As in Orbax."""
    assert refusals(tree) == {reason: (".",)}


def test_all_refusals_of_a_tree_come_in_one_error(mesh):
    """Each with the leaves that it concerns, of as many as there are."""
    tree = {
        "good": place(mesh, matrix(), P("d")),
        "objects": [np.array([None]), np.array([None])],
        "set": {1},
        "dots": {"a.b": 1, "a": {"b": 2}},
        "keys": {1.5: 0},
        "gone": deleted(),
    }
    with pytest.raises(SaveRefusedError) as error:
        record_tree(tree)
    assert {problem.could_not: problem.affects for problem in error.value.problems} == {
        "cannot save dtype object": ("objects/0", "objects/1"),
        "cannot save a leaf of type builtins.set": ("set",),
        "cannot save leaves under one name: Orbax would store all of them as 'dots.a.b'": ("dots/a/b", "dots/a.b"),
        "cannot save a dict key of type float": ("keys",),
        "cannot save an array that was deleted or donated": ("gone",),
    }
    assert str(error.value).startswith("5 problems\n")
    assert f"allowed: {ALLOWED_LEAVES}" in str(error.value)


# Targets.


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda mesh: 3, TargetRecord(value_type="int", keepable=True), id="an int"),
        pytest.param(lambda mesh: 3.0, TargetRecord(value_type="float", keepable=True), id="a float"),
        pytest.param(lambda mesh: True, TargetRecord(value_type="bool", keepable=True), id="a bool"),
        pytest.param(lambda mesh: "x", TargetRecord(value_type="str", keepable=True), id="a text"),
        pytest.param(lambda mesh: b"x", TargetRecord(value_type="bytes", keepable=True), id="bytes"),
        pytest.param(
            lambda mesh: np.ones((2, 3), np.float32),
            TargetRecord(shape=(2, 3), dtype="float32", value_type="np.ndarray", keepable=True),
            id="a NumPy array",
        ),
        pytest.param(
            lambda mesh: np.int8(3),
            TargetRecord(shape=(), dtype="int8", value_type="np.generic", keepable=True),
            id="a NumPy scalar",
        ),
        pytest.param(
            lambda mesh: jax.ShapeDtypeStruct((2,), jnp.bfloat16),
            TargetRecord(shape=(2,), dtype="bfloat16"),
            id="a shape and a dtype",
        ),
        pytest.param(
            lambda mesh: jax.ShapeDtypeStruct((8,), jnp.int8, sharding=NamedSharding(mesh.abstract_mesh, P("d"))),
            TargetRecord(
                shape=(8,),
                dtype="int8",
                sharding=NamedShardingRecord(
                    mesh=dataclasses.replace(MESH_RECORD, device_ids=None, platform=None),
                    spec=SpecRecord(partitions=("d",)),
                ),
            ),
            id="a spec on an abstract mesh",
        ),
        pytest.param(
            lambda mesh: jax.ShapeDtypeStruct((8,), jnp.int8, sharding=NamedSharding(mesh, P("d"))),
            TargetRecord(
                shape=(8,),
                dtype="int8",
                sharding=NamedShardingRecord(
                    mesh=MESH_RECORD, spec=SpecRecord(partitions=("d",)), memory_kind="device"
                ),
                concrete=True,
            ),
            id="a concrete sharding",
        ),
        pytest.param(
            lambda mesh: jax.ShapeDtypeStruct((8,), jnp.int8, sharding=NamedSharding(AbstractMesh((), ()), P())),
            TargetRecord(shape=(8,), dtype="int8"),
            id="an empty abstract mesh, which counts as no sharding",
        ),
        pytest.param(
            lambda mesh: on_numbered_axes(),
            TargetRecord(shape=(8, 8), dtype="float32", concrete=True, committed=True, keepable=True),
            id="a concrete sharding without a record, which is taken as it is",
        ),
        pytest.param(
            lambda mesh: jnp.float32(1),
            TargetRecord(
                shape=(),
                dtype="float32",
                sharding=SingleDeviceRecord(device_id=0, platform="cpu", memory_kind="device"),
                concrete=True,
                committed=False,
                keepable=True,
            ),
            id="an uncommitted array",
        ),
        pytest.param(
            lambda mesh: jax.ShapeDtypeStruct((4,), jax.random.key(0, impl="rbg").dtype),
            TargetRecord(shape=(4,), prng_impl="rbg"),
            id="keys",
        ),
        pytest.param(lambda mesh: ..., TargetRecord(placeholder=True, keepable=True), id="a placeholder"),
        pytest.param(
            lambda mesh: deleted(),
            TargetRecord(
                shape=(3,),
                dtype="float32",
                sharding=SingleDeviceRecord(device_id=0, platform="cpu", memory_kind="device"),
                concrete=True,
                committed=False,
            ),
            id="a deleted array, which has no value to keep",
        ),
        pytest.param(
            lambda mesh: jax.ShapeDtypeStruct(
                (8,), jnp.float32, sharding=NamedSharding(AbstractMesh((8,), (0,)), P(0))
            ),
            TargetRecord(
                odd=("cannot record mesh axis names that are not str: (0,)", "name the mesh axes by str"),
            ),
            id="a spec on an abstract mesh that has no record",
        ),
        pytest.param(
            lambda mesh: {1},
            TargetRecord(
                odd=(
                    "cannot restore into a leaf of type builtins.set",
                    "use arrays, jax.ShapeDtypeStruct, NumPy or Python values",
                ),
            ),
            id="what no leaf can be",
        ),
    ],
)
def test_a_target_leaf_asks_for(make, expected, mesh):
    """Shape, dtype, implementation, sharding, type: each where it is said."""
    assert record_target({"leaf": make(mesh)}).records[path("leaf")] == expected


def test_a_target_knows_its_leaves_and_structure(mesh):
    """So that the result can be put together again."""
    state = training_state(mesh)
    captured = record_target(state)
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    assert captured.treedef == treedef
    assert list(captured.leaves) == list(captured.records) == [record_path(keypath) for keypath, _ in flat]


def test_a_target_with_odd_keys_is_recorded_all_the_same():
    """They match nothing, and the plan says so by name."""
    captured = record_target({"n": Keyed((OddKey(), 1)), "f": {1.5: 0}})
    assert [path_text(leaf_path) for leaf_path in captured.records] == ["f/[1.5]", "n/odd"]


def test_a_target_that_cannot_be_recorded_is_refused_by_the_plan(mesh):
    """By leaf name, beside whatever else is wrong; not the exception that travels within the module."""
    saved = record_tree({"w": place(mesh, matrix(), P("d")), "x": 1}).manifest
    captured = record_target({"w": {1}, "x": "text"})
    plan = plan_from_records(saved, captured.records, saved.inventory)
    assert {problem.could_not: problem.affects for problem in plan.refused} == {
        "cannot restore into a leaf of type builtins.set": ("w",),
        "cannot restore int as str": ("x",),
    }


# Round trips: capture(bind(r)) = r.


@st.composite
def shardings(draw: st.DrawFn) -> NamedShardingRecord:
    """Any named sharding on the eight devices, over axes d and m: their order, types, devices, spec and memory."""
    names = draw(st.permutations(["d", "m"]))
    types = tuple(draw(st.sampled_from(["explicit", "auto"])) for _ in names)
    sizes = draw(st.sampled_from([(2, 4), (4, 2), (1, 8), (8, 1), (2, 2), (1, 1), (3, 2)]))
    mesh = MeshRecord(
        axis_names=tuple(names),
        axis_sizes=sizes,
        axis_types=types,
        device_ids=tuple(draw(st.permutations(range(8)))[: sizes[0] * sizes[1]]),
        platform="cpu",
    )
    alone = [None, UNCONSTRAINED] if "auto" in types else [None]
    partitions = draw(
        st.sampled_from(
            [(), ("d",), ("m", "d"), (("d", "m"),), (("m", "d"), None), (None, "m"), (None,), (None, None, "d")]
        )
    )
    partitions = tuple(draw(st.sampled_from(alone)) if p is None else p for p in partitions)
    free = set(names) - set(SpecRecord(partitions=partitions).axes())
    explicit = {name for name, kind in zip(names, types, strict=True) if kind == "explicit"}
    reduced = tuple(sorted(free & explicit)) if draw(st.booleans()) else ()
    return NamedShardingRecord(
        mesh=mesh,
        spec=SpecRecord(partitions=partitions, reduced=reduced),
        memory_kind=draw(st.sampled_from(["device", "pinned_host", "unpinned_host"])),
    )


@given(st.lists(shardings(), min_size=1, max_size=3))
def test_what_is_recorded_of_a_bound_sharding_is_what_it_was_bound_from(records):
    """Mesh axis names, sizes and types, devices in order, spec and memory kind; nothing is added or lost."""
    leaves = {
        f"w{i}": ArrayRecord(shape=(0, 0, 0), dtype="float32", sharding=record) for i, record in enumerate(records)
    }
    tree = ContainerRecord(
        kind="dict", keys=tuple(Key("dict", name) for name in leaves), children=tuple(leaves.values())
    )
    present = read_present()
    plan = plan_from_records(Manifest(tree=tree, inventory=present.inventory), None, present.inventory)
    assert plan.refused == ()
    recorder = LeafRecorder()
    bound = bind_plan(plan, present)
    assert [recorder.sharding(sharding) for sharding in bound.values()] == records


@given(shardings())
def test_a_spec_survives_the_way_there_and_back(record):
    """As JAX's own, with each kind of partition."""
    spec = partition_spec_of(record.spec)
    mesh = AbstractMesh(
        record.mesh.axis_sizes,
        record.mesh.axis_names,
        axis_types=tuple(AxisType[kind.capitalize()] for kind in record.mesh.axis_types),
    )
    recorded = LeafRecorder().sharding(NamedSharding(mesh, spec, memory_kind=record.memory_kind))
    assert (recorded.spec, recorded.memory_kind) == (record.spec, record.memory_kind)
    assert partition_spec_of(recorded.spec) == spec


@pytest.mark.parametrize("kind", REDUCTION_KINDS if hasattr(jax.sharding, "UnreducedKind") else ("sum",))
def test_a_pending_reduction_survives_the_way_there_and_back(kind):
    """Of every kind that this JAX has."""
    record = SpecRecord(partitions=("d",), unreduced=("m",), unreduced_kind=kind)
    mesh = AbstractMesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    assert LeafRecorder().sharding(NamedSharding(mesh, partition_spec_of(record))).spec == record


def test_a_mesh_with_manual_axes_is_recorded():
    """They are as much a fact as the others."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("d", "m"), axis_types=(AxisType.Manual, AUTO))
    assert LeafRecorder().mesh(mesh).axis_types == ("manual", "auto")
    assert LeafRecorder().mesh(mesh.abstract_mesh) == MeshRecord(
        axis_names=("d", "m"), axis_sizes=(2, 4), axis_types=("manual", "auto")
    )


# Drift: what JAX knows today is what is known here.


def test_axis_types_are_those_of_jax():
    """The members of `jax.sharding.AxisType`, by name."""
    assert {member.name.lower() for member in AxisType} == set(AXIS_TYPES), (
        "jax.sharding.AxisType has other members than _records.AXIS_TYPES: give each its spelling in the record"
    )


def test_reduction_kinds_are_those_of_jax():
    """The members of `jax.sharding.UnreducedKind`; before it came, a pending reduction was always a sum."""
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    names = {"sum"} if kinds is None else {member.name for member in kinds}
    assert names == ({"sum"} if kinds is None else set(REDUCTION_KINDS)), (
        "jax.sharding.UnreducedKind has other members than _records.REDUCTION_KINDS"
    )


def test_a_partition_spec_has_no_attribute_that_is_not_recorded():
    """Its slots are the fields of `SpecRecord`."""
    recorded = {"partitions" if name == "_partitions" else name for name in P.__slots__} - {"__weakref__"}
    fields = {field.name for field in dataclasses.fields(SpecRecord)}
    if not hasattr(jax.sharding, "UnreducedKind"):
        fields -= {"unreduced_kind"}
    assert recorded == fields, "jax.sharding.PartitionSpec says something that SpecRecord does not record"
    assert not hasattr(P("d"), "__dict__"), "jax.sharding.PartitionSpec takes attributes that SpecRecord cannot know"


def test_a_named_sharding_has_no_argument_that_is_not_recorded(mesh):
    """Mesh, spec and memory kind are recorded; logical device ids are refused."""
    # The constructor is compiled: its signature is its docstring.
    arguments = re.findall(r"(\w+): ", NamedSharding.__init__.__doc__)
    assert arguments == ["mesh", "spec", "memory_kind", "_logical_device_ids"], (
        "jax.sharding.NamedSharding takes other arguments than NamedShardingRecord records or _capture refuses"
    )
    _, state = NamedSharding(mesh, P("d"), memory_kind="device").__reduce__()
    assert state == (mesh, P("d"), "device", None), (
        "jax.sharding.NamedSharding is pickled as more than what NamedShardingRecord records"
    )


def test_tree_keys_are_those_of_jax():
    """Each has a `Key` of the record."""
    found = {name for name in dir(jax.tree_util) if name.endswith("Key")}
    assert found == {"DictKey", "SequenceKey", "GetAttrKey", "FlattenedIndexKey"}, (
        f"jax.tree_util has other key classes than _capture knows: {sorted(found)}"
    )
    keys = (
        jax.tree_util.DictKey("a"),
        jax.tree_util.SequenceKey(1),
        jax.tree_util.GetAttrKey("b"),
        jax.tree_util.FlattenedIndexKey(2),
    )
    assert record_path(keys) == (Key("dict", "a"), Key("index", 1), Key("attr", "b"), Key("index", 2))


def test_shardings_are_those_of_jax():
    """A new public kind of sharding needs a record or a refusal of its own."""
    found = {
        name
        for name, value in vars(jax.sharding).items()
        if isinstance(value, type) and issubclass(value, jax.sharding.Sharding)
    }
    assert found == {"Sharding", "NamedSharding", "SingleDeviceSharding"}, (
        f"jax.sharding has other kinds of sharding than _capture knows: {sorted(found)}"
    )
    assert SingleDeviceSharding(jax.devices()[0], memory_kind="device").memory_kind == "device"


def test_prng_implementations_are_those_of_jax():
    """Abstract keys of each are told apart by their dtype."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        target = jax.ShapeDtypeStruct((), jax.random.key(0, impl=impl).dtype)
        assert record_target({"k": target}).records[path("k")].prng_impl == impl
