"""`ExplicitCheckpointHandler` in Orbax's checkpointers and managers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, matrix, place, training_state

import orbax_explicit as oxe
from orbax_explicit import _array_reading, _array_shares

CHECKPOINTERS = [
    pytest.param(ocp.Checkpointer, id="a synchronous checkpointer"),
    pytest.param(ocp.AsyncCheckpointer, id="an asynchronous checkpointer"),
]


def wait(checkpointer: Any) -> None:
    """Waits for an asynchronous save."""
    if isinstance(checkpointer, ocp.AsyncCheckpointer):
        checkpointer.wait_until_finished()


@pytest.mark.parametrize("cls", CHECKPOINTERS)
@pytest.mark.parametrize(
    ("save", "restore"),
    [
        pytest.param(oxe.args.ExplicitSave, oxe.args.ExplicitRestore, id="its own arguments"),
        pytest.param(ocp.args.StandardSave, ocp.args.StandardRestore, id="stock's arguments"),
    ],
)
def test_a_checkpointer_saves_and_restores_a_tree(tmp_path, mesh, cls, save, restore):
    """With its own arguments and with stock's, which it takes for what they say."""
    state = training_state(mesh)
    with cls(oxe.ExplicitCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=save(state))
        wait(checkpointer)
        assert_same_tree(checkpointer.restore(tmp_path / "a", args=restore()), state)
        assert_same_tree(checkpointer.restore(tmp_path / "a", args=restore(state)), state)
        assert_same_tree(checkpointer.restore(tmp_path / "a"), state)


def test_a_checkpointer_takes_the_tree_without_arguments_too(tmp_path, mesh):
    """Orbax's older calling form makes the registered arguments itself."""
    state = {"w": place(mesh, matrix(), P("d"))}
    with ocp.Checkpointer(oxe.ExplicitCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        assert_same_tree(checkpointer.restore(tmp_path / "a", item=state), state)


def test_a_restore_places_recorded_specs_on_a_given_mesh_by_a_policy(tmp_path, mesh):
    """`ExplicitRestore` carries both; the handler's own policy is what a restore without one gets."""
    handler = oxe.ExplicitCheckpointHandler(policy=oxe.RestorePolicy(axis_types="auto"))
    other = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "a", args=oxe.args.ExplicitSave({"w": place(mesh, matrix(), P("d", "m"))}))
        own = checkpointer.restore(tmp_path / "a")["w"]
        given = checkpointer.restore(tmp_path / "a", args=oxe.args.ExplicitRestore(mesh=other))["w"]
        manual = oxe.RestorePolicy(memory_kind="pinned_host", axis_types={"d": AxisType.Explicit})
        theirs = checkpointer.restore(tmp_path / "a", args=oxe.args.ExplicitRestore(policy=manual))["w"]
    assert own.sharding.mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert given.sharding == NamedSharding(other, P("d", "m"), memory_kind="device")
    assert theirs.sharding == NamedSharding(mesh, P("d", "m"), memory_kind="pinned_host")


def test_a_fallback_sharding_serves_arrays_whose_mesh_does_not_fit(tmp_path, mesh):
    """`fallback_sharding` of stock's arguments; a mesh that fits is not replaced."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(1)}
    fallback = NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), P("x"))
    foreign = jax.make_mesh((8,), ("other",), axis_types=(AxisType.Explicit,))
    with ocp.Checkpointer(oxe.ExplicitCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=oxe.args.ExplicitSave(state))
        args = ocp.args.StandardRestore(fallback_sharding=fallback)
        assert_same_tree(checkpointer.restore(tmp_path / "a", args=args), state)
        with jax.set_mesh(foreign):
            restored = checkpointer.restore(tmp_path / "a", args=args)
    assert restored["w"].sharding.spec == P("x")
    assert not restored["step"].committed


def test_stocks_arguments_say_nothing_that_is_lost():
    """When a field is added to `StandardSave` or `StandardRestore`, ours must carry it on."""

    def fields(args: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(args)}

    assert fields(ocp.args.StandardSave) | {"unreduced"} == fields(oxe.args.ExplicitSave), (
        "carry the field on in async_save"
    )
    assert fields(ocp.args.StandardRestore) | {"mesh", "policy"} == fields(oxe.args.ExplicitRestore), (
        "carry the field on in handler._explicit"
    )


def test_a_restore_takes_the_targets_layouts(tmp_path, mesh):
    """Where it is asked to, as in stock Orbax: the layout of each target leaf on its devices."""
    w = place(mesh, matrix(), P("d"))
    assert w.format.layout is not None
    with ocp.Checkpointer(oxe.ExplicitCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=oxe.args.ExplicitSave({"w": w}))
        args = ocp.args.StandardRestore({"w": w}, support_layout=True)
        restored = checkpointer.restore(tmp_path / "a", args=args)["w"]
    assert restored.format == w.format


def test_a_restore_in_a_running_event_loop_sees_the_context_mesh(tmp_path, mesh):
    """As in a notebook, where Orbax calls its handlers from another thread."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(1)}
    other = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))

    async def cell() -> Any:
        with oxe.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "a", state)
            checkpointer.wait_until_finished()
            with jax.set_mesh(other):
                return checkpointer.restore(tmp_path / "a")

    restored = asyncio.run(cell())
    assert restored["w"].sharding == NamedSharding(other, P("d", "m"), memory_kind="device")
    assert not restored["step"].committed


