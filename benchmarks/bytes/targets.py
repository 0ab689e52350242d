"""What the numbers must come to, as ratios of medians in one run; `--check` fails where one is missed.

Each names two measurements, whatever was measured of them, and the most that the first may be of the second. What
stock Orbax comes to in the same ratio stands beside it, where it is not itself what is compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

Medians = Mapping[str, Mapping[str, Mapping[str, float]]]
"""The median by workload, contender and quantity."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio and its limit.

    Attributes:
        label: What is compared, in words.
        workload: In which workload.
        quantity: What of it.
        limit: The most that the ratio may be.
        contender: Whose.
        against: Whose it is divided by.
        divisor: The quantity that it is divided by; None for the same.
        stock: Who stands beside it.
    """

    label: str
    workload: str
    quantity: str
    limit: float
    contender: str = "ours"
    against: str = "stock v0"
    divisor: str | None = None
    stock: str = "stock v0"

    def ratio(self, medians: Medians, contender: str) -> float | None:
        """The ratio for a contender; None where something was not measured."""
        of = medians.get(self.workload, {})
        # What is compared with another quantity is compared with that of the same processes.
        against = contender if self.divisor else self.against
        try:
            return of[contender][self.quantity] / of[against][self.divisor or self.quantity]
        except KeyError:
            return None


def against_raw(label: str, workload: str, quantity: str, limit: float, **others: str) -> Target:
    return Target(label=label, workload=workload, quantity=quantity, limit=limit, against="raw", **others)


def peak(workload: str) -> Target:
    label = f"peak memory at restore over what lands, {workload}"
    return Target(label=label, workload=workload, quantity="peak_nbytes", divisor="lands_nbytes", limit=1.2)


def against_stock(label: str, workload: str, quantity: str, limit: float) -> Target:
    return Target(label=f"{label}, against stock", workload=workload, quantity=quantity, limit=limit)


TARGETS = (
    against_raw("save, sharded, checksummed, against raw", "sharded", "save_seconds", 2.2),
    against_raw("save, replicated, checksummed, against raw", "replicated", "save_seconds", 2.2),
    against_raw("restore, sharded, verified, against raw", "sharded", "restore_seconds", 1.5),
    against_raw(
        "restore, sharded, written unchecked, against raw",
        "sharded, unchecked",
        "restore_seconds",
        1.3,
        contender="ours, unchecked",
        stock="stock v0, uncompressed",
    ),
    against_stock("restore, resharded", "resharded", "restore_seconds", 1 / 3),
    against_stock("restore, replicated", "replicated", "restore_seconds", 1 / 10),
    against_stock("save, small", "small", "save_seconds", 1 / 6),
    against_stock("save blocking, small", "small", "blocking_seconds", 1 / 10),
    against_stock("restore, small", "small", "restore_seconds", 1 / 8),
    Target(
        label="save blocking, wide, fresh, against jax's first touch",
        workload="wide, fresh",
        quantity="blocking_seconds",
        divisor="first_touch_seconds",
        limit=1.3,
    ),
    against_stock("save blocking, wide, touched", "wide, touched", "blocking_seconds", 1 / 15),
    against_stock("save blocking, wide, replicated", "wide, replicated", "blocking_seconds", 1 / 15),
    against_stock("restore, tiny leaves", "tiny leaves", "restore_seconds", 1 / 5),
    against_stock("restore, wide", "wide, fresh", "restore_seconds", 1 / 10),
    against_stock("sharding metadata, wide", "wide, fresh", "metadata_nbytes", 1 / 100),
    *(peak(workload) for workload in ("sharded", "replicated", "resharded", "bfloat16", "flax")),
)


def judged(medians: Medians) -> Iterator[tuple[Target, float, float | None]]:
    """The targets of which this run measured something, each with our ratio and stock's."""
    for target in TARGETS:
        found = target.ratio(medians, target.contender)
        if found is not None:
            yield target, found, target.ratio(medians, target.stock)


def missed(medians: Medians, refusals: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The targets that were not met, and what had to be measured for one and could not be.

    Args:
        medians: What was measured.
        refusals: Why a contender could not, by workload and contender.
    """
    misses = [
        f"{target.label}: {found:.3g}, at most {target.limit:.3g}"
        for target, found, _ in judged(medians)
        if found > target.limit
    ]
    needed = {(target.workload, who) for target in TARGETS for who in (target.contender, target.against)}
    misses += [
        f"{workload}: {contender} cannot {reason}"
        for workload, reasons in refusals.items()
        for contender, reason in reasons.items()
        if (workload, contender) in needed
    ]
    return misses
