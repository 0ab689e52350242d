"""The frame around the payload of a file: whatever happened to the file, it is told before the payload is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz_wire import payload_of, seal
from hypothesis import given
from hypothesis import strategies as st

from orbax_explicit import _digests, _framing, _wire
from orbax_explicit._errors import FormatError
from orbax_explicit._framing import Frame

FRAME = Frame(magic=b"\x89OXT\r\n\x1a\n", version=3, max_payload_nbytes=1 << 10)
PAYLOAD = b"what is \x00 kept"


def problem_of(data: bytes) -> str:
    """What is wrong with a file: one thing, as its `FormatError` says it."""
    with pytest.raises(FormatError) as caught:
        FRAME.take_off(data)
    (problem,) = caught.value.problems
    return str(problem)


@given(st.binary(max_size=1 << 10))
def test_a_payload_comes_back_with_the_version_that_was_written(payload: bytes) -> None:
    """take_off(put_on(p)) = p, for every payload of up to as many bytes as the frame takes."""
    assert FRAME.take_off(FRAME.put_on(payload)) == (3, payload)


def test_the_bytes_of_a_frame_are_those_of_the_page() -> None:
    """Magic, version, length, payload, digest: written here independently, as docs/format.md says."""
    assert FRAME.put_on(PAYLOAD) == seal(PAYLOAD, magic=FRAME.magic, version=3)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_older_version_is_read(version: int) -> None:
    """The caller is told which one it is, and picks the decoder."""
    assert FRAME.take_off(seal(PAYLOAD, magic=FRAME.magic, version=version)) == (version, PAYLOAD)


def test_no_valid_file_is_larger_than_its_frame_says() -> None:
    """A reader may refuse a file by its size, and loses none by it."""
    largest = FRAME.put_on(bytes(1 << 10))
    assert len(largest) == FRAME.max_nbytes
    assert FRAME.take_off(largest) == (3, bytes(1 << 10))
    assert "at most 1024 are read" in problem_of(seal(bytes((1 << 10) + 1), magic=FRAME.magic, version=3))


def test_no_two_kinds_of_file_are_taken_for_each_other() -> None:
    """Each kind has a magic of its own, as long as the others', that a transfer as text would change."""
    magics = [_wire.FRAME.magic, _digests._FRAME.magic, FRAME.magic]
    assert len(set(magics)) == len(magics)
    assert {len(magic) for magic in magics} == {8}
    for magic in magics:
        assert magic[0] > 127
        assert magic.endswith(b"\r\n\x1a\n")
        if magic != FRAME.magic:
            assert "no file of this format" in problem_of(seal(PAYLOAD, magic=magic))


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    """No bit is left uncovered."""
    data = FRAME.put_on(PAYLOAD)
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        problem_of(bytes(flipped))


def test_bits_are_covered_by_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without the digest, flipped bits are read as if nothing were wrong."""
    data = bytearray(FRAME.put_on(PAYLOAD))
    data[data.index(b"kept")] ^= 1
    monkeypatch.setattr(_framing, "digest", lambda _: bytes(data[-16:]))
    assert FRAME.take_off(bytes(data)) == (3, b"what is \x00 jept")


def test_every_truncation_of_a_frame_is_noticed() -> None:
    """A file that ends anywhere before its end is refused, the empty one too."""
    data = FRAME.put_on(PAYLOAD)
    for end in range(len(data)):
        assert "the file" in problem_of(data[:end])


@pytest.mark.parametrize("tail", [b"\0", b"\n", b"x" * 1000, bytes(16)], ids=["NUL", "newline", "much", "a digest"])
def test_appended_bytes_are_noticed(tail: bytes) -> None:
    """A file ends with its digest."""
    assert "something follows" in problem_of(FRAME.put_on(PAYLOAD) + tail)


def resealed(data: bytes, *, version: int = 3, nbytes: int | None = None) -> bytes:
    """The payload of a file in a frame of another version, or one that declares another length."""
    return seal(payload_of(data), magic=FRAME.magic, version=version, nbytes=nbytes)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(lambda data: data.replace(b"\r\n", b"\n"), "as text", id="CRLF to LF"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n"), "as text", id="LF to CRLF"),
        pytest.param(lambda data: data.decode("latin-1").encode(), "as text", id="Latin-1 to UTF-8"),
        pytest.param(lambda data: data.decode(errors="replace").encode(), "as text", id="decoded with replacements"),
        pytest.param(lambda data: bytes(byte & 127 for byte in data), "as text", id="seven bits"),
        pytest.param(lambda data: data[:5], "within its magic", id="cut off in the magic"),
        pytest.param(lambda data: data[:10], "within its version", id="cut off in the version"),
        pytest.param(lambda data: data[:15], "within its header", id="cut off in the length"),
        pytest.param(lambda data: data[:-1], "cut off", id="cut off at the end"),
        pytest.param(lambda data: b"{}" + data, "no file of this format", id="another file"),
        pytest.param(lambda data: data[:-1] + b"\0", "digest", id="another digest"),
        pytest.param(lambda data: resealed(data, version=0), "no version 0", id="version 0"),
        pytest.param(lambda data: resealed(data, nbytes=2**63), "at most", id="a length beyond any file"),
        pytest.param(lambda data: resealed(data, nbytes=1), "something follows", id="a length too small"),
        pytest.param(lambda data: resealed(data, nbytes=1_000), "cut off", id="a length too large"),
    ],
)
def test_damage_to_the_frame_is_named(damage: Callable[[bytes], bytes], says: str) -> None:
    """The error says what happened to the file where that can be told."""
    assert says in problem_of(damage(FRAME.put_on(PAYLOAD)))


@pytest.mark.parametrize("newer", [FRAME.version + 1, 2**32 - 1])
def test_a_newer_version_is_refused_by_name(newer: int) -> None:
    """By its number and the newest that is known, whatever follows: its digest may be computed in another way."""
    data = resealed(FRAME.put_on(PAYLOAD), version=newer)
    for variant in (data, data[:-1] + b"?", data[:12], data + b"more"):
        problem = problem_of(variant)
        assert f"version {newer}" in problem
        assert "versions up to 3" in problem
