"""Stock Orbax's `_sharding` file, parsed and rendered, against what stock itself writes and reads."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from orbax_explicit._errors import SaveRefusedError
from orbax_explicit._records import (
    AXIS_TYPES,
    UNCONSTRAINED,
    ArrayRecord,
    Inventory,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    SingleDeviceRecord,
    SpecRecord,
    storage_name,
)
from orbax_explicit._stock import read_stock_manifest
from orbax_explicit._stock_sharding import parse_sharding_file, render_sharding_file

P = PartitionSpec

CPU = Inventory(
    platform="cpu",
    device_kind="cpu",
    device_ids=tuple(range(8)),
    process_indices=(0,) * 8,
    memory_kinds=("device", "pinned_host"),
    default_memory_kind="device",
)
WHOLE = MeshRecord(
    axis_names=("data", "model"),
    axis_sizes=(2, 4),
    axis_types=("explicit", "manual"),
    device_ids=tuple(range(8)),
    platform="cpu",
)
DEVICE = SingleDeviceRecord(device_id=3, platform="cpu")


def _named(*partitions: Partition, mesh: MeshRecord = WHOLE) -> NamedShardingRecord:
    return NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions))


def _array(*shape: int, sharding: Any, **fields: Any) -> ArrayRecord:
    return ArrayRecord(shape=shape, dtype="float32", sharding=sharding, **fields)


def _entries(data: bytes) -> dict[str, Any]:
    return {base64.urlsafe_b64decode(key).decode(): json.loads(text) for key, text in json.loads(data).items()}


def _save(path: Path, tree: Any) -> Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def _by_name(item: Path) -> dict[str, ArrayRecord]:
    return {storage_name(path): array for path, array in read_stock_manifest(epath.Path(item)).arrays.items()}


def _varied_tree() -> dict[str, Any]:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    some = Mesh(np.array(jax.devices()[3::-1]).reshape(2, 2), ("x", "ÿ"), axis_types=(AxisType.Auto, AxisType.Explicit))
    single = Mesh(np.array(jax.devices()[5]), ())

    def on(mesh: Mesh, value: Any, *partitions: Any) -> Any:
        return jax.device_put(value, NamedSharding(mesh, P(*partitions)))

    return {
        "a?b": {"ü/~": on(mesh, jnp.ones((8, 2)), ("data", "model"), None)},
        "b": on(mesh, jnp.ones((8, 4)), "data", "model"),
        "c": on(mesh, jnp.ones((8, 4))),
        "d": on(some, jnp.ones((4, 4)), None, "x"),
        "e": on(single, jnp.ones(2)),
        "f": jax.device_put(jnp.ones(3), jax.devices()[3]),
        "g": jnp.int32(1),
        "h": [on(mesh, jax.random.split(jax.random.key(0), 8), "data"), jax.random.key(0)],
        "i": on(mesh, jax.random.key(0)),
    }


def test_rendered_bytes_are_those_that_stock_writes(tmp_path: Path) -> None:
    """Names, fields, their order, spellings and spacing: the file is stock's own, byte for byte."""
    item = _save(tmp_path / "c", _varied_tree())
    # A mesh read from a stock checkpoint has no platform, so that no device ids are left out.
    assert render_sharding_file(_by_name(item), CPU) == (item / "_sharding").read_bytes()


def test_stock_restores_from_a_rendered_file(tmp_path: Path) -> None:
    """Stock reads our file as its own: the same shardings, also where device ids are left out."""
    item = _save(tmp_path / "c", _varied_tree())
    arrays = _by_name(item)
    for name, array in arrays.items():
        if isinstance(array.sharding, NamedShardingRecord):
            mesh = replace(array.sharding.mesh, platform="cpu")
            arrays[name] = replace(array, sharding=replace(array.sharding, mesh=mesh))
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.warns(UserWarning, match="Sharding info not provided"):
        expected = jax.tree.map(lambda array: array.sharding, checkpointer.restore(item))
    rendered = render_sharding_file(arrays, CPU)
    without = {name for name, entry in _entries(rendered).items() if "device_mesh" not in entry}
    assert without == {"a?b.ü/~", "b", "c", "f", "g", "h.0", "h.1", "i"}
    (item / "_sharding").write_bytes(rendered)
    with ocp.PyTreeCheckpointer() as checkpointer, pytest.warns(UserWarning, match="Sharding info not provided"):
        assert jax.tree.map(lambda array: array.sharding, checkpointer.restore(item)) == expected


