"""`_planning`: every line of the order that decides where a leaf lands, as values that know no JAX.

The recorded run has 8 CPU devices; `w` is an 8x8 float32 on `P('d', 'm')` of a mesh (d=2, m=4), both axes explicit,
unless said otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from plans import (
    HERE,
    KEYS,
    MESH,
    SAVED,
    abstract,
    array,
    manifest_of,
    manifests,
    mesh_of,
    on,
    only,
    placed,
    plan_of,
    planned,
    refused,
    restores,
    wanted,
)
from trees import path

from orbax_explicit import MeshMismatchError, RestorePlan, RestorePolicy, RestoreRefusedError
from orbax_explicit._mesh_planning import same_axes
from orbax_explicit._outcomes import (
    AsFallback,
    AsTarget,
    Kept,
    NotPlaced,
    OnDevice,
    OnHost,
    OnMesh,
    Outcome,
    Uncommitted,
)
from orbax_explicit._planning import TargetRecord, plan_from_records
from orbax_explicit._records import (
    UNCONSTRAINED,
    ArrayRecord,
    ContainerRecord,
    Key,
    LeafPath,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    PrngRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
    iterate_leaves,
    path_text,
)
from orbax_explicit.testing import fake_inventory


def test_planning_needs_no_jax():
    """A restore onto 65,536 chips is planned on a laptop that has neither JAX nor Orbax."""
    script = """
import sys
for name in ("jax", "jaxlib", "orbax", "numpy"):
    sys.modules[name] = None
import importlib.util, pathlib, types
root = pathlib.Path(importlib.util.find_spec("orbax_explicit").submodule_search_locations[0])
package = types.ModuleType("orbax_explicit")
package.__path__ = [str(root)]
sys.modules["orbax_explicit"] = package
from orbax_explicit._planning import plan_from_records
from orbax_explicit._records import ContainerRecord, Manifest
from orbax_explicit.testing import fake_inventory
print(plan_from_records(Manifest(tree=ContainerRecord(kind="dict")), None, fake_inventory(2048, processes=32)))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout == (
        "restore of 0 leaves, 0 B to read\n  recorded  devices that were not recorded\n  present   65536 cpu devices, 32 processes\n"
    ), ran.stderr


# 1. The target's leaf has a concrete sharding.


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(on(mesh_of({"x": 8}), "x"), id="on another mesh"),
        pytest.param(
            on(mesh_of({"x": 4}, ids=range(100, 104)), "x"),
            id="on devices that are not here, which JAX must then have made up",
        ),
        pytest.param(SingleDeviceRecord(device_id=3), id="on one device"),
        pytest.param(None, id="of a kind that has no record"),
    ],
)
def test_a_concrete_target_sharding_is_taken_as_it_is(sharding):
    """Before anything else: neither the mesh that was passed nor the context's has a say."""
    plan = plan_of(targets={"w": wanted(sharding, concrete=True)}, mesh=mesh_of({"y": 8}), context=mesh_of({"z": 8}))
    outcome = only(plan)
    assert outcome.placement == AsTarget(sharding=sharding)
    assert outcome.rule == "target"
    assert outcome.notes == ()


def test_an_uncommitted_target_array_names_no_place():
    """What is in the result stays as free as it was in the target."""
    outcome = only(plan_of(targets={"w": wanted(SingleDeviceRecord(device_id=0), concrete=True, committed=False)}))
    assert outcome.placement == Uncommitted(memory_kind="device")
    assert outcome.rule == "target"


# 2. The target's leaf has a sharding on an abstract mesh.

OTHER_IDS = mesh_of(ids=range(7, -1, -1))


@pytest.mark.parametrize(
    ("options", "axes", "ids", "source"),
    [
        pytest.param({"mesh": OTHER_IDS}, MESH, OTHER_IDS.device_ids, "given", id="the mesh that was passed"),
        pytest.param(
            {"mesh": OTHER_IDS, "context": mesh_of(types="auto")},
            MESH,
            OTHER_IDS.device_ids,
            "given",
            id="the mesh that was passed, whatever the context says",
        ),
        pytest.param({"context": OTHER_IDS}, MESH, OTHER_IDS.device_ids, "context", id="a context mesh that equals it"),
        pytest.param({}, MESH, MESH.device_ids, "recorded devices", id="the recorded devices"),
        pytest.param(
            {},
            mesh_of(types=("auto", "explicit")),
            MESH.device_ids,
            "recorded devices",
            id="the recorded devices where names and sizes are equal but not the types",
        ),
        pytest.param(
            {"manifest": manifest_of({"w": array(on(OTHER_IDS, "d"))})},
            MESH,
            OTHER_IDS.device_ids,
            "recorded devices",
            id="the recorded devices in their recorded order",
        ),
        pytest.param(
            {"manifest": manifest_of({"w": array(None), "v": array(on(OTHER_IDS, "d"))})},
            MESH,
            OTHER_IDS.device_ids,
            "recorded devices",
            id="the recorded devices of another leaf, where the leaf's own were not recorded",
        ),
        pytest.param({}, mesh_of({"m": 4, "d": 2}), None, "new", id="a new mesh where the axes come in another order"),
        pytest.param({}, mesh_of({"d": 4, "m": 2}), None, "new", id="a new mesh where the sizes differ"),
        pytest.param({}, mesh_of({"d": 2, "m": 2}), None, "new", id="a new mesh smaller than the machine"),
        pytest.param(
            {"present": fake_inventory(4, first_id=100)},
            mesh_of({"d": 2, "m": 2}),
            None,
            "new",
            id="a new mesh where the recorded devices are gone",
        ),
        pytest.param(
            {"present": fake_inventory(8, first_id=100)},
            MESH,
            None,
            "new",
            id="a new mesh of the recorded shape where the recorded devices are gone",
        ),
    ],
)
def test_an_abstract_target_mesh_is_made_concrete_on(options, axes, ids, source):
    """Spec, types and memory kind are the target's; the devices are those of the first line that applies."""
    targets = {"w": wanted(on(abstract(axes), None, "d", kind="pinned_host"))}
    if len(options.get("manifest", SAVED).leaves) > 1:
        targets["v"] = wanted(None, concrete=True)
    plan = plan_of(targets=targets, **options)
    assert plan.refused == ()
    outcome = plan.by_path[path("w")]
    assert outcome.rule == "target's abstract mesh"
    assert outcome.placement == OnMesh(
        mesh=planned(
            dataclasses.replace(axes, device_ids=ids, platform="cpu"), source, present=options.get("present", HERE)
        ),
        spec=SpecRecord(partitions=(None, "d")),
        memory_kind="pinned_host",
    )


def test_a_target_without_a_memory_kind_means_the_default_one():
    """Not the recorded one: the target has a sharding, and it says so."""
    saved = manifest_of({"w": array(on(MESH, "d", kind="pinned_host"))})
    plan = plan_of(saved, {"w": wanted(on(abstract(MESH), "d", kind=None))})
    assert only(plan).placement.memory_kind == "device"


@pytest.mark.parametrize("name", ["mesh", "context"])
@pytest.mark.parametrize(
    "at_hand",
    [
        pytest.param(mesh_of(types="auto"), id="types the axes otherwise"),
        pytest.param(mesh_of({"d": 4, "m": 2}), id="has other sizes"),
        pytest.param(mesh_of({"x": 2, "m": 4}), id="has other names"),
        pytest.param(mesh_of({"m": 4, "d": 2}), id="has the axes in another order"),
    ],
)
def test_a_mesh_at_hand_that_contradicts_an_abstract_target_is_refused(name, at_hand):
    """Never a silent pick: the error shows both, and says where each comes from."""
    problem = refused(plan_of(targets={"w": wanted(on(abstract(MESH), "d"))}, **{name: at_hand}))
    whose = "the mesh that was passed" if name == "mesh" else "the mesh of jax.set_mesh"
    assert problem.could_not == f"cannot resolve the target's mesh {MESH} on {whose} {at_hand}"
    assert problem.present == f"{whose} is {at_hand}"
    assert problem.affects == ("w",)
    assert problem.about == "mesh"
    assert ("restore outside jax.set_mesh" in problem.fix) == (name == "context")


def test_a_mesh_that_contradicts_a_target_is_one_problem_for_all_its_leaves():
    """However many specs they were recorded with."""
    saved = manifest_of({"a": array(on(MESH, "d")), "b": array(on(MESH, "m")), "c": array(None)})
    target = on(abstract(MESH), "d")
    plan = plan_of(saved, dict.fromkeys("abc", wanted(target)), mesh=mesh_of({"x": 8}))
    assert [problem.affects for problem in plan.refused] == [("a", "b", "c")]


def test_an_abstract_target_larger_than_the_machine_is_refused():
    """Both sides, and what would fit."""
    large = mesh_of({"d": 4, "m": 4})
    problem = refused(plan_of(targets={"w": wanted(on(abstract(large), "d"))}))
    assert str(problem) == (
        "cannot resolve the target's mesh (d=4 explicit, m=4 explicit): it has 16 devices\n"
        "  present   8 cpu devices, 1 process\n"
        "  affects   w\n"
        "  fix       give the target a mesh of at most 8 devices"
    )
    assert problem.about == "mesh"


def test_a_target_with_a_pending_reduction_is_refused():
    """Nothing that is read could be a pending reduction."""
    target = wanted(on(abstract(MESH), "d", unreduced=("m",), unreduced_kind="sum"))
    problem = refused(plan_of(targets={"w": target}))
    assert problem.could_not == ("cannot restore into a sharding with pending reductions, P('d', unreduced={'m'})")
    assert problem.about == "leaf"


def test_a_leaf_without_a_sharding_is_not_blamed_for_another_leafs():
    """It lands on the target's mesh all the same; the refusal names the leaf that asked for what cannot be had."""
    saved = manifest_of({"count": array(on(MESH), shape=()), "w": array(on(MESH, "d"))})
    targets = {
        "count": wanted(shape=()),
        "w": wanted(on(abstract(MESH), "d", unreduced=("m",), unreduced_kind="sum")),
    }
    plan = plan_of(saved, targets)
    assert [problem.affects for problem in plan.refused] == [("w",)]
    assert [outcome.path for outcome in placed(plan)] == [path("count")]


def test_leaves_of_one_abstract_mesh_land_on_one_mesh():
    """Whatever they were recorded on, and where a leaf has no sharding of its own."""
    saved = manifest_of(
        {"a": array(on(MESH, "d")), "b": array(on(mesh_of({"x": 8}), "x")), "c": array(None), "n": array(on(MESH))}
    )
    target = on(abstract(MESH), "m")
    plan = plan_of(saved, {"a": wanted(target), "b": wanted(target), "c": wanted(target), "n": wanted()})
    assert plan.refused == ()
    assert {(p.mesh, p.source) for p in plan.meshes} == {(MESH, "recorded devices")}


# 3. The recorded sharding.


