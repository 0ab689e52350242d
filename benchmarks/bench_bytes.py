"""How long a save and a restore take, beside raw file I/O of the same bytes and beside who else saves JAX arrays.

    python benchmarks/bench_bytes.py [--check] [--workload NAME] [--rounds N] [--scale X] [--directory DIR]

On the same states, in turn: this package (as it comes; without compression; without checksums), stock Orbax v0 (as it
comes; without compression) and v1, safetensors, and Equinox. Each save and each restore has a fresh process, every
round goes through all contenders, and medians are printed. Who knows host arrays alone, safetensors and Equinox, has
its file flushed, and puts what it read onto the same shardings. After each restore values, shardings and replicas are
checked, outside of the timing.

- save: from the call until `wait_until_finished` returns. "first" is the first save of its process, compilation included;
  "steady" the second one of the same arrays, as a training loop pays it. "blocking" is until the call returns.
- restore: the first of its process, until the arrays are ready. Files are dropped from the page cache before.
- raw: `write` and `fsync` of one copy of the bytes to one file, and `readinto` new memory, in a process of each round.
- peak / lands: how far resident memory rose during the restore, over what it leaves on all devices, each replica
  counted. Pages of files that are mapped count. Linux.
- disk: the sum of the files' lengths; sharding: what of it is `_sharding` and `explicit_sharding.msgpack`.

States are on 8 CPU devices, but for the wide ones: 1,000 arrays of (8, 16) on a mesh (8, 64) of 512, split over the axis
of 8. "fresh" are outputs of a jitted step that nothing has looked at, and the blocking of their save is compared with
`np.asarray(a.addressable_data(0))` over as many others in the same process; "touched" are the same after that; "replicated"
are fresh ones that each device has whole. "flax" is the demonstration's transformer, larger, with its AdamW state.

With `--check` the program fails where a target of `bytes/targets.py` is missed. They hold for `--scale 1`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator

from bytes.contenders import CONTENDERS
from bytes.measuring import Sample, measure
from bytes.tables import Table, targets_table, workload_table
from bytes.targets import Medians, missed
from bytes.workloads import WORKLOADS, Workload
from machine import date_line, machine_line, versions_line
from measured_process import run_child

PACKAGES = ("orbax-explicit", "jax", "orbax-checkpoint", "tensorstore", "safetensors", "equinox", "flax", "numpy")


def one_round(
    name: str, workload: Workload, contenders: tuple[str, ...], scale: float, directory: pathlib.Path
) -> Iterator[tuple[str, Sample]]:
    """What each contender's processes measured, one after the other; raw file I/O first."""

    def child(task: str, contender: str, at: str) -> Sample:
        return run_child(__file__, "--child", task, name, contender, at, "--scale", str(scale))

    with tempfile.TemporaryDirectory(dir=directory, prefix="bench_bytes.") as path:
        yield "raw", child("raw", "raw", path)
        for contender in contenders:
            sample = child("save", contender, path)
            if workload.restores and "cannot" not in sample:
                sample |= child("restore", contender, path)
            yield contender, sample
            shutil.rmtree(pathlib.Path(path, "checkpoint"), ignore_errors=True)


class Collected:
    """The samples of one directory."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)

    def add(self, workload: str, contender: str, sample: Sample) -> None:
        self._samples[workload, contender].append(sample)

    def medians(self) -> Medians:
        result: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
        for (workload, contender), samples in self._samples.items():
            measured = {name for sample in samples for name in sample} - {"cannot"}
            if measured:
                result[workload][contender] = {
                    name: statistics.median(sample[name] for sample in samples if name in sample) for name in measured
                } | {"rounds": len(samples)}
        return result

    def refusals(self) -> dict[str, dict[str, str]]:
        """Why a contender could not save or restore, by workload and contender."""
        result: dict[str, dict[str, str]] = defaultdict(dict)
        for (workload, contender), samples in self._samples.items():
            for sample in samples:
                if "cannot" in sample:
                    result[workload][contender] = sample["cannot"]
        return result


def file_system(directory: pathlib.Path) -> str:
    """The type of file system that a directory is on, as Linux calls it."""
    mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    at = max((mount for mount in mounts if directory.is_relative_to(mount[1])), key=lambda mount: len(mount[1]))
    return at[2]


def header(scale: float) -> Iterator[str]:
    yield machine_line()
    yield versions_line(*PACKAGES)
    yield date_line() + (f"; scale {scale:g}: not comparable with the targets" if scale != 1 else "")


def as_markdown(head: list[str], tables: list[Table]) -> Iterator[str]:
    yield from ("# `bench_bytes.py`", "")
    yield from (f"- {line}" for line in head)
    yield from ("", "What each column means stands at the head of [`bench_bytes.py`](../bench_bytes.py).", "")
    for table in tables:
        yield from table.as_markdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed; list all that are")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this one; may be repeated")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, help="rounds of every workload (default 5; tiny leaves 1 of stock)")
    parser.add_argument("--stock-rounds", type=int, help="how many of them stock Orbax takes part in")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full bytes or leaves (default 1)")
    parser.add_argument(
        "--directory",
        type=pathlib.Path,
        action="append",
        help="where to write (default /dev/shm); may be repeated, and then each round visits all of them",
    )
    parser.add_argument("--markdown", type=pathlib.Path, help="write the tables to this file too")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        task, name, contender, directory = options.child
        print(json.dumps(measure(task, name, contender, options.scale, pathlib.Path(directory))))
        return 0

    directories = [path.resolve() for path in options.directory or [pathlib.Path("/dev/shm")]]  # tmpfs on Linux
    head, tables = list(header(options.scale)), []
    print(*head, "", sep="\n", flush=True)
    collected = {directory: Collected() for directory in directories}
    for name in options.workload or WORKLOADS:
        workload = WORKLOADS[name]
        chosen = tuple(c for c in workload.contenders if c in (options.contender or CONTENDERS))
        rounds = options.rounds or workload.rounds
        stock_rounds = options.stock_rounds or options.rounds or workload.stock_rounds or rounds
        for index, directory in itertools.product(range(rounds), directories):
            present = tuple(c for c in chosen if index < stock_rounds or not c.startswith("stock"))
            for contender, sample in one_round(name, workload, present, options.scale, directory):
                collected[directory].add(name, contender, sample)
        for directory in directories:
            title = f"{name}, on {file_system(directory)}"
            found = collected[directory]
            tables.append(workload_table(title, workload, found.medians()[name], found.refusals().get(name, {})))
            print(*tables[-1].as_text(), "", sep="\n", flush=True)
    for directory in directories:
        table = targets_table(f"what must be shown, on {file_system(directory)}", collected[directory].medians())
        if table.rows:
            tables.append(table)
            print(*table.as_text(), "", sep="\n")
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text("\n".join(as_markdown(head, tables)))
    misses = [
        f"on {file_system(directory)}: {miss}"
        for directory, found in collected.items()
        for miss in missed(found.medians(), found.refusals())
    ]
    if options.check and misses:
        print("missed", *misses, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