@pytest.mark.parametrize(
    ("array", "entry"),
    [
        pytest.param(
            _array(8, sharding=_named(("data", "model"))),
            {
                "sharding_type": "NamedSharding",
                "shape": [2, 4],
                "axis_names": ["data", "model"],
                "axis_types": ["AxisType.Explicit", "AxisType.Manual"],
                "partition_spec": [["data", "model"]],
            },
            id="a mesh of all devices in order has no ids",
        ),
        pytest.param(
            _array(8, sharding=_named(mesh=replace(WHOLE, axis_types=None, device_ids=(1, 0, *range(2, 8))))),
            {
                "sharding_type": "NamedSharding",
                "shape": [2, 4],
                "axis_names": ["data", "model"],
                "partition_spec": [],
                "device_mesh": {
                    "mesh": [[{"id": i} for i in (1, 0, 2, 3)], [{"id": i} for i in range(4, 8)]],
                },
            },
            id="a mesh of all devices in another order has ids, and unknown axis types are absent",
        ),
        pytest.param(
            _array(8, sharding=SingleDeviceRecord(device_id=3, platform="cpu"), committed=False),
            {"sharding_type": "SingleDeviceSharding", "device_str": "cpu:3"},
            id="an uncommitted array is on its device",
        ),
        pytest.param(
            _array(8, sharding=SingleDeviceRecord(device_id=0)),
            {"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"},
            id="a device of unknown platform is of the platform of the run",
        ),
        pytest.param(
            _array(8, sharding=SingleDeviceRecord(device_id=1, platform="gpu")),
            {"sharding_type": "SingleDeviceSharding", "device_str": "cuda:1"},
            id="a GPU is a CUDA device",
        ),
        pytest.param(
            _array(8, sharding=SingleDeviceRecord(device_id=1, platform="tpu")),
            {
                "sharding_type": "NamedSharding",
                "shape": [1],
                "axis_names": ["device"],
                "axis_types": ["AxisType.Auto"],
                "partition_spec": [],
                "device_mesh": {"mesh": [{"id": 1}]},
            },
            id="a TPU, whose name needs coordinates, is a mesh of one device",
        ),
    ],
)
def test_entries(array: ArrayRecord, entry: dict[str, Any]) -> None:
    """Where the file differs from stock's, and how devices are named."""
    assert _entries(render_sharding_file({"a": array}, CPU)) == {"a": entry}


def test_stock_reads_a_mesh_of_one_device() -> None:
    """On a platform whose device names cannot be made, stock still finds the device."""
    from orbax.checkpoint._src.metadata import sharding as stock

    arrays = {"a": _array(8, sharding=SingleDeviceRecord(device_id=5, platform="tpu"))}
    (text,) = json.loads(render_sharding_file(arrays, replace(CPU, platform="tpu"))).values()
    assert stock.from_serialized_string(text).to_jax_sharding().device_set == {jax.devices()[5]}


def test_an_amd_gpu_is_a_rocm_device() -> None:
    """Both platforms are `gpu` to JAX, but the names of their devices differ."""
    inventory = replace(CPU, platform="gpu", device_kind="AMD Instinct MI300X")
    arrays = {"a": _array(8, sharding=SingleDeviceRecord(device_id=1, platform="gpu"))}
    assert _entries(render_sharding_file(arrays, inventory))["a"]["device_str"] == "rocm:1"


@pytest.mark.parametrize(
    ("sharding", "fields", "partitions"),
    [
        pytest.param(_named("data", UNCONSTRAINED), {}, ["data", None], id="unconstrained is written as unpartitioned"),
        pytest.param(
            NamedShardingRecord(mesh=WHOLE, spec=SpecRecord(partitions=(None, "data"), reduced=("model",))),
            {},
            [None, "data"],
            id="reduced axes are left out",
        ),
        pytest.param(
            NamedShardingRecord(
                mesh=WHOLE, spec=SpecRecord(partitions=("data",), unreduced=("model",), unreduced_kind="sum")
            ),
            {},
            ["data"],
            id="unreduced axes are left out",
        ),
        pytest.param(
            _named("data"),
            {"prng": PrngRecord(impl="threefry2x32", key_shape=(2,))},
            ["data", None, None],
            id="the spec of PRNG keys is that of their key data",
        ),
        pytest.param(_named(()), {}, [[]], id="an empty tuple stays one"),
    ],
)
def test_partitions(sharding: NamedShardingRecord, fields: dict[str, Any], partitions: list[Any]) -> None:
    """What stock's form cannot say is left out; the rest is verbatim."""
    data = render_sharding_file({"a": _array(8, 4, sharding=sharding, **fields)}, CPU)
    assert _entries(data)["a"]["partition_spec"] == partitions


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(None, id="no sharding"),
        pytest.param(_named(mesh=replace(WHOLE, device_ids=None)), id="a mesh without devices"),
    ],
)
def test_arrays_without_devices_are_refused_by_name(sharding: Any) -> None:
    """One missing entry would fail a whole stock restore, so that none is left out silently."""
    arrays = {name: _array(8, sharding=sharding if name in "bd" else DEVICE) for name in "abcd"}
    with pytest.raises(SaveRefusedError) as caught:
        render_sharding_file(arrays, CPU)
    (problem,) = caught.value.problems
    assert (problem.affects, problem.of) == (("b", "d"), 4)


