"""`_storage`: where keys lie, what TensorStore is told of them, and that it is what Orbax tells it."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath
from stored_arrays import GZIP, ZSTD, contents, numbers, stored

from orbax_explicit._storage import ArrayStore, key_of, new_context, open_store, read_keys


def store(directory: Any = "/a/b", **options: Any) -> ArrayStore:
    return ArrayStore(directory=str(directory), **{"use_ocdbt": False, "use_zarr3": False, **options})


@pytest.mark.parametrize(
    ("options", "file", "keys"),
    [
        pytest.param({}, ".zarray", {(): "0", (3,): "3", (1, 20): "1.20"}, id="Zarr 2"),
        pytest.param({"use_zarr3": True}, "zarr.json", {(): "c", (3,): "c/3", (1, 20): "c/1/20"}, id="Zarr 3"),
        pytest.param({"metadata_key": "other.json"}, "other.json", {(1,): "1"}, id="a name for metadata"),
        pytest.param({"metadata_key": "x", "use_zarr3": True}, "x", {(1,): "c/1"}, id="a name in Zarr 3"),
    ],
)
def test_the_keys_of_an_array(options, file, keys) -> None:
    """As TensorStore's drivers make them, which other tests compare with."""
    assert store(**options).metadata_file == file
    assert {place: store(**options).chunk_key(place) for place in keys} == keys


@pytest.mark.parametrize(
    ("name", "part", "key"),
    [
        pytest.param("a.b", ".zarray", "a.b/.zarray", id="metadata"),
        pytest.param("a.b", "c/0/1", "a.b/c/0/1", id="a chunk"),
        pytest.param("a.b", "", "a.b/", id="all of an array"),
        pytest.param("", ".zarray", ".zarray", id="a tree that is one array"),
        pytest.param("", "", "", id="all of a tree that is one array"),
    ],
)
def test_the_key_of_a_part(name, part, key) -> None:
    """Below the name of the array, if it has one."""
    assert key_of(name, part) == key


@pytest.mark.parametrize(
    ("directory", "base"),
    [
        pytest.param("/a/b", {"driver": "file", "path": "/a/b/"}, id="a path"),
        pytest.param("/a/b/", {"driver": "file", "path": "/a/b/"}, id="a path that ends in a slash"),
        pytest.param("/a//./c/../b", {"driver": "file", "path": "/a/b/"}, id="a path that is not the shortest"),
        pytest.param("gs://bucket/a", "gs://bucket/a/", id="a URL"),
        pytest.param("s3://bucket/a/", "s3://bucket/a/", id="a URL that ends in a slash"),
    ],
)
def test_the_directory_of_an_item(directory, base) -> None:
    """A local path as one of files, anything else as the URL that it is."""
    assert store(directory).spec() == base
    spec = store(directory, use_ocdbt=True).spec()
    assert isinstance(spec, dict)
    assert spec["driver"] == "ocdbt"
    if isinstance(base, str):
        assert spec["base"] == base
        assert {name for name in spec if name.startswith("experimental_read_coalescing")}
    else:
        assert spec["manifest"] == base
        assert spec["base"] == {**base, "file_io_locking": {"mode": "non_atomic"}}


@pytest.mark.parametrize(("directory", "driver"), [("/a/b", "file"), ("gs://bucket/a", "gcs"), ("s3://bucket/a", "s3")])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
def test_tensorstore_takes_the_specs(directory, driver, use_ocdbt) -> None:
    """It knows every member, to read and to write."""
    mine = store(directory, use_ocdbt=use_ocdbt)
    for spec in (mine.spec(), mine.writing_spec(3)):
        taken = ts.KvStore.Spec(spec).to_json()
        assert taken["driver"] == ("ocdbt" if use_ocdbt else driver)


def test_each_process_writes_a_database_of_its_own() -> None:
    """In the directory that Orbax's merge looks for; files are written where they stay."""
    spec = store(use_ocdbt=True).writing_spec(3)
    assert isinstance(spec, dict)
    assert spec["manifest"]["path"] == "/a/b/ocdbt.process_3/"
    assert store().writing_spec(3) == store().spec()


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        pytest.param(None, 128 << 20, id="a default, so that several are written at a time"),
        pytest.param(0, 0, id="none, for one file"),
        pytest.param(1000, 1000, id="a number"),
    ],
)
def test_how_large_a_data_file_gets(given, nbytes) -> None:
    """As the caller says."""
    spec = store(use_ocdbt=True).writing_spec(0, given)
    assert isinstance(spec, dict)
    assert spec["target_data_file_size"] == nbytes


