"""`_topology`: the rule by which a recorded mesh is made to fit other devices.

The recorded run has 8 CPU devices of one process; its mesh is (data=2, model=4) over all of them, unless said otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import HERE, array, manifest_of, mesh_of, on, plan_of, refused

from orbax_explicit import RestorePlan, RestorePolicy
from orbax_explicit._outcomes import PlannedMesh
from orbax_explicit._records import Inventory, Manifest, MeshRecord, NamedShardingRecord, SpecRecord
from orbax_explicit._topology import Room, Split, first_devices, is_shared_equally, over_processes, resized
from orbax_explicit.testing import fake_inventory

SIZES = {"data": 2, "model": 4}
MESH = mesh_of(SIZES)


def saved_on(mesh: MeshRecord = MESH, shape: tuple[int, ...] = (24, 8), *partitions: Any, **fields: Any) -> Manifest:
    """One array on a mesh, split over `data` and `model` unless said otherwise."""
    return manifest_of({"w": array(on(mesh, *(partitions or ("data", "model"))), shape)}, **fields)


def mesh_in(plan: RestorePlan, name: str = "w") -> PlannedMesh:
    """The mesh that a leaf lands on."""
    assert plan.refused == ()
    (outcome,) = [outcome for outcome in plan.outcomes if outcome.path[0].name == name]
    return outcome.placement.mesh


def sizes_on(present: Inventory | int, manifest: Manifest, **choices: Any) -> tuple[int, ...]:
    """The axis sizes of the mesh of the one leaf."""
    present = fake_inventory(present) if isinstance(present, int) else present
    return mesh_in(plan_of(manifest, present=present, policy=RestorePolicy(**choices))).mesh.axis_sizes


# One mesh over every device.


@pytest.mark.parametrize(
    ("devices", "sizes", "idle"),
    [
        pytest.param(1, (1, 1), 0, id="1: the other axis alone is too many, twice"),
        pytest.param(2, (1, 2), 0, id="2: model gets what fits"),
        pytest.param(3, (1, 2), 1, id="3: model=3 fits and does not divide 8"),
        pytest.param(4, (1, 4), 0, id="4: data=1 fits beside model=4"),
        pytest.param(6, (1, 4), 2, id="6: and two devices are idle"),
        pytest.param(7, (1, 4), 3, id="7: and three are"),
        pytest.param(8, (2, 4), 0, id="8: as it was"),
        pytest.param(9, (2, 4), 1, id="9: data=3 is too many"),
        pytest.param(12, (3, 4), 0, id="12: 3 divides 24"),
        pytest.param(16, (4, 4), 0, id="16: 4 divides 24"),
        pytest.param(20, (4, 4), 4, id="20: 5 does not divide 24"),
        pytest.param(96, (24, 4), 0, id="96: data takes all of them"),
        pytest.param(1024, (24, 4), 928, id="1024: data=24 is as far as the dimension can be split"),
    ],
)
def test_a_mesh_over_every_device_becomes(devices, sizes, idle):
    """The table of the rule; devices that are left over are named, and they are the last ones."""
    present = fake_inventory(devices, first_id=300)
    plan = plan_of(saved_on(), present=present)
    assert mesh_in(plan).mesh.axis_sizes == sizes
    assert plan.idle_device_ids == present.device_ids[devices - idle :]
    assert mesh_in(plan).device_ids == present.device_ids[: devices - idle]


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [
        pytest.param(1, (1, 1), id="1"),
        pytest.param(3, (1, 2), id="3: 3 divides neither 8"),
        pytest.param(4, (1, 4), id="4"),
        pytest.param(6, (1, 4), id="6"),
        pytest.param(7, (1, 4), id="7"),
        pytest.param(12, (2, 4), id="12: 3 does not divide 8, and four devices are idle"),
        pytest.param(16, (4, 4), id="16"),
    ],
)
def test_a_mesh_of_a_square_array_becomes(devices, sizes):
    """The same rule where both dimensions are powers of two."""
    assert sizes_on(devices, saved_on(MESH, (8, 8))) == sizes


@pytest.mark.parametrize(
    ("mesh", "shape", "partitions", "devices", "resize", "sizes"),
    [
        pytest.param(SIZES, (24, 8), ("data", "model"), 4, (), (1, 4), id="outermost first unless it says otherwise"),
        pytest.param(SIZES, (24, 8), ("data", "model"), 4, ("model",), (2, 2), id="the axis that may change does"),
        pytest.param(SIZES, (24, 8), ("data", "model"), 4, ("model", "data"), (2, 2), id="the most willing one first"),
        pytest.param(SIZES, (24, 8), ("data", "model"), 16, ("model",), (2, 8), id="and grows"),
        pytest.param(
            SIZES, (24, 8), ("data", "model"), 1, ("model", "data"), (1, 1), id="the next one where that is not enough"
        ),
        pytest.param(SIZES, (24, 8), ("data", "model"), 3, ("model",), (2, 1), id="down to 1"),
        pytest.param(SIZES, (24, 8), ("data", "model"), 16, ("data",), (4, 4), id="the outer one alone grows"),
        pytest.param(
            {"a": 2, "b": 2, "c": 2}, (8, 8), ("b", "c"), 4, (), (1, 2, 2), id="three axes, the outermost goes"
        ),
        pytest.param({"a": 2, "b": 2, "c": 2}, (8, 8), ("b", "c"), 2, (), (1, 1, 2), id="then the next"),
        pytest.param(
            {"a": 2, "b": 2, "c": 2}, (8, 8), ("b", "c"), 2, ("c", "a"), (1, 2, 1), id="in the order of the policy"
        ),
    ],
)
def test_axes_are_resized_in_the_order_of_the_policy(mesh, shape, partitions, devices, resize, sizes):
    """One at a time: the others stay until it is clear that they alone are too many."""
    assert sizes_on(devices, saved_on(mesh_of(mesh), shape, *partitions), resize=resize) == sizes


@pytest.mark.parametrize(
    ("devices", "resize"),
    [
        pytest.param(4, ("data",), id="an axis that may not change is kept"),
        pytest.param(1, ("data",), id="and is 4 of 1"),
    ],
)
def test_an_axis_that_may_not_change_never_does(devices, resize):
    """The mesh fits without, or is refused."""
    manifest = saved_on(mesh_of({"data": 2, "model": 4}))
    if devices == 4:
        assert sizes_on(devices, manifest, resize=resize) == (1, 4)
    else:
        problem = refused(plan_of(manifest, present=fake_inventory(devices), policy=RestorePolicy(resize=resize)))
        assert problem.could_not == (
            "cannot resize mesh (data=2 explicit, model=4 explicit) to 1 device with resize=('data',): model=4, which may "
            "not change, takes 4"
        )


@pytest.mark.parametrize(
    ("sizes", "shape", "partitions", "devices", "resize", "expected"),
    [
        pytest.param(
            SIZES, (8, 8), (None, "model"), 16, (), (2, 4), id="the first axis may change, and splits nothing"
        ),
        pytest.param(SIZES, (8, 8), (None, "model"), 16, ("model",), (2, 8), id="the policy names one that does"),
        pytest.param(SIZES, (8, 8), (None,), 16, (), (2, 4), id="no axis splits anything"),
        pytest.param(SIZES, (8, 8), (None, "model"), 6, (), (1, 4), id="such an axis shrinks all the same"),
        pytest.param(SIZES, (8, 8), (None,), 3, (), (1, 3), id="and is free to take what fits"),
        pytest.param(
            {"one": 1, "data": 8}, (8, 16), ("one", "data"), 16, (), (2, 8), id="an axis of size 1 that splits"
        ),
        pytest.param(
            {"one": 1, "data": 8}, (8, 16), (None, "data"), 16, (), (1, 8), id="an axis of size 1 that does not"
        ),
        pytest.param(
            {"one": 1, "data": 8},
            (8, 16),
            (None, "data"),
            4,
            (),
            (1, 4),
            id="an axis of size 1 stays when others shrink",
        ),
    ],
)
def test_an_axis_that_splits_nothing_does_not_grow(sizes, shape, partitions, devices, resize, expected):
    """It would but make more copies."""
    assert sizes_on(devices, saved_on(mesh_of(sizes), shape, *partitions), resize=resize) == expected


@pytest.mark.parametrize(
    ("arrays", "devices", "sizes"),
    [
        pytest.param([((24,), ("data",)), ((16,), ("data",))], 12, (2, 4), id="two lengths: what divides both"),
        pytest.param([((24,), ("data",)), ((36,), ("data",))], 12, (3, 4), id="3 divides both"),
        pytest.param([((24,), (("data", "model"),))], 24, (6, 4), id="two axes of one dimension, together"),
        pytest.param([((24,), (("data", "model"),))], 16, (3, 4), id="data=4 with model=4 would not divide 24"),
        pytest.param([((0, 8), ("data", "model"))], 40, (10, 4), id="a dimension of no length is divided by all"),
        pytest.param([((2, 8), ("data", "model"))], 16, (2, 4), id="a dimension that is split as far as it can be"),
        pytest.param([((24, 7), ("data",))], 12, (3, 4), id="a dimension that is not split does not matter"),
        pytest.param([((6,), ("model",))], 8, (2, 4), id="what was not divided then is no reason for another size"),
    ],
)
def test_a_size_divides_every_dimension_that_it_splits(arrays, devices, sizes):
    """Of all arrays on the mesh, whichever axes they use."""
    leaves = {f"w{i}": array(on(MESH, *partitions), shape) for i, (shape, partitions) in enumerate(arrays)}
    plan = plan_of(manifest_of(leaves), present=fake_inventory(devices, first_id=50))
    assert mesh_in(plan, "w0").mesh.axis_sizes == sizes


def test_a_plan_says_what_became_of_a_mesh():
    """Each leaf on it, and which mesh it was."""
    plan = plan_of(saved_on(), present=fake_inventory(4))
    (outcome,) = plan.outcomes
    assert outcome.notes == ("(data=2 explicit, model=4 explicit) resized to (data=1 explicit, model=4 explicit)",)
    assert (mesh_in(plan).recorded, mesh_in(plan).resized) == (MESH, True)


# Sub-meshes: meshes that did not have every device.

HALF = {"data": 2, "model": 2}


@pytest.mark.parametrize(
    ("ids", "present", "sizes", "lands_on", "source"),
    [
        pytest.param(
            (4, 5, 6, 7), HERE, (2, 2), (4, 5, 6, 7), "recorded devices", id="the same devices, if they are here"
        ),
        pytest.param(
            (4, 6, 5, 7),
            fake_inventory(16),
            (2, 2),
            (4, 6, 5, 7),
            "recorded positions",
            id="on more devices its size and its positions stay",
        ),
        pytest.param(
            (4, 6, 5, 7),
            fake_inventory(16, first_id=100),
            (2, 2),
            (104, 106, 105, 107),
            "recorded positions",
            id="whatever the ids are",
        ),
        pytest.param(
            (4, 5, 6, 7),
            fake_inventory(6),
            (2, 2),
            (0, 1, 2, 3),
            "new",
            id="on the first where its positions are not here",
        ),
        pytest.param((4, 5, 6, 7), fake_inventory(3), (1, 2), (0, 1), "new", id="smaller where it does not fit"),
        pytest.param((0, 1, 2, 3), fake_inventory(64), (2, 2), (0, 1, 2, 3), "recorded positions", id="it never grows"),
        pytest.param(
            (0, 1, 2, 3),
            fake_inventory(2, processes=4),
            (2, 2),
            (0, 2048, 4096, 6144),
            "new",
            id="on equally many devices of each process, where its positions are those of some",
        ),
    ],
)
def test_a_mesh_on_some_devices(ids, present, sizes, lands_on, source):
    """Keeps its size while it fits: it was small on purpose."""
    planned = mesh_in(plan_of(saved_on(mesh_of(HALF, ids=ids), (8, 8)), present=present))
    assert (planned.mesh.axis_sizes, planned.device_ids, planned.source) == (sizes, lands_on, source)


def test_a_mesh_on_some_devices_does_not_grow_beside_one_on_all():
    """Each by its own measure."""
    leaves = {"all": array(on(MESH, "data", "model"), (24, 8)), "some": array(on(mesh_of(HALF), "data"), (24, 8))}
    plan = plan_of(manifest_of(leaves), present=fake_inventory(16))
    assert mesh_in(plan, "all").mesh.axis_sizes == (4, 4)
    assert mesh_in(plan, "some").mesh.axis_sizes == (2, 2)


@pytest.mark.parametrize(
    ("devices", "sizes", "flat"),
    [
        pytest.param(4, (1, 4), (4,), id="4: both fit"),
        pytest.param(6, (1, 4), (4,), id="6: x=6 divides 24, and has to be 4 beside data=1, model=4"),
        pytest.param(3, (1, 2), (2,), id="3: x=3 divides 24, and has to be 2"),
        pytest.param(12, (3, 4), (12,), id="12: both grow"),
        pytest.param(16, (3, 4), (12,), id="16: x=12 is the most for 24, and data has to be 3 beside it"),
    ],
)
def test_meshes_on_the_same_devices_stay_on_the_same_devices(devices, sizes, flat):
    """Arrays that were used together can be again."""
    leaves = {"w": array(on(MESH, "data", "model"), (24, 8)), "v": array(on(mesh_of({"x": 8}), "x"), (24,))}
    plan = plan_of(manifest_of(leaves), present=fake_inventory(devices))
    assert (mesh_in(plan, "w").mesh.axis_sizes, mesh_in(plan, "v").mesh.axis_sizes) == (sizes, flat)
    assert mesh_in(plan, "w").device_ids == mesh_in(plan, "v").device_ids


def test_meshes_that_differ_in_types_alone_become_alike():
    """The same sizes for both: they were one layout."""
    leaves = {"w": array(on(MESH, "data", "model"), (24, 8)), "v": array(on(mesh_of(SIZES, "auto"), "data"), (16,))}
    plan = plan_of(manifest_of(leaves), present=fake_inventory(12))
    assert {mesh_in(plan, name).mesh.axis_sizes for name in "wv"} == {(2, 4)}


# Several processes.


@pytest.mark.parametrize(
    ("present", "sizes", "lands_on"),
    [
        pytest.param(fake_inventory(4, processes=2), (2, 4), None, id="as many devices, four of each of two"),
        pytest.param(fake_inventory(2, processes=2), (1, 4), None, id="two of each of two"),
        pytest.param(fake_inventory(1, processes=8), (2, 4), None, id="one of each of eight"),
        pytest.param(
            fake_inventory(3, processes=2), (1, 4), (0, 1, 2048, 2049), id="two of each of two that have three"
        ),
        pytest.param(fake_inventory(4, processes=3), (3, 4), None, id="four of each of three"),
        pytest.param(fake_inventory(3, processes=4), (3, 4), None, id="three of each of four"),
        pytest.param(
            fake_inventory(5, processes=2), (2, 4), (0, 1, 2, 3, 2048, 2049, 2050, 2051), id="not all of each"
        ),
    ],
)
def test_each_process_contributes_equally_many_devices(present, sizes, lands_on):
    """Or an array on the mesh could not be made by all of them."""
    planned = mesh_in(plan_of(saved_on(), present=present))
    assert (planned.mesh.axis_sizes, planned.device_ids) == (sizes, lands_on or present.device_ids)


def test_processes_with_different_numbers_of_devices_give_what_the_least_has():
    """Of five and three, three each."""
    present = dataclasses.replace(fake_inventory(8, first_id=8), process_indices=(0,) * 5 + (1,) * 3)
    saved = saved_on(mesh_of({"data": 2, "model": 8}, ids=range(16)), (24, 8), inventory=fake_inventory(16))
    planned = mesh_in(plan_of(saved, present=present))
    assert (planned.mesh.axis_sizes, planned.device_ids) == ((1, 4), (8, 9, 13, 14))


@pytest.mark.parametrize(
    ("present", "here"),
    [
        pytest.param(fake_inventory(1, processes=9), "9 cpu devices, 9 processes", id="nine cannot share 24 x 8"),
        pytest.param(fake_inventory(2, processes=5), "10 cpu devices, 5 processes", id="nor can five"),
    ],
)
def test_a_mesh_that_processes_cannot_share_equally_is_refused(present, here):
    """With how many there are; never a mesh without the devices of one of them."""
    problem = refused(plan_of(saved_on(), present=present))
    assert problem.could_not == (
        f"cannot resize mesh (data=2 explicit, model=4 explicit) to {present.device_count} devices: no sizes that divide "
        "what it splits have equally many devices of each process"
    )
    assert problem.present == here
    assert problem.fix == "pass mesh= with the axes data, model over present devices"
    assert problem.about == "mesh"


TWO_HOSTS = fake_inventory(4, processes=2)
INNER_OVER_HOSTS = (0, 2048, 1, 2049, 2, 2050, 3, 2051)


@pytest.mark.parametrize(
    ("ids", "present", "sizes", "lands_on", "source"),
    [
        pytest.param(
            TWO_HOSTS.device_ids,
            fake_inventory(4, processes=2, first_id=100),
            (4, 2),
            None,
            "new",
            id="the outer axis over processes is what jax.make_mesh does",
        ),
        pytest.param(
            INNER_OVER_HOSTS,
            fake_inventory(4, processes=2, first_id=100),
            (4, 2),
            (100, 2148, 101, 2149, 102, 2150, 103, 2151),
            "recorded processes",
            id="the inner axis over processes runs over processes again, on as many devices",
        ),
        pytest.param(
            INNER_OVER_HOSTS,
            fake_inventory(2, processes=2),
            (2, 2),
            (0, 2048, 1, 2049),
            "recorded processes",
            id="and on fewer",
        ),
        pytest.param(
            INNER_OVER_HOSTS,
            fake_inventory(8, processes=2),
            (8, 2),
            tuple(i for pair in zip(range(8), range(2048, 2056), strict=True) for i in pair),
            "recorded processes",
            id="and on more",
        ),
        pytest.param(
            INNER_OVER_HOSTS, fake_inventory(8, first_id=1), (4, 2), None, "new", id="one process has no over"
        ),
    ],
)
def test_a_hybrid_mesh_keeps_which_axes_run_over_processes(ids, present, sizes, lands_on, source):
    """An inner axis over processes keeps the traffic of the outer one within a machine."""
    saved = saved_on(mesh_of({"data": 4, "model": 2}, ids=ids), (8, 8), inventory=TWO_HOSTS)
    planned = mesh_in(plan_of(saved, present=present))
    assert (planned.mesh.axis_sizes, planned.mesh.device_ids, planned.source) == (sizes, lands_on, source)


@pytest.mark.parametrize(
    ("mesh", "saved", "expected"),
    [
        pytest.param(mesh_of({"d": 4, "m": 2}, ids=INNER_OVER_HOSTS), None, None, id="the run was not recorded"),
        pytest.param(mesh_of({"d": 4, "m": 2}, ids=INNER_OVER_HOSTS), fake_inventory(8), None, id="it had one process"),
        pytest.param(
            dataclasses.replace(mesh_of({"d": 4, "m": 2}), device_ids=None), TWO_HOSTS, None, id="the mesh was abstract"
        ),
        pytest.param(
            mesh_of({"d": 4, "m": 2}, ids=range(50, 58)), TWO_HOSTS, None, id="its devices were not those of the run"
        ),
        pytest.param(
            mesh_of({"d": 4, "m": 2}, ids=INNER_OVER_HOSTS),
            TWO_HOSTS,
            (0, 2048, 1, 2049, 2, 2050, 3, 2051),
            id="an inner axis ran over processes",
        ),
        pytest.param(
            mesh_of({"d": 2, "m": 4}, ids=(0, 1, 2048, 2049, 2, 3, 2050, 2051)),
            TWO_HOSTS,
            (0, 2, 2048, 2050, 1, 3, 2049, 2051),
            id="half of an inner axis ran over processes, and does again",
        ),
    ],
)
def test_devices_are_ordered_over_processes(mesh, saved, expected):
    """Or None, where the order of `jax.make_mesh` does the same or nothing is known."""
    found = over_processes(mesh, saved, mesh.axis_sizes, TWO_HOSTS.device_ids, TWO_HOSTS)
    assert found == expected


@pytest.mark.parametrize(
    ("present", "count", "expected"),
    [
        pytest.param(HERE, 8, tuple(range(8)), id="all of them"),
        pytest.param(HERE, 3, (0, 1, 2), id="the first ones"),
        pytest.param(HERE, 9, None, id="more than there are"),
        pytest.param(TWO_HOSTS, 4, (0, 1, 2048, 2049), id="equally many of each process"),
        pytest.param(TWO_HOSTS, 3, None, id="what cannot be shared equally"),
        pytest.param(
            dataclasses.replace(HERE, process_indices=(0, 1, 0, 1, 0, 1, 0, 1)),
            4,
            (0, 1, 2, 3),
            id="in the order of jax.devices(), however processes take turns",
        ),
        pytest.param(
            dataclasses.replace(HERE, process_indices=(0,) * 7 + (1,)), 4, None, id="more than one process has"
        ),
        pytest.param(
            dataclasses.replace(HERE, process_indices=(0,) * 7 + (1,)), 8, tuple(range(8)), id="all, equally or not"
        ),
    ],
)
def test_the_first_devices(present, count, expected):
    """Of each process equally many, unless all are asked for."""
    assert first_devices(present, count) == expected


def test_whether_devices_are_shared_equally():
    """Each process has as many among them; one that has none counts."""
    assert is_shared_equally((0, 2048), TWO_HOSTS)
    assert not is_shared_equally((0, 1), TWO_HOSTS)
    assert not is_shared_equally((0, 1, 2048), TWO_HOSTS)


# Properties of the rule, over meshes of up to four axes.


@st.composite
def used_meshes(draw: st.DrawFn) -> tuple[MeshRecord, frozenset[Split]]:
    """A mesh, and dimensions that it divides."""
    names = ("a", "b", "c", "d")[: draw(st.integers(1, 4))]
    sizes = {name: draw(st.sampled_from([1, 1, 2, 3, 4, 8])) for name in names}
    splits = set()
    for _ in range(draw(st.integers(0, 4))):
        axes = tuple(draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
        splits.add(Split(math.prod(sizes[axis] for axis in axes) * draw(st.sampled_from([0, 1, 2, 3, 5, 24])), axes))
    return mesh_of(sizes), frozenset(splits)


@st.composite
def rooms(draw: st.DrawFn, processes: int | None = None) -> Room:
    """Devices of up to four processes, or of so many."""
    processes = draw(st.sampled_from([1, 1, 1, 2, 3, 4])) if processes is None else processes
    return Room(devices=processes * draw(st.integers(1, 40)), processes=processes)


RESIZE = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True).map(tuple)


def shards(split: Split, sizes: dict[str, int]) -> int:
    """How many parts a dimension is split into."""
    return math.prod(sizes[axis] for axis in split.axes)


@given(used_meshes(), rooms(), RESIZE, st.booleans())
def test_a_resized_mesh_fits_and_divides(used, room, resize, grows):
    """Never more devices than there are, equally many of each process; every dimension stays divided; always the same."""
    mesh, splits = used
    found = resized(mesh, splits, room, resize=resize, grows=grows)
    assert found == resized(mesh, splits, room, resize=resize, grows=grows)
    if found is None:
        # Only axes that may not change, or processes, can be in the way.
        fixed = math.prod(size for axis, size in mesh.shape.items() if resize and axis not in resize)
        assert room.processes > 1 or fixed > room.devices
        return
    after = dict(zip(mesh.axis_names, found, strict=True))
    assert room.fits(math.prod(found))
    for split in splits:
        assert split.length % shards(split, after) == 0
    for axis, size in mesh.shape.items():
        split_by = any(axis in split.axes for split in splits)
        if resize and axis not in resize:
            assert after[axis] == size, "an axis outside of resize changed"
        if after[axis] > size:
            assert grows, "a mesh on some devices grew"
            assert split_by, "an axis grew that splits nothing"
    if not grows:
        assert math.prod(found) <= mesh.size


@given(used_meshes(), rooms(), RESIZE)
def test_a_mesh_that_does_not_shrink_splits_no_array_less(used, room, resize):
    """In one process it always has room; several may have to take fewer devices, for equal shares."""
    mesh, splits = used
    found = resized(mesh, splits, room, resize=resize, grows=True)
    if found is None or math.prod(found) < mesh.size:
        assert room.devices < mesh.size or room.processes > 1
        return
    after = dict(zip(mesh.axis_names, found, strict=True))
    for split in splits:
        assert shards(split, after) >= shards(split, mesh.shape)


@pytest.mark.parametrize(
    ("sizes", "splits", "room", "expected"),
    [
        pytest.param(
            {"a": 2, "b": 4},
            {Split(8, ("a",)), Split(12, ("b",))},
            Room(devices=12, processes=3),
            (2, 6),
            id="another axis, beside those that stay",
        ),
        pytest.param(
            {"a": 2, "b": 3},
            {Split(24, ("a",)), Split(24, ("b",))},
            Room(devices=4, processes=4),
            (2, 2),
            id="a smaller one of another axis",
        ),
        pytest.param(
            {"a": 3, "b": 4},
            {Split(3, ("a",)), Split(4, ("b",))},
            Room(devices=2, processes=2),
            (1, 2),
            id="one axis that becomes 1, and another",
        ),
        pytest.param(
            {"a": 3, "b": 3},
            {Split(12, ("a",)), Split(12, ("b",))},
            Room(devices=4, processes=4),
            None,
            id="none, where one would have to grow while another is lost",
        ),
    ],
)
def test_for_equal_shares_of_several_processes_a_mesh_takes(sizes, splits, room, expected):
    """Before an axis becomes 1 every axis is tried alone."""
    assert resized(mesh_of(sizes), splits, room, grows=True) == expected


@given(used_meshes(), st.booleans())
def test_a_mesh_that_fits_as_it_is_keeps_every_size(used, grows):
    """On as many devices as it has: a change would be for nothing."""
    mesh, splits = used
    assert resized(mesh, splits, Room(devices=mesh.size, processes=1), grows=grows) == mesh.axis_sizes


# The same through plans: names, types, devices.


@st.composite
def restores(draw: st.DrawFn) -> tuple[Manifest, Inventory, RestorePolicy]:
    """Arrays on up to three meshes that share devices or do not, in a run of other devices."""
    saved = fake_inventory(draw(st.sampled_from([1, 2, 4, 6, 8])), processes=draw(st.sampled_from([1, 1, 2])))
    count = saved.device_count
    leaves = {}
    for i in range(draw(st.integers(1, 3))):
        names = draw(st.permutations(("a", "b", "c")))[: draw(st.integers(1, 3))]
        left = draw(st.sampled_from([count, count, draw(st.integers(1, count))]))
        sizes = {}
        for name in names:
            sizes[name] = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
            left //= sizes[name]
        ids = draw(st.permutations(saved.device_ids))[: math.prod(sizes.values())]
        types = tuple(draw(st.sampled_from(["explicit", "auto"])) for _ in names)
        mesh = mesh_of(sizes, types, ids)
        for j in range(draw(st.integers(1, 3))):
            partitions = tuple(draw(st.sampled_from([None, name])) for name in names)
            sharding = NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions))
            shape = tuple(sharding.shards_along(k) * draw(st.sampled_from([1, 2, 3, 8])) for k in range(len(names)))
            leaves[f"w{i}{j}"] = array(sharding, shape)
    present = fake_inventory(
        draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16])),
        processes=draw(st.sampled_from([1, 1, 2, 3])),
        first_id=draw(st.sampled_from([0, 0, 100])),
    )
    recorded_axes = {axis for leaf in leaves.values() for axis in leaf.sharding.mesh.axis_names}
    resize = draw(st.lists(st.sampled_from(sorted(recorded_axes)), unique=True).map(tuple))
    return manifest_of(leaves, saved), draw(st.sampled_from([present, saved])), RestorePolicy(resize=resize)


@given(restores())
def test_a_plan_resizes_meshes_by_the_rule(restore):
    """Names, types and specs stay, devices are present ones, and arrays that shared devices share them again."""
    manifest, present, policy = restore
    plan = plan_of(manifest, present=present, policy=policy)
    same = present.device_ids == manifest.inventory.device_ids
    if not policy.resize and present.process_count == 1:
        assert plan.refused == ()
    shared: dict[frozenset[int], set[int]] = {}
    for outcome in plan.outcomes:
        if outcome.rule == "refused":
            assert [problem.about for problem in plan.problems_of(outcome)] == ["mesh"]
            continue
        recorded, planned = outcome.recorded.sharding, outcome.placement.mesh
        assert planned.recorded == recorded.mesh
        assert planned.mesh.axis_names == recorded.mesh.axis_names
        assert planned.mesh.axis_types == recorded.mesh.axis_types
        assert outcome.placement.spec == recorded.spec
        assert set(planned.device_ids) <= set(present.device_ids)
        assert len(planned.device_ids) == planned.mesh.size
        after = NamedShardingRecord(mesh=planned.mesh, spec=recorded.spec)
        assert all(length % after.shards_along(i) == 0 for i, length in enumerate(outcome.shape))
        if present.device_count == manifest.inventory.device_count:
            # A mesh on some devices may have stood where several processes now cannot share it equally.
            assert planned.mesh.axis_sizes == recorded.mesh.axis_sizes or present.process_count > 1
        if same:
            assert planned.mesh == recorded.mesh
        shared.setdefault(frozenset(recorded.mesh.device_ids), set()).add(planned.mesh.size)
    assert all(len(counts) == 1 for counts in shared.values())


def test_a_mesh_without_arrays_is_no_mesh_of_a_plan():
    """Nothing lands on it."""
    assert plan_of(manifest_of({})).meshes == ()
