"""`_report`, and what `_plan` adds up: plans as text, as JSON, and in bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from plans import HERE, KEYS, MESH, array, manifest_of, mesh_of, on, plan_of, planned, restores, wanted
from trees import path

from orbax_explicit import RestorePlan, RestorePolicy, _outcomes, _records
from orbax_explicit._errors import Problem
from orbax_explicit._outcomes import (
    MESH_SOURCES,
    RULES,
    AsFallback,
    AsTarget,
    Change,
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
    ContainerRecord,
    Key,
    Manifest,
    PrngRecord,
    SingleDeviceRecord,
    SpecRecord,
    ValueRecord,
)
from orbax_explicit._report import bytes_text
from orbax_explicit.testing import fake_inventory

# Text.


def test_a_refused_plan_reads_like_this():
    """Devices, meshes, what decided, bytes, what differs, notes, then what is refused."""
    stock = mesh_of({"x": 8}, types=None, ids=range(8))
    leaves = {f"layer_{i}": array(on(MESH, "d")) for i in range(4)} | {
        "count": array(SingleDeviceRecord(device_id=0), (), committed=False),
        "far": array(SingleDeviceRecord(device_id=3, platform="cuda")),
        "host": ValueRecord(type="int", dtype="int64"),
        "odd": array(on(MESH, UNCONSTRAINED)),
        "old": array(on(stock, "x")),
    }
    saved = manifest_of(leaves, notes=("2 shardings could not be read",))
    plan = plan_of(saved, present=fake_inventory(8, first_id=100), policy=RestorePolicy(axis_types={"d": "explicit"}))
    assert str(plan) == (
        "restore REFUSED: 1 problem, 1 of 9 leaves\n"
        "  recorded  8 cpu devices, 1 process\n"
        "  present   8 cpu devices, 1 process\n"
        "  mesh      (d=2 explicit, m=4 explicit) on all 8 devices, in the order of jax.make_mesh\n"
        "  mesh      (x=8 untyped)\n"
        "    ->      (x=8 auto) on all 8 devices, in the order of jax.make_mesh\n"
        "  leaves    5 x the recorded spec\n"
        "            1 x on one device, as recorded\n"
        "            1 x uncommitted, as recorded\n"
        "            1 x a value on the host\n"
        "  changed   cuda:3 is not present; placed on the default device: far\n"
        "            no axis types were recorded; the mesh axes are auto: old\n"
        "  note      2 shardings could not be read\n"
        "  refused   cannot place P(UNCONSTRAINED) on (d=2 explicit, m=4 explicit): an unconstrained dimension takes an "
        "auto axis\n"
        "              present   mesh (d=2 explicit, m=4 explicit)\n"
        "              affects   1 of 9 leaves: odd\n"
        "              fix       leave an axis auto, in axis_types of the policy or in the mesh; or restore into a target with "
        "another spec"
    )


POD = fake_inventory(8, processes=2, platform="tpu", memory_kinds=("device", "pinned_host"))
POD_MESH = mesh_of({"data": 4, "model": 4}, ids=POD.device_ids, platform="tpu")
TRAINED = manifest_of(
    {
        "embed": array(on(POD_MESH, None, "model", kind="pinned_host"), (32000, 4096)),
        **{f"layer_{i}": array(on(POD_MESH, "data", "model"), (8192, 4096)) for i in range(24)},
        "name": ValueRecord(type="str"),
        "norm": array(on(POD_MESH), (4096,)),
        "seed": ValueRecord(type="np.ndarray", shape=(4,), dtype="uint32"),
        "step": array(SingleDeviceRecord(device_id=0, platform="tpu"), (), dtype="int32", committed=False),
    },
    POD,
)


def test_a_plan_on_fewer_devices_reads_like_this():
    """The mesh before and after, and the devices that are idle."""
    assert str(plan_of(TRAINED, present=fake_inventory(6))) == (
        "restore of 29 leaves, 3.75 GB to read\n"
        "  recorded  16 tpu devices, 2 processes\n"
        "  present   6 cpu devices, 1 process\n"
        "  mesh      (data=4 explicit, model=4 explicit)\n"
        "    ->      (data=1 explicit, model=4 explicit) on 4 of 6 devices, in the order of jax.make_mesh\n"
        "  idle      2 of 6 devices: 4, 5\n"
        "  leaves    26 x the recorded spec\n"
        "             1 x uncommitted, as recorded\n"
        "             2 x a value on the host\n"
        "  memory    device: at most 805 MB, on device 0; 3.22 GB on 4 devices in all\n"
        "            pinned_host: 131 MB on each of 4 devices\n"
        "            host values: 16 B in each process"
    )


def test_a_plan_of_many_choices_reads_like_this():
    """A mesh that was passed, a target of another dtype, renamed, kept and left out leaves."""
    targets = {f"layer_{i}": wanted(shape=(8192, 4096), dtype="bfloat16") for i in range(24)} | {
        "embed": wanted(shape=(32000, 4096)),
        "head": wanted(keepable=True),
        "scale": wanted(shape=(4096,)),
        "step": TargetRecord(value_type="int"),
    }
    policy = RestorePolicy(
        extra="ignore", missing="keep", rename_leaves={"scale": "norm"}, memory_kind="device", cast="same_kind"
    )
    flat = mesh_of({"data": 1, "model": 5})
    assert str(plan_of(TRAINED, targets, fake_inventory(6), policy, mesh=flat)) == (
        "restore of 28 leaves, 3.75 GB to read\n"
        "  recorded  16 tpu devices, 2 processes\n"
        "  present   6 cpu devices, 1 process\n"
        "  mesh      (data=4 explicit, model=4 explicit)\n"
        "    ->      (data=1 explicit, model=5 explicit), the mesh that was passed\n"
        "  idle      1 of 6 devices: 5\n"
        "  leaves    26 x the recorded spec\n"
        "             1 x a value on the host\n"
        "             1 x the target's own value, not read\n"
        "  memory    device: 2.13 GB on each of 5 devices\n"
        "            host values: 4 B in each process\n"
        "  changed   whole along dimension 1 of (8192, 4096), which model=5 does not divide: layer_0, layer_1, layer_2 "
        "and 21 more\n"
        "            float32 -> bfloat16: layer_0, layer_1, layer_2 and 21 more\n"
        "            whole along dimension 1 of (32000, 4096), which model=5 does not divide: embed\n"
        "            scale is read from norm\n"
        "  kept      the target's own values: head\n"
        "  left out  saved, and not read: name, seed"
    )


def test_a_plan_of_nothing_reads_like_this():
    """No line is there for what there is none of."""
    assert str(plan_of(manifest_of({}, None))) == (
        "restore of 0 leaves, 0 B to read\n  recorded  devices that were not recorded\n  present   8 cpu devices, 1 process"
    )


def test_a_change_of_many_leaves_names_the_first_three():
    """The rest is a number."""
    saved = manifest_of({f"a{i}": array(None) for i in range(5)})
    assert str(plan_of(saved)).splitlines()[-1] == (
        "  changed   no sharding was recorded; restored to the host: a0, a1, a2 and 2 more"
    )


def test_idle_devices_are_named_up_to_eight():
    """The rest is a number."""
    lines = str(plan_of(manifest_of({"w": array(on(MESH))}), present=fake_inventory(20))).splitlines()
    assert "  idle      12 of 20 devices: 8, 9, 10, 11, 12, 13, 14, 15 and 4 more" in lines


def test_arrays_whose_cost_is_not_known_are_named():
    """A sharding of a kind that has no record takes memory all the same."""
    lines = str(plan_of(targets={"w": wanted(concrete=True)})).splitlines()
    assert lines[-1] == "  memory    not known, for shardings that have no record: w"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda n: plan_of(manifest_of({f"w{i}": array(on(MESH, "d")) for i in range(n)})), id="alike"),
        pytest.param(
            lambda n: plan_of(manifest_of({f"w{i}": array(on(MESH, "d"), (8, 1 + i)) for i in range(n)})),
            id="each of another shape",
        ),
        pytest.param(
            lambda n: plan_of(
                manifest_of({f"w{i}": array(on(mesh_of({"m": 1}), "m"), (7, 1 + i)) for i in range(n)}), mesh=MESH
            ),
            id="each with a change of its own",
        ),
        pytest.param(
            lambda n: plan_of(
                manifest_of({f"w{i}": array(on(MESH, "d"), (8, 1 + i)) for i in range(n)}),
                {f"w{i}": wanted(shape=(1,)) for i in range(n)},
            ),
            id="each with a problem of its own",
        ),
        pytest.param(
            lambda n: plan_of(
                manifest_of({f"w{i}": array(None) for i in range(n)}), {f"x{i}": wanted() for i in range(n)}
            ),
            id="all extra, and as many missing",
        ),
        pytest.param(
            lambda n: plan_of(
                manifest_of({f"w{i}": array(None) for i in range(n)}), {}, policy=RestorePolicy(extra="ignore")
            ),
            id="all left out",
        ),
        pytest.param(
            lambda n: plan_of(
                manifest_of({f"w{i}": array(None) for i in range(n)}),
                {f"w{i}": wanted(concrete=True) for i in range(n)},
            ),
            id="all of unknown cost",
        ),
    ],
)
def test_the_text_of_a_plan_does_not_grow_with_the_leaves(make):
    """10,000 of them take no more lines than 20, and about as many characters."""
    few, many = str(make(20)), str(make(10_000))
    assert len(many.splitlines()) == len(few.splitlines()) <= 60
    assert len(many) < len(few) + 200


def test_problems_beyond_ten_are_a_number():
    """The JSON, and the error, have all of them."""
    saved = manifest_of({f"w{i}": array(on(MESH, "d"), (8, 1 + i)) for i in range(13)})
    plan = plan_of(saved, {f"w{i}": wanted(shape=(1,)) for i in range(13)})
    assert str(plan).splitlines()[-1] == "  refused   and 3 problems more; to_json() has all of them"
    assert str(plan).count("cannot restore shape") == 10
    assert len(json.loads(plan.to_json())["refused"]) == 13


def test_changes_beyond_ten_are_a_number():
    """The JSON has all of them."""
    saved = manifest_of({f"w{i}": array(on(mesh_of({"m": 1}), "m"), (7, 1 + i)) for i in range(13)})
    plan = plan_of(saved, mesh=MESH)
    assert str(plan).splitlines()[-1] == "            and 3 changes more; to_json() has all of them"
    assert plan.to_json().count('"replicated"') == 13


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "refused"])
def test_every_rule_has_a_text(rule):
    """A plan can always be printed; refused leaves are counted in its first line."""
    outcome = Outcome(path=path("w"), source=path("w"), recorded=array(None), placement=AsFallback(), rule=rule)
    (line,) = [line for line in str(RestorePlan(outcomes=(outcome,), present=HERE)).splitlines() if "1 x" in line]
    assert line.startswith("  leaves    1 x ")


@pytest.mark.parametrize("source", MESH_SOURCES)
def test_every_source_of_a_mesh_has_a_text(source):
    """And says on how many devices it is, where that is the plan's choice."""
    placement = OnMesh(mesh=planned(mesh=MESH, source=source), spec=SpecRecord(), memory_kind="device")
    outcome = Outcome(path=path("w"), source=path("w"), recorded=array(None), placement=placement, rule="recorded")
    (line,) = [s for s in str(RestorePlan(outcomes=(outcome,), present=HERE)).splitlines() if s.startswith("  mesh")]
    chosen = source not in ("given", "context", "target")
    assert line.startswith(f"  mesh      {MESH} on all 8 devices, " if chosen else f"  mesh      {MESH}, the ")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        pytest.param(0, "0 B", id="nothing"),
        pytest.param(999, "999 B", id="bytes as they are"),
        pytest.param(1000, "1 kB", id="thousands, not 1024s"),
        pytest.param(1536, "1.54 kB", id="three digits"),
        pytest.param(1_073_741_824, "1.07 GB", id="a GiB"),
        pytest.param(999_499, "999 kB", id="rounded"),
        pytest.param(999_500, "1 MB", id="what rounds up to the next unit has that one"),
        pytest.param(7_500_000_000_000_000, "7500 TB", id="nothing above TB"),
    ],
)
def test_bytes_as_a_person_reads_them(nbytes, text):
    """Powers of 1000."""
    assert bytes_text(nbytes) == text


