"""Reading every byte of a checkpoint: what is named when something is wrong, and what nobody can tell."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from trees import matrix, place

import orbax_explicit as oxe


def state_on(mesh: Any) -> dict[str, Any]:
    """Arrays of several chunks and of one, in places of their own in the store; numbers and texts."""
    large = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    return {
        "large": place(mesh, large, P("d", "m")),
        "small": place(mesh, matrix(), P("d")),
        "host": np.arange(7),
        "count": 3,
        "name": "a name",
    }


@pytest.fixture
def saved(tmp_path: pathlib.Path, mesh: Any) -> pathlib.Path:
    """A checkpoint of this package."""
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state_on(mesh))
    return tmp_path / "saved"


def data_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of the database that hold chunks, the largest first."""
    files = (path / "ocdbt.process_0" / "d").iterdir()
    return sorted(files, key=lambda file: -file.stat().st_size)


def flip(file: pathlib.Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 16
    file.write_bytes(data)


def test_a_whole_checkpoint_verifies(saved):
    """Every leaf is counted, and none is without a checksum."""
    report = oxe.verify(saved)
    assert report.ok
    assert report.problems == ()
    assert report.unchecked == ()
    assert report.leaves == 5
    assert report.nbytes == 256 * 1024 * 4 + 8 * 8 * 4 + 7 * 8 + 8
    assert str(report) == f"{saved}: no problem; leaves: 5, bytes of arrays: {report.nbytes}"


def test_progress_counts_the_bytes_of_all_chunks(saved):
    """It rises to the number of bytes in all, which the report gives too."""
    calls: list[tuple[int, int]] = []
    report = oxe.verify(saved, progress=lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {report.nbytes}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (report.nbytes, report.nbytes)


def test_a_flipped_bit_is_named_by_leaf_block_and_file(saved):
    """The key of the chunk, and the elements that it holds."""
    file = data_files(saved)[0]
    flip(file, file.stat().st_size // 2)
    report = oxe.verify(saved)
    assert not report.ok
    (damage,) = report.problems
    assert damage.leaves == ("large",)
    assert damage.leaf == "large"
    assert damage.file == f"ocdbt.process_0/d/{file.name}"
    place_in_grid = damage.block.split()[0]
    row, column = map(int, place_in_grid.split("."))
    assert damage.block == f"{row}.{column} [{128 * row}:{128 * row + 128}, {256 * column}:{256 * column + 256}]"
    assert "a chunk is damaged" in damage.what
    assert str(damage) in str(report)
    with pytest.raises(oxe.FormatError, match="cannot read large"), oxe.StandardCheckpointer() as checkpointer:
        checkpointer.restore(saved)


def remove(file: pathlib.Path) -> None:
    file.unlink()


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def change(file: pathlib.Path) -> None:
    flip(file, file.stat().st_size // 2)


@pytest.mark.parametrize("damage", [remove, cut, change], ids=["removed", "cut off", "one bit changed"])
@pytest.mark.parametrize(
    "name",
    [
        "explicit_sharding.msgpack",
        "explicit_digests.msgpack",
        "manifest.ocdbt",
        "_METADATA",
        "_sharding",
        "_strings.json",
        "array_metadatas/process_0",
    ],
)
def test_damage_to_a_small_file_names_it(saved, name, damage):
    """Whatever becomes of it; that leaves are unreadable without it is told as well."""
    damage(saved / name)
    report = oxe.verify(saved)
    assert name in {problem.file for problem in report.problems}
    assert {problem.file for problem in report.problems} == {name}


@pytest.mark.parametrize("damage", [remove, cut, change], ids=["removed", "cut off", "one bit changed"])
def test_damage_to_the_index_of_arrays_names_its_file_and_the_leaves(saved, damage):
    """One problem for all of them, not one for each."""
    (file,) = (saved / "d").iterdir()
    damage(file)
    (problem,) = oxe.verify(saved).problems
    assert problem.file == f"d/{file.name}"
    assert problem.leaves == ("count", "host", "large", "small")


def test_every_damaged_chunk_is_listed(saved):
    """In the order of the tree."""
    for file in data_files(saved):
        file.write_bytes(bytes(file.stat().st_size))
    report = oxe.verify(saved)
    blocks = [problem.block.split()[0] for problem in report.problems if problem.leaf == "large"]
    assert blocks == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2", "1.3"]


def test_a_chunk_that_is_not_there_is_a_problem(tmp_path, mesh):
    """Without a database each chunk is a file."""
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", state_on(mesh))
    (tmp_path / "a" / "large" / "1.2").unlink()
    (problem,) = oxe.verify(tmp_path / "a").problems
    assert (problem.what, problem.leaves, problem.file) == ("a chunk is missing", ("large",), "large/1.2")
    assert problem.block == "1.2 [128:256, 512:768]"


def test_an_array_of_another_save_is_a_problem(tmp_path, mesh):
    """A record and arrays that do not belong together."""
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "a", state_on(mesh))
    metadata = tmp_path / "a" / "large" / ".zarray"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"dtype": ">f4"}))
    by_digest, by_record = oxe.verify(tmp_path / "a").problems
    assert by_digest.file == by_record.file == "large/.zarray"
    assert by_record.leaves == ("large",)


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
def test_without_a_database_zarr_metadata_have_digests(tmp_path, mesh, use_zarr3):
    """Those of an array of size zero too, of which there is nothing else to check."""
    name = "zarr.json" if use_zarr3 else ".zarray"
    with oxe.StandardCheckpointer(use_ocdbt=False, use_zarr3=use_zarr3) as checkpointer:
        checkpointer.save(tmp_path / "a", {"n/m": place(mesh, np.zeros((0, 3)), P("d"))})
    assert oxe.verify(tmp_path / "a").ok
    flip(tmp_path / "a" / "n" / "m" / name, 40)
    assert f"n/m/{name}" in {problem.file for problem in oxe.verify(tmp_path / "a").problems}


