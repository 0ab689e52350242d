"""Orbax's v1 API (`orbax.checkpoint.experimental.v1`): the same records, plans, policies and bytes.

    import orbax.checkpoint.experimental.v1 as ocp
    from orbax_explicit import v1 as oxe1

    with oxe1.context(policy=oxe.RestorePolicy(...)):
        ocp.save(path, state)
        state = ocp.load(path)
    state = oxe1.load(path, target, mesh=mesh)

Within the context every PyTree of `ocp.save`, `ocp.load`, the functions of checkpointables, `ocp.metadata` and
`ocp.training.Checkpointer` goes through `ExplicitPyTreeHandler`; checkpointables of other kinds keep their own handlers.

Orbax does some things before it asks any handler, and there `load`, `save` and `save_async` of this module do better:

- `ocp.load` puts each leaf of a target that is on an `AbstractMesh` onto the mesh of `jax.set_mesh`, whatever the axis
  types, the sizes and the memory kind that it asked for; without such a mesh it raises. `load` resolves it by the
  target's own.
- `ocp.save` refuses leaves of some types without naming them, and `overwrite=True` removes what is there before a save
  can be refused. `save` asks first; before an `overwrite=True` of `training.Checkpointer`, `check` does.
- `ocp.load` picks one of several trees by its name, and says of a path that holds none no more than that it cannot be
  recognized. `load` says what is there.
- A context of Orbax's own that is entered within one of this module, `with ocp.Context(): ...`, takes its place, and
  trees go through Orbax's own handler again: pass it as `context(base=...)`.
- `ocp.partial.save` uses Orbax's own handler, and nothing of it is recorded.
- `ocp.metadata` gives None for a checkpoint whose metadata it cannot read; `orbax_explicit.read_manifest` says why.

What runs when, in a save: before `save_async` returns, in the caller's thread, everything is refused that is to be
refused, the layout is recorded and the values are taken; arrays may be donated, and NumPy arrays changed, from then on.
After it, in threads of Orbax's, files are written; the processes meet; the primary one merges and adds digests; Orbax
commits. An error of that part is raised by `result()`, and once more by the next call to a `training.Checkpointer`, whose
step is not saved either; so is a refusal by the latter. Orbax counts its saves for the whole process: one thread at a time may save.

A load asks for devices and the mesh of `jax.set_mesh` once, then plans all, then reads. Where an event loop is running, as
in a notebook, Orbax's own functions call handlers from another thread, in which no `jax.set_mesh`, `jax.enable_x64` and
`jax.default_device` of the caller's holds; `load` has asked before.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import orbax.checkpoint.experimental.v1 as ocp
from etils import epath
from jax.sharding import Mesh

from orbax_explicit import _compat
from orbax_explicit._binding import read_present
from orbax_explicit._codecs import Checksum, CodecPolicy, Compression
from orbax_explicit._errors import CheckpointLayoutError, Problem
from orbax_explicit._event_loops import run
from orbax_explicit._plan import RestorePlan
from orbax_explicit._policy import RestorePolicy, checked_policy
from orbax_explicit._records import Inventory
from orbax_explicit._sidecar import find_item, list_items
from orbax_explicit._stock import STEP_METADATA_FILE
from orbax_explicit._trees import Unreduced
from orbax_explicit._v1_handler import Asked, ExplicitPyTreeHandler, Options, bind, options_of

__all__ = ["ExplicitPyTreeHandler", "check", "context", "handler_type", "load", "plan_restore", "save", "save_async"]

PyTree: TypeAlias = Any

_STATE = "state"
"""The name under which `ocp.save` keeps a tree."""


def handler_type(
    policy: RestorePolicy | None = None,
    *,
    mesh: Mesh | None = None,
    unreduced: Unreduced = "error",
    checksum: Checksum = "crc32",
    compression: Compression = "auto",
) -> type[ExplicitPyTreeHandler]:
    """An `ExplicitPyTreeHandler` that is bound to these choices, to be registered by the name of a checkpointable.

    Args:
        policy: The choices for restores.
        mesh: The mesh to place recorded specs on; None for the recorded one.
        unreduced: For an array with a pending reduction: `"error"` refuses it by leaf name, `"reduce"` saves it
            reduced, by a collective before the save returns.
        checksum: `"crc32"` gives every chunk a checksum; None leaves it out.
        compression: `"auto"` compresses what is nearly one value; `"zstd"` everything; None nothing.

    Raises:
        ValueError: There is no such choice.
    """
    return bind(
        Options(
            policy=checked_policy(policy),
            mesh=mesh,
            unreduced=unreduced,
            codec_policy=CodecPolicy(checksum=checksum, compression=compression),
        )
    )


def context(
    policy: RestorePolicy | None = None,
    *,
    mesh: Mesh | None = None,
    unreduced: Unreduced = "error",
    checksum: Checksum = "crc32",
    compression: Compression = "auto",
    base: ocp.Context | None = None,
) -> ocp.Context:
    """A context of Orbax's in which trees go through this package.

    Args:
        policy: The choices for restores.
        mesh: The mesh to place recorded specs on; None for the recorded one.
        unreduced: As for `handler_type`.
        checksum: As for `handler_type`.
        compression: As for `handler_type`.
        base: The context whose other options hold; None for the one that is active. Those that say what is stored, and
            what is read, are followed; those that say how Orbax's own handlers move bytes (replicas, broadcasts, limits
            and order of transfers, reports of them) have nothing to act on here.

    Choices of an active context of this module are not added up with these; they are replaced.

    Returns:
        A context, to be entered by `with`, or passed to `ocp.training.Checkpointer`.

    Raises:
        TypeError: The policy, the mesh or the base is none.
        ValueError: There is no such choice, or the layout of the context is not Orbax's own.
    """
    if base is not None and not isinstance(base, ocp.Context):
        raise TypeError(f"base must be a context of Orbax's v1, not {base!r}")
    handler = handler_type(policy, mesh=mesh, unreduced=unreduced, checksum=checksum, compression=compression)
    default = options_of(handler)

    def choose(name: str | None, bound: Options | None) -> Options:
        # What a caller has bound to a name of its own stays.
        return bound if bound is not None and name not in (None, _STATE) else default

    return _context(choose, base)


_Choose: TypeAlias = Callable[[str | None, Options | None], Options]
"""The choices of an entry of a registry, by its name and by those that it had; it had none if it was Orbax's own."""


