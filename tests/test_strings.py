"""`_strings`: text leaves, out of the file that stock's handler writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from etils import epath

from orbax_explicit._digests import Digests
from orbax_explicit._errors import FormatError
from orbax_explicit._framing import digest
from orbax_explicit._strings import STRINGS_FILE, read_strings

UNKNOWN = Digests(files=None)
ODD = {
    "a": "x",
    "layer.b": "a point in a name",
    "": "a tree that is one leaf",
    "with space": "",
    "é": "ü\u2028",
    "0": "a number",
    'quo"te': 'quo"te',
}


def write(tmp_path: Path, document: object) -> epath.Path:
    """An item with this file of texts."""
    (tmp_path / STRINGS_FILE).write_text(document if isinstance(document, str) else json.dumps(document))
    return epath.Path(tmp_path)


def problems_of(item: epath.Path, names: list[str], digests: Digests = UNKNOWN) -> list[tuple[str, tuple[str, ...]]]:
    """What cannot be read, and the leaves that it affects."""
    with pytest.raises(FormatError) as caught:
        read_strings(item, names, digests)
    assert all(problem.fix for problem in caught.value.problems)
    return [(problem.could_not, problem.affects) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("document", "name", "text"),
    [
        *(pytest.param(ODD, name, text, id=f"the name {name!r}") for name, text in ODD.items()),
        pytest.param({"a": {"b": "x"}}, "a/b", "x", id="a slash, which points below"),
        pytest.param({"a/b": "x"}, "a~1b", "x", id="~1 stands for a slash"),
        pytest.param({"a~b": "x"}, "a~0b", "x", id="~0 stands for a tilde"),
        pytest.param({"a~1b": "x"}, "a~01b", "x", id="~01 stands for a tilde and a one"),
        pytest.param({"a~b": "x"}, "a~b", "x", id="a tilde that stands for itself"),
        pytest.param({"": {"": "x"}}, "/", "x", id="two empty names"),
    ],
)
def test_a_text_lies_at_the_pointer_of_its_name(tmp_path, document, name, text) -> None:
    """By RFC 6901."""
    assert read_strings(write(tmp_path, document), [name], UNKNOWN) == {name: text}


@pytest.mark.parametrize(
    "name", ["a", "layer.b", "a/b", "a~0b", "a~1b", "a~01b", "a//b", "é", "0", "0/1", "-", "", "/"]
)
def test_what_stock_writes_is_read(tmp_path, name: str) -> None:
    """Under the same name, however stock takes it apart."""
    handler, item = ocp.type_handlers.StringHandler(), epath.Path(tmp_path)
    infos = [
        ocp.type_handlers.ParamInfo(name=name, path=item / name, parent_dir=item, is_ocdbt_checkpoint=True)
        for name in (name, "other")
    ]

    async def write_as_stock() -> None:
        for future in await handler.serialize(["the text", "another"], infos):
            future.result()

    asyncio.run(write_as_stock())
    assert read_strings(item, [name, "other"], UNKNOWN) == {name: "the text", "other": "another"}
    assert asyncio.run(handler.deserialize(infos)) == ["the text", "another"]


def test_texts_are_read_only_where_there_are_leaves_of_text(tmp_path) -> None:
    """A tree without them has no such file."""
    assert read_strings(epath.Path(tmp_path), [], UNKNOWN) == {}
    assert read_strings(epath.Path(tmp_path), iter(()), UNKNOWN) == {}


def test_all_that_is_lost_is_listed(tmp_path) -> None:
    """What is not there, what is no text, and what lies below a text; by the names of the leaves."""
    item = write(tmp_path, {"a": "x", "n": 3, "d": {"e": "y"}, "l": ["z"]})
    names = ["a", "n", "d", "l", "l/0", "gone", "a/b", "d/e"]
    assert problems_of(item, names) == [("cannot find text in _strings.json", ("n", "d", "l", "l/0", "gone", "a/b"))]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        pytest.param("{", "it is not JSON", id="no JSON"),
        pytest.param("", "it is not JSON", id="an empty file"),
        pytest.param("[" * 100_000, "it is not JSON", id="a deep nest"),
    ],
)
def test_a_file_that_is_no_json_is_an_error(tmp_path, document, reason) -> None:
    """That lists all leaves of text."""
    item = write(tmp_path, document)
    assert problems_of(item, ["a", "b"]) == [(f"cannot read text from _strings.json: {reason}", ("a", "b"))]


@pytest.mark.parametrize("document", [["x"], "x", 3, None], ids=["a list", "a text", "a number", "null"])
def test_a_file_of_something_else_has_no_texts(tmp_path, document) -> None:
    """Stock writes an object."""
    item = write(tmp_path, json.dumps(document))
    assert problems_of(item, ["a", ""]) == [("cannot find text in _strings.json", ("a", ""))]


def test_a_file_that_is_gone_is_an_error(tmp_path) -> None:
    """Whether or not it is known to have been there."""
    item = epath.Path(tmp_path)
    assert problems_of(item, ["a"]) == [("cannot read text from _strings.json: it is missing", ("a",))]
    known = Digests(files={STRINGS_FILE: bytes(16)})
    assert problems_of(item, ["a"], known)[0][0].startswith("cannot find _strings.json")


def test_a_changed_text_is_an_error(tmp_path) -> None:
    """Where the digest of the file is known; it would be another text."""
    item = write(tmp_path, {"a": "x"})
    known = Digests(files={STRINGS_FILE: digest((item / STRINGS_FILE).read_bytes())})
    assert read_strings(item, ["a"], known) == {"a": "x"}
    write(tmp_path, {"a": "y"})
    assert read_strings(item, ["a"], UNKNOWN) == {"a": "y"}
    assert problems_of(item, ["a"], known)[0][0].startswith("cannot trust _strings.json")
