"""`StandardCheckpointer`: what goes in comes out, on unchanged devices."""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re
import resource
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, assert_same_values, matrix, pending_sum, place, training_state

import orbax_explicit as oxe
from orbax_explicit._sidecar import FILE_NAME
from orbax_explicit.testing import run_on_devices


@pytest.fixture
def checkpointer():
    """A checkpointer that is closed after the test."""
    with oxe.StandardCheckpointer() as checkpointer:
        yield checkpointer


def saved(checkpointer: oxe.StandardCheckpointer, directory: pathlib.Path, state: Any, **kwargs: Any) -> pathlib.Path:
    """The path of a finished checkpoint of `state`."""
    path = directory / "checkpoint"
    checkpointer.save(path, state, **kwargs)
    checkpointer.wait_until_finished()
    return path


def test_a_training_state_comes_back_whole_without_a_target(tmp_path, checkpointer, mesh):
    """Containers, types, values, shardings, memory kinds, commitment: all as saved."""
    state = training_state(mesh)
    assert_same_tree(checkpointer.restore(saved(checkpointer, tmp_path, state)), state)


@pytest.mark.parametrize("options", [{"use_zarr3": True}, {"use_ocdbt": False}], ids=["in Zarr 3", "without OCDBT"])
def test_a_training_state_comes_back_whole_in_orbax_other_formats(tmp_path, mesh, options):
    """The record does not depend on how Orbax stores the bytes."""
    state = training_state(mesh)
    with oxe.StandardCheckpointer(**options) as checkpointer:
        path = saved(checkpointer, tmp_path, state)
    with oxe.StandardCheckpointer() as plain:
        assert_same_tree(plain.restore(path), state)


def test_a_training_state_comes_back_whole_into_itself(tmp_path, checkpointer, mesh):
    """A target of real values: its shardings as they are, and its uncommitted scalars stay uncommitted."""
    state = training_state(mesh)
    assert_same_tree(checkpointer.restore(saved(checkpointer, tmp_path, state), state), state)


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
    ("types", "reverse", "spec"),
    [
        pytest.param((EXPLICIT, EXPLICIT), False, P("d", "m"), id="both axes explicit"),
        pytest.param((EXPLICIT, AUTO), False, P("d", "m"), id="an explicit and an auto axis"),
        pytest.param((AUTO, AUTO), False, P("d", "m"), id="both axes auto"),
        pytest.param((EXPLICIT, EXPLICIT), True, P("d", "m"), id="devices in reverse order"),
        pytest.param((EXPLICIT, EXPLICIT), False, P(("d", "m"), None), id="one dimension over two axes"),
        pytest.param((EXPLICIT, EXPLICIT), False, P(None, "m"), id="the second dimension alone"),
        pytest.param((EXPLICIT, EXPLICIT), False, P(), id="replicated"),
        pytest.param((EXPLICIT, EXPLICIT), False, P("d"), id="a spec shorter than the shape"),
        pytest.param((EXPLICIT, EXPLICIT), False, P("d", reduced={"m"}), id="a reduced axis"),
    ],
)
def test_the_restored_sharding_equals_the_saved_one(tmp_path, checkpointer, types, reverse, spec):
    """Mesh axis names, sizes and types, device order, spec and memory kind, on unchanged devices."""
    devices = np.array(jax.devices()[::-1] if reverse else jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("d", "m"), axis_types=types)
    array = place(mesh, matrix(), spec)

    restored = checkpointer.restore(saved(checkpointer, tmp_path, {"w": array}))["w"]

    assert restored.sharding == array.sharding
    assert restored.sharding.spec == array.sharding.spec
    assert restored.sharding.mesh.axis_types == types
    assert [d.id for d in restored.sharding.mesh.devices.flat] == [d.id for d in devices.flat]
    assert_same_values(restored, array)


