"""The file next to the arrays: where it is looked for, what it holds, and what damage to it comes to."""

from __future__ import annotations

import importlib.metadata
import shutil

import jax
import pytest
from jax.sharding import PartitionSpec as P
from trees import matrix, path, place, training_state

import orbax_explicit as oxe
from orbax_explicit._records import ArrayRecord, MeshRecord, NamedShardingRecord, SpecRecord
from orbax_explicit._sidecar import FILE_NAME


@pytest.fixture
def checkpoint(tmp_path, mesh):
    """The path of a checkpoint of one array."""
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
    return tmp_path / "a"


def test_a_manifest_says_what_was_saved(checkpoint):
    """The array, its mesh, the devices and the software."""
    manifest = oxe.read_manifest(checkpoint)
    mesh = MeshRecord(
        axis_names=("d", "m"),
        axis_sizes=(2, 4),
        axis_types=("explicit", "explicit"),
        device_ids=tuple(range(8)),
        platform="cpu",
    )
    sharding = NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=("d", "m")), memory_kind="device")
    assert manifest.leaves == {path("w"): ArrayRecord(shape=(8, 8), dtype="float32", sharding=sharding)}
    assert manifest.meshes == (mesh,)
    assert manifest.inventory is not None
    assert manifest.inventory.device_ids == tuple(range(8))
    assert manifest.inventory.process_count == 1
    assert dict(manifest.writer) == {
        name: importlib.metadata.version(name) for name in ("orbax-explicit", "jax", "orbax-checkpoint")
    }


def test_leaves_are_listed_in_the_order_of_jax(tmp_path, mesh):
    """By the same paths."""
    state = training_state(mesh)
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(keypath, simple=True, separator="/") for keypath, _ in flat]
    leaves = oxe.read_manifest(tmp_path / "a").leaves
    assert ["/".join(str(key.name) for key in leaf) for leaf in leaves] == names


def test_an_unfinished_save_is_never_taken_for_a_checkpoint(checkpoint):
    """Orbax's temporary directory is refused by its name."""
    unfinished = checkpoint.rename(f"{checkpoint}.orbax-checkpoint-tmp-0")
    with pytest.raises(oxe.CheckpointLayoutError, match="its save was not finished"):
        oxe.read_manifest(unfinished)


def test_paths_without_a_checkpoint_are_named(tmp_path, checkpoint):
    """A missing one, an empty one, and the root of a manager, whose steps are listed."""
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        oxe.read_manifest(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(oxe.CheckpointLayoutError, match="cannot find a checkpoint at"):
        oxe.read_manifest(tmp_path / "empty")
    shutil.copytree(checkpoint, tmp_path / "root" / "7" / "default")
    with pytest.raises(oxe.CheckpointLayoutError, match="root of a CheckpointManager with steps 7"):
        oxe.read_manifest(tmp_path / "root")
    assert oxe.read_manifest(tmp_path / "root" / "7").meshes[0].size == 8


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="a truncated file"),
        pytest.param(lambda data: b"", id="an empty file"),
        pytest.param(lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], id="a flipped bit"),
        pytest.param(lambda data: bytes(range(256)) * 4, id="other bytes"),
    ],
)
def test_a_damaged_record_is_an_error_and_never_a_fallback(checkpoint, damage):
    """What it said would be lost silently: every restore, plan and reading of the manifest raises."""
    file = checkpoint / FILE_NAME
    file.write_bytes(damage(file.read_bytes()))
    with oxe.StandardCheckpointer() as checkpointer, pytest.raises(oxe.FormatError):
        checkpointer.restore(checkpoint)
    with pytest.raises(oxe.FormatError):
        oxe.read_manifest(checkpoint)
    with pytest.raises(oxe.FormatError):
        oxe.plan_restore(checkpoint)
