"""`_leaf_reading`: what each leaf of a plan comes back as, and that it is what was recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, matrix, place

import orbax_explicit as oxe
from orbax_explicit import _leaf_reading
from orbax_explicit._binding import read_present
from orbax_explicit._containers import rebuild_tree
from orbax_explicit._leaf_reading import read_leaves
from orbax_explicit._records import Key
from orbax_explicit._restoring import bind_restore
from orbax_explicit._sidecar import read_item_manifest


def save(directory: Path, tree: Any) -> epath.Path:
    """An item with this tree, each of its keys in a file."""
    with oxe.StandardCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(directory, tree)
        checkpointer.wait_until_finished()
    return epath.Path(directory)


def read(item: epath.Path, target: Any = None, **options: Any) -> Any:
    """Restores an item as the handler does: the tree, as it was or as the target."""
    policy = oxe.RestorePolicy(**{name: options.pop(name) for name in ("cast", "missing", "arrays") if name in options})
    strict = options.get("strict", True)
    bound = bind_restore(read_item_manifest(item), read_present(), target=target, policy=policy, strict=strict)
    values = asyncio.run(read_leaves(item, bound, cast=policy.cast, **options))
    if bound.target is None:
        assert bound.plan.tree is not None
        return rebuild_tree(bound.plan.tree, values.__getitem__)
    return bound.target.treedef.unflatten([values[path] for path in bound.target.leaves])


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(3, id="an int"),
        pytest.param(-(2**62), id="a large int"),
        pytest.param(2.5, id="a float"),
        pytest.param(True, id="a truth value"),
        pytest.param(1 + 2j, id="a complex number"),
        pytest.param("text", id="text"),
        pytest.param("", id="no text"),
        pytest.param(b"octets\x00", id="bytes"),
        pytest.param(b"", id="no bytes"),
        pytest.param(np.float32(1.5), id="a number of NumPy's"),
        pytest.param(np.bool_(True), id="a truth value of NumPy's"),
        pytest.param(np.complex64(1j), id="a complex number of NumPy's"),
        pytest.param(matrix(3, 4), id="an array"),
        pytest.param(np.zeros((0, 4), np.int8), id="an array of size zero"),
        pytest.param(np.arange(3, dtype=jnp.bfloat16), id="an array of a dtype that NumPy has not"),
    ],
)
def test_a_value_on_the_host_comes_back_as_it_was(tmp_path, value) -> None:
    """Of the same type, beside others and alone."""
    for name, tree in (("beside", {"a": value, "b": 1}), ("alone", [value])):
        assert_same_tree(read(save(tmp_path / name, tree)), tree)


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["directories", "OCDBT"])
@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(jnp.arange(3), id="a small array"),
        pytest.param(jnp.zeros((512, 256)), id="a large array"),
        pytest.param(matrix(), id="an array of NumPy's"),
        pytest.param(3, id="a number"),
        pytest.param("text", id="text"),
    ],
)
def test_a_tree_that_is_one_leaf_has_the_empty_name(tmp_path, leaf, use_ocdbt) -> None:
    """Stock saves such trees, which this package refuses to."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as stock:
        stock.save(tmp_path / "a", args=ocp.args.PyTreeSave(leaf))
    found = read(epath.Path(tmp_path / "a"))
    assert type(found) is type(leaf)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(leaf))


def test_arrays_and_keys_come_back_on_their_shardings(tmp_path, mesh) -> None:
    """Uncommitted ones uncommitted."""
    tree = {
        "w": place(mesh, matrix(), P("d", "m")),
        "step": jnp.int32(5),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, P("d"))),
        "rbg": jax.random.key(2, impl="rbg"),
    }
    found = read(save(tmp_path / "a", tree))
    assert_same_tree(found, tree)
    assert not found["step"].committed


def test_arrays_on_the_host_are_numpys(tmp_path, mesh) -> None:
    """Of keys, it is their data."""
    keys = jax.random.split(jax.random.key(1), 8)
    found = read(save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m")), "keys": keys}), arrays="numpy")
    assert type(found["w"]) is type(found["keys"]) is np.ndarray
    np.testing.assert_array_equal(found["w"], matrix())
    np.testing.assert_array_equal(found["keys"], jax.random.key_data(keys))


def test_a_leaf_that_the_target_keeps_is_not_read(tmp_path, mesh, monkeypatch) -> None:
    """It is the very object of the target."""
    item = save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
    names = []
    read_arrays = _leaf_reading.read_arrays

    def spy(reads: Any, *args: Any, **options: Any) -> Any:
        names.extend(read.name for read in reads)
        return read_arrays(reads, *args, **options)

    monkeypatch.setattr(_leaf_reading, "read_arrays", spy)
    kept = place(mesh, matrix() + 1, P("m"))
    target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("m"))), "new": kept}
    found = read(item, target, missing="keep")
    assert found["new"] is kept
    assert names == ["w"]
    assert (found["w"].dtype, found["w"].sharding) == (jnp.bfloat16, NamedSharding(mesh, P("m")))
    np.testing.assert_array_equal(np.asarray(found["w"]), matrix().astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("value", "dtype", "cast", "expected"),
    [
        pytest.param(3, np.int8, "same_kind", 3, id="an int that fits"),
        pytest.param(300, np.int8, "same_kind", None, id="an int that does not"),
        pytest.param(300, np.int8, "unsafe", 44, id="an int that does not, where any cast will do"),
        pytest.param(-1, np.uint8, "same_kind", None, id="a negative int where there are none"),
    ],
)
def test_an_int_is_cast_by_its_value(tmp_path, value, dtype, cast, expected) -> None:
    """Python's own has no width that a plan could compare."""
    item = save(tmp_path / "a", {"n": value})
    target = {"n": np.zeros((), dtype)[()]}
    if expected is None:
        with pytest.raises(oxe.RestoreRefusedError, match=f"cannot hold {value} in {np.dtype(dtype)}") as error:
            read(item, target, cast=cast)
        assert error.value.problems[0].affects == ("n",)
    else:
        found = read(item, target, cast=cast)["n"]
        assert (found, found.dtype) == (expected, dtype)


