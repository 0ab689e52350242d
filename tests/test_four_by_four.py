"""Stock Orbax and this package, v0 and v1: each writes, each reads what each wrote.

Where stock Orbax reads, this package cannot be imported. The table of `docs/guide.md` says what this file holds.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fronts
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
import stock_readers
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from stock_readers import LOADERS, Loaded, Seen
from trees import matrix, place

from orbax_explicit import v1 as oxe1
from orbax_explicit.testing import run_on_devices

# The fixtures start processes; with several workers, one of them is to have all tests of this file.
pytestmark = pytest.mark.xdist_group("four by four")


WRITERS: Mapping[str, Callable[[pathlib.Path, Any], None]] = {
    "stock v0": fronts.save_stock,
    "stock v1": ocp1.save,
    "ours v0": fronts.save,
    "ours v1": oxe1.save,
}
READERS = {**LOADERS, "ours v0": fronts.restore, "ours v1": oxe1.load}
OURS = {name: load for name, load in READERS.items() if name.startswith("ours")}

VALUES, LAYOUT = "values", "mesh, axis types and specs"
MEMORY, UNCOMMITTED = "memory kinds", "uncommitted arrays"
CONTAINERS = "tuples and int keys"
EVERYTHING = {VALUES, LAYOUT, MEMORY, UNCOMMITTED, CONTAINERS}


def kept_by(writer: str, reader: str) -> set[str]:
    """What comes back without a target on the same devices: all of it, where this package wrote and reads."""
    return EVERYTHING if writer in OURS and reader in OURS else {VALUES, LAYOUT}


def make_state(mesh: Mesh) -> dict[str, Any]:
    return {
        "layers": ({"w": place(mesh, matrix(), P("d", "m"))}, {"w": place(mesh, -matrix(), P(("d", "m"), None))}),
        "by_int": {0: place(mesh, matrix(dtype=jnp.bfloat16), P(None, "m"))},
        "pinned": place(mesh, matrix(), P("m"), memory_kind="pinned_host"),
        "one": jax.device_put(matrix(), jax.devices()[3]),
        "step": jnp.int32(5),
        "numpy": np.arange(3),
        "int": 3,
    }


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """What each of them can write."""
    return make_state(jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Auto)))


@pytest.fixture(scope="module")
def written(tmp_path_factory, state) -> dict[str, pathlib.Path]:
    """Where each of them wrote it."""
    root = tmp_path_factory.mktemp("four_by_four")
    for name, save in WRITERS.items():
        save(root / name, state)
    return {name: root / name for name in WRITERS}


@pytest.fixture(scope="module")
def loaded(written) -> dict[str, dict[str, Loaded]]:
    """What each made of what each wrote, by the writer."""
    (stock,) = run_on_devices(
        stock_readers.load_where_only_stock_is, written, devices=8, hidden_modules=("orbax_explicit",)
    )
    return {name: {**stock[name], **stock_readers.load_each(OURS, path)} for name, path in written.items()}


def what_is_kept(loaded: Loaded, state: Any) -> set[str]:
    """Which of the things in the table came back."""
    expected = {name: stock_readers._look_at_leaf(leaf) for name, leaf in stock_readers.named_leaves(state).items()}
    assert loaded.leaves.keys() == expected.keys()
    kept = set()
    if all(_is_same_value(loaded.leaves[name], leaf) for name, leaf in expected.items()):
        kept.add(VALUES)
    if all(_without_kind(loaded.leaves[name].layout) == _without_kind(leaf.layout) for name, leaf in expected.items()):
        kept.add(LAYOUT)
    if all(_kind(loaded.leaves[name].layout) == _kind(leaf.layout) for name, leaf in expected.items()):
        kept.add(MEMORY)
    if loaded.uncommitted == ("step",):
        kept.add(UNCOMMITTED)
    if loaded.structure == str(jax.tree.structure(state)):
        kept.add(CONTAINERS)
    return kept


def _is_same_value(seen: Seen, expected: Seen) -> bool:
    same_type = (seen.type, seen.dtype) == (expected.type, expected.dtype)
    return same_type and np.array_equal(np.asarray(seen.value), np.asarray(expected.value))


def _without_kind(where: Any) -> Any:
    return where[:-1] if where is not None else None


def _kind(where: Any) -> Any:
    return where[-1] if where is not None else None


every_pair = pytest.mark.parametrize(
    ("writer", "reader"),
    [pytest.param(writer, reader, id=f"{writer} wrote, {reader} reads") for writer in WRITERS for reader in READERS],
)


@every_pair
def test_what_one_wrote_another_reads(loaded, state, writer, reader):
    """Without a target: exactly what the table says, nothing less and nothing more."""
    result = loaded[writer][reader]
    assert not result.error
    assert what_is_kept(result, state) == kept_by(writer, reader)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_what_one_wrote_another_reads_into_the_state_itself(written, state, writer, reader):
    """A target of concrete arrays says all there is to say: values, layouts and memory kinds come back behind each."""
    result = stock_readers.look_at_load(READERS[reader], written[writer], state)
    assert not result.error
    assert {VALUES, LAYOUT, MEMORY, CONTAINERS} <= what_is_kept(result, state)


def flips(path: pathlib.Path, wanted: bytes) -> Iterator[None]:
    """Flips a bit in each of a few bytes that are stored as they are; the file is whole again afterwards."""
    ((file, offset),) = [
        (file, file.read_bytes().find(wanted))
        for file in path.rglob("*")
        if file.is_file() and wanted in file.read_bytes()
    ]
    whole = file.read_bytes()
    for byte in range(offset, offset + 4):
        file.write_bytes(whole[:byte] + bytes([whole[byte] ^ 16]) + whole[byte + 1 :])
        yield
    file.write_bytes(whole)


@every_pair
def test_damage_is_noticed_where_this_package_wrote(tmp_path, writer, reader):
    """By whoever reads. Of what stock Orbax wrote, one of these flips gives wrong values to everyone."""
    # Random bits: no compressor finds anything in them, and stores them as they are.
    values = np.random.default_rng(0).integers(0, 2**32, (64, 64), dtype=np.uint32)
    WRITERS[writer](tmp_path / "a", {"w": jnp.asarray(values)})
    results = [
        stock_readers.look_at_load(READERS[reader], tmp_path / "a")
        for _ in flips(tmp_path / "a", values.tobytes()[1000:1016])
    ]
    wrong = [result for result in results if not result.error and not _holds(result, values)]
    assert bool(wrong) == (writer not in OURS)
    if writer in OURS:
        assert all(result.error for result in results)


def _holds(result: Loaded, values: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(result.leaves["w"].value, values)


def test_the_guide_has_the_table():
    """Row by row."""
    guide = (pathlib.Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    for writer in WRITERS:
        cells = ["all" if kept_by(writer, reader) == EVERYTHING else "values, layouts" for reader in READERS]
        assert f"| {writer} | {' | '.join(cells)} |" in guide
