"""Checkpoints that stock Orbax wrote, read as manifests."""

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from etils import epath
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import orbax_explicit
from orbax_explicit._errors import FormatError
from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    iterate_containers,
    path_text,
)
from orbax_explicit._stock import is_checkpoint_item, read_stock_manifest

P = PartitionSpec


class Pair(NamedTuple):
    """Fields in an order that is not the sorted one."""

    second: Any
    first: Any


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> None:
    """The tables below name the devices 0 to 7."""
    assert jax.device_count() == 8


def _mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))


def _reversed_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[3::-1]), ("x",), axis_types=(AxisType.Auto,))


def _tree() -> dict[str, Any]:
    mesh = _mesh()

    def on_mesh(value: Any, *partitions: Any, **kwargs: Any) -> Any:
        return jax.device_put(value, NamedSharding(mesh, P(*partitions), **kwargs))

    return {
        "arrays": {
            "bfloat16": on_mesh(jnp.ones((8, 2), jnp.bfloat16), ("data", "model"), None),
            "bool": jax.device_put(jnp.ones(8, bool), NamedSharding(_reversed_mesh(), P("x"))),
            "complex64": on_mesh(jnp.ones(8, jnp.complex64), None),
            "float32": on_mesh(jnp.ones((8, 4)), "data", "model"),
            "float8": on_mesh(jnp.ones(8, jnp.float8_e4m3fn), "model"),
            "int4": on_mesh(jnp.ones(8, jnp.int4)),
            "pinned": on_mesh(jnp.ones(8), "data", memory_kind="pinned_host"),
            "single": jax.device_put(jnp.ones(3, jnp.int8), jax.devices()[3]),
            "uncommitted": jnp.int32(1),
        },
        "ints": {9: jnp.ones(1), 10: jnp.ones(1)},
        "keys": {"many": on_mesh(jax.random.split(jax.random.key(0), 8), "data"), "one": jax.random.key(1, impl="rbg")},
        "dotted.name": {"a b/c": jnp.ones(1)},
        "nodes": [(np.arange(3, dtype=np.uint16), 4), [], {}, (), None, Pair(second=jnp.ones(2), first=None)],
        "numbers": [float(i) for i in range(11)],
        "np_scalars": [np.float16(2), np.complex64(1j), np.uint8(3)],
        "values": {"bool": True, "np": np.ones((2, 3), ml_dtypes.bfloat16)},
        "text": "hi",
    }


MESH = MeshRecord(
    axis_names=("data", "model"), axis_sizes=(2, 4), axis_types=("explicit", "auto"), device_ids=tuple(range(8))
)
REVERSED = MeshRecord(axis_names=("x",), axis_sizes=(4,), axis_types=("auto",), device_ids=(3, 2, 1, 0))
DEVICE = SingleDeviceRecord(device_id=0, platform="cpu")


def _array(shape: tuple[int, ...], dtype: str, *partitions: Partition, mesh: MeshRecord = MESH) -> ArrayRecord:
    sharding = NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions))
    return ArrayRecord(shape=shape, dtype=dtype, sharding=sharding)


def _local(*shape: int, dtype: str = "float32", device: int = 0) -> ArrayRecord:
    return ArrayRecord(shape=shape, dtype=dtype, sharding=SingleDeviceRecord(device_id=device, platform="cpu"))


def _dict(**children: Any) -> ContainerRecord:
    keys = tuple(Key("dict", name) for name in sorted(children))
    return ContainerRecord(kind="dict", keys=keys, children=tuple(children[name] for name in sorted(children)))


def _list(*children: Any) -> ContainerRecord:
    keys = tuple(Key("index", i) for i in range(len(children)))
    return ContainerRecord(kind="list", keys=keys, children=children)