def test_a_mesh_on_some_of_the_devices_comes_back_on_them(tmp_path, checkpointer):
    """Two meshes over different halves of the machine stay on their halves."""
    halves = [
        Mesh(np.array(jax.devices()[half : half + 4]).reshape(2, 2), ("d", "m"), axis_types=(EXPLICIT, AUTO))
        for half in (0, 4)
    ]
    state = {"first": place(halves[0], matrix(), P("d", "m")), "second": place(halves[1], matrix(), P("m"))}
    assert_same_tree(checkpointer.restore(saved(checkpointer, tmp_path, state)), state)


def test_leaves_of_one_mesh_land_on_one_mesh_object(tmp_path, checkpointer, mesh):
    """Code that compares meshes by identity goes on to work."""
    specs = (P("d"), P("m"), P("d", "m"), P())
    restored = checkpointer.restore(saved(checkpointer, tmp_path, [place(mesh, matrix(), spec) for spec in specs]))
    assert len({id(leaf.sharding.mesh) for leaf in restored}) == 1


# Targets.


def abstract(init: Any, mesh: Mesh) -> Any:
    """What `jax.eval_shape` says of a state under `jax.set_mesh`."""
    with jax.set_mesh(mesh):
        return jax.eval_shape(init)


@pytest.mark.parametrize("under_set_mesh", [True, False], ids=["under jax.set_mesh", "outside of it"])
def test_an_eval_shape_target_gives_its_spec_and_axis_types(tmp_path, checkpointer, mesh, under_set_mesh):
    """The target's abstract mesh becomes the recorded devices; a scalar that it gives no sharding lands beside it."""

    def init() -> dict[str, jax.Array]:
        return {"w": jax.reshard(jnp.ones((8, 8)), P(None, "d")), "count": jnp.int32(0)}

    state = {"w": place(mesh, matrix(), P("d", "m")), "count": place(mesh, np.int32(3), P())}
    path = saved(checkpointer, tmp_path, state)
    target = abstract(init, mesh)
    assert target["count"].sharding is None

    if under_set_mesh:
        with jax.set_mesh(mesh):
            restored = checkpointer.restore(path, target)
    else:
        restored = checkpointer.restore(path, target)

    assert restored["w"].sharding == NamedSharding(mesh, P(None, "d"), memory_kind="device")
    assert restored["w"].sharding.mesh.axis_types == (EXPLICIT, EXPLICIT)
    assert restored["count"].sharding == NamedSharding(mesh, P(), memory_kind="device")
    assert_same_values(restored["w"], state["w"])


def abstract_leaf(
    mesh: AbstractMesh, spec: P, dtype: Any = jnp.float32, shape: tuple[int, ...] = (8, 8), **kwargs: Any
) -> jax.ShapeDtypeStruct:
    """A target leaf on an abstract mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec, **kwargs))


def test_an_abstract_target_keeps_its_memory_kind(tmp_path, checkpointer, mesh):
    """`pinned_host` in, `pinned_host` out."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d"))})
    target = {"w": abstract_leaf(mesh.abstract_mesh, P("d", "m"), memory_kind="pinned_host")}
    restored = checkpointer.restore(path, target)["w"]
    assert restored.sharding == NamedSharding(mesh, P("d", "m"), memory_kind="pinned_host")


def test_an_abstract_target_of_other_sizes_gets_a_mesh_of_these(tmp_path, checkpointer, mesh):
    """Names and types are the target's, and so are the sizes; a smaller mesh takes the first devices."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    small = AbstractMesh((2, 2), ("d", "m"), axis_types=(AUTO, EXPLICIT))
    restored = checkpointer.restore(path, {"w": abstract_leaf(small, P("m", "d"))})["w"]
    expected = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AUTO, EXPLICIT), devices=jax.devices()[:4])
    assert restored.sharding == NamedSharding(expected, P("m", "d"), memory_kind="device")


def test_an_abstract_target_larger_than_the_machine_is_refused(tmp_path, checkpointer, mesh):
    """One error, before anything is read."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    large = AbstractMesh((4, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    with pytest.raises(oxe.MeshMismatchError, match=r"cannot resolve the target's mesh \(d=4 explicit, m=4 explicit\)"):
        checkpointer.restore(path, {"w": abstract_leaf(large, P("d"))})


