"""The frame around the payload of a file of this package: magic, version, length, digest.

Whatever the bytes of a file are, taking the frame off them says what is wrong before the payload is looked at.
`docs/format.md` is normative.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from orbax_explicit._errors import FormatError, Problem

DIGEST_NBYTES: Final = 16

_VERSION: Final = struct.Struct(">I")
_LENGTH: Final = struct.Struct(">Q")


def digest(data: bytes) -> bytes:
    """Unkeyed BLAKE2b of some bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_NBYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The frame of one kind of file.

    Attributes:
        magic: Its first bytes.
        version: The version that is written, and the newest that is read; every older one is read too.
        max_payload_nbytes: Bytes of a payload, at most.
    """

    magic: bytes
    version: int
    max_payload_nbytes: int

    @property
    def header_nbytes(self) -> int:
        """Bytes before the payload."""
        return len(self.magic) + _VERSION.size + _LENGTH.size

    @property
    def max_nbytes(self) -> int:
        """No valid file is larger, so that a reader can refuse one before it reads it."""
        return self.header_nbytes + self.max_payload_nbytes + DIGEST_NBYTES

    def put_on(self, payload: bytes) -> bytes:
        """The file with this payload."""
        framed = b"".join((self.magic, _VERSION.pack(self.version), _LENGTH.pack(len(payload)), payload))
        return framed + digest(framed)

    def take_off(self, data: bytes) -> tuple[int, bytes]:
        """The version and the payload of a file.

        Raises:
            FormatError: The bytes are no such file, or a damaged one, or of a newer version.
        """
        return self._version(data), self._payload(data)

    def _version(self, data: bytes) -> int:
        """The version of a file, which is one that is known here."""
        if not data.startswith(self.magic):
            raise FormatError(self._wrong_magic(data))
        if len(data) < len(self.magic) + _VERSION.size:
            raise FormatError(f"the file ends after {len(data)} bytes, within its version")
        version: int = _VERSION.unpack_from(data, len(self.magic))[0]
        # Before anything else is looked at: what follows the version may differ in a newer one.
        if version > self.version:
            raise FormatError(
                Problem(
                    could_not="cannot read a file of a newer version",
                    recorded=f"version {version}",
                    present=f"versions up to {self.version}",
                    fix="upgrade orbax_explicit to a release that reads it",
                )
            )
        if version < 1:
            raise FormatError(f"there is no version {version}")
        return version

    def _payload(self, data: bytes) -> bytes:
        """The payload of a file, after the frame around it was checked."""
        if len(data) < self.header_nbytes:
            raise FormatError(f"the file ends after {len(data)} bytes, within its header of {self.header_nbytes}")
        nbytes: int = _LENGTH.unpack_from(data, len(self.magic) + _VERSION.size)[0]
        if nbytes > self.max_payload_nbytes:
            raise FormatError(
                f"the header declares a payload of {nbytes} bytes; at most {self.max_payload_nbytes} are read"
            )
        expected = self.header_nbytes + nbytes + DIGEST_NBYTES
        if len(data) != expected:
            raise FormatError(
                Problem(
                    could_not="the file is cut off"
                    if len(data) < expected
                    else "something follows the end of the file",
                    recorded=f"{expected} bytes",
                    present=f"{len(data)} bytes",
                )
            )
        if digest(data[:-DIGEST_NBYTES]) != data[-DIGEST_NBYTES:]:
            raise FormatError("the file is damaged: its bytes do not have the digest that it records")
        return data[self.header_nbytes : -DIGEST_NBYTES]

    def _wrong_magic(self, data: bytes) -> Problem:
        if self.magic.startswith(data):
            return Problem(could_not=f"the file ends after {len(data)} bytes, within its magic")
        changed = {
            self.magic.replace(b"\r\n", b"\n"),
            self.magic.replace(b"\n", b"\r\n"),
            bytes(byte & 127 for byte in self.magic),
        }
        changed.add(self.magic.decode("latin-1").encode())
        changed.add(self.magic.decode(errors="replace").encode())
        if any(data.startswith(magic) for magic in changed):
            return Problem(
                could_not="the file was transferred as text, which changed its bytes",
                fix="transfer it again as binary",
            )
        return Problem(
            could_not=f"no file of this format: it starts with {data[: len(self.magic)]!r}, not {self.magic!r}"
        )
