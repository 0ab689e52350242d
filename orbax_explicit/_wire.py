"""`Manifest` <-> the bytes of `explicit_sharding.msgpack`.

This owns the frame (magic, version, length, digest) and the version ledger. The payload of each version is
for `_wire_encoding` and `_wire_decoding`, the file itself for `_sidecar`. `docs/format.md` is normative.

Version ledger. A version is a set of rules, not a release of this package. Every version that was ever
written is read for ever; a newer one is refused by its number.

    1   2026-11-30   The first. Meshes, specs and shardings in tables; devices, processes and memory kinds of
                     the run; containers with typed keys; PRNG keys; values on the host.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from typing import Final

from orbax_explicit._errors import FormatError, Problem
from orbax_explicit._records import Manifest
from orbax_explicit._wire_decoding import decode_payload
from orbax_explicit._wire_encoding import encode_payload
from orbax_explicit._wire_schema import MAX_PAYLOAD_NBYTES

MAGIC: Final = b"\x89OXE\r\n\x1a\n"
"""As in PNG: a byte above 127, both line endings and a control-Z show at once that a transfer changed the bytes."""

VERSION: Final = 1
"""The version that is written, and the newest that is read."""

_DECODERS: Final[Mapping[int, Callable[[bytes], Manifest]]] = {1: decode_payload}

_VERSION: Final = struct.Struct(">I")
_LENGTH: Final = struct.Struct(">Q")
_DIGEST_NBYTES: Final = 16
_PAYLOAD_START: Final = len(MAGIC) + _VERSION.size + _LENGTH.size

MAX_NBYTES: Final = _PAYLOAD_START + MAX_PAYLOAD_NBYTES + _DIGEST_NBYTES
"""No valid file is larger, so that a reader can refuse one before it reads it."""


def encode(manifest: Manifest) -> bytes:
    """The file that records `manifest`: the same bytes for equal manifests.

    Raises:
        RecordError: The manifest holds what the format cannot, such as notes, an integer beyond 64 bits, or a tree
            deeper than 128 containers. All that is found is listed.
    """
    payload = encode_payload(manifest)
    framed = b"".join((MAGIC, _VERSION.pack(VERSION), _LENGTH.pack(len(payload)), payload))
    return framed + _digest(framed)


def decode(data: bytes) -> Manifest:
    """The manifest that the file `data` records.

    The bytes may be anything: memory and time stay in proportion to their number, and nothing in them is run.

    Raises:
        FormatError: The bytes are damaged, or of a newer version, or not what a writer writes. Lists every problem
            that can be found.
    """
    version = _version(data)
    return _DECODERS[version](_payload(data))


def _version(data: bytes) -> int:
    """The version of a file, which is one that is known here."""
    if not data.startswith(MAGIC):
        raise FormatError(_wrong_magic(data))
    if len(data) < len(MAGIC) + _VERSION.size:
        raise FormatError(f"the file ends after {len(data)} bytes, within its version")
    version: int = _VERSION.unpack_from(data, len(MAGIC))[0]
    # Before anything else is looked at: what follows the version may differ in a newer one.
    if version > VERSION:
        raise FormatError(
            Problem(
                could_not="cannot read a file of a newer version",
                recorded=f"version {version}",
                present=f"versions up to {VERSION}",
                fix="upgrade orbax_explicit to a release that reads it",
            )
        )
    if version not in _DECODERS:
        raise FormatError(f"there is no version {version}")
    return version


def _payload(data: bytes) -> bytes:
    """The payload of a file, after the frame around it was checked."""
    if len(data) < _PAYLOAD_START:
        raise FormatError(f"the file ends after {len(data)} bytes, within its header of {_PAYLOAD_START}")
    nbytes: int = _LENGTH.unpack_from(data, len(MAGIC) + _VERSION.size)[0]
    if nbytes > MAX_PAYLOAD_NBYTES:
        raise FormatError(f"the header declares a payload of {nbytes} bytes; at most {MAX_PAYLOAD_NBYTES} are read")
    expected = _PAYLOAD_START + nbytes + _DIGEST_NBYTES
    if len(data) != expected:
        raise FormatError(
            Problem(
                could_not="the file is cut off" if len(data) < expected else "something follows the end of the file",
                recorded=f"{expected} bytes",
                present=f"{len(data)} bytes",
            )
        )
    if _digest(data[:-_DIGEST_NBYTES]) != data[-_DIGEST_NBYTES:]:
        raise FormatError("the file is damaged: its bytes do not have the digest that it records")
    return data[_PAYLOAD_START:-_DIGEST_NBYTES]


def _digest(framed: bytes) -> bytes:
    return hashlib.blake2b(framed, digest_size=_DIGEST_NBYTES).digest()


def _wrong_magic(data: bytes) -> Problem:
    if MAGIC.startswith(data):
        return Problem(could_not=f"the file ends after {len(data)} bytes, within its magic")
    changed = {MAGIC.replace(b"\r\n", b"\n"), MAGIC.replace(b"\n", b"\r\n"), bytes(byte & 127 for byte in MAGIC)}
    changed.add(MAGIC.decode("latin-1").encode())
    changed.add(MAGIC.decode(errors="replace").encode())
    if any(data.startswith(magic) for magic in changed):
        return Problem(
            could_not="the file was transferred as text, which changed its bytes",
            fix="transfer it again as binary",
        )
    return Problem(could_not=f"no file of this format: it starts with {data[: len(MAGIC)]!r}, not {MAGIC!r}")
