"""Reading all of a checkpoint to say whether it is whole, without restoring it.

What is read: the record, Orbax's small files, the metadata and every chunk of every array. What is told: which of them
do not have their checksum, or cannot be decoded, or are missing; and which arrays carry no checksum, so that nobody can
tell. Needs no device, and memory for a few chunks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias

import tensorstore as ts
from etils import epath

from orbax_explicit._allocator import keep_freed_memory
from orbax_explicit._boxes import Box, box_size, chunks_of, intersect, whole_box
from orbax_explicit._budget import batches
from orbax_explicit._digests import DIGESTS_FILE, Digests, list_small_files, read_digests
from orbax_explicit._errors import CheckpointLayoutError, FormatError, Problem
from orbax_explicit._records import LeafRecord, Manifest, ValueRecord, path_text, plural, storage_name
from orbax_explicit._sidecar import (
    FILE_NAME,
    find_item,
    is_item,
    is_recorded,
    list_items,
    read_array_records,
    read_item_manifest,
)
from orbax_explicit._small_arrays import decode_chunk
from orbax_explicit._stock import METADATA_FILE, STEP_METADATA_FILE, read_array_store, read_stock_manifest
from orbax_explicit._stock_json import UnreadableError, parse_json_object, read_file
from orbax_explicit._storage import (
    OCDBT_MANIFEST,
    STORE_ERRORS,
    ArrayStore,
    StoredValue,
    error_text,
    key_of,
    new_context,
    open_store,
    read_keys,
)
from orbax_explicit._strings import STRINGS_FILE, read_strings
from orbax_explicit._zarr import ZarrArray, parse_zarr

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that have been checked and the bytes in all, as they are in memory; from one thread at a time."""

_WORKERS = min(8, os.cpu_count() or 1)

_STEP_NAME = re.compile(r"(|.*_)(\d+)")
_V1_MARK = "orbax.checkpoint"
_TREE_HANDLERS = ("StandardCheckpointHandler", "PyTreeCheckpointHandler")

# Small chunks are read together, until there are so many bytes or so many of them.
_TASK_NBYTES = 4 << 20
_TASK_CHUNKS = 1024