@pytest.mark.parametrize(
    ("options", "unchecked"),
    [
        pytest.param({"compression": "zstd", "use_zarr3": True}, (), id="zstd has a checksum in Zarr 3"),
        pytest.param({"use_zarr3": True}, (), id="gzip in Zarr 3"),
        pytest.param({"checksum": None}, ("count", "host", "large", "small"), id="no checksum was asked for"),
        pytest.param(
            {"checksum": None, "compression": "zstd"}, ("count", "host", "large", "small"), id="zstd without a checksum"
        ),
    ],
)
def test_leaves_without_a_checksum_are_listed(tmp_path, mesh, options, unchecked):
    """They could be read, and nobody can tell whether they are what was written."""
    with oxe.StandardCheckpointer(**options) as checkpointer:
        checkpointer.save(tmp_path / "a", state_on(mesh))
    report = oxe.verify(tmp_path / "a")
    assert report.ok
    assert report.unchecked == unchecked


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
def test_of_a_stock_checkpoint_nothing_is_checked(tmp_path, mesh, use_zarr3):
    """It is read all the same, and what cannot be read is a problem."""
    state = {"w": place(mesh, np.random.default_rng(0).standard_normal((64, 64)), P("d", "m")), "t": "text"}
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
    report = oxe.verify(tmp_path / "a")
    assert report.ok
    assert report.unchecked == ("_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0", "t", "w")
    data_files(tmp_path / "a")[0].unlink()
    assert not oxe.verify(tmp_path / "a").ok


def test_it_needs_no_device(saved):
    """Not even a backend of JAX: a checkpoint is verified where there is none."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import orbax_explicit as o, sys; r = o.verify(sys.argv[1]); print(r.ok, r.leaves)",
            saved,
        ],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
    )
    assert done.stdout.split() == ["True", "5"]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        pytest.param("nothing", FileNotFoundError, id="nothing is there"),
        pytest.param("saved/array_metadatas", oxe.CheckpointLayoutError, id="what is there is no item"),
    ],
)
def test_a_path_that_is_no_item_is_an_error(saved, path, error):
    """As for `read_manifest`."""
    with pytest.raises(error):
        oxe.verify(saved.parent / path)


@pytest.mark.parametrize("state", [{"a": "text"}, {"a": None}, {"a": "text", "b": ()}], ids=str)
def test_a_tree_without_arrays_verifies(tmp_path, state):
    """There is no store then."""
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
    assert oxe.verify(tmp_path / "a").ok


def test_a_report_is_true_where_nothing_is_wrong(saved):
    """As `report.ok` is."""
    assert oxe.verify(saved)
    (saved / "_METADATA").unlink()
    assert not oxe.verify(saved)


def test_what_stock_saved_under_register_verifies(tmp_path, mesh):
    """Its record is of the arrays alone; nobody wrote digests of the small files, nor checksums of other leaves."""
    with oxe.registered(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d")), "host": np.arange(3)})
    report = oxe.verify(tmp_path / "a")
    assert report.ok
    assert report.unchecked == ("_METADATA", "_sharding", "array_metadatas/process_0", "host")
    change(tmp_path / "a" / "explicit_sharding.msgpack")
    (damage,) = oxe.verify(tmp_path / "a").problems
    assert damage.file == "explicit_sharding.msgpack"


def test_the_lost_list_of_leaves_is_all_that_is_told(tmp_path, mesh):
    """The arrays are found without it, in Zarr 3 too."""
    with oxe.StandardCheckpointer(use_zarr3=True) as checkpointer:
        checkpointer.save(tmp_path / "a", state_on(mesh))
    (tmp_path / "a" / "_METADATA").unlink()
    report = oxe.verify(tmp_path / "a")
    assert [damage.file for damage in report.problems] == ["_METADATA"]
    assert report.nbytes == 256 * 1024 * 4 + 8 * 8 * 4 + 7 * 8 + 8


def test_of_a_stock_checkpoint_the_lost_database_is_named(tmp_path):
    """Not the file that lists the leaves, which is whole."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": jnp.arange(3)})
    (tmp_path / "a" / "manifest.ocdbt").unlink()
    (damage,) = oxe.verify(tmp_path / "a").problems
    assert damage.file == "manifest.ocdbt"


