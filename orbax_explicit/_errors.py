"""The exception tree.

Every error of this package is an `OrbaxExplicitError` and also the builtin that callers already catch::

    OrbaxExplicitError
    ├── RecordError (ValueError)         a record that cannot be true: an invariant does not hold
    ├── FormatError (ValueError)         bytes that are not a valid record of this or an older version
    ├── CheckpointLayoutError (ValueError)  a path that is no checkpoint item, or several
    ├── SaveRefusedError (ValueError)    leaves that cannot be saved whole
    └── RestoreRefusedError (ValueError) leaves that cannot be restored as asked
        └── MeshMismatchError            a recorded or requested mesh that does not fit the present devices

An error that a person reads has five parts, in this order: what could not be done, what was recorded, what
is present, how much is affected, what to do. `Problem` carries them as data; an error lists all its problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_LEAVES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that could not be done, as data.

    Attributes:
        could_not: What could not be done, a clause without a full stop.
        recorded: What the checkpoint (or, for a save, the tree) says; empty where nothing was recorded.
        present: What is here now; empty where that does not matter.
        affects: Paths of the leaves that are affected, in tree order.
        of: How many leaves there are in all; 0 where no leaf is concerned.
        fix: What the caller can do.
        about: Whether it is a mesh that does not fit, or something else.
    """

    could_not: str
    recorded: str = ""
    present: str = ""
    affects: tuple[str, ...] = ()
    of: int = 0
    fix: str = ""
    about: Literal["mesh", "leaf"] = "leaf"

    def __str__(self) -> str:
        lines = [self.could_not]
        for label, text in (
            ("recorded", self.recorded),
            ("present", self.present),
            ("affects", self._affected_text()),
            ("fix", self.fix),
        ):
            if text:
                lines.append(f"  {label:<9} {text}")
        return "\n".join(lines)

    def _affected_text(self) -> str:
        if not self.affects:
            return ""
        count = len(self.affects)
        if count == 1 and self.of <= 1:
            return self.affects[0]
        total = f"{count} of {self.of} leaves" if self.of else f"{count} leaves"
        if count <= _LEAVES_SHOWN:
            return f"{total}: {', '.join(self.affects)}"
        return f"{total}, first: {', '.join(self.affects[:_LEAVES_SHOWN])}"


class OrbaxExplicitError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        problems: Everything that was found wrong, in the order in which it was found.
    """

    def __init__(self, *problems: Problem | str) -> None:
        self.problems: tuple[Problem, ...] = tuple(Problem(could_not=p) if isinstance(p, str) else p for p in problems)
        super().__init__(_listing(self.problems))


class RecordError(OrbaxExplicitError, ValueError):
    """A record whose invariants do not hold."""


class FormatError(OrbaxExplicitError, ValueError):
    """Bytes that are no valid record, or no valid metadata of a stock checkpoint: damaged, hostile, or too new."""


class CheckpointLayoutError(OrbaxExplicitError, ValueError):
    """A path at which there is no checkpoint item, or more than one to choose from."""


class SaveRefusedError(OrbaxExplicitError, ValueError):
    """Leaves that could not come back as they are. Raised before any array is written."""


class RestoreRefusedError(OrbaxExplicitError, ValueError):
    """Leaves that cannot be restored as asked. Raised before any array is read."""


class MeshMismatchError(RestoreRefusedError):
    """A recorded or requested mesh that does not fit the present devices or the mesh at hand."""


def _listing(problems: Sequence[Problem]) -> str:
    if len(problems) <= 1:
        return "\n".join(str(p) for p in problems)
    return "\n\n".join((f"{len(problems)} problems", *(str(p) for p in problems)))


# A traceback names an error as callers import it.
for _error in (
    OrbaxExplicitError,
    RecordError,
    FormatError,
    CheckpointLayoutError,
    SaveRefusedError,
    RestoreRefusedError,
    MeshMismatchError,
):
    _error.__module__ = "orbax_explicit"
del _error
