"""`_binding` and `plan_restore`: what is here is read once, in the caller's thread; meshes and shardings are JAX's."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from trees import matrix, path, place

import orbax_explicit as oxe
from orbax_explicit._binding import Present, UncommittedSharding, bind_plan, read_present
from orbax_explicit._capture import record_inventory
from orbax_explicit._leaf_capture import LeafRecorder
from orbax_explicit._outcomes import AsFallback
from orbax_explicit._plan import RestorePlan
from orbax_explicit._planning import plan_from_records
from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    Key,
    LeafRecord,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
)
from orbax_explicit._target_capture import record_target

EXPLICIT, AUTO, MANUAL = AxisType.Explicit, AxisType.Auto, AxisType.Manual


def ids(mesh: Mesh) -> list[int]:
    """The device ids of a mesh, in row-major order."""
    return [device.id for device in mesh.devices.flat]


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread, which has none of this thread's context."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


# Abstract meshes made concrete.


@pytest.mark.parametrize(
    ("sizes", "names", "types"),
    [
        pytest.param((2, 4), ("d", "m"), (EXPLICIT, EXPLICIT), id="both axes explicit"),
        pytest.param((4, 2), ("x", "y"), (EXPLICIT, AUTO), id="an explicit and an auto axis"),
        pytest.param((8,), ("d",), (MANUAL,), id="a manual axis"),
        pytest.param((2, 2), ("d", "m"), (AUTO, AUTO), id="smaller than the machine"),
        pytest.param((1, 1, 1), ("a", "b", "c"), (AUTO, EXPLICIT, AUTO), id="on one device"),
    ],
)
def test_an_abstract_mesh_gets_the_first_devices(sizes, names, types):
    """With its names, sizes and types."""
    mesh = oxe.resolve_mesh(AbstractMesh(sizes, names, axis_types=types))
    assert mesh == jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[: np.prod(sizes)])
    assert (mesh.devices.shape, mesh.axis_names, mesh.axis_types) == (sizes, names, types)
    assert ids(mesh) == list(range(np.prod(sizes)))


def test_an_abstract_mesh_gets_the_devices_that_are_passed_in_their_order():
    """They are the machine, whatever the context says."""
    abstract = AbstractMesh((2, 2), ("d", "m"), axis_types=(EXPLICIT, AUTO))
    with jax.set_mesh(jax.make_mesh((8,), ("z",), axis_types=(AUTO,))):
        mesh = oxe.resolve_mesh(abstract, devices=jax.devices()[::-1])
    assert ids(mesh) == [7, 6, 5, 4]
    assert mesh.axis_types == (EXPLICIT, AUTO)


def test_an_abstract_mesh_that_equals_the_context_is_the_context_mesh():
    """The object itself, with its devices in their order."""
    devices = np.array(jax.devices()[::-1]).reshape(2, 4)
    mesh = Mesh(devices, ("d", "m"), axis_types=(EXPLICIT, AUTO))
    with jax.set_mesh(mesh):
        assert oxe.resolve_mesh(AbstractMesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, AUTO))) is mesh
        # An abstract mesh also carries an abstract device, by which `==` would tell the two apart.
        assert oxe.resolve_mesh(jax.sharding.get_abstract_mesh()) is mesh


@pytest.mark.parametrize(
    ("sizes", "names", "types"),
    [
        pytest.param((2, 4), ("d", "m"), (AUTO, AUTO), id="in its types"),
        pytest.param((4, 2), ("d", "m"), (EXPLICIT, EXPLICIT), id="in its sizes"),
        pytest.param((2, 4), ("x", "m"), (EXPLICIT, EXPLICIT), id="in its names"),
        pytest.param((4, 2), ("m", "d"), (EXPLICIT, EXPLICIT), id="in the order of its axes"),
    ],
)
def test_an_abstract_mesh_that_the_context_contradicts_is_refused(mesh, sizes, names, types):
    """Never a silent pick."""
    abstract = AbstractMesh(sizes, names, axis_types=types)
    wanted = LeafRecorder().mesh(abstract)
    with jax.set_mesh(mesh), pytest.raises(oxe.MeshMismatchError) as error:
        oxe.resolve_mesh(abstract)
    assert str(error.value) == (
        f"cannot resolve mesh {wanted} on the mesh of jax.set_mesh (d=2 explicit, m=4 explicit)\n"
        "  present   the mesh of jax.set_mesh is (d=2 explicit, m=4 explicit)\n"
        "  fix       make the two agree in axis names, sizes and types, or pass devices="
    )


@pytest.mark.parametrize(
    ("sizes", "count"),
    [pytest.param((4, 4), None, id="than the machine"), pytest.param((2, 4), 4, id="than the devices that are passed")],
)
def test_an_abstract_mesh_that_is_larger_is_refused(sizes, count):
    """Both sides are shown."""
    abstract = AbstractMesh(sizes, ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    with pytest.raises(oxe.MeshMismatchError) as error:
        oxe.resolve_mesh(abstract, devices=None if count is None else jax.devices()[:count])
    assert str(error.value) == (
        f"cannot resolve mesh (d={sizes[0]} explicit, m={sizes[1]} explicit) on {count or 8} devices\n"
        f"  present   {count or 8} cpu devices, 1 process\n"
        "  fix       ask for a smaller mesh"
    )


def test_a_mesh_whose_axes_are_numbered_is_an_error_of_ours():
    """Not the exception that travels within the package."""
    with pytest.raises(oxe.OrbaxExplicitError, match="mesh axis names that are not str"):
        oxe.resolve_mesh(AbstractMesh((8,), (0,), axis_types=(AUTO,)))


# What is here.


def test_what_is_here_is_read(mesh):
    """Devices, their record, and the mesh of `jax.set_mesh`."""
    with jax.set_mesh(mesh):
        present = read_present()
    assert present.devices == tuple(jax.devices())
    assert present.inventory == record_inventory(jax.devices())
    assert present.context is mesh


def test_without_a_context_there_is_no_mesh():
    """JAX then gives an empty one."""
    assert read_present().context is None


def test_devices_that_are_passed_are_what_is_here():
    """In their order."""
    devices = jax.devices()[5:1:-2]
    present = read_present(devices)
    assert present.devices == tuple(devices)
    assert present.inventory.device_ids == (5, 3)


def test_a_context_mesh_does_not_reach_another_thread(mesh):
    """Which is why what is here is read in the caller's thread: Orbax may restore in another one."""
    with jax.set_mesh(mesh):
        assert elsewhere(read_present).context is None
        present = read_present()
    assert elsewhere(lambda: present).context is mesh


