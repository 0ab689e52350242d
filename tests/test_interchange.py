"""Stock Orbax both ways: it restores what this package writes, and this package restores what it writes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
import stock_readers
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from stock_readers import (
    STEP,
    WITH_OR_WITHOUT_TARGET,
    WITHOUT_TARGET,
    Readings,
    Seen,
    Wanted,
    layout,
    named_leaves,
)
from trees import Moments, array_state, assert_same_tree, assert_same_values, matrix, place, training_state

import orbax_explicit as oxe
from orbax_explicit import _wire
from orbax_explicit._records import ArrayRecord, SingleDeviceRecord, path_text, replace_leaves
from orbax_explicit.testing import run_on_devices

# The fixtures start processes; with several workers, one of them is to have all tests of this file.
pytestmark = pytest.mark.xdist_group("interchange")

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def make_mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))


# Leaving: stock Orbax restores what this package wrote, where the package is and where it is not.

STOCK_HOST: dict[str, Any] = {
    "int": 3,
    "big_int": 2**63 + 1,
    "float": 2.5,
    "bool": True,
    "complex": np.array(1 + 2j),
    "str": "text with / and ~",
    "empty_str": "",
    "bytes": np.frombuffer(b"nul \0 inside and behind \0", np.uint8),
    "empty_bytes": np.zeros(0, np.uint8),
    "float32": 1.5,
    "int8": -3,
    "np_bool": np.array(True),
    "complex64": np.array(1 - 1j, np.complex64),
    "bfloat16": np.array(1.5, jnp.bfloat16),
    "array": np.arange(3),
    "array_0d": np.array(4.0),
    "array_bf16": np.arange(3).astype(jnp.bfloat16),
    "empty_array": np.zeros((0, 2)),
    "none": None,
    "dict": {},
    "list": [],
    "tuple": (),
    "nothing": None,
}
"""What stock Orbax makes of `trees.host_state`: it knows no bytes, and of scalars only int, float and bool."""


@dataclass(frozen=True)
class Left:
    """What this package saved, and what stock Orbax made of it.

    Attributes:
        state: What was saved.
        wanted: The target that stock read it into.
        readings: What stock Orbax made of it, by where.
    """

    state: Any
    wanted: Any
    readings: dict[str, Readings]


HIDDEN, IMPORTED = "where the package cannot be imported", "where the package is imported"


def save_every_way(directory: pathlib.Path, state: Any) -> pathlib.Path:
    """A directory with `state` as a checkpoint `item`, and as step 7 under the manager's root `root`."""
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "item", state)
    with ocp.CheckpointManager(directory / "root", item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        manager.save(STEP, args=oxe.args.ExplicitSave(state))
    return directory


def without_text(host: dict[str, Any]) -> dict[str, Any]:
    """The values on the host that stock's StandardCheckpointer takes in a target."""
    return {name: value for name, value in host.items() if not isinstance(value, str)}


def wanted_tree(state: Any) -> Any:
    """A target like `state` for stock Orbax: arrays sharded by their first dimension over x, host values as it knows."""

    def wanted(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        dtype = f"key:{jax.random.key_impl(leaf)}" if is_key else leaf.dtype.name
        return Wanted(leaf.shape, dtype, tuple("x" if size == 8 else None for size in leaf.shape[:1]))

    # Without classes of modules that import the package.
    state = {**state, "host": without_text(STOCK_HOST), "moments": state["moments"]._asdict()}
    return jax.tree.map(wanted, state)


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Left:
    """A training state that this package saved, read by stock Orbax in every way, here and in another process."""
    state = training_state(make_mesh())
    whole = save_every_way(tmp_path_factory.mktemp("whole"), state)
    targetable = save_every_way(tmp_path_factory.mktemp("targetable"), {**state, "host": without_text(state["host"])})
    arguments = (whole, targetable, wanted_tree(state))
    (hidden,) = run_on_devices(
        stock_readers.read_where_only_stock_is, *arguments, devices=8, hidden_modules=("orbax_explicit",)
    )
    return Left(state, arguments[-1], {HIDDEN: hidden, IMPORTED: stock_readers.read_every_way(*arguments)})


def stock_layout(array: jax.Array) -> stock_readers.Layout:
    """The layout that stock Orbax restores without a target: it knows neither memory kinds nor reduced axes."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return layout(NamedSharding(sharding.mesh, P(*sharding.spec.partitions), memory_kind="device"))
    return layout(sharding)


def assert_seen(
    seen: dict[str, Seen] | str, state: Any, host: dict[str, Any], empty_state: Any, where: Callable[[str], Any]
) -> None:
    """Every leaf has the type, dtype and value that stock Orbax gives it, and every array is where it should be."""
    assert isinstance(seen, dict), seen
    arrays = named_arrays(state)
    others = {f"host/{name}": value for name, value in host.items()}
    expected = {**arrays, **others, "opt_state/1": empty_state, "opt_state/2": empty_state}
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        leaf = seen[name]
        if name in arrays:
            assert (leaf.type, leaf.dtype, leaf.layout) == ("Array", str(value.dtype), where(name)), name
            assert_same_values(leaf.value, np.asarray(raw(value)), name)
        else:
            assert (leaf.type, leaf.dtype) == (type(value).__name__, str(getattr(value, "dtype", ""))), name
            np.testing.assert_equal(leaf.value, value, name)


def named_arrays(state: Any) -> dict[str, jax.Array]:
    return {name: leaf for name, leaf in named_leaves(state).items() if isinstance(leaf, jax.Array)}


def raw(array: jax.Array) -> jax.Array:
    """The array, of PRNG keys their data."""
    return jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array


@pytest.mark.parametrize("where", [HIDDEN, IMPORTED])
@pytest.mark.parametrize("reader", WITHOUT_TARGET)
def test_stock_restores_what_we_wrote(left, reader, where):
    """Values, and layouts as far as stock knows them, axis types among them: without a target, on the same devices."""
    arrays = named_arrays(left.state)
    seen = left.readings[where].without_target[reader]
    assert_seen(seen, left.state, STOCK_HOST, None, lambda name: stock_layout(arrays[name]))


@pytest.mark.parametrize("where", [HIDDEN, IMPORTED])
@pytest.mark.parametrize("reader", WITH_OR_WITHOUT_TARGET)
def test_stock_restores_what_we_wrote_into_a_target(left, reader, where):
    """Onto the target's shardings, on a mesh that is not the saved one."""
    target = named_leaves(stock_readers.make_target(left.wanted, stock_readers.target_mesh()))
    seen = left.readings[where].into_target[reader]
    assert_seen(
        seen, left.state, without_text(STOCK_HOST), optax.EmptyState(), lambda name: layout(target[name].sharding)
    )


@pytest.mark.parametrize("where", [HIDDEN, IMPORTED])
def test_stock_tells_the_metadata_of_what_we_wrote(left, where):
    """Shape, dtype, mesh axes, their types and the spec, from a manager that has restored nothing."""
    seen = left.readings[where].metadata
    for name, array in named_arrays(left.state).items():
        data = raw(array)
        shape, dtype, axes, types, spec = seen[name]
        assert (shape, dtype) == (data.shape, data.dtype.name), name
        if isinstance(array.sharding, NamedSharding):
            assert (axes, types) == (("d", "m"), ("Explicit", "Explicit")), name
            assert spec[: len(array.sharding.spec.partitions)] == array.sharding.spec.partitions, name
        else:
            assert (axes, types, spec) == (None, None, None), name


# Coming: this package restores what stock Orbax wrote.


def stock_state(mesh: Mesh) -> dict[str, Any]:
    """What stock Orbax can save of a training state: no value is on the host that it would change."""
    keys = jax.random.split(jax.random.key(7), 8)
    return {
        "layers": ({"w": place(mesh, matrix(), P("d", "m"))}, {"w": place(mesh, -matrix(), P(("d", "m"), None))}),
        "moments": Moments(mean=place(mesh, matrix(dtype=jnp.bfloat16), P(None, "m")), variance=[jnp.float32(1)]),
        "by_int": {0: place(mesh, matrix(), P()), 1: place(mesh, np.float32(2.5), P())},
        "on_device_3": jax.device_put(matrix(), jax.devices()[3]),
        "step": jnp.int32(5),
        "key": jax.random.key(3, impl="rbg"),
        "keys": jax.jit(lambda: keys, out_shardings=NamedSharding(mesh, P("d")))(),
        "host": {"array": np.arange(3), "int": 3, "float": 2.5, "bool": True},
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }


def on_first(array: jax.Array) -> jax.Array:
    """The array, committed to the first device."""
    return jax.device_put(array, jax.devices()[0])


def as_stock_keeps_it(state: dict[str, Any], *, rich: bool = False) -> dict[str, Any]:
    """What stock's files say of `stock_state`: nothing is uncommitted, and without rich types, few containers."""
    state = {**state, "step": on_first(state["step"]), "key": on_first(state["key"])}
    mean, (variance,) = state["moments"]
    state["moments"] = Moments(mean=mean, variance=[on_first(variance)])
    if not rich:
        state["layers"] = list(state["layers"])
        state["moments"] = state["moments"]._asdict()
    state["by_int"] = {str(name): array for name, array in state["by_int"].items()}
    return state


def write_standard(directory: pathlib.Path, state: Any) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "item", state)
    return directory / "item"


def write_pytree(directory: pathlib.Path, state: Any, **options: Any) -> pathlib.Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(directory / "item", args=ocp.args.PyTreeSave(state))
    return directory / "item"


def write_zarr3(directory: pathlib.Path, state: Any) -> pathlib.Path:
    return write_pytree(directory, state, use_zarr3=True)


def write_without_ocdbt(directory: pathlib.Path, state: Any) -> pathlib.Path:
    return write_pytree(directory, state, use_ocdbt=False)


def write_rich(directory: pathlib.Path, state: Any) -> pathlib.Path:
    from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

    return write_pytree(directory, state, pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True))