def _context(choose: _Choose, base: ocp.Context | None = None, *, name: str | None = None) -> ocp.Context:
    """A context in which every tree goes through us.

    Args:
        choose: By which choices.
        base: The context whose other options hold; None for the one that is active.
        name: A checkpointable that is a tree, whatever Orbax would take it for.
    """
    result = ocp.Context(base or _compat.active_context())
    if result.checkpoint_layout is ocp.options.CheckpointLayout.SAFETENSORS:
        raise ValueError("a context with the layout of safetensors asks no handler; use that of Orbax")
    registry = result.checkpointables.registry
    ours = ocp.handlers.local_registry(include_global_registry=False)
    default = choose(_STATE, None)
    # In their order, for it decides. But of handlers that go by one type string the last is found, whatever its name.
    for entry, entry_name in sorted(registry.get_all_entries(), key=lambda entry: entry[1] == _STATE):
        handler = entry
        is_ours = issubclass(entry, ExplicitPyTreeHandler)
        if is_ours or entry is ocp.handlers.PyTreeHandler:
            handler = bind(choose(entry_name, options_of(entry) if is_ours else None))
            default = options_of(handler) if entry_name is None else default
        typestrs = (*registry.get_secondary_typestrs(entry), f"{entry.__module__}.{entry.__qualname__}")
        ours.add(handler, checkpointable_name=entry_name, secondary_typestrs=typestrs)
    for missing in (name, _STATE):
        if missing is not None and not ours.has(missing):
            ours.add(bind(default), checkpointable_name=missing)
    result.checkpointables.registry = ours
    return result


