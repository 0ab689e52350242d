"""Damage to a checkpoint's files, and what is promised of it.

What was done to a file is a `Damage`; what every reader and `verify` made of it is an `Outcome`; what breaks the promise
is found by `breaches`, and told by `table`. Nothing here knows JAX: `damage_trials` does the damage and reads. The
suite runs a few of them (`test_damage`), `benchmarks/fuzz_damage.py` as many as it is asked for.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from orbax_explicit._stock_json import UnreadableError
from orbax_explicit._zarr import parse_zarr

FLIP, CUT, DELETE = "flip", "cut", "delete"

RIGHT, RAISED, RAW, WRONG, LOST = RESULTS = "right", "raised", "raised another's error", "wrong", "lost or changed"

Contents: TypeAlias = Mapping[str, bytes]
"""What is in each file of a checkpoint, by its path below the checkpoint."""


@dataclass(frozen=True)
class Damage:
    """What was done to one file.

    Attributes:
        kind: A flipped bit, a file cut off, or one deleted.
        file: The file, by its path below the checkpoint.
        at: The bit that was flipped, counted from the start of the file; the bytes that a cut leaves.
    """

    kind: Literal["flip", "cut", "delete"]
    file: str
    at: int = 0

    def __str__(self) -> str:
        how = {FLIP: f"bit {self.at % 8} of byte {self.at // 8} flipped", CUT: f"cut to {self.at} bytes"}
        return f"{self.file}: {how.get(self.kind, 'deleted')}"

    def damaged(self, data: bytes) -> bytes | None:
        """What is left of the bytes of a file; None where it is deleted."""
        if self.kind == DELETE:
            return None
        if self.kind == CUT:
            return data[: self.at]
        byte = self.at // 8
        return data[:byte] + bytes([data[byte] ^ 1 << self.at % 8]) + data[byte + 1 :]


def read_contents(root: pathlib.Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@contextlib.contextmanager
def done(damage: Damage, root: pathlib.Path, contents: Contents) -> Iterator[None]:
    """Does damage to a checkpoint, and makes it whole again: whatever a reader has removed or added as well."""
    file = root / damage.file
    data = damage.damaged(contents[damage.file])
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents[damage.file])
        present = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        for name in contents.keys() - present:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(contents[name])
        for name in present - contents.keys():
            (root / name).unlink()


# Choosing.


def flips(contents: Contents, count: int, rng: random.Random) -> list[Damage]:
    """Single bits: of two in three the file is drawn first, each alike, of the others any byte of the checkpoint."""
    # By what is in them, for names are drawn by OCDBT.
    names = sorted((name for name in contents if contents[name]), key=lambda name: (file_kind(name), contents[name]))
    sizes = [len(contents[name]) for name in names]
    chosen = []
    for i in range(count):
        (name,) = rng.choices(names, weights=None if i % 3 else sizes)
        chosen.append(Damage(FLIP, name, rng.randrange(8 * len(contents[name]))))
    return chosen


def losses(contents: Contents, rng: random.Random) -> list[Damage]:
    """Of every file: deleted, emptied, without its last byte, and cut off somewhere."""
    chosen = []
    for name, data in contents.items():
        lengths = {0, max(0, len(data) - 1), rng.randrange(len(data))} if data else set()
        chosen += [Damage(DELETE, name), *(Damage(CUT, name, length) for length in sorted(lengths))]
    return chosen


def one_of_each_kind(contents: Contents, rng: random.Random) -> list[Damage]:
    """One flip, one cut and one deletion for each kind of file."""
    by_kind: dict[str, list[str]] = {}
    for name in contents:
        by_kind.setdefault(file_kind(name), []).append(name)
    chosen = []
    for names in by_kind.values():
        # One with bytes in it, if there is any.
        flip, cut, gone = (max(rng.sample(names, min(2, len(names))), key=lambda n: len(contents[n])) for _ in range(3))
        if contents[flip]:
            chosen.append(Damage(FLIP, flip, rng.randrange(8 * len(contents[flip]))))
        if contents[cut]:
            chosen.append(Damage(CUT, cut, rng.randrange(len(contents[cut]))))
        chosen.append(Damage(DELETE, gone))
    return chosen


def file_kind(name: str) -> str:
    """What a file is, whatever its own name or its process."""
    *above, last = name.split("/")
    folder = above[-1] if above else ""
    if folder == "array_metadatas":
        return "array_metadatas/*"
    if folder == "d":
        return "ocdbt.process_*/d/*" if above[-2:-1] and above[-2].startswith("ocdbt.process_") else "d/*"
    if last == "manifest.ocdbt":
        return "ocdbt.process_*/manifest.ocdbt" if folder.startswith("ocdbt.process_") else last
    if last in (".zarray", "zarr.json"):
        return f"<array>/{last}"
    if last.replace(".", "").isdigit() or folder == "c" or "/c/" in name:
        return "<array>/<chunk>"
    return last


# What came of it.


@dataclass(frozen=True)
class Region:
    """Where in a checkpoint a byte lies.

    Attributes:
        text: What lies there.
        leaf: The path of the leaf whose value or description lies there; None where there is none, or several.
        start: Where it starts in its file.
        stop: Where it ends.
        is_read: Whether a restore reads what the damage hits of it.
        is_chunk: Whether it is a chunk of an array, encoded.
    """

    text: str
    leaf: str | None = None
    start: int = 0
    stop: int = 0
    is_read: bool = True
    is_chunk: bool = False


@dataclass(frozen=True)
class Reading:
    """What one reader made of a damaged checkpoint.

    Attributes:
        result: `RIGHT`, `RAISED` (an error of this package, or that a file is missing), `RAW` (another error), `WRONG`
            (a wrong array; of our own readers anything wrong), or `LOST` (something else wrong, of stock's readers).
        detail: The error, or what is wrong.
        seconds: How long it took.
        affects: The leaves that the error names.
    """

    result: str
    detail: str = ""
    seconds: float = 0.0
    affects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What `verify` said.

    Attributes:
        ok: Whether it found nothing; None where it raised.
        files: The files that it names, by their paths below the item.
        leaves: The leaves that it names.
        detail: All that it said, or the error.
        seconds: How long it took.
    """

    ok: bool | None
    files: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What came of one damage.

    Attributes:
        variant: The checkpoint.
        damage: What was done.
        item: The directory of the item below the checkpoint; empty where it is the checkpoint.
        region: What lay there.
        readings: What each reader made of it.
        verdict: What `verify` said; None where a process died before.
        explanation: Why it is harmless; empty where it is not, or where nobody knows.
        died: How the process that read ended, where it did.
    """

    variant: str
    damage: Damage
    item: str = ""
    region: Region = Region("?")
    readings: Mapping[str, Reading] = dataclasses.field(default_factory=dict)
    verdict: Verdict | None = None
    explanation: str = ""
    died: str = ""

    @property
    def kind(self) -> str:
        """The kind of the file, with the place where it lies beside the item."""
        return file_kind(self.damage.file) if self.is_in_item else f"{file_kind(self.damage.file)} beside the item"

    @property
    def is_in_item(self) -> bool:
        """Whether the file belongs to the item, and so to this package; beside it lies what a manager writes."""
        return not self.item or self.damage.file.startswith(f"{self.item}/")

    @property
    def is_harmless(self) -> bool:
        """Whether each of our readers gave the right values."""
        return not self.died and all(reading.result == RIGHT for reading in ours(self.readings).values())


def ours(readings: Mapping[str, Reading]) -> dict[str, Reading]:
    """The readings of this package; those of stock Orbax are named after it."""
    return {name: reading for name, reading in readings.items() if not name.startswith("stock")}


_UNCHECKED_BY_STOCK = frozenset({"<array>/.zarray", "<array>/zarr.json"})


def breaches(outcome: Outcome) -> list[str]:
    """What breaks the promise; empty where it holds.

    No reader of ours gives a wrong value, or raises an error that is not this package's. Stock Orbax gives no wrong
    array, but for one whose Zarr metadata are a file, which nothing that it reads could check. `verify` names the file, and the leaf where one is hit, of all that is not harmless. All that is harmless has an
    explanation.
    """
    if outcome.died:
        return [f"the process died: {outcome.died}"]
    found = []
    for name, reading in outcome.readings.items():
        # What lies beside the item is Orbax's, and so are its errors.
        is_own = name in ours(outcome.readings) and (reading.result != RAW or outcome.is_in_item)
        is_unchecked = name not in ours(outcome.readings) and outcome.kind in _UNCHECKED_BY_STOCK
        if (reading.result == WRONG and not is_unchecked) or (is_own and reading.result not in (RIGHT, RAISED)):
            found.append(f"{name} {reading.result}: {reading.detail}")
    assert outcome.verdict is not None
    verdict = outcome.verdict
    if verdict.ok is None:
        found.append(f"verify raised: {verdict.detail}")
    elif not outcome.is_harmless and outcome.is_in_item:
        file = outcome.damage.file.removeprefix(f"{outcome.item}/")
        if verdict.ok:
            found.append("verify found nothing, and a restore did")
        elif file not in verdict.files:
            found.append(f"verify does not name the file: {verdict.detail}")
        elif outcome.region.leaf is not None and outcome.region.leaf not in verdict.leaves:
            found.append(f"verify does not name the leaf: {outcome.region.leaf}: {verdict.detail}")
    if outcome.is_harmless and not outcome.explanation:
        found.append("harmless, and nobody knows why")
    return found


# Why damage is harmless.


_UNREAD = {
    "commit_success.txt": "that it is there says that the item was committed; nobody reads what is in it",
    "_CHECKPOINT_METADATA": "times, and the names of handlers: a checkpointer that has its handler needs neither",
    "orbax.checkpoint": "the mark of v1: a checkpoint without it is read as one of v0, which keeps as much",
    "_sharding": "written for stock Orbax, which alone reads it",
    "array_metadatas/*": "written for stock Orbax, which alone reads it",
    "ocdbt.process_*/manifest.ocdbt": "of one process's database, which nobody opens after the merge",
}


def explanation(damage: Damage, region: Region, data: bytes) -> str:
    """Why this damage changes no value, as far as it can be shown; empty where it cannot.

    Args:
        damage: What was done.
        region: Where.
        data: What was in the file.
    """
    if unread := _UNREAD.get(file_kind(damage.file)):
        return unread
    if not region.is_read:
        return f"{region.text}, which nobody reads"
    if region.is_chunk and damage.kind == FLIP:
        chunk = slice(region.start, region.stop)
        damaged = damage.damaged(data)
        assert damaged is not None
        if data[chunk].startswith(_ZSTD_MAGIC):
            return _zstd_explanation(damage.at - 8 * region.start)
        return _gzip_explanation(data[chunk], damaged[chunk], damage.at - 8 * region.start)
    if file_kind(damage.file) in ("<array>/.zarray", "<array>/zarr.json") and damage.kind == FLIP:
        return _zarr_explanation(data, damage.damaged(data))
    if damage.file.endswith("explicit_digests.msgpack") and damage.kind == DELETE:
        return "digests are for what is damaged, and nothing else is; verify names the file"
    return ""


def _zarr_explanation(metadata: bytes, damaged: bytes | None) -> str:
    """What changed Zarr metadata do not say of an array, as it is read here."""
    try:
        if parse_zarr(metadata) == parse_zarr(damaged or b""):
            return "what says nothing of shape, chunks, dtype and codec: a level, or a member whose default is the same"
    except UnreadableError:
        return ""
    before, after = json.loads(metadata), json.loads(damaged or b"")
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed == ["dimension_separator"] and len(before["shape"]) < 2:
        return "what separates the numbers in the key of a chunk, where there is but one"
    return ""


_GZIP_FIELDS = {3: "FTEXT", **dict.fromkeys(range(4, 8), "MTIME"), 8: "XFL", 9: "OS"}


def _gzip_explanation(chunk: bytes, damaged: bytes, bit: int) -> str:
    byte = bit // 8
    if chunk[:2] != b"\x1f\x8b" or gunzip(chunk) != gunzip(damaged):
        return ""
    if byte in _GZIP_FIELDS:
        return f"the field {_GZIP_FIELDS[byte]} of a gzip header, which means nothing to a decoder"
    if byte in _stored_block_heads(chunk) and bit % 8 >= 3:
        return "padding after the type of a stored block, which a decoder skips"
    return "another way to say the same bytes in deflate: bits that pad a stream, or a copy of equal bytes"


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER_BITS = {2: "that a checksum follows, which is then not read", 4: "which is unused"}


def _zstd_explanation(bit: int) -> str:
    """What is left where every reader gives the right values: what was decoded passed zstd's checksum, if it was read."""
    if bit // 8 == len(_ZSTD_MAGIC) and bit % 8 in _ZSTD_HEADER_BITS:
        return f"the bit of a zstd header {_ZSTD_HEADER_BITS[bit % 8]}"
    return "another way to say the same bytes in zstd"


def gunzip(data: bytes) -> bytes | None:
    """What zlib makes of a gzip stream, as TensorStore has it do; None where it notices that something is wrong."""
    decoder = zlib.decompressobj(wbits=31)
    try:
        decoded = decoder.decompress(data) + decoder.flush()
    except zlib.error:
        return None
    return decoded if decoder.eof and not decoder.unused_data else None


def _stored_block_heads(chunk: bytes) -> set[int]:
    """Where the stored blocks start that a gzip stream without options begins with."""
    heads, at = set(), 10
    while at + 5 <= len(chunk) and chunk[at] >> 1 & 3 == 0:
        heads.add(at)
        if chunk[at] & 1:
            break
        at += 5 + int.from_bytes(chunk[at + 1 : at + 3], "little")
    return heads


# Telling.


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by file and reader, why what is harmless is, and every breach."""
    kinds = sorted({(outcome.kind, outcome.damage.kind) for outcome in outcomes})
    lines = [f"{'file':<38}{'damage':<8}{'what readers gave'}"]
    for kind, how in kinds:
        these = [outcome for outcome in outcomes if (outcome.kind, outcome.damage.kind) == (kind, how)]
        texts = _reading_lines(these)
        lines += [f"{kind:<38}{how:<8}{text}" for text in texts[:1]] + [f"{'':<46}{text}" for text in texts[1:]]
    lines += [f"{'all':<46}{text}" for text in _reading_lines(outcomes)]
    lines += ["", *_verdict_lines(outcomes), "", *_harmless_lines(outcomes), "", *_breach_lines(outcomes)]
    return "\n".join(lines)


def _reading_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """How many readings had which result, the readers of the same numbers in one line."""
    counts: dict[str, collections.Counter[str]] = {}
    for outcome in outcomes:
        for name, reading in outcome.readings.items():
            counts.setdefault(name, collections.Counter())[reading.result] += 1
    names: dict[str, list[str]] = {}
    for name, results in counts.items():
        text = ", ".join(f"{results[result]} {result}" for result in RESULTS if results[result])
        names.setdefault(text, []).append(name)
    return [f"{text}: {', '.join(alike)}" for text, alike in names.items()]


def _verdict_lines(outcomes: Iterable[Outcome]) -> list[str]:
    counts = collections.Counter(
        ("harmless" if outcome.is_harmless else "noticed by a restore", _verdict_text(outcome.verdict))
        for outcome in outcomes
    )
    return [f"{damage}, {said}: {count}" for (damage, said), count in sorted(counts.items())]


def _verdict_text(verdict: Verdict | None) -> str:
    if verdict is None or verdict.ok is None:
        return "verify gave no report"
    return "verify finds nothing" if verdict.ok else "verify reports it"


def _harmless_lines(outcomes: Sequence[Outcome]) -> list[str]:
    counts = collections.Counter(
        (outcome.damage.kind, outcome.kind, outcome.explanation or "?") for outcome in outcomes if outcome.is_harmless
    )
    lines = [f"harmless: {sum(counts.values())} of {len(outcomes)}"]
    return lines + [f"{n:>6}  {how} in {kind}: {why}" for (how, kind, why), n in sorted(counts.items())]


_BREACHES_SHOWN = 3


def _breach_lines(outcomes: Iterable[Outcome]) -> list[str]:
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for breach in breaches(outcome):
            what = breach.partition("\n")[0]
            sort = f"{outcome.kind}, {outcome.damage.kind}: {what.partition(': ')[0]}"
            found.setdefault(sort, []).append(f"{outcome.variant}: {outcome.damage} ({outcome.region.text}): {what}")
    lines = [f"breaches: {sum(map(len, found.values()))}"]
    for sort, texts in sorted(found.items()):
        lines += [f"  {len(texts)} x {sort}", *(f"      {text[:300]}" for text in texts[:_BREACHES_SHOWN])]
    return lines