def write_managed(directory: pathlib.Path, state: Any) -> pathlib.Path:
    with ocp.CheckpointManager(directory / "root") as manager:
        manager.save(STEP, args=ocp.args.StandardSave(state))
    return directory / "root" / str(STEP) / "default"


def write_managed_step(directory: pathlib.Path, state: Any) -> pathlib.Path:
    return write_managed(directory, state).parent


def write_v1(directory: pathlib.Path, state: Any) -> pathlib.Path:
    ocp1.save(directory / "item", state)
    return directory / "item"


V0_WRITERS = {
    "StandardCheckpointer": write_standard,
    "PyTreeCheckpointer": write_pytree,
    "PyTreeCheckpointer, in Zarr 3": write_zarr3,
    "PyTreeCheckpointer, without OCDBT": write_without_ocdbt,
    "PyTreeCheckpointer, with rich types": write_rich,
    "CheckpointManager": write_managed,
    "CheckpointManager, read by the path of the step": write_managed_step,
}
WRITERS = {**V0_WRITERS, "v1 save": write_v1}


def restore(path: pathlib.Path, target: Any = None, **kwargs: Any) -> Any:
    with oxe.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target, **kwargs)


@pytest.fixture(scope="module")
def came(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The path of what each way of stock Orbax wrote of `stock_state`, by its name."""
    state = stock_state(make_mesh())
    return {name: write(tmp_path_factory.mktemp("came"), state) for name, write in WRITERS.items()}


@pytest.mark.parametrize("writer", WRITERS)
def test_we_restore_what_stock_wrote(came, writer):
    """All that stock's files say: values, layouts, keys, and the containers where they say more than list and dict."""
    expected = as_stock_keeps_it(stock_state(make_mesh()), rich=writer == "PyTreeCheckpointer, with rich types")
    assert_same_tree(restore(came[writer]), expected)


@pytest.mark.parametrize("writer", WRITERS)
def test_we_restore_what_stock_wrote_into_the_state_itself(came, writer):
    """The target's containers, shardings and commitment."""
    state = stock_state(make_mesh())
    assert_same_tree(restore(came[writer], state), state)


def test_a_manager_restores_steps_that_it_wrote_before_it_knew_the_package(came):
    """By stock's own arguments, by ours, and by none."""
    root = came["CheckpointManager"].parents[1]
    expected = as_stock_keeps_it(stock_state(make_mesh()))
    with ocp.CheckpointManager(root, handler_registry=oxe.handler_registry("default")) as manager:
        assert_same_tree(manager.restore(STEP), expected)
        assert_same_tree(manager.restore(STEP, args=ocp.args.StandardRestore()), expected)
        assert_same_tree(manager.restore(STEP, args=oxe.args.ExplicitRestore()), expected)


def abstract(array: Any, sharding: Any = None) -> Any:
    """The array without its values; other leaves as they are."""
    if not isinstance(array, jax.Array):
        return array
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def split_first(mesh: Mesh | AbstractMesh, axis: str) -> Callable[[Any], Any]:
    """Arrays split in their first dimension over one axis of a mesh, where it divides that."""

    def leaf(array: Any) -> Any:
        spec = P(*(axis if size == 8 else None for size in getattr(array, "shape", ())[:1]))
        return abstract(array, NamedSharding(mesh, spec, memory_kind="device"))

    return leaf


@pytest.mark.parametrize("writer", WRITERS)
def test_we_restore_what_stock_wrote_into_concrete_shardings(came, writer):
    """On another mesh than the recorded one, axis types and all."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO, EXPLICIT))
    state = stock_state(make_mesh())
    restored = restore(came[writer], jax.tree.map(split_first(mesh, "x"), state))
    assert_placed(restored, state, split_first(mesh, "x"))


@pytest.mark.parametrize("writer", WRITERS)
def test_we_restore_what_stock_wrote_into_an_abstract_mesh(came, writer):
    """It becomes the recorded devices, with the target's axis types and specs."""
    types = (AUTO, EXPLICIT)
    state = stock_state(make_mesh())
    target = jax.tree.map(split_first(AbstractMesh((2, 4), ("d", "m"), axis_types=types), "m"), state)
    expected = split_first(jax.make_mesh((2, 4), ("d", "m"), axis_types=types), "m")
    assert_placed(restore(came[writer], target), state, expected)


@pytest.mark.parametrize("writer", WRITERS)
def test_we_restore_what_stock_wrote_into_a_target_without_shardings(came, writer):
    """The recorded layouts, in the target's containers."""
    state = stock_state(make_mesh())
    restored = restore(came[writer], jax.tree.map(abstract, state))
    assert_same_tree(restored, jax.tree.map(lambda leaf: leaf if is_committed(leaf) else on_first(leaf), state))


def is_committed(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.committed


def assert_placed(restored: Any, state: Any, expected: Callable[[Any], Any]) -> None:
    """The values of `state`, each array with the sharding that `expected` gives it."""
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    values = named_leaves(state)
    for name, leaf in named_leaves(restored).items():
        if isinstance(leaf, jax.Array):
            assert layout(leaf.sharding) == layout(expected(leaf).sharding), name
            assert leaf.committed, name
        assert_same_values(leaf, values[name], name)


# What stock wrote elsewhere, or earlier, or what was damaged since.


def edit_layouts(item: pathlib.Path, edit: Callable[[dict[str, Any]], Any], *names: str) -> None:
    """Edits the entries of stock's `_sharding` file, of all arrays or of those named."""
    file = item / "_sharding"
    entries = json.loads(file.read_text())
    for key, text in entries.items():
        entry = json.loads(text)
        if not names or base64.urlsafe_b64decode(key).decode() in names:
            edit(entry)
        entries[key] = json.dumps(entry)
    file.write_text(json.dumps(entries))


def small_state(mesh: Mesh) -> dict[str, jax.Array]:
    return {"w": place(mesh, matrix(), P("d", "m")), "v": place(mesh, matrix(), P(None, ("d", "m")))}


@pytest.fixture
def written(tmp_path, mesh) -> pathlib.Path:
    """A checkpoint of two arrays on one mesh and of one array on a single device, by stock Orbax."""
    return write_standard(tmp_path, {**small_state(mesh), "one": jax.device_put(matrix(), jax.devices()[3])})


def test_a_checkpoint_without_axis_types_restores_as_auto_and_says_so(written):
    """Stock Orbax before 0.11.26 recorded none, and all its axes were auto."""
    edit_layouts(written, lambda entry: entry.pop("axis_types", None))
    plan = oxe.plan_restore(written)
    assert "no axis types were recorded; the mesh axes are auto: v, w" in str(plan)
    auto = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AUTO, AUTO))
    restored = restore(written)
    for name, array in small_state(auto).items():
        assert restored[name].sharding == array.sharding
        assert_same_values(restored[name], array, name)