@pytest.mark.parametrize(
    "given_mesh",
    [
        pytest.param(mesh_of({"d": 4, "m": 2}, "auto"), id="of other sizes and types"),
        pytest.param(mesh_of({"m": 2, "d": 2, "x": 2}), id="with one axis more, in another order"),
        pytest.param(mesh_of(ids=range(100, 108)), id="on other devices"),
    ],
)
def test_a_mesh_that_was_passed_takes_the_recorded_spec(given_mesh):
    """Its sizes and axis types win: the caller said so."""
    outcome = only(plan_of(mesh=given_mesh, context=mesh_of({"z": 8}), policy=RestorePolicy(axis_types="auto")))
    assert outcome.rule == "recorded"
    assert outcome.placement == OnMesh(
        mesh=planned(mesh=given_mesh, source="given", recorded=MESH),
        spec=SpecRecord(partitions=("d", "m")),
        memory_kind="device",
    )


def test_a_mesh_that_was_passed_needs_only_the_axes_of_the_spec():
    """A recorded axis that splits nothing may be gone."""
    saved = manifest_of({"w": array(on(MESH, "d"))})
    flat = mesh_of({"d": 8})
    assert only(plan_of(saved, mesh=flat)).placement.mesh.mesh == flat


def test_a_mesh_that_was_passed_without_the_recorded_axes_is_refused():
    """The error names the axes."""
    problem = refused(plan_of(mesh=mesh_of({"d": 2, "x": 4})))
    assert problem.could_not == "cannot place recorded specs over 'm': the mesh that was passed has no such axis"
    assert (problem.recorded, problem.present) == (
        "mesh (d=2 explicit, m=4 explicit)",
        "mesh (d=2 explicit, x=4 explicit)",
    )
    assert problem.about == "mesh"


@pytest.mark.parametrize(
    ("context", "policy"),
    [
        pytest.param(MESH, None, id="that equals the recorded one"),
        pytest.param(mesh_of({"d": 4, "m": 2}), None, id="of other sizes"),
        pytest.param(mesh_of({"x": 1, "m": 2, "d": 4}, ("auto", "explicit", "explicit")), None, id="with an axis more"),
        pytest.param(
            mesh_of(types="auto"), RestorePolicy(axis_types="auto"), id="of the types that the policy asks for"
        ),
    ],
)
def test_a_context_mesh_takes_the_recorded_spec(context, policy):
    """It has the recorded axis names and types."""
    outcome = only(plan_of(context=context, policy=policy))
    assert outcome.placement.mesh == planned(mesh=context, source="context", recorded=MESH)
    assert outcome.placement.spec == SpecRecord(partitions=("d", "m"))


@pytest.mark.parametrize(
    ("context", "policy", "what", "retype"),
    [
        pytest.param(mesh_of({"d": 8}), None, f"{MESH}", False, id="that lacks an axis"),
        pytest.param(mesh_of(types=("explicit", "auto")), None, f"{MESH}", True, id="that types an axis otherwise"),
        pytest.param(
            MESH,
            RestorePolicy(axis_types={"m": "auto"}),
            f"{MESH}, (d=2 explicit, m=4 auto) by the policy,",
            False,
            id="of types that the policy does not ask for",
        ),
    ],
)
def test_a_context_mesh_is_refused(context, policy, what, retype):
    """An error that says what to pass, never another mesh in silence; advice that cannot help is not given."""
    problem = refused(plan_of(context=context, policy=policy))
    assert problem.could_not == f"cannot place a recorded mesh {what} on the mesh of jax.set_mesh {context}"
    assert (problem.recorded, problem.present, problem.about) == (
        f"mesh {MESH}",
        f"the mesh of jax.set_mesh is {context}",
        "mesh",
    )
    for advice in ("mesh=", "outside jax.set_mesh"):
        assert advice in problem.fix
    assert ("axis_types=" in problem.fix) == retype


def test_a_context_mesh_takes_a_mesh_without_recorded_types():
    """Its types are as good as any."""
    saved = manifest_of({"w": array(on(mesh_of(types=None), "d"))})
    assert only(plan_of(saved, context=MESH)).placement.mesh.mesh == MESH


@pytest.mark.parametrize(
    ("sharding", "concrete", "mesh", "source"),
    [
        pytest.param(
            on(mesh_of({"d": 4, "m": 2}), "d"),
            True,
            mesh_of({"d": 4, "m": 2}),
            "target",
            id="the target's concrete mesh",
        ),
        pytest.param(
            on(abstract(mesh_of({"d": 4, "m": 2})), "d"),
            False,
            dataclasses.replace(mesh_of({"d": 4, "m": 2}), device_ids=None),
            "new",
            id="the target's abstract mesh",
        ),
        pytest.param(
            on(abstract(MESH), "d"),
            False,
            MESH,
            "recorded devices",
            id="the target's abstract mesh on recorded devices",
        ),
        pytest.param(
            on(mesh_of({"d": 4, "m": 2}, "auto"), "d"),
            True,
            MESH,
            "recorded devices",
            id="the recorded devices, where the target types the axes otherwise",
        ),
        pytest.param(
            on(mesh_of({"x": 8}), "x"),
            True,
            MESH,
            "recorded devices",
            id="the recorded devices, where the target has other axes",
        ),
    ],
)
def test_a_leaf_that_a_target_gives_no_sharding_lands_on(sharding, concrete, mesh, source):
    """Beside the leaves that have one: `jax.eval_shape` gives scalars no sharding."""
    saved = manifest_of({"count": array(on(MESH), shape=()), "w": array(on(MESH, "d"))})
    plan = plan_of(saved, {"count": wanted(shape=()), "w": wanted(sharding, concrete=concrete)})
    assert plan.refused == ()
    count = plan.by_path[path("count")]
    assert count.rule == "recorded"
    assert count.placement.mesh == planned(mesh=mesh, source=source, recorded=MESH)


TURNED, ROTATED = mesh_of(ids=range(7, -1, -1)), mesh_of(ids=(*range(1, 8), 0))


@pytest.mark.parametrize(
    ("first", "second", "taken", "source"),
    [
        pytest.param(mesh_of({"d": 4, "m": 2}), TURNED, TURNED, "target", id="the one of the recorded sizes is taken"),
        pytest.param(TURNED, MESH, MESH, "target", id="the one on the recorded devices is taken"),
        pytest.param(mesh_of({"x": 8}), TURNED, TURNED, "target", id="the only one of the recorded axes is taken"),
        pytest.param(TURNED, ROTATED, MESH, "recorded devices", id="none is picked where nothing tells them apart"),
    ],
)
def test_of_several_target_meshes(first, second, taken, source):
    """What is most like the recorded mesh, and never one by chance."""
    saved = manifest_of({"count": array(on(MESH), shape=()), "v": array(on(MESH)), "w": array(on(MESH))})
    targets = {
        "count": wanted(shape=()),
        "v": wanted(on(first), concrete=True),
        "w": wanted(on(second), concrete=True),
    }
    placement = plan_of(saved, targets).by_path[path("count")].placement
    assert placement.mesh == planned(mesh=taken, source=source, recorded=MESH)


# 3a and 3b. The recorded mesh, rebuilt.

HALF = {"d": 2, "m": 2}


@pytest.mark.parametrize(
    ("recorded", "saved_on", "present", "ids", "source"),
    [
        pytest.param(MESH, HERE, HERE, MESH.device_ids, "recorded devices", id="the same devices"),
        pytest.param(
            OTHER_IDS, HERE, HERE, OTHER_IDS.device_ids, "recorded devices", id="the same devices in reverse order"
        ),
        pytest.param(
            mesh_of(HALF, ids=(4, 6, 5, 7)), HERE, HERE, (4, 6, 5, 7), "recorded devices", id="the same half of them"
        ),
        pytest.param(
            MESH,
            HERE,
            fake_inventory(4, processes=2),
            None,
            "new",
            id="as many devices of two processes, where one had them all",
        ),
        pytest.param(
            mesh_of(ids=(0, 1, 2, 3, 2048, 2049, 2050, 2051)),
            fake_inventory(4, processes=2),
            HERE,
            None,
            "new",
            id="as many devices of one process, where two had them",
        ),
        pytest.param(
            mesh_of(ids=range(2048, 2056)), None, HERE, None, "new", id="as many devices of other ids, none recorded"
        ),
        pytest.param(
            mesh_of(platform="cuda"),
            fake_inventory(8, platform="cuda"),
            HERE,
            None,
            "new",
            id="as many devices of another platform, though the ids are the same",
        ),
        pytest.param(
            mesh_of(HALF, ids=(4, 6, 5, 7)),
            HERE,
            fake_inventory(8, first_id=100),
            (104, 106, 105, 107),
            "recorded positions",
            id="the half of them that stands where the recorded one stood",
        ),
        pytest.param(
            mesh_of(HALF, ids=(2, 2048, 3, 2049), platform="cuda"),
            fake_inventory(4, processes=2, platform="cuda"),
            HERE,
            (2, 4, 3, 5),
            "recorded positions",
            id="the recorded positions over two processes and another platform",
        ),
        pytest.param(
            mesh_of(HALF),
            None,
            fake_inventory(16),
            (0, 1, 2, 3),
            "recorded devices",
            id="the recorded ids in a larger machine, where no inventory was recorded",
        ),
    ],
)
def test_a_recorded_mesh_is_rebuilt_on(recorded, saved_on, present, ids, source):
    """The same names, sizes and types."""
    saved = manifest_of({"w": array(on(recorded, "d", "m"))}, saved_on)
    placed = dataclasses.replace(recorded, device_ids=ids, platform="cpu")
    assert only(plan_of(saved, present=present)).placement.mesh == planned(
        mesh=placed, source=source, recorded=recorded, present=present
    )


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"d": 2, "m": 4}, id="is rebuilt where it is as large as the machine"),
        pytest.param({"d": 2, "m": 2}, id="is rebuilt on the first devices where it is smaller"),
    ],
)
def test_a_recorded_mesh_without_devices(sizes):
    """An odd file may say so; it is no reason for an exception."""
    recorded = abstract(mesh_of(sizes))
    plan = plan_of(manifest_of({"w": array(on(recorded, "d"))}))
    placed_mesh = dataclasses.replace(recorded, platform="cpu")
    assert only(plan).placement.mesh == planned(mesh=placed_mesh, source="new", recorded=recorded)


def test_arrays_of_one_recorded_mesh_land_on_one_planned_mesh():
    """Not on equal ones: binding makes one `Mesh` of each."""
    names = "abcd"
    saved = manifest_of({name: array(on(MESH, axis)) for name, axis in zip(names, ("d", "m", None, "d"), strict=True)})
    plan = plan_of(saved, present=fake_inventory(8, first_id=8))
    assert len({id(outcome.placement.mesh) for outcome in plan.outcomes}) == 1
    assert len(plan.meshes) == 1


@pytest.mark.parametrize(
    ("choice", "types"),
    [
        pytest.param("auto", ("auto", "auto"), id="for every axis"),
        pytest.param({"m": "auto"}, ("explicit", "auto"), id="for the axes that it names"),
    ],
)
def test_a_policy_retypes_the_recorded_mesh(choice, types):
    """Devices and specs stay."""
    placement = only(plan_of(policy=RestorePolicy(axis_types=choice))).placement
    assert placement.mesh == planned(mesh=mesh_of(types=types), source="recorded devices", recorded=MESH)
    assert placement.spec == SpecRecord(partitions=("d", "m"))


