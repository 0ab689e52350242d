"""Part of a checkpoint, whoever wrote it and in whichever of Orbax's formats: only that part is read, laid out as it was."""

from __future__ import annotations

import functools
import pathlib
import shutil
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from fronts import managed_item, restore, save, save_stock
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, matrix, place

import orbax_explicit as oxe
from orbax_explicit.testing import run_on_devices

Policy = oxe.RestorePolicy


def make_mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def make_state(mesh: Mesh) -> dict[str, Any]:
    """A few small leaves, and much beside them that does not compress."""
    noise = np.random.default_rng(0).integers(0, 2**32, (1024, 256), dtype=np.uint32)
    keys = jax.random.split(jax.random.key(7), 8)
    return {
        "params": {"w": place(mesh, matrix(), P("d", "m")), "b": place(mesh, matrix(), P(None, "m"))},
        "keys": jax.jit(lambda: keys, out_shardings=NamedSharding(mesh, P("d")))(),
        "opt": {"mu": place(mesh, noise, P("d", "m")), "host": noise},
    }


def save_pytree(root: pathlib.Path, state: Any, **options: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(root, args=ocp.args.PyTreeSave(state))


def save_stock_managed(root: pathlib.Path, state: Any) -> None:
    with ocp.CheckpointManager(root) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))


PLAIN, ZARR3 = {"use_ocdbt": False}, {"use_zarr3": True}
WRITERS: Mapping[str, Callable[[pathlib.Path, Any], None]] = {
    "ours": save,
    "ours without OCDBT": functools.partial(save, **PLAIN),
    "ours in Zarr 3": functools.partial(save, **ZARR3),
    "ours in Zarr 3 without OCDBT": functools.partial(save, **PLAIN, **ZARR3),
    "stock's StandardCheckpointer": save_stock,
    "stock's PyTreeCheckpointer without OCDBT": functools.partial(save_pytree, **PLAIN),
    "stock's PyTreeCheckpointer in Zarr 3": functools.partial(save_pytree, **ZARR3),
    "stock's PyTreeCheckpointer in Zarr 3 without OCDBT": functools.partial(save_pytree, **PLAIN, **ZARR3),
    "stock's CheckpointManager": save_stock_managed,
}
every_writer = pytest.mark.parametrize("writer", WRITERS)


def item_of(root: pathlib.Path, writer: str) -> pathlib.Path:
    path = root / writer
    return managed_item(path) if "Manager" in writer else path


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> pathlib.Path:
    """What each writer wrote of the state."""
    root = tmp_path_factory.mktemp("partial")
    state = make_state(make_mesh())
    for name, write in WRITERS.items():
        write(root / name, state)
    return root


def struct(shape: tuple[int, ...] = (8, 8), dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_read() -> int:
    """How many bytes TensorStore has read from files in this process."""
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for value in metric["values"])


KEPT = np.arange(3)

IGNORE = Policy(extra="ignore")
PARTS: Mapping[str, tuple[Any, Any, Policy | None]] = {
    "a subtree": ({"params": {"w": 0, "b": 0}}, lambda state: {"params": state["params"]}, IGNORE),
    "a leaf": ({"params": {"b": 0}}, lambda state: {"params": {"b": state["params"]["b"]}}, IGNORE),
    "keys": ({"keys": 1}, lambda state: {"keys": state["keys"]}, IGNORE),
    "what is no placeholder": (
        {"params": {"w": 0, "b": ...}, "keys": 1, "opt": {"mu": ..., "host": ...}},
        lambda state: {
            "params": {"w": state["params"]["w"], "b": ...},
            "keys": state["keys"],
            "opt": {"mu": ..., "host": ...},
        },
        None,
    ),
    "a subtree under another name, beside a value that is kept": (
        {"net": {"w": 0, "b": 0}, "new": KEPT},
        lambda state: {"net": state["params"], "new": KEPT},
        Policy(extra="ignore", missing="keep", rename_leaves={"net": "params"}),
    ),
    "a leaf as NumPy": (
        {"params": {"w": np.zeros((8, 8), np.float32)}},
        lambda state: {"params": {"w": matrix()}},
        IGNORE,
    ),
    "keys as NumPy": (
        {"keys": 1},
        lambda state: {"keys": np.asarray(jax.random.key_data(state["keys"]))},
        Policy(extra="ignore", arrays="numpy"),
    ),
}
"""What is asked for, what is right, and by which policy. 0 stands for an array of 8 x 8, and 1 for eight keys."""
every_part = pytest.mark.parametrize("part", PARTS)


def target_of(part: str) -> Any:
    stand_ins = {0: struct(), 1: struct((8,), jax.random.key(0).dtype)}
    return jax.tree.map(lambda leaf: stand_ins[leaf] if type(leaf) is int else leaf, PARTS[part][0])


