"""Trials of `damage`: checkpoints that hold everything, and every reader let loose on what is damaged of them.

`write` and `try_out` run in processes of their own, through `run_on_devices`: a reader that never ends, or asks for all
of the memory, ends its process, and is told from the log that the process leaves behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pathlib
import random
import re
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import fronts
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import tensorstore as ts
from damage import (
    DELETE,
    FLIP,
    LOST,
    RAISED,
    RAW,
    RIGHT,
    WRONG,
    Contents,
    Damage,
    Outcome,
    Reading,
    Region,
    Verdict,
    done,
    explanation,
    read_contents,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stock_readers import named_leaves
from trees import Moments, host_state, place

import orbax_explicit as oxe
from orbax_explicit import v1 as oxe1
from orbax_explicit._records import path_names, path_text
from orbax_explicit.testing import DeviceProcessError, run_on_devices

EXPLICIT = (AxisType.Explicit, AxisType.Explicit)

# One reader takes a tenth of a second. What it may ask for beside what the process has before any damage is done.
SECONDS_AT_MOST = 30
NBYTES_AT_MOST = 4 << 30


# What is saved.


def make_mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=EXPLICIT)


def state(mesh: Mesh) -> dict[str, Any]:
    """Arrays in several chunks, tiny ones, ones of size zero, keys, and values on the host of every type."""
    rng = np.random.default_rng(0)

    def normals(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    keys = jax.random.split(jax.random.key(7), 8)
    return {
        "float32": place(mesh, normals(128, 64), P("d", "m")),
        "bfloat16": place(mesh, normals(128, 128, dtype=jnp.bfloat16), P("d", "m")),
        "rows": place(mesh, normals(64, 48), P(("d", "m"))),
        "replicated": {
            "float32": place(mesh, normals(48, 40)),
            "bfloat16": place(mesh, normals(64, 40, dtype=jnp.bfloat16)),
        },
        "compressible": (
            place(mesh, np.zeros((128, 64), np.float32), P("m")),
            place(mesh, np.full((64, 64), 1.5), P()),
        ),
        "tokens": place(mesh, rng.integers(0, 50_000, (64, 64), np.int32), P("d", "m")),
        "tiny": [
            place(mesh, normals(8), P("m")),
            place(mesh, normals(8, 8), P("d", "m")),
            place(mesh, normals(8, 8, dtype=jnp.bfloat16), P("m")),
            place(mesh, np.float32(2.5), P()),
        ],
        "empty": place(mesh, np.zeros((0, 3), np.float32), P("d")),
        "keys": jax.jit(lambda: keys, out_shardings=NamedSharding(mesh, P("d")))(),
        "key": jax.random.key(3, impl="rbg"),
        "step": jnp.int32(5),
        "moments": Moments(mean=place(mesh, normals(8, 8), P("m")), variance=(jnp.float32(1), [None])),
        "by_int": {0: place(mesh, normals(16, 8), P("d")), 1: np.arange(6)},
        "numpy": {"float64": rng.standard_normal(400), "bfloat16": normals(40, 30, dtype=jnp.bfloat16)},
        "texts": ["a text", "another one", "naïve"],
        "host": host_state(),
    }


# Larger arrays are in several chunks, none of them so small that OCDBT keeps it in a node, with a checksum of its own.
CHUNK_NBYTES = 2048


def save_args(saved: Any) -> Any:
    return jax.tree.map(
        lambda leaf: ocp.SaveArgs(chunk_byte_size=CHUNK_NBYTES) if isinstance(leaf, jax.Array) else None, saved
    )


@dataclass(frozen=True)
class Variant:
    """One way to write the state.

    Attributes:
        options: Arguments of the handler.
        writer: Which of `fronts.FRONTS` writes it and reads it.
        processes: How many processes write it; they have eight devices together.
        without: Readers that cannot read it, damaged or not.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    writer: str = "StandardCheckpointer"
    processes: int = 1
    without: tuple[str, ...] = ()

    @property
    def front(self) -> fronts.Front:
        """Who writes and reads it."""
        return fronts.FRONTS[self.writer]

    @property
    def item(self) -> str:
        """The directory of the item below the checkpoint."""
        item = self.front.item(pathlib.Path())
        return "" if item == pathlib.Path() else str(item)


