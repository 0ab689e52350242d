"""What stock Orbax does today, a row a class, and beside it what this package does.

The `stock` half of a row is a claim that the README makes about Orbax. It fails on the day upstream fixes the
row: then the claim goes, and the test with it. The `ours` half says what a user gets here instead; a row without
one is a claim that this package does not answer yet.

Stock Orbax means v0 (`ocp.StandardCheckpointer`) and v1 (`ocp.save`, `ocp.load`). What only other devices can
show runs in processes of its own, once for all rows, and is looked at here as `Outcome`s.
"""

from __future__ import annotations

import gc
import pathlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import fronts
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as file_systems
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import Moments, matrix, pending_sum, place

import orbax_explicit as oxe
from orbax_explicit import v1 as oxe1
from orbax_explicit.testing import run_on_devices

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto

# What stock Orbax gives up half-way leaves coroutines behind that nobody awaits, and Python says so.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


class Api(NamedTuple):
    """One way to save and restore a tree at a path."""

    save: Callable[[pathlib.Path | str, Any], None]
    restore: Callable[..., Any]


# With the default, some saves that fail (of an unreduced array, always in v1) leave a thread that waits five minutes
# for a directory that nobody makes, and the process cannot end before it does.
_OPTIONS = {"create_directories_asynchronously": False}


def _save_v0(path: pathlib.Path | str, tree: Any) -> None:
    with ocp.StandardCheckpointer(async_options=ocp.options.AsyncOptions(**_OPTIONS)) as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()


