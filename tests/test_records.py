"""`_records`: facts that cannot be untrue, and how a person reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from trees import path

from orbax_explicit import RecordError
from orbax_explicit._leaf_capture import STORABLE_DTYPES
from orbax_explicit._records import (
    UNCONSTRAINED,
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    PrngRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    dtype_itemsize,
    iterate_containers,
    path_text,
    plural,
    replace_leaves,
    storage_name,
)

MESH = MeshRecord(
    axis_names=("d", "m"),
    axis_sizes=(2, 4),
    axis_types=("explicit", "auto"),
    device_ids=tuple(range(8)),
    platform="cpu",
)
FLOATS = ArrayRecord(shape=(8, 8), dtype="float32")


def named(*partitions: Any, **fields: Any) -> NamedShardingRecord:
    """A sharding over `MESH`."""
    return NamedShardingRecord(mesh=MESH, spec=SpecRecord(partitions=partitions), **fields)


def inventory(**changed: Any) -> Inventory:
    """Two devices of one process, but for what is changed."""
    fields: dict[str, Any] = {
        "platform": "cpu",
        "device_kind": "cpu",
        "device_ids": (0, 1),
        "process_indices": (0, 0),
        "memory_kinds": ("device", "pinned_host"),
        "default_memory_kind": "device",
    }
    return Inventory(**{**fields, **changed})


@pytest.mark.parametrize(
    ("record", "fields", "problems"),
    [
        pytest.param(
            MeshRecord,
            {"axis_names": ("a", "a"), "axis_sizes": (2, 2), "axis_types": ("auto", "auto")},
            ["mesh axis names repeat: ('a', 'a')"],
            id="a mesh whose axis names repeat",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a", "b"), "axis_sizes": (2,), "axis_types": None},
            ["2 mesh axis names but 1 sizes"],
            id="a mesh with an axis without a size",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a",), "axis_sizes": (0,), "axis_types": None},
            ["mesh axis sizes must be at least 1, not (0,)"],
            id="a mesh with an axis of size 0",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a",), "axis_sizes": (2,), "axis_types": ("auto", "auto")},
            ["1 mesh axis names but 2 axis types"],
            id="a mesh with more types than axes",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a",), "axis_sizes": (2,), "axis_types": ("Auto",)},
            ["unknown mesh axis types ['Auto']; known are ['explicit', 'auto', 'manual']"],
            id="a mesh with an unknown axis type",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a",), "axis_sizes": (2,), "axis_types": None, "device_ids": (0,)},
            ["a mesh of shape (2,) lists 1 devices"],
            id="a mesh with too few devices",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a",), "axis_sizes": (2,), "axis_types": None, "device_ids": (0, 0)},
            ["a device appears twice in a mesh"],
            id="a mesh with one device twice",
        ),
        pytest.param(
            MeshRecord,
            {"axis_names": ("a", "a"), "axis_sizes": (0,), "axis_types": ("x", "y", "auto"), "device_ids": (1, 1)},
            [
                "mesh axis names repeat: ('a', 'a')",
                "2 mesh axis names but 1 sizes",
                "mesh axis sizes must be at least 1, not (0,)",
                "2 mesh axis names but 3 axis types",
                "unknown mesh axis types ['x', 'y']; known are ['explicit', 'auto', 'manual']",
                "a mesh of shape (0,) lists 2 devices",
                "a device appears twice in a mesh",
            ],
            id="a mesh with all of these",
        ),
        pytest.param(
            SpecRecord,
            {"unreduced": ("m", "d"), "unreduced_kind": "sum"},
            ["unreduced axes must be sorted and distinct, not ('m', 'd')"],
            id="a spec with unsorted unreduced axes",
        ),
        pytest.param(
            SpecRecord,
            {"partitions": (("d", "m"), "d")},
            ["a spec uses mesh axes more than once: ['d']"],
            id="a spec that splits two dimensions over one axis",
        ),
        pytest.param(
            SpecRecord,
            {"partitions": ("d",), "reduced": ("d",)},
            ["a spec uses mesh axes more than once: ['d']"],
            id="a spec that splits over a reduced axis",
        ),
        pytest.param(
            SpecRecord,
            {"unreduced": ("d",)},
            ["unreduced axes and their reduction must come together"],
            id="a spec with a pending reduction of no kind",
        ),
        pytest.param(
            SpecRecord,
            {"unreduced_kind": "sum"},
            ["unreduced axes and their reduction must come together"],
            id="a spec with a reduction over no axis",
        ),
        pytest.param(
            SpecRecord,
            {"partitions": ("d", "d"), "reduced": ("m", "m"), "unreduced_kind": "mean"},
            [
                "reduced axes must be sorted and distinct, not ('m', 'm')",
                "a spec uses mesh axes more than once: ['d', 'm']",
                "unknown reduction 'mean'; known are ['sum', 'max', 'min']",
                "unreduced axes and their reduction must come together",
            ],
            id="a spec with all of these",
        ),
        pytest.param(
            NamedShardingRecord,
            {"mesh": MESH, "spec": SpecRecord(partitions=("x", "d"), reduced=("y",))},
            ["spec P('x', 'd', reduced={'y'}) names axes ['x', 'y'] that mesh (d=2 explicit, m=4 auto) lacks"],
            id="a sharding over axes that its mesh lacks",
        ),
        pytest.param(
            ArrayRecord,
            {"shape": (-1, 2), "dtype": "float32", "sharding": named(None, "d", "m"), "committed": False},
            [
                "array dimensions must not be negative: (-1, 2)",
                "spec P(None, 'd', 'm') has more entries than shape (-1, 2) has dimensions",
                "an array on several devices is always committed",
            ],
            id="an array with a negative dimension, too long a spec, and uncommitted on a mesh",
        ),
        pytest.param(
            ValueRecord,
            {"type": "set", "shape": (-1,)},
            [
                "unknown type of value 'set'; known are ['int', 'float', 'bool', 'complex', 'str', 'bytes', "
                "'np.generic', 'np.ndarray']",
                "array dimensions must not be negative: (-1,)",
                "a value of type set has no shape, yet (-1,) is given",
            ],
            id="a value of an unknown type with a shape",
        ),
        pytest.param(
            ContainerRecord,
            {"kind": "set", "keys": (Key("index", 0),)},
            [
                "unknown kind of container 'set'; known are ['none', 'dict', 'list', 'tuple', 'namedtuple', 'node']",
                "a container has 1 keys but 0 children",
                "a set has keys that it cannot have",
            ],
            id="a container of an unknown kind",
        ),
        pytest.param(
            ContainerRecord,
            {"kind": "dict", "keys": (Key("dict", "a"), Key("dict", "a")), "children": (FLOATS, FLOATS)},
            ["a key appears twice in a container"],
            id="a dict with one key twice",
        ),
        pytest.param(
            ContainerRecord,
            {"kind": "list", "keys": (Key("index", 1), Key("index", 0)), "children": (FLOATS, FLOATS)},
            ["the positions in a list are not 0, 1, 2, ..."],
            id="a list with positions in disorder",
        ),
        pytest.param(
            ContainerRecord,
            {"kind": "tuple", "keys": (Key("dict", "a"),), "children": (FLOATS,), "qualname": "A"},
            [
                "a tuple has keys that it cannot have",
                "the positions in a tuple are not 0, 1, 2, ...",
                "a tuple with class name 'A'",
            ],
            id="a tuple with a dict's key and a class",
        ),
        pytest.param(
            ContainerRecord,
            {"kind": "namedtuple"},
            ["a namedtuple with class name ''"],
            id="a NamedTuple without a class",
        ),
        pytest.param(
            Inventory,
            {
                "platform": "cpu",
                "device_kind": "cpu",
                "device_ids": (),
                "process_indices": (-1,),
                "memory_kinds": (),
                "default_memory_kind": "device",
            },
            [
                "an inventory has no devices",
                "0 devices but 1 process indices",
                "process indices must not be negative",
                "default memory kind 'device' is not one of ()",
            ],
            id="an inventory of no devices",
        ),
        pytest.param(
            inventory,
            {"device_ids": (3, 3)},
            ["a device appears twice in an inventory"],
            id="an inventory with one device twice",
        ),
    ],
)
def test_a_record_that_cannot_be_true_is_refused(record, fields, problems):
    """When it is made, with everything that is wrong with it."""
    with pytest.raises(RecordError) as error:
        record(**fields)
    assert [problem.could_not for problem in error.value.problems] == problems


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"axis_names": (), "axis_sizes": (), "axis_types": ()}, id="a mesh without axes"),
        pytest.param(
            {"axis_names": (), "axis_sizes": (), "axis_types": (), "device_ids": (5,)}, id="a mesh of one device"
        ),
        pytest.param({"axis_names": ("a",), "axis_sizes": (3,), "axis_types": None}, id="a mesh without types"),
    ],
)
def test_a_degenerate_mesh_is_a_mesh(fields):
    """JAX has all of these."""
    assert MeshRecord(**fields).size == (3 if fields["axis_names"] else 1)


def test_an_uncommitted_array_on_a_mesh_of_one_device_is_possible():
    """JAX makes them on a machine with one device."""
    one = MeshRecord(axis_names=("d",), axis_sizes=(1,), axis_types=("auto",), device_ids=(0,))
    sharding = NamedShardingRecord(mesh=one, spec=SpecRecord())
    assert not dataclasses.replace(FLOATS, sharding=sharding, committed=False).committed


@pytest.mark.parametrize(
    ("record", "text"),
    [
        pytest.param(MESH, "(d=2 explicit, m=4 auto)", id="a mesh"),
        pytest.param(dataclasses.replace(MESH, axis_types=None), "(d=2 untyped, m=4 untyped)", id="an untyped mesh"),
        pytest.param(MeshRecord(axis_names=(), axis_sizes=(), axis_types=()), "()", id="a mesh without axes"),
        pytest.param(SpecRecord(), "P()", id="the empty spec"),
        pytest.param(SpecRecord(partitions=("d", None)), "P('d', None)", id="a spec with a trailing None"),
        pytest.param(SpecRecord(partitions=(("d", "m"),)), "P(('d', 'm'))", id="a dimension over two axes"),
        pytest.param(SpecRecord(partitions=(UNCONSTRAINED,)), "P(UNCONSTRAINED)", id="an unconstrained dimension"),
        pytest.param(
            SpecRecord(partitions=("d",), unreduced=("m", "x"), unreduced_kind="sum", reduced=("y",)),
            "P('d', unreduced={'m', 'x'}, reduced={'y'})",
            id="pending sums",
        ),
        pytest.param(
            SpecRecord(unreduced=("m",), unreduced_kind="max"),
            "P(unreduced={'m'}, unreduced_kind=max)",
            id="a pending maximum",
        ),
        pytest.param(named("d"), "P('d') on (d=2 explicit, m=4 auto)", id="a sharding"),
        pytest.param(
            named(memory_kind="pinned_host"),
            "P() on (d=2 explicit, m=4 auto) in pinned_host",
            id="a sharding with a memory kind",
        ),
        pytest.param(SingleDeviceRecord(device_id=3, platform="cuda"), "cuda:3", id="one device"),
        pytest.param(
            SingleDeviceRecord(device_id=3, memory_kind="device"),
            "device:3 in device",
            id="one device of a platform unknown",
        ),
        pytest.param(inventory(), "2 cpu devices, 1 process", id="an inventory"),
        pytest.param(
            inventory(device_ids=(0, 1, 2048), process_indices=(0, 0, 1)),
            "3 cpu devices, 2 processes",
            id="an inventory of two processes",
        ),
        pytest.param(
            inventory(platform="tpu", device_ids=(7,), process_indices=(0,)),
            "1 tpu device, 1 process",
            id="an inventory of one device",
        ),
    ],
)
def test_a_record_reads_like_this(record, text):
    """Names, sizes and types, never a `repr`."""
    assert str(record) == text


@pytest.mark.parametrize(
    ("leaf", "nbytes", "text"),
    [
        pytest.param(FLOATS, 256, "float32", id="an array"),
        pytest.param(ArrayRecord(shape=(), dtype="bfloat16"), 2, "bfloat16", id="a scalar array"),
        pytest.param(ArrayRecord(shape=(0, 3), dtype="float64"), 0, "float64", id="an array without elements"),
        pytest.param(
            ArrayRecord(shape=(8,), dtype="uint32", prng=PrngRecord(impl="threefry2x32", key_shape=(2,))),
            64,
            "key<threefry2x32>",
            id="eight PRNG keys",
        ),
        pytest.param(ValueRecord(type="int", dtype="int64"), 8, "int", id="an int"),
        pytest.param(ValueRecord(type="str"), 0, "str", id="a text"),
        pytest.param(ValueRecord(type="bytes", dtype="uint8", shape=(5,)), 5, "bytes", id="bytes"),
        pytest.param(ValueRecord(type="np.generic", dtype="int8"), 1, "int8", id="a NumPy scalar"),
        pytest.param(
            ValueRecord(type="np.ndarray", dtype="complex64", shape=(3,)), 24, "complex64", id="a NumPy array"
        ),
    ],
)
def test_a_leaf_knows_its_bytes_and_how_its_dtype_reads(leaf, nbytes, text):
    """Bytes of one whole copy."""
    assert leaf.nbytes == nbytes
    assert leaf.dtype_text == text


def test_stored_shape_of_keys_has_the_dimensions_of_their_data():
    """The array of keys itself has none of them."""
    keys = ArrayRecord(shape=(8, 2), dtype="uint32", prng=PrngRecord(impl="rbg", key_shape=(4,)))
    assert keys.stored_shape == (8, 2, 4)
    assert FLOATS.stored_shape == (8, 8)


@pytest.mark.parametrize("dtype", sorted(STORABLE_DTYPES))
def test_itemsize_is_numpys(dtype):
    """Of every dtype that can be saved, those of ml_dtypes included."""
    assert dtype_itemsize(dtype) == np.dtype(jax.numpy.dtype(dtype)).itemsize


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [("float8_e8m0fnu", 1), ("float4_e2m1fn", 1), ("uint2", 1), ("complex256", 32), ("", 1), ("bool", 1)],
)
def test_itemsize_of_a_dtype_that_is_not_here(dtype, itemsize):
    """A record is read where its dtype is not known; the bits stand in the name."""
    assert dtype_itemsize(dtype) == itemsize


@pytest.mark.parametrize(
    ("dimension", "shards"), [(0, 8), (1, 1), (2, 1)], ids=["over two axes", "over none", "beyond the spec"]
)
def test_a_dimension_is_split_into_the_product_of_its_axes(dimension, shards):
    """Beyond the spec, and where it says None, into one."""
    assert named(("d", "m"), None).shards_along(dimension) == shards


def test_axes_of_a_spec_include_the_reduced_ones():
    """All that a mesh must have."""
    spec = SpecRecord(
        partitions=("a", None, ("b", "c"), UNCONSTRAINED), unreduced=("d",), unreduced_kind="sum", reduced=("e",)
    )
    assert spec.axes() == {"a", "b", "c", "d", "e"}
    assert spec.partitioned_axes() == ("a", "b", "c")


@pytest.mark.parametrize(
    ("leaf_path", "text", "name"),
    [
        pytest.param((), ".", "", id="a tree that is one leaf"),
        pytest.param(path("params", "kernel"), "params/kernel", "params.kernel", id="dict keys"),
        pytest.param(path("l", 0), "l/0", "l.0", id="an int key"),
        pytest.param((Key("attr", "mu"), Key("index", 3)), "mu/3", "mu.3", id="a field and a position"),
        pytest.param(path("a.b"), "a.b", "a.b", id="a dot in a key, which Orbax does not escape"),
    ],
)
def test_a_path_has_a_text_for_people_and_a_name_for_orbax(leaf_path, text, name):
    """Slashes for people, dots in Orbax's storage."""
    assert path_text(leaf_path) == text
    assert storage_name(leaf_path) == name


