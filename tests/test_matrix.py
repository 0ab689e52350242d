"""Saved on so many devices, restored on so many others: every pair of eight layouts, in five ways, through both APIs.

Every array of a restore has the values that were saved, and lies where `plan_restore` says for the same arguments in the
same process. What the plan says is in turn held against a table that was made by hand.

Each layout saves once and restores once, in processes of its own; the one with eight devices in one process is this very
process. A report is the traceback of what went wrong, empty where nothing did.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import pathlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fronts import FRONTS, Front
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import Moments, assert_same_values, matrix, place

import orbax_explicit as oxe
from orbax_explicit._capture import record_path
from orbax_explicit._outcomes import OnDevice, OnHost, OnMesh, Outcome, Uncommitted
from orbax_explicit.testing import run_on_devices

# The fixture starts processes once; with several workers, one of them is to have all tests of this file.
pytestmark = pytest.mark.xdist_group("matrix")

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Devices, and meshes with axes d and m over all of them.

    Attributes:
        processes: Number of processes.
        devices: Devices of each.
        sizes: Sizes of the mesh on which arrays are saved here, and which an abstract target names here.
        given: Sizes of the mesh that is passed to a restore here.
    """

    processes: int = 1
    devices: int
    sizes: tuple[int, int]
    given: tuple[int, int]


HERE = "8 devices"
LAYOUTS = {
    "1 device": Layout(devices=1, sizes=(1, 1), given=(1, 1)),
    "2 devices": Layout(devices=2, sizes=(1, 2), given=(2, 1)),
    "4 devices": Layout(devices=4, sizes=(2, 2), given=(1, 4)),
    "6 devices": Layout(devices=6, sizes=(3, 2), given=(2, 3)),
    HERE: Layout(devices=8, sizes=(2, 4), given=(1, 8)),
    "16 devices": Layout(devices=16, sizes=(4, 4), given=(2, 8)),
    "2 processes x 4 devices": Layout(processes=2, devices=4, sizes=(2, 4), given=(1, 8)),
    "4 processes x 2 devices": Layout(processes=4, devices=2, sizes=(2, 4), given=(4, 2)),
}

REBUILT = {
    (1, 1): {1: (1, 1), 2: (2, 1), 4: (4, 1), 6: (6, 1), 8: (8, 1), 16: (16, 1)},
    (1, 2): {1: (1, 1), 2: (1, 2), 4: (2, 2), 6: (3, 2), 8: (4, 2), 16: (8, 2)},
    (2, 2): {1: (1, 1), 2: (1, 2), 4: (2, 2), 6: (3, 2), 8: (4, 2), 16: (8, 2)},
    (3, 2): {1: (1, 1), 2: (1, 2), 4: (2, 2), 6: (3, 2), 8: (4, 2), 16: (8, 2)},
    (2, 4): {1: (1, 1), 2: (1, 2), 4: (1, 4), 6: (1, 4), 8: (2, 4), 16: (4, 4)},
    (4, 4): {1: (1, 1), 2: (1, 2), 4: (1, 4), 6: (1, 4), 8: (2, 4), 16: (4, 4)},
}
"""The sizes of a recorded mesh on so many devices, by hand: d, the outer axis, takes what fits beside m."""


# What is saved. 48 is divided by every mesh here, and 6 is not divided by m=4 and m=8.


def small_spec(sizes: tuple[int, int]) -> P:
    """How the array of 6 x 4 is split when it is saved: along 6 where m divides that, else along 4."""
    return P("m") if 6 % sizes[1] == 0 else P(None, "m")


def make_state(put: Callable[..., Any], free: Callable[[Any], Any], small: P) -> dict[str, Any]:
    """Leaves and containers of every kind.

    Args:
        put: Makes the leaf for an array with these values, on a mesh with axes d and m by this spec.
        free: Makes the leaf for an array that is uncommitted.
        small: The spec of the array that not every mesh divides.
    """
    return {
        "sharded": put(matrix(48, 8), P("d", "m")),
        "two_axes": put(matrix(48, 8, jnp.bfloat16), P(("d", "m"), None)),
        "inner": put(matrix(3, 8), P(None, "m")),
        "short": put(matrix(48, 2, np.int32), P("d")),
        "reduced": put(matrix(48, 3), P("d", reduced={"m"})),
        "replicated": put(matrix(5, 7), P()),
        "small": put(matrix(6, 4), small),
        "pinned": put(matrix(48, 3), P("d"), memory_kind="pinned_host"),
        "empty": put(np.zeros((0, 8), np.float16), P("d", "m")),
        "on_mesh": put(np.float32(2.5), P()),
        "keys": put(jax.random.split(jax.random.key(7), 48), P("d")),
        "step": free(jnp.int32(5)),
        "key": free(jax.random.key(3)),
        "rbg_keys": free(jax.random.split(jax.random.key(1, impl="rbg"), 2)),
        "moments": Moments(mean=put(-matrix(8, 48), P("m", "d")), variance=(free(jnp.float32(1)), [])),
        "by_int": {0: put(matrix(48, 1, np.int8), P("d")), 10: {}, 2: free(jnp.zeros((0, 2)))},
        "host": {
            "array": np.arange(5, dtype=np.int32),
            "bfloat16": np.arange(4).astype(jnp.bfloat16),
            "empty": np.zeros((2, 0), np.float32),
            "wide": np.arange(5),
            "generic": np.float32(1.5),
            "int": 3,
            "float": 2.5,
            "bool": True,
            "str": "text",
            "bytes": b"octets",
            "none": None,
        },
    }


