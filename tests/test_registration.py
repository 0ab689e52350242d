"""`register`: stock checkpointers that one does not own."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import array_state, assert_same_tree, assert_same_values, matrix, place

import orbax_explicit as oxe
from orbax_explicit._records import ArrayRecord
from orbax_explicit.testing import run_on_devices


def array_handler() -> ocp.type_handlers.TypeHandler:
    """What stock v0 handlers use for `jax.Array`."""
    return ocp.type_handlers.get_type_handler(jax.Array)


@pytest.fixture
def registered():
    """The whole test runs with the array handler registered."""
    with oxe.registered():
        yield


def test_register_and_unregister_are_idempotent():
    """Twice in is once in; out puts back what was there, and again does nothing."""
    before = array_handler()
    oxe.register()
    oxe.register(oxe.RestorePolicy(axis_types="auto"))
    assert isinstance(array_handler(), oxe.ExplicitArrayHandler)
    oxe.unregister()
    assert array_handler() is before
    oxe.unregister()
    assert array_handler() is before


def test_registrations_nest():
    """The inner one ends where its block does, and the outer one is back."""
    before = array_handler()
    with oxe.registered():
        outer = array_handler()
        with oxe.registered(oxe.RestorePolicy(memory_kind="pinned_host")):
            assert array_handler() is not outer
        assert array_handler() is outer
    assert array_handler() is before


@pytest.mark.usefixtures("registered")
def test_a_stock_checkpointer_gives_arrays_back_whole(tmp_path, mesh):
    """Without a target: memory kinds, reduced axes, keys, empty arrays, and scalars that stay uncommitted."""
    state = array_state(mesh)
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "a", state)
        stock.wait_until_finished()
        assert_same_tree(stock.restore(tmp_path / "a"), state)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        assert_same_tree(stock.restore(tmp_path / "a", abstract), state)
        assert_same_tree(stock.restore(tmp_path / "a", state), state)
    with ocp.PyTreeCheckpointer() as stock:
        assert_same_tree(stock.restore(tmp_path / "a"), state)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
@pytest.mark.parametrize("rows", [8, 1024], ids=["small", "large"])
def test_a_tree_that_is_one_array_is_saved_by_its_empty_name(tmp_path, mesh, rows, use_ocdbt):
    """Stock allows it, and finds it again without us."""
    array = place(mesh, matrix(rows, 128), P("d", "m"))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as stock:
        stock.save(tmp_path / "a", args=ocp.args.PyTreeSave(array))
    with ocp.PyTreeCheckpointer() as stock:
        (found,) = jax.tree.leaves(stock.restore(tmp_path / "a"))
        assert_same_tree([found], [array])
        oxe.unregister()
        (found,) = jax.tree.leaves(stock.restore(tmp_path / "a"))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(array))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("under_set_mesh", [True, False], ids=["under jax.set_mesh", "outside of it"])
def test_a_stock_checkpointer_resolves_an_abstract_target(tmp_path, mesh, under_set_mesh):
    """The spec and axis types are the target's, and what it gives no sharding lands beside it."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "count": place(mesh, jnp.int32(3), P()), "step": jnp.int32(1)}

    def init():
        return {"w": jax.reshard(jnp.ones((8, 8)), P(None, "d")), "count": jnp.int32(0), "step": jnp.int32(0)}

    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "a", state)
        stock.wait_until_finished()
        with jax.set_mesh(mesh):
            target = jax.eval_shape(init)
            restored = stock.restore(tmp_path / "a", target) if under_set_mesh else None
        if restored is None:
            restored = stock.restore(tmp_path / "a", target)
    assert restored["w"].sharding == NamedSharding(mesh, P(None, "d"), memory_kind="device")
    assert restored["count"].sharding == NamedSharding(mesh, P(), memory_kind="device")
    assert type(restored["count"].sharding) is NamedSharding
    assert not restored["step"].committed