# Bytes.

TWO = fake_inventory(2, processes=2)


def on_devices(nbytes: int, ids: Any = range(8)) -> dict[int, int]:
    """So many bytes on each device."""
    return dict.fromkeys(ids, nbytes)


@pytest.mark.parametrize(
    ("leaf", "options", "read", "by_memory", "on_host"),
    [
        pytest.param(
            array(on(MESH, "d", "m")), {}, 256, {"device": on_devices(32)}, 0, id="split eightfold: an eighth"
        ),
        pytest.param(array(on(MESH, "d")), {}, 256, {"device": on_devices(128)}, 0, id="split in two: a half"),
        pytest.param(array(on(MESH)), {}, 256, {"device": on_devices(256)}, 0, id="split over nothing: all of it"),
        pytest.param(
            array(on(MESH, ("d", "m"))), {}, 256, {"device": on_devices(32)}, 0, id="one dimension over both axes"
        ),
        pytest.param(
            array(on(MESH, "d", "m", kind="pinned_host")),
            {},
            256,
            {"pinned_host": on_devices(32)},
            0,
            id="in another memory kind",
        ),
        pytest.param(
            array(on(mesh_of({"d": 2, "m": 2}, ids=(4, 5, 6, 7)), "d")),
            {},
            256,
            {"device": on_devices(128, range(4, 8))},
            0,
            id="on half of the devices",
        ),
        pytest.param(
            array(on(MESH, "d", "m")),
            {"present": fake_inventory(6)},
            256,
            {"device": on_devices(64, range(4))},
            0,
            id="on a mesh that was resized to (1, 4)",
        ),
        pytest.param(
            array(on(MESH, "d", "m"), (7, 8)),
            {"mesh": MESH},
            224,
            {"device": on_devices(56)},
            0,
            id="whole along a dimension that is not divided",
        ),
        pytest.param(
            array(on(MESH, "d", "m")),
            {"targets": {"w": wanted(dtype="bfloat16")}},
            256,
            {"device": on_devices(16)},
            0,
            id="cast to half the size: read in full",
        ),
        pytest.param(
            array(on(MESH, "d", "m")),
            {"targets": {"w": wanted(shape=(8, 4))}, "strict": False},
            256,
            {"device": on_devices(16)},
            0,
            id="cut to half the size: read in full",
        ),
        pytest.param(array(on(MESH), (0, 8)), {}, 0, {"device": on_devices(0)}, 0, id="of no size"),
        pytest.param(
            array(on(MESH, "d"), dtype="int4"), {}, 64, {"device": on_devices(32)}, 0, id="four bits take a byte"
        ),
        pytest.param(
            array(SingleDeviceRecord(device_id=3)), {}, 256, {"device": on_devices(256, [3])}, 0, id="on one device"
        ),
        pytest.param(
            array(SingleDeviceRecord(device_id=77)),
            {"default_device_ids": (5,)},
            256,
            {"device": on_devices(256, [5])},
            0,
            id="on a device that is gone: on the default one",
        ),
        pytest.param(
            array(SingleDeviceRecord(device_id=3), committed=False),
            {"default_device_ids": (5,)},
            256,
            {"device": on_devices(256, [5])},
            0,
            id="uncommitted: on the default device",
        ),
        pytest.param(
            array(SingleDeviceRecord(device_id=0), committed=False),
            {"present": TWO},
            256,
            {"device": on_devices(256, [0, 2048])},
            0,
            id="uncommitted in two processes: in each",
        ),
        pytest.param(KEYS, {}, 64, {"device": on_devices(64, [0])}, 0, id="keys: with their data"),
        pytest.param(
            array(on(MESH, "d"), (8,), dtype="uint32", prng=PrngRecord(impl="rbg", key_shape=(4,))),
            {},
            128,
            {"device": on_devices(64)},
            0,
            id="keys that are split",
        ),
        pytest.param(array(None), {}, 256, {}, 256, id="an array without a sharding: on the host"),
        pytest.param(ValueRecord(type="str"), {}, 0, {}, 0, id="a text: not counted"),
        pytest.param(ValueRecord(type="bytes", shape=(5,), dtype="uint8"), {}, 5, {}, 5, id="bytes"),
        pytest.param(
            array(on(MESH, "d")), {"policy": RestorePolicy(arrays="numpy")}, 256, {}, 256, id="as NumPy: on the host"
        ),
        pytest.param(
            array(on(MESH, "d")),
            {"targets": {"w": wanted(value_type="np.ndarray", dtype="bfloat16")}},
            256,
            {},
            128,
            id="cast on the host",
        ),
        pytest.param(
            array(on(MESH, "d")),
            {"targets": {"w": wanted(on(mesh_of({"x": 4}), "x"), concrete=True)}},
            256,
            {"device": on_devices(64, range(4))},
            0,
            id="as the target's sharding",
        ),
        pytest.param(
            array(on(MESH, "d")),
            {"targets": {"w": wanted(SingleDeviceRecord(device_id=2, memory_kind="pinned_host"), concrete=True)}},
            256,
            {"pinned_host": on_devices(256, [2])},
            0,
            id="as the target's one device",
        ),
        pytest.param(
            array(on(MESH, "d")),
            {"present": fake_inventory(2), "fallback": AsFallback(sharding=SingleDeviceRecord(device_id=1))},
            256,
            {"device": on_devices(256, [1])},
            0,
            id="as the fallback sharding",
        ),
        pytest.param(
            array(on(MESH, "d")),
            {"targets": {"w": wanted(concrete=True)}},
            256,
            {},
            0,
            id="of unknown kind: not counted",
        ),
        pytest.param(
            array(on(MESH, "d")), {"targets": {"w": wanted(shape=(1,))}}, 0, {}, 0, id="refused: nothing is read"
        ),
    ],
)
def test_bytes_of_one_leaf(leaf, options, read, by_memory, on_host):
    """Read once, as saved; landing as it comes back, on each device that it is on."""
    plan = plan_of(manifest_of({"w": leaf}), **options)
    present = options.get("present", HERE)
    assert (plan.bytes_read, plan.bytes_by_memory, plan.bytes_on_host) == (read, by_memory, on_host)
    assert plan.bytes_per_device == {**on_devices(0, present.device_ids), **by_memory.get("device", {})}
    shares = {nbytes for of in by_memory.values() for nbytes in of.values()} or {0}
    (outcome,) = plan.outcomes
    assert {outcome.bytes_per_device} == ({None} if plan.unaccounted else shares)