@pytest.mark.parametrize(
    ("policy", "types", "note"),
    [
        pytest.param(None, "auto", "no axis types were recorded; the mesh axes are auto", id="auto, as they were then"),
        pytest.param(
            RestorePolicy(axis_types="explicit"),
            "explicit",
            "no axis types were recorded; those of the policy are used",
            id="those of the policy",
        ),
    ],
)
def test_axis_types_that_were_not_recorded_are(policy, types, note):
    """And the plan says so."""
    outcome = only(plan_of(manifest_of({"w": array(on(mesh_of(types=None), "d"))}), policy=policy))
    assert outcome.placement.mesh.mesh == mesh_of(types=types)
    assert outcome.notes == (note,)


# 3c. A recorded mesh that does not fit as it was. `test_topology` has the rule by which it is resized.

EXACT = RestorePolicy(topology="exact")


def test_a_recorded_mesh_that_does_not_fit_is_one_error_that_lists_every_array():
    """Recorded, present, how many, what to do; and as a `MeshMismatchError`."""
    mesh = mesh_of({"data": 2, "model": 4})
    saved = manifest_of(
        {f"layer_{i}": array(on(mesh, axis)) for i in range(3) for axis in ("model",)}
        | {f"other_{i}": array(on(mesh, "data", kind="pinned_host")) for i in range(4)}
    )
    plan = plan_of(saved, present=fake_inventory(4), policy=EXACT)
    assert {outcome.placement for outcome in plan.outcomes} == {NotPlaced(problems=(0,))}
    with pytest.raises(MeshMismatchError) as error:
        plan.raise_if_refused()
    assert str(error.value) == (
        "cannot rebuild mesh (data=2 explicit, model=4 explicit) on 4 devices\n"
        "  recorded  mesh (data=2 explicit, model=4 explicit) of 8 devices, saved on 8 cpu devices, 1 process\n"
        "  present   4 cpu devices, 1 process\n"
        "  affects   7 of 7 leaves, first: layer_0, layer_1, layer_2, other_0, other_1\n"
        "  fix       topology='adapt' in the policy fits it to these; or pass mesh= with the axes data, model"
    )
    assert error.value.problems[0].affects == tuple(path_text(leaf) for leaf in saved.leaves)


def test_each_mesh_that_does_not_fit_is_a_problem_of_its_own():
    """With the arrays that are on it."""
    saved = manifest_of({"a": array(on(MESH)), "b": array(on(mesh_of({"x": 8}))), "c": array(on(MESH, "d"))})
    plan = plan_of(saved, present=fake_inventory(4), policy=EXACT)
    assert [problem.affects for problem in plan.refused] == [("a", "c"), ("b",)]


def test_a_mesh_that_does_not_fit_beside_another_problem_is_no_mesh_mismatch():
    """The error is of the class that covers both."""
    saved = manifest_of({"a": array(on(MESH)), "b": array(None)})
    plan = plan_of(saved, {"a": wanted(), "b": wanted(shape=(1,))}, present=fake_inventory(4), policy=EXACT)
    with pytest.raises(RestoreRefusedError) as error:
        plan.raise_if_refused()
    assert type(error.value) is RestoreRefusedError
    assert [problem.about for problem in error.value.problems] == ["mesh", "leaf"]


def test_a_fallback_sharding_takes_what_does_not_fit():
    """And the plan says why; what fits stays on its mesh."""
    half = mesh_of(HALF)
    saved = manifest_of({"a": array(on(MESH, "d")), "b": array(SingleDeviceRecord(device_id=0))})
    plan = plan_of(saved, present=fake_inventory(4), fallback=AsFallback())
    assert plan.refused == ()
    assert plan.by_path[path("a")].placement == AsFallback()
    assert plan.by_path[path("a")].rule == "fallback"
    assert plan.by_path[path("a")].notes == ("cannot rebuild mesh (d=2 explicit, m=4 explicit) on 4 devices",)
    assert plan.by_path[path("b")].rule == "one device"
    fitting = plan_of(manifest_of({"a": array(on(half, "d"))}), fallback=AsFallback())
    assert only(fitting).rule == "recorded"


# 4. One device, and uncommitted.


@pytest.mark.parametrize(
    ("recorded", "present", "device_id", "notes"),
    [
        pytest.param(SingleDeviceRecord(device_id=3, platform="cpu"), HERE, 3, (), id="on that device if it is here"),
        pytest.param(SingleDeviceRecord(device_id=3), HERE, 3, (), id="on that device, of a platform unknown"),
        pytest.param(
            SingleDeviceRecord(device_id=3, platform="cpu"),
            fake_inventory(2),
            None,
            ("cpu:3 is not present; placed on the default device",),
            id="on the default device if it is not here",
        ),
        pytest.param(
            SingleDeviceRecord(device_id=0, platform="cuda"),
            HERE,
            None,
            ("cuda:0 is not present; placed on the default device",),
            id="on the default device if its platform is not here",
        ),
    ],
)
def test_an_array_recorded_on_one_device_is_committed(recorded, present, device_id, notes):
    """Neither the mesh that was passed nor the context's takes it."""
    outcome = only(plan_of(manifest_of({"w": array(recorded)}), present=present, mesh=MESH, context=mesh_of({"x": 8})))
    assert outcome.placement == OnDevice(device_id=device_id, memory_kind="device")
    assert outcome.rule == "one device"
    assert outcome.notes == notes


def test_an_array_recorded_on_one_device_is_held_by_each_of_several_processes():
    """Committed to one process's device it would be out of reach of the others; the plan says so."""
    recorded = array(SingleDeviceRecord(device_id=3, platform="cpu"))
    outcome = only(plan_of(manifest_of({"w": recorded}), present=fake_inventory(4, processes=2)))
    assert outcome.placement == Uncommitted(memory_kind="device")
    assert outcome.rule == "one device"
    assert outcome.notes == ("recorded on one device; each of several processes holds it, uncommitted",)


ONE = mesh_of({"d": 1})


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(SingleDeviceRecord(device_id=0, platform="cpu"), id="on one device"),
        pytest.param(SingleDeviceRecord(device_id=77, platform="cuda"), id="on a device that is not here"),
        pytest.param(on(ONE), id="on a mesh of one device"),
    ],
)
def test_an_uncommitted_array_is_uncommitted_again(sharding):
    """Wherever it lay: the plan names no device, and says nothing of the one that is gone."""
    outcome = only(plan_of(manifest_of({"w": array(sharding, committed=False)}), mesh=MESH))
    assert outcome.placement == Uncommitted(memory_kind="device")
    assert (outcome.rule, outcome.notes) == ("uncommitted", ())


# 5. Nothing was recorded.


@pytest.mark.parametrize(
    ("recorded", "target", "placement", "rule", "notes"),
    [
        pytest.param(
            array(None),
            None,
            OnHost(type="np.ndarray"),
            "host",
            ("no sharding was recorded; restored to the host",),
            id="an array without a sharding comes to the host",
        ),
        pytest.param(
            array(None, dtype="uint32", prng=PrngRecord(impl="rbg", key_shape=(4,))),
            None,
            Uncommitted(memory_kind="device"),
            "uncommitted",
            ("no sharding was recorded; the keys are uncommitted",),
            id="keys cannot be on the host",
        ),
        pytest.param(
            ValueRecord(type="np.ndarray", dtype="float32", shape=(8, 8)),
            None,
            OnHost(type="np.ndarray"),
            "host",
            (),
            id="a NumPy array stays one",
        ),
        pytest.param(
            ValueRecord(type="int", dtype="int64"), None, OnHost(type="int"), "host", (), id="an int stays one"
        ),
        pytest.param(ValueRecord(type="str"), None, OnHost(type="str"), "host", (), id="a text stays one"),
        pytest.param(
            ValueRecord(type="int", dtype="int64"),
            wanted(shape=(), dtype="int64"),
            OnHost(type="np.ndarray"),
            "host",
            (),
            id="an int into a shape and a dtype becomes a NumPy array",
        ),
        pytest.param(
            array(on(MESH, "d")),
            wanted(value_type="np.ndarray"),
            OnHost(type="np.ndarray"),
            "host",
            (),
            id="an array on a mesh into a NumPy array comes to the host",
        ),
        pytest.param(
            array(on(MESH), shape=()),
            TargetRecord(value_type="float"),
            OnHost(type="float"),
            "host",
            (),
            id="a scalar array into a float comes to the host",
        ),
    ],
)
def test_a_value_on_the_host(recorded, target, placement, rule, notes):
    """Of the type that the target has, else of the recorded one."""
    outcome = only(plan_of(manifest_of({"w": recorded}), None if target is None else {"w": target}))
    assert (outcome.placement, outcome.rule, outcome.notes) == (placement, rule, notes)


def test_a_numpy_leaf_goes_where_an_abstract_target_says():
    """A checkpoint of NumPy arrays can be restored onto a mesh."""
    saved = manifest_of({"w": ValueRecord(type="np.ndarray", dtype="float32", shape=(8, 8))})
    placement = only(plan_of(saved, {"w": wanted(on(abstract(MESH), "d"))})).placement
    assert placement.mesh == planned(mesh=dataclasses.replace(MESH, device_ids=None), source="new")


# Memory kinds.

TPU = fake_inventory(8, platform="tpu", memory_kinds=("device", "pinned_host", "unpinned_host"))
OLD_CPU = fake_inventory(8, memory_kinds=("unpinned_host",), default_memory_kind="unpinned_host")


@pytest.mark.parametrize(
    ("kind", "saved_on", "present", "policy", "lands", "notes"),
    [
        pytest.param("pinned_host", HERE, HERE, None, "pinned_host", (), id="the recorded kind is kept"),
        pytest.param("unpinned_host", HERE, HERE, None, "unpinned_host", (), id="a kind that is no default is kept"),
        pytest.param(None, HERE, HERE, None, "device", (), id="a kind left to the platform is its default"),
        pytest.param(
            "unpinned_host",
            OLD_CPU,
            TPU,
            None,
            "device",
            (),
            id="the default of one platform is the default of another",
        ),
        pytest.param("device", TPU, OLD_CPU, None, "unpinned_host", (), id="and the other way round"),
        pytest.param(
            "pinned_host",
            HERE,
            OLD_CPU,
            None,
            "unpinned_host",
            ("cpu has no pinned_host memory; restored to unpinned_host",),
            id="a kind that is not here becomes the default, noted",
        ),
        pytest.param("unpinned_host", None, HERE, None, "unpinned_host", (), id="a kind is kept without an inventory"),
        pytest.param(
            "device", HERE, HERE, RestorePolicy(memory_kind="pinned_host"), "pinned_host", (), id="the policy's kind"
        ),
    ],
)
@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(lambda kind: array(on(mesh_of(platform=None), "d", kind=kind)), id="on a mesh"),
        pytest.param(lambda kind: array(SingleDeviceRecord(device_id=0, memory_kind=kind)), id="on one device"),
        pytest.param(
            lambda kind: array(SingleDeviceRecord(device_id=0, memory_kind=kind), committed=False), id="uncommitted"
        ),
    ],
)
def test_a_memory_kind(kind, saved_on, present, policy, lands, notes, sharding):
    """Always named in the plan, never left to an upstream default."""
    outcome = only(plan_of(manifest_of({"w": sharding(kind)}, saved_on), present=present, policy=policy))
    if isinstance(outcome.placement, Uncommitted):
        # JAX has no uncommitted array elsewhere: a plan that would need one says so.
        if lands != present.default_memory_kind:
            notes = (
                *notes,
                f"uncommitted, so in {present.default_memory_kind} memory, not {lands}",
            )
        lands = present.default_memory_kind
    assert outcome.placement.memory_kind == lands
    assert outcome.notes == notes