def is_keys(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_mesh(mesh: Mesh, values: Any, spec: P, memory_kind: str | None = None) -> jax.Array:
    if is_keys(values):
        return jax.jit(lambda: values, out_shardings=NamedSharding(mesh, spec))()
    return place(mesh, values, spec, memory_kind)


def saved_state(layout: Layout) -> dict[str, Any]:
    """The state on the devices of a layout."""
    mesh = jax.make_mesh(layout.sizes, ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    state = make_state(functools.partial(on_mesh, mesh), lambda array: array, small_spec(layout.sizes))
    if layout.processes == 1:
        # Where there are several processes, a save refuses it.
        state["one_device"] = jax.device_put(matrix(4, 4), jax.devices()[-1])
    return state


def expected_values(saved_on: Layout) -> dict[str, Any]:
    """The values of the state, on no mesh."""
    state = make_state(lambda values, spec, memory_kind=None: values, lambda array: array, P())
    return state | ({"one_device": matrix(4, 4)} if saved_on.processes == 1 else {})


def abstract_target(layout: Layout, saved_on: Layout) -> dict[str, Any]:
    """A target on an abstract mesh as large as a layout, whose specs are not all those that were saved.

    A few leaves have no sharding: what was recorded on a mesh lands on the target's, by its recorded spec.
    """
    mesh = AbstractMesh(layout.sizes, ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))

    def struct(values: Any, spec: P | None = None, memory_kind: str | None = None) -> jax.ShapeDtypeStruct:
        sharding = None if spec is None else NamedSharding(mesh, spec, memory_kind=memory_kind)
        return jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)

    target = make_state(struct, struct, small_spec(layout.sizes))
    target |= {
        "sharded": struct(matrix(48, 8), P("m", None), memory_kind="pinned_host"),
        "replicated": struct(matrix(5, 7)),
        "small": struct(matrix(6, 4)),
        "on_mesh": struct(np.float32(0)),
        "keys": struct(jax.random.split(jax.random.key(0), 48), P(("m", "d"))),
    }
    if saved_on.processes == 1:
        target["one_device"] = struct(matrix(4, 4))
    return target


def given_mesh(layout: Layout) -> Mesh:
    """A mesh whose devices stand in an order that nobody would choose for the caller, and whose types differ."""
    devices = np.array(jax.devices()[::-1]).reshape(layout.given)
    return Mesh(devices, ("d", "m"), axis_types=(AUTO, EXPLICIT))


RULES = [("^(step|key)$", P()), ("^(rbg_keys|one_device|by_int/2|host/(array|bfloat16|empty|int))$", P("d"))]

WAYS: Mapping[str, Callable[[Layout, Layout], dict[str, Any]]] = {
    "without a target": lambda layout, saved_on: {},
    "into an abstract target": lambda layout, saved_on: {"target": abstract_target(layout, saved_on)},
    "on a given mesh": lambda layout, saved_on: {"mesh": given_mesh(layout)},
    "by rules, what was on no mesh": lambda layout, saved_on: {"policy": oxe.RestorePolicy(rules=RULES)},
    "as NumPy": lambda layout, saved_on: {"policy": oxe.RestorePolicy(arrays="numpy")},
}
"""The arguments of a restore, by the layouts that restore and that saved."""


# Through which API.


APIS = {"v0": FRONTS["StandardCheckpointer"], "v1": FRONTS["v1"]}


# What is held against what.