# Managers.


@pytest.fixture
def manager(tmp_path):
    """A manager with a handler for its one item."""
    with ocp.CheckpointManager(tmp_path / "steps", item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        yield manager


def test_a_manager_restores_its_steps(tmp_path, manager, mesh):
    """With arguments and without; metadata, and the record by the step's path or the item's."""
    state = training_state(mesh)
    for step in (1, 2):
        assert manager.save(step, args=oxe.args.ExplicitSave(state, custom_metadata={"step": step}))
    manager.wait_until_finished()

    assert manager.latest_step() == 2
    assert_same_tree(manager.restore(1), state)
    assert_same_tree(manager.restore(2, args=oxe.args.ExplicitRestore()), state)
    assert_same_tree(manager.restore(2, args=oxe.args.ExplicitRestore(state)), state)
    metadata = manager.item_metadata(2)
    assert metadata.custom_metadata == {"step": 2}
    assert metadata["params"]["layers"]["0"]["w"].sharding.to_jax_sharding() == NamedSharding(mesh, P("d", "m"))
    step = tmp_path / "steps" / "2"
    assert oxe.read_manifest(step) == oxe.read_manifest(step / "default")


def test_the_recorded_handler_is_stocks(tmp_path, manager, mesh):
    """So that a stock manager knows what to restore with, whether or not this package is there."""
    manager.save(0, args=oxe.args.ExplicitSave({"w": place(mesh, matrix(), P("d"))}))
    manager.wait_until_finished()
    recorded = json.loads((tmp_path / "steps/0/_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert recorded == {"default": ocp.StandardCheckpointHandler.typestr()}
    assert recorded["default"].endswith("StandardCheckpointHandler")


def test_a_registry_leads_stocks_arguments_to_the_handler(tmp_path, mesh):
    """Code that says `StandardSave` and `StandardRestore` keeps saying so; restore and metadata need none."""
    state = training_state(mesh)
    with ocp.CheckpointManager(tmp_path, handler_registry=oxe.handler_registry("default")) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert (tmp_path / "0/default/explicit_sharding.msgpack").exists()
        for restored in (
            manager.restore(0),
            manager.restore(0, args=ocp.args.StandardRestore()),
            manager.restore(0, args=ocp.args.StandardRestore(state)),
            manager.restore(0, args=oxe.args.ExplicitRestore()),
        ):
            assert_same_tree(restored, state)
    with ocp.CheckpointManager(tmp_path, handler_registry=oxe.handler_registry("default")) as fresh:
        assert fresh.item_metadata(0)["params"]["layers"]["1"]["w"].shape == (8, 8)
        assert_same_tree(fresh.restore(0), state)


def test_a_registry_takes_a_handler_or_a_policy():
    """Not both: one of them would be ignored."""
    with pytest.raises(ValueError, match="pass the policy to the handler"):
        oxe.handler_registry(policy=oxe.RestorePolicy(), handler=oxe.ExplicitCheckpointHandler())


def test_a_manager_keeps_several_items_apart(tmp_path, mesh):
    """Composite steps: two trees of ours, and JSON with its own handler."""
    params, opt = {"w": place(mesh, matrix(), P("d", "m"))}, {"mu": place(mesh, -matrix(), P("m"))}
    with ocp.CheckpointManager(
        tmp_path, handler_registry=oxe.handler_registry("params", "opt", policy=oxe.RestorePolicy())
    ) as manager:
        manager.save(
            0,
            args=ocp.args.Composite(
                params=oxe.args.ExplicitSave(params),
                opt=ocp.args.StandardSave(opt),
                extra=ocp.args.JsonSave({"epoch": 3}),
            ),
        )
        manager.wait_until_finished()
        restored = manager.restore(
            0,
            args=ocp.args.Composite(
                params=oxe.args.ExplicitRestore(), opt=ocp.args.StandardRestore(opt), extra=ocp.args.JsonRestore()
            ),
        )
    assert_same_tree(restored["params"], params)
    assert_same_tree(restored["opt"], opt)
    assert restored["extra"] == {"epoch": 3}
    with pytest.raises(oxe.CheckpointLayoutError, match="cannot tell which item") as error:
        oxe.read_manifest(tmp_path / "0")
    assert "opt, params" in str(error.value)


def test_a_refused_save_does_not_stop_the_next_step(manager, mesh):
    """Neither that step nor the one after it; what was saved before is still there."""
    good = {"w": place(mesh, matrix(), P("d"))}
    manager.save(0, args=oxe.args.ExplicitSave(good))
    for step in (1, 1):
        with pytest.raises(oxe.SaveRefusedError, match=r"cannot save a leaf of type builtins\.object"):
            manager.save(step, args=oxe.args.ExplicitSave({"w": good["w"], "odd": object()}))
    manager.save(1, args=oxe.args.ExplicitSave(good))
    manager.wait_until_finished()
    assert manager.all_steps() == [0, 1]
    assert_same_tree(manager.restore(1), good)


def test_a_refused_item_stops_the_other_items_of_its_step(tmp_path, mesh):
    """Nothing of the step is written, in whatever order the items come, and the next save of it is whole."""
    good, bad = {"w": place(mesh, matrix(), P("d"))}, {"odd": object()}
    with ocp.CheckpointManager(tmp_path, handler_registry=oxe.handler_registry("a", "b")) as manager:
        for a, b in ((good, bad), (bad, good)):
            with pytest.raises(oxe.SaveRefusedError):
                manager.save(0, args=ocp.args.Composite(a=oxe.args.ExplicitSave(a), b=oxe.args.ExplicitSave(b)))
            written = [file for file in tmp_path.rglob("*") if file.is_file()]
            assert {file.name for file in written} <= {"_CHECKPOINT_METADATA"}
        manager.save(0, args=ocp.args.Composite(a=oxe.args.ExplicitSave(good), b=oxe.args.ExplicitSave(good)))
        manager.wait_until_finished()
        restored = manager.restore(0)
    assert_same_tree(restored["a"], good)
    assert_same_tree(restored["b"], good)


def stored_chunk(directory: pathlib.Path) -> list[int]:
    """Shape of the chunks of an array that has a directory of its own."""
    return list(json.loads((directory / ".zarray").read_text())["chunks"])


def bound_chunks(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Bounds the chunks of arrays that are saved, small ones too."""
    monkeypatch.setattr(_array_shares, "MAX_CHUNK_NBYTES", nbytes)
    monkeypatch.setattr(_array_shares, "ONE_CHUNK_NBYTES", 0)


def test_chunks_are_bounded(tmp_path, mesh, monkeypatch):
    """A chunk of a shard's size would have to be decoded whole; `SaveArgs` may say otherwise."""
    bound_chunks(monkeypatch, 32)
    w = place(mesh, matrix(16, 16), P("d", "m"))  # In shards of 128 bytes.
    state = {"few": w, "many": w, "host": matrix()}
    args = {"few": None, "many": ocp.SaveArgs(chunk_byte_size=128), "host": None}
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", state, save_args=args)
        checkpointer.wait_until_finished()
        assert_same_tree(checkpointer.restore(tmp_path / "a"), state)
    sizes = {name: 4 * math.prod(stored_chunk(tmp_path / "a" / name)) for name in state}
    assert sizes == {"few": 32, "many": 128, "host": 32}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        pytest.param({"chunk_byte_size": 0}, "into chunks of 0 bytes", id="no bytes"),
        pytest.param({"chunk_byte_size": -1}, "into chunks of -1 bytes", id="fewer than none"),
        pytest.param({"chunk_byte_size": 3}, "into chunks of 3 bytes", id="less than an element"),
        pytest.param({"shard_axes": (2,)}, r"along shard_axes=\(2,\)", id="a dimension that there is not"),
        pytest.param({"shard_axes": (-1,)}, r"along shard_axes=\(-1,\)", id="counted from the end"),
    ],
)
def test_chunks_that_cannot_be_are_refused_by_leaf_name(tmp_path, mesh, argument, words):
    """Stock refuses them too."""
    state = {"w": place(mesh, matrix(), P("d", "m"))}
    with oxe.StandardCheckpointer() as checkpointer:
        with pytest.raises(oxe.SaveRefusedError, match=f"cannot cut w {words}"):
            checkpointer.save(tmp_path / "a", state, save_args={"w": ocp.SaveArgs(**argument)})
        checkpointer.save(tmp_path / "a", state)


def test_no_bound_on_transfers_is_the_default(tmp_path):
    """As in stock's handlers."""
    with oxe.StandardCheckpointer(save_concurrent_gb=None, restore_concurrent_gb=None) as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": jnp.arange(3)})
        checkpointer.wait_until_finished()
        assert_same_tree(checkpointer.restore(tmp_path / "a"), {"w": jnp.arange(3)})


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
def test_a_key_that_ends_in_a_slash_is_where_stock_looks_for_it(tmp_path, use_zarr3):
    """And ours finds what stock wrote: TensorStore sets no second one behind it."""
    state = {"a/": jnp.arange(5.0), "large/": jnp.zeros((512, 512)), "host/": np.arange(3)}
    with oxe.StandardCheckpointer(use_zarr3=use_zarr3) as checkpointer:
        checkpointer.save(tmp_path / "ours", state)
        checkpointer.wait_until_finished()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3)) as stock:
            stock.save(tmp_path / "stock", args=ocp.args.PyTreeSave(state))
            for name, value in stock.restore(tmp_path / "ours").items():
                np.testing.assert_array_equal(value, state[name])
        for path in ("ours", "stock"):
            for name, value in checkpointer.restore(tmp_path / path).items():
                np.testing.assert_array_equal(value, state[name])
    assert oxe.verify(tmp_path / "ours").ok


