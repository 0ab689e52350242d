"""`v1`: what Orbax's v1 API adds, its contexts, its checkpointables, its threads.

That both APIs restore alike is held elsewhere: `test_cases`, `test_matrix`, `test_processes`, `test_stock_today`,
`test_four_by_four` and `test_damage` go through this one too.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import Moments, assert_same_tree, host_state, matrix, pending_sum, place, training_state

import orbax_explicit as oxe
from orbax_explicit import _param_info, _trees
from orbax_explicit import v1 as oxe1
from orbax_explicit._records import Key
from orbax_explicit.testing import fake_inventory, run_on_devices

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def abstract(array: jax.Array, mesh: AbstractMesh, memory_kind: str | None = None) -> jax.ShapeDtypeStruct:
    """The array without its values and devices."""
    sharding = NamedSharding(mesh, array.sharding.spec, memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


COLLIDING = {"a.b": np.arange(3), "a": {"b": np.arange(3)}}
"""A tree that is refused."""


# Whole trees.


def test_a_training_state_comes_back_as_it_was(tmp_path, mesh):
    """Layouts, commitment, memory kinds, keys, host values of every type, and containers."""
    state = training_state(mesh)
    oxe1.save(tmp_path / "a", state)
    assert_same_tree(oxe1.load(tmp_path / "a"), state)
    assert_same_tree(oxe1.load(tmp_path / "a", state), state)
    assert oxe.verify(tmp_path / "a").ok


@pytest.mark.parametrize(
    "make_mesh",
    [
        pytest.param(lambda: jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, AUTO)), id="of two axis types"),
        pytest.param(
            lambda: Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("d", "m"), axis_types=(AUTO, EXPLICIT)),
            id="over devices in reverse",
        ),
    ],
)
@pytest.mark.parametrize("spec", [P("d", "m"), P(("d", "m"), None), P(None, "m"), P(), P("d", None)], ids=str)
def test_orbaxs_own_functions_keep_a_layout_in_a_context(tmp_path, make_mesh, spec):
    """Names, sizes, types, device order, spec as it is written, and one `Mesh` for all."""
    saved = {"w": place(make_mesh(), matrix(), spec), "v": place(make_mesh(), matrix(), spec)}
    with oxe1.context():
        ocp.save(tmp_path / "a", saved)
        restored = ocp.load(tmp_path / "a")
    assert restored["w"].sharding == saved["w"].sharding
    assert restored["w"].sharding.spec == spec
    assert restored["w"].sharding.mesh is restored["v"].sharding.mesh


def test_keys_come_back_whatever_says_what_they_are(tmp_path, mesh):
    """Typed keys, split over an axis; a target of another implementation is refused."""
    keys = jax.random.split(jax.random.key(7), 8)
    keys = jax.jit(lambda: keys, out_shardings=NamedSharding(mesh, P("d")))()
    oxe1.save(tmp_path / "a", {"keys": keys})
    struct = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    for target in (None, {"keys": struct}, {"keys": abstract(keys, mesh.abstract_mesh)}):
        assert_same_tree(oxe1.load(tmp_path / "a", target), {"keys": keys})
    other = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="rbg"), 8))
    with pytest.raises(oxe.RestoreRefusedError, match="rbg"):
        oxe1.load(tmp_path / "a", {"keys": other})


def test_a_leaf_that_cannot_be_saved_is_refused_by_name(tmp_path):
    """By `save`; Orbax's own function says of which type it is, and not where."""
    with pytest.raises(oxe.SaveRefusedError) as error:
        oxe1.save(tmp_path / "a", {"fine": 1, "layer": {"odd": object()}})
    assert error.value.problems[0].affects == ("layer/odd",)
    assert not (tmp_path / "a").exists()
    oxe1.save(tmp_path / "a", {"host": host_state()})
    assert_same_tree(oxe1.load(tmp_path / "a"), {"host": host_state()})


def test_a_pending_sum_is_refused_or_made(tmp_path, mesh):
    """As the context says, or the call."""
    partial = pending_sum(mesh)
    with pytest.raises(oxe.SaveRefusedError, match="unreduced"):
        oxe1.save(tmp_path / "a", {"w": partial})
    expected = np.asarray(matrix() @ matrix())
    oxe1.save(tmp_path / "a", {"w": partial}, unreduced="reduce")
    with oxe1.context(unreduced="reduce"):
        ocp.save(tmp_path / "b", {"w": partial})
        oxe1.save(tmp_path / "c", {"w": partial})
        with pytest.raises(oxe.SaveRefusedError, match="unreduced"):
            oxe1.save(tmp_path / "d", {"w": partial}, unreduced="error")
    for name in "abc":
        np.testing.assert_array_equal(np.asarray(oxe1.load(tmp_path / name)["w"]), expected)


def test_an_overwrite_that_is_refused_leaves_what_was_there(tmp_path, mesh):
    """`save` asks before Orbax removes; and one that is not refused replaces it."""
    old, new = {"w": place(mesh, matrix(), P("d"))}, {"w": place(mesh, -matrix(), P("m"))}
    oxe1.save(tmp_path / "a", old)
    with pytest.raises(oxe.SaveRefusedError):
        oxe1.save(tmp_path / "a", COLLIDING, overwrite=True)
    assert_same_tree(oxe1.load(tmp_path / "a"), old)
    with pytest.raises(ValueError, match="already exists"):
        oxe1.save(tmp_path / "a", new)
    oxe1.save(tmp_path / "a", new, overwrite=True, custom_metadata={"epoch": 3})
    assert_same_tree(oxe1.load(tmp_path / "a"), new)
    with oxe1.context():
        assert ocp.metadata(tmp_path / "a").custom_metadata == {"epoch": 3}