def load(
    path: str | os.PathLike[str],
    target: PyTree = None,
    *,
    mesh: Mesh | None = None,
    policy: RestorePolicy | None = None,
    checkpointable_name: str | None = None,
) -> PyTree:
    """Restores a tree, as `ocp.load` does. Every array lands as `plan_restore` says for the same arguments.

    Every process calls it, whether within a context of this module or not.

    Args:
        path: What was passed to `ocp.save`, or to a checkpointer of v0, or the directory of a step, or of an item in it.
        target: The tree to restore into: arrays, or `jax.ShapeDtypeStruct`s with or without shardings, on concrete or
            abstract meshes; what `ocp.metadata` gave; `...` for leaves that are not to be read. None for the tree and
            the layout as they were saved.
        mesh: The mesh to place recorded specs on; None for the context's, or else the recorded one.
        policy: The choices for this restore; None for the context's.
        checkpointable_name: The name of the tree; None for the only one, or for that of `save` where there are several.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there is no checkpoint, or an unfinished one, or it has several trees.
        RestoreRefusedError: Something cannot be restored as asked; lists everything. Nothing has been read.
        FormatError: The record or an array is damaged, or from a newer version.
    """
    asked = Asked(target=_target(target), present=read_present())
    choose = _choose_restore(policy, mesh, asked)
    item = _find_tree(path, checkpointable_name)
    # A tree of v0 lies in the directory that was saved to; others in one of their own, which Orbax wants to be named.
    is_alone = item == epath.Path(path) and not (item.parent / STEP_METADATA_FILE).exists()
    context = _context(choose)
    with context:
        try:
            tree = (
                ocp.load(item, checkpointable_name=None)
                if is_alone
                else ocp.load(item.parent, checkpointable_name=item.name)
            )
        except ocp.errors.InvalidLayoutError:
            # Orbax says no more. Our own reading does, or takes what lacks nothing but a file of Orbax's.
            tree = _read(context.checkpointables.registry.get(_STATE)(), item)
    if not asked.taken:
        raise ValueError(f"{path} was loaded by another handler than ours, which saw no target: use Orbax's own load")
    return tree


def plan_restore(
    path: str | os.PathLike[str],
    target: PyTree = None,
    *,
    mesh: Mesh | None = None,
    devices: Sequence[jax.Device] | Inventory | None = None,
    policy: RestorePolicy | None = None,
    checkpointable_name: str | None = None,
) -> RestorePlan:
    """Says what `load` would do with the same arguments in the same context, before any array is read. `print` it.

    It differs from `orbax_explicit.plan_restore`, which knows no context, where there is one: that may hold a mesh, a
    policy, or Orbax's options for partial loading and for padding. Any process may call it; each plans the same.

    Args:
        path: As for `load`.
        target: As for `load`.
        mesh: As for `load`.
        devices: The devices to restore onto, or an inventory of them; None for `jax.devices()`.
        policy: As for `load`.
        checkpointable_name: As for `load`.

    Returns:
        The plan; `plan.refused` lists everything that could not be done.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there is no checkpoint, or an unfinished one, or it has several trees.
        FormatError: The record is damaged or from a newer version.
    """
    item = _find_tree(path, checkpointable_name)
    context = _context(_choose_restore(policy, mesh), name=item.name)
    with context:
        handler = context.checkpointables.registry.get(item.name)()
    if not isinstance(handler, ExplicitPyTreeHandler):
        raise ValueError(f"{item.name!r} is bound to another handler than ours in this context, which plans nothing")
    return handler.plan(item, _target(target), devices if isinstance(devices, Inventory) else read_present(devices))


def _target(target: PyTree) -> PyTree:
    return target.metadata if isinstance(target, ocp.CheckpointMetadata) else target


def _choose_restore(policy: RestorePolicy | None, mesh: Mesh | None, asked: Asked | None = None) -> _Choose:
    policy = checked_policy(policy)

    def choose(name: str | None, bound: Options | None) -> Options:
        bound = bound or Options()
        return dataclasses.replace(
            bound, policy=policy or bound.policy, mesh=mesh if mesh is not None else bound.mesh, asked=asked
        )

    return choose


def _find_tree(path: str | os.PathLike[str], name: str | None) -> epath.Path:
    """The directory of the tree of this name; of None, of the only one, or of that of `save`."""
    directory = epath.Path(path)
    return find_item(directory, prefer=_STATE) if name is None else _named_item(directory, name)


def _read(handler: Any, item: epath.Path) -> PyTree:
    """What a handler restores, asked by us, whether an event loop is running or not."""

    async def read() -> PyTree:
        return await (await handler.load(item))

    return run(read())