NONE = ContainerRecord(kind="none")
KEYS = NamedShardingRecord(mesh=MESH, spec=SpecRecord(partitions=("data",)))
EXPECTED: dict[str, Any] = {
    "arrays": _dict(
        bfloat16=_array((8, 2), "bfloat16", ("data", "model"), None),
        bool=_array((8,), "bool", "x", mesh=REVERSED),
        complex64=_array((8,), "complex64", None),
        float32=_array((8, 4), "float32", "data", "model"),
        float8=_array((8,), "float8_e4m3fn", "model"),
        int4=_array((8,), "int4"),
        pinned=_array((8,), "float32", "data"),
        single=_local(3, dtype="int8", device=3),
        uncommitted=_local(dtype="int32"),
    ),
    "ints": _dict(**{"10": _local(1), "9": _local(1)}),
    "keys": _dict(
        many=ArrayRecord(
            shape=(8,), dtype="uint32", sharding=KEYS, prng=PrngRecord(impl="threefry2x32", key_shape=(2,))
        ),
        one=ArrayRecord(shape=(), dtype="uint32", sharding=DEVICE, prng=PrngRecord(impl="rbg", key_shape=(4,))),
    ),
    "dotted.name": _dict(**{"a b/c": _local(1)}),
    "nodes": _list(
        _list(ValueRecord(type="np.ndarray", shape=(3,), dtype="uint16"), ValueRecord(type="int", dtype="int64")),
        ContainerRecord(kind="list"),
        ContainerRecord(kind="dict"),
        ContainerRecord(kind="tuple"),
        NONE,
        _dict(first=NONE, second=_local(2)),
    ),
    "numbers": _list(*[ValueRecord(type="float", dtype="float64")] * 11),
    "np_scalars": _list(
        ValueRecord(type="float", dtype="float16"),
        ValueRecord(type="complex", dtype="complex64"),
        ValueRecord(type="int", dtype="uint8"),
    ),
    "values": _dict(
        bool=ValueRecord(type="bool", dtype="bool"),
        np=ValueRecord(type="np.ndarray", shape=(2, 3), dtype="bfloat16"),
    ),
    "text": ValueRecord(type="str"),
}


def _save_standard(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def _save_pytree(path: Path, tree: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)
    return path


def _save_managed(path: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    return path / "7" / "default"


def _save_v1(path: Path, tree: Any) -> Path:
    ocp1.save(path, tree)
    (item,) = (child for child in path.iterdir() if (child / "_METADATA").exists())
    return item


@pytest.mark.parametrize(
    ("save", "without"),
    [
        pytest.param(_save_standard, {"text", "np_scalars"}, id="StandardCheckpointer writes it"),
        pytest.param(_save_pytree, set(), id="PyTreeCheckpointHandler writes it"),
        pytest.param(lambda p, t: _save_pytree(p, t, use_zarr3=True), set(), id="in Zarr v3"),
        pytest.param(lambda p, t: _save_pytree(p, t, use_ocdbt=False), set(), id="in plain directories"),
        pytest.param(
            lambda p, t: _save_pytree(p, t, use_ocdbt=False, use_zarr3=True),
            set(),
            id="in plain directories of Zarr v3",
        ),
        pytest.param(_save_managed, {"text", "np_scalars"}, id="CheckpointManager writes it"),
        pytest.param(_save_v1, {"np_scalars"}, id="v1 writes it"),
    ],
)
def test_a_stock_checkpoint_is_read_whole(tmp_path: Path, save: Callable[[Path, Any], Path], without: set[str]) -> None:
    """Tree, shapes, dtypes, layouts and PRNG keys are what was saved, as far as stock records it."""
    item = save(tmp_path / "checkpoint", {name: value for name, value in _tree().items() if name not in without})
    expected = _dict(**{name: record for name, record in EXPECTED.items() if name not in without})
    manifest = read_stock_manifest(epath.Path(item))
    assert dict(manifest.leaves) == dict(Manifest(tree=expected).leaves)
    assert manifest == Manifest(tree=expected)
    assert is_checkpoint_item(epath.Path(item))


@pytest.mark.parametrize("save", [_save_pytree, _save_v1], ids=["in v0", "in v1"])
@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        pytest.param(lambda: jnp.ones(3), _local(3), id="one leaf is a tree"),
        pytest.param(lambda: [jnp.ones(3)], _list(_local(3)), id="a list can be the root"),
        pytest.param(lambda: {"": jnp.ones(3)}, _dict(**{"": _local(3)}), id="a key can be empty"),
        pytest.param(
            lambda: {"a": np.ones(3)},
            _dict(a=ValueRecord(type="np.ndarray", shape=(3,), dtype="float64")),
            id="without jax arrays there is no _sharding file and no note",
        ),
    ],
)
def test_small_trees(tmp_path: Path, save: Callable[[Path, Any], Path], tree: Callable[[], Any], expected: Any) -> None:
    """Trees at the edge of what stock can save."""
    assert read_stock_manifest(epath.Path(save(tmp_path / "c", tree()))) == Manifest(tree=expected)


