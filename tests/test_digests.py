"""`_digests`: what happened to the small files of an item since they were written."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from etils import epath
from fuzz_wire import payload_of, seal

from orbax_explicit import _digests
from orbax_explicit._digests import DIGESTS_FILE, Digests, list_small_files, read_digests, write_digests
from orbax_explicit._errors import FormatError
from orbax_explicit._framing import digest

MAGIC = b"\x89OXD\r\n\x1a\n"
FILES = {
    "_METADATA": b'{"tree_metadata": {}}',
    "_sharding": b"{}",
    "_strings.json": b'{"a": "x"}',
    "array_metadatas/process_0": b"[0]",
    "array_metadatas/process_1": b"[1]",
}


@pytest.fixture
def item(tmp_path: Path) -> epath.Path:
    """The directory of an item, its small files and something else, before Orbax commits it."""
    (tmp_path / "array_metadatas").mkdir()
    (tmp_path / "manifest.ocdbt").write_bytes(b"checked by its reader")
    (tmp_path / "w").mkdir()
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return epath.Path(tmp_path)


def problem_of(item: epath.Path) -> str:
    """Why the digests of an item cannot be read, with what to do."""
    with pytest.raises(FormatError) as caught:
        read_digests(item)
    (problem,) = caught.value.problems
    assert problem.could_not.startswith(f"cannot read {item / DIGESTS_FILE}: ")
    assert problem.fix
    return str(problem)


def test_what_was_written_is_read(item: epath.Path) -> None:
    """A digest of each small file, by its path in the item."""
    write_digests(item)
    found = read_digests(item)
    assert found.files == {name: digest(data) for name, data in FILES.items()}
    for name, data in FILES.items():
        found.check(name, data)


def test_the_bytes_are_those_of_the_page(item: epath.Path) -> None:
    """Written here independently, as docs/format.md says."""
    write_digests(item)
    entries = [[name, digest(FILES[name])] for name in sorted(FILES)]
    assert (item / DIGESTS_FILE).read_bytes() == seal(msgpack.packb(entries), magic=MAGIC)


@pytest.mark.parametrize("present", [(), ("_METADATA",), ("_METADATA", "array_metadatas/process_1")], ids=str)
def test_only_files_that_are_there_are_listed(tmp_path: Path, present: tuple[str, ...]) -> None:
    """Which ones there are depends on the tree: one without text has no `_strings.json`."""
    for name in present:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(FILES[name])
    item = epath.Path(tmp_path)
    assert list_small_files(item) == list(present)
    write_digests(item)
    assert read_digests(item).files == {name: digest(FILES[name]) for name in present}


def test_an_item_without_digests_is_taken_as_it_is(item: epath.Path) -> None:
    """Stock Orbax writes none, nor did this package before."""
    found = read_digests(item)
    assert found == Digests(files=None)
    found.check("_METADATA", b"anything")
    found.check("_strings.json", None)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        pytest.param("_METADATA", b"{}", "cannot trust _METADATA: its bytes do not have the digest", id="changed"),
        pytest.param("_METADATA", b"", "cannot trust _METADATA: its bytes do not have the digest", id="emptied"),
        pytest.param("_METADATA", None, "cannot find _METADATA, which was written with this", id="missing"),
        pytest.param(
            "array_metadatas/process_2", b"[2]", "which was not written with this checkpoint", id="additional"
        ),
    ],
)
def test_what_is_not_what_was_written_is_an_error(item: epath.Path, name, data, says) -> None:
    """With the name of the file, and what to do."""
    write_digests(item)
    with pytest.raises(FormatError, match=says) as caught:
        read_digests(item).check(name, data)
    assert caught.value.problems[0].fix


def test_a_file_that_is_neither_written_nor_there_is_no_error(item: epath.Path) -> None:
    """A reader may ask for what this item has not."""
    write_digests(item)
    read_digests(item).check("array_metadatas/process_2", None)


def test_every_flipped_bit_of_the_digests_is_noticed(item: epath.Path) -> None:
    """A digest that is damaged itself never makes a good file look like a bad one."""
    write_digests(item)
    data = (item / DIGESTS_FILE).read_bytes()
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        (item / DIGESTS_FILE).write_bytes(bytes(flipped))
        problem_of(item)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_of_a_small_file_is_noticed(item: epath.Path, name: str) -> None:
    """Whatever its reader would have made of it."""
    write_digests(item)
    found = read_digests(item)
    for position in range(8 * len(FILES[name])):
        flipped = bytearray(FILES[name])
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(FormatError, match=f"cannot trust {name}"):
            found.check(name, bytes(flipped))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda data: b"", "within its magic", id="an empty file"),
        pytest.param(lambda data: data[:-1], "the file is cut off", id="cut off"),
        pytest.param(lambda data: seal(payload_of(data)), "no file of this format", id="the magic of the other file"),
        pytest.param(
            lambda data: seal(payload_of(data), magic=MAGIC, version=2),
            "cannot read a file of a newer version",
            id="a newer version",
        ),
        pytest.param(lambda data: seal(b"\xc1", magic=MAGIC), "its payload is no msgpack", id="no msgpack"),
        pytest.param(lambda data: seal(b"", magic=MAGIC), "its payload is no msgpack", id="no payload"),
        pytest.param(lambda data: seal(b"\x90\x90", magic=MAGIC), "its payload is no msgpack", id="two payloads"),
        pytest.param(lambda data: seal(b"\x91" * 10_000, magic=MAGIC), "its payload is no msgpack", id="a deep nest"),
        pytest.param(lambda data: seal(b"\xdd\xff\xff\xff\xff", magic=MAGIC), "no msgpack", id="a huge array"),
        pytest.param(lambda data: seal(b"\x91\xa1\xff", magic=MAGIC), "no msgpack", id="a name that is no text"),
    ],
)
def test_a_damaged_file_of_digests_is_an_error(item: epath.Path, damage, says) -> None:
    """Never taken for one that is not there."""
    write_digests(item)
    (item / DIGESTS_FILE).write_bytes(damage((item / DIGESTS_FILE).read_bytes()))
    assert says in problem_of(item)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param({"a": bytes(16)}, id="a map"),
        pytest.param(None, id="nil"),
        pytest.param(["a"], id="names alone"),
        pytest.param([["a", bytes(15)]], id="a digest too short"),
        pytest.param([["a", "0123456789abcdef"]], id="a digest that is text"),
        pytest.param([[b"a", bytes(16)]], id="a name that is bytes"),
        pytest.param([["a", bytes(16), 0]], id="three to an entry"),
    ],
)
def test_a_payload_of_something_else_is_an_error(item: epath.Path, payload) -> None:
    """The frame is right, the content is not."""
    (item / DIGESTS_FILE).write_bytes(seal(msgpack.packb(payload), magic=MAGIC))
    assert "its payload is not an array of names with digests" in problem_of(item)


def test_a_newer_version_says_what_to_do(item: epath.Path) -> None:
    """Upgrading, rather than restoring a good file from a copy."""
    (item / DIGESTS_FILE).write_bytes(seal(b"\x90", magic=MAGIC, version=2))
    assert "upgrade orbax_explicit" in problem_of(item)


def test_a_file_of_digests_that_is_too_large_is_not_read(item: epath.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is looked at first."""
    write_digests(item)

    def read(self: epath.Path) -> bytes:
        raise AssertionError("it was read")

    monkeypatch.setattr(_digests, "_FRAME", _digests.Frame(magic=MAGIC, version=1, max_payload_nbytes=10))
    monkeypatch.setattr(type(item), "read_bytes", read)
    assert "it holds more than 46 bytes" in problem_of(item)