@pytest.mark.parametrize(
    ("name", "platform", "device_id"),
    [
        ("TFRT_CPU_0", "cpu", 0),
        ("cpu:131072", "cpu", 131072),
        ("cuda:0", "gpu", 0),
        ("rocm:1", "gpu", 1),
        ("gpu:2", "gpu", 2),
        ("TPU_0(process=0,(0,0,0,0))", "tpu", 0),
        ("TPU_12", "tpu", 12),
    ],
)
def test_device_names(name: str, platform: str, device_id: int) -> None:
    """The names of devices, of this and earlier releases of JAX, as platform and id."""
    text = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": name})
    shardings, reasons = parse_sharding_file(json.dumps({"YQ==": text}).encode(), {"a": _array(8, sharding=None)})
    assert (shardings, reasons) == ({"a": SingleDeviceRecord(device_id=device_id, platform=platform)}, {})


def test_names_of_present_devices_are_understood() -> None:
    """What this release of JAX calls its devices is what the table above expects."""
    device = jax.devices()[2]
    text = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    shardings, _ = parse_sharding_file(json.dumps({"YQ==": text}).encode(), {"a": _array(8, sharding=None)})
    assert shardings == {"a": SingleDeviceRecord(device_id=device.id, platform=device.platform)}


def test_axis_types_are_spelled_as_jax_spells_them() -> None:
    """Every member of JAX's `AxisType` has a name in the file."""
    names = tuple("abcdefgh"[: len(AxisType)])
    mesh = MeshRecord(axis_names=names, axis_sizes=(1,) * len(names), axis_types=AXIS_TYPES, device_ids=(0,))
    entry = _entries(render_sharding_file({"a": _array(8, sharding=_named(mesh=mesh))}, CPU))["a"]
    assert sorted(entry["axis_types"]) == sorted(map(str, AxisType))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda e: e.pop("shape"), "mesh shape None is not a list of positive numbers"),
        (lambda e: e.update(shape=[2, True]), "mesh shape [2, True] is not a list of positive numbers"),
        (lambda e: e.update(shape=[0, 4]), "mesh shape [0, 4] is not a list of positive numbers"),
        (lambda e: e.update(axis_names="xy"), "mesh axis names 'xy' are not a list of texts"),
        (lambda e: e.update(axis_names=["x", 1]), "mesh axis names ['x', 1] are not a list of texts"),
        (lambda e: e.update(axis_names=["x", "\ud800"]), r"mesh axis names ['x', '\ud800'] are not a list of texts"),
        (lambda e: e.update(axis_names=["x", "x"]), "mesh axis names repeat: ('x', 'x')"),
        (lambda e: e.update(axis_names=["data"]), "1 mesh axis names but 2 sizes; 1 mesh axis names but 2 axis types"),
        (lambda e: e.update(axis_types="Auto"), "mesh axis types 'Auto' are not a list"),
        (lambda e: e.update(axis_types=[None, None]), "unknown mesh axis type None"),
        (lambda e: e.update(shape=[1 << 40, 4]), "a mesh of shape [1099511627776, 4] has more than 4194304 devices"),
        (lambda e: e.update(device_mesh={"mesh": [{"id": 1}]}), "a mesh of shape (2, 4) lists 1 devices"),
        (lambda e: e.update(device_mesh={"mesh": [{"id": 1}] * 8}), "a device appears twice in a mesh"),
        (lambda e: e.update(device_mesh={"mesh": [["x"]]}), "the devices of a mesh hold 'x'"),
        (lambda e: e.update(device_mesh=7), "the devices of a mesh hold 7"),
        (lambda e: e.update(partition_spec="data"), "partition spec 'data' is not a list"),
        (lambda e: e.update(partition_spec=[3]), "unknown partition 3"),
        (lambda e: e.update(partition_spec=[["data", 3]]), "unknown partition ['data', 3]"),
        (lambda e: e.update(partition_spec=["data", "data"]), "a spec uses mesh axes more than once: ['data']"),
        (lambda e: e.update(partition_spec=["x" * 200]), None),
    ],
)
def test_a_damaged_entry_says_why(edit: Callable[[dict[str, Any]], Any], reason: str | None) -> None:
    """Nothing raises: each array has a sharding or a reason, and the others are not concerned."""
    arrays = {name: _array(8, 8, sharding=_named("data")) for name in "ab"}
    file = json.loads(render_sharding_file(arrays, CPU))
    entry = json.loads(file["YQ=="])
    edit(entry)
    file["YQ=="] = json.dumps(entry)
    shardings, reasons = parse_sharding_file(json.dumps(file).encode(), arrays)
    assert list(shardings) == ["b"]
    assert list(reasons) == ["a"]
    assert reason is None or reasons["a"] == reason