def test_rich_types_give_the_containers_themselves(tmp_path: Path) -> None:
    """A checkpoint saved with Orbax's rich types tells tuples from lists, and names its NamedTuples."""
    from orbax.checkpoint._src.metadata import pytree_metadata_options as options

    rich = options.PyTreeMetadataOptions(support_rich_types=True)
    item = _save_pytree(tmp_path / "c", _tree(), pytree_metadata_options=rich)
    manifest = read_stock_manifest(epath.Path(item))
    kinds = {path_text(path): (node.kind, node.class_text) for path, node in iterate_containers(manifest.tree)}
    assert kinds["nodes"] == ("list", "")
    assert kinds["nodes/0"] == ("tuple", "")
    assert kinds["nodes/5"] == ("namedtuple", f"{__name__}.Pair")
    assert {path_text(path) for path in manifest.leaves} >= {"nodes/0/1", "nodes/5/second"}
    assert manifest.notes == ()


def test_the_store_is_the_directory_when_the_metadata_does_not_say(tmp_path: Path) -> None:
    """Early releases did not record `use_ocdbt`: the presence of the store's manifest tells."""
    for use_ocdbt in (True, False):
        item = _save_pytree(tmp_path / str(use_ocdbt), {"a": jnp.ones(3)}, use_ocdbt=use_ocdbt)
        _edit_json(item / "_METADATA", lambda metadata: metadata.pop("use_ocdbt"))
        assert read_stock_manifest(epath.Path(item)).tree == _dict(a=_local(3))


def test_a_relative_path_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is opened at the same place as the files."""
    _save_pytree(tmp_path / "c", {"a": jnp.ones(3)})
    monkeypatch.chdir(tmp_path)
    assert read_stock_manifest(epath.Path("c")).tree == _dict(a=_local(3))


# ---- Damaged layouts: a note, never an error ---------------------------------------------------------------------


def _edit_json(file: Path, edit: Callable[[Any], Any]) -> None:
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))


def _key(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A checkpoint of two arrays on one mesh and an array on one device."""
    sharding = NamedSharding(_mesh(), P("data"))
    tree = {"a": jax.device_put(jnp.ones(8), sharding), "b": jax.device_put(jnp.ones(4), sharding), "c": jnp.ones(2)}
    return _save_standard(tmp_path / "three", tree)


THREE = {"a": _array((8,), "float32", "data"), "b": _array((4,), "float32", "data"), "c": _local(2)}


def _edit_entries(item: Path, names: str, edit: Callable[[Any], Any]) -> None:
    def edit_all(entries: Any) -> None:
        for name in names:
            entry = json.loads(entries[_key(name)])
            edit(entry)
            entries[_key(name)] = json.dumps(entry)

    _edit_json(item / "_sharding", edit_all)