def _named_item(directory: epath.Path, name: str) -> epath.Path:
    """The directory of the item of this name.

    Raises:
        FileNotFoundError: There is nothing at the path.
        CheckpointLayoutError: What is there has no such tree.
    """
    if not directory.exists():
        raise FileNotFoundError(f"there is no checkpoint at {directory}")
    names = [item.name for item in list_items(directory) if item != directory]
    if name not in names:
        raise CheckpointLayoutError(
            Problem(
                could_not=f"cannot find a tree named {name!r} in {directory}",
                present=", ".join(names),
                fix="pass one of these names" if names else "pass the directory that was passed to save",
            )
        )
    return directory / name


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    unreduced: Unreduced | None = None,
    checkpointable_name: str = _STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Saves a tree, as `ocp.save` does, and returns when the checkpoint is whole. See `save_async`."""
    save_async(
        path,
        state,
        unreduced=unreduced,
        checkpointable_name=checkpointable_name,
        overwrite=overwrite,
        custom_metadata=custom_metadata,
    ).result()


def save_async(
    path: str | os.PathLike[str],
    state: PyTree,
    *,
    unreduced: Unreduced | None = None,
    checkpointable_name: str = _STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> ocp.AsyncResponse[None]:
    """Starts a save, as `ocp.save_async` does.

    Every process calls it, whether within a context of this module or not.

    Args:
        path: Where to save; nothing is there yet.
        state: The tree to save.
        unreduced: As for `handler_type`; None for the context's.
        checkpointable_name: The name of the tree in the checkpoint.
        overwrite: Whether to replace the checkpoint that is there. Orbax removes it before it writes, so that a save that
            fails later, or is killed, leaves neither: save elsewhere, or steps of a Checkpointer, where that counts.
        custom_metadata: JSON to keep in the checkpoint's own metadata.

    Returns:
        A response whose `result()` returns when the checkpoint is whole, or raises why it is not.

    Raises:
        SaveRefusedError: Leaves could not come back as they are.
        CheckpointLayoutError: What is to be overwritten is no checkpoint.
        TypeError: The metadata is not JSON.
        ValueError: The path is not absolute, or the name is not one.
            Whichever of these is raised, what was there is still there.
    """
    directory = epath.Path(path)
    _check_arguments(directory, checkpointable_name, custom_metadata)
    if overwrite:
        _check_replaceable(directory)
    context = _context(_choose_unreduced(unreduced), name=checkpointable_name)
    with context:
        handler = context.checkpointables.registry.get(checkpointable_name)()
        if overwrite and isinstance(handler, ExplicitPyTreeHandler):
            # Orbax removes what is there before the handler could refuse.
            handler.check(state)
        return ocp.save_checkpointables_async(
            path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata
        )


def _check_arguments(directory: epath.Path, name: str, custom_metadata: Any) -> None:
    """Refuses what Orbax would after it has removed what is to be overwritten."""
    if not directory.is_absolute():
        raise ValueError(f"the path must be absolute, not {os.fspath(directory)!r}")
    if name in {"", ".", ".."} or "/" in name:
        raise ValueError(f"checkpointable_name must be the name of a directory, not {name!r}")
    try:
        json.dumps(custom_metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"custom_metadata must be JSON: {error}; make NumPy and JAX scalars Python's, by item()"
        ) from error


def _check_replaceable(directory: epath.Path) -> None:
    """Refuses to remove what is no checkpoint.

    Raises:
        CheckpointLayoutError: It is the root of steps, or something else.
    """
    if not directory.exists() or (directory / STEP_METADATA_FILE).exists():
        return
    if directory.is_dir() and (list_items(directory) or not any(directory.iterdir())):
        return
    raise CheckpointLayoutError(
        Problem(
            could_not=f"cannot overwrite {directory}: it is no checkpoint",
            fix="pass the path of a checkpoint, or of nothing; what is in the way is yours to remove",
        )
    )


def check(state: PyTree, *, unreduced: Unreduced | None = None) -> None:
    """Refuses what a save would refuse, and does nothing else: before an `overwrite=True` of Orbax's own functions.

    Args:
        state: The tree.
        unreduced: As for `handler_type`; None for the context's.

    Raises:
        SaveRefusedError: Leaves could not come back as they are.
    """
    context = _context(_choose_unreduced(unreduced), name=_STATE)
    with context:
        handler = context.checkpointables.registry.get(_STATE)()
        assert isinstance(handler, ExplicitPyTreeHandler)
        handler.check(state)


def _choose_unreduced(unreduced: Unreduced | None) -> _Choose:
    def choose(name: str | None, bound: Options | None) -> Options:
        bound = bound or Options()
        return dataclasses.replace(bound, unreduced=bound.unreduced if unreduced is None else unreduced)

    return choose