@pytest.mark.parametrize(
    ("targets", "policy", "could_not"),
    [
        pytest.param(
            None,
            RestorePolicy(memory_kind="hbm"),
            "cannot restore into memory kind 'hbm', which the policy names",
            id="of the policy",
        ),
        pytest.param(
            {"w": wanted(on(abstract(MESH), "d", kind="hbm"))},
            None,
            "cannot restore into memory kind 'hbm', which the target names",
            id="of the target",
        ),
    ],
)
def test_a_memory_kind_that_was_asked_for_and_is_not_here_is_refused(targets, policy, could_not):
    """What was recorded may fall back, what was asked for may not."""
    problem = refused(plan_of(targets=targets, policy=policy))
    assert problem.could_not == could_not
    assert problem.present == "cpu devices with device, pinned_host, unpinned_host"


# Axes by other names.


@pytest.mark.parametrize(
    ("renames", "mesh", "partitions"),
    [
        pytest.param({"m": "x"}, mesh_of({"d": 2, "x": 4}), ("d", "x"), id="one axis has another name"),
        pytest.param({"d": "m", "m": "d"}, mesh_of({"d": 4, "m": 2}), ("m", "d"), id="two axes swap names"),
        pytest.param({"m": None}, mesh_of({"d": 8}), ("d", None), id="an axis is dropped"),
        pytest.param({"d": None, "m": None}, mesh_of({"z": 8}), (None, None), id="every axis is dropped"),
    ],
)
def test_recorded_axes_are_called_otherwise_on_a_mesh_that_was_passed(renames, mesh, partitions):
    """The spec follows, and the plan says so."""
    outcome = only(plan_of(mesh=mesh, policy=RestorePolicy(rename_axes=renames)))
    assert outcome.placement == OnMesh(
        mesh=planned(mesh, "given", MESH), spec=SpecRecord(partitions=partitions), memory_kind="device"
    )
    assert [(change.kind, change.text) for change in outcome.changes] == [
        ("axes renamed", f"P('d', 'm') -> {SpecRecord(partitions=partitions)}")
    ]


@pytest.mark.parametrize(
    ("partitions", "renamed"),
    [
        pytest.param((("d", "m"),), (("d", "x"),), id="one of two axes of a dimension"),
        pytest.param((("m", "d"), None), (("x", "d"), None), id="their order and the length of the spec stay"),
        pytest.param((None, "m"), (None, "x"), id="the second dimension"),
        pytest.param(("d",), ("d",), id="a spec that does not name the axis"),
        pytest.param((), (), id="an empty spec"),
    ],
)
def test_a_spec_of_renamed_axes(partitions, renamed):
    """Verbatim but for the name."""
    saved = manifest_of({"w": array(on(MESH, *partitions), (8, 8))})
    placement = only(
        plan_of(saved, mesh=mesh_of({"d": 2, "x": 4}), policy=RestorePolicy(rename_axes={"m": "x"}))
    ).placement
    assert placement.spec == SpecRecord(partitions=renamed)


@pytest.mark.parametrize(
    ("renames", "partitions", "expected"),
    [
        pytest.param({"m": None}, (("d", "m"),), ("d",), id="the other axis of its dimension stays"),
        pytest.param({"d": None, "m": None}, (("d", "m"),), (None,), id="with both the dimension is whole"),
        pytest.param({"m": None}, ("m", "d"), (None, "d"), id="a dimension of its own is whole"),
    ],
)
def test_a_dropped_axis_splits_nothing(renames, partitions, expected):
    """Arrays are whole along the dimensions that it split; where the mesh is rebuilt it stays an axis of it."""
    saved = manifest_of({"w": array(on(MESH, *partitions))})
    placement = only(plan_of(saved, policy=RestorePolicy(rename_axes=renames))).placement
    assert placement.spec == SpecRecord(partitions=expected)
    assert placement.mesh == planned(MESH, "recorded devices", MESH)


def test_reduced_axes_are_renamed_too():
    """And stay sorted."""
    saved = manifest_of({"w": array(on(mesh_of({"a": 2, "b": 2, "d": 2}), "d", reduced=("a", "b")), (8,))})
    placement = only(plan_of(saved, policy=RestorePolicy(rename_axes={"a": "z"}))).placement
    assert placement.spec == SpecRecord(partitions=("d",), reduced=("b", "z"))


def test_a_rebuilt_mesh_has_the_new_names():
    """On its recorded devices; without `mesh=` the names are the caller's all the same."""
    placement = only(plan_of(policy=RestorePolicy(rename_axes={"m": "model"}))).placement
    renamed = mesh_of({"d": 2, "model": 4})
    assert placement.mesh == planned(renamed, "recorded devices", MESH)


@pytest.mark.parametrize(
    ("context", "renames"),
    [
        pytest.param(mesh_of({"data": 2, "m": 4}), {"d": "data"}, id="under the new names"),
        pytest.param(mesh_of({"d": 8}), {"m": None}, id="without an axis that is dropped"),
    ],
)
def test_a_context_mesh_takes_renamed_axes(context, renames):
    """It need have only what the policy leaves."""
    assert only(plan_of(context=context, policy=RestorePolicy(rename_axes=renames))).placement.mesh.source == "context"


def test_an_abstract_target_of_renamed_axes_is_on_the_recorded_devices():
    """The recorded mesh is the same one under another name."""
    turned = mesh_of(ids=range(7, -1, -1))
    saved = manifest_of({"w": array(on(turned, "d"))})
    target = wanted(on(abstract(mesh_of({"data": 2, "m": 4})), "data"))
    placement = only(plan_of(saved, {"w": target}, policy=RestorePolicy(rename_axes={"d": "data"}))).placement
    assert placement.mesh == planned(mesh_of({"data": 2, "m": 4}, ids=turned.device_ids), "recorded devices")


def test_types_go_by_recorded_names_too():
    """Every field of a policy does."""
    policy = RestorePolicy(rename_axes={"m": "model"}, axis_types={"m": "auto"})
    assert only(plan_of(policy=policy)).placement.mesh.mesh == mesh_of({"d": 2, "model": 4}, ("explicit", "auto"))


# Specs by name.

BY_NAME = RestorePolicy(rules=[("w", SpecRecord(partitions=("d",)))])
STOCK = manifest_of({"v": array(None), "w": array(None)})


@pytest.mark.parametrize(
    ("saved", "options", "mesh"),
    [
        pytest.param(
            STOCK, {"mesh": mesh_of({"d": 8})}, planned(mesh_of({"d": 8}), "given"), id="the mesh that was passed"
        ),
        pytest.param(
            STOCK, {"context": mesh_of({"d": 8})}, planned(mesh_of({"d": 8}), "context"), id="the mesh of jax.set_mesh"
        ),
        pytest.param(
            manifest_of({"v": array(on(MESH)), "w": array(None)}),
            {},
            planned(MESH, "recorded devices", MESH),
            id="the only recorded mesh",
        ),
        pytest.param(
            manifest_of({"v": array(on(MESH)), "w": array(None)}),
            {"present": fake_inventory(4)},
            planned(
                dataclasses.replace(mesh_of({"d": 1, "m": 4}), device_ids=None), "new", MESH, present=fake_inventory(4)
            ),
            id="the only recorded mesh, resized",
        ),
        pytest.param(
            STOCK,
            {"targets": {"v": wanted(on(mesh_of({"d": 4})), concrete=True), "w": wanted()}},
            planned(mesh_of({"d": 4}), "target"),
            id="the only mesh of the target",
        ),
        pytest.param(
            STOCK,
            {"targets": {"v": wanted(on(abstract(mesh_of({"d": 4})))), "w": wanted()}},
            planned(dataclasses.replace(mesh_of({"d": 4}), device_ids=None), "new"),
            id="the only mesh of the target, made concrete",
        ),
        pytest.param(
            manifest_of({"v": array(None), "w": array(on(MESH, "m"))}),
            {"mesh": mesh_of({"d": 8})},
            planned(mesh_of({"d": 8}), "given"),
            id="the mesh that was passed, which the recorded spec does not fit",
        ),
        pytest.param(
            manifest_of({"v": array(None), "w": ValueRecord(type="np.ndarray", shape=(8, 8), dtype="float32")}),
            {"mesh": mesh_of({"d": 8})},
            planned(mesh_of({"d": 8}), "given"),
            id="the mesh that was passed, for a NumPy array",
        ),
        pytest.param(
            manifest_of({"v": array(None), "w": array(SingleDeviceRecord(device_id=0))}),
            {"mesh": mesh_of({"d": 8})},
            planned(mesh_of({"d": 8}), "given"),
            id="the mesh that was passed, for an array of one device",
        ),
    ],
)
def test_a_spec_by_name_is_placed_on(saved, options, mesh):
    """For an array without a usable spec whose name it is found in; others are as without it."""
    plan = plan_of(saved, policy=BY_NAME, **options)
    assert plan.refused == ()
    outcome = plan.by_path[path("w")]
    assert (outcome.rule, outcome.placement) == (
        "rules",
        OnMesh(mesh=mesh, spec=SpecRecord(partitions=("d",)), memory_kind="device"),
    )
    assert plan.by_path[path("v")].rule != "rules"


@pytest.mark.parametrize(
    ("leaf", "options", "rule"),
    [
        pytest.param(array(on(MESH, "m")), {"mesh": MESH}, "recorded", id="whose recorded spec fits"),
        pytest.param(
            array(None), {"targets": {"w": wanted(on(MESH), concrete=True)}}, "target", id="that the target places"
        ),
        pytest.param(
            array(None),
            {"targets": {"w": wanted(on(abstract(MESH)))}},
            "target's abstract mesh",
            id="that the target places on an abstract mesh",
        ),
        pytest.param(
            array(None),
            {"targets": {"w": wanted(value_type="np.ndarray")}, "mesh": MESH},
            "host",
            id="that becomes NumPy",
        ),
        pytest.param(ValueRecord(type="int", dtype="int64"), {"mesh": MESH}, "host", id="that is a Python number"),
        pytest.param(ValueRecord(type="str"), {"mesh": MESH}, "host", id="that is a text"),
    ],
)
def test_a_spec_by_name_is_not_for_a_leaf(leaf, options, rule):
    """Rules come last, and are for arrays."""
    assert only(plan_of(manifest_of({"w": leaf}), policy=BY_NAME, **options)).rule == rule