def value(*leaves: Any) -> ContainerRecord:
    """A tuple of values."""
    return ContainerRecord(
        kind="tuple", keys=tuple(Key("index", i) for i in range(len(leaves))), children=tuple(leaves)
    )


def nested() -> ContainerRecord:
    """`{'a': (x, None, y), 'b': [], 'c': z}` as a record."""
    none = ContainerRecord(kind="none")
    one, two = ValueRecord(type="int", dtype="int64"), ValueRecord(type="float", dtype="float64")
    return ContainerRecord(
        kind="dict",
        keys=(Key("dict", "a"), Key("dict", "b"), Key("dict", "c")),
        children=(value(one, none, two), ContainerRecord(kind="list"), FLOATS),
    )


def test_leaves_come_in_the_order_of_jax():
    """With the paths that JAX gives them; containers have no leaf."""
    leaves = Manifest(tree=nested()).leaves
    flat, _ = jax.tree_util.tree_flatten_with_path({"c": 0, "b": [], "a": (1, None, 2.0)})
    assert [path_text(leaf_path) for leaf_path in leaves] == ["a/0", "a/2", "c"]
    assert [path_text(leaf_path) for leaf_path in leaves] == [
        jax.tree_util.keystr(keypath, simple=True, separator="/") for keypath, _ in flat
    ]
    assert leaves[path("c")] is FLOATS