def test_bytes_of_several_leaves_add_up():
    """On each device, in each memory kind; what is not known stands apart."""
    half = mesh_of({"x": 4}, ids=(4, 5, 6, 7))
    saved = manifest_of(
        {
            "a": array(on(MESH, "d", "m")),
            "b": array(on(half, "x")),
            "c": array(on(half, kind="pinned_host")),
            "d": array(SingleDeviceRecord(device_id=7)),
            "e": array(SingleDeviceRecord(device_id=0), (), committed=False),
            "f": array(on(MESH)),
            "g": array(None),
            "h": array(on(MESH)),
        }
    )
    targets = {**dict.fromkeys("abcd", TargetRecord()), "e": TargetRecord(), "f": wanted(concrete=True)}
    targets |= {"g": TargetRecord(), "k": wanted(keepable=True)}
    plan = plan_of(saved, targets, policy=RestorePolicy(missing="keep", extra="ignore"))
    assert plan.refused == ()
    assert plan.bytes_by_memory == {
        "device": {0: 36, 1: 32, 2: 32, 3: 32, 4: 96, 5: 96, 6: 96, 7: 352},
        "pinned_host": {4: 256, 5: 256, 6: 256, 7: 256},
    }
    assert plan.bytes_per_device == plan.bytes_by_memory["device"]
    assert (plan.bytes_read, plan.bytes_on_host) == (6 * 256 + 4, 256)
    assert plan.unaccounted == (path("f"),)
    assert plan.left_out == (path("h"),)