@pytest.mark.parametrize(
    ("path", "arguments", "error", "says"),
    [
        pytest.param(
            "{root}/a",
            {"custom_metadata": {"loss": np.float32(1)}},
            TypeError,
            "custom_metadata must be JSON: .*float32",
            id="metadata that is not JSON",
        ),
        pytest.param("a", {}, ValueError, "the path must be absolute, not 'a'", id="a relative path"),
        pytest.param(
            "{root}/a",
            {"checkpointable_name": "b/c"},
            ValueError,
            "checkpointable_name must be the name of a directory, not 'b/c'",
            id="a name that is a path",
        ),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_arguments_that_orbax_would_refuse_too_late_are_refused_before(
    tmp_path, monkeypatch, path, arguments, error, says, overwrite
):
    """What is to be overwritten is there still."""
    monkeypatch.chdir(tmp_path)
    oxe1.save(tmp_path / "a", {"w": matrix()})
    with pytest.raises(error, match=says):
        oxe1.save(path.format(root=tmp_path), {"w": -matrix()}, overwrite=overwrite, **arguments)
    np.testing.assert_array_equal(oxe1.load(tmp_path / "a")["w"], matrix())
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path, mesh):
    """Files of other kinds, and the root of a Checkpointer with all its steps."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("all of it")
    with ocp.training.Checkpointer(tmp_path / "steps", context=oxe1.context()) as checkpointer:
        checkpointer.save(0, {"w": matrix()})
    (tmp_path / "file").write_text("a file")
    for name in ("thesis", "steps", "file"):
        with pytest.raises(oxe.CheckpointLayoutError, match=r"cannot overwrite .*: it is no checkpoint"):
            oxe1.save(tmp_path / name, {"w": -matrix()}, overwrite=True)
    assert (tmp_path / "thesis" / "thesis.txt").read_text() == "all of it"
    np.testing.assert_array_equal(oxe1.load(tmp_path / "steps" / "0")["w"], matrix())


def test_checkpoints_of_every_kind_and_empty_directories_are_overwritten(tmp_path):
    """Of v0, of v1, and one that lost Orbax's own metadata."""
    (tmp_path / "empty").mkdir()
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "v0", {"w": matrix()})
    for name in ("v1", "lost"):
        oxe1.save(tmp_path / name, {"w": matrix()})
    (tmp_path / "lost" / "_CHECKPOINT_METADATA").unlink()
    for name in ("empty", "v0", "v1", "lost"):
        oxe1.save(tmp_path / name, {"w": -matrix()}, overwrite=True)
        np.testing.assert_array_equal(oxe1.load(tmp_path / name)["w"], -matrix())


def test_a_tree_that_is_not_there_is_refused_with_the_names_of_those_that_are(tmp_path):
    """Where Orbax's own says that it is no tree."""
    with oxe1.context():
        ocp.save_checkpointables(tmp_path / "a", {"model": {"w": matrix()}, "ema": {"w": matrix()}})
    with pytest.raises(oxe.CheckpointLayoutError, match="cannot find a tree named 'optimizer'") as error:
        oxe1.load(tmp_path / "a", checkpointable_name="optimizer")
    assert error.value.problems[0].present == "ema, model"
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        oxe1.load(tmp_path / "b", checkpointable_name="model")


@pytest.mark.parametrize("in_loop", [False, True], ids=["", "within an event loop"])
def test_what_orbax_does_not_recognize_we_read_or_say_why_not(tmp_path, mesh, in_loop):
    """Without Orbax's metadata of the checkpoint all is there; without those of the tree something is missing, by name."""

    def load(path: Any) -> Any:
        if not in_loop:
            return oxe1.load(path)

        async def load_within() -> Any:
            return oxe1.load(path)

        return asyncio.run(load_within())

    state = {"w": place(mesh, matrix(), P("d", "m")), "t": (1, "two")}
    for name in ("a", "b"):
        oxe1.save(tmp_path / name, state)
    (tmp_path / "a" / "_CHECKPOINT_METADATA").unlink()
    with jax.set_mesh(mesh):
        assert_same_tree(load(tmp_path / "a"), state)
    (tmp_path / "b" / "state" / "_METADATA").unlink()
    with pytest.raises(oxe.FormatError, match="cannot find _METADATA, which was written with this checkpoint"):
        load(tmp_path / "b")


def test_a_tree_that_jax_cannot_flatten_is_refused_by_name(tmp_path):
    """Which Orbax's own `save` does before it asks a handler, by what JAX says."""
    itself: dict[str, Any] = {}
    itself["a"] = itself
    with pytest.raises(oxe.SaveRefusedError, match=r"keys do not sort \(int, str\)"):
        oxe1.save(tmp_path / "a", {"1": 1, 1: 2})
    with pytest.raises(oxe.SaveRefusedError, match="deeper than 100 levels"):
        oxe1.save(tmp_path / "a", itself)


def test_what_a_context_is_made_of_is_checked_there(mesh):
    """Not by the first load, which may be that of a resumed training."""
    for bad in ("x", mesh.abstract_mesh):
        with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
            oxe1.context(mesh=bad)
    with pytest.raises(TypeError, match=r"base must be a context of Orbax's v1, not RestorePolicy"):
        oxe1.context(base=oxe.RestorePolicy())


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda mesh: place(mesh, matrix(), P("d", "m")), id="an array"),
        pytest.param(lambda mesh: jnp.int32(5), id="an uncommitted array"),
        pytest.param(lambda mesh: jax.random.key(3), id="a key"),
        pytest.param(lambda mesh: np.arange(3), id="a NumPy array"),
        pytest.param(lambda mesh: 3, id="a number"),
        pytest.param(lambda mesh: "text", id="a text"),
        pytest.param(lambda mesh: b"octets", id="bytes"),
    ],
)
def test_a_tree_may_be_a_single_leaf(tmp_path, mesh, make):
    """As in v1; stock reads it."""
    leaf = make(mesh)
    with oxe1.context():
        ocp.save(tmp_path / "a", leaf)
    for target in (None, leaf):
        assert_same_tree(oxe1.load(tmp_path / "a", target), leaf)
    assert oxe.verify(tmp_path / "a").ok
    stock = ocp.load(tmp_path / "a")
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        stock, leaf = jax.random.key_data(stock), jax.random.key_data(leaf)
    np.testing.assert_array_equal(np.asarray(stock), np.frombuffer(leaf, np.uint8) if isinstance(leaf, bytes) else leaf)


# Where.


