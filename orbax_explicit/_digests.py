"""The file `explicit_digests.msgpack`: a digest of each small file that lies beside the chunks of arrays.

Nobody checks them when they are read: a flipped bit in `_strings.json` is another text. They are complete only
when every process has written its own, so the file is written last, just before Orbax commits the item.
`docs/format.md` is normative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack
from etils import epath

from orbax_explicit._errors import FormatError, Problem
from orbax_explicit._framing import DIGEST_NBYTES, Frame, digest
from orbax_explicit._stock_json import UnreadableError, read_file
from orbax_explicit._storage import OCDBT_MANIFEST, ArrayStore, open_store

DIGESTS_FILE = "explicit_digests.msgpack"

_FRAME = Frame(magic=b"\x89OXD\r\n\x1a\n", version=1, max_payload_nbytes=1 << 26)

_FILES = ("_METADATA", "_sharding", "_strings.json")
_DIRECTORY = "array_metadatas"
_ZARR_FILES = (".zarray", "zarr.json")

_FIX = "restore the file from a copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What is known of the small files of an item.

    Attributes:
        files: Digest of each file, by its path in the item; None where the item has no such record.
    """

    files: Mapping[str, bytes] | None

    def check(self, name: str, data: bytes | None) -> None:
        """Compares what a file holds with its digest.

        Args:
            name: Path of the file in the item.
            data: What it holds; None where it is not there.

        Raises:
            FormatError: It is not what was written.
        """
        if self.files is None:
            return
        if data is None and name in self.files:
            raise FormatError(
                Problem(could_not=f"cannot find {name}, which was written with this checkpoint", fix=_FIX)
            )
        if data is not None and name not in self.files:
            raise FormatError(
                Problem(could_not=f"cannot trust {name}, which was not written with this checkpoint", fix="remove it")
            )
        if data is not None and digest(data) != self.files[name]:
            raise FormatError(
                Problem(could_not=f"cannot trust {name}: its bytes do not have the digest that was recorded", fix=_FIX)
            )


def write_digests(directory: epath.Path) -> None:
    """Writes the digests of the small files of an item.

    One process calls it, when all processes have written theirs and before Orbax commits the item.
    """
    files = [[name, digest((directory / name).read_bytes())] for name in list_small_files(directory)]
    (directory / DIGESTS_FILE).write_bytes(_FRAME.put_on(msgpack.packb(files)))


def read_digests(directory: epath.Path) -> Digests:
    """Reads the digests of an item; none are known of one that was written without.

    Raises:
        FormatError: The file is damaged or of a newer version.
    """
    file = directory / DIGESTS_FILE
    if not file.exists():
        return Digests(files=None)
    try:
        if file.stat().length > _FRAME.max_nbytes:
            raise FormatError(f"it holds more than {_FRAME.max_nbytes} bytes")
        _, payload = _FRAME.take_off(file.read_bytes())
        return Digests(files=_parse(payload))
    except FormatError as error:
        raise FormatError(
            *(
                dataclasses.replace(
                    problem, could_not=f"cannot read {file}: {problem.could_not}", fix=problem.fix or _FIX
                )
                for problem in error.problems
            )
        ) from error


def read_checked(directory: epath.Path, name: str, digests: Digests) -> bytes:
    """What a small file of an item holds.

    Raises:
        UnreadableError: It is missing, or cannot be read.
        FormatError: It is not what was written.
    """
    data = read_file(directory / name)
    digests.check(name, data)
    if data is None:
        raise UnreadableError("missing")
    return data


def list_small_files(directory: epath.Path) -> list[str]:
    """Paths of the small files of an item, in the item, sorted.

    Without OCDBT the Zarr metadata of each array are such a file; with it they lie where it checks them.
    """
    names = [name for name in _FILES if (directory / name).exists()]
    if (directory / _DIRECTORY).exists():
        names += [f"{_DIRECTORY}/{file.name}" for file in (directory / _DIRECTORY).iterdir()]
    if not (directory / OCDBT_MANIFEST).exists():
        store = ArrayStore(directory=directory.as_posix(), use_ocdbt=False, use_zarr3=False)
        files = [key.decode() for key in open_store(store).list().result()]
        names += [file for file in files if file.rpartition("/")[2] in _ZARR_FILES]
    return sorted(names)


def _parse(payload: bytes) -> dict[str, bytes]:
    try:
        entries = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise FormatError(f"its payload is no msgpack: {error}") from error
    files = {}
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case [str() as name, bytes() as recorded] if len(recorded) == DIGEST_NBYTES:
                files[name] = recorded
            case _:
                raise FormatError("its payload is not an array of names with digests")
    return files