@pytest.mark.parametrize(
    ("leaves", "targets", "idle"),
    [
        pytest.param({"w": array(on(MESH))}, None, (), id="none: a mesh is on every device"),
        pytest.param(
            {"w": array(on(mesh_of({"x": 4}, ids=(7, 5, 3, 1))))}, None, (0, 2, 4, 6), id="those beside a mesh"
        ),
        pytest.param(
            {"w": array(on(mesh_of({"x": 4}))), "v": array(on(mesh_of({"y": 2}, ids=(5, 6))))},
            None,
            (4, 7),
            id="those beside two meshes",
        ),
        pytest.param({"w": array(SingleDeviceRecord(device_id=2))}, None, (), id="none where there is no mesh"),
        pytest.param(
            {"v": array(on(mesh_of({"x": 2}))), "w": array(None)},
            {"v": wanted(), "w": wanted(on(mesh_of({"y": 4})), concrete=True)},
            (4, 5, 6, 7),
            id="those beside a mesh of the target too",
        ),
    ],
)
def test_devices_are_idle(leaves, targets, idle):
    """Present ones that no mesh is on, in the order of `jax.devices()`."""
    assert plan_of(manifest_of(leaves), targets).idle_device_ids == idle


# JSON.


def plan_of_everything() -> RestorePlan:
    """Every class and every kind of placement that a plan can hold; made by hand, where no one restore has all of them."""
    planned_mesh = planned(mesh=mesh_of({"d": 4, "m": 2}), source="new", recorded=MESH)
    prng = PrngRecord(impl="rbg", key_shape=(4,))
    leaves: list[tuple[Any, Any, Any]] = [
        (array(on(MESH, "d")), OnMesh(mesh=planned_mesh, spec=SpecRecord(), memory_kind="device"), "recorded"),
        (
            array(SingleDeviceRecord(device_id=9), dtype="uint32", prng=prng),
            OnDevice(device_id=None, memory_kind="device"),
            "one device",
        ),
        (array(None), Uncommitted(memory_kind="device"), "uncommitted"),
        (array(on(MESH, UNCONSTRAINED)), AsTarget(sharding=on(mesh_of({"x": 8}), "x")), "target"),
        (array(on(MESH)), AsFallback(sharding=SingleDeviceRecord(device_id=0)), "fallback"),
        (ValueRecord(type="np.ndarray", shape=(2,), dtype="int8"), OnHost(type="np.ndarray"), "host"),
        (None, Kept(), "kept"),
        (array(on(MESH)), NotPlaced(problems=(0,)), "refused"),
    ]
    outcomes = tuple(
        Outcome(
            path=path(f"w{i}"),
            source=None if recorded is None else path("old", i),
            recorded=recorded,
            placement=placement,
            rule=rule,
            shape=(8, 8),
            dtype="float32",
            changes=(Change(kind="cast", text="int8 -> float32"),),
        )
        for i, (recorded, placement, rule) in enumerate(leaves)
    )
    return RestorePlan(
        outcomes=outcomes,
        present=HERE,
        recorded=fake_inventory(8, first_id=1),
        tree=ContainerRecord(
            kind="namedtuple", keys=(Key("attr", "w"),), children=(array(None),), module="optax", qualname="State"
        ),
        left_out=(path("l", 3),),
        refused=(
            Problem(could_not="cannot", recorded="a", present="b", affects=("w7",), of=8, fix="do", about="mesh"),
        ),
        notes=("a note",),
        default_device_ids=(0,),
    )


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from objects(item)


