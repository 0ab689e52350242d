"""Did a resumed run go on as if nothing had happened?

Two things are compared with the first run: the loss of every step, and the layout of every array at the moment at which
the run took it up. On the devices that the checkpoint was saved on both must be equal; on other devices the losses may
differ by the order in which floats are summed, and the layouts by the devices' ids.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from orbax_explicit._records import ArrayRecord, Manifest, NamedShardingRecord, SingleDeviceRecord
from orbax_explicit.cli.demo._worker import TrainingRun

ROUNDING = 1e-5
"""Largest relative difference of two losses that the order of summation may explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a resumed run compares with the first one.

    Attributes:
        steps: Steps that both runs trained.
        equal_losses: Steps whose losses are the same bits.
        largest_difference: Largest relative difference of two losses of a step.
        allowed_difference: The difference up to which the losses count as the same; 0 for the same bits.
        arrays: Arrays in the checkpoint.
        as_recorded: Arrays that came back in the layout that was recorded.
    """

    steps: int
    equal_losses: int
    largest_difference: float
    allowed_difference: float
    arrays: int
    as_recorded: int

    @property
    def ok(self) -> bool:
        """Whether the run went on as if nothing had happened."""
        return self.largest_difference <= self.allowed_difference and self.as_recorded == self.arrays


def judge(*, first: TrainingRun, recorded: Manifest, resumed: TrainingRun) -> Verdict:
    """Compares a resumed run with the first run and with what the checkpoint recorded."""
    same_devices = resumed.start.inventory == recorded.inventory
    steps = sorted(resumed.losses)
    pairs = [(first.losses[step], resumed.losses[step]) for step in steps]
    wanted = recorded.arrays if same_devices else {path: _portable(a) for path, a in recorded.arrays.items()}
    landed = resumed.start.arrays if same_devices else {path: _portable(a) for path, a in resumed.start.arrays.items()}
    return Verdict(
        steps=len(steps),
        equal_losses=sum(a == b for a, b in pairs),
        largest_difference=max((_relative_difference(a, b) for a, b in pairs), default=math.inf),
        allowed_difference=0.0 if same_devices else ROUNDING,
        arrays=len(wanted),
        as_recorded=sum(landed.get(path) == array for path, array in wanted.items()),
    )


def _portable(array: ArrayRecord) -> ArrayRecord:
    """The record without the ids of devices."""
    sharding = array.sharding
    if isinstance(sharding, NamedShardingRecord):
        sharding = dataclasses.replace(sharding, mesh=dataclasses.replace(sharding.mesh, device_ids=None))
    elif isinstance(sharding, SingleDeviceRecord):
        sharding = dataclasses.replace(sharding, device_id=0)
    return dataclasses.replace(array, sharding=sharding)


def _relative_difference(a: float, b: float) -> float:
    """|a - b| / |a|; infinite where either is not a number, so that it never passes for small."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), 1e-30)
