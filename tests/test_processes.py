"""Real processes: what so many write, others of another number restore.

Every layout has eight devices. The one with a single process is this very process; the others are started once each,
and report on all that is asked of them. A report is the traceback of what went wrong, empty where nothing did.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import fronts
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
import stock_readers
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stock_readers import Seen, Wanted
from trees import Moments, array_state, assert_same_tree, assert_same_values, host_state, matrix, pending_sum, place

import orbax_explicit as oxe
from orbax_explicit import _arrays as arrays_module
from orbax_explicit import _trees as trees_module
from orbax_explicit import v1 as oxe1
from orbax_explicit.testing import run_on_devices

# The fixtures start processes once; with several workers, one of them is to have all tests of this file.
pytestmark = pytest.mark.xdist_group("processes")

ONE, TWO, FOUR = "1 process x 8", "2 processes x 4", "4 processes x 2"
LAYOUTS = {ONE: (1, 8), TWO: (2, 4), FOUR: (4, 2)}
STEP = 3


def make_mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def whole_state(mesh: Mesh) -> dict[str, Any]:
    """Arrays of every layout, values on the host of every type, containers of every kind."""
    return {
        "arrays": array_state(mesh),
        "host": host_state(),
        "moments": Moments(mean=place(mesh, matrix(), P("m")), variance=(jnp.float32(1), [jnp.float32(2)])),
        "by_int": {0: place(mesh, -matrix(), P("m", "d"))},
    }


def plain_state(mesh: Mesh) -> dict[str, Any]:
    """What v1's own functions take: they refuse some values on the host before any handler is asked."""
    return {name: part for name, part in whole_state(mesh).items() if name != "host"}


def stock_state(mesh: Mesh) -> dict[str, Any]:
    """The arrays that stock Orbax can save in several processes, and whose layout it records whole."""
    arrays = array_state(mesh)
    names = ("sharded", "two_axes", "inner", "replicated", "scalar_on_mesh", "keys")
    return {name: arrays[name] for name in names}


# Ways to save and restore. Each is collective.


@dataclass(frozen=True)
class Way:
    """One way to save and to restore.

    Attributes:
        state: What is saved, on a mesh.
        save: Saves it under a directory that does not exist yet.
        restore: Restores what `save` saved.
        in_steps: Whether it is saved as step `STEP`.
    """

    state: Callable[[Mesh], Any]
    save: Callable[[pathlib.Path, Any], None]
    restore: Callable[[pathlib.Path], Any]
    in_steps: bool = False


def save_sync(path: pathlib.Path, state: Any) -> None:
    with ocp.Checkpointer(oxe.ExplicitCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=oxe.args.ExplicitSave(state))


def restore_sync(path: pathlib.Path) -> Any:
    with ocp.Checkpointer(oxe.ExplicitCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path)