def test_an_abstract_target_that_the_context_mesh_contradicts_is_refused(tmp_path, checkpointer, mesh):
    """Never a silent pick of one of them: the error shows both."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    target = {"w": abstract_leaf(mesh.abstract_mesh, P("d"))}
    auto = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AUTO, AUTO))
    with jax.set_mesh(auto):
        with pytest.raises(oxe.MeshMismatchError) as error:
            checkpointer.restore(path, target)
        restored = checkpointer.restore(path, target, mesh=mesh)["w"]
    assert "(d=2 explicit, m=4 explicit)" in str(error.value)
    assert "(d=2 auto, m=4 auto)" in str(error.value)
    assert restored.sharding == NamedSharding(mesh, P("d"), memory_kind="device")


def test_a_given_mesh_takes_the_recorded_specs(tmp_path, checkpointer, mesh):
    """Its sizes and axis types win: the caller said so."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    other = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AUTO, EXPLICIT))
    restored = checkpointer.restore(path, mesh=other)["w"]
    assert restored.sharding == NamedSharding(other, P("d", "m"), memory_kind="device")
    assert_same_values(restored, matrix())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"policy": "auto"}, "policy must be a RestorePolicy, not 'auto'", id="a policy that is none"),
        pytest.param(
            {"mesh": AbstractMesh((8,), ("d",), axis_types=(AUTO,))}, "resolve_mesh makes one", id="an abstract mesh"
        ),
    ],
)
def test_arguments_of_another_type_are_refused_at_once(tmp_path, checkpointer, mesh, options, says):
    """By what they should be, also where a handler or a registration is made with one."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d"))})
    with pytest.raises(TypeError, match=says):
        checkpointer.restore(path, **options)
    if "policy" in options:
        for make in (oxe.ExplicitCheckpointHandler, oxe.handler_registry, oxe.register):
            with pytest.raises(TypeError, match=says):
                make(**options)


def test_the_context_mesh_takes_the_recorded_specs_at_any_size(tmp_path, checkpointer, mesh):
    """Where it has the recorded axis names and types."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    other = jax.make_mesh((4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    with jax.set_mesh(other):
        restored = checkpointer.restore(path)["w"]
    assert restored.sharding == NamedSharding(other, P("d", "m"), memory_kind="device")


@pytest.mark.parametrize(
    ("names", "types"),
    [(("d", "m"), (AUTO, AUTO)), (("x", "y"), (EXPLICIT, EXPLICIT))],
    ids=["that types the axes otherwise", "that lacks the axes"],
)
def test_a_context_mesh_is_refused(tmp_path, checkpointer, mesh, names, types):
    """The error shows both meshes and says what to pass."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    with (
        jax.set_mesh(jax.make_mesh((2, 4), names, axis_types=types)),
        pytest.raises(oxe.MeshMismatchError, match="pass mesh= to place the recorded specs") as error,
    ):
        checkpointer.restore(path)
    assert "(d=2 explicit, m=4 explicit)" in str(error.value)


def test_a_policy_retypes_the_recorded_axes(tmp_path, checkpointer, mesh):
    """The same devices and specs, other axis types."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d", "m"))})
    restored = checkpointer.restore(path, policy=oxe.RestorePolicy(axis_types={"m": AUTO}))["w"]
    assert restored.sharding.mesh.axis_types == (EXPLICIT, AUTO)
    assert restored.sharding.spec == P("d", "m")


# Keys.


def test_keys_come_back_with_their_implementation_and_sharding(tmp_path, checkpointer, mesh):
    """Without a target, with one that has no sharding, and with one from `eval_shape`."""
    keys = jax.jit(lambda: jax.random.split(jax.random.key(0), 8), out_shardings=NamedSharding(mesh, P("d")))()
    path = saved(checkpointer, tmp_path, {"keys": keys})
    bare = {"keys": jax.ShapeDtypeStruct((8,), keys.dtype)}
    shaped = {"keys": jax.eval_shape(lambda k: k, keys)}
    for target in (None, bare, shaped):
        restored = checkpointer.restore(path, target)["keys"]
        assert restored.dtype == keys.dtype
        assert restored.sharding == keys.sharding
        assert jax.random.key_impl(restored) == "threefry2x32"
        assert_same_values(restored, keys)


