"""The file `explicit_sharding.msgpack`: its name, where it lies, writing and reading it.

It lies next to Orbax's own files in the directory of an item. A directory without it was written by stock Orbax,
and its manifest is made from what stock wrote (`_stock`). A file that is there and cannot be read is an error,
never a reason to fall back: what it said would be lost silently.
"""

from __future__ import annotations

import dataclasses
from os import PathLike

from etils import epath

from orbax_explicit import _stock, _wire
from orbax_explicit._digests import DIGESTS_FILE
from orbax_explicit._errors import CheckpointLayoutError, FormatError, Problem
from orbax_explicit._records import Manifest, replace_leaves, storage_name
from orbax_explicit._stock_sharding import render_sharding_file

FILE_NAME = "explicit_sharding.msgpack"

_MARK = f'"{FILE_NAME}"'.encode()
"""A member of `_sharding` that no array can have, for the name of one is base64; stock looks up the names it knows."""

_LOST_FIX = "restore the file from a copy, or read the arrays with stock Orbax, which does not need it"

_UNFINISHED = ".orbax-checkpoint-tmp"


def read_manifest(path: str | PathLike[str]) -> Manifest:
    """Reads what is recorded about a checkpoint. Needs no device, and none of those that saved it.

    Any process may call it; each reads the file.

    Args:
        path: The directory of an item: what was passed to `save`, or `<root>/<step>/<item>` of a
            `CheckpointManager`; `<root>/<step>` is understood where there is one item.

    Returns:
        The manifest. Of a stock checkpoint it has no inventory, and `notes` say what could not be read.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there is no checkpoint item, or several, or an unfinished one.
        FormatError: The record, or the metadata of a stock checkpoint, is damaged or from a newer version.
    """
    return read_item_manifest(find_item(path))


def read_item_manifest(directory: epath.Path) -> Manifest:
    """Reads what is recorded about the item in `directory`; see `read_manifest`."""
    recorded = read_array_records(directory)
    if recorded.scope == "tree":
        return recorded
    # A type handler saw the arrays alone: the rest of the tree is what stock Orbax wrote of it.
    arrays = {storage_name(path): array for path, array in recorded.arrays.items()}
    stock = _stock.read_stock_manifest(directory)
    tree = replace_leaves(stock.tree, lambda path, leaf: arrays.get(storage_name(path), leaf))
    return dataclasses.replace(stock, tree=tree, inventory=recorded.inventory, writer=recorded.writer, notes=())


def read_array_records(directory: epath.Path) -> Manifest:
    """Reads what is recorded about the arrays of the item in `directory`: all there is to know about these."""
    file = directory / FILE_NAME
    if file.exists():
        nbytes = file.stat().length
        if nbytes > _wire.FRAME.max_nbytes:
            raise FormatError(
                Problem(
                    could_not=f"cannot read {file}: it holds {nbytes} bytes, and no record more than {_wire.FRAME.max_nbytes}",
                    fix=_LOST_FIX,
                )
            )
        try:
            return _wire.decode(file.read_bytes())
        except FormatError as error:
            raise FormatError(
                *(
                    dataclasses.replace(
                        problem,
                        could_not=f"cannot read {file}: {problem.could_not}",
                        fix=problem.fix or _LOST_FIX,
                    )
                    for problem in error.problems
                )
            ) from error
    if is_recorded(directory):
        raise FormatError(
            Problem(
                could_not=f"cannot find {file}, which was written with this checkpoint",
                fix=_LOST_FIX,
            )
        )
    return _stock.read_stock_manifest(directory)


def is_recorded(directory: epath.Path) -> bool:
    """Whether there is a record of an item, or other files that say so, so that a lost one does not go unnoticed."""
    if (directory / FILE_NAME).exists() or (directory / DIGESTS_FILE).exists():
        return True
    sharding = directory / _stock.SHARDING_FILE
    return sharding.exists() and _MARK in sharding.read_bytes()


def write_records(directory: epath.Path, manifest: Manifest) -> None:
    """Writes the record, and stock Orbax's `_sharding`, next to the arrays of an item.

    One process calls it, before Orbax commits the item.

    Args:
        directory: The directory of the item.
        manifest: What to record; its inventory is that of this run.
    """
    assert manifest.inventory is not None
    (directory / FILE_NAME).write_bytes(_wire.encode(manifest))
    arrays = {storage_name(path): array for path, array in manifest.arrays.items()}
    if arrays:
        sharding = render_sharding_file(arrays, manifest.inventory, {FILE_NAME: ""})
        (directory / _stock.SHARDING_FILE).write_bytes(sharding)


def find_item(path: str | PathLike[str], *, prefer: str = "") -> epath.Path:
    """The directory of the item that `path` means; see `read_manifest` for what is raised.

    Args:
        path: As for `read_manifest`.
        prefer: Name of the item that is meant where there are several, if it is among them.
    """
    directory = epath.Path(path)
    if not directory.exists():
        raise FileNotFoundError(f"there is no checkpoint at {directory}")
    if any(_UNFINISHED in name for name in (directory.name, directory.parent.name)):
        raise CheckpointLayoutError(
            Problem(could_not=f"cannot read {directory}: its save was not finished", fix="read another step")
        )
    items = list_items(directory)
    if items == [directory]:
        return directory
    if len(items) == 1:
        return items[0]
    if prefer in (item.name for item in items):
        return directory / prefer
    if items:
        raise CheckpointLayoutError(
            Problem(
                could_not=f"cannot tell which item of {directory} is meant",
                present=", ".join(item.name for item in items),
                fix="pass the path of one of them; the functions of v1 take its name as checkpointable_name=",
            )
        )
    steps = sorted((child.name for child in _children(directory) if child.name.isdigit()), key=int)
    raise CheckpointLayoutError(
        Problem(
            could_not=f"cannot find a checkpoint at {directory}",
            present=f"the root of a CheckpointManager with steps {', '.join(steps)}" if steps else "",
            fix="pass the path of a step" if steps else "pass the directory that was passed to save",
        )
    )


def list_items(directory: epath.Path) -> list[epath.Path]:
    """The directories in a step of a `CheckpointManager` that hold a tree; the step itself, if it holds one."""
    if is_item(directory):
        return [directory]
    return [child for child in _children(directory) if child.is_dir() and is_item(child)]


def _children(directory: epath.Path) -> list[epath.Path]:
    """What is in a directory, but for what was not finished."""
    children = sorted(directory.iterdir()) if directory.is_dir() else []
    return [child for child in children if _UNFINISHED not in child.name]


def is_item(directory: epath.Path) -> bool:
    """Whether a directory holds a tree that Orbax saved."""
    return _stock.is_checkpoint_item(directory) or (directory / FILE_NAME).exists()