@pytest.mark.parametrize(
    ("axis_types", "expected"),
    [("explicit", (EXPLICIT, EXPLICIT)), ({"m": EXPLICIT}, (AUTO, EXPLICIT))],
    ids=["of every axis", "of one axis"],
)
def test_a_policy_gives_the_axis_types_that_were_not_recorded(written, axis_types, expected):
    """And the plan says whose they are."""
    edit_layouts(written, lambda entry: entry.pop("axis_types", None))
    policy = oxe.RestorePolicy(axis_types=axis_types)
    assert "no axis types were recorded; those of the policy are used: v, w" in str(
        oxe.plan_restore(written, policy=policy)
    )
    restored = restore(written, policy=policy)
    for name, array in small_state(jax.make_mesh((2, 4), ("d", "m"), axis_types=expected)).items():
        assert restored[name].sharding == array.sharding


def renumber(number: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    """Gives the devices of a mesh other ids."""

    def edit(entry: dict[str, Any]) -> None:
        for row in entry.get("device_mesh", {}).get("mesh", ()):
            for device in row:
                device["id"] = number(device["id"])

    return edit


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(lambda i: i + 2048, id="those of a second process"),
        pytest.param(lambda i: i if i < 4 else i - 4 + 2048, id="those of two processes with four each"),
        pytest.param(lambda i: 7 - i + 100, id="ids that no CPU process has"),
    ],
)
def test_a_mesh_over_devices_with_other_ids_gets_the_same_shape(written, mesh, number):
    """As many devices are here: same axis names, sizes and types, in the order of `jax.make_mesh`."""
    edit_layouts(written, renumber(number))
    restored = restore(written)
    for name, array in small_state(mesh).items():
        assert restored[name].sharding == array.sharding
        assert_same_values(restored[name], array, name)