def make_manager(path: pathlib.Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
    return ocp.CheckpointManager(path, item_handlers=oxe.ExplicitCheckpointHandler(), options=options)


def save_managed(path: pathlib.Path, state: Any) -> None:
    with make_manager(path) as manager:
        manager.save(STEP, args=oxe.args.ExplicitSave(state))


def restore_managed(path: pathlib.Path) -> Any:
    with make_manager(path) as manager:
        return manager.restore(STEP)


def save_registered(path: pathlib.Path, state: Any) -> None:
    with oxe.registered(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore_registered(path: pathlib.Path) -> Any:
    with oxe.registered(), ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def save_by_v1_checkpointer(path: pathlib.Path, state: Any) -> None:
    with ocp1.training.Checkpointer(path, context=oxe1.context()) as checkpointer:
        checkpointer.save_async(STEP, state)


def restore_by_v1_checkpointer(path: pathlib.Path) -> Any:
    with ocp1.training.Checkpointer(path, context=oxe1.context()) as checkpointer:
        return checkpointer.load(STEP)


REGISTERED = "by stock's StandardCheckpointer under register"
WAYS = {
    "asynchronously": Way(whole_state, fronts.save, fronts.restore),
    "synchronously": Way(whole_state, save_sync, restore_sync),
    "by a CheckpointManager": Way(whole_state, save_managed, restore_managed, in_steps=True),
    REGISTERED: Way(array_state, save_registered, restore_registered),
    "by stock Orbax": Way(stock_state, fronts.save_stock, fronts.restore),
    "by v1": Way(whole_state, oxe1.save, oxe1.load),
    "by v1's training.Checkpointer": Way(
        plain_state, save_by_v1_checkpointer, restore_by_v1_checkpointer, in_steps=True
    ),
    "by stock Orbax's v1": Way(stock_state, ocp1.save, oxe1.load),
}

Case: TypeAlias = tuple[str, str]
"""A layout that saved, and the way in which it did."""


def checkpoint(root: pathlib.Path, layout_name: str, way: str) -> pathlib.Path:
    return root / f"{layout_name}, {way}"


def save_all(root: pathlib.Path, layout_name: str) -> None:
    state = {way: made.state(make_mesh()) for way, made in WAYS.items()}
    for way, made in WAYS.items():
        made.save(checkpoint(root, layout_name, way), state[way])


def restore_all(root: pathlib.Path, layout_name: str) -> dict[Case, str]:
    """Restores all that one layout saved, each in its way; every array lands as if it had been made here."""
    reports = {}
    for way, made in WAYS.items():
        path = checkpoint(root, layout_name, way)
        reports[layout_name, way] = report(
            lambda made=made, path=path: assert_same_tree(made.restore(path), made.state(make_mesh()))
        )
    return reports


def report(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:  # noqa: BLE001 - the test that asks for this case shows it
        return traceback.format_exc()
    return ""


# What is looked at in two processes alone.


def init() -> dict[str, jax.Array]:
    return {"w": jax.reshard(jnp.ones((8, 8)), P("m", "d")), "step": jnp.int32(0)}


def restore_into_eval_shape(root: pathlib.Path, layout_name: str) -> None:
    """A target on an abstract mesh becomes a concrete one over the devices of all processes."""
    mesh = make_mesh()
    path = root / f"{layout_name}, for eval_shape"
    with jax.set_mesh(mesh):
        target = jax.eval_shape(init)
    for under in (True, False):
        if under:
            with jax.set_mesh(mesh):
                restored = fronts.restore(path, target)
        else:
            restored = fronts.restore(path, target)
        assert restored["w"].sharding == NamedSharding(mesh, P("m", "d"), memory_kind="device")
        assert_same_values(restored["w"], place(mesh, matrix(), P("m", "d")))
        assert not restored["step"].committed
        assert int(restored["step"]) == 5


def save_for_eval_shape(root: pathlib.Path, layout_name: str) -> None:
    state = {"w": place(make_mesh(), matrix(), P("d", "m")), "step": jnp.int32(5)}
    fronts.save(root / f"{layout_name}, for eval_shape", state)


def count_written_records(root: pathlib.Path) -> dict[str, int]:
    """How often this process writes a record, by whoever is asked to save."""
    counts = {}
    state = array_state(make_mesh())
    for name, module, save in (
        ("handler", trees_module, fronts.save),
        ("registered", arrays_module, save_registered),
    ):
        with mock.patch.object(module, "write_records", wraps=module.write_records) as write:
            save(root / f"counted, {name}", state)
        counts[name] = write.call_count
    return counts


def try_to_save_a_local_array(root: pathlib.Path) -> dict[str, str]:
    """The text of the refusal of an array that is committed to one device here, and what the next save gives."""
    mesh = make_mesh()
    refused: dict[str, str] = {}
    local = jax.device_put(matrix(), jax.local_devices()[0])
    for name, save in (("handler", fronts.save), ("sync", save_sync), ("registered", save_registered)):
        path = root / f"refused, {name}"
        with pytest.raises(oxe.SaveRefusedError) as error:
            save(path, {"w": place(mesh, matrix(), P("d")), "mine": local, "n": {"mine": local}})
        refused[name] = str(error.value)
        state = {"w": place(mesh, matrix(), P("d"))}
        save(path, state)
        assert_same_tree(fronts.restore(path), state)
    return refused


def try_to_save_on_a_part(root: pathlib.Path) -> list[str]:
    """How a save is refused of an array on a mesh over the devices of one process, of either one."""
    refused = []
    for process in range(jax.process_count()):
        devices = [device for device in jax.devices() if device.process_index == process]
        mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit), devices=devices)
        part = jax.make_array_from_callback(
            (8, 8), NamedSharding(mesh, P("d")), lambda index: matrix()[index], dtype=np.float32
        )
        try:
            fronts.save(root / f"on a part, {process}", {"w": place(make_mesh(), matrix(), P("d")), "part": part})
        except Exception as error:  # noqa: BLE001 - the test shows it
            refused.append(f"{type(error).__name__}: {error}")
    return refused


def try_to_restore_too_wide_a_target(root: pathlib.Path) -> str:
    """The text of the refusal of a target on 16 devices; the next restore works."""
    path = root / f"{TWO}, for eval_shape"
    wide = AbstractMesh((4, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(wide, P("d")))}
    target |= {"step": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(oxe.MeshMismatchError) as error:
        fronts.restore(path, target)
    assert_same_values(fronts.restore(path)["w"], place(make_mesh(), matrix(), P("d", "m")))
    return str(error.value)


def try_to_restore_on_a_part(root: pathlib.Path) -> list[str]:
    """How a restore is refused onto devices of one process, by a mesh and by a target; neither process waits."""
    path = root / f"{TWO}, for eval_shape"
    devices = [device for device in jax.devices() if device.process_index == 1]
    part = jax.make_mesh((1, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit), devices=devices)
    target = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(part, P("d"))),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    refused = []
    with oxe.StandardCheckpointer() as checkpointer:
        for arguments in ({"mesh": part}, {"target": target}):
            with pytest.raises(oxe.MeshMismatchError) as error:
                checkpointer.restore(path, **arguments)
            refused.append(str(error.value).splitlines()[0])
    return refused


def save_values_of_its_own(root: pathlib.Path) -> dict[str, Any]:
    """Saves uncommitted arrays that differ between processes; returns what comes back."""
    index = jax.process_index()
    seen = {}
    for name, save, restore in (
        ("handler", fronts.save, fronts.restore),
        ("registered", save_registered, restore_registered),
    ):
        path = root / f"of its own, {name}"
        state = {
            "w": place(make_mesh(), matrix(), P("d")),
            "rank": jnp.arange(3) + 10 * index,
            "key": jax.random.key(index),
        }
        save(path, state)
        restored = restore(path)
        seen[name] = {
            "rank": np.asarray(restored["rank"]).tolist(),
            "key": np.asarray(jax.random.key_data(restored["key"])).tolist(),
            "committed": [restored[leaf].committed for leaf in ("rank", "key")],
            "on own device": [restored[leaf].devices() == {jax.local_devices()[0]} for leaf in ("rank", "key")],
        }
    return seen


def save_a_pending_sum(root: pathlib.Path) -> None:
    """It is made by all processes together before it is written."""
    mesh = make_mesh()
    path = root / "a pending sum"
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"grad": pending_sum(mesh)}, unreduced="reduce")
    restored = fronts.restore(path)["grad"]
    assert restored.sharding == NamedSharding(mesh, P("d", None), memory_kind="device")
    assert_same_values(restored, place(mesh, matrix() @ matrix(), P("d", None)))


