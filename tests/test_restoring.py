"""`_restoring`: the one road from a path to a plan, and from the plan to what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trees import matrix, place, training_state

import orbax_explicit as oxe
from orbax_explicit import _restoring
from orbax_explicit.testing import fake_inventory


@pytest.fixture
def path(tmp_path, mesh):
    """A checkpoint of a sharded matrix and a free scalar, on (d=2, m=4)."""
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(5)})
    return tmp_path / "checkpoint"


def test_a_plan_for_devices_that_are_not_here_starts_no_backend(path):
    """On a laptop, or while the accelerators are in use; of shapes and meshes alone, as on the devices themselves."""
    script = f"""
import orbax_explicit as oxe
from orbax_explicit.testing import fake_inventory
plan = oxe.plan_restore({str(path)!r}, devices=fake_inventory(2, processes=8, platform="tpu"))
print(plan.meshes[0].mesh, plan.present, plan.bytes_per_device[2048])
"""
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert ran.stdout == "(d=4 explicit, m=4 explicit) 16 tpu devices, 8 processes 20\n", ran.stderr


def test_a_plan_for_an_inventory_is_that_for_its_devices(path):
    """The same devices, named in two ways."""
    assert oxe.plan_restore(path, devices=fake_inventory(8)) == oxe.plan_restore(path)


def test_a_plan_for_other_devices_takes_no_notice_of_the_context_mesh(path, mesh):
    """Which is on devices that are here."""
    with jax.set_mesh(mesh):
        assert oxe.plan_restore(path, devices=fake_inventory(4)).meshes[0].mesh.axis_sizes == (1, 4)
        assert oxe.plan_restore(path).meshes[0].source == "context"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="without a target"),
        pytest.param({"policy": oxe.RestorePolicy(axis_types="auto", rename_leaves={"v": "w"})}, id="by a policy"),
        pytest.param(
            {"target": {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), "step": np.int32(0)}}, id="into a target"
        ),
    ],
)
def test_what_is_executed_is_the_plan_that_is_printed(path, arguments):
    """`restore` binds a plan that equals what `plan_restore` gives for the same arguments."""
    with (
        oxe.StandardCheckpointer() as checkpointer,
        mock.patch.object(_restoring, "bind_plan", wraps=_restoring.bind_plan) as bind,
    ):
        checkpointer.restore(path, **arguments)
    (executed,) = (call.args[0] for call in bind.call_args_list)
    assert executed == oxe.plan_restore(path, **arguments)
    assert str(executed) == str(oxe.plan_restore(path, **arguments))


def test_a_saved_leaf_is_read_into_two_leaves_of_a_target(path, mesh):
    """Each laid out, and cast, as it asks for itself."""
    target = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "average": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("m"))),
        "step": jnp.int32(0),
    }
    with oxe.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, target, policy=oxe.RestorePolicy(rename_leaves={"average": "w"}))
    assert restored["w"].sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")
    assert restored["average"].sharding == NamedSharding(mesh, P("m"))
    np.testing.assert_array_equal(restored["w"], matrix(), strict=True)
    np.testing.assert_array_equal(restored["average"], matrix(dtype=jnp.bfloat16), strict=True)


def test_a_training_state_comes_back_as_numpy_without_an_array_on_a_device(tmp_path, mesh):
    """Containers as they were; arrays with their dtypes, PRNG keys as their data, values on the host as they are."""
    state = training_state(mesh)
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        before = {id(array) for array in jax.live_arrays()}
        restored = checkpointer.restore(tmp_path / "a", policy=oxe.RestorePolicy(arrays="numpy"))
        assert {id(array) for array in jax.live_arrays()} <= before
    assert jax.tree.structure(restored) == jax.tree.structure(state)

    def check(keypath, back, saved):
        name = jax.tree_util.keystr(keypath)
        if not isinstance(saved, jax.Array):
            assert type(back) is type(saved), name
        else:
            assert type(back) is np.ndarray, name
            saved = jax.random.key_data(saved) if jnp.issubdtype(saved.dtype, jax.dtypes.prng_key) else saved
        np.testing.assert_array_equal(np.asarray(back), np.asarray(saved), name, strict=True)

    jax.tree_util.tree_map_with_path(check, restored, state)