# Plans bound to the devices.


def named(mesh: MeshRecord, *partitions: Any, kind: str | None = "device") -> NamedShardingRecord:
    return NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions), memory_kind=kind)


def mesh_record(*, first_id: int = 0, ids: tuple[int, ...] | None = None, types: Any = None) -> MeshRecord:
    return MeshRecord(
        axis_names=("d", "m"),
        axis_sizes=(2, 4),
        axis_types=types or ("explicit", "explicit"),
        device_ids=tuple(range(first_id, first_id + 8)) if ids is None else ids,
        platform="cpu",
    )


def array(sharding: ShardingRecord, shape: tuple[int, ...] = (8, 8), **fields: Any) -> ArrayRecord:
    return ArrayRecord(shape=shape, dtype="float32", sharding=sharding, **fields)


def manifest_of(leaves: Mapping[str, LeafRecord], first_id: int = 0) -> Manifest:
    inventory = read_present().inventory
    return Manifest(
        tree=ContainerRecord(kind="dict", keys=path(*leaves), children=tuple(leaves.values())),
        inventory=dataclasses.replace(inventory, device_ids=tuple(i + first_id for i in inventory.device_ids)),
    )


def bound(
    leaves: Mapping[str, LeafRecord],
    *,
    first_id: int = 0,
    present: Present | None = None,
    mesh: Mesh | None = None,
    target: Any = None,
    fallback: Any = None,
) -> dict[str, Any]:
    """The sharding of each leaf, after a plan and its binding."""
    present = present or read_present()
    captured = record_target(target) if target is not None else None
    recorder = LeafRecorder()
    plan = plan_from_records(
        manifest_of(leaves, first_id),
        captured.records if captured is not None else None,
        present.inventory,
        mesh=recorder.mesh(mesh) if mesh is not None else None,
        context=recorder.mesh(present.context) if present.context is not None else None,
        fallback=AsFallback() if fallback is not None else None,
    )
    assert plan.refused == ()
    shardings = bind_plan(plan, present, mesh=mesh, target=captured, fallback=fallback)
    return {leaf_path[0].name: sharding for leaf_path, sharding in shardings.items()}


def test_a_recorded_sharding_is_bound_to_the_recorded_devices_in_their_order():
    """Axis types and memory kind are those of the record."""
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    record = mesh_record(ids=order, types=("auto", "explicit"))
    sharding = bound({"w": array(named(record, None, "m", kind="pinned_host"))})["w"]
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("d", "m"), axis_types=(AUTO, EXPLICIT))
    assert sharding == NamedSharding(mesh, P(None, "m"), memory_kind="pinned_host")
    assert ids(sharding.mesh) == list(order)


def test_a_new_mesh_is_in_the_order_of_make_mesh():
    """As many devices of other ids."""
    sharding = bound({"w": array(named(mesh_record(first_id=2048), "d"))}, first_id=2048)["w"]
    assert sharding.mesh == jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))