def test_keys_come_back_into_what_orbax_describes_them_as(tmp_path, checkpointer, mesh):
    """`ocp.utils.to_shape_dtype_struct` gives the shape and the dtype of their data."""
    keys = jax.random.split(jax.random.key(7), 8)
    state = {"rng": jax.device_put(keys, NamedSharding(mesh, P("d"))), "w": place(mesh, matrix(), P("d", "m"))}
    path = saved(checkpointer, tmp_path, state)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    assert target["rng"].dtype == np.uint32
    assert_same_tree(checkpointer.restore(path, target), state)


def test_keys_of_another_implementation_are_refused(tmp_path, checkpointer):
    """Key data of one implementation are no keys of another."""
    path = saved(checkpointer, tmp_path, {"key": jax.random.key(0)})
    other = {"key": jax.ShapeDtypeStruct((), jax.random.key(0, impl="rbg").dtype)}
    with pytest.raises(oxe.RestoreRefusedError, match="cannot restore key<threefry2x32> as key<rbg>"):
        checkpointer.restore(path, other)
    with pytest.raises(oxe.RestoreRefusedError, match="cannot restore key<threefry2x32> as uint32"):
        checkpointer.restore(path, {"key": jax.ShapeDtypeStruct((), jnp.uint32)})


# One device and none.


def test_an_uncommitted_scalar_stays_free(tmp_path, checkpointer, mesh):
    """`jit` takes it together with arrays on a mesh, as before it was saved; so it does optax's count.

    Also where the target was made of the state, abstract or not: its scalar names the default device.
    """
    params = {"w": place(mesh, matrix(), P("d", "m"))}
    optimizer = optax.adam(0.1)
    state = {"params": params, "step": jnp.int32(5), "opt": optimizer.init(params)}
    path = saved(checkpointer, tmp_path, state)
    for target in (None, state, jax.tree.map(ocp.utils.to_shape_dtype_struct, state)):
        restored = checkpointer.restore(path, target)
        assert_same_tree(restored, state)
        product = jax.jit(lambda w, s: w * s)(restored["params"]["w"], restored["step"])
        np.testing.assert_array_equal(np.asarray(product), matrix() * 5)
        updates, _ = jax.jit(optimizer.update)(restored["params"], restored["opt"])
        assert updates["w"].sharding.spec == P("d", "m")


def test_a_committed_scalar_in_a_target_is_committed(tmp_path, checkpointer, mesh):
    """A real array says that it is, and on which device."""
    path = saved(checkpointer, tmp_path, {"step": jnp.int32(5)})
    for device in (jax.devices()[0], jax.devices()[3]):
        restored = checkpointer.restore(path, {"step": jax.device_put(jnp.int32(0), device)})["step"]
        assert restored.committed
        assert restored.devices() == {device}
    abstract_scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(jax.devices()[3]))
    assert checkpointer.restore(path, {"step": abstract_scalar})["step"].devices() == {jax.devices()[3]}


