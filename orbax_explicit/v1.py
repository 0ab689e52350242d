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
- `ocp.partial.save` uses Orbax's own handler, and nothing of it is recorded.
- `ocp.metadata` gives None for a checkpoint whose metadata it cannot read; `orbax_explicit.read_manifest` says why.

What runs when, in a save: before `save_async` returns, in the caller's thread, everything is refused that is to be
refused, the layout is recorded and the values are taken; arrays may be donated, and NumPy arrays changed, from then on.
After it, in threads of Orbax's, files are written; the processes meet; the primary one merges and adds digests; Orbax
commits. An error of that part is raised by `result()`, and once more by the next call to a `training.Checkpointer`; so is a
refusal by the latter. Orbax counts its saves for the whole process: one thread at a time may save.

A load asks for devices and the mesh of `jax.set_mesh` once, then plans all, then reads. Where an event loop is running, as
in a notebook, Orbax's own functions call handlers from another thread, in which no `jax.set_mesh`, `jax.enable_x64` and
`jax.default_device` of the caller's holds; `load` has asked before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint.future import Future

from orbax_explicit import _compat
from orbax_explicit._array_metadata import LeafMetadata, leaf_metadata
from orbax_explicit._binding import Present, read_present
from orbax_explicit._codecs import Checksum, CodecPolicy, Compression
from orbax_explicit._errors import SaveRefusedError
from orbax_explicit._leaf_capture import PYTHON_SCALARS
from orbax_explicit._policy import RestorePolicy, checked_policy
from orbax_explicit._sidecar import find_item
from orbax_explicit._trees import RestoreRequest, SaveRequest, Trees, Unreduced

__all__ = ["ExplicitPyTreeHandler", "check", "context", "handler_type", "load", "save", "save_async"]

PyTree: TypeAlias = Any
_T = TypeVar("_T")