def rename_device_in_stock_file(directory: pathlib.Path) -> pathlib.Path:
    path = write_standard(directory, {"one": jax.device_put(matrix(), jax.devices()[3])})
    edit_layouts(path, lambda entry: entry.update(device_str="cuda:0"))
    return path


def rename_device_in_our_record(directory: pathlib.Path) -> pathlib.Path:
    path = directory / "item"
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"one": jax.device_put(matrix(), jax.devices()[3])})
    edit_record(
        path, lambda array: dataclasses.replace(array, sharding=SingleDeviceRecord(device_id=0, platform="gpu"))
    )
    return path


def edit_record(item: pathlib.Path, edit: Callable[[ArrayRecord], ArrayRecord]) -> None:
    """Edits each array in our record of a checkpoint."""
    manifest = oxe.read_manifest(item)
    tree = replace_leaves(manifest.tree, lambda path, leaf: edit(leaf) if isinstance(leaf, ArrayRecord) else leaf)
    (item / "explicit_sharding.msgpack").write_bytes(_wire.encode(dataclasses.replace(manifest, tree=tree)))


@pytest.mark.parametrize(
    "write", [rename_device_in_stock_file, rename_device_in_our_record], ids=["by stock Orbax", "by this package"]
)
def test_an_array_recorded_on_a_gpu_restores_to_the_default_device(tmp_path, write):
    """Committed there, and the plan says that the recorded device is not present."""
    path = write(tmp_path)
    assert "is not present; placed on the default device: one" in str(oxe.plan_restore(path))
    restored = restore(path)["one"]
    assert restored.sharding == SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    assert restored.committed
    assert_same_values(restored, matrix())


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "the file is missing": (
        lambda item: (item / "_sharding").unlink(),
        "no recorded layout for one and 2 other arrays: the _sharding file is missing",
    ),
    "the file is not JSON": (
        lambda item: (item / "_sharding").write_text('{"'),
        "no recorded layout for one and 2 other arrays: the _sharding file is not JSON",
    ),
    "an axis type is unknown": (
        lambda item: edit_layouts(item, lambda entry: entry.update(axis_types=["AxisType.Odd"] * 2), "v", "w"),
        "no recorded layout for v and 1 other array: unknown mesh axis type 'AxisType.Odd'",
    ),
    "a kind of sharding is unknown": (
        lambda item: edit_layouts(item, lambda entry: entry.update(sharding_type="OddSharding")),
        "no recorded layout for one and 2 other arrays: unknown kind of sharding 'OddSharding'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_layout_leaves_the_data_readable(written, mesh, damage):
    """One clear message; values without a target, values and shardings with one."""
    edit, note = DAMAGES[damage]
    edit(written)
    first, *others = oxe.plan_restore(written).notes
    assert first == note
    assert [text.partition(":")[0] for text in others] == ["stock Orbax records no containers"]
    target = jax.tree.map(split_first(mesh, "m"), {**small_state(mesh), "one": place(mesh, matrix())})
    with pytest.warns(UserWarning, match=re.escape(note)):
        whole = restore(written)
    with pytest.warns(UserWarning, match=re.escape(note)):
        restored = restore(written, target)
    for name, value in whole.items():
        assert_same_values(value, matrix(), name)
    for name, array in restored.items():
        assert array.sharding == NamedSharding(mesh, P("m"), memory_kind="device")
        assert_same_values(array, matrix(), name)


@pytest.mark.parametrize("damage", DAMAGES)
def test_stocks_checkpointers_under_register_read_the_data_behind_a_damaged_layout(written, mesh, damage):
    """Into a target, and without one as well."""
    DAMAGES[damage][0](written)
    target = jax.tree.map(split_first(mesh, "m"), {**small_state(mesh), "one": place(mesh, matrix())})
    with oxe.registered(), ocp.StandardCheckpointer() as checkpointer:
        into_target = checkpointer.restore(written, target)
        without_target = checkpointer.restore(written)
    for name, array in into_target.items():
        assert array.sharding == NamedSharding(mesh, P("m"), memory_kind="device")
        assert_same_values(array, matrix(), name)
    for name, value in without_target.items():
        assert_same_values(value, matrix(), name)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("registered", "checkpointer"),
    [(False, oxe.StandardCheckpointer), (True, ocp.StandardCheckpointer)],
    ids=["ours", "stock's under register"],
)
def test_metadata_never_raise_for_a_damaged_layout(written, damage, registered, checkpointer):
    """Shapes and dtypes are there; the sharding that cannot be told is None."""
    DAMAGES[damage][0](written)
    with oxe.registered() if registered else contextlib.nullcontext(), checkpointer() as made:
        tree = made.metadata(written).item_metadata.tree
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in tree.items()} == dict.fromkeys(
        ("one", "v", "w"), ((8, 8), "float32")
    )
    known = {"one"} if damage == "an axis type is unknown" else set()
    assert {name for name, leaf in tree.items() if leaf.sharding is not None} == known