@pytest.mark.parametrize(
    ("damage", "lost", "note"),
    [
        pytest.param(
            lambda item: (item / "_sharding").unlink(),
            "abc",
            "no recorded layout for a and 2 other arrays: the _sharding file is missing",
            id="the file is missing",
        ),
        pytest.param(
            lambda item: (item / "_sharding").write_bytes(b"\xff{"),
            "abc",
            "no recorded layout for a and 2 other arrays: the _sharding file is not JSON",
            id="the file is not JSON",
        ),
        pytest.param(
            lambda item: (item / "_sharding").write_text("[" * 100_000),
            "abc",
            "no recorded layout for a and 2 other arrays: the _sharding file is not JSON",
            id="the file is nested too deeply",
        ),
        pytest.param(
            lambda item: (item / "_sharding").write_text("[1]"),
            "abc",
            "no recorded layout for a and 2 other arrays: the _sharding file is not a JSON object but [1]",
            id="the file is no object",
        ),
        pytest.param(
            lambda item: ((item / "_sharding").unlink(), (item / "_sharding").mkdir()),
            "abc",
            "no recorded layout for a and 2 other arrays: the _sharding file is not readable (Is a directory)",
            id="the file is a directory",
        ),
        pytest.param(
            lambda item: _edit_json(item / "_sharding", lambda entries: entries.pop(_key("b"))),
            "b",
            "no recorded layout for b: the _sharding file has no entry",
            id="an entry is missing",
        ),
        pytest.param(
            lambda item: _edit_json(item / "_sharding", lambda entries: entries.update({_key("b"): "{"})),
            "b",
            "no recorded layout for b: its entry in _sharding is not JSON",
            id="an entry is not JSON",
        ),
        pytest.param(
            lambda item: _edit_entries(item, "ab", lambda entry: entry.update(axis_types=["AxisType.Odd"] * 2)),
            "ab",
            "no recorded layout for a and 1 other array: unknown mesh axis type 'AxisType.Odd'",
            id="an axis type is unknown",
        ),
        pytest.param(
            lambda item: _edit_entries(item, "ac", lambda entry: entry.update(sharding_type="PositionalSharding")),
            "ac",
            "no recorded layout for a and 1 other array: unknown kind of sharding 'PositionalSharding'",
            id="a kind of sharding is unknown",
        ),
        pytest.param(
            lambda item: _edit_entries(item, "ab", lambda entry: entry.update(partition_spec=["data", None])),
            "ab",
            "no recorded layout for a and 1 other array: spec P('data', None) has more entries than the array has"
            " dimensions",
            id="a spec is longer than the rank",
        ),
        pytest.param(
            lambda item: _edit_entries(item, "a", lambda entry: entry.update(partition_spec=["pipe"])),
            "a",
            "no recorded layout for a: spec P('pipe') names axes ['pipe'] that mesh (data=2 explicit, model=4 auto)"
            " lacks",
            id="an axis is not in the mesh",
        ),
        pytest.param(
            lambda item: _edit_entries(item, "c", lambda entry: entry.update(device_str="wse:0")),
            "c",
            "no recorded layout for c: unknown device 'wse:0'",
            id="a device is of an unknown platform",
        ),
    ],
)
def test_a_damaged_layout_costs_only_the_layout(
    three: Path, damage: Callable[[Path], Any], lost: str, note: str
) -> None:
    """The arrays stay readable, and there is one sentence for each distinct problem."""
    damage(three)
    manifest = read_stock_manifest(epath.Path(three))
    assert manifest.notes == (note,)
    expected = {
        name: ArrayRecord(shape=record.shape, dtype=record.dtype) if name in lost else record
        for name, record in THREE.items()
    }
    assert manifest.tree == _dict(**expected)