REPLICAS = 6


def save_replicas(root: pathlib.Path) -> None:
    """Saves arrays of 1 MiB that every process has whole, and one that is split over the processes."""
    mesh = make_mesh()
    random = np.random.default_rng(0)
    values = [random.standard_normal((256, 1024)).astype(np.float32) for _ in range(REPLICAS + 1)]
    state = {f"w{i}": place(mesh, x, P() if i < REPLICAS else P("d")) for i, x in enumerate(values)}
    fronts.save(root / "replicas", state)
    assert_same_tree(fronts.restore(root / "replicas"), state)


def describe_plans(root: pathlib.Path) -> dict[str, tuple[str, str]]:
    """The plan for each checkpoint, as a person reads it and in full."""
    plans = {}
    for layout_name in (ONE, TWO):
        for way, made in WAYS.items():
            path = checkpoint(root, layout_name, way)
            plan = oxe.plan_restore(path / str(STEP) if made.in_steps else path)
            plans[f"{layout_name}, {way}"] = (str(plan), repr(plan.outcomes))
    return plans


@dataclass(frozen=True)
class Reports:
    """What one process has to say.

    Attributes:
        restored: How each restore went.
        facts: What else was looked at, by the name of the function that did.
    """

    restored: Mapping[Case, str]
    facts: Mapping[str, Any] = field(default_factory=dict)