def test_equal_layouts_share_one_mesh() -> None:
    """Arrays on one mesh have one mesh object, so that 1000 arrays on 512 devices take 512 ids."""
    arrays = {str(i): _array(8, 8, sharding=_named("data" if i % 2 else "model")) for i in range(1000)}
    shardings, _ = parse_sharding_file(render_sharding_file(arrays, CPU), arrays)
    assert len({id(sharding) for sharding in shardings.values()}) == 2
    assert (
        len({id(sharding.mesh) for sharding in shardings.values() if not isinstance(sharding, SingleDeviceRecord)}) == 1
    )


@st.composite
def _arrays(draw: st.DrawFn) -> ArrayRecord:
    """Arrays that stock's form can say whole: no memory kinds, nothing unconstrained or reduced."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    prng = draw(st.sampled_from([None, PrngRecord(impl="rbg", key_shape=(4,))]))
    if draw(st.booleans()):
        device = SingleDeviceRecord(
            device_id=draw(st.integers(0, 10**6)), platform=draw(st.sampled_from(["cpu", "gpu"]))
        )
        return ArrayRecord(shape=shape, dtype="uint32", sharding=device, prng=prng)
    names = draw(st.lists(st.text(max_size=3), unique=True, max_size=3))
    sizes = tuple(draw(st.integers(1, 3)) for _ in names)
    count = int(np.prod(sizes))
    ids = draw(st.one_of(st.just(tuple(range(count))), st.permutations(range(7, 7 + count)).map(tuple)))
    types = draw(st.one_of(st.none(), st.tuples(*[st.sampled_from(AXIS_TYPES) for _ in names]))) if names else ()
    mesh = MeshRecord(axis_names=tuple(names), axis_sizes=sizes, axis_types=types, device_ids=ids)
    free = list(names)
    partitions: list[Partition] = []
    for _ in range(draw(st.integers(0, len(shape)))):
        axes = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
        partitions.append(draw(st.sampled_from([axes, axes[0] if len(axes) == 1 else axes, axes if axes else None])))
    if prng:  # the spec of key data is padded to the dimensions of the array of keys
        partitions += [None] * (len(shape) - len(partitions))
    sharding = NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=tuple(partitions)))
    return ArrayRecord(shape=shape, dtype="uint32", sharding=sharding, prng=prng)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), _arrays(), max_size=5))
def test_parse_undoes_render(arrays: dict[str, ArrayRecord]) -> None:
    """What stock's form can say comes back as it was."""
    shardings, reasons = parse_sharding_file(render_sharding_file(arrays, CPU), arrays)
    assert reasons == {}
    assert shardings == {name: array.sharding for name, array in arrays.items()}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
)
_FIELDS = ("sharding_type", "shape", "axis_names", "axis_types", "partition_spec", "device_mesh", "device_str")


@given(
    st.sampled_from(["NamedSharding", "SingleDeviceSharding"]),
    st.dictionaries(st.sampled_from(_FIELDS), _JSON),
    st.sampled_from([(8,), ()]),
)
def test_no_entry_raises(kind: str, entry: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Whatever an entry says, its array has a sharding or a reason."""
    data = json.dumps({"YQ==": json.dumps({"sharding_type": kind, **entry})}).encode()
    shardings, reasons = parse_sharding_file(data, {"a": _array(*shape, sharding=None)})
    assert len(shardings) + len(reasons) == 1