def test_distinct_problems_have_a_note_each(three: Path) -> None:
    """Notes are in the order of the first array that each concerns."""
    _edit_entries(three, "b", lambda entry: entry.update(shape=[2, 2]))
    _edit_entries(three, "c", lambda entry: entry.pop("device_str"))
    assert read_stock_manifest(epath.Path(three)).notes == (
        "no recorded layout for b: a mesh of shape (2, 2) lists 8 devices",
        "no recorded layout for c: unknown device None",
    )


@pytest.mark.parametrize(
    ("edit", "mesh"),
    [
        pytest.param(
            lambda entry: entry.pop("axis_types"),
            {"axis_types": None},
            id="Orbax before 0.11.26 recorded no axis types",
        ),
        pytest.param(
            lambda entry: entry.update(device_mesh={"mesh": [[{"id": 2048 + i} for i in range(8)]]}),
            {"device_ids": tuple(range(2048, 2056))},
            id="devices of another process count have other ids",
        ),
        pytest.param(lambda entry: entry.pop("device_mesh"), {}, id="no device ids means all devices in order"),
        pytest.param(
            lambda entry: entry.update(shape=[64, 8], device_mesh={"mesh": [{"id": i} for i in range(512)]}),
            {"axis_sizes": (64, 8), "device_ids": tuple(range(512))},
            id="512 devices are read on this machine",
        ),
    ],
)
def test_meshes_of_other_runs(three: Path, edit: Callable[[Any], Any], mesh: dict[str, Any]) -> None:
    """A mesh is read as it was recorded, whatever devices are here."""
    _edit_entries(three, "ab", edit)
    manifest = read_stock_manifest(epath.Path(three))
    fields = {"axis_names": ("data", "model"), "axis_sizes": (2, 4), "axis_types": ("explicit", "auto")}
    assert manifest.notes == ()
    assert manifest.meshes == (MeshRecord(**{**fields, "device_ids": tuple(range(8)), **mesh}),)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        pytest.param(
            "{", "PRNG keys are taken for plain arrays, for a file in array_metadatas is not JSON", id="no JSON"
        ),
        pytest.param(
            '{"array_metadatas": [3]}',
            "PRNG keys are taken for plain arrays, for a file in array_metadatas is not a list of arrays but holds 3",
            id="no list of arrays",
        ),
        pytest.param(
            '{"array_metadatas": [{"array_metadata": {"param_name": "k", "ext_metadata": {"random_key_impl": 1}}}]}',
            "PRNG keys k are taken for a plain array: implementation 1, shape (2,)",
            id="no name of an implementation",
        ),
    ],
)
def test_damaged_array_metadata_costs_only_the_key_type(tmp_path: Path, text: str, note: str) -> None:
    """The key data stays readable as the integers it is, and a note says so."""
    item = _save_pytree(tmp_path / "c", {"k": jax.random.key(0)})
    (item / "array_metadatas" / "process_0").write_text(text)
    manifest = read_stock_manifest(epath.Path(item))
    assert manifest.tree == _dict(k=_local(2, dtype="uint32"))
    assert manifest.notes == (note,)


def test_key_types_are_found_in_the_file_of_any_process(tmp_path: Path) -> None:
    """What the first process does not list is looked for in the next, in the order of their numbers."""
    item = _save_pytree(tmp_path / "c", {"k": jax.random.key(0)})
    directory = item / "array_metadatas"
    (directory / "process_0").rename(directory / "process_10")
    (directory / "process_9").write_text('{"array_metadatas": []}')
    (array,) = read_stock_manifest(epath.Path(item)).arrays.values()
    assert array.prng == PrngRecord(impl="threefry2x32", key_shape=(2,))