def assert_values(restored: Any, expected: Any, name: str) -> None:
    """Shape, dtype and the values of every shard of this process; of keys that come back as NumPy those of their data."""
    if is_keys(expected):
        if isinstance(restored, jax.Array):
            assert jax.random.key_impl(restored) == jax.random.key_impl(expected), name
            restored = jax.random.key_data(restored)
        expected = jax.random.key_data(expected)
    expected = np.asarray(expected)
    if not isinstance(restored, jax.Array):
        assert_same_values(restored, expected, name)
        return
    assert (restored.shape, restored.dtype) == (expected.shape, expected.dtype), name
    assert restored.addressable_shards, name
    for shard in restored.addressable_shards:
        assert_same_values(np.asarray(shard.data), expected[shard.index], name)


def planned_devices(placement: OnMesh) -> list[int]:
    """The devices of a planned mesh in their order; where the plan leaves that to `jax.make_mesh`, in that one's."""
    planned = placement.mesh
    if planned.mesh.device_ids is not None:
        return list(planned.mesh.device_ids)
    assert planned.source == "new"
    devices = [device for device in jax.devices() if device.id in planned.device_ids]
    return [device.id for device in jax.make_mesh(planned.mesh.axis_sizes, ("d", "m"), devices=devices).devices.flat]


def assert_placed(restored: Any, outcome: Outcome, name: str) -> None:
    """A leaf lies where its outcome says."""
    placement = outcome.placement
    if isinstance(placement, OnHost):
        assert not isinstance(restored, jax.Array), name
        kind = "np.generic" if isinstance(restored, np.generic) else type(restored).__name__.replace("nd", "np.nd")
        assert kind == placement.type, name
        return
    assert isinstance(restored, jax.Array), name
    assert restored.shape == outcome.shape, name
    assert restored.sharding.memory_kind == placement.memory_kind, name
    match placement:
        case OnMesh(mesh=planned, spec=spec):
            assert restored.committed, name
            assert isinstance(restored.sharding, NamedSharding), name
            mesh = restored.sharding.mesh
            assert mesh.axis_names == planned.mesh.axis_names, name
            assert mesh.axis_sizes == planned.mesh.axis_sizes, name
            assert tuple(kind.name.lower() for kind in mesh.axis_types) == planned.mesh.axis_types, name
            assert [device.id for device in mesh.devices.flat] == planned_devices(placement), name
            assert restored.sharding.spec == P(*spec.partitions, reduced=set(spec.reduced)), name
        case OnDevice(device_id=device_id):
            assert restored.committed, name
            here = jax.local_devices()[0].id if device_id is None else device_id
            assert {device.id for device in restored.devices()} == {here}, name
        case Uncommitted():
            assert not restored.committed, name
            assert restored.devices() == {jax.local_devices()[0]}, name
        case _:
            raise AssertionError(f"{name}: no leaf of these restores is {placement}")


def check_restore(api: Front, path: pathlib.Path, arguments: dict[str, Any], expected: Any) -> str:
    """Restores, and holds every leaf against its saved value and against the plan; returns the plan as JSON."""
    plan = oxe.plan_restore(path, **arguments)
    assert not plan.refused
    restored = api.restore(path, **arguments)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    meshes: dict[Any, set[int]] = {}
    flat, _ = jax.tree_util.tree_flatten_with_path(restored)
    for (keypath, leaf), value, outcome in zip(flat, jax.tree.leaves(expected), plan.outcomes, strict=True):
        name = jax.tree_util.keystr(keypath)
        assert record_path(keypath) == outcome.path
        assert_placed(leaf, outcome, name)
        assert_values(leaf, value, name)
        if isinstance(outcome.placement, OnMesh):
            meshes.setdefault(outcome.placement.mesh, set()).add(id(leaf.sharding.mesh))
    assert tuple(meshes) == plan.meshes
    assert all(len(objects) == 1 for objects in meshes.values())
    if "mesh" in arguments:
        assert set.union(*meshes.values()) == {id(arguments["mesh"])}
    return plan.to_json()


# A mesh on the first four of eight devices.

PART = "on a part"
PART_LANDS = {
    "1 device": ((1, 1), [0]),
    "2 devices": ((1, 2), [0, 1]),
    "4 devices": ((2, 2), [0, 1, 2, 3]),
    "6 devices": ((2, 2), [0, 1, 2, 3]),
    HERE: ((2, 2), [0, 1, 2, 3]),
    "16 devices": ((2, 2), [0, 1, 2, 3]),
    "2 processes x 4 devices": ((2, 2), [0, 1, 2048, 2049]),
    "4 processes x 2 devices": ((2, 2), [0, 2048, 4096, 6144]),
}
"""To which sizes and devices it comes back, by hand: it does not grow, and every process contributes as many."""


