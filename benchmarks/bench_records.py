"""How long it takes to encode and to decode what is recorded of a tree, and how many bytes that is.

    python benchmarks/bench_records.py [--check] [--repeats N]

Two trees of each size. "model" is a transformer: layers that are alike, a dozen layouts, paths such as
`params/layers_12/attention/query/kernel`. "distinct" is the worst case: one dict in which no two arrays have a
path, a shape or a sharding object in common.

With `--check` the program fails unless 100,000 arrays on 65,536 devices are encoded in less than a second and
decoded in less than a second, in no more than 40 bytes an array beyond its path. Records alone: without JAX.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import math
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import TypeVar

from machine import date_line, machine_line, versions_line

# The root of the package imports JAX. What is measured here must not need it, so it is imported without the root.
sys.path.append(str(pathlib.Path(__file__).parents[1]))
_root = importlib.util.find_spec("orbax_explicit")
assert _root is not None
_package = types.ModuleType("orbax_explicit")
_package.__path__ = list(_root.submodule_search_locations or ())
sys.modules["orbax_explicit"] = _package

from orbax_explicit import _wire  # noqa: E402  # after the root was replaced, as the next one
from orbax_explicit._records import (  # noqa: E402
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    SpecRecord,
    Tree,
    iterate_containers,
)

T = TypeVar("T")

ARRAYS = (10, 1_000, 100_000)
DEVICES = (8, 512, 65_536)
MAX_SECONDS = 1.0
MAX_NBYTES_AN_ARRAY = 40

# Of one layer: path, shape, partitions.
LAYER: tuple[tuple[str, tuple[int, ...], tuple[Partition, ...]], ...] = (
    ("attention/query/kernel", (4096, 32, 128), ("data", "model")),
    ("attention/query/bias", (32, 128), ("model",)),
    ("attention/key/kernel", (4096, 8, 128), ("data", "model")),
    ("attention/value/kernel", (4096, 8, 128), ("data", "model")),
    ("attention/out/kernel", (32, 128, 4096), ("model", None, "data")),
    ("attention/out/bias", (4096,), (None,)),
    ("mlp/up/kernel", (4096, 16384), ("data", "model")),
    ("mlp/gate/kernel", (4096, 16384), ("data", "model")),
    ("mlp/down/kernel", (16384, 4096), ("model", "data")),
    ("norm/scale", (4096,), ()),
)


def mesh_of(devices: int) -> MeshRecord:
    """A (data, model) mesh whose devices are in the order of a torus: neighbours in blocks of 2 x 2."""
    model = 2 ** (int(math.log2(devices)) // 2)
    data = devices // model
    ids = tuple(
        (row // 2 * (model // 2) + column // 2) * 4 + row % 2 * 2 + column % 2
        for row in range(data)
        for column in range(model)
    )
    return MeshRecord(
        axis_names=("data", "model"),
        axis_sizes=(data, model),
        axis_types=("explicit", "explicit"),
        device_ids=ids,
        platform="tpu",
    )


def manifest_of(tree: Tree, devices: int) -> Manifest:
    inventory = Inventory(
        platform="tpu",
        device_kind="TPU v5p",
        device_ids=tuple(range(devices)),
        process_indices=tuple(i // 4 for i in range(devices)),
        memory_kinds=("device", "pinned_host"),
        default_memory_kind="device",
    )
    return Manifest(tree=tree, inventory=inventory, writer=(("orbax_explicit", "0.1.0"), ("jax", "0.10.2")))


def model(arrays: int, devices: int) -> Manifest:
    """A transformer: layers of ten arrays."""
    mesh = mesh_of(devices)
    shardings: dict[tuple[Partition, ...], NamedShardingRecord] = {}

    def leaf(shape: tuple[int, ...], partitions: tuple[Partition, ...]) -> ArrayRecord:
        sharding = NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions), memory_kind="device")
        return ArrayRecord(shape=shape, dtype="bfloat16", sharding=shardings.setdefault(partitions, sharding))

    layers = {
        f"layers_{i}": nest({path: leaf(shape, partitions) for path, shape, partitions in LAYER})
        for i in range(arrays // len(LAYER))
    }
    return manifest_of(container({"params": container(layers)}), devices)


def distinct(arrays: int, devices: int) -> Manifest:
    """One dict in which no two arrays have anything in common but the mesh."""
    mesh = mesh_of(devices)
    leaves: dict[str, Tree] = {}
    for i in range(arrays):
        spec = SpecRecord(partitions=("data", None)[: i % 3])
        sharding = NamedShardingRecord(mesh=mesh, spec=spec, memory_kind="device")
        path = f"params.layers_{i}.attention.query.kernel"
        leaves[path] = ArrayRecord(shape=(4096, 1024 + i), dtype="bfloat16", sharding=sharding)
    return manifest_of(container(leaves), devices)


def nest(leaves: dict[str, ArrayRecord]) -> Tree:
    """The tree in which each leaf lies at its path."""
    below: dict[str, dict[str, ArrayRecord]] = {}
    for path, leaf in leaves.items():
        head, _, tail = path.partition("/")
        below.setdefault(head, {})[tail] = leaf
    return container({head: tails[""] if "" in tails else nest(tails) for head, tails in below.items()})


def container(children: dict[str, Tree] | dict[str, ContainerRecord]) -> ContainerRecord:
    return ContainerRecord(
        kind="dict", keys=tuple(Key("dict", name) for name in children), children=tuple(children.values())
    )


def path_nbytes(manifest: Manifest) -> int:
    """Bytes of the texts of which the paths consist, each counted once, as the file has them."""
    return sum(
        len(text.encode()) for text in {str(key.name) for _, c in iterate_containers(manifest.tree) for key in c.keys}
    )


def seconds(run: Callable[[], T], repeats: int) -> tuple[float, T]:
    """The median time of `repeats` runs, and what the last one gave."""
    times: list[float] = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def header(repeats: int) -> Iterator[str]:
    yield machine_line()
    yield f"{versions_line('orbax-explicit', 'msgpack')}, format {_wire.FRAME.version}"
    yield f"{date_line()}, medians of {repeats}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Encode and decode the records of a tree.")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median is taken (default 3)")
    arguments = parser.parse_args()
    print(*header(arguments.repeats), "", sep="\n")
    print(f"{'tree':<9}{'arrays':>8}{'devices':>9}{'bytes':>12}{'an array*':>11}{'encode s':>10}{'decode s':>10}")
    missed: list[str] = []
    for build in (model, distinct):
        for arrays in ARRAYS:
            for devices in DEVICES:
                manifest = build(arrays, devices)
                encode_seconds, data = seconds(functools.partial(_wire.encode, manifest), arguments.repeats)
                decode_seconds, again = seconds(functools.partial(_wire.decode, data), arguments.repeats)
                # By their bytes: equal manifests have equal ones, and to compare each array's mesh would take minutes.
                assert _wire.encode(again) == data
                each = (len(data) - path_nbytes(manifest)) / arrays
                print(
                    f"{build.__name__:<9}{arrays:>8,}{devices:>9,}{len(data):>12,}{each:>11,.1f}"
                    f"{encode_seconds:>10.4f}{decode_seconds:>10.4f}"
                )
                if arrays == ARRAYS[-1]:
                    at = f"{build.__name__}, {arrays:,} arrays on {devices:,} devices"
                    missed += [f"{at}: {each:.1f} bytes an array"] * (each > MAX_NBYTES_AN_ARRAY)
                    missed += [f"{at}: encoded in {encode_seconds:.2f} s"] * (encode_seconds >= MAX_SECONDS)
                    missed += [f"{at}: decoded in {decode_seconds:.2f} s"] * (decode_seconds >= MAX_SECONDS)
    print("\n* bytes beyond the texts of its path, the tables of devices included")
    assert "jax" not in sys.modules, "the records are to be read and written without JAX"
    if arguments.check and missed:
        print("\nmissed", *missed, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