# Not by their class's name: what a plan is, one entry of its outcomes, changes, which have a kind of their own, and its
# tree, whose leaves the outcomes are.
SPELLED_OUT = {"RestorePlan", "Outcome", "Change", "ContainerRecord"}
# What no plan holds.
ELSEWHERE = {"Manifest"}


def classes_of_a_plan() -> dict[str, type]:
    """Every dataclass of the files whose values a plan holds."""
    found = [value for module in (_outcomes, _records) for value in vars(module).values() if isinstance(value, type)]
    return {cls.__name__: cls for cls in (*found, Problem, RestorePlan) if dataclasses.is_dataclass(cls)}


def test_the_json_has_every_field_of_every_class_that_a_plan_holds():
    """A field that is added and forgotten fails here; as does a class."""
    document = json.loads(plan_of_everything().to_json())
    seen = {}
    for found in objects(document):
        seen.setdefault(found.get("kind"), found)
    classes = {name: cls for name, cls in classes_of_a_plan().items() if name not in SPELLED_OUT | ELSEWHERE}
    assert len(classes) == 18
    assert set(classes) <= set(seen), f"not in the JSON: {set(classes) - set(seen)}"
    for name, cls in classes.items():
        assert set(seen[name]) == {"kind", *(field.name for field in dataclasses.fields(cls))}, name
    in_plan = {field.name for field in dataclasses.fields(RestorePlan)}
    assert {"containers" if name == "tree" else name for name in in_plan} <= set(document)
    for outcome in document["outcomes"]:
        assert {field.name for field in dataclasses.fields(Outcome)} <= set(outcome)
        for change in outcome["changes"]:
            assert set(change) == {field.name for field in dataclasses.fields(Change)}
    assert set(document["containers"][0]) == {"path", "keys", "kind", "children", "class"}