@pytest.mark.parametrize("shape", [(4, 8), (12, 4)], ids=str)
def test_without_strictness_arrays_are_cut_off_or_padded(tmp_path, mesh, shape) -> None:
    """To the target's shape; of keys, whole keys."""
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(mesh, P()))
    item = save(tmp_path / "a", {"w": place(mesh, matrix(), P()), "keys": keys})
    target = {
        "w": jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P("d"))),
        "keys": jax.ShapeDtypeStruct((4,), keys.dtype, sharding=NamedSharding(mesh, P())),
    }
    found = read(item, target, strict=False)
    expected = np.zeros(shape, np.float32)
    expected[:8, : shape[1]] = matrix()[: shape[0], : shape[1]]
    np.testing.assert_array_equal(np.asarray(found["w"]), expected)
    np.testing.assert_array_equal(jax.random.key_data(found["keys"]), jax.random.key_data(keys)[:4])


def edit(item: epath.Path, name: str, **changes: Any) -> None:
    """Changes the Zarr metadata of an array."""
    file = item / name / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_arrays_that_are_not_the_recorded_ones_are_all_listed(tmp_path, mesh) -> None:
    """By leaf name; a record and arrays of different saves do not go together."""
    item = save(tmp_path / "a", {"w": place(mesh, matrix(), P("d")), "n": np.arange(3), "ok": np.arange(3)})
    edit(item, "w", shape=[4, 16])
    edit(item, "n", dtype="<f8")
    with pytest.raises(oxe.FormatError, match="are not what was written") as error:
        read(item)
    assert {problem.affects for problem in error.value.problems} == {("w",), ("n",)}
    (item / "explicit_digests.msgpack").unlink()  # Which tells of any change.
    with pytest.raises(oxe.FormatError) as error:
        read(item)
    assert {problem.affects for problem in error.value.problems} == {("w",), ("n",)}
    assert "float32(4, 16)" in str(error.value)
    assert "float64(3,)" in str(error.value)


def test_a_changed_text_is_an_error(tmp_path) -> None:
    """Its file has a digest; nothing else of the tree is read before."""
    item = save(tmp_path / "a", {"t": "text", "n": 3})
    file = item / "_strings.json"
    file.write_text(file.read_text().replace("text", "test"))
    with pytest.raises(oxe.FormatError, match=r"cannot trust _strings\.json"):
        read(item)


def test_a_changed_list_of_leaves_is_an_error(tmp_path) -> None:
    """It says how the arrays are stored."""
    item = save(tmp_path / "a", {"n": 3})
    file = item / "_METADATA"
    file.write_text(file.read_text().replace("false", "true "))
    with pytest.raises(oxe.FormatError, match="cannot trust _METADATA"):
        read(item)


def test_layouts_of_the_target_are_put_on_arrays(tmp_path, mesh, monkeypatch) -> None:
    """Where the caller asks for them."""
    item = save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
    target = {"w": place(mesh, np.zeros((8, 8), np.float32), P("d", "m"))}
    put = []
    device_put = jax.device_put

    def spy(value: Any, where: Any, **options: Any) -> Any:
        put.append(where)
        return device_put(value, where, **options)

    monkeypatch.setattr(jax, "device_put", spy)
    for with_layouts in (False, True):
        found = read(item, target, with_layouts=with_layouts)
        np.testing.assert_array_equal(np.asarray(found["w"]), matrix())
        assert (target["w"].format in put) == with_layouts


def test_leaves_are_named_by_their_paths(tmp_path) -> None:
    """Typed keys, so that the tree can be put together."""
    item = save(tmp_path / "a", {"a": [1, {3: "x"}]})
    bound = bind_restore(read_item_manifest(item), read_present())
    values = asyncio.run(read_leaves(item, bound, cast="same_kind"))
    assert values == {
        (Key("dict", "a"), Key("index", 0)): 1,
        (Key("dict", "a"), Key("index", 1), Key("dict", 3)): "x",
    }