# Steps.


@pytest.fixture
def steps(tmp_path: pathlib.Path, mesh: Any) -> pathlib.Path:
    """The root of a manager with steps 1, 2 and 10."""
    with ocp.CheckpointManager(tmp_path / "root", item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        for step in (1, 2, 10):
            manager.save(step, args=oxe.args.ExplicitSave(state_on(mesh)))
    return tmp_path / "root"


def test_the_newest_step_that_verifies_is_found(steps):
    """By number, not by name; a damaged one is passed over; none is None."""
    assert oxe.latest_good_step(steps) == 10
    change(data_files(steps / "10" / "default")[0])
    assert oxe.latest_good_step(steps) == 2
    (steps / "2" / "default" / "manifest.ocdbt").unlink()
    assert oxe.latest_good_step(steps) == 1
    shutil.rmtree(steps / "1" / "default")
    assert oxe.latest_good_step(steps) is None


def test_a_manager_can_be_asked(steps):
    """It knows its root."""
    with ocp.CheckpointManager(steps, item_handlers=oxe.ExplicitCheckpointHandler()) as manager:
        assert oxe.latest_good_step(manager) == 10


def test_an_unfinished_step_is_no_step(steps):
    """What Orbax had not committed when it was stopped."""
    shutil.copytree(steps / "10", steps / "11.orbax-checkpoint-tmp")
    assert oxe.latest_good_step(steps) == 10


def test_every_item_of_a_step_must_verify(tmp_path, mesh):
    """Items that hold no tree are not looked at."""
    options = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=8)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (3, 4):
            args = {"a": oxe.args.ExplicitSave(state_on(mesh)), "b": oxe.args.ExplicitSave({"x": jnp.arange(3)})}
            manager.save(step, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave({"n": step})))
    assert oxe.latest_good_step(tmp_path) == 4
    (tmp_path / "step_00000004" / "b" / "manifest.ocdbt").unlink()
    assert oxe.latest_good_step(tmp_path) == 3


def test_directories_that_are_no_steps_are_passed_over(steps):
    """A copy under another name is nothing that the manager could restore."""
    shutil.copytree(steps / "1", steps / "old_99")
    assert oxe.latest_good_step(steps) == 10


def test_a_manager_knows_its_steps(tmp_path, mesh):
    """Also where a directory without its prefix lies beside them."""
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    handler = oxe.ExplicitCheckpointHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler, options=options) as manager:
        manager.save(3, args=oxe.args.ExplicitSave(state_on(mesh)))
        manager.wait_until_finished()
        shutil.copytree(tmp_path / "ckpt_3", tmp_path / "9")
        assert oxe.latest_good_step(manager) == 3


def test_a_step_that_has_lost_an_item_is_not_good(tmp_path, mesh):
    """Orbax lists the items of a step."""
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            args = {"a": oxe.args.ExplicitSave(state_on(mesh)), "b": oxe.args.ExplicitSave({"x": jnp.arange(3)})}
            manager.save(step, args=ocp.args.Composite(**args))
    shutil.rmtree(tmp_path / "2" / "b")
    assert oxe.latest_good_step(tmp_path) == 1


@pytest.mark.parametrize("path", ["10", "10/default"], ids=["a step", "an item"])
def test_a_step_is_no_root(steps, path):
    """None would look as if everything were damaged."""
    with pytest.raises(oxe.CheckpointLayoutError, match="it is a step, or an item of one"):
        oxe.latest_good_step(steps / path)


def test_directories_that_may_or_may_not_be_steps_are_an_error(steps):
    """With several prefixes and none without, only the manager knows."""
    for step in ("1", "2"):
        (steps / step).rename(steps / f"a_{step}")
    (steps / "10").rename(steps / "b_10")
    with pytest.raises(oxe.CheckpointLayoutError, match="prefixes a_, b_"):
        oxe.latest_good_step(steps)


def test_of_a_root_that_is_not_there_there_is_no_step(tmp_path):
    """That is an error rather than None: a misspelt path must not look like damage."""
    with pytest.raises(FileNotFoundError):
        oxe.latest_good_step(tmp_path / "nothing")