@pytest.mark.parametrize("shape", [(10007,), (509, 4), (2, 11)], ids=str)
def test_an_array_that_is_not_split_is_cut_whatever_its_shape(tmp_path, mesh, monkeypatch, shape):
    """Zarr needs no divisors: what stands out beyond the array is padding."""
    bound_chunks(monkeypatch, 400)
    state = {"w": jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape), "host": np.ones(shape, np.float32)}
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        assert_same_tree(checkpointer.restore(tmp_path / "a"), state)
    for name in state:
        assert 4 * math.prod(stored_chunk(tmp_path / "a" / name)) <= 400


def test_a_restore_in_a_running_event_loop_has_the_callers_flags_and_device(tmp_path):
    """As in a notebook: Orbax reads in another thread, which has a default device and flags of its own."""
    device = jax.devices()[6]

    async def cell() -> Any:
        with jax.enable_x64(True), jax.default_device(device), oxe.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "a", {"wide": jnp.arange(3.0), "key": jax.random.key(1)})
            checkpointer.wait_until_finished()
            return checkpointer.restore(tmp_path / "a"), oxe.plan_restore(tmp_path / "a").default_device_ids

    restored, default = asyncio.run(cell())
    assert default == (device.id,)
    assert restored["wide"].dtype == np.float64
    for array in restored.values():
        assert not array.committed
        assert array.devices() == {device}


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"dtype": "<i4"}, id="another dtype, though the target casts"),
        pytest.param({"shape": [10**12, 8], "chunks": [10**12, 8]}, id="a shape that no memory holds"),
        pytest.param({"shape": [7, 7]}, id="a shape that the mesh does not divide"),
        pytest.param({"dtype": ">f4"}, id="another byte order, which is one bit"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32], ids=["cast", "as saved"])