def test_a_path_means_what_it_means_elsewhere(tmp_path, mesh):
    """A checkpoint of either API, a step, an item; and what is none is said as clearly."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "t": (1, {0: 2.5})}
    oxe1.save(tmp_path / "v1", state)
    with oxe.StandardCheckpointer() as v0:
        v0.save(tmp_path / "v0", state)
    with ocp0.CheckpointManager(tmp_path / "steps", item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        manager.save(3, args=oxe.args.ExplicitSave(state))
    for path in ("v1", "v1/state", "v0", "steps/3", "steps/3/default"):
        assert_same_tree(oxe1.load(tmp_path / path), state)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        oxe1.load(tmp_path / "nothing")
    with pytest.raises(oxe.CheckpointLayoutError, match="root of a CheckpointManager with steps 3"):
        oxe1.load(tmp_path / "steps")


def test_one_of_several_trees_is_never_picked_unasked(tmp_path, mesh):
    """By its name, or the one that `save` would have written."""
    trees = {name: {"w": place(mesh, i * matrix(), P("d"))} for i, name in enumerate(("opt", "params", "state"))}
    with oxe1.context():
        ocp.save_checkpointables(tmp_path / "two", {name: trees[name] for name in ("opt", "params")})
        ocp.save_checkpointables(tmp_path / "three", {**trees, "data": Counter(7)})
    with pytest.raises(oxe.CheckpointLayoutError, match="opt, params") as error:
        oxe1.load(tmp_path / "two")
    assert "checkpointable_name=" in str(error.value)
    assert_same_tree(oxe1.load(tmp_path / "two", checkpointable_name="params"), trees["params"])
    assert_same_tree(oxe1.load(tmp_path / "three", checkpointable_name="opt"), trees["opt"])
    assert_same_tree(oxe1.load(tmp_path / "three"), trees["state"])


# Targets.


@pytest.mark.parametrize("under_set_mesh", [True, False], ids=["under jax.set_mesh", "outside of it"])
def test_a_target_on_an_abstract_mesh_gets_what_it_asks_for(tmp_path, mesh, under_set_mesh):
    """Specs, axis types and memory kind, which Orbax's own function would lose."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5)}
    oxe1.save(tmp_path / "a", state)
    wanted = jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, AUTO))
    struct = jax.ShapeDtypeStruct(
        (8, 8), np.float32, sharding=NamedSharding(wanted.abstract_mesh, P("m"), memory_kind="pinned_host")
    )
    target = {"w": struct, "step": jax.ShapeDtypeStruct((), np.int32)}
    if under_set_mesh:
        with jax.set_mesh(wanted):
            restored = oxe1.load(tmp_path / "a", target)
    else:
        restored = oxe1.load(tmp_path / "a", target)
    assert restored["w"].sharding == NamedSharding(wanted, P("m"), memory_kind="pinned_host")
    assert not restored["step"].committed


def test_orbaxs_own_load_takes_the_mesh_of_set_mesh_for_any_abstract_one(tmp_path, mesh):
    """Before any handler is asked, in a context of ours as well: what the documentation warns of."""
    saved = {"w": place(mesh, matrix(), P("d", "m"))}
    other = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AUTO, AUTO))
    target = {"w": abstract(saved["w"], mesh.abstract_mesh, "pinned_host")}
    with oxe1.context():
        ocp.save(tmp_path / "a", saved)
        with pytest.raises(ValueError, match="not found in mesh"):
            ocp.load(tmp_path / "a", target)
        with jax.set_mesh(other):
            restored = ocp.load(tmp_path / "a", target)["w"]
    assert restored.sharding == NamedSharding(other, P("d", "m"), memory_kind="device")


def test_a_class_as_a_leaf_asks_for_a_value_of_it(tmp_path, mesh):
    """As in v1: what the value looks like the record knows."""
    saved = {"n": 3, "w": place(mesh, matrix(), P("d")), "a": np.arange(3), "s": "text", "b": b"octets"}
    oxe1.save(tmp_path / "a", saved)
    target = {"n": int, "w": jax.ShapeDtypeStruct, "a": np.ndarray, "s": str, "b": bytes}
    assert_same_tree(oxe1.load(tmp_path / "a", target), saved)
    with pytest.raises(oxe.RestoreRefusedError, match="cannot restore int as float"):
        oxe1.load(tmp_path / "a", {**target, "n": float})
    assert oxe1.load(tmp_path / "a", {**target, "n": float}, policy=oxe.RestorePolicy(cast="unsafe"))["n"] == 3.0


def test_a_class_that_says_nothing_of_a_leaf_is_refused_by_name(tmp_path):
    """With what may stand there."""
    oxe1.save(tmp_path / "a", {"n": 3})
    with pytest.raises(oxe.RestoreRefusedError, match=r"is the class builtins\.list") as error:
        oxe1.load(tmp_path / "a", {"n": list})
    assert error.value.problems[0].affects == ("n",)


def test_a_part_is_loaded_as_v1_does_it(tmp_path, mesh):
    """By `partial_load` what the target lacks is left out; a placeholder comes back as itself."""
    saved = {"w": place(mesh, matrix(), P("d")), "v": place(mesh, -matrix(), P("m")), "n": 3}
    base = ocp.Context()
    base.pytree.loading.partial_load = True
    oxe1.save(tmp_path / "a", saved)
    target = {"w": jax.ShapeDtypeStruct((8, 8), np.float32)}
    with pytest.raises(oxe.RestoreRefusedError, match="lacks saved leaves"):
        oxe1.load(tmp_path / "a", target)
    with oxe1.context(base=base):
        for load in (ocp.load, oxe1.load):
            assert_same_tree(load(tmp_path / "a", target), {"w": saved["w"]})
    with oxe1.context():
        restored = ocp.load(tmp_path / "a", {**target, "v": ocp.PLACEHOLDER, "n": 0})
    assert restored["v"] is ocp.PLACEHOLDER
    assert_same_tree({**restored, "v": None}, {**saved, "v": None})