# Looking without the devices.


def describe(path: pathlib.Path) -> dict[str, str]:
    """Name, shape, dtype, spec and mesh of each array, as text."""
    arrays = oxe.read_manifest(path).arrays
    return {path_text(name): f"{array.shape} {array.dtype} {array.sharding}" for name, array in arrays.items()}


def describe_where_devices_are(paths: dict[str, pathlib.Path]) -> tuple[int, dict[str, dict[str, str]]]:
    """The number of devices here, and what each checkpoint holds."""
    return jax.device_count(), {name: describe(path) for name, path in paths.items()}


def save_on_all_devices(path: pathlib.Path) -> int:
    """Saves two arrays on a mesh over all devices, 16 of them along m; returns how many there are."""
    mesh = jax.make_mesh((jax.device_count() // 16, 16), ("d", "m"), axis_types=(EXPLICIT, AUTO))
    state = {"w": place(mesh, matrix(64, 16), P("d", "m")), "v": place(mesh, matrix(16, 4), P("m"))}
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return jax.device_count()


SMALL = {"v": "(8, 8) float32 P(None, ('d', 'm'))", "w": "(8, 8) float32 P('d', 'm')"}
DESCRIPTIONS = {
    "ours, on 8 devices": {k: f"{v} on (d=2 explicit, m=4 explicit) in device" for k, v in SMALL.items()},
    "stock's, on 8 devices": {k: f"{v} on (d=2 explicit, m=4 explicit)" for k, v in SMALL.items()},
    "ours, on 512 devices": {
        "v": "(16, 4) float32 P('m') on (d=32 explicit, m=16 auto) in device",
        "w": "(64, 16) float32 P('d', 'm') on (d=32 explicit, m=16 auto) in device",
    },
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Checkpoints that were saved on more devices than look at them."""
    directory = tmp_path_factory.mktemp("elsewhere")
    state = small_state(make_mesh())
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "ours", state)
    assert run_on_devices(save_on_all_devices, directory / "wide", devices=512) == [512]
    paths = (directory / "ours", write_standard(directory, state), directory / "wide")
    return dict(zip(DESCRIPTIONS, paths, strict=True))


def test_a_checkpoint_is_described_on_one_device(elsewhere):
    """Names, shapes, dtypes and specs of what 8 and 512 devices saved."""
    assert run_on_devices(describe_where_devices_are, elsewhere, devices=1) == [(1, DESCRIPTIONS)]


def test_a_checkpoint_is_described_without_any_device(elsewhere):
    """Where JAX has no platform to start on."""
    code = (
        "import json, sys, jax, test_interchange as t\n"
        "print(json.dumps({name: t.describe(path) for name, path in json.loads(sys.argv[1]).items()}))\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('no device')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps({name: str(path) for name, path in elsewhere.items()})],
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    described, devices = result.stdout.splitlines()
    assert json.loads(described) == DESCRIPTIONS
    assert devices == "no device"


# Stock's checkpointers after `register`.


def read_standard(path: pathlib.Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def read_pytree(path: pathlib.Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def read_managed(path: pathlib.Path) -> Any:
    with ocp.CheckpointManager(path.parents[1]) as manager:
        return manager.restore(int(path.parent.name), args=ocp.args.StandardRestore())


READERS_OF_WRITERS = {
    "StandardCheckpointer": read_standard,
    "PyTreeCheckpointer": read_pytree,
    "PyTreeCheckpointer, in Zarr 3": read_pytree,
    "PyTreeCheckpointer, without OCDBT": read_pytree,
    "CheckpointManager": read_managed,
}


@pytest.mark.parametrize("writer", READERS_OF_WRITERS)
def test_stocks_checkpointers_under_register_read_what_stock_wrote(came, writer):
    """Checkpoints from before `register` go on to be read, in the same containers."""
    with oxe.registered():
        restored = READERS_OF_WRITERS[writer](came[writer])
    assert_same_tree(restored, as_stock_keeps_it(stock_state(make_mesh())))


@pytest.mark.parametrize("writer", READERS_OF_WRITERS)
def test_stock_reads_what_its_checkpointers_wrote_under_register(tmp_path, writer):
    """After `unregister`, as if it had never been."""
    state = stock_state(make_mesh())
    with oxe.registered():
        path = WRITERS[writer](tmp_path, state)
    assert (path / "explicit_sharding.msgpack").exists()
    assert_same_tree(READERS_OF_WRITERS[writer](path), as_stock_keeps_it(state))


@pytest.mark.parametrize("writer", READERS_OF_WRITERS)
def test_stocks_checkpointers_under_register_keep_what_stock_loses(tmp_path, mesh, writer):
    """Memory kinds, reduced axes, arrays of size zero, and that an array was uncommitted."""
    state = array_state(mesh)
    with oxe.registered():
        path = WRITERS[writer](tmp_path, state)
        assert_same_tree(READERS_OF_WRITERS[writer](path), state)


@pytest.mark.parametrize("writer", READERS_OF_WRITERS)
def test_we_read_what_stocks_checkpointers_wrote_under_register(tmp_path, writer):
    """Arrays from our record, the rest of the tree from stock's files."""
    state = stock_state(make_mesh())
    with oxe.registered():
        path = WRITERS[writer](tmp_path, state)
    expected = as_stock_keeps_it(state)
    uncommitted = {"step": state["step"], "key": state["key"]}
    expected |= uncommitted
    expected["moments"] = {**expected["moments"], "variance": state["moments"].variance}
    assert_same_tree(restore(path), expected)