def _restore_v0(path: pathlib.Path, target: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def _save_v1(path: pathlib.Path | str, tree: Any) -> None:
    with ocp1.Context(async_options=ocp1.options.AsyncOptions(**_OPTIONS)):
        ocp1.save(path, tree)


STOCK = {"v0": Api(_save_v0, _restore_v0), "v1": Api(_save_v1, ocp1.load)}
OURS = {"ours v0": Api(fronts.save, fronts.restore), "ours v1": Api(oxe1.save, oxe1.load)}
ALL = {**STOCK, **OURS}

FEW_ARRAYS = 4
LAYOUT_FILES = ("_sharding", "explicit_sharding.msgpack")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended: with a value, or with an error as text.

    Attributes:
        value: What it returned; None if it raised.
        error: The type and message of what it raised; empty if it returned.
        warned: The warnings that it gave. Those about abandoned coroutines are none, nor is the one that stock
            gives at every restore without a target.
    """

    value: Any = None
    error: str = ""
    warned: tuple[str, ...] = ()


def attempt(function: Callable[..., Any], *args: Any) -> Outcome:
    """Calls the function, and collects the coroutines that a failing one leaves behind."""
    value, error = None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = function(*args)
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is the outcome
            error = f"{type(raised).__name__}: {raised}"
        if error:
            gc.collect()
    warned = [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, UserWarning) and "Sharding info not provided" not in str(warning.message)
    ]
    return Outcome(value=value, error=error, warned=tuple(warned))


class Layout(NamedTuple):
    """Where an array lies, without its devices, so that another process can send it."""

    axes: tuple[tuple[str, int], ...]
    axis_types: tuple[str, ...]
    spec: str
    device_ids: tuple[int, ...]
    values: Any


def layout(array: jax.Array) -> Layout:
    mesh = array.sharding.mesh
    return Layout(
        axes=tuple(mesh.shape.items()),
        axis_types=tuple(kind.name for kind in mesh.axis_types),
        spec=str(array.sharding.spec),
        device_ids=tuple(device.id for device in mesh.devices.flat),
        values=np.asarray(array),
    )


@pytest.fixture(params=STOCK)
def stock(request: pytest.FixtureRequest) -> Api:
    """Each API of stock Orbax."""
    return STOCK[request.param]


@pytest.fixture(params=OURS)
def ours(request: pytest.FixtureRequest) -> Api:
    """This package, behind each API."""
    return OURS[request.param]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a test saves."""
    return tmp_path / "checkpoint"


# --- What other devices show ---


def _restore_each(directory: pathlib.Path) -> dict[str, Outcome]:
    """Where `w` lies after each API has restored, without a target, what it saved."""
    return {
        name: attempt(lambda api=api, name=name: layout(api.restore(directory / name)["w"]))
        for name, api in ALL.items()
    }


def _save_each(directory: pathlib.Path) -> dict[str, Outcome]:
    """Saves `w` with each API, on a mesh over the eight devices of the run. Collective."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT))
    tree = {"w": place(mesh, matrix(), P("d", "m"))}
    return {name: attempt(api.save, directory / name, tree) for name, api in ALL.items()}


def _bytes_of_layout(directory: pathlib.Path) -> dict[str, int]:
    """How much each API writes on where a few small arrays lie."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(EXPLICIT,))
    tree = {f"x{i}": place(mesh, np.zeros(jax.device_count(), np.float32), P("d")) for i in range(FEW_ARRAYS)}
    for name, api in ALL.items():
        api.save(directory / name, tree)
    return {
        name: sum(file.stat().st_size for file in (directory / name).rglob("*") if file.name in LAYOUT_FILES)
        for name in ALL
    }


@pytest.fixture(scope="module")
def saved_on_8(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with `w` as each API saved it on the eight devices of this process."""
    directory = tmp_path_factory.mktemp("saved_on_8")
    assert jax.device_count() == 8
    assert {name: outcome.error for name, outcome in _save_each(directory).items()} == dict.fromkeys(ALL, "")
    return directory


@pytest.fixture(scope="module")
def on_4(saved_on_8: pathlib.Path) -> dict[str, Outcome]:
    """What each API restores on 4 devices without a target."""
    return run_on_devices(_restore_each, saved_on_8, devices=4)[0]


@pytest.fixture(scope="module")
def on_16(saved_on_8: pathlib.Path) -> dict[str, Outcome]:
    """What each API restores on 16 devices without a target."""
    return run_on_devices(_restore_each, saved_on_8, devices=16)[0]


@pytest.fixture(scope="module")
def from_2_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What each API restores here, without a target, of what it saved in 2 processes with 4 devices each."""
    directory = tmp_path_factory.mktemp("from_2_processes")
    for outcomes in run_on_devices(_save_each, directory, devices=4, processes=2):
        assert {name: outcome.error for name, outcome in outcomes.items()} == dict.fromkeys(ALL, "")
    return _restore_each(directory)


@pytest.fixture(scope="module")
def on_512(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many bytes each API writes, on 512 devices, on where a few arrays lie."""
    return run_on_devices(_bytes_of_layout, tmp_path_factory.mktemp("on_512"), devices=512)[0]


class TestRestoreOnFewerDevicesWithoutATarget:
    """Saved on 8 devices, restored on 4."""

    @pytest.mark.parametrize("api", STOCK)
    def test_stock_raises_an_error_that_names_no_mesh_and_no_number_of_devices(self, on_4, api):
        """v0 asks for "a target tree with the desired topology", v1 says "Got None"."""
        error = on_4[api].error
        assert error.startswith("ValueError")
        assert "Topology mismatch" in error or "Got None" in error
        assert not any(word in error for word in ("mesh", "axes", "8", "4"))

    @pytest.mark.parametrize("api", OURS)
    def test_ours_resizes_the_recorded_mesh(self, on_4, api):
        assert on_4[api].error == ""
        layout = on_4[api].value
        assert layout.axes == (("d", 1), ("m", 4))
        assert (layout.axis_types, layout.spec) == (("Explicit", "Explicit"), "P('d', 'm')")
        assert layout.device_ids == (0, 1, 2, 3)


class TestRestoreOnMoreDevicesWithoutATarget:
    """Saved on 8 devices, restored where 16 are present."""

    @pytest.mark.parametrize("api", STOCK)
    def test_stock_silently_leaves_half_of_the_devices_idle(self, on_16, api):
        assert on_16[api].error == ""
        assert on_16[api].warned == ()
        assert on_16[api].value.device_ids == tuple(range(8))

    @pytest.mark.parametrize("api", OURS)
    def test_ours_grows_the_recorded_mesh_onto_all_of_them(self, on_16, api):
        assert on_16[api].error == ""
        layout = on_16[api].value
        assert layout.axes == (("d", 4), ("m", 4))
        assert (layout.axis_types, layout.spec) == (("Explicit", "Explicit"), "P('d', 'm')")
        assert layout.device_ids == tuple(range(16))


class TestRestoreOnAsManyDevicesWithOtherIdsWithoutATarget:
    """Saved in 2 processes with 4 devices each (ids from 0 and from 2048 on), restored in one with 8."""

    @pytest.mark.parametrize("api", STOCK)
    def test_stock_raises(self, from_2_processes, api):
        assert from_2_processes[api].error.startswith("ValueError")

    @pytest.mark.parametrize("api", OURS)
    def test_ours_rebuilds_the_same_mesh_on_the_devices_that_are_here(self, from_2_processes, api):
        assert from_2_processes[api].error == ""
        restored = from_2_processes[api].value
        assert restored.axes == (("d", 2), ("m", 4))
        assert restored.axis_types == ("Explicit", "Explicit")
        assert restored.spec == str(P("d", "m"))
        assert sorted(restored.device_ids) == list(range(8))
        np.testing.assert_array_equal(restored.values, matrix())


class TestRestoreOfALeafFromAPlatformThatIsNotHere:
    """Saved on one device, whose recorded name is then that of a GPU."""

    @pytest.fixture
    def from_gpu(self, path: pathlib.Path) -> Callable[[Api], pathlib.Path]:
        def save(api: Api) -> pathlib.Path:
            api.save(path, {"w": jax.device_put(np.arange(3.0, dtype=np.float32), jax.devices()[0])})
            (file,) = path.rglob("_sharding")
            name = str(jax.devices()[0])
            assert file.read_text().count(name) == 1
            file.write_text(file.read_text().replace(name, "cuda:0"))
            return path

        return save

    def test_stock_raises_without_a_target(self, from_gpu, stock):
        assert attempt(stock.restore, from_gpu(stock)).error.startswith("ValueError")

    def test_ours_restores_what_stock_wrote_there_to_the_default_device(self, from_gpu, stock, ours):
        restored = ours.restore(from_gpu(stock))["w"]
        assert restored.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(restored, [0, 1, 2])


class TestRestoreOnTheSameDevicesWithoutATarget:
    """No row of the table: what stock does well since 0.11.26, and what this package therefore never claims."""

    def test_stock_keeps_axis_types_and_specs(self, path, stock):
        mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(EXPLICIT, AUTO))
        saved = place(mesh, matrix(), P("d", "m"))
        stock.save(path, {"w": saved})
        assert stock.restore(path)["w"].sharding == saved.sharding


# --- Where ---


class TestPathOnS3:
    """A path that begins with `s3://`; a file system in memory stands for the service."""

    @pytest.fixture(autouse=True)
    def service(self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
        # Stock makes directories below the working one before it refuses.
        monkeypatch.chdir(tmp_path)
        # Without it, nothing but `import s3fs` would be tested.
        monkeypatch.setitem(file_systems, "s3", MemoryFileSystem)
        monkeypatch.setattr(MemoryFileSystem, "store", {})
        monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])

    def test_stock_takes_it_for_a_relative_path(self, stock, mesh):
        outcome = attempt(stock.save, "s3://bucket/checkpoint", {"w": place(mesh, matrix(), P("d", "m"))})
        assert "Checkpoint path should be absolute. Got s3:/bucket/checkpoint" in outcome.error


# --- Targets on an abstract mesh ---


def _abstract(mesh: AbstractMesh, memory_kind: str | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = NamedSharding(mesh, P("d", "m"), memory_kind=memory_kind)
    return {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}


def _mesh(sizes: tuple[int, int], axis_type: AxisType) -> Mesh:
    return jax.make_mesh(sizes, ("d", "m"), axis_types=(axis_type, axis_type))


class TestAbstractTargetOutsideOfSetMesh:
    """What `jax.eval_shape` gives for a target, and no mesh in the context."""

    def test_stock_raises(self, path, stock, mesh):
        stock.save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        error = attempt(stock.restore, path, _abstract(mesh.abstract_mesh)).error
        assert error.startswith("ValueError")
        assert "set_mesh" not in error, "the error says what to do"

    def test_ours_restores_it_on_concrete_devices(self, ours, path, mesh):
        saved = place(mesh, matrix(), P("d", "m"))
        ours.save(path, {"w": saved})
        restored = ours.restore(path, _abstract(mesh.abstract_mesh))["w"]
        assert restored.sharding == saved.sharding
        np.testing.assert_array_equal(restored, matrix())


class TestAbstractTargetUnderSetMesh:
    """The same target, restored under `jax.set_mesh`."""

    def test_stock_v0_raises(self, path, mesh):
        STOCK["v0"].save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        with jax.set_mesh(mesh):
            assert attempt(STOCK["v0"].restore, path, _abstract(mesh.abstract_mesh)).error.startswith("ValueError")

    def test_stock_v1_silently_takes_the_axis_types_of_the_context(self, path, mesh):
        STOCK["v1"].save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        with jax.set_mesh(_mesh((2, 4), AUTO)):
            outcome = attempt(STOCK["v1"].restore, path, _abstract(mesh.abstract_mesh))
        assert (outcome.error, outcome.warned) == ("", ())
        assert outcome.value["w"].sharding.mesh.axis_types == (AUTO, AUTO)

    def test_stock_v1_silently_takes_the_axis_sizes_of_the_context(self, path, mesh):
        STOCK["v1"].save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        with jax.set_mesh(_mesh((4, 2), EXPLICIT)):
            outcome = attempt(STOCK["v1"].restore, path, _abstract(mesh.abstract_mesh))
        assert (outcome.error, outcome.warned) == ("", ())
        assert dict(outcome.value["w"].sharding.mesh.shape) == {"d": 4, "m": 2}

    def test_stock_v1_silently_drops_the_memory_kind(self, path, mesh):
        STOCK["v1"].save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        with jax.set_mesh(mesh):
            outcome = attempt(STOCK["v1"].restore, path, _abstract(mesh.abstract_mesh, "pinned_host"))
        assert (outcome.error, outcome.warned) == ("", ())
        assert outcome.value["w"].sharding.memory_kind == "device"

    def test_ours_restores_it_on_the_mesh_of_the_context(self, ours, path, mesh):
        saved = place(mesh, matrix(), P("d", "m"))
        ours.save(path, {"w": saved})
        with jax.set_mesh(mesh):
            assert ours.restore(path, _abstract(mesh.abstract_mesh))["w"].sharding == saved.sharding

    @pytest.mark.parametrize(
        ("sizes", "axis_type", "shown"),
        [((2, 4), AUTO, "d=2 auto, m=4 auto"), ((4, 2), EXPLICIT, "d=4 explicit, m=2 explicit")],
        ids=["other axis types", "other axis sizes"],
    )
    def test_ours_refuses_a_context_that_contradicts_the_target_and_shows_both(
        self, ours, path, mesh, sizes, axis_type, shown
    ):
        ours.save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        with jax.set_mesh(_mesh(sizes, axis_type)), pytest.raises(oxe.MeshMismatchError) as refused:
            ours.restore(path, _abstract(mesh.abstract_mesh))
        assert shown in str(refused.value)
        assert "d=2 explicit, m=4 explicit" in str(refused.value)

    def test_ours_keeps_the_memory_kind_of_the_target(self, ours, path, mesh):
        ours.save(path, {"w": place(mesh, matrix(), P("d", "m"))})
        with jax.set_mesh(mesh):
            restored = ours.restore(path, _abstract(mesh.abstract_mesh, "pinned_host"))["w"]
        assert restored.sharding.memory_kind == "pinned_host"


# --- What is lost of a layout ---


class TestArrayInPinnedHostMemory:
    """An array that was offloaded to the host, restored without a target."""

    def test_stock_silently_moves_it_to_device_memory(self, path, stock, mesh):
        stock.save(path, {"w": place(mesh, matrix(), P("d"), memory_kind="pinned_host")})
        outcome = attempt(stock.restore, path)
        assert (outcome.error, outcome.warned) == ("", ())
        assert outcome.value["w"].sharding.memory_kind == "device"

    def test_ours_keeps_it_there(self, ours, path, mesh):
        saved = place(mesh, matrix(), P("d"), memory_kind="pinned_host")
        ours.save(path, {"w": saved})
        assert ours.restore(path)["w"].sharding == saved.sharding


class TestUncommittedScalarBesideShardedArrays:
    """A step counter as `jnp.int32(5)` makes it, which JAX may move to where it is used."""

    def test_stock_commits_it_to_one_device_and_the_next_jit_raises(self, path, stock, mesh):
        stock.save(path, {"step": jnp.int32(5), "w": place(mesh, matrix(), P("d", "m"))})
        outcome = attempt(stock.restore, path)
        assert (outcome.error, outcome.warned) == ("", ())
        assert outcome.value["step"].committed
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(lambda tree: tree["w"] * tree["step"])(outcome.value)

    def test_ours_leaves_it_uncommitted_and_the_next_jit_works(self, ours, path, mesh):
        ours.save(path, {"step": jnp.int32(5), "w": place(mesh, matrix(), P("d", "m"))})
        restored = ours.restore(path)
        assert not restored["step"].committed
        np.testing.assert_array_equal(jax.jit(lambda tree: tree["w"] * tree["step"])(restored), 5 * matrix())


class TestUnreducedArray:
    """The partial sums of a contraction over a sharded dimension, not added up yet."""

    @pytest.fixture
    def partial_sums(self, mesh: Mesh) -> jax.Array:
        return pending_sum(mesh)

    def test_stock_raises_not_implemented_error(self, path, stock, partial_sums):
        assert attempt(stock.save, path, {"w": partial_sums}).error.startswith("NotImplementedError")

    def test_ours_refuses_it_by_name(self, ours, path, partial_sums):
        with pytest.raises(oxe.SaveRefusedError, match="unreduced") as refused:
            ours.save(path, {"layer": {"kernel": partial_sums}})
        assert "layer/kernel" in str(refused.value)
        assert not path.exists()


class TestArrayWithAReducedSpec:
    """An array that is the same along a mesh axis because it was reduced over it."""

    def test_stock_raises_value_error_on_save(self, path, stock, mesh):
        error = attempt(stock.save, path, {"w": place(mesh, matrix(), P("d", reduced={"m"}))}).error
        assert error.startswith("ValueError")
        assert "reduced" in error

    def test_ours_keeps_the_spec(self, ours, path, mesh):
        saved = place(mesh, matrix(), P("d", reduced={"m"}))
        ours.save(path, {"w": saved})
        restored = ours.restore(path)["w"]
        assert restored.sharding == saved.sharding
        assert restored.sharding.spec.reduced == {"m"}


# --- What is lost of a tree ---


@pytest.mark.parametrize("kind", ["jax.Array", "NumPy array"])
class TestArrayWithoutElements:
    """A shape with a zero in it."""

    @staticmethod
    def _empty(kind: str, mesh: Mesh) -> Any:
        values = np.zeros((0, 3), np.float32)
        return place(mesh, values, P("d")) if kind == "jax.Array" else values

    def test_stock_refuses_it(self, path, stock, mesh, kind):
        error = attempt(stock.save, path, {"w": self._empty(kind, mesh)}).error
        assert "Cannot save arrays with zero size" in error

    def test_ours_keeps_shape_dtype_and_sharding(self, ours, path, mesh, kind):
        saved = self._empty(kind, mesh)
        ours.save(path, {"w": saved})
        restored = ours.restore(path)["w"]
        assert (restored.shape, restored.dtype, type(restored)) == (saved.shape, saved.dtype, type(saved))
        assert getattr(restored, "sharding", None) == getattr(saved, "sharding", None)


class TestKeysThatCollideInStorage:
    """Orbax joins the keys of a leaf by dots: 'a.b' and 'a', 'b' become one name."""

    @staticmethod
    def _tree() -> dict[str, Any]:
        return {"a.b": np.arange(3.0), "a": {"b": 10 + np.arange(3.0)}}

    def test_stock_silently_gives_both_leaves_one_value(self, path, stock):
        outcome = attempt(stock.save, path, self._tree())
        assert (outcome.error, outcome.warned) == ("", ())
        outcome = attempt(stock.restore, path)
        assert (outcome.error, outcome.warned) == ("", ())
        np.testing.assert_array_equal(outcome.value["a.b"], outcome.value["a"]["b"])

    def test_ours_refuses_the_save_and_names_both(self, ours, path):
        with pytest.raises(oxe.SaveRefusedError) as refused:
            ours.save(path, self._tree())
        assert "a.b" in str(refused.value)
        assert "a/b" in str(refused.value)
        assert not path.exists()


class TestContainersWithoutATarget:
    """Tuples, NamedTuples and dicts with int keys."""

    @staticmethod
    def _tree() -> dict[str, Any]:
        return {
            "tuple": (np.ones(1), np.ones(1)),
            "moments": Moments(np.ones(1), np.ones(1)),
            "layers": {0: np.ones(1)},
        }

    def test_stock_silently_gives_lists_dicts_and_str_keys(self, path, stock):
        stock.save(path, self._tree())
        outcome = attempt(stock.restore, path)
        assert (outcome.error, outcome.warned) == ("", ())
        assert type(outcome.value["tuple"]) is list
        assert type(outcome.value["moments"]) is dict
        assert list(outcome.value["layers"]) == ["0"]

    def test_ours_gives_back_what_was_saved(self, ours, path):
        ours.save(path, self._tree())
        assert jax.tree.structure(ours.restore(path)) == jax.tree.structure(self._tree())


# --- Bytes ---


def _flipped_bits(file: pathlib.Path, offset: int, count: int) -> Iterator[int]:
    """Flips one bit at a time, in each of `count` bytes from `offset` on; the file is whole again afterwards."""
    whole = file.read_bytes()
    for byte in range(offset, offset + count):
        file.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << byte % 8]) + whole[byte + 1 :])
        yield byte
    file.write_bytes(whole)


def _find(path: pathlib.Path, wanted: bytes) -> tuple[pathlib.Path, int]:
    """The one file that holds the bytes, and where."""
    found = [(file, file.read_bytes().find(wanted)) for file in path.rglob("*") if file.is_file()]
    ((file, offset),) = [(file, offset) for file, offset in found if offset >= 0]
    return file, offset


class TestOneFlippedBit:
    """A bit of the values that changed on the way to the disk, on it, or back."""

    @pytest.mark.parametrize("kind", ["jax.Array", "NumPy array"])
    def test_stock_silently_gives_wrong_values_of_an_array(self, path, stock, kind):
        # Random bits: no compressor finds anything in them, and stores them as they are.
        values = np.random.default_rng(0).integers(0, 2**32, (64, 64), dtype=np.uint32)
        stock.save(path, {"w": jnp.asarray(values) if kind == "jax.Array" else values})
        file, offset = _find(path, values.tobytes()[1000:1064])
        outcomes = [attempt(stock.restore, path) for _ in _flipped_bits(file, offset, 8)]
        silent = [outcome.value["w"] for outcome in outcomes if (outcome.error, outcome.warned) == ("", ())]
        assert any(not np.array_equal(value, values) for value in silent)
        np.testing.assert_array_equal(stock.restore(path)["w"], values)

    def test_stock_v1_silently_gives_wrong_text_of_a_string(self, path):
        """v0's `StandardCheckpointer` takes no strings."""
        _save_v1(path, {"name": "a text of some length"})
        file, offset = _find(path, b"a text of some length")
        outcomes = [attempt(ocp1.load, path) for _ in _flipped_bits(file, offset, 8)]
        silent = [outcome.value["name"] for outcome in outcomes if (outcome.error, outcome.warned) == ("", ())]
        assert any(text != "a text of some length" for text in silent)

    @pytest.mark.parametrize("kind", ["jax.Array", "NumPy array"])
    def test_ours_refuses_the_array_and_so_does_stock(self, ours, path, stock, kind):
        values = np.random.default_rng(0).integers(0, 2**32, (64, 64), dtype=np.uint32)
        ours.save(path, {"w": jnp.asarray(values) if kind == "jax.Array" else values})
        file, offset = _find(path, values.tobytes()[1000:1064])
        for _ in _flipped_bits(file, offset, 8):
            with pytest.raises(oxe.FormatError, match="cannot read w"):
                ours.restore(path)
            assert attempt(stock.restore, path).error
        np.testing.assert_array_equal(ours.restore(path)["w"], values)

    def test_ours_refuses_the_text(self, ours, path):
        ours.save(path, {"name": "a text of some length"})
        file, offset = _find(path, b"a text of some length")
        for _ in _flipped_bits(file, offset, 8):
            with pytest.raises(oxe.FormatError, match=r"cannot trust _strings\.json"):
                ours.restore(path)
        assert ours.restore(path) == {"name": "a text of some length"}


class TestLayoutOfSmallArraysOnManyDevices:
    """Where arrays lie on a mesh of 512 devices, in bytes."""

    @pytest.mark.parametrize("api", STOCK)
    def test_stock_names_every_device_again_for_each_array(self, on_512, api):
        """Measured: 15 bytes for a device and array, so 8 MB for 1000 arrays."""
        assert on_512[api] > 8 * FEW_ARRAYS * 512

    @pytest.mark.parametrize("api", OURS)
    def test_ours_does_not(self, on_512, api):
        assert on_512[api] < min(on_512["v0"], on_512["v1"]) / 10
