"""The demo's tables and curves as rich text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from rich import box
from rich.table import Table
from rich.text import Text

from orbax_explicit._records import ArrayRecord, LeafPath, Manifest, NamedShardingRecord
from orbax_explicit.cli.demo._verdict import Verdict

BARS = "▁▂▃▄▅▆▇█"
STEPS_SHOWN = 6

Path: TypeAlias = tuple[tuple[str | int, ...], ...]
"""A leaf's path, with the alternatives at each place: one name, or those of several arrays that are alike."""

Row: TypeAlias = tuple[Path, ArrayRecord]


def render_manifest(manifest: Manifest, *, width: int) -> Table:
    """Every recorded array, as a tree; those that differ only in one name of their path share a row."""
    table = _table(width)
    for heading in ("leaf", "array", "spec", "memory", "committed"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "spec")
    for depth, names, array in _outline(_merged(manifest.arrays)):
        name = Text(" " * _gap(width) * depth + _path_text(names), style="dim" if array is None else "")
        if array is None:
            table.add_row(name)
            continue
        spec, memory = _spec_and_memory(array)
        committed = Text("yes") if array.committed else Text("no", style="yellow")
        memory_text = Text(memory, style="yellow" if memory == "pinned_host" else "")
        table.add_row(name, _type_text(array), spec, memory_text, committed)
    return table


def render_landings(recorded: Manifest, landings: Mapping[str, Manifest], *, width: int) -> Table:
    """Where the arrays were, and where each resumed run found them: one column a run.

    What differs is yellow where a run was given other devices, else red.
    """
    table = _table(width)
    table.add_column("")
    table.add_column("saved from", style="bold")
    for title in landings:
        table.add_column(title)
    before = _landing(recorded)
    after = [_landing(manifest) for manifest in landings.values()]
    for row, was in before.items():
        style = "yellow" if row == "processes" or row.endswith(" devices") else "red"
        cells = [_compared(was, landing.get(row, "missing"), style) for landing in after]
        table.add_row(Text(row, style="dim"), was, *cells)
    return table


def render_losses(first: Mapping[int, float], resumed: Mapping[str, Mapping[int, float]], *, width: int) -> Table:
    """Losses of some of the steps that all runs trained, side by side; what differs from the first run stands out."""
    table = _table(width)
    table.add_column("step", justify="right")
    table.add_column("first run", justify="right", style="bold")
    for title in resumed:
        table.add_column(title, justify="right")
    steps = sorted(set().union(*resumed.values()))
    for step in _spread(steps, STEPS_SHOWN):
        cells = [
            Text("") if step not in losses else _compared(_loss_text(first[step]), _loss_text(losses[step]), "yellow")
            for losses in resumed.values()
        ]
        table.add_row(str(step), _loss_text(first[step]), *cells)
    return table


def render_curves(
    first: Mapping[int, float], resumed: Mapping[str, Mapping[int, float]], *, checkpoint: int, width: int
) -> Table:
    """The loss of every run over the steps, as bars; below them the step at which the checkpoint was made."""
    room = width - max(len(title) for title in ("first run", *resumed)) - 2
    stride = -(-len(first) // room)
    low, high = min(first.values()), max(first.values())

    def bars(losses: Mapping[int, float]) -> str:
        # One bar for `stride` steps shows the last of them, so that a run that starts in between lines up.
        sampled = range(stride - 1, len(first), stride)
        return "".join(_bar(losses[step], low, high) if step in losses else " " for step in sampled)

    table = Table.grid(padding=(0, 2))
    table.add_row(Text("first run", style="bold"), Text(bars(first), style="bold"))
    for title, losses in resumed.items():
        table.add_row(title, Text(bars(losses), style="green"))
    text, place = f"checkpoint of step {checkpoint}", checkpoint // stride
    mark = f"└ {text}".rjust(place + 2 + len(text)) if place + 2 + len(text) <= room else f"{text} ┘".rjust(place + 1)
    table.add_row("", Text(mark, style="dim"))
    return table


def render_verdicts(verdicts: Mapping[str, Verdict | None]) -> Table:
    """One line a resumed run: whether it went on as if nothing had happened; None for one that ended with an error."""
    table = Table.grid(padding=(0, 2))
    for title, verdict in verdicts.items():
        passed = verdict is not None and verdict.ok
        mark = Text("PASS", style="bold green") if passed else Text("FAIL", style="bold red")
        table.add_row(mark, title, "ended with the error above" if verdict is None else _verdict_text(verdict))
    return table


def mesh_text(manifest: Manifest) -> str:
    """The meshes of a tree, each as `(data=2 explicit, model=4 explicit)`."""
    return ", ".join(str(mesh) for mesh in manifest.meshes) or "no mesh"


def _gap(width: int) -> int:
    return 2 if width >= 90 else 1


def _table(width: int) -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _gap(width), 0, 0))