VARIANTS = {
    "default": Variant(),
    "uncompressed": Variant({"compression": None}),
    "Zarr 3": Variant({"use_zarr3": True}),
    "Zarr 3, zstd": Variant({"use_zarr3": True, "compression": "zstd"}),
    "no OCDBT": Variant({"use_ocdbt": False}),
    "no OCDBT, Zarr 3": Variant({"use_ocdbt": False, "use_zarr3": True}),
    "a manager's step": Variant(writer="CheckpointManager"),
    "v1": Variant(writer="v1"),
    # Stock Orbax asks for the very devices that saved.
    "two processes": Variant(processes=2, without=("stock",)),
}
UNCHECKED = Variant({"checksum": None, "compression": None, "use_ocdbt": False})


def write(variant: Variant, root: pathlib.Path) -> None:
    """Saves the state under `root`. Every process calls it."""
    saved = state(make_mesh())
    if variant.writer == "CheckpointManager":
        with ocp.CheckpointManager(root, item_handlers=oxe.ExplicitCheckpointHandler(**variant.options)) as manager:
            manager.save(fronts.STEP, args=oxe.args.ExplicitSave(saved, save_args=save_args(saved)))
    elif variant.writer == "v1":
        base = ocp1.Context()
        base.array.saving.scoped_storage_options_creator = lambda _, leaf: (
            type(base.array.saving).StorageOptions(chunk_byte_size=CHUNK_NBYTES)
            if isinstance(leaf, jax.Array)
            else None
        )
        with oxe1.context(base=base, **variant.options):
            oxe1.save(root, saved)
    else:
        with oxe.StandardCheckpointer(**variant.options) as checkpointer:
            checkpointer.save(root, saved, save_args=save_args(saved))


# Who reads.


def readers(variant: Variant, saved: Any) -> dict[str, Callable[[pathlib.Path], Any]]:
    """Each way to read the checkpoint whole."""
    mesh, turned = make_mesh(), jax.make_mesh((4, 2), ("d", "m"), axis_types=EXPLICIT)
    abstract = AbstractMesh((4, 2), ("d", "m"), axis_types=EXPLICIT)
    swapped = target(saved, lambda array: NamedSharding(abstract, swapped_spec(array)))
    everywhere = target(saved, lambda array: NamedSharding(mesh, P()))
    front = variant.front
    read_stock = {"CheckpointManager": read_stock_step, "v1": read_stock_v1}.get(variant.writer, read_stock_item)
    every = {
        "same mesh": front.restore,
        "resharded": lambda root: front.restore(root, swapped, turned),
        "replicated": lambda root: front.restore(root, everywhere),
        "numpy": lambda root: front.restore(root, None, None, oxe.RestorePolicy(arrays="numpy")),
        "stock": lambda root: read_stock(root, None),
        "stock, target": lambda root: read_stock(root, everywhere),
    }
    return {name: reader for name, reader in every.items() if name not in variant.without}


def target(saved: Any, sharding: Callable[[jax.Array], NamedSharding]) -> Any:
    """A target like the state, with these shardings; values on the host stay what they are."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf))
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        saved,
    )


def swapped_spec(array: jax.Array) -> P:
    """The spec on the other dimensions, where there are two to swap."""
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()
    return P(*reversed((*spec, *(None,) * (2 - len(spec))))) if array.ndim == 2 and array.size else P(*spec)


def read_stock_item(root: pathlib.Path, wanted: Any) -> Any:
    """With stock's StandardCheckpointer; into a target with its PyTreeCheckpointer, which takes texts in one."""
    if wanted is None:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(root)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(root, args=pytree_restore(wanted))


def read_stock_step(root: pathlib.Path, wanted: Any) -> Any:
    args = ocp.args.StandardRestore() if wanted is None else pytree_restore(wanted)
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(fronts.STEP, args=args)


def read_stock_v1(root: pathlib.Path, wanted: Any) -> Any:
    return ocp1.load(root, as_stock_knows(wanted))


def pytree_restore(wanted: Any) -> ocp.args.PyTreeRestore:
    wanted = as_stock_knows(wanted)
    return ocp.args.PyTreeRestore(item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))


def as_stock_knows(wanted: Any) -> Any:
    """With the values on the host as arrays, which stock Orbax reads them as, but for those of which it knows the type."""

    def known(leaf: Any) -> Any:
        if isinstance(leaf, bytes):
            return np.frombuffer(leaf, np.uint8)
        return np.asarray(leaf) if isinstance(leaf, complex | np.generic) else leaf

    return jax.tree.map(known, wanted)


