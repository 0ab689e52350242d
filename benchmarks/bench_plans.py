"""How long it takes to plan a restore, and how large a plan is; no JAX, no device.

    python benchmarks/bench_plans.py [--check] [--repeat N]

Each line is one checkpoint: so many arrays, as four specs on one mesh (data, model) over so many devices of 256
processes or fewer, planned for other devices. `shared` is what a manifest that was read looks like: arrays that are laid
out alike share one record. `--check` exits with 1 where planning 100,000 arrays on 65,536 devices takes 2 s or more.

Planned are: as many devices with other ids, half of them, twice as many in another number of processes, and a part of the
tree. What is timed: the plan; then its text and its bytes on each device; then its JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from machine import date_line, machine_line, versions_line

from orbax_explicit._planning import plan_from_records
from orbax_explicit._policy import RestorePolicy
from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    Inventory,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    SpecRecord,
)
from orbax_explicit._targets import TargetRecord
from orbax_explicit.testing import fake_inventory

LIMIT_SECONDS = 2.0
SIZES = [(100, 8), (10_000, 4_096), (100_000, 65_536)]


def inventory_of(devices: int, *, first_id: int = 0) -> Inventory:
    """Devices of processes with at most 256 each."""
    processes = max(1, devices // 256)
    return fake_inventory(devices // processes, processes=processes, first_id=first_id)


def manifest_of(arrays: int, devices: int) -> Manifest:
    """Arrays of 8192 x 8192 in layers of ten, on a mesh that is as square as it can be."""
    saved = inventory_of(devices)
    data = 2 ** (int(math.log2(devices)) // 2)
    mesh = MeshRecord(
        axis_names=("data", "model"),
        axis_sizes=(data, devices // data),
        axis_types=("explicit", "explicit"),
        device_ids=saved.device_ids,
        platform="cpu",
    )
    specs = [("data", "model"), (None, "model"), ("data",), ()]
    kinds = ["device", "device", "pinned_host", "device"]
    shardings = [
        NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=spec), memory_kind=kind)
        for spec, kind in zip(specs, kinds, strict=True)
    ]
    leaves = [ArrayRecord(shape=(8192, 8192), dtype="bfloat16", sharding=sharding) for sharding in shardings]
    layers = []
    for layer in range(arrays // 10):
        keys = tuple(Key("dict", f"w{i}") for i in range(10))
        children = tuple(leaves[(layer + i) % len(leaves)] for i in range(10))
        layers.append(ContainerRecord(kind="dict", keys=keys, children=children))
    keys = tuple(Key("dict", f"layer_{i}") for i in range(len(layers)))
    return Manifest(tree=ContainerRecord(kind="dict", keys=keys, children=tuple(layers)), inventory=saved)


def median_seconds(call: Callable[[], Any], repeat: int) -> float:
    """The median wall time of a call."""
    taken = []
    for _ in range(repeat):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> int:
    """Prints a line for each checkpoint and plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the largest plan takes 2 s or more")
    parser.add_argument("--repeat", type=int, default=3, help="how often each is timed; the median is printed")
    options = parser.parse_args()
    print(machine_line(), versions_line("orbax-explicit"), date_line(), "", sep="\n")
    print(f"{'arrays':>8} {'devices':>8}  {'onto':<34} {'plan s':>7} {'text s':>7} {'JSON s':>7} {'JSON MB':>8}")
    slow = 0
    for arrays, devices in SIZES:
        manifest = manifest_of(arrays, devices)
        part = {path: TargetRecord(dtype="float32") for path in list(manifest.leaves)[: arrays // 10]}
        cases: list[tuple[str, Inventory, Any, RestorePolicy]] = [
            ("as many, other ids", inventory_of(devices, first_id=7), None, RestorePolicy()),
            ("half of them", inventory_of(devices // 2), None, RestorePolicy()),
            ("twice as many", inventory_of(devices * 2), None, RestorePolicy()),
            ("a tenth of the tree, cast, on half", inventory_of(devices // 2), part, RestorePolicy(extra="ignore")),
        ]
        for name, present, targets, policy in cases:

            def make(present: Inventory = present, targets: Any = targets, policy: RestorePolicy = policy) -> Any:
                return plan_from_records(manifest, targets, present, policy)  # noqa: B023 - called within the loop

            planning = median_seconds(make, options.repeat)
            plan = make()
            assert plan.refused == ()
            assert len(plan.outcomes) == (len(targets) if targets is not None else arrays)
            started = time.perf_counter()
            text = f"{plan}{sum(plan.bytes_per_device.values())}"
            text_seconds = time.perf_counter() - started
            assert len(text) < 4_000
            started = time.perf_counter()
            nbytes = len(plan.to_json())
            json_seconds = time.perf_counter() - started
            slow += planning + text_seconds >= LIMIT_SECONDS
            print(
                f"{arrays:>8} {devices:>8}  {name:<34} {planning:>7.3f} {text_seconds:>7.3f} {json_seconds:>7.3f} "
                f"{nbytes / 1e6:>8.1f}"
            )
    if options.check and slow:
        print(f"{slow} plans took {LIMIT_SECONDS:g} s or more, with their text and bytes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
