"""JSON from a checkpoint that may be damaged or hostile."""

from pathlib import Path

import pytest
from etils import epath

from orbax_explicit import _stock_json
from orbax_explicit._stock_json import UnreadableError, is_text, parse_json, parse_json_object, read_file, shown


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is its bytes, None where there is none, and refused where it is too large or no file."""
    file = epath.Path(tmp_path / "file")
    assert read_file(file) is None
    file.write_bytes(b"abc")
    assert read_file(file) == b"abc"
    with pytest.raises(UnreadableError, match="not readable"):
        read_file(epath.Path(tmp_path))
    monkeypatch.setattr(_stock_json, "_MAX_FILE_BYTES", 2)
    with pytest.raises(UnreadableError, match="larger than 2 bytes"):
        read_file(file)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"{", id="cut short"),
        pytest.param(b"\xff\xfe\x00", id="no text"),
        pytest.param(b"[" * 1_000_000, id="nested without end"),
        pytest.param(b"9" * 100_000, id="a number without end"),
    ],
)
def test_text_that_is_not_json(text: bytes) -> None:
    """Every way not to be JSON is one exception."""
    with pytest.raises(UnreadableError, match=r"^not JSON$"):
        parse_json(text)


def test_objects() -> None:
    """What must be an object is refused with what it is."""
    assert parse_json_object(b'{"a": [1, null]}') == {"a": [1, None]}
    with pytest.raises(UnreadableError, match=r"^not a JSON object but 3$"):
        parse_json_object("3")


def test_values_in_messages_are_short() -> None:
    """A message never carries a whole file."""
    assert shown("x" * 10) == repr("x" * 10)
    assert shown("x" * 1000) == "'" + "x" * 79 + "..."


@pytest.mark.parametrize(
    ("value", "expected"), [("ü", True), ("", True), ("\ud800", False), (b"a", False), (None, False)]
)
def test_text_can_be_stored(value: object, expected: bool) -> None:
    """JSON can spell what no other format can hold."""
    assert is_text(value) == expected