def _verdict_text(verdict: Verdict) -> str:
    layouts = f"{verdict.as_recorded}/{verdict.arrays} arrays as recorded"
    if verdict.allowed_difference and verdict.equal_losses < verdict.steps:
        losses = (
            f"losses within {verdict.largest_difference:.0e} (sums in another order; at most "
            f"{verdict.allowed_difference:.0e})"
        )
    else:
        losses = f"{verdict.equal_losses}/{verdict.steps} losses bitwise equal"
    return f"{losses}, {layouts}"


def _landing(manifest: Manifest) -> dict[str, str]:
    """Where a tree's arrays are, by group of arrays that are alike."""
    facts = {}
    if manifest.inventory is not None:
        facts["processes"] = str(manifest.inventory.process_count)
        facts[f"{manifest.inventory.platform} devices"] = _ranges(manifest.inventory.device_ids)
    shapes = [" ".join(f"{name}={size}" for name, size in mesh.shape.items()) for mesh in manifest.meshes]
    facts["mesh"] = ", ".join(shapes)
    facts["axis types"] = ", ".join(sorted({kind for mesh in manifest.meshes for kind in mesh.axis_types or ()}))
    groups: dict[str, list[ArrayRecord]] = {}
    for path, array in manifest.arrays.items():
        groups.setdefault(_group(path), []).append(array)
    for group, arrays in groups.items():
        count = f" ({len(arrays)})" if len(arrays) > 1 else ""
        places = {_spec_and_memory(array)[1] if array.committed else "uncommitted" for array in arrays}
        facts[group + count] = ", ".join(sorted(places))
    return facts


def _group(path: LeafPath) -> str:
    names = [str(key.name) for key in path]
    if names[0] == "opt_state":
        return "Adam mu, nu" if names[2] in ("mu", "nu") else f"Adam {names[2]}"
    return names[0]


def _compared(was: str, now: str, style: str = "red") -> Text:
    return Text(now, style="green" if now == was else style)


def _merged(arrays: Mapping[LeafPath, ArrayRecord]) -> list[Row]:
    """The arrays with those merged that have the same record and whose paths differ in one place, place by place."""
    rows: list[Row] = [(tuple((key.name,) for key in path), array) for path, array in arrays.items()]
    for place in range(max(len(path) for path, _ in rows)):
        merged: dict[tuple[Path, Path, ArrayRecord], list[str | int]] = {}
        for path, array in rows:
            here = path[place] if place < len(path) else ()
            merged.setdefault((path[:place], path[place + 1 :], array), []).extend(here)
        rows = [
            ((*before, tuple(here), *after) if here else before, array)
            for (before, after, array), here in merged.items()
        ]
    return rows


def _outline(rows: Sequence[Row], depth: int = 0) -> Iterator[tuple[int, Path, ArrayRecord | None]]:
    """The lines of a tree: how deep each is indented, the part of the path that it shows, and the array of a leaf."""
    for _, group in itertools.groupby(rows, key=lambda row: row[0][0]):
        subtree = list(group)
        shared = _shared(path for path, _ in subtree)
        if len(subtree) == 1:
            yield depth, *subtree[0]
            continue
        yield depth, subtree[0][0][:shared], None
        yield from _outline([(path[shared:], array) for path, array in subtree], depth + 1)


def _shared(paths: Iterable[Path]) -> int:
    """How many places, from the first on, all the paths have in common."""
    return sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False)))


def _path_text(path: Path) -> str:
    return "/".join(_alternatives_text(names) for names in path)


def _alternatives_text(names: tuple[str | int, ...]) -> str:
    if len(names) == 1:
        return str(names[0])
    first = names[0]
    if len(names) > 2 and isinstance(first, int) and names == tuple(range(first, first + len(names))):
        return f"{{{first}..{names[-1]}}}"
    return "{" + ",".join(map(str, names)) + "}"


def _type_text(array: ArrayRecord) -> str:
    return f"{array.dtype_text}[{','.join(map(str, array.shape))}]" if array.shape else array.dtype_text


def _spec_and_memory(array: ArrayRecord) -> tuple[str, str]:
    if array.sharding is None:
        return "", ""
    memory = array.sharding.memory_kind or "default"
    if isinstance(array.sharding, NamedShardingRecord):
        return str(array.sharding.spec), memory
    return f"{array.sharding.platform}:{array.sharding.device_id}", memory


def _ranges(ids: Sequence[int]) -> str:
    """`0-3, 2048-2051`."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _loss_text(loss: float) -> str:
    """The shortest text that still tells one float32 from the next."""
    return f"{loss:.9g}"


def _bar(loss: float, low: float, high: float) -> str:
    level = (loss - low) / (high - low) if high > low else 0.0
    return BARS[min(len(BARS) - 1, max(0, round(level * (len(BARS) - 1))))]
