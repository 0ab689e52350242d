"""What writer and reader of the payload share: names, codes, limits, and how device ids are packed.

The rules are those of `docs/format.md`, which is normative; here they have names. `_wire_encoding` and
`_wire_decoding` use them, `_wire` puts the frame around the payload.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

SECTIONS: Final = (
    "texts",
    "device_lists",
    "scope",
    "inventory",
    "writer",
    "meshes",
    "specs",
    "shardings",
    "structures",
    "leaves",
    "tree",
)

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**64 - 1
# Ids differ by what 64 bits hold, so that they can be packed.
DEVICE_ID_MAX: Final = 2**63 - 1

MAX_PAYLOAD_NBYTES: Final = 2**28
MAX_TEXT_NBYTES: Final = 2**14
# Of mesh axes in a mesh or a spec, dimensions of a shape, and memory kinds. It also bounds what msgpack allocates
# ahead for an array inside an entry.
MAX_ENTRY_LENGTH: Final = 64
# Over all device lists: a plain range of any length takes a few bytes, so the length of the file bounds nothing here.
MAX_DEVICE_IDS: Final = 2**19
# Over all meshes: each checks its list when it is made, however many meshes share the list.
MAX_MESH_DEVICES: Final = 2**22
# Python 3.11 compares and prints records 248 deep before it raises RecursionError, from an empty stack.
MAX_DEPTH: Final = 128
# In one error: more than a person reads.
MAX_PROBLEMS: Final = 100

RUNS: Final = 0
PACKED: Final = 1

NAMED_SHARDING: Final = 0
SINGLE_DEVICE: Final = 1

ARRAY: Final = 0
VALUE: Final = 1

KEY_DICT_TEXT: Final = 0
KEY_DICT_INT: Final = 1
KEY_INDEX: Final = 2
KEY_ATTR: Final = 3

COUNTED_KINDS: Final = frozenset({"list", "tuple"})
"""Containers whose keys follow from their number of children."""


PackedIds: TypeAlias = tuple[int | bytes, ...]

_WIDTHS: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


def pack_device_ids(ids: Sequence[int]) -> PackedIds:
    """The one form in which a list of device ids, of which there is at least one, is written."""
    breaks = [i for i, step in enumerate(map(operator.sub, ids[1:], ids), start=1) if step != 1]
    if not breaks or 4 * (len(breaks) + 1) <= len(ids):
        runs: list[int] = []
        for start, end in zip((0, *breaks), (*breaks, len(ids)), strict=True):
            runs += ids[start], end - start
        return (RUNS, *runs)
    base = min(ids)
    width = _width(max(ids) - base)
    return (PACKED, base, width, struct.pack(f"<{len(ids)}{_WIDTHS[width]}", *(n - base for n in ids)))


def unpack_runs(runs: Sequence[int]) -> tuple[int, ...]:
    """The ids in `start, count, start, count, ...`; the caller has bounded the counts."""
    ids: list[int] = []
    for start, count in pairs(runs):
        ids.extend(range(start, start + count))
    return tuple(ids)


def unpack_integers(base: int, width: int, data: bytes) -> tuple[int, ...]:
    """The ids in the packed form; `width` is one of 1, 2, 4, 8 and divides the length of `data`."""
    offsets: tuple[int, ...] = struct.unpack(f"<{len(data) // width}{_WIDTHS[width]}", data)
    return tuple(base + n for n in offsets) if base else offsets


def is_width(width: object) -> bool:
    """Whether packed ids can be so many bytes wide."""
    return type(width) is int and width in _WIDTHS


def pack_process_indices(indices: Iterable[int]) -> list[int]:
    """`index, count, index, count, ...`: the process that owns the next `count` devices."""
    runs: list[int] = []
    for index in indices:
        if runs and runs[-2] == index:
            runs[-1] += 1
        else:
            runs += index, 1
    return runs


def pairs(flat: Sequence[int]) -> Iterable[tuple[int, int]]:
    """`(a, b), (c, d)` of `a, b, c, d`."""
    return zip(flat[::2], flat[1::2], strict=True)


def _width(largest: int) -> int:
    return next(width for width in _WIDTHS if largest < 1 << 8 * width)