@pytest.mark.parametrize("small", [0, 1 << 20], ids=["a large array", "a small array"])
def test_an_array_that_is_not_the_recorded_one_is_an_error_before_it_is_read(
    tmp_path, mesh, monkeypatch, edit, dtype, small
):
    """By leaf name, and whatever becomes of its values."""
    monkeypatch.setattr(_array_reading, "SMALL_NBYTES", small)
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
        checkpointer.wait_until_finished()
        file = tmp_path / "a" / "w" / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | edit))
        (tmp_path / "a" / "explicit_digests.msgpack").unlink()  # Which would tell of any change.
        with pytest.raises(oxe.FormatError, match="cannot restore w: what is stored is"):
            checkpointer.restore(tmp_path / "a", {"w": jax.ShapeDtypeStruct((8, 8), dtype)})


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["a large array", "a small array"])
def test_without_a_database_damaged_metadata_of_an_array_are_an_error(tmp_path, monkeypatch, small):
    """Also where they would be read: here a square array would come back transposed."""
    monkeypatch.setattr(_array_reading, "SMALL_NBYTES", small)
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": jnp.arange(64.0).reshape(8, 8)})
        checkpointer.wait_until_finished()
        file = tmp_path / "a" / "w" / ".zarray"
        file.write_text(file.read_text().replace('"order":"C"', '"order":"F"'))
        with pytest.raises(oxe.FormatError, match="cannot read w: its Zarr metadata are not what was written"):
            checkpointer.restore(tmp_path / "a")