def in_directories(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with paths that end in a slash, as they do in newer releases of Orbax; it means the same."""
    ends = {name: {**spec[name], "path": spec[name]["path"].rstrip("/") + "/"} for name in ("base", "manifest")}
    return {**spec, **ends}


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
def test_specs_are_those_of_orbax(use_ocdbt) -> None:
    """Orbax merges what we write, and writes what we read: what TensorStore is told must not drift apart."""
    utils = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    if not use_ocdbt:
        assert store().spec() == {**utils.build_kvstore_tspec("/a/b", use_ocdbt=False), "path": "/a/b/"}
    else:
        assert store(use_ocdbt=True).spec() == in_directories(utils.build_kvstore_tspec("/a/b", use_ocdbt=True))
        info = ocp.type_handlers.ParamInfo(name="w", parent_dir=epath.Path("/a/b"), use_zarr3=False)
        array = {"global_shape": (2,), "local_shape": (2,), "dtype": np.dtype(np.float32)}
        written = utils.build_array_write_spec(info, ocp.SaveArgs(), **array, use_ocdbt=True, process_index=3).json
        theirs = {name: value for name, value in written["kvstore"].items() if name != "path"}
        ours = store(use_ocdbt=True).writing_spec(3)
        assert isinstance(ours, dict)
        assert {**ours, "target_data_file_size": None} == {**in_directories(theirs), "target_data_file_size": None}


@pytest.mark.parametrize("process", [0, 1, 12])
def test_orbax_merges_what_each_process_wrote(tmp_path, process) -> None:
    """Into the database that is read then, whatever the number of the process."""
    merge = importlib.import_module("orbax.checkpoint._src.serialization.ocdbt_utils").merge_ocdbt_per_process_files
    mine = store(tmp_path, use_ocdbt=True)
    context = new_context()
    for index in {process, 3}:
        keys = ts.KvStore.open(mine.writing_spec(index), context=context).result()
        keys[f"w{index}/.zarray"] = b"{}"
        keys[f"w{index}/0"] = bytes(5000)
    asyncio.run(merge(epath.Path(tmp_path), ts_context=context, use_zarr3=False))
    assert contents(open_store(mine)) == {
        key: value
        for index in (process, 3)
        for key, value in ((f"w{index}/.zarray", b"{}"), (f"w{index}/0", bytes(5000)))
    }


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
@pytest.mark.parametrize("codec", [None, GZIP, ZSTD], ids=["no codec", "gzip", "zstd"])
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        pytest.param((), (), id="a scalar"),
        pytest.param((0, 4), (1, 4), id="nothing"),
        pytest.param((5, 4), (2, 4), id="several chunks"),
    ],
)
def test_a_new_array_is_as_it_was_asked_for(shape, chunk, codec, use_zarr3) -> None:
    """Chunks, dtype and codec; chunks of zeros are written, since one that is not there is one that was lost."""
    spec = store(use_zarr3=use_zarr3).new_array_spec(shape, chunk, "bfloat16", codec)
    array = ts.open(ts.Spec({**spec, "kvstore": "memory://"}), create=True).result()
    assert (array.shape, array.chunk_layout.read_chunk.shape or (), array.dtype.name) == (shape, chunk, "bfloat16")
    array.write(np.zeros(shape, array.dtype.numpy_dtype)).result()
    assert len(array.kvstore.list().result()) == 1 + (3 if shape == (5, 4) else shape == ())
    written = [name for name in ("gzip", "zstd") if name in json.dumps(array.codec.to_json())]
    assert written == ([codec["name"]] if codec else [])


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
@pytest.mark.parametrize("fills", [False, True], ids=["what is missing is lost", "what is missing is zeros"])
def test_an_array_is_opened_to_be_read(tmp_path, use_ocdbt, use_zarr3, fills) -> None:
    """And a chunk that is not there is an error, or zeros."""
    mine = stored(tmp_path, {"w": numbers(4, 4)}, (2, 4), use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, fills_missing=fills)
    keys = open_store(mine)
    array = ts.open(ts.Spec(mine.array_spec()), kvstore=keys / "w/", open=True).result()
    np.testing.assert_array_equal(array.read().result(), numbers(4, 4))
    del keys[f"w/{mine.chunk_key((1, 0))}"]
    if fills:
        np.testing.assert_array_equal(array.read().result()[2:], 0)
    else:
        with pytest.raises(ValueError, match="is missing"):
            array.read().result()


def test_many_keys_are_read_in_their_order(tmp_path) -> None:
    """None where nothing is, and the error where a read fails; the others are read all the same."""
    keys = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    for name in "abc":
        keys[name] = name.encode()
    (tmp_path / "directory").mkdir()
    first, missing, directory, failed, last = read_keys(keys, ["c", "x", "directory", "a\0", "a"])
    assert (first, missing, directory, last) == (b"c", None, None, b"a")
    assert isinstance(failed, ValueError)
    assert read_keys(keys, []) == []


def test_what_one_restore_cached_is_not_used_for_another(tmp_path) -> None:
    """A checkpoint may be replaced under its path."""
    mine = store(tmp_path, use_ocdbt=True)
    spec = mine.spec()
    assert isinstance(spec, dict)
    for i in range(2):
        ts.KvStore.open(spec, context=new_context()).result()["a"] = str(i).encode()
        assert open_store(mine)["a"] == str(i).encode()
        assert read_keys(open_store(mine, new_context()), ["a"]) == [str(i).encode()]