@pytest.mark.usefixtures("registered")
def test_what_a_target_leaves_open_lands_on_the_targets_own_mesh(tmp_path, mesh):
    """Not on the recorded mesh, on which the next computation could not use it together with the rest."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "count": place(mesh, jnp.int32(3), P())}
    small = AbstractMesh((2, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    target = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(small, P("m"))),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "a", state)
        stock.wait_until_finished()
        restored = stock.restore(tmp_path / "a", target)
    assert restored["w"].sharding.mesh.devices.shape == (2, 2)
    assert restored["count"].sharding.mesh == restored["w"].sharding.mesh


@pytest.mark.usefixtures("registered")
def test_keys_of_another_implementation_are_refused(tmp_path):
    """Stock gives back whatever keys were saved; key data of one implementation are no keys of another."""
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "a", {"key": jax.random.key(0)})
        stock.wait_until_finished()
        other = jax.random.key(0, impl="rbg")
        abstract = jax.ShapeDtypeStruct((), other.dtype, sharding=other.sharding)
        with pytest.raises(oxe.RestoreRefusedError, match="cannot restore key<threefry2x32> as key<rbg>"):
            stock.restore(tmp_path / "a", {"key": abstract})
        # Of real keys stock passes on the shape of their data alone.
        with pytest.raises(ValueError, match="is not compatible with the stored shape"):
            stock.restore(tmp_path / "a", {"key": other})


def test_a_handler_that_somebody_registered_since_is_left_alone():
    """`unregister` puts back what `register` took out, if that is still its own to take out."""
    before = array_handler()
    theirs = ocp.type_handlers.ArrayHandler()
    oxe.register()
    ocp.type_handlers.register_type_handler(jax.Array, theirs, override=True)
    try:
        oxe.unregister()
        assert array_handler() is theirs
    finally:
        ocp.type_handlers.register_type_handler(jax.Array, before, override=True)


@pytest.mark.usefixtures("registered")
def test_explicit_restore_arguments_are_honoured(tmp_path, mesh):
    """A sharding, or a mesh and axes, that the caller names."""
    other = jax.make_mesh((8,), ("x",))
    with ocp.PyTreeCheckpointer() as stock:
        stock.save(tmp_path / "a", {"v": place(mesh, matrix(), P("d")), "w": place(mesh, matrix(), P("d"))})
        restored = stock.restore(
            tmp_path / "a",
            restore_args={
                "v": ocp.ArrayRestoreArgs(sharding=NamedSharding(other, P("x")), dtype=jnp.bfloat16),
                "w": ocp.ArrayRestoreArgs(mesh=other, mesh_axes=P(None, "x")),
            },
        )
    assert restored["v"].sharding.spec == P("x")
    assert restored["v"].dtype == jnp.bfloat16
    assert restored["w"].sharding.spec == P(None, "x")
    assert_same_values(restored["w"], matrix())


def test_the_policy_of_a_registration_is_followed(tmp_path, mesh):
    """Here: axes retyped."""
    with oxe.registered(oxe.RestorePolicy(axis_types="auto")), ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d"))})
        stock.wait_until_finished()
        restored = stock.restore(tmp_path / "a")["w"]
    assert restored.sharding.mesh.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.usefixtures("registered")
def test_arrays_under_one_storage_name_are_refused(tmp_path, mesh):
    """Both by name, before any is written; the next save succeeds."""
    x = place(mesh, matrix(), P("d"))
    with ocp.StandardCheckpointer() as stock:
        with pytest.raises(oxe.SaveRefusedError, match=r"store all of them as 'a\.b'") as error:
            stock.save(tmp_path / "a", {"a.b": x, "a": {"b": 2 * x}})
        assert set(error.value.problems[0].affects) == {"a.b", "a/b"}
        stock.save(tmp_path / "a", {"a": {"b": 2 * x}})
        stock.wait_until_finished()
        assert_same_values(stock.restore(tmp_path / "a")["a"]["b"], 2 * matrix())


@pytest.mark.usefixtures("registered")
def test_a_registrations_record_serves_whole_trees(tmp_path, mesh):
    """Of the rest of the tree it knows what stock wrote: lists for tuples, str for int keys; and of arrays all."""
    state = {"t": (place(mesh, matrix(), P("d"), memory_kind="pinned_host"), 3), "d": {0: jnp.int32(1)}, "e": None}
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "a", state)
        stock.wait_until_finished()
    manifest = oxe.read_manifest(tmp_path / "a")
    assert manifest.inventory is not None
    assert sum(isinstance(leaf, ArrayRecord) for leaf in manifest.leaves.values()) == 2
    with oxe.StandardCheckpointer() as ours:
        restored = ours.restore(tmp_path / "a")
        assert_same_tree(ours.restore(tmp_path / "a", state), state)
    assert_same_tree(restored, {"t": list(state["t"]), "d": {"0": state["d"][0]}, "e": None})


@pytest.mark.usefixtures("registered")
def test_a_manager_of_stock_handlers_is_served(tmp_path, mesh):
    """Step metadata and restores without arguments."""
    state = array_state(mesh)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert_same_tree(manager.restore(0), state)
        assert manager.item_metadata(0)["sharded"].sharding.to_jax_sharding() == state["sharded"].sharding


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        pytest.param({"missing": "keep"}, "missing", id="leaves that the checkpoint lacks"),
        pytest.param({"extra": "ignore", "arrays": "numpy"}, "extra, arrays", id="two at once"),
        pytest.param({"rename_leaves": {"a": "b"}}, "rename_leaves", id="renamed leaves"),
        pytest.param({"cast": "never"}, "cast", id="casts"),
        pytest.param({"rules": [("w", P("d"))]}, "rules", id="specs by name"),
    ],
)
def test_choices_about_the_tree_are_refused(policy, named):
    """A type handler sees no tree; nothing that it cannot follow is dropped."""
    with pytest.raises(ValueError, match=f"cannot follow {named}: restore through an ExplicitCheckpointHandler"):
        oxe.register(oxe.RestorePolicy(**policy))
    assert not isinstance(ocp.type_handlers.get_type_handler(jax.Array), oxe.ExplicitArrayHandler)


def test_a_leaf_without_a_sharding_lands_beside_concrete_ones(tmp_path, mesh):
    """On the mesh of the target's other leaves, so that they can be used together."""
    devices = np.array(jax.devices()[::-1]).reshape(4, 2)
    other = Mesh(devices, ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    state = {"w": place(mesh, matrix(), P("d", "m")), "count": place(mesh, np.int32(3))}
    target = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(other, P("d", "m"))),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with oxe.registered(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "a", target)
    assert restored["count"].sharding == NamedSharding(other, P(), memory_kind="device")
    assert_same_values(jax.jit(lambda tree: tree["w"] * tree["count"])(restored), 3 * matrix())


def test_a_part_of_the_tree_lands_on_the_mesh_of_the_whole(tmp_path, mesh):
    """However few arrays are asked for: the whole record says how a mesh is resized."""
    state = {"few": place(mesh, matrix(6, 8), P("d", "m")), "many": place(mesh, matrix(24, 8), P("d", "m"))}
    with oxe.registered(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
    assert run_on_devices(restore_many, tmp_path / "a", devices=16) == [{"d": 3, "m": 4}]


def restore_many(path: pathlib.Path) -> dict[str, int]:
    """The mesh on which one of two arrays lands: alone, it would have room for more."""
    with oxe.registered(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore({"many": 0}, restore_args={"many": ocp.ArrayRestoreArgs()}, partial_restore=True)
        return dict(checkpointer.restore(path, args=args)["many"].sharding.mesh.shape)