def work_in_two(root: pathlib.Path) -> Reports:
    save_all(root, TWO)
    save_for_eval_shape(root, TWO)
    save_for_stock(root)
    restored = restore_all(root, ONE) | restore_all(root, TWO)
    for layout_name in (ONE, TWO):
        restored[layout_name, "for eval_shape"] = report(
            lambda layout_name=layout_name: restore_into_eval_shape(root, layout_name)
        )
    looks = (
        count_written_records,
        try_to_save_a_local_array,
        save_values_of_its_own,
        save_a_pending_sum,
        save_replicas,
        describe_plans,
        try_to_restore_too_wide_a_target,
        try_to_restore_on_a_part,
        try_to_save_on_a_part,  # Last: what fails in one process alone could leave the others behind.
    )
    return Reports(restored, {look.__name__: look(root) for look in looks})


def work_in_four(root: pathlib.Path) -> Reports:
    save_all(root, FOUR)
    save_for_eval_shape(root, FOUR)
    return Reports(restore_all(root, ONE) | restore_all(root, TWO) | restore_all(root, FOUR))


def work_in_two_again(root: pathlib.Path) -> Reports:
    restored = restore_all(root, FOUR)
    restored[FOUR, "for eval_shape"] = report(lambda: restore_into_eval_shape(root, FOUR))
    return Reports(restored)


@dataclass(frozen=True)
class Run:
    """Everything that was saved and reported.

    Attributes:
        root: Where the checkpoints are.
        restored: How each restore went, by the layout that restored, in each of its processes.
        facts: What each of two processes saw.
    """

    root: pathlib.Path
    restored: Mapping[str, tuple[Mapping[Case, str], ...]]
    facts: tuple[Mapping[str, Any], ...]


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Run:
    """Every layout saves, and restores what every layout saved."""
    assert (jax.process_count(), jax.device_count()) == LAYOUTS[ONE]
    root = tmp_path_factory.mktemp("processes")
    save_all(root, ONE)
    save_for_eval_shape(root, ONE)
    two = run_on_devices(work_in_two, root, processes=2, devices=4)
    four = run_on_devices(work_in_four, root, processes=4, devices=2)
    two_again = run_on_devices(work_in_two_again, root, processes=2, devices=4)
    one = restore_all(root, ONE) | restore_all(root, TWO) | restore_all(root, FOUR)
    return Run(
        root=root,
        restored={
            ONE: (one,),
            TWO: tuple({**a.restored, **b.restored} for a, b in zip(two, two_again, strict=True)),
            FOUR: tuple(reports.restored for reports in four),
        },
        facts=tuple(reports.facts for reports in two),
    )