def save_on_eight(path: str) -> None:
    """Run on 8 devices."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5)})


def restore_on_a_given_mesh(path: str, sizes: tuple[int, int]) -> str:
    """Run on another number of devices: where the array is, once it is known to be right."""
    mesh = jax.make_mesh(sizes, ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    with oxe.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, mesh=mesh)
    assert_same_values(restored["w"], matrix())
    assert not restored["step"].committed
    assert restored["w"].sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")
    return str(dict(restored["w"].sharding.mesh.shape))


@pytest.mark.parametrize(("devices", "sizes"), [(1, (1, 1)), (4, (2, 2)), (16, (4, 4))])
def test_a_given_mesh_takes_the_recorded_specs_on_another_number_of_devices(tmp_path, devices, sizes):
    """What the refusal of a mesh that does not fit advises."""
    run_on_devices(save_on_eight, str(tmp_path / "a"), devices=8)
    (shape,) = run_on_devices(restore_on_a_given_mesh, str(tmp_path / "a"), sizes, devices=devices)
    assert shape == str(dict(zip("dm", sizes, strict=True)))


def test_a_record_that_is_not_of_these_arrays_is_an_error(tmp_path, checkpointer, mesh):
    """Two saves mixed up: what is stored is compared with what is recorded, in shape and dtype."""
    paths = {}
    for name, array in (("a", matrix()), ("b", matrix(4)), ("c", matrix(dtype=np.int32))):
        checkpointer.save(tmp_path / name, {"w": place(mesh, array, P("m"))})
        paths[name] = tmp_path / name
    checkpointer.wait_until_finished()
    for other in ("b", "c"):
        shutil.copy(paths[other] / FILE_NAME, paths["a"] / FILE_NAME)
        with pytest.raises(ValueError, match=r"are not of one save|is not compatible"):
            checkpointer.restore(paths["a"])


def test_an_uncommitted_scalar_stays_free_under_set_mesh(tmp_path, checkpointer, mesh):
    """Where `jnp.asarray` would commit it to the mesh."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5), "key": jax.random.key(1)}
    path = saved(checkpointer, tmp_path, state)
    with jax.set_mesh(mesh):
        assert_same_tree(checkpointer.restore(path), state)


def test_an_array_committed_to_one_device_comes_back_on_it(tmp_path, checkpointer):
    """Not on the default device."""
    array = jax.device_put(matrix(), jax.devices()[3])
    restored = checkpointer.restore(saved(checkpointer, tmp_path, {"w": array}))["w"]
    assert restored.committed
    assert restored.sharding == SingleDeviceSharding(jax.devices()[3], memory_kind="device")


# Targets that do not fit.


def test_everything_that_does_not_fit_a_target_is_listed_at_once(tmp_path, checkpointer, mesh):
    """Missing and extra leaves, shapes and dtypes, each by leaf name, in one error, before anything is read."""
    path = saved(
        checkpointer,
        tmp_path,
        {name: place(mesh, matrix(), P("d")) for name in ("a", "b", "c", "only_saved")},
    )
    target = {
        "a": jax.ShapeDtypeStruct((8, 4), jnp.float32),
        "b": jax.ShapeDtypeStruct((8, 8), jnp.int32),
        "c": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "only_wanted": jax.ShapeDtypeStruct((8, 8), jnp.float32),
    }
    with pytest.raises(oxe.RestoreRefusedError) as error:
        checkpointer.restore(path, target)
    found = {problem.could_not: problem.affects for problem in error.value.problems}
    assert found == {
        "cannot restore into a target that lacks saved leaves": ("only_saved",),
        "cannot restore leaves of the target that the checkpoint lacks": ("only_wanted",),
        "cannot restore shape (8, 8) into shape (8, 4)": ("a",),
        "cannot cast float32 to int32 with cast='same_kind'": ("b",),
    }


def test_a_python_int_comes_back_in_the_dtype_of_an_abstract_target(tmp_path, checkpointer):
    """As a Flax `TrainState` has one, and `jax.eval_shape` says int32; one that does not fit is an error, by name."""
    path = saved(checkpointer, tmp_path, {"step": 7, "large": 2**40})
    target = {"step": jax.ShapeDtypeStruct((), jnp.int32), "large": 0}
    restored = checkpointer.restore(path, target)
    assert (restored["step"].dtype, int(restored["step"]), restored["large"]) == (np.int32, 7, 2**40)
    target["large"] = jax.ShapeDtypeStruct((), jnp.int32)
    with pytest.raises(oxe.RestoreRefusedError, match=f"cannot hold {2**40} in int32") as error:
        checkpointer.restore(path, target)
    assert error.value.problems[0].affects == ("large",)
    unsafe = checkpointer.restore(path, target, policy=oxe.RestorePolicy(cast="unsafe"))
    assert (unsafe["step"], unsafe["large"]) == (7, 0)