@pytest.mark.parametrize(
    ("saved", "options", "could_not"),
    [
        pytest.param(
            STOCK, {}, "cannot place P('d'), of rules 'w': there is no mesh to place it on", id="where there is no mesh"
        ),
        pytest.param(
            manifest_of({"u": array(on(MESH)), "v": array(on(mesh_of({"d": 8}))), "w": array(None)}),
            {},
            "cannot place P('d'), of rules 'w': there are 2 meshes to choose from",
            id="where there are two",
        ),
        pytest.param(
            STOCK,
            {"mesh": mesh_of({"x": 8})},
            "cannot place P('d'), of rules 'w': the mesh has no axis 'd'",
            id="where the mesh lacks its axes",
        ),
    ],
)
def test_a_spec_by_name_is_refused(saved, options, could_not):
    """By leaf name."""
    plan = plan_of(saved, policy=BY_NAME, **options)
    assert [(problem.could_not, problem.affects) for problem in plan.refused] == [(could_not, ("w",))]


def test_a_spec_by_name_is_whole_where_the_mesh_does_not_divide():
    """As a recorded one."""
    saved = manifest_of({"w": array(None, (7, 8))})
    outcome = only(plan_of(saved, mesh=MESH, policy=BY_NAME))
    assert outcome.placement.spec == SpecRecord(partitions=(None,))
    assert outcome.notes == ("whole along dimension 0 of (7, 8), which d=2 does not divide",)


# Everything on the host.


@pytest.mark.parametrize(
    ("leaf", "type_", "notes"),
    [
        pytest.param(array(on(MESH, "d", "m")), "np.ndarray", (), id="an array on a mesh"),
        pytest.param(array(on(MESH, "d", kind="pinned_host")), "np.ndarray", (), id="an array in pinned memory"),
        pytest.param(
            array(on(mesh_of({"x": 512}), "x"), (512,)), "np.ndarray", (), id="an array on devices that are gone"
        ),
        pytest.param(array(SingleDeviceRecord(device_id=77)), "np.ndarray", (), id="an array on a device that is gone"),
        pytest.param(array(None), "np.ndarray", (), id="an array of which nothing was recorded"),
        pytest.param(
            array(on(MESH, unreduced=("m",), unreduced_kind="sum")), "np.ndarray", (), id="a pending reduction"
        ),
        pytest.param(KEYS, "np.ndarray", ("key<threefry2x32> as its data, uint32",), id="keys, as their data"),
        pytest.param(ValueRecord(type="int", dtype="int64"), "int", (), id="a Python number"),
        pytest.param(ValueRecord(type="str"), "str", (), id="a text"),
    ],
)
@pytest.mark.parametrize("policy", [RestorePolicy(arrays="numpy"), RestorePolicy(arrays="numpy", topology="exact")])
def test_as_numpy_every_leaf_is_a_value_on_the_host(leaf, type_, notes, policy):
    """No device is touched, whichever were recorded; 64 bits need no `jax_enable_x64`."""
    outcome = only(
        plan_of(manifest_of({"w": leaf}, fake_inventory(512)), present=fake_inventory(1), policy=policy, x64=False)
    )
    assert (outcome.placement, outcome.rule, outcome.notes) == (OnHost(type=type_), "host", notes)


def test_as_numpy_a_target_still_says_shapes_and_dtypes():
    """Its shardings do not count."""
    target = wanted(on(mesh_of({"x": 8}), "x"), concrete=True, dtype="bfloat16")
    outcome = only(plan_of(targets={"w": target}, policy=RestorePolicy(arrays="numpy")))
    assert (outcome.placement, outcome.dtype) == (OnHost(type="np.ndarray"), "bfloat16")
    problem = refused(plan_of(targets={"w": wanted(shape=(1,))}, policy=RestorePolicy(arrays="numpy")))
    assert problem.could_not == "cannot restore shape (8, 8) into shape (1,)"


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_sixty_four_bits_need_x64(dtype):
    """A `jax.Array` could not hold them; on the host they need nothing, nor do they where a target wants fewer."""
    saved = manifest_of({"w": array(on(MESH, "d"), dtype=dtype)})
    assert refused(plan_of(saved, x64=False)).could_not == f"cannot hold {dtype} in a jax.Array"
    half = dtype.replace("64", "32").replace("128", "64")
    assert only(plan_of(saved, x64=True)).dtype is None
    narrow = plan_of(saved, {"w": wanted(dtype=half)}, x64=False, policy=RestorePolicy(cast="unsafe"))
    assert only(narrow).dtype == half
    on_host = plan_of(saved, {"w": wanted(dtype=dtype, value_type="np.ndarray")}, x64=False)
    assert only(on_host).rule == "host"


# Shapes, dtypes and leaves that do not fit the target.


@pytest.mark.parametrize(
    ("saved", "target", "cast", "dtype"),
    [
        pytest.param("float32", "float32", "never", None, id="the same dtype needs no cast"),
        pytest.param("float32", None, "never", None, id="a target of any dtype needs no cast"),
        pytest.param("float32", "bfloat16", "same_kind", "bfloat16", id="float to bfloat"),
        pytest.param("bfloat16", "float8_e4m3fn", "same_kind", "float8_e4m3fn", id="bfloat to an eight-bit float"),
        pytest.param("int8", "int64", "same_kind", "int64", id="signed to wider signed"),
        pytest.param("int64", "int8", "unsafe", "int8", id="signed to narrower signed, unsafe"),
        pytest.param("uint8", "uint32", "same_kind", "uint32", id="unsigned to unsigned"),
        pytest.param("complex128", "complex64", "same_kind", "complex64", id="complex to complex"),
        pytest.param("float32", "int32", "unsafe", "int32", id="float to int, unsafe"),
        pytest.param("float32", "bfloat16", "never", "refused", id="float to bfloat, never"),
        pytest.param("float32", "int32", "same_kind", "refused", id="float to int"),
        pytest.param("int32", "float32", "same_kind", "refused", id="int to float"),
        pytest.param("int32", "uint32", "same_kind", "refused", id="signed to unsigned"),
        pytest.param("bool", "int8", "same_kind", "refused", id="bool to int"),
        pytest.param("complex64", "float32", "same_kind", "refused", id="complex to float"),
        pytest.param("float32", "complex64", "same_kind", "refused", id="float to complex"),
    ],
)
def test_a_dtype_is_cast(saved, target, cast, dtype):
    """Within a kind, unless the policy says otherwise."""
    plan = plan_of(
        manifest_of({"w": array(on(MESH, "d"), dtype=saved)}),
        {"w": wanted(dtype=target)},
        policy=RestorePolicy(cast=cast),
    )
    if dtype == "refused":
        assert refused(plan).could_not == f"cannot cast {saved} to {target} with cast={cast!r}"
    else:
        assert only(plan).dtype == dtype


@pytest.mark.parametrize(
    ("recorded", "target", "could_not"),
    [
        pytest.param(KEYS, TargetRecord(shape=(8,), prng_impl="threefry2x32"), None, id="the same implementation"),
        pytest.param(KEYS, TargetRecord(), None, id="a target that asks for nothing"),
        pytest.param(
            KEYS,
            TargetRecord(shape=(8,), prng_impl="rbg"),
            "cannot restore key<threefry2x32> as key<rbg>",
            id="another implementation",
        ),
        pytest.param(
            KEYS,
            TargetRecord(shape=(8,), dtype="uint32"),
            "cannot restore key<threefry2x32> as uint32",
            id="keys as numbers",
        ),
        pytest.param(
            array(on(MESH), (8,), dtype="uint32"),
            TargetRecord(shape=(8,), prng_impl="rbg"),
            "cannot restore uint32 as key<rbg>",
            id="numbers as keys",
        ),
        pytest.param(
            KEYS,
            TargetRecord(value_type="int"),
            "cannot restore key<threefry2x32> as int",
            id="keys as a Python number",
        ),
    ],
)
@pytest.mark.parametrize("cast", ["same_kind", "unsafe"])
def test_keys_come_back_as_keys_of_their_implementation(recorded, target, could_not, cast):
    """No cast makes other keys of them."""
    plan = plan_of(manifest_of({"w": recorded}), {"w": target}, policy=RestorePolicy(cast=cast))
    if could_not is None:
        assert only(plan).dtype is None
    else:
        assert refused(plan).could_not == could_not


@pytest.mark.parametrize(
    ("recorded", "target", "strict", "could_not"),
    [
        pytest.param(array(None), wanted(), True, None, id="the saved shape"),
        pytest.param(array(None), wanted(shape=None), True, None, id="a target of any shape"),
        pytest.param(
            array(None), wanted(shape=(8, 4)), True, "cannot restore shape (8, 8) into shape (8, 4)", id="another shape"
        ),
        pytest.param(
            array(None), wanted(shape=(64,)), True, "cannot restore shape (8, 8) into shape (64,)", id="another rank"
        ),
        pytest.param(array(on(MESH)), wanted(shape=(8, 4)), False, None, id="another shape without strictness"),
        pytest.param(
            array(None),
            wanted(shape=(8, 4)),
            False,
            "cannot restore shape (8, 8) into shape (8, 4)",
            id="another shape on the host, where nothing is cut",
        ),
        pytest.param(
            array(on(MESH)),
            wanted(shape=(64,)),
            False,
            "cannot restore shape (8, 8) into shape (64,)",
            id="another rank without strictness",
        ),
        pytest.param(
            ValueRecord(type="np.ndarray", dtype="float32", shape=(3,)),
            wanted(shape=(4,)),
            True,
            "cannot restore shape (3,) into shape (4,)",
            id="another shape of a NumPy array",
        ),
        pytest.param(
            ValueRecord(type="float", dtype="float32"),
            wanted(shape=(1,)),
            True,
            "cannot restore shape () into shape (1,)",
            id="a number into an array of one element",
        ),
        pytest.param(
            KEYS,
            TargetRecord(shape=(8, 2), prng_impl="threefry2x32"),
            True,
            "cannot restore shape (8,) into shape (8, 2)",
            id="the shape of the key data instead of that of the keys",
        ),
    ],
)
def test_a_shape(recorded, target, strict, could_not):
    """Must be the saved one."""
    plan = plan_of(manifest_of({"w": recorded}), {"w": target}, strict=strict)
    if could_not is None:
        assert plan.refused == ()
    else:
        assert refused(plan).could_not == could_not


@pytest.mark.parametrize(
    ("recorded", "target"),
    [
        pytest.param(array(on(MESH, "d")), TargetRecord(value_type="int"), id="an array of 64 elements into an int"),
        pytest.param(array(on(MESH), ()), TargetRecord(value_type="str"), id="a number into a text"),
        pytest.param(ValueRecord(type="str"), TargetRecord(value_type="float"), id="a text into a float"),
        pytest.param(
            ValueRecord(type="str"), wanted(on(abstract(MESH)), shape=()), id="a text into an array on a mesh"
        ),
        pytest.param(ValueRecord(type="str"), wanted(shape=()), id="a text into an array"),
        pytest.param(
            ValueRecord(type="float", dtype="float64"), TargetRecord(value_type="int"), id="a float into an int"
        ),
    ],
)
def test_a_value_that_its_target_cannot_hold_is_refused(recorded, target):
    """In the plan, before anything is read; never a bare `ValueError` from half-way through, never a lossy cast."""
    plan = plan_of(manifest_of({"w": recorded}), {"w": target})
    assert refused(plan).affects == ("w",)