_STATE = "state"
"""The name under which `ocp.save` keeps a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a handler class is bound to.

    Attributes:
        policy: The choices for restores.
        mesh: The mesh to place recorded specs on.
        unreduced: What becomes of arrays with a pending reduction.
        codec_policy: What chunks are encoded with.
        asked: What `load` of this module was asked for, past Orbax; None where Orbax passes a target on.
    """

    policy: RestorePolicy | None = None
    mesh: Mesh | None = None
    unreduced: Unreduced = "error"
    codec_policy: CodecPolicy = field(default_factory=CodecPolicy)
    asked: _Asked | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A target as the caller gave it, and what was here in the caller's thread.

    Attributes:
        target: The target.
        present: What was here.
        taken: By whom it was taken, in the end.
    """

    target: PyTree
    present: Present
    taken: list[ExplicitPyTreeHandler] = field(default_factory=list)


class ExplicitPyTreeHandler:
    """Saves and restores a PyTree together with how each of its arrays was laid out: a v1 `CheckpointableHandler`.

    Orbax makes one whenever it asks anything, without arguments. `handler_type` gives a class that is bound to some.

    Every process calls `save`, `load` and `metadata`. The primary process writes the record; each writes and reads its
    own shards.
    """

    _options: ClassVar[_Options] = _Options()

    def __init__(self) -> None:
        self._context = _compat.active_context()

    async def save(self, directory: ocp.path.PathAwaitingCreation, checkpointable: PyTree) -> Awaitable[None]:
        """Starts a save. The record and the values are taken before this returns, files are written after.

        Args:
            directory: The directory of the item, which Orbax creates in the background.
            checkpointable: The tree.

        Returns:
            What ends when the item is whole, on every process.

        Raises:
            SaveRefusedError: Leaves could not come back as they are. No array has been written. Under
                `training.Checkpointer` it is what is returned that raises: one whose save has raised at once believes
                that it goes on, and silently makes no other.
        """
        start = time.monotonic()
        try:
            captured = self._trees.capture(self._save_request(checkpointable))
        except SaveRefusedError as refusal:
            if not _compat.is_created_by_v0(directory):
                raise
            return _Saving((), functools.partial(_refuse, directory, refusal))
        commits = await self._trees.write(directory.path, captured)
        operation = f"{_compat.save_operation_id()}.{directory.path.name}"
        return _Saving(commits, lambda: self._commit(directory, commits, operation, start))

    async def _commit(
        self, directory: ocp.path.PathAwaitingCreation, commits: Sequence[Future], operation: str, start: float
    ) -> None:
        timeout: float | None = self._context.asynchronous.timeout_secs

        def remaining() -> int | None:
            return None if timeout is None else max(1, int(start + timeout - time.monotonic()))

        async def meet(name: str) -> None:
            await ocp.multihost.sync_global_processes(
                f"orbax_explicit_{name}",
                operation_id=operation,
                timeout=remaining(),
                processes=self._context.multiprocessing.active_processes,
            )

        path = await directory.await_creation()
        try:
            for commit in commits:
                await asyncio.to_thread(commit.result, remaining())
        except asyncio.CancelledError:
            for commit in commits:
                if hasattr(commit, "cancel"):
                    commit.cancel()
            raise
        await meet("written")
        if self._trees.is_primary:
            await asyncio.to_thread(self._trees.finalize, path)
        await meet("finalized")

    async def load(self, directory: ocp.path.Path, abstract_checkpointable: PyTree = None) -> Awaitable[PyTree]:
        """Restores the tree, with every array laid out as planned.

        All is read before this returns: Orbax gives errors of what it awaits later another name.

        Args:
            directory: The directory of the item.
            abstract_checkpointable: The tree to restore into; None for the tree and the layout as they were saved.

        Raises:
            RestoreRefusedError: Something cannot be restored as asked; lists everything. Nothing has been read.
            FormatError: The record or an array is damaged, or from a newer version.
        """
        asked = self._options.asked
        if asked is not None:
            asked.taken.append(self)
        loading = self._context.array.loading
        policy = self._options.policy or RestorePolicy()
        if self._context.pytree.loading.partial_load:
            policy = dataclasses.replace(policy, extra="ignore")
        planned = self._trees.plan(
            directory,
            RestoreRequest(
                target=abstract_checkpointable if asked is None else asked.target,
                mesh=self._options.mesh,
                policy=policy,
                strict=not loading.enable_padding_and_truncation,
                max_in_flight_nbytes=self._context.memory.read_concurrent_bytes,
            ),
            asked.present if asked is not None else None,
        )
        # In a loop of its own: that of the caller may be one that was patched to be entered twice.
        return _Loaded(await asyncio.to_thread(asyncio.run, self._trees.read(planned)))

    async def metadata(self, directory: ocp.path.Path) -> PyTree:
        """The tree with what is recorded of each leaf, without the devices that saved it.

        Returns:
            A tree with `LeafMetadata` for arrays; for values of Python one of their type. As a target it asks for
            what was recorded.

        Raises:
            FormatError: The record, or Orbax's list of the leaves, is damaged.
        """
        return leaf_metadata(self._trees.manifest(epath.Path(directory)), self._options.policy)

    def check(self, checkpointable: PyTree) -> None:
        """Refuses what a save would refuse, and does nothing else.

        Raises:
            SaveRefusedError: Leaves could not come back as they are.
        """
        self._trees.capture(self._save_request(checkpointable))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether each leaf is of a kind that is saved."""
        return all(_is_leaf(leaf) for leaf in jax.tree.leaves(checkpointable))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether each leaf says what it asks for."""
        return all(
            _is_leaf(leaf) or isinstance(leaf, type) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
            for leaf in jax.tree.leaves(abstract_checkpointable)
        )

    def _save_request(self, tree: PyTree) -> SaveRequest:
        saving = self._context.array.saving
        return SaveRequest(
            item=tree,
            save_args=_save_args(saving, tree),
            reduce=self._options.unreduced == "reduce",
            data_file_nbytes=saving.ocdbt_target_data_file_size,
        )

    @functools.cached_property
    def _trees(self) -> Trees:
        saving, memory = self._context.array.saving, self._context.memory
        options = self._context.multiprocessing.v0()
        codec_policy = self._options.codec_policy
        if not saving.use_compression:
            codec_policy = dataclasses.replace(codec_policy, compression=None)
        codec_policy.check_format(use_zarr3=saving.use_zarr3)
        policy = self._options.policy
        return Trees(
            lambda type_handlers: ocp0.PyTreeCheckpointHandler(
                handler_impl=ocp0.BasePyTreeCheckpointHandler(
                    save_concurrent_bytes=memory.write_concurrent_bytes,
                    restore_concurrent_bytes=memory.read_concurrent_bytes,
                    use_ocdbt=saving.use_ocdbt,
                    use_zarr3=saving.use_zarr3,
                    multiprocessing_options=options,
                    type_handler_registry=type_handlers,
                    enable_post_merge_validation=saving.enable_post_merge_validation,
                )
            ),
            codec_policy=codec_policy,
            use_ocdbt=saving.use_ocdbt,
            primary_host=options.primary_host,
            policy=policy.for_arrays_alone() if policy is not None else None,
        )


class _Saving:
    """A save that goes on: awaited, or cancelled by its futures, as Orbax does for v0's checkpointers."""

    def __init__(self, commit_futures: Sequence[Future], commit: Callable[[], Awaitable[None]]) -> None:
        self.commit_futures = commit_futures
        self._commit = commit

    def __await__(self) -> Generator[Any, None, None]:
        return self._commit().__await__()