def test_arrays_are_cut_off_and_padded_where_the_context_says_so(tmp_path, mesh):
    """By `enable_padding_and_truncation`; else another shape is refused."""
    oxe1.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d"))})
    target = {"w": jax.ShapeDtypeStruct((4, 16), np.float32)}
    with pytest.raises(oxe.RestoreRefusedError, match=r"\(4, 16\)|4,16"):
        oxe1.load(tmp_path / "a", target)
    base = ocp.Context()
    base.array.loading.enable_padding_and_truncation = True
    with oxe1.context(base=base):
        restored = ocp.load(tmp_path / "a", target)["w"]
    expected = np.zeros((4, 16), np.float32)
    expected[:, :8] = matrix()[:4]
    np.testing.assert_array_equal(np.asarray(restored), expected)


# Metadata.


def describe(path: pathlib.Path) -> dict[str, str]:
    """What `ocp.metadata` says of each leaf, where other devices are."""
    with oxe1.context():
        tree = ocp.metadata(path).metadata
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keypath): str(leaf) for keypath, leaf in flat}


def test_metadata_tell_layouts_without_the_devices(tmp_path, mesh):
    """On one device, of what eight saved: mesh, axis types, spec, memory kind, and whether an array is committed."""
    state = {
        "w": place(mesh, matrix(), P("d", "m")),
        "pinned": place(mesh, matrix(), P("m"), memory_kind="pinned_host"),
        "key": jax.random.key(3),
        "moments": Moments(np.arange(3), (1.5, {0: "text"})),
    }
    oxe1.save(tmp_path / "a", state)
    (described,) = run_on_devices(describe, tmp_path / "a", devices=1)
    on = "(d=2 explicit, m=4 explicit)"
    assert described == {
        "['w']": f"float32[8,8]  P('d', 'm') on {on} in device",
        "['pinned']": f"float32[8,8]  P('m') on {on} in pinned_host",
        "['key']": "key<threefry2x32>  cpu:0 in device, uncommitted",
        "['moments'].mean": "int64[3]  on the host",
        "['moments'].variance[0]": "0.0",
        "['moments'].variance[1][0]": "str",
    }


def test_metadata_say_what_is_needed_of_a_leaf_and_are_a_target(tmp_path, mesh):
    """Shape, dtype and sharding; as a target they ask for what was recorded, uncommitted scalars among it."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "host": host_state(), "key": jax.random.key(3), "n": jnp.int32(5)}
    oxe1.save(tmp_path / "a", state)
    with oxe1.context():
        metadata = ocp.metadata(tmp_path / "a")
        again = ocp.load(tmp_path / "a", metadata)
    leaf = metadata.metadata["w"]
    assert (leaf.shape, leaf.dtype, leaf.sharding) == ((8, 8), np.float32, state["w"].sharding)
    assert leaf.sharding_metadata.axis_types == (EXPLICIT, EXPLICIT)
    assert metadata.metadata["key"].dtype == state["key"].dtype
    assert_same_tree(again, state)
    assert_same_tree(oxe1.load(tmp_path / "a", metadata), state)
    assert_same_tree(oxe1.load(tmp_path / "a", metadata.metadata), state)


def test_metadata_in_a_context_that_restores_to_numpy_are_a_target(tmp_path, mesh):
    """They say where an array would lie, and what is loaded into them is NumPy."""
    saved = {"w": place(mesh, matrix(), P("d", "m")), "b": jnp.ones(3)}
    oxe1.save(tmp_path / "a", saved)
    with oxe1.context(oxe.RestorePolicy(arrays="numpy", extra="ignore")):
        leaf = ocp.metadata(tmp_path / "a").metadata["w"]
        restored = ocp.load(tmp_path / "a", {"w": leaf})
    assert leaf.sharding == saved["w"].sharding
    assert_same_tree(restored, {"w": matrix()})


def test_metadata_of_a_damaged_record_are_none_and_read_manifest_says_why(tmp_path):
    """Orbax takes every error of a handler for that of the wrong handler."""
    oxe1.save(tmp_path / "a", {"n": 3})
    (record,) = (tmp_path / "a").rglob("explicit_sharding.msgpack")
    record.write_bytes(b"not a record")
    with oxe1.context():
        assert ocp.metadata(tmp_path / "a").metadata is None
    with pytest.raises(oxe.FormatError, match="explicit_sharding"):
        oxe.read_manifest(tmp_path / "a")


# Contexts.


def test_choices_of_a_context_hold_for_all_within_it(tmp_path, mesh):
    """Policy and mesh; those of a call win, and the context that is further in."""
    saved = {"w": place(mesh, matrix(), P("d", "m"))}
    oxe1.save(tmp_path / "a", saved)
    turned = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AUTO, AUTO))
    pinned = oxe.RestorePolicy(memory_kind="pinned_host")
    with oxe1.context(pinned, mesh=turned):
        for load in (ocp.load, oxe1.load):
            assert load(tmp_path / "a")["w"].sharding == NamedSharding(turned, P("d", "m"), memory_kind="pinned_host")
        called = oxe1.load(tmp_path / "a", mesh=mesh, policy=oxe.RestorePolicy())["w"]
        with oxe1.context():
            inner = ocp.load(tmp_path / "a")["w"]
    assert called.sharding == inner.sharding == saved["w"].sharding
    assert oxe1.load(tmp_path / "a")["w"].sharding == saved["w"].sharding


def test_a_plan_is_of_what_a_load_in_the_same_context_does(tmp_path, mesh):
    """Policy, mesh, Orbax's option for a part; those of the call; onto other devices; and where there is no context."""
    saved = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5)}
    oxe1.save(tmp_path / "a", saved)
    turned = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AUTO, AUTO))
    part = {"w": jax.ShapeDtypeStruct((8, 8), np.float32)}
    base = ocp.Context()
    base.pytree.loading.partial_load = True

    def planned(*args: Any, **kwargs: Any) -> Any:
        plan = oxe1.plan_restore(tmp_path / "a", *args, **kwargs)
        plan.raise_if_refused()
        placement = plan.by_path[(Key("dict", "w"),)].placement
        return placement.mesh.mesh.axis_sizes, placement.memory_kind, plan.left_out

    def loaded(*args: Any, **kwargs: Any) -> Any:
        restored = oxe1.load(tmp_path / "a", *args, **kwargs)
        left_out = tuple((Key("dict", name),) for name in saved if name not in restored)
        sharding = restored["w"].sharding
        return sharding.mesh.axis_sizes, sharding.memory_kind, left_out

    with oxe1.context(oxe.RestorePolicy(memory_kind="pinned_host"), mesh=turned, base=base):
        assert planned() == loaded() == ((4, 2), "pinned_host", ())
        assert planned(part) == loaded(part) == ((4, 2), "pinned_host", ((Key("dict", "step"),),))
        by_call = {"mesh": mesh, "policy": oxe.RestorePolicy()}
        assert planned(part, **by_call) == loaded(part, **by_call) == ((2, 4), "device", ((Key("dict", "step"),),))
    assert planned() == loaded() == ((2, 4), "device", ())
    assert planned(devices=fake_inventory(4)) == ((1, 4), "device", ())
    assert "step" in str(oxe1.plan_restore(tmp_path / "a", part).refused[0])
    assert oxe1.plan_restore(tmp_path / "a", checkpointable_name="state") == oxe.plan_restore(tmp_path / "a")
    with pytest.raises(oxe.CheckpointLayoutError, match="no_such_tree"):
        oxe1.plan_restore(tmp_path / "a", checkpointable_name="no_such_tree")