OTHERWISE = {
    "outcomes": (),
    "present": TWO,
    "recorded": None,
    "tree": None,
    "left_out": (),
    "refused": (),
    "notes": (),
    "default_device_ids": (1,),
    "path": path("x"),
    "source": path("x"),
    "placement": OnHost(type="int"),
    "rule": "rules",
    "shape": (1,),
    "dtype": "int8",
    "changes": (),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RestorePlan)])
def test_no_two_plans_have_one_json(field):
    """Whichever field they differ in."""
    plan = plan_of_everything()
    assert dataclasses.replace(plan, **{field: OTHERWISE[field]}).to_json() != plan.to_json()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Outcome)])
def test_no_two_outcomes_have_one_json(field):
    """Whichever field they differ in."""
    plan = plan_of_everything()
    first, *others = plan.outcomes
    other = dataclasses.replace(first, **{field: OTHERWISE[field]})
    assert dataclasses.replace(plan, outcomes=(other, *others)).to_json() != plan.to_json()


def test_a_leaf_in_json_reads_like_this():
    """Meshes by their position; the path as text and with its typed keys; what was saved, and what lands."""
    saved = manifest_of({"w": array(on(MESH, "d", "m"))})
    document = json.loads(plan_of(saved, present=fake_inventory(4)).to_json())
    assert document["outcomes"] == [
        {
            "path": "w",
            "keys": [["dict", "w"]],
            "rule": "recorded",
            "recorded": {
                "kind": "ArrayRecord",
                "shape": [8, 8],
                "dtype": "float32",
                "sharding": {
                    "kind": "NamedShardingRecord",
                    "mesh": 0,
                    "spec": {
                        "kind": "SpecRecord",
                        "partitions": ["d", "m"],
                        "unreduced": [],
                        "reduced": [],
                        "unreduced_kind": None,
                    },
                    "memory_kind": "device",
                },
                "committed": True,
                "prng": None,
            },
            "placement": {
                "kind": "OnMesh",
                "mesh": 0,
                "spec": {
                    "kind": "SpecRecord",
                    "partitions": ["d", "m"],
                    "unreduced": [],
                    "reduced": [],
                    "unreduced_kind": None,
                },
                "memory_kind": "device",
            },
            "shape": [8, 8],
            "dtype": "float32",
            "changes": [
                {
                    "kind": "resized",
                    "text": "(d=2 explicit, m=4 explicit) resized to (d=1 explicit, m=4 explicit)",
                }
            ],
            "bytes_read": 256,
            "bytes_per_device": 64,
        }
    ]
    (planned_mesh,) = document["meshes"]
    assert (planned_mesh["mesh"]["axis_sizes"], planned_mesh["device_ids"]) == ([1, 4], [0, 1, 2, 3])
    assert planned_mesh["recorded"] == document["recorded_meshes"][0]
    assert document["bytes_by_memory"] == {"device": {"0": 64, "1": 64, "2": 64, "3": 64}}


