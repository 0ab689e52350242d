"""What was broken once: ways in which a save or a restore lost something, each with the rule that it broke."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nodes import Keyed
from trees import assert_same_tree, matrix, place

import orbax_explicit as oxe
from orbax_explicit._sidecar import FILE_NAME


@pytest.fixture
def checkpointer():
    """A checkpointer that is closed after the test."""
    with oxe.StandardCheckpointer() as checkpointer:
        yield checkpointer


def saved(checkpointer: oxe.StandardCheckpointer, path: Any, state: Any, **kwargs: Any) -> Any:
    """The path of a finished checkpoint."""
    checkpointer.save(path, state, **kwargs)
    checkpointer.wait_until_finished()
    return path


def test_a_refused_save_by_force_leaves_what_is_there(tmp_path, checkpointer, mesh):
    """Orbax removes the old checkpoint first; the refusal comes before."""
    state = {"w": place(mesh, matrix(), P("d"))}
    path = saved(checkpointer, tmp_path / "a", state)
    with pytest.raises(oxe.SaveRefusedError, match="cannot save a leaf of type"):
        checkpointer.save(path, {"w": state["w"], "odd": object()}, force=True)
    assert_same_tree(checkpointer.restore(path), state)


@pytest.mark.parametrize(
    "names", [pytest.param(("a", "a/"), id="a name with a slash behind it"), pytest.param(("", "/"), id="no name")]
)
def test_names_that_storage_does_not_tell_apart_are_refused(tmp_path, checkpointer, names):
    """TensorStore sets a slash behind a name that has none."""
    with pytest.raises(oxe.SaveRefusedError, match="cannot save leaves under one name"):
        checkpointer.save(tmp_path / "a", {name: np.ones(2) for name in names})


def test_keys_of_one_node_that_read_alike_are_refused(tmp_path, checkpointer):
    """Orbax knows keys by their text: of two subtrees one would never be written."""
    node = Keyed((jax.tree_util.DictKey("k"), {"x": 1}), (jax.tree_util.GetAttrKey("k"), {"y": 2}))
    with pytest.raises(oxe.SaveRefusedError, match="that gives two children one key"):
        checkpointer.save(tmp_path / "a", {"node": node})


def test_numbers_of_64_bits_are_not_cut_where_jax_holds_32(tmp_path, checkpointer, mesh):
    """Refused in the plan, by leaf name; neither wrapped, nor called damaged. On the host they come back."""
    with jax.enable_x64(True):
        path = saved(checkpointer, tmp_path / "a", {"step": jnp.array(2**40 + 7, jnp.int64), "n": 2**40 + 7})
        assert checkpointer.restore(path)["step"] == 2**40 + 7
    with pytest.raises(oxe.RestoreRefusedError, match=r"cannot hold int64 in a jax\.Array") as error:
        checkpointer.restore(path)
    assert error.value.problems[0].affects == ("step",)
    assert checkpointer.restore(path, {"step": np.int64(0), "n": 0}) == {"step": 2**40 + 7, "n": 2**40 + 7}
    on_mesh = jax.ShapeDtypeStruct((), np.int64, sharding=NamedSharding(mesh, P()))
    with pytest.raises(oxe.RestoreRefusedError, match=r"cannot hold int64 in a jax\.Array"):
        checkpointer.restore(path, {"step": np.int64(0), "n": on_mesh})


@pytest.mark.parametrize(
    ("save_args", "says"),
    [
        pytest.param({"v": ocp.SaveArgs()}, "save_args that belong to no leaf", id="for a leaf that is not there"),
        pytest.param(ocp.SaveArgs(), "the whole tree", id="for the tree as a whole"),
        pytest.param({"w": "bf16"}, "save_args that are no ocp.SaveArgs", id="of another type"),
        pytest.param({"w": ocp.SaveArgs(dtype="nope")}, "cannot store dtype 'nope'", id="with a dtype that is none"),
    ],
)
def test_save_arguments_that_cannot_be_followed_are_refused(tmp_path, checkpointer, save_args, says):
    """They would change nothing, silently."""
    with pytest.raises(oxe.SaveRefusedError, match=says):
        checkpointer.save(tmp_path / "a", {"w": np.ones(2, np.float32)}, save_args=save_args)


def test_an_unfinished_item_is_no_checkpoint_by_the_path_of_its_parent(tmp_path, checkpointer):
    """Nor is an item of an unfinished step."""
    path = saved(checkpointer, tmp_path / "root" / "a", {"n": np.arange(3)})
    unfinished = path.rename(path.parent / "a.orbax-checkpoint-tmp")
    for read in (oxe.read_manifest, oxe.plan_restore):
        with pytest.raises(oxe.CheckpointLayoutError, match="cannot find a checkpoint"):
            read(unfinished.parent)
        with pytest.raises(oxe.CheckpointLayoutError, match="was not finished"):
            read(unfinished)
    step = unfinished.parent.rename(tmp_path / "7.orbax-checkpoint-tmp")
    (step / unfinished.name).rename(step / "default")
    with pytest.raises(oxe.CheckpointLayoutError, match="was not finished"):
        oxe.read_manifest(step / "default")


def test_a_record_that_is_gone_is_missed(tmp_path, checkpointer, mesh):
    """Without it the checkpoint looks like a stock one, and would come back without all that stock does not keep."""
    path = saved(checkpointer, tmp_path / "a", {"w": place(mesh, matrix(), P("d")), "step": jnp.int32(1)})
    (path / FILE_NAME).unlink()
    with pytest.raises(oxe.FormatError, match="which was written with this checkpoint"):
        checkpointer.restore(path)
    with ocp.StandardCheckpointer() as stock:
        np.testing.assert_array_equal(np.asarray(stock.restore(path)["w"]), matrix())


def test_a_host_array_that_is_not_what_was_recorded_is_an_error(tmp_path):
    """Here: one character of its Zarr metadata, in a checkpoint without digests."""
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        path = saved(checkpointer, tmp_path / "a", {"n": np.arange(5)})
        file = path / "n" / ".zarray"
        file.write_text(file.read_text().replace('"shape":[5]', '"shape":[4]'))
        with pytest.raises(oxe.FormatError, match="cannot read n: its Zarr metadata are not what was written"):
            checkpointer.restore(path)
        (path / "explicit_digests.msgpack").unlink()
        with pytest.raises(oxe.FormatError, match="are not of one save"):
            checkpointer.restore(path)


def test_keys_come_back_without_strictness(tmp_path, checkpointer):
    """`strict=False` speaks of the stored shape, which of keys is that of their data."""
    state = {"keys": jax.random.split(jax.random.key(1), 4)}
    path = saved(checkpointer, tmp_path / "a", state)
    assert_same_tree(checkpointer.restore(path, state, strict=False), state)


@pytest.mark.parametrize(
    "name", ["a\\b", "_METADATA", "_sharding", "explicit_sharding.msgpack"], ids=lambda name: f"named {name}"
)
def test_without_ocdbt_a_name_of_orbax_own_is_refused(tmp_path, name):
    """Such a directory would be in the place of a file."""
    with (
        oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer,
        pytest.raises(oxe.SaveRefusedError, match="in a directory of the name"),
    ):
        checkpointer.save(tmp_path / "a", {name: np.ones(2)})


def test_a_scalar_of_any_storable_dtype_is_kept(tmp_path, checkpointer):
    """Those of ml_dtypes are no numbers to Orbax."""
    from orbax_explicit._leaf_capture import STORABLE_DTYPES

    state = {name: np.dtype(getattr(jnp, name, name)).type(1) for name in sorted(STORABLE_DTYPES)}
    assert_same_tree(checkpointer.restore(saved(checkpointer, tmp_path / "a", state)), state)


def test_a_target_of_another_type_is_refused(tmp_path, checkpointer):
    """It asks for nothing that could be known; it is listed with whatever else is wrong."""
    path = saved(checkpointer, tmp_path / "a", {"n": np.ones(2), "m": np.ones(3)})
    with pytest.raises(oxe.RestoreRefusedError) as refusal:
        checkpointer.restore(path, {"n": object(), "m": np.ones(4)})
    assert {problem.could_not: problem.affects for problem in refusal.value.problems} == {
        "cannot restore into a leaf of type builtins.object": ("n",),
        "cannot restore shape (3,) into shape (4,)": ("m",),
    }


def test_a_concrete_target_that_does_not_divide_is_refused_in_the_plan(tmp_path, checkpointer, mesh):
    """Not by JAX, half-way through the reading."""
    path = saved(checkpointer, tmp_path / "a", {"w": place(mesh, matrix(6), P("d"))})
    target = {"w": jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=NamedSharding(mesh, P("m")))}
    with pytest.raises(oxe.RestoreRefusedError, match=r"cannot split a dimension of length 6 over m=4"):
        checkpointer.restore(path, target)


@pytest.mark.parametrize(
    ("value", "target"),
    [
        pytest.param(1 + 2j, np.zeros((), np.complex64), id="a complex number"),
        pytest.param(jnp.bfloat16.dtype.type(1.5), np.zeros((), np.float32), id="a scalar of ml_dtypes"),
        pytest.param(np.float32(1.5), np.float64(0), id="a NumPy scalar"),
        pytest.param(2.5, np.zeros((), np.float32), id="a float"),
        pytest.param(3, np.zeros((), np.int64), id="an int into its own dtype"),
    ],
)
def test_a_host_scalar_is_cast_to_what_its_target_asks_for(tmp_path, checkpointer, value, target):
    """Not called damaged for it, however Orbax keeps it."""
    path = saved(checkpointer, tmp_path / "a", {"n": value})
    restored = checkpointer.restore(path, {"n": target})["n"]
    assert type(restored) is type(target)
    assert restored.dtype == target.dtype
    assert restored == value