def test_a_policy_for_an_axis_that_no_recorded_mesh_has_is_refused():
    """A misspelt axis would change nothing, silently; where no mesh is recorded there is nothing to change."""
    policy = RestorePolicy(axis_types={"d": "auto", "mdoel": "auto"})
    (problem,) = plan_of(policy=policy).refused
    assert problem.could_not == "cannot follow axis_types: no recorded mesh has an axis 'mdoel'"
    assert problem.recorded == "mesh axes 'd', 'm'"
    assert plan_of(manifest_of({"w": array(None)}), policy=policy).refused == ()


def test_missing_and_extra_leaves_are_listed():
    """Those that fit are placed all the same, so that the plan can be read."""
    saved = manifest_of({name: array(on(MESH)) for name in ("a", "b", "c", "d")})
    plan = plan_of(saved, {"a": wanted(), "x": wanted(), "y": wanted()})
    assert [path_text(outcome.path) for outcome in plan.outcomes] == ["a", "x", "y"]
    assert [path_text(outcome.path) for outcome in placed(plan)] == ["a"]
    assert {problem.could_not: problem.affects for problem in plan.refused} == {
        "cannot restore into a target that lacks saved leaves": ("b", "c", "d"),
        "cannot restore leaves of the target that the checkpoint lacks": ("x", "y"),
    }


def test_leaves_are_counted_among_those_of_their_own_side():
    """Saved ones among the saved, wanted ones among the wanted: never 4 of 1 leaves."""
    saved = manifest_of({name: array(on(MESH)) for name in "abcde"})
    plan = plan_of(saved, {"x": wanted()})
    assert [(len(problem.affects), problem.of) for problem in plan.refused] == [(5, 5), (1, 1)]


def test_leaves_are_matched_by_the_text_of_their_keys():
    """A class that was saved by its attributes may come back into a dict, and int keys into text, as in stock Orbax."""
    saved = Manifest(
        tree=ContainerRecord(
            kind="namedtuple",
            keys=(Key("attr", "mu"),),
            children=(ContainerRecord(kind="list", keys=(Key("index", 0),), children=(array(on(MESH)),)),),
            module="m",
            qualname="C",
        ),
        inventory=HERE,
    )
    wanted_path = (Key("dict", "mu"), Key("dict", "0"))
    outcome = only(plan_from_records(saved, {wanted_path: wanted()}, HERE))
    assert (outcome.path, outcome.source) == (wanted_path, (Key("attr", "mu"), Key("index", 0)))


def test_every_refusal_of_a_restore_comes_at_once():
    """Shapes, dtypes, meshes, missing leaves: one error."""
    saved = manifest_of({"a": array(on(MESH)), "b": array(on(MESH)), "c": array(on(MESH)), "d": array(on(MESH))})
    targets = {
        "a": wanted(shape=(1,)),
        "b": wanted(dtype="int8"),
        "c": wanted(on(abstract(mesh_of({"x": 16})))),
        "e": wanted(),
    }
    plan = plan_of(saved, targets)
    assert sorted((problem.could_not, problem.affects) for problem in plan.refused) == [
        ("cannot cast float32 to int8 with cast='same_kind'", ("b",)),
        ("cannot resolve the target's mesh (x=16 explicit): it has 16 devices", ("c",)),
        ("cannot restore into a target that lacks saved leaves", ("d",)),
        ("cannot restore leaves of the target that the checkpoint lacks", ("e",)),
        ("cannot restore shape (8, 8) into shape (1,)", ("a",)),
    ]


def test_a_leaf_with_two_problems_is_listed_under_both():
    """Or the second one comes as a surprise once the first is mended."""
    plan = plan_of(targets={"w": wanted(shape=(1,), dtype="int8")})
    assert [problem.affects for problem in plan.refused] == [("w",), ("w",)]
    (outcome,) = plan.outcomes
    assert outcome.placement == NotPlaced(problems=(0, 1))
    assert plan.problems_of(outcome) == plan.refused


# Specs that do not fit a mesh.

STRICT = RestorePolicy(indivisible="error")


def test_a_dimension_that_a_mesh_does_not_divide_is_refused():
    """By leaf name, with the shape, the spec and the mesh."""
    saved = manifest_of({"v": array(on(MESH, "m"), (8, 4)), "w": array(on(mesh_of({"m": 2}), "m"), (6, 4))})
    plan = plan_of(saved, mesh=mesh_of({"m": 4}), policy=STRICT)
    assert [path_text(outcome.path) for outcome in placed(plan)] == ["v"]
    (problem,) = plan.refused
    assert problem.could_not == "cannot split a dimension of length 6 over m=4"
    assert (problem.present, problem.affects, problem.of) == ("mesh (m=4 explicit)", ("w",), 2)


def test_a_dimension_is_divided_by_all_its_axes_together():
    """Over two axes of sizes 2 and 4 into 8."""
    saved = manifest_of({"w": array(on(mesh_of({"d": 1, "m": 4}), ("d", "m")), (4, 4))})
    problem = refused(plan_of(saved, mesh=MESH, policy=STRICT))
    assert problem.could_not == "cannot split a dimension of length 4 over d=2 x m=4"


@pytest.mark.parametrize(
    ("shape", "partitions", "placed_as", "notes"),
    [
        pytest.param((8, 8), ("d", "m"), ("d", "m"), (), id="both divided, both split"),
        pytest.param(
            (6, 6),
            ("d", "m"),
            ("d", None),
            ("whole along dimension 1 of (6, 6), which m=4 does not divide",),
            id="the one that is not divided is whole, the other stays split",
        ),
        pytest.param(
            (3, 6),
            ("d", "m"),
            (None, None),
            (
                "whole along dimension 0 of (3, 6), which d=2 does not divide",
                "whole along dimension 1 of (3, 6), which m=4 does not divide",
            ),
            id="neither divided, both whole",
        ),
        pytest.param(
            (4, 4),
            (("d", "m"),),
            (None,),
            ("whole along dimension 0 of (4, 4), which d=2 x m=4 does not divide",),
            id="over two axes together, whole over both",
        ),
    ],
)
def test_a_dimension_that_a_mesh_does_not_divide_is_whole(shape, partitions, placed_as, notes):
    """And the plan says along which, and why; a spec keeps its length."""
    saved = manifest_of({"w": array(on(mesh_of({"d": 1, "m": 1}), *partitions), shape)})
    outcome = only(plan_of(saved, mesh=MESH))
    assert outcome.placement.spec == SpecRecord(partitions=placed_as)
    assert [(change.kind, change.text) for change in outcome.changes] == [("replicated", note) for note in notes]


def test_a_targets_own_spec_is_never_made_whole():
    """What is asked for is done or refused: `indivisible` is for specs that were recorded, or go by name."""
    problem = refused(plan_of(targets={"w": wanted(on(abstract(mesh_of({"x": 3})), "x"))}))
    assert problem.could_not == "cannot split a dimension of length 8 over x=3"
    assert "replicate" not in problem.fix


def test_a_target_spec_longer_than_its_shape_is_refused():
    """JAX would say so too, leaf after leaf."""
    saved = manifest_of({"w": array(None, (8,))})
    problem = refused(plan_of(saved, {"w": wanted(on(abstract(MESH), None, "d"), shape=(8,))}))
    assert problem.could_not == "cannot place an array of 1 dimension by P(None, 'd')"


def test_without_strictness_it_is_the_targets_shape_that_must_divide():
    """What is cut or padded has that shape."""
    target = wanted(on(abstract(MESH), "m"), shape=(6, 8))
    problem = refused(plan_of(targets={"w": target}, strict=False))
    assert problem.could_not == "cannot split a dimension of length 6 over m=4"


@pytest.mark.parametrize(
    ("types", "policy", "fits"),
    [
        pytest.param(("explicit", "auto"), None, True, id="a mesh with an auto axis takes it"),
        pytest.param(("explicit", "auto"), RestorePolicy(axis_types="explicit"), False, id="a retyped one does not"),
        pytest.param(("auto", "auto"), RestorePolicy(axis_types={"d": "explicit"}), True, id="one auto axis is enough"),
        pytest.param(None, None, True, id="a mesh without recorded types is auto"),
    ],
)
def test_an_unconstrained_dimension(types, policy, fits):
    """The compiler may only choose among auto axes."""
    saved = manifest_of({"w": array(on(mesh_of(types=types), UNCONSTRAINED, "m"), (7, 8))})
    plan = plan_of(saved, policy=policy)
    if fits:
        assert only(plan).placement.spec == SpecRecord(partitions=(UNCONSTRAINED, "m"))
    else:
        assert refused(plan).could_not == (
            "cannot place P(UNCONSTRAINED, 'm') on (d=2 explicit, m=4 explicit): an unconstrained dimension takes an auto "
            "axis"
        )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"policy": RestorePolicy(axis_types="auto")}, id="that the policy retypes"),
        pytest.param({"mesh": mesh_of(types=("explicit", "auto"))}, id="that the passed mesh types otherwise"),
    ],
)
def test_a_reduced_axis_is_refused(options):
    """JAX knows reduced axes only where they are explicit; neither a bare `ValueError` nor a dropped fact."""
    saved = manifest_of({"v": array(on(MESH, "d")), "w": array(on(MESH, "d", reduced=("m",)))})
    plan = plan_of(saved, **options)
    assert [problem.affects for problem in plan.refused] == [("w",)]
    assert [outcome.path for outcome in placed(plan)] == [path("v")]


def test_a_reduced_axis_is_kept_where_it_stays_explicit():
    """The spec is verbatim."""
    saved = manifest_of({"w": array(on(MESH, "d", reduced=("m",)))})
    plan = plan_of(saved, policy=RestorePolicy(axis_types={"d": "auto"}))
    assert only(plan).placement.spec == SpecRecord(partitions=("d",), reduced=("m",))


def test_a_recorded_pending_reduction_is_refused():
    """No save of ours writes one; a file that says so must not end in a bare `NotImplementedError`."""
    saved = manifest_of({"w": array(on(MESH, "d", unreduced=("m",), unreduced_kind="sum"))})
    assert refused(plan_of(saved)).affects == ("w",)


def test_same_axes_compares_names_sizes_and_types_but_no_devices():
    """The one notion of equality between an abstract mesh and a concrete one."""
    assert same_axes(MESH, abstract(MESH))
    assert same_axes(MESH, mesh_of(ids=range(8, 16)))
    for other in (
        mesh_of(types="auto"),
        mesh_of({"d": 4, "m": 2}),
        mesh_of({"m": 4, "d": 2}),
        mesh_of({"d": 2, "x": 4}),
    ):
        assert not same_axes(MESH, other), other


# Several processes.


@pytest.mark.parametrize(
    "restore",
    [
        pytest.param({"mesh": mesh_of({"d": 1, "m": 4})}, id="a mesh that was passed"),
        pytest.param({"context": mesh_of({"d": 1, "m": 4})}, id="the mesh of jax.set_mesh"),
        pytest.param(
            {"targets": {"w": wanted(on(mesh_of({"d": 1, "m": 4}), "d"), concrete=True)}}, id="a target's sharding"
        ),
    ],
)
def test_a_mesh_without_a_device_of_some_process_is_refused(restore):
    """That process would fail, and the others would wait for it. In one process the same mesh is as good as any."""
    problem = refused(plan_of(present=fake_inventory(4, processes=2), **restore))
    assert problem.could_not == "cannot restore onto mesh (d=1 explicit, m=4 explicit): it has no device of process 1"
    assert problem.about == "mesh"
    assert plan_of(**restore).refused == ()


