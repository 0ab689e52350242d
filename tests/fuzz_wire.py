"""A fuzz of the decoder, and the frame around a payload written independently of the package.

`test_wire` runs `run` in a process of its own that imports the records and no JAX, so that the memory which
is measured is the decoder's. What comes back is a report for that test to judge.
"""

from __future__ import annotations

import collections
import copy
import hashlib
import pathlib
import random
import resource
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

MAGIC = b"\x89OXE\r\n\x1a\n"

# Bytes that mean something to msgpack: long arrays, maps, texts, bytes and extensions, the ends of the integers.
INTERESTING = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xd6\xff\x00\x00\x00\x00",
    b"\xc1",
    b"\xc0",
    b"\xc3",
    b"\x80",
    b"\x81\x00\x00",
    b"\x90",
    b"\x91" * 40,
    b"\xdc\x00\x40" * 40,
    b"\xa1\xff",
    b"\xc4\x01\xff",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    5,
    64,
    255,
    2**16,
    2**40,
    2**63,
    2**64 - 1,
    -1,
    -2,
    -(2**63),
    1.5,
    b"",
    b"\xed\xa0\x80",
    "",
    "x",
    [],
    [0],
)


def seal(payload: bytes, *, magic: bytes = MAGIC, version: int = 1, nbytes: int | None = None) -> bytes:
    """A file around `payload`, as docs/format.md says; with another declared length if `nbytes` is given."""
    length = len(payload) if nbytes is None else nbytes
    framed = magic + struct.pack(">IQ", version, length) + payload
    return framed + hashlib.blake2b(framed, digest_size=16).digest()


def payload_of(data: bytes) -> bytes:
    """The payload of a valid file."""
    return data[20:-16]


def mutate_bytes(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """`data` with one to four changes that know nothing of the format."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        end = min(len(changed), at + rng.randrange(1, 9))
        match rng.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = changed[at:end] * rng.randrange(1, 4)
            case 4:
                changed[at : rng.choice((at, end))] = rng.choice(INTERESTING)
            case 5:
                del changed[at:]
            case _:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                changed[at:end] = other[start : start + rng.randrange(1, 40)]
    return bytes(changed)


def mutate_values(payload: bytes, rng: random.Random) -> bytes:
    """`payload` with one or two of its values changed, removed, repeated or exchanged: msgpack, but perhaps no record."""
    tree: list[Any] = msgpack.unpackb(payload)
    for _ in range(rng.choice((1, 1, 2))):
        arrays = list(_arrays(tree))
        array = rng.choice(arrays)
        if not array:
            array.append(_value(rng))
            continue
        at, other = rng.randrange(len(array)), rng.randrange(len(array))
        match rng.randrange(6):
            case 0:
                array[at] = _value(rng)
            case 1 if type(array[at]) is int:
                array[at] += rng.choice((-1, 1))
            case 2:
                del array[at]
            case 3:
                array.insert(other, copy.deepcopy(array[at]))
            case 4:
                array[at], array[other] = array[other], array[at]
            case _:
                # A copy, or an array could come to lie within itself.
                array[at] = copy.deepcopy(rng.choice(rng.choice(arrays) or [None]))
    return _pack(tree) or payload


def _value(rng: random.Random) -> Any:
    # A copy, for it may be changed in turn.
    return copy.deepcopy(rng.choice(VALUES))


def _arrays(value: list[Any]) -> Iterator[list[Any]]:
    stack = [value]
    while stack:
        array = stack.pop()
        yield array
        stack.extend(item for item in array if type(item) is list)


def _pack(tree: list[Any]) -> bytes | None:
    try:
        packed: bytes = msgpack.packb(tree)
    except (ValueError, OverflowError):
        # One past the end of the integers.
        return None
    return packed


def run(directory: str, count: int, seed: int) -> dict[str, Any]:
    """Decodes `count` mutants of the files in `directory` in each of three ways.

    Every outcome other than a manifest or a `FormatError` escapes. A mutant that decodes must be the very bytes
    that its manifest encodes to, but for integers in another form of msgpack.

    Returns:
        For each way how many mutants were refused by the frame, by the payload, or decoded; how many errors listed
        several problems; and by how many bytes the peak memory of the process grew.
    """
    from orbax_explicit import _wire
    from orbax_explicit._errors import FormatError

    assert "jax" not in sys.modules
    rng = random.Random(seed)
    seeds = [path.read_bytes() for path in sorted(pathlib.Path(directory).iterdir()) if path.stat().st_size < 2_000]
    payloads = [payload_of(data) for data in seeds]
    ways: dict[str, Callable[[], bytes]] = {
        "raw": lambda: mutate_bytes(rng.choice(seeds), rng, seeds),
        "resealed": lambda: seal(mutate_bytes(rng.choice(payloads), rng, payloads)),
        "values": lambda: seal(mutate_values(rng.choice(payloads), rng)),
    }
    report: dict[str, Any] = {"seeds": len(seeds)}
    unchanged = frozenset(seeds)
    several = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for way, mutant in ways.items():
        outcomes = collections.Counter({"frame": 0, "payload": 0, "decoded": 0})
        for _ in range(count):
            while (data := mutant()) in unchanged:
                pass
            framed = data == seal(payload_of(data))
            try:
                manifest = _wire.decode(data)
            except FormatError as error:
                outcomes["payload" if framed else "frame"] += 1
                several += len(error.problems) > 1
                continue
            outcomes["decoded"] += 1
            again = _wire.encode(manifest)
            if again != data:
                assert msgpack.unpackb(payload_of(again)) == msgpack.unpackb(payload_of(data)), data.hex()
                assert len(again) <= len(data), data.hex()
        report[way] = outcomes
    unit = 1 if sys.platform == "darwin" else 1024
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    return {**report, "several": several, "grown_nbytes": grown}