def test_a_manifest_counts_its_arrays_and_bytes():
    """Arrays are those of JAX; bytes are of all leaves."""
    manifest = Manifest(tree=nested())
    assert list(manifest.arrays) == [path("c")]
    assert manifest.nbytes == 8 + 8 + 256


def test_meshes_of_a_manifest_are_distinct_and_in_order_of_use():
    """Two objects of one value count once."""
    other = dataclasses.replace(MESH, device_ids=tuple(range(8, 16)))
    arrays = [
        dataclasses.replace(FLOATS, sharding=NamedShardingRecord(mesh=mesh, spec=SpecRecord()))
        for mesh in (other, MESH, dataclasses.replace(MESH), other)
    ]
    alone = dataclasses.replace(FLOATS, sharding=SingleDeviceRecord(device_id=0))
    assert Manifest(tree=value(*arrays, alone, FLOATS)).meshes == (other, MESH)


def test_containers_come_outer_ones_first():
    """With their paths."""
    assert [(path_text(p), c.kind) for p, c in iterate_containers(nested())] == [
        (".", "dict"),
        ("a", "tuple"),
        ("a/1", "none"),
        ("b", "list"),
    ]


def test_leaves_are_replaced_in_the_same_containers():
    """Each with its path at hand."""
    seen = []

    def replace(leaf_path: Any, leaf: Any) -> Any:
        seen.append(path_text(leaf_path))
        return FLOATS

    replaced = replace_leaves(nested(), replace)
    assert seen == ["a/0", "a/2", "c"]
    assert list(Manifest(tree=replaced).leaves.values()) == [FLOATS] * 3
    assert [c.kind for _, c in iterate_containers(replaced)] == [c.kind for _, c in iterate_containers(nested())]


def test_a_class_reads_with_its_module():
    """Of a container that has one."""
    node = ContainerRecord(kind="node", module="optax", qualname="Outer.State")
    assert node.class_text == "optax.Outer.State"
    assert nested().class_text == ""


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(1, "device", "1 device"), (0, "device", "0 devices"), (2, "process", "2 processes"), (1, "process", "1 process")],
)
def test_counts_read_as_in_english(count, noun, text):
    """One device, two processes."""
    assert plural(count, noun) == text


def test_a_manifest_of_an_unknown_scope_is_refused():
    """Whether a tree is whole decides what a restore may take from it."""
    with pytest.raises(RecordError, match=r"unknown scope 'some'; known are \['tree', 'arrays'\]"):
        Manifest(tree=ValueRecord(type="int", dtype="int64"), scope="some")


def test_key_data_of_negative_shape_are_refused():
    """As arrays are."""
    with pytest.raises(RecordError, match="must not be negative"):
        PrngRecord(impl="threefry2x32", key_shape=(-2,))