# ---- Damaged data: one error that lists everything ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "could_not"),
    [
        pytest.param(lambda file: file.unlink(), "cannot read a checkpoint whose _METADATA is missing", id="missing"),
        pytest.param(
            lambda file: file.write_text("{"), "cannot read a checkpoint whose _METADATA is not JSON", id="not JSON"
        ),
        pytest.param(
            lambda file: file.write_text("{}"),
            "cannot read a checkpoint whose _METADATA is without any entry in tree_metadata",
            id="without a tree",
        ),
    ],
)
def test_the_tree_metadata_is_needed(three: Path, damage: Callable[[Path], Any], could_not: str) -> None:
    """Without `_METADATA` there is no tree to give."""
    damage(three / "_METADATA")
    with pytest.raises(FormatError) as caught:
        read_stock_manifest(epath.Path(three))
    assert [problem.could_not for problem in caught.value.problems] == [could_not]
    assert str(three) in str(caught.value)


def test_every_unreadable_array_is_listed(tmp_path: Path) -> None:
    """One error, a problem for each reason, each with all the leaves it concerns."""
    item = _save_pytree(tmp_path / "c", {name: np.ones(2) for name in "abcdef"} | {"s": 1}, use_ocdbt=False)
    (item / "a" / ".zarray").unlink()
    (item / "b" / ".zarray").unlink()
    (item / "c" / ".zarray").write_text("{")
    _edit_json(item / "d" / ".zarray", lambda zarr: zarr.update(dtype="<M8"))
    _edit_json(item / "e" / ".zarray", lambda zarr: zarr.update(shape=[-1]))
    _edit_json(item / "f" / ".zarray", lambda zarr: zarr.update(dtype="string"))
    _edit_json(item / "s" / ".zarray", lambda zarr: zarr.update(shape=[1]))
    with pytest.raises(FormatError) as caught:
        read_stock_manifest(epath.Path(item))
    start = "cannot read the shape and dtype of arrays from their .zarray: "
    assert [
        (problem.could_not.removeprefix(start), problem.affects, problem.of) for problem in caught.value.problems
    ] == [
        ("missing", ("a", "b"), 7),
        ("not JSON", ("c",), 7),
        ("unknown dtype '<M8'", ("d",), 7),
        ("no shape but [-1]", ("e",), 7),
        ("unknown dtype 'string'", ("f",), 7),
        ("a scalar has shape (1,)", ("s",), 7),
    ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda file: file.unlink(), "missing", id="the store is missing"),
        pytest.param(lambda file: file.write_bytes(b"?" * 64), "not readable", id="the store is damaged"),
    ],
)
def test_a_damaged_store_concerns_all_its_arrays(three: Path, damage: Callable[[Path], Any], reason: str) -> None:
    """All arrays are in one OCDBT store; without it none can be read, which is one problem."""
    damage(three / "manifest.ocdbt")
    with pytest.raises(FormatError) as caught:
        read_stock_manifest(epath.Path(three))
    (problem,) = caught.value.problems
    assert reason in problem.could_not
    assert problem.affects == ("a", "b", "c")


def test_names_cannot_lead_out_of_the_checkpoint(three: Path) -> None:
    """A key such as `..` is refused by the store, not followed."""

    def point_elsewhere(metadata: Any) -> None:
        metadata["use_ocdbt"] = False
        for entry in metadata["tree_metadata"].values():
            entry["key_metadata"][0]["key"] = "../three/" + entry["key_metadata"][0]["key"]

    _edit_json(three / "_METADATA", point_elsewhere)
    with pytest.raises(FormatError, match="not readable"):
        read_stock_manifest(epath.Path(three))


def test_reading_needs_neither_jax_nor_orbax(three: Path) -> None:
    """A process in which neither can be imported reads the same manifest."""
    code = f"""
import sys, types
sys.modules["jax"] = sys.modules["jaxlib"] = sys.modules["orbax"] = None
# The package's own `__init__` is a table of contents that imports everything.
package = sys.modules["orbax_explicit"] = types.ModuleType("orbax_explicit")
package.__path__ = {list(orbax_explicit.__path__)!r}
from etils import epath
from orbax_explicit._stock import read_stock_manifest
print(read_stock_manifest(epath.Path({str(three)!r})).tree)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == repr(read_stock_manifest(epath.Path(three)).tree)