@pytest.mark.parametrize("restored_in", [f"restored in {name}" for name in LAYOUTS])
@pytest.mark.parametrize("saved_in", [f"saved in {name}" for name in LAYOUTS])
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_comes_back_in_other_processes_without_a_target(run, way, saved_in, restored_in):
    """Values shard by shard, host values, containers, and the layout that the state would have been given there.

    That is: mesh axis names, sizes and types, device order, spec, memory kind, and uncommitted what was uncommitted.
    """
    reports = run.restored[restored_in.removeprefix("restored in ")]
    for process, reported in enumerate(reports):
        problem = reported[saved_in.removeprefix("saved in "), way]
        assert not problem, f"process {process} of {len(reports)}:\n{problem}"


@pytest.mark.parametrize("saved_in", LAYOUTS)
def test_an_eval_shape_target_is_resolved_in_two_processes(run, saved_in):
    """Its spec and axis types on the devices of both, under `jax.set_mesh` and outside of it."""
    for reported in run.restored[TWO]:
        assert not reported[saved_in, "for eval_shape"]


def test_each_process_plans_the_same(run):
    """In what a person reads, and in every outcome."""
    first, second = (facts["describe_plans"] for facts in run.facts)
    assert len(first) == 2 * len(WAYS)
    assert first == second


def test_only_the_primary_process_writes_the_record(run):
    """One file, by one process."""
    assert [facts["count_written_records"] for facts in run.facts] == [
        {"handler": 1, "registered": 1},
        {"handler": 0, "registered": 0},
    ]
    for way in WAYS:
        found = list(checkpoint(run.root, TWO, way).rglob("explicit_sharding.msgpack"))
        assert len(found) == (not way.startswith("by stock Orbax"))


def test_replicas_are_written_once_and_the_work_is_shared(run):
    """Each process writes half of what both have, and its own half of the array that is split over them."""
    path = run.root / "replicas"
    written = [
        sum(file.stat().st_size for file in (path / f"ocdbt.process_{process}" / "d").iterdir()) for process in (0, 1)
    ]
    each = (REPLICAS + 1) * 2**20 // 2
    for nbytes in written:
        assert each < nbytes < 1.02 * each
    assert oxe.verify(path).ok


def test_the_small_files_of_all_processes_have_digests(run, tmp_path):
    """They are complete only when every process has written its own."""
    path = shutil.copytree(checkpoint(run.root, TWO, "asynchronously"), tmp_path / "copy")
    report = oxe.verify(path)
    assert report.ok
    assert report.unchecked == ()
    (path / "array_metadatas" / "process_1").write_bytes(b"{}")
    (damage,) = oxe.verify(path).problems
    assert damage.file == "array_metadatas/process_1"


def test_a_committed_local_array_is_refused_by_name_in_every_process(run):
    """Neither process waits for the other, and the next save under the same path works."""
    for facts in run.facts:
        refused = facts["try_to_save_a_local_array"]
        assert refused.keys() == {"handler", "sync", "registered"}
        for text in refused.values():
            assert "cannot save an array that is committed to devices of some processes only" in text
            assert "mine, n/mine" in text


def test_an_array_on_the_devices_of_one_process_is_refused_by_name_in_every_process(run):
    """By the process that holds it, and by the one that holds nothing of it."""
    for facts in run.facts:
        refused = facts["try_to_save_on_a_part"]
        assert len(refused) == 2
        for text in refused:
            assert text.startswith("SaveRefusedError: "), text
            assert "part" in text


def test_a_restore_that_is_refused_is_so_in_every_process(run):
    """With the same words, and the next restore works."""
    first, second = (facts["try_to_restore_too_wide_a_target"] for facts in run.facts)
    assert first == second
    assert first.startswith(
        "cannot resolve the target's mesh (d=4 explicit, m=4 explicit): it has 16 devices\n"
        "  present   8 cpu devices, 2 processes\n"
    )