# What is right.


@dataclass(frozen=True)
class Leaf:
    """All that can be wrong of a leaf.

    Attributes:
        type: Its Python type.
        form: Shape and dtype of an array.
        layout: Sharding and commitment of a `jax.Array`.
        value: Its bytes, or its text.
        shards: The bytes of each shard of a `jax.Array`, replicas as well.
    """

    type: type
    form: tuple[Any, ...]
    layout: tuple[Any, ...]
    value: bytes
    shards: tuple[bytes, ...] = ()

    def is_other_array(self, found: Leaf) -> bool:
        """Whether both are arrays, and not of the same elements; those of keys may come back as their data."""
        if not all(issubclass(leaf.type, jax.Array | np.ndarray) for leaf in (self, found)):
            return False
        are_keys = self.form[1].startswith("key<")
        return self.value != found.value or (self.form != found.form and not are_keys)


def look_at(leaf: Any) -> Leaf:
    if not isinstance(leaf, jax.Array):
        array = isinstance(leaf, np.ndarray | np.generic)
        form = (leaf.shape, str(leaf.dtype)) if array else ()
        return Leaf(type(leaf), form, (), leaf.tobytes() if array else repr(leaf).encode())
    form = (leaf.shape, str(leaf.dtype))
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = tuple(np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
    layout = (leaf.sharding, leaf.sharding.memory_kind, leaf.committed)
    return Leaf(jax.Array, form, layout, np.asarray(leaf).tobytes(), shards)


@dataclass(frozen=True)
class Expected:
    """What a reader gives where nothing is damaged.

    Attributes:
        structure: The structure of the tree.
        leaves: The leaves by name.
    """

    structure: Any
    leaves: Mapping[str, Leaf]

    @classmethod
    def of(cls, tree: Any) -> Expected:
        return cls(jax.tree.structure(tree), {name: look_at(leaf) for name, leaf in named_leaves(tree).items()})

    def check_values(self, saved: Any) -> None:
        """Fails unless every array holds what was saved, so that a reader is not measured by its own errors."""
        for name, leaf in named_leaves(saved).items():
            if isinstance(leaf, jax.Array | np.ndarray):
                assert self.leaves[name].value == look_at(leaf).value, name

    def judge(self, tree: Any, *, is_ours: bool) -> Reading:
        """Compares; stock Orbax may lose anything that is no array, and the layout of what is."""
        found = Expected.of(tree)
        wrong = [name for name, leaf in self.leaves.items() if found.leaves.get(name) != leaf]
        if found.structure == self.structure and not wrong and found.leaves.keys() == self.leaves.keys():
            return Reading(RIGHT)
        if is_ours:
            return Reading(WRONG, f"{wrong or 'the structure'}")
        arrays = [
            name for name in wrong if name in found.leaves and self.leaves[name].is_other_array(found.leaves[name])
        ]
        return Reading(WRONG, f"{arrays}") if arrays else Reading(LOST, f"{wrong or 'the structure'}")


# Where damage lies.


def map_regions(root: pathlib.Path, item: str, contents: Contents) -> dict[str, list[Region]]:
    """What lies where in the files that hold a part of one leaf, or that nobody reads."""
    manifest = oxe.read_manifest(root / item)
    leaves = {".".join(path_names(path)): path_text(path) for path in manifest.leaves}
    prefix = f"{item}/" if item else ""
    regions: dict[str, list[Region]] = {}
    if f"{prefix}manifest.ocdbt" in contents:
        data = [name for name in contents if re.search(r"(^|/)d/[^/]+$", name)]
        found = _ocdbt_regions(ts.KvStore.open(f"file://{root / item}/").result(), leaves)
        for name in data:
            read = found.get(name.removeprefix(prefix), [])
            regions[name] = [*read, Region("what the merge left over", stop=len(contents[name]), is_read=False)]
        return regions
    for name in contents:
        folder, _, rest = name.removeprefix(prefix).partition("/")
        if rest and folder in leaves:
            length = len(contents[name])
            if not length:
                regions[name] = [Region("the chunk of an array of size zero", leaves[folder], is_read=False)]
            elif rest in (".zarray", "zarr.json"):
                regions[name] = [Region("Zarr metadata", leaves[folder], 0, length)]
            else:
                regions[name] = [Region("a chunk", leaves[folder], 0, length, is_chunk=True)]
    return regions


def _ocdbt_regions(base: ts.KvStore, leaves: Mapping[str, str]) -> dict[str, list[Region]]:
    """The nodes and values that the newest version of a database refers to, by the files in which they lie."""
    regions: dict[str, list[Region]] = {}

    def add(location: str, text: str, leaf: str | None = None) -> None:
        _, *path, start, length = location.split(":")
        region = Region(text, leaf, int(start), int(start) + int(length), is_chunk=leaf is not None)
        regions.setdefault("".join(path), []).append(region)

    nodes = [ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]]
    while nodes:
        add(node := nodes.pop(), "a node of OCDBT")
        for entry in ts.ocdbt.dump(base, node).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                key = entry["key"].decode()
                add(entry["indirect_value"], f"chunk {key}", leaves[key.split("/")[0]])
    return regions


