"""Zarr metadata: what the `.zarray` (version 2) or `zarr.json` (version 3) of a stored array says.

TensorStore writes them, and reads them for itself. Here they are read to know an array without opening it: its shape and
dtype, its chunks, whether their bytes are checked when they are read, and whether they are plain enough to be read
without TensorStore's driver, which takes longer than a tiny array itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

import tensorstore as ts

from orbax_explicit._stock_json import Json, UnreadableError, parse_json_object, shown

# How the bytes of a chunk are stored: as they are, or as one gzip member.
Encoding: TypeAlias = Literal["raw", "gzip"]

_MAX_METADATA_NBYTES = 1 << 20
_CHECKING_CODECS = frozenset({"gzip", "zlib", "crc32c"})

_ZARR2_DTYPE = re.compile(r"([<>|=])([biufc])(\d{1,2})")
_DTYPE_STEMS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_NOT_NUMERIC = frozenset({"byte", "char", "string", "ustring", "json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """What the Zarr metadata of an array say.

    Attributes:
        shape: Shape of the array.
        dtype: Name of its dtype.
        is_little_endian: Whether its elements are stored with their lowest byte first, as this package and Orbax write
            them, or have but one.
        chunk: Shape of a chunk; None where it cannot be told.
        is_checked: Whether each chunk has a checksum, so that a damaged one is noticed when it is read.
        encoding: How the bytes of a chunk are stored; None where only TensorStore can tell.
    """

    shape: tuple[int, ...]
    dtype: str
    is_little_endian: bool
    chunk: tuple[int, ...] | None
    is_checked: bool
    encoding: Encoding | None


def parse_zarr(data: bytes) -> ZarrArray:
    """What the bytes of Zarr metadata say.

    Raises:
        UnreadableError: They have no shape or no known dtype.
    """
    if len(data) > _MAX_METADATA_NBYTES:
        raise UnreadableError(f"larger than {_MAX_METADATA_NBYTES} bytes")
    metadata = parse_json_object(data)
    shape = _sizes(metadata.get("shape"))
    if shape is None:
        raise UnreadableError(f"no shape but {shown(metadata.get('shape'))}")
    if metadata.get("zarr_format") != 3:
        return _parse_version_2(metadata, shape)
    try:
        return _parse_version_3(metadata, shape)
    except RecursionError as error:
        raise UnreadableError("too deeply nested") from error


def _parse_version_2(metadata: dict[str, Json], shape: tuple[int, ...]) -> ZarrArray:
    stored, compressor = metadata.get("dtype"), metadata.get("compressor")
    match = _ZARR2_DTYPE.fullmatch(stored) if isinstance(stored, str) else None
    name = stored
    if match:
        name = "bool" if match[2] == "b" else f"{_DTYPE_STEMS[match[2]]}{8 * int(match[3])}"
    is_little_endian = match is None or match[1] != ">"
    codec = None if compressor is None else _text(_member(compressor, "id"))
    is_plain = (
        metadata.get("order") == "C"
        and metadata.get("filters") is None
        and metadata.get("dimension_separator", ".") == "."
        and is_little_endian
    )
    return ZarrArray(
        shape=shape,
        dtype=_dtype_name(name, stored),
        is_little_endian=is_little_endian,
        chunk=_chunk(metadata.get("chunks"), shape),
        is_checked=codec in _CHECKING_CODECS,
        encoding=_encoding(codec) if is_plain else None,
    )


def _parse_version_3(metadata: dict[str, Json], shape: tuple[int, ...]) -> ZarrArray:
    grid = _member(metadata.get("chunk_grid"), "configuration")
    codecs = metadata.get("codecs")
    codecs = codecs if isinstance(codecs, list) else []
    names = [_text(_member(codec, "name")) for codec in codecs]
    endian = _member(_member(codecs[0], "configuration"), "endian") if codecs else None
    encoding = None
    if names[:1] == ["bytes"] and endian in ("little", None) and len(names) <= 2:
        encoding = _encoding(names[1] if len(names) == 2 else None)
    keys = metadata.get("chunk_key_encoding")
    separator = _member(_member(keys, "configuration"), "separator")
    if _member(keys, "name") != "default" or separator not in ("/", None):
        encoding = None
    return ZarrArray(
        shape=shape,
        dtype=_dtype_name(metadata.get("data_type"), metadata.get("data_type")),
        is_little_endian=endian != "big",
        chunk=_chunk(_member(grid, "chunk_shape"), shape),
        is_checked=any(map(_is_checking, codecs)),
        encoding=encoding,
    )


def _is_checking(codec: Json) -> bool:
    """Whether a codec of version 3 checks the bytes that it decodes."""
    name, configuration = _text(_member(codec, "name")), _member(codec, "configuration")
    if name == "sharding_indexed":
        inner = _member(configuration, "codecs")
        return any(map(_is_checking, inner if isinstance(inner, list) else []))
    return name in _CHECKING_CODECS or (name == "zstd" and _member(configuration, "checksum") is True)


def _encoding(codec: str | None) -> Encoding | None:
    if codec is None:
        return "raw"
    return "gzip" if codec == "gzip" else None


def _chunk(value: Json, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    chunk = _sizes(value)
    return chunk if chunk is not None and len(chunk) == len(shape) and all(chunk) else None


def _sizes(value: Json) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = tuple(size for size in value if type(size) is int and 0 <= size < 1 << 63)
    return sizes if len(sizes) == len(value) else None


def _member(value: Json, name: str) -> Json:
    return value.get(name) if isinstance(value, dict) else None


def _text(value: Json) -> str:
    """A text; the empty one where something else is in its place."""
    return value if isinstance(value, str) else ""


def _dtype_name(name: Json, stored: Json) -> str:
    """NumPy's or ml_dtypes' name of a dtype."""
    try:
        # TensorStore wrote the array, so it knows the dtype; it must only not be one of texts.
        if isinstance(name, str) and name not in _NOT_NUMERIC and ts.dtype(name).name == name:
            return name
    except (ValueError, TypeError):
        pass
    raise UnreadableError(f"unknown dtype {shown(stored)}")