def test_a_policy_or_a_mesh_in_the_place_of_the_target_is_an_error(tmp_path, checkpointer, mesh):
    """It says what to write."""
    path = saved(checkpointer, tmp_path, {"n": 1})
    with pytest.raises(TypeError, match="the target is a RestorePolicy: pass it as policy="):
        checkpointer.restore(path, oxe.RestorePolicy())
    with pytest.raises(TypeError, match="the target is a Mesh: pass it as mesh="):
        oxe.plan_restore(path, mesh)


def test_a_relative_path_is_refused_before_anything_is_saved(checkpointer):
    """Orbax would say so in the background."""
    with pytest.raises(ValueError, match="the path must be absolute, as in Orbax, not 'a/b'"):
        checkpointer.save("a/b", {"n": 1})


def test_a_float_target_casts(tmp_path, checkpointer, mesh):
    """float32 saved, bfloat16 asked for."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d"))})
    restored = checkpointer.restore(path, {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)})["w"]
    assert restored.dtype == jnp.bfloat16
    assert_same_values(restored, matrix(dtype=jnp.bfloat16))


def test_a_host_target_gives_a_host_value(tmp_path, checkpointer, mesh):
    """A `numpy.ndarray` in the target asks for one; so does a Python number."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5)}
    restored = checkpointer.restore(
        saved(checkpointer, tmp_path, state), {"w": np.zeros((8, 8), np.float32), "step": 0}
    )
    assert type(restored["w"]) is np.ndarray
    assert type(restored["step"]) is int
    assert restored["step"] == 5
    assert_same_values(restored["w"], matrix())


def test_a_target_without_strictness_truncates_as_in_stock_orbax(tmp_path, checkpointer, mesh):
    """`strict=False` is stock's: what does not fit is cut."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d"))})
    target = {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("d")))}
    restored = checkpointer.restore(path, target, strict=False)["w"]
    assert_same_values(restored, matrix()[:4])


def test_stocks_metadata_serve_as_a_target(tmp_path, checkpointer, mesh):
    """What `metadata` gives can be handed back to `restore`, as in stock Orbax."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "keys": jax.random.split(jax.random.key(0), 2), "n": 3}
    path = saved(checkpointer, tmp_path, state)
    metadata = checkpointer.metadata(path).item_metadata
    assert_same_tree(checkpointer.restore(path, metadata.tree), state)


# Saving.


def test_a_value_that_is_donated_after_save_returned_does_not_reach_the_checkpoint(tmp_path, checkpointer, mesh):
    """Values are taken before `save` returns; those of NumPy arrays too."""
    host = np.zeros(1000)
    state = {"w": place(mesh, matrix(), P("d", "m")), "n": host, "empty": place(mesh, np.zeros((0, 2)), P())}
    path = tmp_path / "checkpoint"
    checkpointer.save(path, state)
    doubled = jax.jit(lambda w: w * 2, donate_argnums=0)(state["w"])
    host[:] = 1
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(path)
    assert_same_values(restored["w"], matrix())
    assert_same_values(restored["n"], np.zeros(1000))
    assert_same_values(doubled, matrix() * 2)


def save_and_train(path: pathlib.Path, step: Any, state: Any, way: str, saves: int) -> dict[int, int]:
    """Saves after each step, and drops what is older than two saves; resident bytes after the saves 10, 20, ..."""
    resident = {}
    if way == "manager":
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        writer: Any = ocp.CheckpointManager(path, item_handlers=oxe.ExplicitCheckpointHandler(), options=options)
    else:
        writer = oxe.StandardCheckpointer()
    with writer:
        for i in range(1, saves + 1):
            state = step(state)
            if way == "manager":
                writer.save(i, args=oxe.args.ExplicitSave(state))
            else:
                writer.save(path / str(i), state)
                shutil.rmtree(path / str(i - 2), ignore_errors=True)
            if i % 10 == 0:
                writer.wait_until_finished()
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # What the allocator keeps back varies by some states.
                pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
                resident[i] = int(pages) * resource.getpagesize()
    return resident