def test_a_mesh_with_unequal_shares_of_the_processes_is_taken():
    """The caller said so, and every process has a part in it."""
    mesh = mesh_of({"d": 3, "m": 1}, ids=(0, 1, 2048))
    saved = manifest_of({"w": array(on(MESH, "d"), (6, 8))})
    assert only(plan_of(saved, present=fake_inventory(4, processes=2), mesh=mesh)).placement.mesh.mesh == mesh


def test_an_abstract_leaf_may_describe_keys_by_their_data():
    """As Orbax's `to_shape_dtype_struct` does: they come back as keys, as in stock Orbax."""
    like_data = TargetRecord(shape=KEYS.stored_shape, dtype=KEYS.dtype)
    for strict in (True, False):
        outcome = only(plan_of(manifest_of({"k": KEYS}), {"k": like_data}, strict=strict))
        assert (outcome.shape, outcome.dtype) == (KEYS.shape, None)
        assert outcome.notes == ("described by their data; they come back as key<threefry2x32>",)
    outcome = only(plan_of(manifest_of({"k": KEYS}), {"k": like_data}, policy=RestorePolicy(arrays="numpy")))
    assert outcome.notes == ("key<threefry2x32> as its data, uint32",)
    other = dataclasses.replace(like_data, dtype="int32")
    assert "cannot restore key<" in refused(plan_of(manifest_of({"k": KEYS}), {"k": other})).could_not


# What a hostile user found.


@pytest.mark.parametrize(
    ("device_id", "kind", "stays"),
    [
        pytest.param(3, None, True, id="on the default device"),
        pytest.param(3, "device", True, id="on the default device, in its default memory"),
        pytest.param(3, "pinned_host", False, id="in other memory"),
        pytest.param(0, None, False, id="on another device, though it is the first"),
    ],
)
def test_an_abstract_target_on_one_device_leaves_an_array_uncommitted(device_id, kind, stays):
    """Only where that is what it asks for; anything else is taken as it is."""
    saved = manifest_of({"s": array(SingleDeviceRecord(device_id=0, platform="cpu"), (), committed=False)})
    sharding = SingleDeviceRecord(device_id=device_id, platform="cpu", memory_kind=kind)
    target = TargetRecord(shape=(), dtype="float32", sharding=sharding, concrete=True)
    outcome = only(plan_of(saved, {"s": target}, default_device_ids=(3,)))
    assert outcome.placement == (Uncommitted(memory_kind="device") if stays else AsTarget(sharding=sharding))


@pytest.mark.parametrize("name", ["mesh", "context"])
def test_a_mesh_at_hand_with_manual_axes_is_refused(name):
    """No array can be placed there from outside."""
    saved = manifest_of({"w": array(on(mesh_of(types=None), "d"))})
    problem = refused(plan_of(saved, **{name: mesh_of(types=("explicit", "manual"))}))
    assert problem.could_not.endswith("manual axes exist within jax.shard_map alone")


def test_an_axis_may_take_the_name_of_one_that_is_dropped():
    """On a mesh at hand; a mesh that is rebuilt keeps both, and has no two axes of one name."""
    policy = RestorePolicy(rename_axes={"d": None, "m": "d"})
    saved = manifest_of({"w": array(on(MESH, "d", "m"))})
    for name in ("mesh", "context"):
        placement = only(plan_of(saved, policy=policy, **{name: mesh_of({"d": 8})})).placement
        assert placement.spec == SpecRecord(partitions=(None, "d"))
    assert "two of them would be called 'd'" in refused(plan_of(saved, policy=policy)).could_not


@pytest.mark.parametrize(
    ("saved", "target"),
    [("float32", "float8_e8m0fnu"), ("float8_e8m0fnu", "float32"), ("complex64", "bool")],
)
@pytest.mark.parametrize("cast", ["same_kind", "unsafe"])
def test_a_cast_that_tensorstore_lacks_is_refused(saved, target, cast):
    """Or makes wrongly; under any policy."""
    plan = plan_of(
        manifest_of({"w": array(on(MESH), dtype=saved)}), {"w": wanted(dtype=target)}, policy=RestorePolicy(cast=cast)
    )
    assert refused(plan).could_not == f"cannot cast {saved} to {target} while it is read"


def test_all_that_is_wrong_with_one_leaf_comes_at_once():
    """Its mesh and its memory kind; each of its dimensions."""
    policy = RestorePolicy(memory_kind="nope", indivisible="error")
    plan = plan_of(context=mesh_of({"x": 8}), policy=policy)
    assert [p.could_not.partition(" ")[2].partition(" ")[0] for p in plan.refused] == ["place", "restore"]
    saved = manifest_of({"w": array(on(mesh_of({"d": 1, "m": 1}), "d", "m"), (15, 6))})
    plan = plan_of(saved, mesh=MESH, policy=RestorePolicy(indivisible="error"))
    assert [p.could_not for p in plan.refused] == [
        "cannot split a dimension of length 15 over d=2",
        "cannot split a dimension of length 6 over m=4",
    ]


# What of a policy decides nothing.


def test_a_rule_that_matches_only_leaves_with_specs_of_their_own_is_noted():
    """It changes nothing; a rule that decides for one leaf needs no note."""
    saved = manifest_of({"bias": array(None), "w": array(on(MESH, "d"))})
    plan = plan_of(saved, policy=RestorePolicy(rules=[("^w$", SpecRecord()), ("bias", SpecRecord(partitions=("m",)))]))
    assert plan.by_path[path("bias")].rule == "rules"
    assert plan.notes == (
        "rules: '^w$' decides nothing: each leaf that it matches has a spec, of its own or of an earlier rule",
    )


def test_a_mesh_that_takes_no_leaf_is_noted():
    """As of a checkpoint of one device: it has no spec, and `rules` is what is missing."""
    saved = manifest_of({"w": array(SingleDeviceRecord(device_id=0, platform="cpu"))})
    note = "the mesh that was passed takes no leaf: none has a spec to place on it; rules gives specs by name"
    assert plan_of(saved, mesh=MESH).notes == (note,)
    assert plan_of(saved, mesh=MESH, policy=RestorePolicy(rules=[("", SpecRecord())])).notes == ()


def test_a_memory_kind_for_numpy_is_noted():
    """Nothing is in any memory kind then."""
    policy = RestorePolicy(arrays="numpy", memory_kind="pinned_host")
    assert plan_of(policy=policy).notes == ("memory_kind of the policy does not apply: arrays come back as NumPy",)


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        pytest.param(TargetRecord(shape=(), dtype="int8"), True, id="a narrow abstract one"),
        pytest.param(TargetRecord(shape=(), dtype="uint32", value_type="np.generic"), True, id="an unsigned NumPy one"),
        pytest.param(TargetRecord(shape=(), dtype="float32"), False, id="a float"),
        pytest.param(TargetRecord(shape=(), dtype="int8", sharding=on(abstract(MESH))), False, id="one on a mesh"),
    ],
)
def test_a_python_int_has_no_width(target, allowed):
    """It comes back in any dtype of integers; on the host, where it is seen whether it fits."""
    plan = plan_of(manifest_of({"n": ValueRecord(type="int", dtype="int64")}), {"n": target})
    assert (plan.refused == ()) == allowed
    if allowed:
        assert only(plan).dtype == target.dtype
    else:
        assert refused(plan).could_not.startswith("cannot cast int64 to ")


def test_axis_types_beside_a_mesh_that_was_passed_are_noted():
    """The mesh has its own, and the caller said so."""
    note = "axis_types of the policy do not apply: the mesh that was passed has its own"
    assert plan_of(mesh=MESH, policy=RestorePolicy(axis_types="auto")).notes == (note,)
    assert plan_of(mesh=MESH).notes == ()


def test_a_checkpoint_without_an_inventory_on_a_larger_machine_is_noted():
    """Nothing says whether its mesh was on every device then."""
    saved = manifest_of({"w": array(on(MESH, "d", "m"))}, None)
    note = "how many devices there were was not recorded: a mesh stays on its recorded ones; pass mesh= to use all"
    assert plan_of(saved, present=fake_inventory(16)).notes == (note,)
    assert plan_of(saved).notes == ()


# Properties. `strategies` has any record that is valid; those here are of runs that could have been.


# Laws, over any restore.


def result_paths(plan: RestorePlan, restore: Mapping[str, Any]) -> list[LeafPath]:
    """The leaves of the result, in tree order."""
    if restore["targets"] is not None:
        return list(restore["targets"])
    assert plan.tree is not None
    return [leaf_path for leaf_path, _ in iterate_leaves(plan.tree)]


def refused_paths(plan: RestorePlan) -> set[LeafPath]:
    """The leaves that are refused."""
    return {outcome.path for outcome in plan.outcomes if isinstance(outcome.placement, NotPlaced)}


@given(restores())
def test_every_leaf_has_one_outcome(restore):
    """In tree order, refused or not; without a target it is the recorded leaves, each once, wherever they moved."""
    plan = plan_from_records(**restore)
    assert [outcome.path for outcome in plan.outcomes] == result_paths(plan, restore)
    assert len(plan.by_path) == len(plan.outcomes)
    manifest = restore["manifest"]
    for outcome in plan.outcomes:
        assert outcome.recorded is (None if outcome.source is None else manifest.leaves[outcome.source])
        assert (outcome.rule == "refused") == isinstance(outcome.placement, NotPlaced)
        assert (outcome.rule == "kept") == isinstance(outcome.placement, Kept)
    if restore["targets"] is None:
        assert {outcome.source for outcome in plan.outcomes} == set(manifest.leaves)
        assert len(plan.outcomes) == len(manifest.leaves)
    read = {outcome.source for outcome in plan.outcomes}
    assert plan.left_out == tuple(leaf for leaf in manifest.leaves if leaf not in read)


@given(restores())
def test_refused_leaves_and_problems_point_at_each_other(restore):
    """What a problem affects are the leaves that are refused for it; or saved ones that the target lacks; or none."""
    plan = plan_from_records(**restore)
    assert len(set(plan.refused)) == len(plan.refused)
    affected: list[list[str]] = [[] for _ in plan.refused]
    for outcome in plan.outcomes:
        positions = outcome.placement.problems if isinstance(outcome.placement, NotPlaced) else ()
        assert bool(positions) == isinstance(outcome.placement, NotPlaced)
        assert len(set(positions)) == len(positions)
        assert plan.problems_of(outcome) == tuple(plan.refused[i] for i in positions)
        for i in positions:
            affected[i].append(path_text(outcome.path))
    for problem, names in zip(plan.refused, affected, strict=True):
        if problem.could_not == "cannot restore into a target that lacks saved leaves":
            assert names == []
            assert set(problem.affects) <= set(map(path_text, plan.left_out))
            assert problem.of == len(restore["manifest"].leaves)
        else:
            assert list(problem.affects) == names
            assert problem.of == (len(plan.outcomes) if names else 0)
        assert problem.could_not.startswith("cannot "), problem
        assert problem.fix, problem


