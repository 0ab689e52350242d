"""What stock Orbax wrote, read as a `Manifest`.

`read_stock_manifest` reads the item directory of a checkpoint that stock Orbax saved, with its v0 or its v1 API:
the tree from `_METADATA` (`_stock_tree`), shapes and dtypes from the Zarr metadata of each array, PRNG
implementations from `array_metadatas/`, layouts from `_sharding` (`_stock_sharding`). It imports neither JAX nor
Orbax and needs no devices.

What the data needs must be there: a damaged `_METADATA` or Zarr file raises one `FormatError` with everything that
is wrong. What only the layout needs may be damaged: the arrays then have no sharding, and the manifest's notes say
why. Stock records neither memory kinds, nor whether an array was committed, nor the platform of a mesh.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from etils import epath

from orbax_explicit._digests import Digests, read_checked
from orbax_explicit._errors import FormatError, Problem, RecordError
from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    LeafPath,
    Manifest,
    PrngRecord,
    Tree,
    ValueRecord,
    ValueType,
    path_text,
    plural,
    storage_name,
)
from orbax_explicit._stock_json import UnreadableError, is_text, parse_json_object, read_file, shown
from orbax_explicit._stock_sharding import parse_sharding_file
from orbax_explicit._stock_tree import (
    ARRAY,
    EMPTY_CONTAINERS,
    NUMPY,
    SCALAR,
    STRING,
    StockLeaf,
    StockTree,
    StoreFlags,
    build_tree,
    parse_store_flags,
    parse_tree_metadata,
    raise_format_error,
)
from orbax_explicit._storage import (
    OCDBT_MANIFEST,
    STORE_ERRORS,
    ArrayStore,
    StoredValue,
    key_of,
    open_store,
    read_keys,
)
from orbax_explicit._zarr import ZarrArray, parse_zarr

METADATA_FILE = "_METADATA"
STEP_METADATA_FILE = "_CHECKPOINT_METADATA"
SHARDING_FILE = "_sharding"

_ARRAY_METADATA_DIRECTORY = "array_metadatas"


_NUMBER_TYPES: Mapping[str, ValueType] = {"bool": "bool", "int": "int", "uint": "int", "complex": "complex"}


def is_checkpoint_item(directory: epath.Path) -> bool:
    """Whether Orbax saved a tree at `directory`, with either API: it holds a `_METADATA` file."""
    return bool((directory / METADATA_FILE).exists())


def read_stock_manifest(directory: epath.Path) -> Manifest:
    """What stock Orbax recorded about the tree at `directory`.

    Args:
        directory: The directory that holds `_METADATA`: what was passed to `save` of a v0 checkpointer, the item of
            a step (`<step>/default`), or the `state` directory below what was passed to v1's `save`.

    Raises:
        FormatError: `_METADATA` is missing or damaged, or the Zarr metadata of arrays is. Lists every problem.
    """
    stock = _read_tree_metadata(directory)
    leaves = _read_leaves(directory, stock)
    arrays = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, ArrayRecord)}
    notes: list[str] = []
    if arrays:
        arrays = _with_prng(directory, arrays, notes)
        leaves.update(_with_shardings(directory, arrays, notes))
    tree, reason = build_tree(leaves, stock.rich_containers)
    if reason:
        notes.append(f"the recorded containers are those of plain JSON, for the rich ones cannot be read: {reason}")
    return Manifest(tree=tree, notes=tuple(notes))


def _read_tree_metadata(directory: epath.Path) -> StockTree:
    try:
        return parse_tree_metadata(read_checked(directory, METADATA_FILE, Digests(files=None)))
    except UnreadableError as error:
        raise _metadata_error(directory, error) from error


def _metadata_error(directory: epath.Path, error: UnreadableError) -> FormatError:
    return FormatError(
        Problem(
            could_not=f"cannot read a checkpoint whose {METADATA_FILE} is {error}",
            present=os.fspath(directory),
            fix="pass the directory of an item that Orbax saved, or restore the file from a copy",
        )
    )


def read_array_store(directory: epath.Path, digests: Digests) -> ArrayStore:
    """Where the arrays of the item at `directory` lie.

    Args:
        directory: The directory of the item.
        digests: The digests of its small files.

    Raises:
        FormatError: `_METADATA` is missing or damaged.
    """
    try:
        flags = parse_store_flags(read_checked(directory, METADATA_FILE, digests))
    except UnreadableError as error:
        raise _metadata_error(directory, error) from error
    return _array_store(directory, flags)


def _array_store(directory: epath.Path, flags: StoreFlags) -> ArrayStore:
    use_ocdbt = flags.use_ocdbt
    return ArrayStore(
        directory=os.fspath(directory),
        use_ocdbt=(directory / OCDBT_MANIFEST).exists() if use_ocdbt is None else use_ocdbt,
        use_zarr3=flags.use_zarr3,
        fills_missing=flags.fills_missing,
    )


def _read_leaves(directory: epath.Path, stock: StockTree) -> dict[LeafPath, Tree]:
    """Every leaf and empty container by its path; arrays without sharding."""
    store = _array_store(directory, stock.flags)
    file = store.metadata_file
    names = dict.fromkeys(storage_name(leaf.path) for leaf in stock.leaves if leaf.value_type in (ARRAY, NUMPY, SCALAR))
    keys = [key_of(name, file) for name in names]
    found = dict(zip(names, _read_store(store, keys), strict=True))
    leaves: dict[LeafPath, Tree] = {}
    wrong: dict[str, list[str]] = {}
    for leaf in stock.leaves:
        try:
            leaves[leaf.path] = _parse_leaf(leaf, found.get(storage_name(leaf.path)))
        except UnreadableError as error:
            wrong.setdefault(str(error), []).append(path_text(leaf.path))
    raise_format_error(f"cannot read the shape and dtype of arrays from their {file}", wrong, of=len(stock.leaves))
    return leaves


def _read_store(store: ArrayStore, keys: Sequence[str]) -> list[StoredValue]:
    try:
        opened = open_store(store)
    except STORE_ERRORS as error:
        return [error] * len(keys)
    return read_keys(opened, keys)


def _parse_leaf(leaf: StockLeaf, zarr: StoredValue) -> Tree:
    if leaf.value_type in EMPTY_CONTAINERS:
        return ContainerRecord(kind=EMPTY_CONTAINERS[leaf.value_type])
    if leaf.value_type == STRING:
        return ValueRecord(type="str")
    stored = _parse_stored_array(zarr)
    shape, dtype = stored.shape, stored.dtype
    if leaf.value_type == ARRAY:
        return ArrayRecord(shape=shape, dtype=dtype)
    if leaf.value_type == NUMPY:
        return ValueRecord(type="np.ndarray", shape=shape, dtype=dtype)
    if shape:
        raise UnreadableError(f"a scalar has shape {shape}")
    # Stock gives back a Python number, whatever kind of scalar was saved.
    stem = re.match(r"[a-z]*", dtype)
    return ValueRecord(type=_NUMBER_TYPES.get(stem[0] if stem else "", "float"), dtype=dtype)


def _parse_stored_array(data: StoredValue) -> ZarrArray:
    if data is None:
        raise UnreadableError("missing")
    if isinstance(data, Exception):
        raise UnreadableError(f"not readable ({shown(str(data))})")
    return parse_zarr(data)


def _with_prng(
    directory: epath.Path, arrays: Mapping[LeafPath, ArrayRecord], notes: list[str]
) -> dict[LeafPath, ArrayRecord]:
    """The arrays, those that hold PRNG keys with their implementation and without the dimension of the key data."""
    implementations: dict[str, object] = {}
    names = {storage_name(path) for path in arrays}
    try:
        # Each process lists every array; a further file is read only for what is still missing.
        for data in _read_array_metadatas(directory):
            implementations.update(_parse_array_metadatas(data))
            if names <= implementations.keys():
                break
    except UnreadableError as error:
        notes.append(f"PRNG keys are taken for plain arrays, for a file in {_ARRAY_METADATA_DIRECTORY} is {error}")
    result: dict[LeafPath, ArrayRecord] = {}
    for path, array in arrays.items():
        result[path] = array
        implementation = implementations.get(storage_name(path))
        if implementation is None:
            continue
        if is_text(implementation) and array.shape:
            prng = PrngRecord(impl=implementation, key_shape=array.shape[-1:])
            result[path] = replace(array, shape=array.shape[:-1], prng=prng)
        else:
            reason = f"implementation {shown(implementation)}, shape {array.shape}"
            notes.append(f"PRNG keys {path_text(path)} are taken for a plain array: {reason}")
    return result


def _read_array_metadatas(directory: epath.Path) -> Iterator[bytes]:
    """The files of `array_metadatas/` in the order of their processes."""
    try:
        files = list((directory / _ARRAY_METADATA_DIRECTORY).glob("process_*"))
    except OSError as error:
        raise UnreadableError(f"not readable ({error.strerror or error})") from error
    for file in sorted(files, key=lambda file: (len(file.name), file.name)):
        data = read_file(file)
        if data is not None:
            yield data


def _parse_array_metadatas(data: bytes) -> dict[str, object]:
    """Storage name -> PRNG implementation, None for an ordinary array."""
    listed = parse_json_object(data).get("array_metadatas")
    implementations: dict[str, object] = {}
    for item in listed if isinstance(listed, list) else [listed]:
        metadata = item.get("array_metadata") if isinstance(item, dict) else None
        name = metadata.get("param_name") if isinstance(metadata, dict) else None
        if not isinstance(metadata, dict) or not isinstance(name, str):
            raise UnreadableError(f"not a list of arrays but holds {shown(item)}")
        extra = metadata.get("ext_metadata")
        implementations[name] = extra.get("random_key_impl") if isinstance(extra, dict) else None
    return implementations


def _with_shardings(
    directory: epath.Path, arrays: Mapping[LeafPath, ArrayRecord], notes: list[str]
) -> dict[LeafPath, ArrayRecord]:
    """The arrays with their recorded shardings; a note for each reason why some have none."""
    by_name = {storage_name(path): array for path, array in arrays.items()}
    try:
        data = read_file(directory / SHARDING_FILE)
        if data is None:
            raise UnreadableError("missing")
        shardings, reasons = parse_sharding_file(data, by_name)
    except UnreadableError as error:
        shardings, reasons = {}, dict.fromkeys(by_name, f"the {SHARDING_FILE} file is {error}")
    result: dict[LeafPath, ArrayRecord] = {}
    affected: dict[str, list[LeafPath]] = {}
    for path, array in arrays.items():
        name = storage_name(path)
        reason = reasons.get(name, "")
        try:
            result[path] = replace(array, sharding=shardings.get(name))
        except RecordError as error:
            result[path], reason = array, "; ".join(problem.could_not for problem in error.problems)
        if reason:
            affected.setdefault(reason, []).append(path)
    for reason, paths in affected.items():
        which = path_text(paths[0]) + (f" and {plural(len(paths) - 1, 'other array')}" if len(paths) > 1 else "")
        notes.append(f"no recorded layout for {which}: {reason}")
    return result