@pytest.mark.parametrize("options", [{}, {"use_zarr3": True}, {"use_ocdbt": False}], ids=["", "Zarr 3", "no OCDBT"])
def test_a_training_state_in_small_chunks_comes_back_whole(tmp_path, mesh, monkeypatch, options):
    """Of every dtype and layout, keys and arrays of size zero included."""
    bound_chunks(monkeypatch, 16)
    state = training_state(mesh)
    with oxe.StandardCheckpointer(**options) as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        assert_same_tree(checkpointer.restore(tmp_path / "a"), state)


@pytest.mark.parametrize("layout", ["as recorded", "replicated", "resharded"])
def test_what_is_donated_after_a_restore_takes_nothing_from_anything_else(tmp_path, mesh, layout):
    """Neither from other leaves, nor from what is seen of its own shards, nor from another restore of the same."""
    values = {"added": matrix(16, 64), "set": 2 * matrix(16, 64), "kept": 3 * matrix(16, 64), "other": matrix(64, 16)}
    specs = {"added": P("d", "m"), "set": P(), "kept": P(), "other": P("m")}
    state = {name: place(mesh, values[name], specs[name]) for name in values}
    turned = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    asked: dict[str, dict[str, Any]] = {
        "as recorded": {},
        "replicated": {"target": {name: shape(array.shape, array.dtype) for name, array in state.items()}},
        "resharded": {"mesh": turned},
    }
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        first, second = (checkpointer.restore(tmp_path / "a", **asked[layout]) for _ in range(2))
    shards = [(name, s.index, s.data) for name in ("kept", "other") for s in first[name].addressable_shards]
    # Not of what is to be donated in earnest: JAX copies a buffer that something else can see.
    views = [(name, s.index, np.asarray(s.data)) for name in ("set", "kept") for s in first[name].addressable_shards]

    added, changed = first["added"], first["set"]
    for _ in range(3):
        added = jax.jit(lambda array: array + 1, donate_argnums=0)(added)
        changed = jax.jit(lambda array: array.at[0].set(-1), donate_argnums=0)(changed)
    assert first["added"].is_deleted()

    results = {"added": values["added"] + 3, "set": np.concatenate([np.full((1, 64), -1), values["set"][1:]])}
    for name, array in (("added", added), ("set", changed)):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), results[name][shard.index], name)
    pieces = [(name, s.index, s.data) for name, array in second.items() for s in array.addressable_shards]
    for name, index, piece in [*shards, *views, *pieces]:
        np.testing.assert_array_equal(np.asarray(piece), values[name][index], name)


def test_a_save_goes_on_while_training_does(manager, mesh):
    """The values of the step are those at the time of the call."""
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    w = place(mesh, matrix(), P("d", "m"))
    for i in range(3):
        manager.save(i, args=oxe.args.ExplicitSave({"w": w}))
        for _ in range(10):
            w = step(w)
    manager.wait_until_finished()
    for i in range(3):
        np.testing.assert_array_equal(np.asarray(manager.restore(i)["w"]), matrix() + 10 * i)