def test_a_restore_onto_devices_of_one_process_is_refused_in_both(run):
    """Rather than one that fails while the other waits."""
    text = "cannot restore onto mesh (d=1 explicit, m=4 explicit): it has no device of process 0"
    assert [facts["try_to_restore_on_a_part"] for facts in run.facts] == [[text, text]] * 2


def test_uncommitted_local_arrays_have_the_value_of_the_primary_process(run):
    """Each process restores its own array of it, uncommitted, on its own device."""
    one = {
        "rank": [0, 1, 2],
        "key": np.asarray(jax.random.key_data(jax.random.key(0))).tolist(),
        "committed": [False, False],
        "on own device": [True, True],
    }
    for facts in run.facts:
        assert facts["save_values_of_its_own"] == {"handler": one, "registered": one}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("saved_in", LAYOUTS)
def test_every_process_lists_every_array(run, saved_in, way):
    """Arrays of size zero and uncommitted ones among them: stock Orbax asks any of these files for keys."""
    made = WAYS[way].state(make_mesh())
    arrays = {
        ".".join(ocp.tree.str_keypath(path))
        for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]
        if isinstance(leaf, jax.Array)
    }
    (directory,) = checkpoint(run.root, saved_in, way).rglob("array_metadatas")
    files = {file.name: json.loads(file.read_text()) for file in directory.iterdir()}
    assert files.keys() == {f"process_{i}" for i in range(LAYOUTS[saved_in][0])}
    for file in files.values():
        listed = [item["array_metadata"]["param_name"] for item in file["array_metadatas"]]
        assert sorted(listed) == sorted(arrays)


# Stock Orbax where the package cannot be imported.


def wanted(array: jax.Array) -> Wanted:
    """What stock is to restore an array into: split in its first dimension over x, where that divides it."""
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    dtype = f"key:{jax.random.key_impl(array)}" if is_key else array.dtype.name
    return Wanted(array.shape, dtype, tuple("x" if size == 8 else None for size in array.shape[:1]))


def save_for_stock(root: pathlib.Path) -> None:
    fronts.save(root / FOR_STOCK, array_state(make_mesh()))


FOR_STOCK = "for stock"


@pytest.mark.parametrize(
    ("restored_in", "device_ids"),
    [(ONE, (0, 1, 2, 3, 4, 5, 6, 7)), (TWO, (0, 1, 2, 3, 2048, 2049, 2050, 2051))],
    ids=[f"in {ONE}", f"in {TWO}"],
)
def test_stock_restores_what_two_processes_wrote(run, restored_in, device_ids):
    """Into a target of concrete shardings on all devices, with the values of every shard, without the package."""
    state = array_state(make_mesh())
    processes, devices = LAYOUTS[restored_in]
    items = {"ours": run.root / FOR_STOCK, "registered": checkpoint(run.root, TWO, REGISTERED)}
    looks = run_on_devices(
        stock_readers.restore_into_concrete,
        items,
        jax.tree.map(wanted, state),
        processes=processes,
        devices=devices,
        hidden_modules=("orbax_explicit",),
    )
    for look in looks:
        assert look.keys() == items.keys()
        for seen in look.values():
            assert seen.keys() == state.keys()
            for name, array in state.items():
                spec = repr(P(*wanted(array).spec))
                mesh = ((("x", 4), ("y", 2)), ("Explicit", "Auto"), device_ids)
                assert seen[name].layout == ("named", *mesh, spec, "device"), name
                assert seen[name].dtype == str(array.dtype), name
                assert_seen_values(seen[name], array, name)
    assert {index for look in looks for index in first_rows(look["ours"]["sharded"])} == {0, 2, 4, 6}


def assert_seen_values(seen: Seen, array: jax.Array, name: str) -> None:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(array) if is_key else array)
    for index, data in seen.shards or (((), seen.value),):
        assert_same_values(data, values[index], name)


def first_rows(seen: Seen) -> set[int]:
    """The first row of each shard."""
    return {index[0].start or 0 for index, _ in seen.shards} or {0, 2, 4, 6}