def about_no_leaf(plan: RestorePlan) -> set[tuple[str, tuple[str, ...]]]:
    """The problems of a restore as a whole, and those of saved leaves that the result lacks."""
    placed_nowhere = {i for o in plan.outcomes if isinstance(o.placement, NotPlaced) for i in o.placement.problems}
    return {(p.could_not, p.affects) for i, p in enumerate(plan.refused) if i not in placed_nowhere}


@pytest.mark.parametrize(
    ("field", "stricter", "looser"),
    [
        pytest.param("topology", "exact", "adapt", id="exact and adapt"),
        pytest.param("indivisible", "error", "replicate", id="an error and whole where indivisible"),
        pytest.param("missing", "error", "keep", id="an error and kept where missing"),
        pytest.param("extra", "error", "ignore", id="an error and ignored where extra"),
        pytest.param("cast", "never", "same_kind", id="no cast and casts within a kind"),
        pytest.param("cast", "same_kind", "unsafe", id="casts within a kind and any"),
    ],
)
@given(restores())
def test_a_looser_policy_refuses_no_more(field, stricter, looser, restore):
    """And changes nothing about what the stricter one does not refuse."""
    policy = restore["policy"] or RestorePolicy()
    if field == "topology":
        # A rule takes what does not fit, and an exact mesh fits less often.
        policy = dataclasses.replace(policy, rules=())
    strict, loose = (
        plan_from_records(**{**restore, "policy": dataclasses.replace(policy, **{field: choice})})
        for choice in (stricter, looser)
    )
    assert refused_paths(loose) <= refused_paths(strict)
    assert about_no_leaf(loose) <= about_no_leaf(strict)
    for before, after in zip(strict.outcomes, loose.outcomes, strict=True):
        if not isinstance(before.placement, NotPlaced):
            assert before == after
    assert (loose.tree, loose.left_out) == (strict.tree, strict.left_out)
    if not strict.refused:
        assert loose.notes == strict.notes


def where_it_lands(outcome: Outcome, plan: RestorePlan) -> tuple[ShardingRecord | None, tuple[int, ...]]:
    """Where an outcome is, and on which devices."""
    match outcome.placement:
        case OnMesh(mesh=planned_mesh, spec=spec):
            return NamedShardingRecord(mesh=planned_mesh.mesh, spec=spec), planned_mesh.device_ids
        case AsTarget(sharding=sharding) | AsFallback(sharding=sharding):
            if isinstance(sharding, NamedShardingRecord):
                return sharding, sharding.mesh.device_ids or ()
            return sharding, () if sharding is None else (sharding.device_id,)
        case OnDevice(device_id=device_id):
            return None, plan.default_device_ids[:1] if device_id is None else (device_id,)
        case Uncommitted():
            return None, plan.default_device_ids
    return None, ()


ITEM_NBYTES = {"float32": 4, "float16": 2, "float64": 8, "int64": 8, "int8": 1, "uint32": 4, "": 0}


@given(restores())
def test_bytes_add_up(restore):
    """Over devices and memories it is what every leaf has there, worked out from shapes and specs alone."""
    plan = plan_from_records(**restore)
    landing = on_host = read = 0
    for outcome in plan.outcomes:
        if isinstance(outcome.placement, NotPlaced | Kept):
            continue
        recorded = outcome.recorded
        key_shape = recorded.prng.key_shape if isinstance(recorded, ArrayRecord) and recorded.prng else ()
        read += math.prod((*recorded.shape, *key_shape)) * ITEM_NBYTES[recorded.dtype]
        sharding, ids = where_it_lands(outcome, plan)
        shape = outcome.shape
        if isinstance(sharding, NamedShardingRecord):
            shape = tuple(length // sharding.shards_along(i) for i, length in enumerate(shape))
        nbytes = math.prod((*shape, *key_shape)) * ITEM_NBYTES[outcome.dtype or recorded.dtype]
        landing += nbytes * len(ids)
        on_host += nbytes if isinstance(outcome.placement, OnHost) else 0
    assert sum(sum(of.values()) for of in plan.bytes_by_memory.values()) == landing
    assert (plan.bytes_on_host, plan.bytes_read) == (on_host, read)
    default = restore["present"].default_memory_kind
    assert sum(plan.bytes_per_device.values()) == sum(plan.bytes_by_memory.get(default, {}).values())


@given(
    strategies.manifests(),
    strategies.inventories(),
    st.none() | strategies.meshes(abstract=False, typed=True),
    st.none() | strategies.meshes(abstract=False, typed=True),
)
def test_any_record_can_be_planned(manifest, present, mesh, context):
    """However odd: what cannot be done is refused, and never an exception."""
    plan = plan_from_records(manifest, None, present, mesh=mesh, context=context)
    assert [outcome.path for outcome in plan.outcomes] == [leaf_path for leaf_path, _ in iterate_leaves(manifest.tree)]
    count = len(placed(plan))
    assert str(plan).startswith("restore REFUSED" if plan.refused else f"restore of {count} lea")
    assert json.loads(plan.to_json())["notes"][: len(manifest.notes)] == list(manifest.notes)


@given(restores())
def test_planning_is_deterministic(restore):
    """Every process plans the same."""
    plan = plan_from_records(**restore)
    assert plan_from_records(**restore) == plan
    assert str(plan_from_records(**restore)) == str(plan)
    assert plan_from_records(**restore).to_json() == plan.to_json()


@given(manifests(recorded=True))
def test_a_plan_on_unchanged_devices_changes_nothing(manifest):
    """Mesh, spec, types, devices and memory kind as recorded; nothing is refused, and nothing needs a note."""
    plan = plan_from_records(manifest, None, manifest.inventory)
    assert plan.refused == ()
    assert list(plan.by_path) == list(manifest.leaves)
    default = manifest.inventory.default_memory_kind
    for outcome in plan.outcomes:
        leaf = outcome.recorded
        assert leaf is manifest.leaves[outcome.path]
        sharding = leaf.sharding if isinstance(leaf, ArrayRecord) else None
        assert (outcome.source, outcome.dtype) == (outcome.path, None)
        if isinstance(outcome.placement, Uncommitted):
            # JAX has no uncommitted array in another memory kind than the default one; a file may say so all the same.
            assert outcome.placement.memory_kind == default
            assert bool(outcome.notes) == (sharding.memory_kind not in (None, default))
            continue
        assert outcome.notes == ()
        if sharding is None:
            assert outcome.placement == OnHost(type=leaf.type)
        elif isinstance(sharding, SingleDeviceRecord):
            assert outcome.placement == OnDevice(
                device_id=sharding.device_id, memory_kind=sharding.memory_kind or default
            )
        else:
            assert outcome.placement == OnMesh(
                mesh=planned(mesh=sharding.mesh, source="recorded devices", recorded=sharding.mesh),
                spec=sharding.spec,
                memory_kind=sharding.memory_kind or default,
            )


@given(restores())
def test_a_plan_never_invents_axes(restore):
    """The axes of every outcome were recorded, passed, or asked for by the target or the policy; no other has another name."""
    plan = plan_from_records(**restore)
    policy = restore["policy"] or RestorePolicy()
    given_meshes = [mesh for mesh in (restore["mesh"], restore["context"]) if mesh is not None]
    for target in (restore["targets"] or {}).values():
        if isinstance(target.sharding, NamedShardingRecord):
            given_meshes.append(target.sharding.mesh)
    allowed = {(mesh.axis_names, mesh.axis_types) for mesh in given_meshes}
    specs_by_name = [rule.spec for rule in policy.rules]
    for mesh in restore["manifest"].meshes:
        types = policy.typed(mesh.axis_names, mesh.axis_types or ("auto",) * len(mesh.axis_names))
        allowed.add((tuple(policy.rename_axes.get(name) or name for name in mesh.axis_names), types))
    for outcome in placed(plan):
        if not isinstance(outcome.placement, OnMesh):
            continue
        mesh, spec = outcome.placement.mesh.mesh, outcome.placement.spec
        assert (mesh.axis_names, mesh.axis_types) in allowed
        assert spec.axes() <= set(mesh.axis_names)
        assert outcome.placement.memory_kind in restore["present"].memory_kinds
        if outcome.rule == "recorded":
            recorded = outcome.recorded.sharding.spec
            kept = {policy.rename_axes.get(axis, axis) for axis in recorded.axes()}
            assert spec.axes() <= kept
            changed = {change.kind for change in outcome.changes}
            if not changed & {"axes renamed", "replicated"}:
                assert spec == recorded
        elif outcome.rule == "rules":
            assert any(spec.axes() <= rule.axes() for rule in specs_by_name)


@given(restores())
def test_an_array_on_a_mesh_can_be_placed_as_planned(restore):
    """The mesh divides it, has no more devices than there are, and is on devices that are here or were named."""
    plan = plan_from_records(**restore)
    present = restore["present"]
    for outcome in plan.outcomes:
        if not isinstance(outcome.placement, OnMesh):
            continue
        planned_mesh = outcome.placement.mesh
        target = (restore["targets"] or {}).get(outcome.path)
        asked = target.shape if target is not None and not restore["strict"] else None
        assert outcome.shape == (outcome.recorded.shape if asked is None else asked)
        as_placed = NamedShardingRecord(mesh=planned_mesh.mesh, spec=outcome.placement.spec)
        assert [n % as_placed.shards_along(i) for i, n in enumerate(outcome.shape)] == [0] * len(outcome.shape)
        assert len(planned_mesh.device_ids) == planned_mesh.mesh.size
        if planned_mesh.source == "new":
            assert planned_mesh.mesh.device_ids is None
        if planned_mesh.source == "new" or planned_mesh.source.startswith("recorded"):
            assert set(planned_mesh.device_ids) <= set(present.device_ids)
            assert len(set(planned_mesh.device_ids)) == planned_mesh.mesh.size


def test_a_hundred_thousand_arrays_on_65536_devices_are_planned(monkeypatch):
    """In work that grows with the arrays and the devices, never with their product: no mesh is hashed for each array."""
    hashed = []
    original = MeshRecord.__hash__
    monkeypatch.setattr(MeshRecord, "__hash__", lambda mesh: hashed.append(1) or original(mesh))
    run, later = fake_inventory(2048, processes=32), fake_inventory(2048, processes=32, first_id=7)
    mesh = mesh_of({"data": 256, "model": 256}, ids=run.device_ids)
    shardings = [on(mesh, "data", "model"), on(mesh, None, "model"), on(mesh)]
    leaves = {f"w{i}": array(shardings[i % 3], (256, 256)) for i in range(100_000)}
    plan = plan_of(manifest_of(leaves, run), present=later)
    assert plan.refused == ()
    assert len(plan.outcomes) == 100_000
    assert {id(outcome.placement.mesh) for outcome in plan.outcomes} == {id(plan.meshes[0])}
    assert plan.meshes[0].mesh.axis_sizes == (256, 256)
    assert len(hashed) < 100