def region_of(damage: Damage, contents: Contents, regions: Mapping[str, Sequence[Region]]) -> Region:
    """Where a flipped bit lies; of what is cut off or deleted, the only thing in it that anybody reads."""
    length = len(contents[damage.file])
    here = regions.get(damage.file)
    if here is None:
        return Region("the file", stop=length)
    if damage.kind == FLIP:
        return next(region for region in here if region.start <= damage.at // 8 < region.stop)
    lost = [region for region in here if damage.kind == DELETE or region.stop > damage.at]
    read = [region for region in lost if region.is_read]
    if len(read) > 1:
        return Region("several of what lies in the file", stop=length)
    return (read or lost)[0]


# Trying.


def try_out(
    name: str, variant: Variant, root: pathlib.Path, damages: Sequence[Damage], log: pathlib.Path, first: int = 0
) -> None:
    """Does each damage to the checkpoint, from the one numbered `first` on, and writes to `log` what came of it.

    A line says that a damage is about to be done, and the next what came of it: where the process dies, the last line
    says of what.
    """
    saved = state(make_mesh())
    every = readers(variant, saved)
    expected = {}
    with warnings.catch_warnings(), log.open("a") as lines, _Watch(lines) as watch:
        warnings.simplefilter("ignore")  # Stock warns of every restore without a target.
        for reader, read in every.items():
            for _ in range(2):  # The first one compiles.
                expected[reader] = Expected.of(read(root))
            expected[reader].check_values(saved)
        contents = read_contents(root)
        regions = map_regions(root, variant.item, contents)
        assert _verdict(root / variant.item).ok
        _limit_memory()
        for number, damage in list(enumerate(damages))[first:]:
            _write_line(lines, {"number": number})
            with done(damage, root, contents):
                readings = {}
                for reader, read in every.items():
                    with watch.over(f"{reader}: {damage}"):
                        readings[reader] = _read(read, root, expected[reader], is_ours=not reader.startswith("stock"))
                with watch.over(f"verify: {damage}"):
                    verdict = _verdict(root / variant.item)
            region = region_of(damage, contents, regions)
            outcome = Outcome(name, damage, variant.item, region, readings, verdict)
            if outcome.is_harmless:
                why = explanation(damage, region, contents[damage.file])
                outcome = Outcome(name, damage, variant.item, region, readings, verdict, why)
            _write_line(lines, {"number": number, "outcome": asdict(outcome)})


def _read(read: Callable[[pathlib.Path], Any], root: pathlib.Path, expected: Expected, *, is_ours: bool) -> Reading:
    start = time.perf_counter()
    try:
        reading = expected.judge(read(root), is_ours=is_ours)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is asked
        # v1 itself looks for Orbax's list of the leaves before it asks a handler.
        known = oxe.OrbaxExplicitError | FileNotFoundError | ocp1.errors.InvalidLayoutError
        is_known = not is_ours or isinstance(error, known)
        affects = {name for problem in getattr(error, "problems", ()) for name in problem.affects}
        reading = Reading(
            RAISED if is_known else RAW, f"{type(error).__name__}: {error}"[:2000], 0, tuple(sorted(affects))
        )
    return Reading(reading.result, reading.detail, time.perf_counter() - start, reading.affects)


def _verdict(item: pathlib.Path) -> Verdict:
    start = time.perf_counter()
    try:
        report = oxe.verify(item)
    except Exception as error:  # noqa: BLE001 - it is to raise none
        return Verdict(None, detail=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - start)
    files = tuple(str(problem.file) for problem in report.problems if problem.file)
    leaves = tuple(leaf for problem in report.problems for leaf in problem.leaves)
    return Verdict(report.ok, files, leaves, str(report.problems)[:2000], time.perf_counter() - start)


def _write_line(lines: Any, entry: Any) -> None:
    lines.write(json.dumps(entry) + "\n")
    lines.flush()


def _limit_memory() -> None:
    """Has the system refuse what damage makes a reader ask for beyond all reason."""
    status = pathlib.Path("/proc/self/status").read_text()
    size = re.search(r"^VmSize:\s+(\d+) kB", status, re.MULTILINE)
    assert size is not None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(size[1]) * 1024 + NBYTES_AT_MOST, hard))