def measure_saves(path: pathlib.Path) -> dict[str, tuple[int, dict[int, int]]]:
    """For each way to save: the bytes of the state, and the memory that 50 saves took as they went on."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    values = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    state = {
        "sharded": [place(mesh, values, P("d", "m")) for _ in range(3)],
        "replicated": place(mesh, values[:64], P()),
        "host": {"array": values[:128].copy(), "text": "text"},
    }

    def step(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf if isinstance(leaf, str) else leaf + 1, state)

    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if not isinstance(leaf, str))
    return {way: (nbytes, save_and_train(path / way, step, state, way, 50)) for way in ("checkpointer", "manager")}


def test_saves_in_a_loop_take_no_more_memory_as_they_go_on(tmp_path):
    """Of 40 saves not even two states stay: what was saved, and what was written, is let go."""
    (measured,) = run_on_devices(measure_saves, tmp_path, devices=8)
    assert measured.keys() == {"checkpointer", "manager"}
    for way, (nbytes, resident) in measured.items():
        assert nbytes > 6 << 20
        assert resident[50] - resident[10] < 2 * nbytes, (way, nbytes, resident)


def test_leaves_are_cast_while_they_are_saved(tmp_path, checkpointer, mesh):
    """The record says what is stored."""
    state = {"w": place(mesh, matrix(), P("d", "m"))}
    save_args = {"w": ocp.SaveArgs(dtype=jnp.bfloat16)}
    path = saved(checkpointer, tmp_path, state, save_args=save_args)
    restored = checkpointer.restore(path)["w"]
    assert restored.dtype == jnp.bfloat16
    assert restored.sharding == state["w"].sharding


def test_a_checkpoint_is_replaced_by_force(tmp_path, checkpointer, mesh):
    """As in stock Orbax, and not without."""
    path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d"))})
    with pytest.raises(ValueError, match="already exists"):
        checkpointer.save(path, {"w": place(mesh, matrix(), P("m"))})
    checkpointer.save(path, {"w": place(mesh, -matrix(), P("m"))}, force=True)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(path)["w"]
    assert restored.sharding.spec == P("m")
    assert_same_values(restored, -matrix())


def test_a_refused_save_leaves_nothing_that_stops_the_next_one(tmp_path, checkpointer, mesh):
    """Neither a checkpoint, nor a half of one under the same name."""
    path = tmp_path / "checkpoint"
    x = place(mesh, matrix(), P("d"))
    for _ in range(2):
        with pytest.raises(oxe.SaveRefusedError, match="under one name"):
            checkpointer.save(path, {"a.b": x, "a": {"b": 2 * x}})
        assert not path.exists()
    checkpointer.save(path, {"a": {"b": x}})
    checkpointer.wait_until_finished()
    assert_same_values(checkpointer.restore(path)["a"]["b"], matrix())


PRODUCT = matrix() @ matrix()


def test_a_pending_sum_is_refused_by_leaf_name_before_anything_is_written(tmp_path, checkpointer, mesh):
    """The error says what to do; and the directory is free for the next save."""
    state = {"layer": {"grad": pending_sum(mesh)}, "w": place(mesh, matrix(), P("d"))}
    with pytest.raises(oxe.SaveRefusedError, match=r"pending reduction.*unreduced=\{'m'\}") as refusal:
        checkpointer.save(tmp_path / "checkpoint", state)
    (problem,) = refusal.value.problems
    assert problem.affects == ("layer/grad",)
    assert "unreduced='reduce'" in problem.fix
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} <= {"_CHECKPOINT_METADATA"}
    assert_same_values(checkpointer.restore(saved(checkpointer, tmp_path, {"w": state["w"]}))["w"], state["w"])


@pytest.mark.parametrize("force", [False, True], ids=["to a new path", "in place of what is there"])
def test_a_pending_sum_is_made_before_it_is_saved(tmp_path, checkpointer, mesh, force):
    """On request. What is saved has the spec without the pending reduction; what was passed stays as it was."""
    pending = pending_sum(mesh)
    if force:
        saved(checkpointer, tmp_path, {"old": 1})
    path = saved(checkpointer, tmp_path, {"grad": pending, "n": 1}, unreduced="reduce", force=force)
    assert pending.sharding.spec == P("d", None, unreduced={"m"})
    restored = checkpointer.restore(path)
    assert restored["grad"].sharding == NamedSharding(mesh, P("d", None), memory_kind="device")
    assert_same_values(restored["grad"], place(mesh, PRODUCT, P("d", None)))
    assert restored["n"] == 1


def test_a_manager_makes_pending_sums_on_request(tmp_path, mesh):
    """By its own arguments; a misspelt choice is refused at once."""
    with ocp.CheckpointManager(tmp_path, item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        manager.save(0, args=oxe.args.ExplicitSave({"grad": pending_sum(mesh)}, unreduced="reduce"))
        assert_same_values(manager.restore(0)["grad"], place(mesh, PRODUCT, P("d", None)))
    with pytest.raises(ValueError, match=r"unreduced must be one of \['error', 'reduce'\], not 'sum'"):
        oxe.args.ExplicitSave({}, unreduced="sum")


@pytest.mark.parametrize(
    ("state", "could_not"),
    [
        pytest.param({"/abs": 0}, "in a directory of the name '/abs'", id="that leads out of the checkpoint"),
        pytest.param({"..": 0}, "in a directory of the name '..'", id="of the directory above"),
        pytest.param({"a//b": 0}, "in a directory of the name 'a//b'", id="with an empty part"),
        pytest.param({"": 0}, "in a directory of the name ''", id="that is empty"),
        pytest.param({"a": 0, "a/0": 0}, "'a/0' lies in 'a'", id="within another array"),
    ],
)
def test_without_ocdbt_a_name_is_refused(tmp_path, mesh, state, could_not):
    """Before anything is written: there is a directory for each array, and it must be one of the checkpoint's own."""
    arrays = {name: place(mesh, matrix(), P("d")) for name in state}
    with (
        oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer,
        pytest.raises(oxe.SaveRefusedError, match=re.escape(could_not)),
    ):
        checkpointer.save(tmp_path / "a", arrays)
    with oxe.StandardCheckpointer() as checkpointer:
        path = saved(checkpointer, tmp_path, arrays)
        assert_same_tree(checkpointer.restore(path), arrays)


