"""JSON that stock Orbax left in a checkpoint, and that may be damaged or hostile.

The readers of stock's files (`_stock`, `_stock_tree`, `_stock_sharding`) share how such text is parsed, how a value
of it is shown in a message, and the exception that carries the reason why a part cannot be read. They decide what
that reason means: an error, or an array without a layout.
"""

from __future__ import annotations

import json
from typing import TypeAlias, TypeGuard

from etils import epath

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

# Far above what stock writes for the widest trees; a file beyond it is not read at all.
_MAX_FILE_BYTES = 1 << 30
_SHOWN_CHARACTERS = 80


class UnreadableError(Exception):
    """Why a part of a checkpoint cannot be read, as a clause. Never leaves the readers of stock's files."""


def read_file(file: epath.Path) -> bytes | None:
    """Contents of a file; None where there is none.

    Raises:
        UnreadableError: The file is too large or the file system refuses.
    """
    try:
        if not file.exists():
            return None
        if file.stat().length > _MAX_FILE_BYTES:
            raise UnreadableError(f"larger than {_MAX_FILE_BYTES} bytes")
        data: bytes = file.read_bytes()
    except OSError as error:
        raise UnreadableError(f"not readable ({error.strerror or error})") from error
    return data


def parse_json(text: str | bytes) -> Json:
    """The value of a JSON text.

    Raises:
        UnreadableError: It is not JSON, or too deeply nested.
    """
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("not JSON") from error
    return value


def parse_json_object(text: str | bytes) -> dict[str, Json]:
    """The members of a JSON text that is an object.

    Raises:
        UnreadableError: It is something else.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise UnreadableError(f"not a JSON object but {shown(value)}")
    return value


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is text that can be stored and printed: JSON can spell lone surrogates, UTF-8 cannot."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def shown(value: object) -> str:
    """A value for a message, cut to one short line."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
