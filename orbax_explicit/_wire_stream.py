"""Reading bytes that may be anything: a stream of msgpack values, tables, and what was found wrong.

This knows how a payload is built, not what it means; that is for `_wire_decoding`. Long arrays are read item
by item, after their declared length was held against the bytes that are left; only arrays that are no longer
than an entry may be are read whole. (`msgpack.unpackb` would allocate every declared length at once, 1,024 deep.)

Nothing here prints, compares or hashes a value before its type is known: msgpack nests deeper than Python recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, NoReturn, TypeVar, cast

import msgpack

from orbax_explicit._errors import FormatError, RecordError
from orbax_explicit._wire_schema import MAX_ENTRY_LENGTH, MAX_PROBLEMS

S = TypeVar("S")
T = TypeVar("T")

_MAX_PROBLEM_LENGTH: Final = 500
_INT_ONLY: Final = frozenset({int})
# Bytes of the length after the first byte of a longer array, by that byte.
_ARRAY_WIDTHS: Final = {b"\xdc": 2, b"\xdd": 4}


class EntryError(Exception):
    """What is wrong with an entry; without arguments where it only mentions an entry that was refused."""


class Problems:
    """What was found wrong so far."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, place: str, wrong: str) -> None:
        """Notes what is wrong at `place`; raises once there is more than a person would read."""
        self._found.append(_printable(f"{place}: {wrong}"))
        if len(self._found) == MAX_PROBLEMS:
            self.end("the payload", f"reading ended after {MAX_PROBLEMS} problems; there may be more")

    def end(self, place: str, wrong: str) -> NoReturn:
        """Raises what was found so far, and that nothing after `place` can be read."""
        raise FormatError(*self._found, _printable(f"{place}: {wrong}"))

    def end_if_any(self) -> None:
        """Raises if anything was found."""
        if self._found:
            raise FormatError(*self._found)


class Source:
    """The payload as a stream of msgpack values; what is no such stream ends the reading.

    Attributes:
        place: The section that is being read, for messages.
    """

    def __init__(self, payload: bytes, problems: Problems) -> None:
        self.place = "the payload"
        self._nbytes = len(payload)
        self._problems = problems
        self._unpacker = msgpack.Unpacker(
            use_list=False,
            read_size=1,
            max_buffer_size=max(1, self._nbytes),
            max_array_len=MAX_ENTRY_LENGTH,
            max_map_len=0,
            max_ext_len=0,
            object_hook=_refuse_map,
            ext_hook=_refuse_extension,
        )
        self._unpacker.feed(payload)

    def values(self, count: int) -> list[object]:
        """The next `count` values, each a scalar or an array that is no longer than an entry may be."""
        unpack: Callable[[], object] = self._unpacker.unpack
        return self._read(lambda: [unpack() for _ in range(count)])

    def array_length(self) -> int:
        """The length of the array whose items come next."""
        length = self._read(self._array_header)
        remaining = self._remaining()
        if length > remaining:
            self.end(f"an array declares {length} items where {remaining} bytes are left")
        return length

    def array(self) -> list[object]:
        """The items of the next array, which may be of any length."""
        return self.values(self.array_length())

    def expect_end(self) -> None:
        """Ends the reading if anything follows."""
        remaining = self._remaining()
        if remaining:
            self.end(f"{remaining} bytes follow the last section")

    def end(self, wrong: str) -> NoReturn:
        """Ends the reading here."""
        self._problems.end(f"{self.place}, before byte {self._unpacker.tell()} of the payload", wrong)

    def _array_header(self) -> int:
        # Not `Unpacker.read_array_header`: whether `max_array_len` holds for it differs between msgpack's two readers.
        first: bytes = self._unpacker.read_bytes(1)
        if b"\x90" <= first <= b"\x9f":
            return first[0] & 15
        width = _ARRAY_WIDTHS.get(first)
        if width is None:
            raise ValueError("no array")
        length: bytes = self._unpacker.read_bytes(width)
        if len(length) < width:
            raise ValueError("no length of an array")
        return int.from_bytes(length, "big")

    def _remaining(self) -> int:
        position: int = self._unpacker.tell()
        return self._nbytes - position

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        # Some of msgpack's exceptions are ValueErrors, some are not; broken UTF-8 is a ValueError, too.
        except (msgpack.exceptions.UnpackException, ValueError) as error:
            self.end(f"no msgpack of this format ({type(error).__name__}: {error})")