def save_on_a_part(root: pathlib.Path) -> None:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    for name, api in APIS.items():
        api.save(root / name / PART, {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5)})


# What runs in each layout.


Case: TypeAlias = tuple[str, str, str]
"""The API, the layout that saved, and the way of the restore."""


@dataclass(frozen=True)
class Report:
    """How one restore went in one process.

    Attributes:
        problem: The traceback of what went wrong; empty where nothing did.
        plan: The plan as JSON.
    """

    problem: str
    plan: str


def save(root: pathlib.Path, name: str) -> None:
    state = saved_state(LAYOUTS[name])
    for api_name, api in APIS.items():
        api.save(root / api_name / name, state)


def restore_all(root: pathlib.Path, name: str) -> dict[Case, Report]:
    """Restores what every layout saved, in every way."""
    reports = {}
    for api_name, api in APIS.items():
        for saved_on, saved_layout in LAYOUTS.items():
            expected = expected_values(saved_layout)
            for way, arguments_of in WAYS.items():
                arguments = arguments_of(LAYOUTS[name], saved_layout)
                report = report_restore(api, root / api_name / saved_on, arguments, expected)
                reports[api_name, saved_on, way] = report
        part = {"w": matrix(), "step": np.int32(5)}
        reports[api_name, PART, "without a target"] = report_restore(api, root / api_name / PART, {}, part)
    return reports


def report_restore(api: Front, path: pathlib.Path, arguments: dict[str, Any], expected: Any) -> Report:
    try:
        return Report("", check_restore(api, path, arguments, expected))
    except Exception:  # noqa: BLE001 - the test that asks for this case shows it
        return Report(traceback.format_exc(), "")


def in_every_layout(function: Callable[[pathlib.Path, str], Any], root: pathlib.Path) -> dict[str, list[Any]]:
    """What a function returns in each process of each layout."""

    def run(name: str) -> list[Any]:
        layout = LAYOUTS[name]
        return run_on_devices(function, root, name, processes=layout.processes, devices=layout.devices)

    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as executor:
        running = {name: executor.submit(run, name) for name in LAYOUTS if name != HERE}
        returned = {HERE: [function(root, HERE)]}
        return returned | {name: future.result() for name, future in running.items()}


@pytest.fixture(scope="session")
def reports(tmp_path_factory) -> Mapping[str, list[dict[Case, Report]]]:
    """Every layout saves, then every one restores what all of them saved. One dict for each of its processes."""
    assert (jax.process_count(), jax.device_count()) == (1, LAYOUTS[HERE].devices)
    root = tmp_path_factory.mktemp("matrix")
    in_every_layout(save, root)
    save_on_a_part(root)
    return in_every_layout(restore_all, root)


saved_on_every_layout = pytest.mark.parametrize("saved_on", LAYOUTS, ids=[f"saved on {name}" for name in LAYOUTS])
restored_on_every_layout = pytest.mark.parametrize(
    "restored_on", LAYOUTS, ids=[f"restored on {name}" for name in LAYOUTS]
)
in_every_way = pytest.mark.parametrize("way", WAYS)
through_both_apis = pytest.mark.parametrize("api", APIS)


@restored_on_every_layout
@saved_on_every_layout
@in_every_way
@through_both_apis
def test_what_was_saved_comes_back_as_planned(reports, api, way, saved_on, restored_on):
    """Values, containers and types as saved; meshes, specs, memory kinds, devices and commitment as `plan_restore` says."""
    assert len(reports[restored_on]) == LAYOUTS[restored_on].processes
    for process, reported in enumerate(reports[restored_on]):
        problem = reported[api, saved_on, way].problem
        assert not problem, f"process {process} of {len(reports[restored_on])}:\n{problem}"


@restored_on_every_layout
def test_every_process_plans_the_same(reports, restored_on):
    """To the last outcome, device and byte, whatever was saved and asked for."""
    first, *others = ({case: report.plan for case, report in each.items()} for each in reports[restored_on])
    assert len(first) == len(APIS) * (len(LAYOUTS) * len(WAYS) + 1)
    assert all(first.values())
    for other in others:
        assert other == first


def plan_of(reports: Any, saved_on: str, restored_on: str, way: str) -> Any:
    return json.loads(reports[restored_on][0]["v0", saved_on, way].plan)


def placements(plan: Any) -> dict[str, Any]:
    """How each leaf is placed, by its path."""
    return {outcome["path"]: outcome["placement"] for outcome in plan["outcomes"]}


