"""The results as tables, on the terminal and in Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from bytes.targets import Medians, judged
from bytes.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under headings; the first column is a name, the others are numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def as_text(self) -> Iterator[str]:
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        yield self.title
        for row in (self.headings, *self.rows):
            name, *numbers = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            yield f"  {name.strip():<{widths[0]}}  {'  '.join(numbers)}".rstrip()
        yield from (f"  {note}" for note in self.notes)

    def as_markdown(self) -> Iterator[str]:
        yield from (f"### {self.title}", "")
        yield f"| {' | '.join(self.headings)} |"
        yield f"|---|{'---:|' * (len(self.headings) - 1)}"
        yield from (f"| {' | '.join(row)} |" for row in self.rows)
        yield ""
        for note in self.notes:
            yield from (note, "")


def workload_table(
    title: str, workload: Workload, medians: Mapping[str, Mapping[str, float]], refusals: Mapping[str, str]
) -> Table:
    """A row for each contender, with raw file I/O first."""
    raw = medians["raw"]
    nbytes = raw["disk_nbytes"]  # one copy of the state, and nothing else

    def row(name: str, found: Mapping[str, float]) -> list[str]:
        def ratio(quantity: str, divisor: float) -> str:
            return f"{found[quantity] / divisor:.2f}" if quantity in found and workload.by_bytes else ""

        return [
            name,
            f"{found.get('rounds', 0):.0f}",
            seconds(found.get("save_seconds")),
            ratio("save_seconds", raw["save_seconds"]),
            seconds(found.get("blocking_seconds")),
            seconds(found.get("steady_save_seconds")),
            ratio("steady_save_seconds", raw["save_seconds"]),
            seconds(found.get("steady_blocking_seconds")),
            seconds(found.get("restore_seconds")) if workload.restores else "",
            ratio("restore_seconds", raw["restore_seconds"]) if workload.restores else "",
            ratio("peak_nbytes", found.get("lands_nbytes", 1)) if workload.restores else "",
            f"{found['disk_nbytes'] / 1e6:,.2f}" if "disk_nbytes" in found else "",
            f"{found['metadata_nbytes'] / 1e3:,.1f}" if found.get("metadata_nbytes") else "",
        ]

    headings = ["", "rounds"]
    headings += [f"{save} {what}" for save in ("first", "steady") for what in ("save s", "/ raw", "blocking s")]
    headings += ["restore s", "restore / raw", "peak / lands", "disk MB", "sharding kB"]
    rows = [row(name, medians[name]) for name in ("raw", *workload.contenders) if name in medians]
    shown = [i for i in range(len(headings)) if i == 0 or any(row[i] for row in rows)]
    notes = [f"{name} cannot {reason}" for name, reason in refusals.items()]
    notes += [
        f"{name}: blocks for {found['blocking_seconds'] / found['first_touch_seconds']:.2f} times what jax's first touch "
        f"of as many fresh arrays takes in its process, {found['first_touch_seconds']:.2f} s"
        for name, found in medians.items()
        if "first_touch_seconds" in found
    ]
    return Table(
        title=f"{title}: {nbytes / 1e6:,.{0 if nbytes >= 1e8 else 2}f} MB",
        headings=[headings[i] for i in shown],
        rows=[[row[i] for i in shown] for row in rows],
        notes=notes,
    )


def targets_table(title: str, medians: Medians) -> Table:
    """What had to be shown, beside what was."""
    rows = [
        [
            target.label,
            number(stock),
            number(found),
            f"<= {number(target.limit)}",
            "met" if found <= target.limit else "MISSED",
        ]
        for target, found, stock in judged(medians)
    ]
    return Table(title=title, headings=["ratio of medians", "stock v0", "ours", "target", ""], rows=rows)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"