def test_a_plan_needs_a_handler_of_ours(tmp_path):
    """As a load does: another handler sees neither target nor policy."""
    oxe1.save(tmp_path / "a", {"n": 1}, checkpointable_name="config")
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    base = ocp.Context()
    base.checkpointables.registry = registry
    with base, pytest.raises(ValueError, match="'config' is bound to another handler"):
        oxe1.plan_restore(tmp_path / "a", checkpointable_name="config")


def test_a_context_of_orbaxs_own_takes_the_place_of_ours(tmp_path, mesh):
    """What the documentation warns of, and what it says to do instead."""
    state = {"layers": (place(mesh, matrix(), P("d", "m")),)}
    oxe1.save(tmp_path / "a", state)
    with oxe1.context():
        with ocp.Context() as own:
            assert type(ocp.load(tmp_path / "a")["layers"]) is list
        with oxe1.context(base=own):
            assert type(ocp.load(tmp_path / "a")["layers"]) is tuple


@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["OCDBT", "a directory for each array"])
@pytest.mark.parametrize("use_zarr3", [True, False], ids=["Zarr 3", "Zarr 2"])
def test_options_of_orbaxs_hold_as_well(tmp_path, mesh, use_ocdbt, use_zarr3):
    """How arrays are stored, in chunks of which size, and as what."""
    base = ocp.Context()
    saving = base.array.saving
    saving.use_ocdbt, saving.use_zarr3, saving.use_compression = use_ocdbt, use_zarr3, False
    saving.storage_options.chunk_byte_size = 64
    saving.scoped_storage_options_creator = lambda keypath, leaf: (
        type(saving).StorageOptions(dtype=np.float16) if keypath[-1].key == "half" else None
    )
    state = {"w": place(mesh, matrix(), P("d")), "half": place(mesh, matrix(), P("m")), "step": jnp.int32(5)}
    with oxe1.context(base=base):
        ocp.save(tmp_path / "a", state)
    restored = oxe1.load(tmp_path / "a")
    assert_same_tree({**restored, "half": None}, {**state, "half": None})
    assert restored["half"].dtype == np.float16
    item = tmp_path / "a" / "state"
    assert (item / "manifest.ocdbt").exists() == use_ocdbt
    assert json.loads((item / "_METADATA").read_text())["use_zarr3"] == use_zarr3
    if not use_ocdbt:
        chunks = [file for file in (item / "w").rglob("*") if file.is_file() and not file.name.startswith(("z", ".z"))]
        assert len(chunks) == 4


def test_what_holds_for_every_leaf_holds_for_those_of_its_kind(tmp_path, mesh):
    """A dtype for arrays of such a kind, and axes for arrays that have them; nothing is cut off on the way."""
    base = ocp.Context()
    base.array.saving.storage_options.dtype = jnp.bfloat16
    base.array.saving.storage_options.shard_axes = (1,)
    state = {"w": place(mesh, matrix(), P("d")), "n": 3, "i": jnp.arange(5), "f": 2.5, "v": jnp.arange(3.0)}
    with oxe1.context(base=base):
        ocp.save(tmp_path / "a", state)
    expected = {**state, "w": place(mesh, matrix(dtype=jnp.bfloat16), P("d")), "v": state["v"].astype(jnp.bfloat16)}
    assert_same_tree(oxe1.load(tmp_path / "a"), expected)


@pytest.mark.parametrize("names", [(None,), ("state",), ()], ids=["without a name", "as state", "not at all"])
def test_choices_hold_however_trees_are_registered(tmp_path, mesh, names):
    """Where Orbax's handler stands in the registry of the base."""
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for name in names:
        registry.add(ocp.handlers.PyTreeHandler, checkpointable_name=name)
    base = ocp.Context()
    base.checkpointables.registry = registry
    with oxe1.context(oxe.RestorePolicy(memory_kind="pinned_host"), checksum=None, compression=None, base=base):
        oxe1.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d"))})
        ocp.save(tmp_path / "b", {"w": place(mesh, matrix(), P("d"))})
        loaded = [load(tmp_path / name)["w"] for load in (ocp.load, oxe1.load) for name in "ab"]
    assert {array.sharding.memory_kind for array in loaded} == {"pinned_host"}
    assert oxe.verify(tmp_path / "a").unchecked == oxe.verify(tmp_path / "b").unchecked == ("w",)


@pytest.mark.parametrize("checksum", ["crc32", None])
def test_a_context_says_how_bytes_are_checked(tmp_path, checksum):
    """And `verify` says which leaves carry no checksum."""
    with oxe1.context(checksum=checksum, compression=None):
        ocp.save(tmp_path / "a", {"w": jnp.asarray(matrix(64, 64))})
    report = oxe.verify(tmp_path / "a")
    assert report.ok
    assert report.unchecked == (() if checksum else ("w",))