_FILE_IN_ERROR = re.compile(r'"[^"]*?((?:ocdbt\.process_\w+/)?(?:d/[0-9a-f]{32}|manifest\.ocdbt))"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not as it was written.

    Attributes:
        what: What is wrong, a clause without a full stop.
        leaves: Paths of the leaves that are affected, in tree order; none where it is not about certain leaves.
        file: The file that is damaged or missing, by its path in the item; None where that cannot be told.
        block: The part of the array: the key of its chunk, and the elements that it holds.
    """

    what: str
    leaves: tuple[str, ...] = ()
    file: str | None = None
    block: str | None = None

    @property
    def leaf(self) -> str | None:
        """The first leaf that is affected; None for none."""
        return self.leaves[0] if self.leaves else None

    def __str__(self) -> str:
        lines = [self.what]
        leaves = ", ".join(self.leaves[:5])
        if len(self.leaves) > 5:
            leaves = f"{len(self.leaves)} leaves, first: {leaves}"
        for label, text in (("affects", leaves), ("block", self.block), ("file", self.file)):
            if text:
                lines.append(f"  {label:<9} {text}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The directory of the item.
        problems: What is not as it was written.
        unchecked: Paths of the leaves, and names of the files, that carry no checksum: they could be read, and nobody can
            tell whether they are what was written. All of a checkpoint of stock Orbax.
        leaves: Number of leaves.
        nbytes: Bytes of the chunks that were read, as they are in memory.
    """

    path: str
    problems: tuple[Damage, ...]
    unchecked: tuple[str, ...]
    leaves: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. What is unchecked is not."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        found = plural(len(self.problems), "problem") if self.problems else "no problem"
        lines = [f"{self.path}: {found}; leaves: {self.leaves}, bytes of arrays: {self.nbytes}"]
        if self.unchecked:
            shown = ", ".join(self.unchecked[:5]) + (", ..." if len(self.unchecked) > 5 else "")
            lines.append(f"without a checksum: {len(self.unchecked)} ({shown})")
        return "\n\n".join(("\n".join(lines), *map(str, self.problems)))


def verify(path: str | PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Reads all that a restore could read of a checkpoint, and says what is not as it was written.

    One process calls it; any can. It reads with several threads and holds a few chunks in memory.

    Args:
        path: The directory of an item, as for `read_manifest`.
        progress: Called now and then with the bytes that have been checked, and the bytes in all.

    Returns:
        The report: `report.ok`, `report.problems`, `report.unchecked`.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there is no checkpoint item, or several, or an unfinished one.
    """
    return _Verification(find_item(path), progress).run()


def latest_good_step(root: Any, *, progress: Progress | None = None) -> int | None:
    """The newest step of a `CheckpointManager` that verifies; None where there is none.

    A step verifies when each item in it that holds a tree does, and no item is gone that Orbax lists; of items of other
    kinds no more is asked. Steps are directories named by a number, with zeros or a prefix before it or without. Leaves
    that carry no checksum do not keep a step from being good. One process calls it.

    Args:
        root: The manager, a `training.Checkpointer` of v1, or its directory.
        progress: As for `verify`, of each item in turn.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there is a step or an item, not a root.
    """
    directory = epath.Path(getattr(root, "directory", root))
    if not directory.exists():
        raise FileNotFoundError(f"there is no checkpoint at {directory}")
    if any(_STEP_NAME.fullmatch(item.name) is None or item == directory for item in list_items(directory)):
        raise CheckpointLayoutError(
            Problem(
                could_not=f"cannot look for steps in {directory}: it is a step, or an item of one",
                fix="pass the directory of the CheckpointManager, or verify this one",
            )
        )
    steps = _steps(directory, listed=set(root.all_steps()) if hasattr(root, "all_steps") else None)
    return next((step for step in sorted(steps, reverse=True) if _is_good(steps[step], progress)), None)


def _steps(root: epath.Path, *, listed: set[int] | None) -> dict[int, epath.Path]:
    """The directory of each step. Of directories with several prefixes, those without one, or those that are listed."""
    by_prefix: dict[str, dict[int, epath.Path]] = {}
    for child in root.iterdir():
        match = _STEP_NAME.fullmatch(child.name)
        if match and child.is_dir():
            by_prefix.setdefault(match[1], {})[int(match[2])] = child
    if listed is not None:
        by_prefix = {prefix: steps for prefix, steps in by_prefix.items() if listed <= steps.keys()}
    if "" not in by_prefix and len(by_prefix) > 1:
        raise CheckpointLayoutError(
            Problem(
                could_not=f"cannot tell which directories of {root} are steps",
                present=f"names with the prefixes {', '.join(sorted(by_prefix))}",
                fix="pass the CheckpointManager itself",
            )
        )
    steps = by_prefix.get("") or next(iter(by_prefix.values()), {})
    return {step: path for step, path in steps.items() if listed is None or step in listed}


def _is_good(step: epath.Path, progress: Progress | None) -> bool:
    if any(not is_item(step / name) for name in _listed_trees(step)):
        return False
    items = list_items(step)
    return bool(items) and all(verify(item, progress=progress).ok for item in items)


def _listed_trees(step: epath.Path) -> list[str]:
    """Names of the items of a step that hold trees, as far as Orbax lists them."""
    try:
        listed = parse_json_object(read_file(step / STEP_METADATA_FILE) or b"{}").get("item_handlers")
    except UnreadableError:
        return []
    handlers = listed if isinstance(listed, dict) else {}
    return [name for name, handler in handlers.items() if any(kind in str(handler) for kind in _TREE_HANDLERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Array:
    """An array to check: the leaf that it is, and what its Zarr metadata say."""

    path: str
    name: str
    zarr: ZarrArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A chunk to check."""

    array: _Array
    key: str
    box: Box

    @property
    def nbytes(self) -> int:
        return box_size(self.box) * ts.dtype(self.array.zarr.dtype).numpy_dtype.itemsize

    @property
    def text(self) -> str:
        held = intersect(self.box, whole_box(self.array.zarr.shape))
        return f"{self.key} [{', '.join(f'{start}:{stop}' for start, stop in held)}]"


class _Verification:
    """One call of `verify`, collecting everything that is wrong."""

    def __init__(self, directory: epath.Path, progress: Progress | None) -> None:
        self._directory = directory
        self._progress = progress
        self._damages: list[Damage] = []
        self._unchecked: list[str] = []
        self._context = new_context()
        self._files: Mapping[str, str] | None = None
        self._has_whole_record = False

    def run(self) -> VerifyReport:
        digests = self._read_digests()
        manifest = self._read_manifest()
        self._check_small_files(digests, manifest)
        self._check_step()
        nbytes = 0
        if manifest is not None:
            if self._has_whole_record and not (self._directory / DIGESTS_FILE).exists():
                self._damages.append(Damage(what="the digests of the small files are missing", file=DIGESTS_FILE))
            self._check_texts(manifest, digests)
            nbytes = self._check_arrays(manifest)
        return VerifyReport(
            path=os.fspath(self._directory),
            problems=tuple(self._damages),
            unchecked=tuple(self._unchecked),
            leaves=len(manifest.leaves) if manifest is not None else 0,
            nbytes=nbytes,
        )

    def _note(self, error: FormatError, file: str, affects: tuple[str, ...] = ()) -> None:
        for problem in error.problems:
            self._damages.append(Damage(what=problem.could_not, leaves=problem.affects or affects, file=file))

    # Small files.

    def _read_digests(self) -> Digests:
        try:
            return read_digests(self._directory)
        except FormatError as error:
            self._note(error, DIGESTS_FILE)
            return Digests(files=None)

    def _check_small_files(self, digests: Digests, manifest: Manifest | None) -> None:
        present = list_small_files(self._directory)
        if digests.files is None:
            self._unchecked.extend(present)
            return
        leaves = {storage_name(path): path_text(path) for path in manifest.leaves} if manifest is not None else {}
        for name in sorted({*present, *digests.files}):
            file = self._directory / name
            try:
                digests.check(name, file.read_bytes() if file.exists() else None)
            except FormatError as error:
                # Without a database the metadata of an array lie in its own directory.
                leaf = leaves.get(name.rpartition("/")[0])
                self._note(error, name, affects=(leaf,) if leaf is not None else ())

    def _check_step(self) -> None:
        """Whether v1 of Orbax would open the item. The file is Orbax's, written last, and has no digest."""
        beside = self._directory.parent
        try:
            metadata = read_file(beside / STEP_METADATA_FILE)
            if metadata is not None:
                parse_json_object(metadata)
            elif (beside / _V1_MARK).exists():
                raise UnreadableError("missing")
        except UnreadableError as error:
            what = f"Orbax's own metadata beside the item are {error}"
            self._damages.append(Damage(what=what, file=f"../{STEP_METADATA_FILE}"))

    def _read_manifest(self) -> Manifest | None:
        is_own = is_recorded(self._directory)
        if is_own:
            try:
                recorded = read_array_records(self._directory)
                self._has_whole_record = recorded.scope == "tree"
            except FormatError as error:
                self._note(error, FILE_NAME)
                is_own = False
        try:
            # Without its record, what stock Orbax wrote names the arrays as well.
            return read_item_manifest(self._directory) if is_own else read_stock_manifest(self._directory)
        except FormatError as error:
            if not self._damages:
                self._note(error, self._lost_file())
            return None

    def _lost_file(self) -> str:
        """The file without which the leaves of a stock checkpoint cannot be told."""
        try:
            store = read_array_store(self._directory, Digests(files=None))
        except FormatError:
            return METADATA_FILE
        has_list = not store.use_ocdbt or (self._directory / OCDBT_MANIFEST).exists()
        return METADATA_FILE if has_list else OCDBT_MANIFEST

    def _check_texts(self, manifest: Manifest, digests: Digests) -> None:
        texts = {storage_name(path): path_text(path) for path, leaf in manifest.leaves.items() if _is_text(leaf)}
        if digests.files is None:
            self._unchecked.extend(texts.values())
        try:
            # Only what a reader would miss: that the file is what was written has been checked.
            read_strings(self._directory, texts, Digests(files=None))
        except FormatError as error:
            for problem in error.problems:
                leaves = tuple(texts[name] for name in problem.affects)
                self._damages.append(Damage(what=problem.could_not, leaves=leaves, file=STRINGS_FILE))

    # Arrays.

    def _check_arrays(self, manifest: Manifest) -> int:
        if all(map(_is_text, manifest.leaves.values())):
            return 0  # Nothing is in a store, and perhaps there is none.
        store = self._find_store()
        if store.use_ocdbt and not (self._directory / OCDBT_MANIFEST).exists():
            self._damages.append(Damage(what="the list of the arrays is missing", file=OCDBT_MANIFEST))
            return 0
        try:
            keys = ts.KvStore.open(store.spec(), context=self._context).result()
        except STORE_ERRORS as error:
            self._damages.append(Damage(what=f"cannot open the arrays: {error_text(error)}", file=_file_in(error)))
            return 0
        arrays = self._open_arrays(manifest, store, keys)
        chunks = (chunk for array in arrays for chunk in _chunks(array, store))
        tasks = list(batches(chunks, lambda chunk: chunk.nbytes, max_nbytes=_TASK_NBYTES, max_items=_TASK_CHUNKS))
        total = sum(chunk.nbytes for task in tasks for chunk in task)
        done = 0
        keep_freed_memory()
        with concurrent.futures.ThreadPoolExecutor(_WORKERS) as executor:
            check = functools.partial(_check_chunks, store=store, keys=keys, context=self._context)
            # In order, so that what is wrong is told in tree order; no more at a time than there are workers.
            for task, errors in zip(tasks, executor.map(check, tasks), strict=True):
                for chunk, what, cause in errors:
                    file = _file_in(cause) or self._file_of(key_of(chunk.array.name, chunk.key), store)
                    self._damages.append(Damage(what=what, leaves=(chunk.array.path,), file=file, block=chunk.text))
                done += sum(chunk.nbytes for chunk in task)
                if self._progress is not None:
                    self._progress(done, total)
        return total

    def _find_store(self) -> ArrayStore:
        try:
            return read_array_store(self._directory, Digests(files=None))
        except FormatError as error:
            if not any(damage.file == METADATA_FILE for damage in self._damages):
                self._note(error, METADATA_FILE)
            # Its damage is told; the arrays can be found without it.
            use_ocdbt = (self._directory / OCDBT_MANIFEST).exists()
            store = ArrayStore(directory=os.fspath(self._directory), use_ocdbt=use_ocdbt, use_zarr3=True)
            try:
                found = open_store(store, self._context).list().result()
            except STORE_ERRORS:
                found = []
            use_zarr3 = any(key.decode().endswith(store.metadata_file) for key in found)
            return dataclasses.replace(store, use_zarr3=use_zarr3)

    def _open_arrays(self, manifest: Manifest, store: ArrayStore, keys: ts.KvStore) -> list[_Array]:
        leaves = {storage_name(path): (path, leaf) for path, leaf in manifest.leaves.items() if not _is_text(leaf)}
        found = read_keys(keys, [key_of(name, store.metadata_file) for name in leaves])
        arrays: list[_Array] = []
        lost: dict[tuple[str, str | None], list[str]] = {}
        for (name, (path, leaf)), value in zip(leaves.items(), found, strict=True):
            try:
                array = _Array(path=path_text(path), name=name, zarr=_parse(value))
            except UnreadableError as why:
                key = key_of(name, store.metadata_file)
                file = _file_in(value) if isinstance(value, Exception) else self._file_of(key, store)
                lost.setdefault((f"the Zarr metadata are {why}", file), []).append(path_text(path))
                continue
            shape, dtype = array.zarr.shape, array.zarr.dtype
            if (shape, dtype) != (leaf.stored_shape, leaf.dtype) or not array.zarr.is_little_endian:
                what = f"what is stored is {dtype}{shape}, and what was recorded {leaf.dtype}{leaf.stored_shape}"
                file = self._file_of(key_of(name, store.metadata_file), store)
                self._damages.append(Damage(what=what, leaves=(array.path,), file=file))
                continue
            if box_size(whole_box(shape)) and not array.zarr.is_checked:
                self._unchecked.append(array.path)
            arrays.append(array)
        self._damages += [Damage(what=what, leaves=tuple(paths), file=file) for (what, file), paths in lost.items()]
        return arrays

    def _file_of(self, key: str, store: ArrayStore) -> str | None:
        """The file that holds what is under a key; None where that cannot be told."""
        if not store.use_ocdbt:
            return key
        if self._files is None:
            try:
                self._files = _files_by_key(self._directory, self._context)
            except STORE_ERRORS:
                self._files = {}
        return self._files.get(key)


def _is_text(leaf: LeafRecord) -> bool:
    return isinstance(leaf, ValueRecord) and leaf.type == "str"


def _parse(value: StoredValue) -> ZarrArray:
    if value is None:
        raise UnreadableError("missing")
    if isinstance(value, Exception):
        raise UnreadableError(f"not readable ({error_text(value)})")
    zarr = parse_zarr(value)
    if zarr.chunk is None:
        raise UnreadableError("without the shape of a chunk")
    return zarr


def _chunks(array: _Array, store: ArrayStore) -> Iterator[_Chunk]:
    chunk = array.zarr.chunk
    if chunk is not None:
        for place, box in chunks_of(whole_box(array.zarr.shape), chunk):
            yield _Chunk(array=array, key=store.chunk_key(place), box=box)


_Finding: TypeAlias = "tuple[_Chunk, str, Exception]"


def _check_chunks(
    chunks: Sequence[_Chunk], *, store: ArrayStore, keys: ts.KvStore, context: ts.Context
) -> list[_Finding]:
    """Reads and decodes chunks; what is wrong with them."""
    found: list[_Finding] = []
    plain = [chunk for chunk in chunks if chunk.array.zarr.encoding is not None]
    for chunk, value in zip(plain, read_keys(keys, [key_of(c.array.name, c.key) for c in plain]), strict=True):
        if isinstance(value, bytes):
            try:
                decode_chunk(chunk.array.zarr, value)
            except ValueError as error:
                found.append((chunk, f"a chunk is damaged: {error}", error))
        elif value is not None:
            found.append((chunk, f"a chunk cannot be read: {error_text(value)}", value))
        elif not store.fills_missing:
            found.append((chunk, "a chunk is missing", KeyError(chunk.key)))
    for chunk in chunks:
        if chunk.array.zarr.encoding is None:
            try:
                _read_by_driver(chunk, store, keys, context)
            except STORE_ERRORS as error:
                found.append((chunk, f"a chunk cannot be read: {error_text(error)}", error))
    return found


def _read_by_driver(chunk: _Chunk, store: ArrayStore, keys: ts.KvStore, context: ts.Context) -> None:
    """Reads a chunk that only TensorStore can decode."""
    name = chunk.array.name
    array = ts.open(ts.Spec(store.array_spec()), kvstore=keys / key_of(name, ""), open=True, context=context).result()
    held = intersect(chunk.box, whole_box(chunk.array.zarr.shape))
    (array[tuple(slice(*span) for span in held)] if held else array).read().result()


# Files of an OCDBT database.


def _file_in(error: Exception) -> str | None:
    """The file of the database that an error of TensorStore's names."""
    match = _FILE_IN_ERROR.search(str(error))
    return match[1] if match else None


def _files_by_key(directory: epath.Path, context: ts.Context) -> dict[str, str]:
    """The file that holds the value of each key: a data file, or that of the node in which it lies."""
    store = ArrayStore(directory=os.fspath(directory), use_ocdbt=False, use_zarr3=False)
    base = ts.KvStore.open(store.spec(), context=context).result()
    manifest: dict[str, Any] = ts.ocdbt.dump(base, context=context).result()
    files: dict[str, str] = {}

    def add_node(location: str, prefix: bytes) -> None:
        node = ts.ocdbt.dump(base, node=location, context=context).result()
        for entry in node["entries"]:
            key = prefix + bytes(entry["key"])
            if "location" in entry:
                add_node(entry["location"], prefix + bytes(entry.get("subtree_common_prefix", b"")))
            else:
                files[key.decode()] = _file_at(entry.get("indirect_value", location))

    root = manifest["versions"][-1].get("root", {}).get("location")
    if root:
        add_node(root, b"")
    return files


def _file_at(location: str) -> str:
    """The file of a location such as `value:ocdbt.process_0/:d/3355...:8389472:1047`."""
    _, directory, *names, _, _ = location.split(":")
    return "".join((directory, *names))