@every_part
@every_writer
def test_a_part_is_read_alone(written, writer, part):
    """With its layout, on the recorded mesh; neither the bytes nor the layout of the rest are asked for."""
    _, expected, policy = PARTS[part]
    path = item_of(written, writer)
    target = target_of(part)
    before = bytes_read()
    restored = restore(path, target, policy=policy)
    read = bytes_read() - before
    assert_same_tree(restored, expected(make_state(make_mesh())))
    # Less than a megabyte of noise, and no less than what has to be read of a few hundred compressible bytes.
    assert 60 < read < 20_000
    plan = oxe.plan_restore(path, target, policy=policy)
    assert plan.bytes_read <= 2 * matrix().nbytes
    assert "opt/mu" not in {"/".join(str(key.name) for key in o.path) for o in plan.outcomes if o.is_read}


@every_writer
def test_the_whole_is_more_than_its_parts(written, writer):
    """What the test above measures is there to be measured."""
    before = bytes_read()
    restored = restore(item_of(written, writer))
    assert bytes_read() - before > 0.9 * 2 * restored["opt"]["host"].nbytes


@every_writer
def test_a_part_alone_is_refused_unless_the_policy_says_so(written, writer):
    """By the names of all leaves that would be left out."""
    with pytest.raises(oxe.RestoreRefusedError, match="cannot restore into a target that lacks saved leaves") as error:
        restore(item_of(written, writer), {"params": {"w": struct(), "b": struct()}})
    assert error.value.problems[0].affects == ("keys", "opt/host", "opt/mu")


@every_part
@pytest.mark.parametrize("writer", [name for name in WRITERS if "without OCDBT" in name])
def test_a_part_comes_back_where_the_rest_is_gone(written, tmp_path, writer, part):
    """The chunks of the other arrays are not opened; stock tells shapes and dtypes nowhere but beside them."""
    path = shutil.copytree(item_of(written, writer), tmp_path / "a")
    for name in ("opt.mu", "opt.host"):
        chunks = [file for file in (path / name).rglob("*") if file.is_file() and "zarr" not in file.name]
        assert chunks
        for chunk in chunks:
            chunk.unlink()
    _, expected, policy = PARTS[part]
    assert_same_tree(restore(path, target_of(part), policy=policy), expected(make_state(make_mesh())))


@every_writer
def test_a_part_comes_back_to_stocks_checkpointer_under_register(written, writer):
    """By stock's own `partial_restore`, on the recorded mesh."""
    target = {"params": {"w": struct(), "b": struct()}, "keys": struct((8,), jax.random.key(0).dtype)}
    before = bytes_read()
    with oxe.registered(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(target, partial_restore=True)
        restored = checkpointer.restore(item_of(written, writer), args=args)
    assert bytes_read() - before < 20_000
    state = make_state(make_mesh())
    assert_same_tree(restored, {name: state[name] for name in target})


# On another number of devices.


def restore_parts(root: pathlib.Path) -> dict[tuple[str, str], str]:
    """Run on four devices: the traceback of each part of each checkpoint that does not come back; empty for others."""
    mesh = jax.make_mesh((1, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    state = make_state(mesh)
    reports = {}
    for writer in WRITERS:
        for part, (_, expected, policy) in PARTS.items():
            try:
                restored = restore(item_of(root, writer), target_of(part), policy=policy)
                assert_same_tree(restored, expected(state))
                reports[writer, part] = ""
            except Exception:  # noqa: BLE001 - the test that asks for this case shows it
                reports[writer, part] = traceback.format_exc()
    return reports


@pytest.fixture(scope="session")
def on_four(written) -> dict[tuple[str, str], str]:
    """How each part of each checkpoint came back on four devices."""
    return run_on_devices(restore_parts, written, devices=4)[0]


@pytest.mark.xdist_group("partial")
@every_part
@every_writer
def test_a_part_comes_back_on_fewer_devices(on_four, writer, part):
    """On the recorded mesh, resized; the leaves that are not read have a say in its sizes, as in a restore of all."""
    assert not on_four[writer, part]


def test_leaves_that_are_not_read_have_a_say_in_the_sizes_of_a_mesh(tmp_path):
    """So that the parameters, and the rest that is restored after them, land on one mesh."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    save(tmp_path / "a", {"a": place(mesh, matrix(12, 2), P("d")), "b": place(mesh, matrix(8, 2), P("d"))})
    six = jax.devices()[:6]
    plans = [
        oxe.plan_restore(tmp_path / "a", {name: struct(shape)}, policy=IGNORE, devices=six)
        for name, shape in (("a", (12, 2)), ("b", (8, 2)))
    ]
    # d=3 fits, and divides 12; but not 8.
    assert [plan.meshes[0].mesh.axis_sizes for plan in plans] == [(2, 2), (2, 2)]
    assert plans[0].meshes == plans[1].meshes
