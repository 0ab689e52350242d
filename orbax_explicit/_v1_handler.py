"""The handler of Orbax's v1 API: turns what Orbax passes, and the options of its context, into requests."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

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
from orbax_explicit._binding import Present
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._errors import SaveRefusedError
from orbax_explicit._leaf_capture import PYTHON_SCALARS
from orbax_explicit._plan import RestorePlan
from orbax_explicit._policy import RestorePolicy
from orbax_explicit._records import Inventory
from orbax_explicit._restoring import checked_mesh
from orbax_explicit._trees import RestoreRequest, SaveRequest, Trees, Unreduced, checked_unreduced

PyTree: TypeAlias = Any
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a handler class is bound to.

    Attributes:
        policy: The choices for restores.
        mesh: The mesh to place recorded specs on.
        unreduced: What becomes of arrays with a pending reduction.
        codec_policy: What chunks are encoded with.
        asked: What `v1.load` was asked for, past Orbax; None where Orbax passes a target on.
    """

    policy: RestorePolicy | None = None
    mesh: Mesh | None = None
    unreduced: Unreduced = "error"
    codec_policy: CodecPolicy = field(default_factory=CodecPolicy)
    asked: Asked | None = None

    def __post_init__(self) -> None:
        checked_unreduced(self.unreduced)
        checked_mesh(self.mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
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

    __module__ = "orbax_explicit.v1"  # where users find it

    _options: ClassVar[Options] = Options()

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
        planned = self._trees.plan(
            directory,
            self._restore_request(abstract_checkpointable if asked is None else asked.target),
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

    def plan(self, directory: epath.Path, abstract_checkpointable: PyTree, present: Present | Inventory) -> RestorePlan:
        """What `load` would do onto these devices.

        Raises:
            FormatError: The record is damaged or from a newer version.
        """
        return self._trees.describe(directory, self._restore_request(abstract_checkpointable), present)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether each leaf is of a kind that is saved; of what JAX cannot take for a tree, `save` says why."""
        try:
            leaves = jax.tree.leaves(checkpointable)
        except (ValueError, SystemError, RecursionError):  # keys that do not sort, and what contains itself
            return isinstance(checkpointable, dict | list | tuple)
        return all(_is_leaf(leaf) for leaf in leaves)

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

    def _restore_request(self, target: PyTree) -> RestoreRequest:
        policy = self._options.policy or RestorePolicy()
        if self._context.pytree.loading.partial_load:
            policy = dataclasses.replace(policy, extra="ignore")
        return RestoreRequest(
            target=target,
            mesh=self._options.mesh,
            policy=policy,
            strict=not self._context.array.loading.enable_padding_and_truncation,
            max_in_flight_nbytes=self._context.memory.read_concurrent_bytes,
        )

    @functools.cached_property
    def _trees(self) -> Trees:
        saving, memory = self._context.array.saving, self._context.memory
        options = self._context.multiprocessing.v0()
        codec_policy = self._options.codec_policy
        if not saving.use_compression:
            codec_policy = dataclasses.replace(codec_policy, compression=None)
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
            use_zarr3=saving.use_zarr3,
            primary_host=options.primary_host,
            policy=self._options.policy,
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


def bind(options: Options) -> type[ExplicitPyTreeHandler]:
    """A handler class with these choices, which Orbax records, and finds again, as its own."""
    handler = type(
        "PyTreeHandler", (ExplicitPyTreeHandler,), {"_options": options, "__doc__": ExplicitPyTreeHandler.__doc__}
    )
    _compat.record_as_stock_v1(handler)
    return handler


def options_of(handler: type[ExplicitPyTreeHandler]) -> Options:
    """What a handler class was bound to."""
    return handler._options


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