def safetensors_context() -> ocp.Context:
    base = ocp.Context()
    base.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    return base


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda: oxe1.context(unreduced="sum"), "unreduced must be one of", id="unreduced"),
        pytest.param(lambda: oxe1.context(checksum="md5"), "checksum", id="checksum"),
        pytest.param(lambda: oxe1.context(compression="lz4"), "compression", id="compression"),
        pytest.param(lambda: oxe1.context(base=safetensors_context()), "safetensors", id="another layout"),
        pytest.param(lambda: oxe1.save_async("/a", {}, unreduced="sum"), "unreduced must be one of", id="of a call"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(make, says):
    """Where it is made, not where it is used."""
    with pytest.raises(ValueError, match=says):
        make()


def test_within_a_running_event_loop_all_works_the_same(tmp_path, mesh):
    """As in a notebook; the mesh of `jax.set_mesh` among what is seen."""
    saved = {"w": place(mesh, matrix(), P("d", "m"))}
    other = jax.make_mesh((4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))

    async def cell() -> tuple[Any, Any]:
        with oxe1.context():
            oxe1.save(tmp_path / "a", saved)
            plain = ocp.load(tmp_path / "a")
        with jax.set_mesh(other):
            return plain, oxe1.load(tmp_path / "a")

    plain, under = asyncio.run(cell())
    assert_same_tree(plain, saved)
    assert under["w"].sharding == NamedSharding(other, P("d", "m"), memory_kind="device")


# Checkpointables.


class Counter:
    """A stateful checkpointable, like a dataset's iterator."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def save(self, directory: ocp.path.PathAwaitingCreation) -> Any:
        async def write(count: int) -> None:
            path = await directory.await_creation()
            (path / "count").write_text(str(count))

        return write(self.count)

    async def load(self, directory: ocp.path.Path) -> Any:
        async def read() -> None:
            self.count = int((directory / "count").read_text())

        return read()


def test_checkpointables_of_other_kinds_keep_their_own_handlers(tmp_path, mesh):
    """Beside trees under any name, in one checkpoint; and trees are recorded whatever their name."""
    model = {"w": place(mesh, matrix(), P("d", "m")), "by_int": {0: (1, 2.5)}}
    with oxe1.context():
        ocp.save_checkpointables(
            tmp_path / "a",
            {"model": model, "state": model, "data": Counter(7), "metadata": {"name": "text", "n": [None]}},
        )
        counter = Counter(0)
        loaded = ocp.load_checkpointables(tmp_path / "a", {"model": None, "state": None, "data": counter})
        one = ocp.load(tmp_path / "a", checkpointable_name="model")
    assert counter.count == 7
    for tree in (loaded["model"], loaded["state"], one):
        assert_same_tree(tree, model)
    for name in ("model", "state"):
        assert oxe.verify(tmp_path / "a" / name).ok
    assert not (tmp_path / "a" / "data" / "explicit_sharding.msgpack").exists()


def test_a_handler_of_the_callers_own_stays_where_it_was(tmp_path, mesh):
    """Bound to a name, before or after; ours bound to another takes its own choices."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    registry.add(oxe1.handler_type(oxe.RestorePolicy(memory_kind="pinned_host")), checkpointable_name="frozen")
    base = ocp.Context()
    base.checkpointables.registry = registry
    tree = {"w": place(mesh, matrix(), P("d", "m"))}
    with oxe1.context(base=base):
        ocp.save_checkpointables(tmp_path / "a", {"config": {"lr": 0.5}, "frozen": tree, "state": tree})
        loaded = ocp.load_checkpointables(tmp_path / "a")
    handlers = json.loads((tmp_path / "a" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert handlers["config"].endswith("json_handler.JsonHandler")
    assert loaded["config"] == {"lr": 0.5}
    assert loaded["frozen"]["w"].sharding.memory_kind == "pinned_host"
    assert loaded["state"]["w"].sharding == tree["w"].sharding


def test_a_tree_bound_by_name_needs_no_context_of_ours(tmp_path, mesh):
    """Explicit registration: Orbax's own registry, with one name bound to us."""
    registry = ocp.handlers.local_registry()
    registry.add(oxe1.handler_type(), checkpointable_name="model")
    ours = ocp.Context()
    ours.checkpointables.registry = registry
    tree = {"by_int": {0: place(mesh, matrix(), P("d", "m"))}}
    with ours:
        ocp.save_checkpointables(tmp_path / "a", {"model": tree, "other": tree})
        loaded = ocp.load_checkpointables(tmp_path / "a", {"model": None})
    assert_same_tree(loaded["model"], tree)
    assert (tmp_path / "a" / "model" / "explicit_sharding.msgpack").exists()
    assert not (tmp_path / "a" / "other" / "explicit_sharding.msgpack").exists()


def test_the_recorded_handler_is_stocks(tmp_path):
    """v0's, which v1 knows as well: a stock reader finds it under any name."""
    with oxe1.context():
        ocp.save_checkpointables(tmp_path / "a", {"model": {"n": 3}})
    handlers = json.loads((tmp_path / "a" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert handlers == {"model": ocp0.StandardCheckpointHandler.typestr()}
    assert ocp.load_checkpointables(tmp_path / "a") == {"model": {"n": 3}}


@pytest.fixture
def named(tmp_path) -> ocp.Context:
    """Orbax's own context, with one name bound to us, and that to pinned memory."""
    registry = ocp.handlers.local_registry()
    registry.add(oxe1.handler_type(oxe.RestorePolicy(memory_kind="pinned_host")), checkpointable_name="frozen")
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


def test_what_load_is_asked_for_reaches_a_name_that_is_bound_by_itself(tmp_path, mesh, named):
    """Target, mesh and policy; the policy that it is bound to is for loads without one, and for no other name."""
    saved = {"w": place(mesh, matrix(), P("d", "m"))}
    turned = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AUTO, AUTO))
    target = {"w": jax.ShapeDtypeStruct((8, 8), np.float16)}
    with oxe1.context(base=named):
        ocp.save_checkpointables(tmp_path / "a", {"frozen": saved, "other": saved})
        loaded = ocp.load_checkpointables(tmp_path / "a")
        asked = oxe1.load(tmp_path / "a", target, mesh=turned, checkpointable_name="frozen")["w"]
        device = oxe1.load(tmp_path / "a", policy=oxe.RestorePolicy(), checkpointable_name="frozen")["w"]
    assert loaded["frozen"]["w"].sharding.memory_kind == "pinned_host"
    assert loaded["other"]["w"].sharding == saved["w"].sharding
    assert asked.sharding == NamedSharding(turned, P("d", "m"), memory_kind="pinned_host")
    assert asked.dtype == np.float16
    assert device.sharding == saved["w"].sharding


def test_a_target_that_nobody_saw_is_not_forgotten(tmp_path):
    """A name that is bound to a handler which is not ours."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    base = ocp.Context()
    base.checkpointables.registry = registry
    with base:
        ocp.save_checkpointables(tmp_path / "a", {"config": {"n": 3}})
        with pytest.raises((ValueError, ocp.errors.InvalidLayoutError)):
            oxe1.load(tmp_path / "a", {"n": 0}, checkpointable_name="config")


def test_save_takes_its_tree_for_one_whatever_its_name(tmp_path, mesh):
    """And refuses by leaf name, and before it overwrites."""
    state = {"w": place(mesh, matrix(), P("d")), "c": 1j}
    oxe1.save(tmp_path / "a", state, checkpointable_name="model")
    with pytest.raises(oxe.SaveRefusedError) as error:
        oxe1.save(tmp_path / "a", {"odd": object()}, checkpointable_name="model", overwrite=True)
    assert error.value.problems[0].affects == ("odd",)
    assert_same_tree(oxe1.load(tmp_path / "a", checkpointable_name="model"), state)
    assert_same_tree(oxe1.load(tmp_path / "a"), state)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda file: file.unlink(), id="missing"),
        pytest.param(lambda file: file.write_bytes(file.read_bytes()[:-9]), id="cut off"),
    ],
)
def test_verify_looks_at_what_orbax_needs_beside_a_tree(tmp_path, damage):
    """Orbax's own metadata, without which v1 opens nothing."""
    oxe1.save(tmp_path / "a", {"n": 3})
    damage(tmp_path / "a" / "_CHECKPOINT_METADATA")
    report = oxe.verify(tmp_path / "a")
    assert [problem.file for problem in report.problems] == ["../_CHECKPOINT_METADATA"]


# `training.Checkpointer`.


def test_a_checkpointer_keeps_as_many_steps_as_its_policy_says(tmp_path, mesh):
    """And the newest comes back, by its number or by none; its metadata too."""
    latest = ocp.training.preservation_policies.LatestN(2)
    states = [{"w": place(mesh, step * matrix(), P("d", "m")), "step": jnp.int32(step)} for step in range(4)]
    with ocp.training.Checkpointer(tmp_path, context=oxe1.context(), preservation_policy=latest) as checkpointer:
        for step, state in enumerate(states):
            assert checkpointer.save(step, state, force=True, metrics={"loss": 4.0 - step})
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [2, 3]
        assert_same_tree(checkpointer.load(), states[3])
        assert_same_tree(checkpointer.load(2, states[2]), states[2])
        assert str(checkpointer.metadata(3).metadata["step"]).endswith("uncommitted")
    assert oxe.latest_good_step(tmp_path) == 3
    (chunks,) = (tmp_path / "3" / "state" / "d").iterdir()
    chunks.write_bytes(chunks.read_bytes()[:-1])
    assert oxe.latest_good_step(tmp_path) == 2


@pytest.mark.parametrize("load", [ocp.load, oxe1.load], ids=["ocp.load", "load"])
def test_a_step_of_a_checkpointer_is_loaded_by_its_path(tmp_path, mesh, load):
    """Within a context, or by the function that needs none."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "t": (1, 2)}
    with ocp.training.Checkpointer(tmp_path, context=oxe1.context()) as checkpointer:
        checkpointer.save(7, state)
    with oxe1.context():
        assert_same_tree(load(tmp_path / "7"), state)


def test_an_error_of_a_background_save_is_raised_by_the_next_call(tmp_path, mesh, monkeypatch):
    """And the step is none; the one before it is as it was."""

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    state = {"w": place(mesh, matrix(), P("d", "m"))}
    checkpointer = ocp.training.Checkpointer(tmp_path, context=oxe1.context())
    checkpointer.save(0, state)
    with monkeypatch.context() as patched:
        patched.setattr(_trees, "write_records", fail)
        checkpointer.save_async(1, state)
        with pytest.raises(OSError, match="no space left"):
            checkpointer.wait()
        with pytest.raises(OSError, match="no space left"):
            oxe1.save_async(tmp_path / "alone", state).result()
    checkpointer.reload()
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [0]
    assert not (tmp_path / "alone").exists()
    assert checkpointer.save(2, state, force=True)
    assert_same_tree(checkpointer.load(2), state)
    checkpointer.close()


def test_a_checkpointer_goes_on_after_a_refusal(tmp_path, mesh):
    """Orbax's, whose save has raised at once, would believe that it goes on, and silently save no more."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "n": 3}
    with ocp.training.Checkpointer(tmp_path, context=oxe1.context()) as checkpointer:
        assert checkpointer.save(0, state)
        with pytest.raises(oxe.SaveRefusedError) as error:
            checkpointer.save(1, COLLIDING)
        assert sorted(error.value.problems[0].affects) == ["a.b", "a/b"]
        with pytest.raises(oxe.SaveRefusedError):  # Orbax says so once more.
            checkpointer.wait()
        response = checkpointer.save_async(1, COLLIDING)
        with pytest.raises(oxe.SaveRefusedError):
            response.result()
        with pytest.raises(oxe.SaveRefusedError):
            checkpointer.save(2, state)
        assert [checkpointer.save(step, state) for step in (2, 3, 5)] == [True] * 3
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [0, 2, 3, 5]
        assert_same_tree(checkpointer.load(5), state)
    assert oxe.latest_good_step(tmp_path) == 5


def test_check_refuses_before_a_checkpointer_overwrites(tmp_path, mesh):
    """Which removes first; a tree that is not refused is not touched."""
    partial = {"w": pending_sum(mesh)}
    with pytest.raises(oxe.SaveRefusedError):
        oxe1.check(COLLIDING)
    with pytest.raises(oxe.SaveRefusedError, match="unreduced"):
        oxe1.check(partial)
    oxe1.check(partial, unreduced="reduce")
    with oxe1.context(unreduced="reduce"):
        oxe1.check(partial)
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_itself_behind_every_function(tmp_path, mesh):
    """Orbax gives errors of what it awaits another name: nothing is left for then."""
    state = {"w": place(mesh, matrix(), P("d", "m"))}
    target = {"other": jax.ShapeDtypeStruct((2,), np.float32)}
    with ocp.training.Checkpointer(tmp_path / "root", context=oxe1.context()) as checkpointer:
        with pytest.raises(oxe.SaveRefusedError):
            checkpointer.save(0, COLLIDING)
        with pytest.raises(oxe.SaveRefusedError):
            checkpointer.wait()
        checkpointer.save(1, state)
        with pytest.raises(oxe.RestoreRefusedError, match="lacks"):
            checkpointer.load(1, target)
        (data,) = (tmp_path / "root" / "1" / "state" / "d").iterdir()
        data.write_bytes(bytes(data.stat().st_size))
        with pytest.raises(oxe.FormatError):
            checkpointer.load(1)
    with oxe1.context():
        with pytest.raises(oxe.SaveRefusedError):
            ocp.save_checkpointables(tmp_path / "a", {"model": COLLIDING})
        assert not (tmp_path / "a").exists()
        with pytest.raises(oxe.FormatError):
            ocp.load_checkpointables(tmp_path / "root" / "1")


# Threads.


@pytest.mark.parametrize("save", [oxe1.save_async, ocp.save_async], ids=["save_async", "ocp.save_async"])
def test_a_value_that_changes_after_save_async_returned_is_saved_as_it_was(tmp_path, mesh, monkeypatch, save):
    """NumPy arrays written to, JAX arrays donated and deleted, containers changed, before the first byte is written."""
    may_write, written = threading.Event(), threading.Event()
    write_arrays = _param_info.write_arrays

    async def write_when_told(*args: Any, **kwargs: Any) -> None:
        await asyncio.to_thread(may_write.wait)
        await write_arrays(*args, **kwargs)
        written.set()

    monkeypatch.setattr(_param_info, "write_arrays", write_when_told)
    wanted = {"w": matrix(64, 64), "numpy": matrix(64, 64), "deleted": matrix(), "list": [1, 2]}
    state = {
        "w": place(mesh, wanted["w"], P("d", "m")),
        "numpy": wanted["numpy"].copy(),
        "deleted": place(mesh, wanted["deleted"], P("d")),
        "list": [1, 2],
    }
    with oxe1.context():
        response = save(tmp_path / "a", state)
        jax.block_until_ready(jax.jit(lambda w: -w, donate_argnums=0)(state["w"]))
        state["numpy"][:] = -1
        state["deleted"].delete()
        state["list"].append(3)
        state["late"] = 1
        assert not written.is_set()
        may_write.set()
        response.result()
    restored = oxe1.load(tmp_path / "a")
    assert restored.keys() == wanted.keys()
    assert restored["list"] == [1, 2]
    for name in ("w", "numpy", "deleted"):
        np.testing.assert_array_equal(np.asarray(restored[name]), wanted[name])


# What stock v1 wrote, and what has become of it.


def test_a_layout_of_stocks_without_axis_types_is_auto_and_can_be_overruled(tmp_path, mesh):
    """As Orbax before 0.11.26 wrote it."""
    ocp.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
    file = tmp_path / "a" / "state" / "_sharding"
    entries = json.loads(file.read_text())
    for key, text in entries.items():
        assert base64.urlsafe_b64decode(key) == b"w"
        entries[key] = json.dumps({name: value for name, value in json.loads(text).items() if name != "axis_types"})
    file.write_text(json.dumps(entries))
    assert "no axis types were recorded" in str(oxe.plan_restore(tmp_path / "a"))
    assert oxe1.load(tmp_path / "a")["w"].sharding.mesh.axis_types == (AUTO, AUTO)
    explicit = oxe1.load(tmp_path / "a", policy=oxe.RestorePolicy(axis_types="explicit"))["w"]
    assert explicit.sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")


def test_a_damaged_layout_of_stocks_leaves_the_data_readable(tmp_path, mesh):
    """Values, and one clear note."""
    ocp.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
    (tmp_path / "a" / "state" / "_sharding").write_text('{"')
    assert "the _sharding file is not JSON" in str(oxe.plan_restore(tmp_path / "a"))
    with pytest.warns(UserWarning, match="no recorded layout for w: the _sharding file is not JSON"):
        restored = oxe1.load(tmp_path / "a")
    np.testing.assert_array_equal(np.asarray(restored["w"]), matrix())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(np.random.default_rng(0).bytes(300), id="random bytes"),
        pytest.param(b"\x91" * 100_000, id="a deep nest"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a huge length"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_record_replaced_by_something_else_is_a_format_error(tmp_path, content):
    """Whoever loads."""
    oxe1.save(tmp_path / "a", {"n": 3})
    (record,) = (tmp_path / "a").rglob("explicit_sharding.msgpack")
    record.write_bytes(content)
    with pytest.raises(oxe.FormatError):
        oxe1.load(tmp_path / "a")
    with oxe1.context(), pytest.raises(oxe.FormatError):
        ocp.load(tmp_path / "a")


def test_v0s_manager_and_checkpointer_read_what_v1_wrote(tmp_path, mesh):
    """A step of a `training.Checkpointer` is one of a `CheckpointManager` too."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "t": (1, {0: 2.5})}
    with ocp.training.Checkpointer(tmp_path, context=oxe1.context()) as checkpointer:
        checkpointer.save(3, state)
    with ocp0.CheckpointManager(
        tmp_path, item_names=("state",), item_handlers={"state": oxe.ExplicitCheckpointHandler()}
    ) as manager:
        restored = manager.restore(3, args=ocp0.args.Composite(state=oxe.args.ExplicitRestore()))
    assert_same_tree(restored["state"], state)
    with oxe.StandardCheckpointer() as v0:
        assert_same_tree(v0.restore(tmp_path / "3"), state)