def test_constructor_takes_a_handler_or_its_arguments(tmp_path, mesh):
    """Not both: one of them would be ignored."""
    handler = oxe.ExplicitCheckpointHandler(policy=oxe.RestorePolicy(axis_types="auto"))
    with oxe.StandardCheckpointer(handler=handler) as checkpointer:
        path = saved(checkpointer, tmp_path, {"w": place(mesh, matrix(), P("d"))})
        assert checkpointer.restore(path)["w"].sharding.mesh.axis_types == (AUTO, AUTO)
    with pytest.raises(ValueError, match=r"pass \['use_ocdbt'\] to the handler"):
        oxe.StandardCheckpointer(handler=handler, use_ocdbt=False)


def test_constructor_takes_every_argument_of_stocks():
    """A drop-in: nothing that code says to `ocp.StandardCheckpointer` is unknown."""
    import inspect

    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    stock, ours = ocp.StandardCheckpointer, oxe.StandardCheckpointer
    assert names(stock.__init__) - names(ours.__init__) == set()
    assert names(stock.save) - names(ours.save) == set()
    assert names(stock.restore) - names(ours.restore) == set()
    handler = names(ocp.StandardCheckpointHandler.__init__) - {"self"}
    assert handler - names(oxe.ExplicitCheckpointHandler.__init__) == {"pytree_metadata_options"}