class Table(Generic[T]):
    """Entries that others mention by position.

    Attributes:
        name: Name of the section.
        entries: What was read; None for an entry that was refused.
    """

    def __init__(self, name: str, entries: Sequence[T | None]) -> None:
        self.name = name
        self.entries = entries
        self._mentioned = 0
        self._early: tuple[int, int] | None = None

    def get(self, position: object) -> T:
        """The entry at `position`.

        Raises:
            EntryError: There is none, or it was refused itself.
        """
        if type(position) is not int:
            raise EntryError(f"a position in {self.name} is of type {type(position).__name__}")
        if not 0 <= position < len(self.entries):
            raise EntryError(f"mentions {self.name}[{position}] of {len(self.entries)}")
        if position >= self._mentioned:
            if position > self._mentioned and self._early is None:
                self._early = position, self._mentioned
            self._mentioned = position + 1
        entry = self.entries[position]
        if entry is None:
            raise EntryError
        return entry

    def optional(self, position: object) -> T | None:
        """The entry at `position`, or None for nil."""
        return None if position is None else self.get(position)

    def all(self, positions: object) -> tuple[T, ...]:
        """The entries at several positions."""
        return tuple([self.get(position) for position in array(positions)])

    def check_order(self, problems: Problems) -> None:
        """Notes it if entries are not in the order of first mention or not mentioned at all."""
        if self._early is not None:
            early, late = self._early
            problems.note(f"{self.name}[{early}]", f"is mentioned before {self.name}[{late}]")
        elif self._mentioned < len(self.entries):
            problems.note(f"{self.name}[{self._mentioned}]", "is mentioned nowhere")


def read_table(name: str, source: Source, problems: Problems, build: Callable[[object], T]) -> Table[T]:
    """A table of entries that are short enough to be read whole."""
    source.place = name
    raw = source.array()
    entries: list[T | None] = []
    for i, entry in enumerate(raw):
        # What `built` does, without its cost where nothing is wrong: there can be a leaf for each array.
        try:
            entries.append(build(entry))
        except (RecordError, EntryError) as error:
            _note_refusal(f"{name}[{i}]", problems, error)
            entries.append(None)
    # Only what was built has been checked to be flat, so that it can be hashed.
    _check_distinct(name, problems, [None if entries[i] is None else raw[i] for i in range(len(raw))])
    return Table(name, entries)


def stream_table(name: str, source: Source, problems: Problems, build: Callable[[int], tuple[T, Hashable]]) -> Table[T]:
    """A table of entries of any length; `build` reads the next one whole, and also gives it as a value to compare."""
    source.place = name
    results = [built(f"{name}[{i}]", problems, build, i) for i in range(source.array_length())]
    _check_distinct(name, problems, [None if result is None else result[1] for result in results])
    return Table(name, [None if result is None else result[0] for result in results])


def built(place: str, problems: Problems, build: Callable[[S], T], argument: S) -> T | None:
    """What `build` makes, or None and notes of what is wrong."""
    try:
        return build(argument)
    except (RecordError, EntryError) as error:
        _note_refusal(place, problems, error)
        return None


def array(value: object) -> tuple[object, ...]:
    """`value`, which is an array."""
    if type(value) is not tuple:
        raise EntryError(f"a value of type {type(value).__name__} where an array belongs")
    return value


def fields(value: object, count: int) -> tuple[object, ...]:
    """`value`, which is an array of `count` fields."""
    values = array(value)
    if len(values) != count:
        raise EntryError(f"{len(values)} fields where {count} belong")
    return values


def integers(value: object) -> tuple[int, ...]:
    """`value`, which is an array of integers."""
    values = array(value)
    if not all_integers(values):
        raise EntryError("something else in an array of integers")
    return cast(tuple[int, ...], values)


def integer(value: object) -> int:
    """`value`, which is an integer."""
    if type(value) is not int:
        raise EntryError(f"a value of type {type(value).__name__} where an integer belongs")
    return value


def all_integers(values: Sequence[object]) -> bool:
    """Whether all values are integers; True and False are none."""
    return _INT_ONLY.issuperset(map(type, values))


def _note_refusal(place: str, problems: Problems, error: RecordError | EntryError) -> None:
    wrong = error.problems if isinstance(error, RecordError) else error.args
    for problem in wrong:
        problems.note(place, str(problem))


def _check_distinct(name: str, problems: Problems, entries: Sequence[object]) -> None:
    if len(set(entries)) == len(entries):
        return
    first: dict[object, int] = {None: -1}
    for i, entry in enumerate(entries):
        before = first.setdefault(entry, i)
        if before not in (-1, i):
            problems.note(f"{name}[{i}]", f"repeats {name}[{before}]")


def _printable(text: str) -> str:
    text = text if len(text) <= _MAX_PROBLEM_LENGTH else f"{text[:_MAX_PROBLEM_LENGTH]}..."
    return text.encode("utf-8", "backslashreplace").decode()


def _refuse_map(_: object) -> NoReturn:
    raise ValueError("a map")


def _refuse_extension(_code: int, _data: bytes) -> NoReturn:
    raise ValueError("an extension")