def test_a_mesh_on_recorded_positions_is_on_those_devices():
    """Where the recorded ones stood in `jax.devices()`."""
    record = MeshRecord(
        axis_names=("d",), axis_sizes=(2,), axis_types=("auto",), device_ids=(2053, 2050), platform="cpu"
    )
    assert ids(bound({"w": array(named(record, "d"))}, first_id=2048)["w"].mesh) == [5, 2]


@pytest.mark.parametrize("first_id", [0, 2048], ids=["on the recorded devices", "on new ones"])
def test_arrays_of_one_recorded_mesh_are_bound_to_one_mesh_object(first_id):
    """And those of one spec to one sharding object; another mesh is another one."""
    record, other = mesh_record(first_id=first_id), mesh_record(first_id=first_id, types=("auto", "auto"))
    leaves = {"a": array(named(record, "d")), "b": array(named(record, "m")), "c": array(named(record, "d"))}
    shardings = bound({**leaves, "z": array(named(other, "d"))}, first_id=first_id)
    assert shardings["a"].mesh is shardings["b"].mesh
    assert shardings["a"] is shardings["c"]
    assert shardings["z"].mesh is not shardings["a"].mesh
    assert shardings["z"].mesh.axis_types == (AUTO, AUTO)


def test_the_mesh_that_was_passed_and_that_of_the_context_are_bound_as_they_are():
    """The objects themselves."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    leaves = {"w": array(named(mesh_record(), "d", "m"))}
    assert bound(leaves, mesh=mesh)["w"].mesh is mesh
    with jax.set_mesh(mesh):
        assert bound(leaves)["w"].mesh is mesh


def test_a_plan_is_bound_in_another_thread_to_the_context_of_the_caller(mesh):
    """What was read is passed on as a value."""
    with jax.set_mesh(mesh):
        present = read_present()
        sharding = elsewhere(lambda: bound({"w": array(named(mesh_record(), "d"))}, present=present)["w"])
    assert sharding.mesh is mesh


def test_a_concrete_target_sharding_is_bound_as_it_is():
    """The object itself; and a leaf without one lands on its mesh."""
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    own = NamedSharding(mesh, P("m"))
    target = {
        "count": jax.ShapeDtypeStruct((), jnp.float32),
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=own),
    }
    record = mesh_record()
    shardings = bound({"count": array(named(record), ()), "w": array(named(record, "d"))}, target=target)
    assert shardings["w"] is own
    assert shardings["count"] == NamedSharding(mesh, P(), memory_kind="device")


def test_a_fallback_is_bound_as_it_is():
    """For what does not fit."""
    fallback = SingleDeviceSharding(jax.devices()[1])
    present = read_present(jax.devices()[:4])
    assert bound({"w": array(named(mesh_record(), "d"))}, present=present, fallback=fallback)["w"] is fallback


def test_a_value_on_the_host_has_no_sharding():
    """There is nothing to place."""
    assert bound({"n": ValueRecord(type="int", dtype="int64")}) == {"n": None}


def test_an_array_on_one_device_is_bound_to_it():
    """With its memory kind; to the default one if it is gone."""
    shardings = bound(
        {
            "here": array(SingleDeviceRecord(device_id=3, platform="cpu", memory_kind="pinned_host")),
            "gone": array(SingleDeviceRecord(device_id=3, platform="cuda")),
        }
    )
    assert shardings["here"] == SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
    assert shardings["gone"] == SingleDeviceSharding(jax.devices()[0], memory_kind="device")


UNCOMMITTED: Mapping[str, LeafRecord] = {"n": array(SingleDeviceRecord(device_id=5), (), committed=False)}
GONE: Mapping[str, LeafRecord] = {"n": array(SingleDeviceRecord(device_id=5, platform="cuda"), ())}


def test_an_uncommitted_array_is_bound_to_a_mark_on_the_default_device():
    """JAX has no sharding that says so."""
    sharding = bound(UNCOMMITTED)["n"]
    assert type(sharding) is UncommittedSharding
    assert isinstance(sharding, SingleDeviceSharding)
    assert (sharding.device_set, sharding.memory_kind) == ({jax.devices()[0]}, "device")


@pytest.mark.parametrize("leaves", [UNCOMMITTED, GONE], ids=["an uncommitted array", "an array whose device is gone"])
def test_the_default_device_is_the_one_that_is_configured(leaves):
    """By `jax.default_device`, as for every new array."""
    with jax.default_device(jax.devices()[3]):
        assert bound(leaves)["n"].device_set == {jax.devices()[3]}
    assert bound(leaves)["n"].device_set == {jax.devices()[0]}


def test_the_default_device_is_that_of_the_callers_thread():
    """It is ambient state like the context mesh: read once, and passed on as a value."""
    with jax.default_device(jax.devices()[3]):
        present = read_present()
        sharding = elsewhere(lambda: bound(UNCOMMITTED, present=present)["n"])
    assert sharding.device_set == {jax.devices()[3]}


# `plan_restore`: the plan of a restore that is not done.


@pytest.fixture
def checkpoint(tmp_path, mesh):
    """A finished checkpoint of a matrix on the mesh, a step, and a number."""
    with oxe.StandardCheckpointer() as checkpointer:
        state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5), "n": 3}
        checkpointer.save(tmp_path / "checkpoint", state)
    return tmp_path / "checkpoint"


def where(plan: RestorePlan, name: str = "w") -> Any:
    """The mesh that a leaf lands on."""
    return plan.by_path[(Key("dict", name),)].placement.mesh


def test_a_restore_is_planned_from_its_path(checkpoint):
    """As a text that a person reads."""
    assert str(oxe.plan_restore(str(checkpoint))) == (
        "restore of 3 leaves, 268 B to read\n"
        "  recorded  8 cpu devices, 1 process\n"
        "  present   8 cpu devices, 1 process\n"
        "  mesh      (d=2 explicit, m=4 explicit) on all 8 devices, as recorded\n"
        "  leaves    1 x the recorded spec\n"
        "            1 x uncommitted, as recorded\n"
        "            1 x a value on the host\n"
        "  memory    device: at most 36 B, on device 0; 260 B on 8 devices in all\n"
        "            host values: 8 B in each process"
    )


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        pytest.param(4, (1, 4), id="half the devices"),
        pytest.param(1, (1, 1), id="one device"),
        pytest.param(3, (1, 2), id="three devices, of which one is idle"),
    ],
)
def test_a_plan_for_some_devices_resizes_the_mesh(checkpoint, count, sizes):
    """And with `topology="exact"` says what does not fit, without an exception; other leaves are planned all the same."""
    devices = jax.devices()[:count]
    plan = oxe.plan_restore(checkpoint, devices=devices)
    assert (plan.refused, where(plan).mesh.axis_sizes) == ((), sizes)
    plan = oxe.plan_restore(checkpoint, devices=devices, policy=oxe.RestorePolicy(topology="exact"))
    here = "1 device" if count == 1 else f"{count} devices"
    assert [(problem.could_not, problem.affects, problem.of) for problem in plan.refused] == [
        (f"cannot rebuild mesh (d=2 explicit, m=4 explicit) on {here}", ("w",), 3)
    ]
    assert [outcome.rule for outcome in plan.outcomes] == ["host", "uncommitted", "refused"]
    with pytest.raises(oxe.MeshMismatchError, match="cannot rebuild mesh"):
        plan.raise_if_refused()


def test_a_plan_for_devices_in_another_order_keeps_the_recorded_order(checkpoint):
    """They are all here: the restored sharding equals the saved one."""
    plan = oxe.plan_restore(checkpoint, devices=jax.devices()[::-1])
    assert (where(plan).source, where(plan).mesh.device_ids) == ("recorded devices", tuple(range(8)))


def test_a_plan_counts_the_mesh_that_is_passed_and_that_of_the_context(checkpoint, mesh):
    """As the restore would."""
    wide = jax.make_mesh((4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    assert where(oxe.plan_restore(checkpoint, mesh=wide)).source == "given"
    with jax.set_mesh(wide):
        plan = oxe.plan_restore(checkpoint)
    assert (where(plan).source, where(plan).mesh.axis_sizes) == ("context", (4, 2))


def test_a_plan_for_a_target_says_what_it_lacks(checkpoint):
    """By leaf name, each at once."""
    target = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "x": 1}
    plan = oxe.plan_restore(checkpoint, target)
    assert {problem.could_not: problem.affects for problem in plan.refused} == {
        "cannot restore shape (8, 8) into shape (8, 4)": ("w",),
        "cannot restore into a target that lacks saved leaves": ("n", "step"),
        "cannot restore leaves of the target that the checkpoint lacks": ("x",),
    }


def test_a_plan_takes_a_policy(checkpoint):
    """The choices of the restore."""
    plan = oxe.plan_restore(checkpoint, policy=oxe.RestorePolicy(axis_types=AUTO, memory_kind="pinned_host"))
    assert where(plan).mesh.axis_types == ("auto", "auto")
    assert plan.by_path[(Key("dict", "w"),)].placement.memory_kind == "pinned_host"


def test_a_plan_of_nothing_is_an_error(tmp_path):
    """The path is named."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        oxe.plan_restore(tmp_path / "nowhere")
