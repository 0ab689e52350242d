"""Text leaves, which Orbax keeps in one JSON file and addresses by JSON pointers (RFC 6901) made of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from etils import epath

from orbax_explicit._digests import Digests, read_checked
from orbax_explicit._errors import FormatError, Problem
from orbax_explicit._stock_json import Json, UnreadableError, parse_json

STRINGS_FILE = "_strings.json"

_FIX = "restore the file from a copy"


def read_strings(directory: epath.Path, names: Iterable[str], digests: Digests) -> Mapping[str, str]:
    """Reads text leaves.

    Args:
        directory: The directory of the item.
        names: Storage names of the leaves.
        digests: The digests of the item's small files.

    Raises:
        FormatError: The file is missing or damaged, or lacks some of the leaves; lists these.
    """
    names = list(names)
    if not names:
        return {}
    try:
        document = parse_json(read_checked(directory, STRINGS_FILE, digests))
    except UnreadableError as error:
        raise FormatError(
            Problem(could_not=f"cannot read text from {STRINGS_FILE}: it is {error}", affects=tuple(names), fix=_FIX)
        ) from error
    found = {name: _at_pointer(document, name) for name in names}
    strings = {name: text for name, text in found.items() if isinstance(text, str)}
    if lost := tuple(name for name in names if name not in strings):
        raise FormatError(Problem(could_not=f"cannot find text in {STRINGS_FILE}", affects=lost, fix=_FIX))
    return strings


def _at_pointer(document: Json, name: str) -> Json:
    """What lies at the pointer of a leaf; None where nothing does."""
    found = document
    for token in name.split("/"):
        key = token.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found