class _Watch:
    """Ends the process where a reader takes too long, and says in the log which one it was."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._what = ""
        self._deadline = float("inf")
        self._stopped = threading.Event()

    def __enter__(self) -> _Watch:
        threading.Thread(target=self._wait, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        self._what, self._deadline = what, time.monotonic() + SECONDS_AT_MOST
        try:
            yield
        finally:
            self._deadline = float("inf")

    def _wait(self) -> None:
        while not self._stopped.wait(0.2):
            if time.monotonic() > self._deadline:
                _write_line(self._lines, {"died": f"no end after {SECONDS_AT_MOST} s: {self._what}"})
                faulthandler.dump_traceback()
                os._exit(1)


def read_log(log: pathlib.Path, name: str, variant: Variant, damages: Sequence[Damage]) -> list[Outcome]:
    """What the log of `try_out` tells; of the last damage, if the process died of it, just that."""
    outcomes, begun, died = [], None, ""
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if "outcome" in entry:
            outcomes.append(_outcome(entry["outcome"]))
            begun = None
        elif "number" in entry:
            if begun is not None:
                outcomes.append(Outcome(name, damages[begun], variant.item, died=died or "killed"))
                died = ""
            begun = entry["number"]
        else:
            died = entry["died"]
    if begun is not None:
        outcomes.append(Outcome(name, damages[begun], variant.item, died=died or "killed"))
    return outcomes


def _outcome(entry: dict[str, Any]) -> Outcome:
    def made(cls: Any, values: dict[str, Any]) -> Any:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    parts = {
        "damage": made(Damage, entry["damage"]),
        "region": made(Region, entry["region"]),
        "readings": {name: made(Reading, reading) for name, reading in entry["readings"].items()},
        "verdict": made(Verdict, entry["verdict"]),
    }
    return Outcome(**{**entry, **parts})


Choice: TypeAlias = Callable[[Contents, random.Random], list[Damage]]
"""What damage to do to a checkpoint."""


def trials(name: str, variant: Variant, root: pathlib.Path, choose: Choice, seed: int) -> list[Outcome]:
    """Writes a checkpoint under `root` and tries what was chosen, however many processes die of it."""
    checkpoint, log = root / "checkpoint", root / "log"
    run_on_devices(write, variant, checkpoint, devices=8 // variant.processes, processes=variant.processes)
    damages = choose(read_contents(checkpoint), random.Random(seed))
    outcomes: list[Outcome] = []
    while len(outcomes) < len(damages):
        before = len(outcomes)
        try:
            arguments = (name, variant, checkpoint, damages, log, before)
            run_on_devices(try_out, *arguments, devices=8, timeout_seconds=24 * 3600)
        except DeviceProcessError:
            outcomes = read_log(log, name, variant, damages) if log.exists() else []
            if len(outcomes) == before:  # No damage had been done yet.
                raise
        else:
            outcomes = read_log(log, name, variant, damages)
    return outcomes


def trials_here(variants: Mapping[str, tuple[Variant, Choice]], root: pathlib.Path, seed: int) -> list[Outcome]:
    """As `trials`, of several variants in this very process, which dies if any reader does."""
    outcomes = []
    for number, (name, (variant, choose)) in enumerate(variants.items()):
        checkpoint, log = root / f"{number}", root / f"{number}.log"
        write(variant, checkpoint)
        damages = choose(read_contents(checkpoint), random.Random(seed))
        try_out(name, variant, checkpoint, damages, log)
        outcomes += read_log(log, name, variant, damages)
    return outcomes