async def _refuse(directory: ocp.path.PathAwaitingCreation, refusal: SaveRefusedError) -> None:
    """Raises, once nothing is being created that the next save would find."""
    await directory.await_creation()
    raise refusal


class _Loaded(Generic[_T]):
    """What has been loaded already."""

    def __init__(self, value: _T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, _T]:
        yield from ()
        return self._value


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
    if unreduced not in get_args(Unreduced):
        raise ValueError(f"unreduced must be one of {list(get_args(Unreduced))}, not {unreduced!r}")
    return _bound(
        _Options(
            policy=checked_policy(policy) if policy is not None else None,
            mesh=mesh,
            unreduced=unreduced,
            codec_policy=CodecPolicy(checksum=checksum, compression=compression),
        )
    )


def _bound(options: _Options) -> type[ExplicitPyTreeHandler]:
    handler = type(
        "PyTreeHandler", (ExplicitPyTreeHandler,), {"_options": options, "__doc__": ExplicitPyTreeHandler.__doc__}
    )
    _compat.record_as_stock_v1(handler)
    return handler


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
        ValueError: There is no such choice, or the layout of the context is not Orbax's own.
    """
    handler = handler_type(policy, mesh=mesh, unreduced=unreduced, checksum=checksum, compression=compression)
    default = handler._options

    def choose(name: str | None, bound: _Options | None) -> _Options:
        # What a caller has bound to a name of its own stays.
        return bound if bound is not None and name not in (None, _STATE) else default

    return _context(choose, base)


_Choose: TypeAlias = Callable[[str | None, _Options | None], _Options]
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
            handler = _bound(choose(entry_name, entry._options if is_ours else None))
            default = handler._options if entry_name is None else default
        typestrs = (*registry.get_secondary_typestrs(entry), f"{entry.__module__}.{entry.__qualname__}")
        ours.add(handler, checkpointable_name=entry_name, secondary_typestrs=typestrs)
    for missing in (name, _STATE):
        if missing is not None and not ours.has(missing):
            ours.add(_bound(default), checkpointable_name=missing)
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
    """Restores a tree, as `ocp.load` does. Every array lands as `plan_restore` of the item says for the same arguments.

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
    policy = checked_policy(policy) if policy is not None else None
    asked = _Asked(
        target=target.metadata if isinstance(target, ocp.CheckpointMetadata) else target, present=read_present()
    )

    def choose(name: str | None, bound: _Options | None) -> _Options:
        bound = bound or _Options()
        return dataclasses.replace(
            bound, policy=policy or bound.policy, mesh=mesh if mesh is not None else bound.mesh, asked=asked
        )

    directory = epath.Path(path)
    item = directory / checkpointable_name if checkpointable_name is not None else find_item(directory, prefer=_STATE)
    # A tree of v0 lies in the directory that was saved to; others in one of their own, which Orbax wants to be named.
    is_alone = item == directory and not (item.parent / "_CHECKPOINT_METADATA").exists()
    with _context(choose):
        tree = (
            ocp.load(item, checkpointable_name=None)
            if is_alone
            else ocp.load(item.parent, checkpointable_name=item.name)
        )
    if not asked.taken:
        raise ValueError(f"{path} was loaded by another handler than ours, which saw no target: use Orbax's own load")
    return tree


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
        overwrite: Whether to replace what is there, if this package does not refuse the save.
        custom_metadata: JSON to keep in the checkpoint's own metadata.

    Returns:
        A response whose `result()` returns when the checkpoint is whole, or raises why it is not.

    Raises:
        SaveRefusedError: Leaves could not come back as they are. What was there is still there.
    """
    context = _context(_choose_unreduced(unreduced), name=checkpointable_name)
    with context:
        handler = context.checkpointables.registry.get(checkpointable_name)()
        if overwrite and isinstance(handler, ExplicitPyTreeHandler):
            # Orbax removes what is there before the handler could refuse.
            handler.check(state)
        return ocp.save_checkpointables_async(
            path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata
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
    if unreduced is not None and unreduced not in get_args(Unreduced):
        raise ValueError(f"unreduced must be one of {list(get_args(Unreduced))}, not {unreduced!r}")

    def choose(name: str | None, bound: _Options | None) -> _Options:
        bound = bound or _Options()
        return dataclasses.replace(bound, unreduced=unreduced or bound.unreduced)

    return choose


def _is_leaf(leaf: Any) -> bool:
    return (
        leaf is ...
        or isinstance(leaf, jax.Array | np.ndarray | np.generic | str | bytes | LeafMetadata)
        or type(leaf) in PYTHON_SCALARS
    )


def _save_args(saving: Any, tree: PyTree) -> PyTree | None:
    """The storage options of each leaf, as v0 calls them; None where there are none.

    Args:
        saving: `ocp.options.ArrayOptions.Saving`.
        tree: The tree.
    """
    default, creator = saving.storage_options, saving.scoped_storage_options_creator
    if creator is None and default in (None, type(saving).StorageOptions()):
        return None

    def of_leaf(keypath: Any, leaf: Any) -> ocp0.SaveArgs:
        own = creator(keypath, leaf) if creator is not None else None
        # What holds for every leaf holds for those that have such a dtype, and for the dimensions that a leaf has.
        dtype = getattr(default, "dtype", None)
        if dtype is not None and not _is_of_kind(leaf, np.dtype(dtype)):
            dtype = None
        axes = tuple(axis for axis in getattr(default, "shard_axes", None) or () if axis < np.ndim(leaf))
        defaults = {"dtype": dtype, "shard_axes": axes, "chunk_byte_size": getattr(default, "chunk_byte_size", None)}
        options = {name: getattr(own, name, None) for name in defaults}
        return ocp0.SaveArgs(**{name: defaults[name] if value is None else value for name, value in options.items()})

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def _is_of_kind(leaf: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a leaf is an array of floats, of integers, or of complex numbers, as the dtype is."""
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    return isinstance(leaf, jax.Array | np.ndarray) and any(
        jnp.issubdtype(leaf.dtype, kind) and jnp.issubdtype(dtype, kind) for kind in kinds
    )