@restored_on_every_layout
@saved_on_every_layout
def test_a_recorded_mesh_gets_the_sizes_that_the_rule_gives_it(reports, saved_on, restored_on):
    """By a table that was made by hand; both axes explicit, on the first devices, and the others are named as idle."""
    plan = plan_of(reports, saved_on, restored_on, "without a target")
    layout = LAYOUTS[restored_on]
    count = layout.processes * layout.devices
    sizes = REBUILT[LAYOUTS[saved_on].sizes][count]
    (mesh,) = plan["meshes"]
    assert mesh["mesh"]["axis_names"] == ["d", "m"]
    assert mesh["mesh"]["axis_types"] == ["explicit", "explicit"]
    assert tuple(mesh["mesh"]["axis_sizes"]) == sizes
    assert plan["idle_device_ids"] == ([4, 5] if sizes == (1, 4) and count == 6 else [])
    assert len(set(mesh["device_ids"])) == sizes[0] * sizes[1]
    assert mesh["source"] == ("recorded devices" if LAYOUTS[saved_on] == layout else "new")


@pytest.mark.parametrize(
    ("restored_on", "way", "saved_on", "partitions"),
    [
        pytest.param("6 devices", "without a target", HERE, [None, "m"], id="kept by a mesh that divides it"),
        pytest.param("6 devices", "on a given mesh", "2 devices", ["m"], id="kept by m=3, which divides 6"),
        pytest.param("6 devices", "on a given mesh", HERE, [None, None], id="whole where m=3 does not divide 4"),
        pytest.param("4 devices", "on a given mesh", "2 devices", [None], id="whole where m=4 does not divide 6"),
        pytest.param("16 devices", "into an abstract target", "6 devices", [None], id="whole on the target's mesh"),
        pytest.param("8 devices", "into an abstract target", "16 devices", [None, "m"], id="kept by the target's mesh"),
    ],
)
def test_an_array_of_six_by_four_is(reports, saved_on, restored_on, way, partitions):
    """Along each dimension: split as recorded where the mesh divides it, else whole; and the plan says so."""
    plan = plan_of(reports, saved_on, restored_on, way)
    (outcome,) = (outcome for outcome in plan["outcomes"] if outcome["path"] == "small")
    assert outcome["placement"]["spec"]["partitions"] == partitions
    changed = [change["kind"] for change in outcome["changes"]]
    was_split = small_spec(LAYOUTS[saved_on].sizes)
    assert ("replicated" in changed) == (P(*partitions) != was_split)


@restored_on_every_layout
@through_both_apis
def test_a_mesh_on_some_devices_comes_back_on_as_many(reports, api, restored_on):
    """Devices of every process among them, or one that has none would fail, and the others wait for it for ever."""
    for process, reported in enumerate(reports[restored_on]):
        problem = reported[api, PART, "without a target"].problem
        assert not problem, f"process {process} of {len(reports[restored_on])}:\n{problem}"
    sizes, device_ids = PART_LANDS[restored_on]
    (mesh,) = plan_of(reports, PART, restored_on, "without a target")["meshes"]
    assert tuple(mesh["mesh"]["axis_sizes"]) == sizes
    assert sorted(mesh["device_ids"]) == device_ids


@restored_on_every_layout
def test_what_is_on_no_mesh_is_planned_so(reports, restored_on):
    """Uncommitted arrays, those of one device and values on the host, in each way that does not say otherwise."""
    for way in ("without a target", "into an abstract target", "on a given mesh"):
        placed = placements(plan_of(reports, "4 devices", restored_on, way))
        for name in ("step", "key", "rbg_keys", "moments/variance/0", "by_int/2"):
            assert placed[name]["kind"] == "Uncommitted", name
        several = LAYOUTS[restored_on].processes > 1
        assert placed["one_device"]["kind"] == ("Uncommitted" if several else "OnDevice")
        assert placed["host/array"] == {"kind": "OnHost", "type": "np.ndarray"}
        assert placed["pinned"]["memory_kind"] == "pinned_host"
    by_rules = placements(plan_of(reports, "4 devices", restored_on, "by rules, what was on no mesh"))
    for name in ("step", "key", "rbg_keys", "by_int/2", "one_device", "host/array"):
        assert by_rules[name]["kind"] == "OnMesh", name
    assert by_rules["host/int"] == {"kind": "OnHost", "type": "int"}
    as_numpy = placements(plan_of(reports, "4 devices", restored_on, "as NumPy"))
    assert {placement["kind"] for placement in as_numpy.values()} == {"OnHost"}
    one = placements(plan_of(reports, "16 devices", restored_on, "without a target"))["one_device"]
    if LAYOUTS[restored_on].processes == 1:
        assert one["device_id"] == (15 if restored_on == "16 devices" else None)