def test_meshes_are_not_repeated_for_each_leaf():
    """However many leaves are on them: meshes x devices + leaves, never leaves x devices."""
    run = fake_inventory(512)
    meshes = [mesh_of({"a": 512}), mesh_of({"b": 2, "c": 256})]

    def text(count: int) -> str:
        leaves = {f"w{i}": array(on(meshes[i % 2], meshes[i % 2].axis_names[-1]), (512,)) for i in range(count)}
        return plan_of(manifest_of(leaves, run), present=fake_inventory(512, first_id=1000)).to_json()

    assert text(4).count('"axis_names"') == text(400).count('"axis_names"') == 6
    assert len(text(400)) - len(text(4)) < 396 * 1000


def test_a_json_of_containers_has_each_kind_and_class():
    """Without a target they are part of the result."""
    tree = ContainerRecord(
        kind="dict",
        keys=(Key("dict", 3), Key("dict", 7)),
        children=(
            ContainerRecord(kind="none"),
            ContainerRecord(
                kind="namedtuple", keys=(Key("attr", "mu"),), children=(array(None),), module="optax", qualname="State"
            ),
        ),
    )
    plan = plan_from_records(Manifest(tree=tree), None, HERE)
    assert json.loads(plan.to_json())["containers"] == [
        {"path": ".", "keys": [], "kind": "dict", "children": [["dict", 3], ["dict", 7]], "class": ""},
        {"path": "3", "keys": [["dict", 3]], "kind": "none", "children": [], "class": ""},
        {
            "path": "7",
            "keys": [["dict", 7]],
            "kind": "namedtuple",
            "children": [["attr", "mu"]],
            "class": "optax.State",
        },
    ]
    assert json.loads(plan_of(targets={"w": wanted()}).to_json())["containers"] is None


def test_json_is_indented_where_that_is_asked_for():
    """One line by default."""
    plan = plan_of()
    assert "\n" not in plan.to_json()
    assert plan.to_json(indent=2).startswith('{\n  "version": 1,\n  "refused": [],\n')
    assert json.loads(plan.to_json(indent=2)) == json.loads(plan.to_json())


@given(restores())
def test_any_plan_is_json(restore):
    """One entry a leaf, and totals that a program need not add up."""
    plan = plan_from_records(**restore)
    document = json.loads(plan.to_json())
    assert [entry["path"] for entry in document["outcomes"]] == [_text(o) for o in plan.outcomes]
    assert document["bytes_read"] == sum(entry["bytes_read"] for entry in document["outcomes"])
    positions = [entry["placement"].get("mesh") for entry in document["outcomes"] if entry["rule"] == "recorded"]
    assert all(position in range(len(document["meshes"])) for position in positions)
    refusals = {
        p for entry in document["outcomes"] if entry["rule"] == "refused" for p in entry["placement"]["problems"]
    }
    assert refusals <= set(range(len(document["refused"])))


def _text(outcome: Outcome) -> str:
    return "/".join(str(key.name) for key in outcome.path)
