"""`Trees`: whole trees in the directory of an item, for the handlers of Orbax's v0 and v1.

A save is captured before anything is written: the record is taken, everything that could not come back is refused
at once, and Orbax is handed plain dicts and lists of leaves that it stores without loss. A restore is planned before
anything is read, the plan is bound to the devices at hand, and the tree is put together as it was, or as the target
is.

Orbax owns the directory, its atomic commit, the processes and the bytes of host values; `_arrays` owns the bytes of
`jax.Array`s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, Sharding
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from orbax_explicit._arrays import ExplicitArrayHandler
from orbax_explicit._binding import Present, read_present
from orbax_explicit._capture import CapturedTree, record_tree
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._containers import rebuild_tree, storage_tree
from orbax_explicit._digests import read_digests, write_digests
from orbax_explicit._errors import Problem, SaveRefusedError
from orbax_explicit._garbage import paused_collection
from orbax_explicit._host_handlers import ExplicitNumpyHandler, ExplicitScalarHandler
from orbax_explicit._leaf_reading import read_leaves
from orbax_explicit._plan import RestorePlan
from orbax_explicit._policy import RestorePolicy
from orbax_explicit._records import Inventory, LeafPath, Manifest, dtype_itemsize, path_names, path_text
from orbax_explicit._restoring import BoundPlan, bind_restore, plan_manifest
from orbax_explicit._sidecar import find_item, read_item_manifest, write_records
from orbax_explicit._stock import read_array_store

PyTree: TypeAlias = Any
Unreduced: TypeAlias = Literal["error", "reduce"]
SaveArgs: TypeAlias = Mapping[tuple[str, ...], ocp.SaveArgs]


def checked_unreduced(unreduced: Unreduced) -> Unreduced:
    """The same choice, where it is one.

    Raises:
        ValueError: It is something else.
    """
    if unreduced not in get_args(Unreduced):
        raise ValueError(f"unreduced must be one of {list(get_args(Unreduced))}, not {unreduced!r}")
    return unreduced


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What to save, and how.

    Attributes:
        item: The tree to save.
        save_args: A tree of `ocp.SaveArgs` (or None) like `item`; None for the defaults.
        custom_metadata: JSON to keep beside the tree, opaque to Orbax.
        reduce: Whether arrays with a pending reduction are saved reduced, rather than refused.
        data_file_nbytes: Bytes that a file of the OCDBT database should not exceed; None for Orbax's default.
    """

    item: PyTree
    save_args: PyTree | None = None
    custom_metadata: Any = None
    reduce: bool = False
    data_file_nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSave:
    """A save that is not refused: the tree as it was when it was captured, and how to write it."""

    tree: CapturedTree
    save_args: SaveArgs
    request: SaveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, and onto what.

    Attributes:
        target: The tree to restore into; None for the tree as it was saved.
        mesh: The mesh to place recorded specs on; None for the recorded one.
        policy: The choices for this restore.
        strict: Whether a target's shape must be the saved one; otherwise arrays are cut off or padded.
        fallback: The sharding of arrays whose recorded mesh does not fit as it is; None to resize such a mesh.
        with_layouts: Whether arrays get the on-device layouts of the target's leaves.
        max_in_flight_nbytes: Bytes that reading may need at a time beside what lands; None for the default.
    """

    target: PyTree = None
    mesh: Mesh | None = None
    policy: RestorePolicy = field(default_factory=RestorePolicy)
    strict: bool = True
    fallback: Sharding | None = None
    with_layouts: bool = False
    max_in_flight_nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRestore:
    """A restore that is not refused: where it reads, and the plan, bound to the devices at hand."""

    directory: epath.Path
    bound: BoundPlan
    request: RestoreRequest


class Trees:
    """Saves whole trees, and restores them.

    Every process calls each method. The primary process writes the record, and finalizes; each writes and reads its own
    shards.
    """

    def __init__(
        self,
        make_storage: Callable[[ocp.type_handlers.TypeHandlerRegistry], ocp.PyTreeCheckpointHandler],
        *,
        codec_policy: CodecPolicy,
        use_ocdbt: bool,
        use_zarr3: bool,
        primary_host: int | None,
        policy: RestorePolicy | None = None,
    ) -> None:
        """Creates the floor of a handler.

        Args:
            make_storage: Makes Orbax's handler of plain trees from the type handlers that it is to use.
            codec_policy: What chunks are encoded with.
            use_ocdbt: Whether arrays are stored in an OCDBT database rather than in a directory each.
            use_zarr3: Whether they are stored as Zarr version 3 rather than 2.
            primary_host: The process that writes the record; None for all, each to a disk of its own.
            policy: The choices by which Orbax's metadata say where an array would land.

        Raises:
            ValueError: The version of Zarr has no such codec.
        """
        codec_policy.check_format(use_zarr3=use_zarr3)
        self._use_ocdbt = use_ocdbt
        self._primary_host = primary_host
        self._storage = make_storage(_type_handlers(policy, primary_host, codec_policy))

    def capture(self, request: SaveRequest) -> CapturedSave:
        """Takes the record and the leaves, and writes nothing.

        Raises:
            SaveRefusedError: Leaves could not come back as they are.
        """
        save_args = _leaf_save_args(request.save_args)
        captured = record_tree(
            request.item,
            {names: arg.dtype for names, arg in save_args.items() if arg.dtype is not None},
            in_directories=not self._use_ocdbt,
            reduce=request.reduce,
        )
        known = {path_names(path) for path in captured.values} if save_args else set()
        if unknown := [".".join(names) or "the whole tree" for names in save_args if names not in known]:
            raise SaveRefusedError(
                Problem(
                    could_not="cannot follow save_args that belong to no leaf",
                    present=", ".join(unknown),
                    fix="give save_args the structure of the tree",
                )
            )
        _check_chunk_arguments(captured, save_args)
        return CapturedSave(tree=captured, save_args=save_args, request=request)

    async def write(self, directory: epath.Path, save: CapturedSave) -> list[Future]:
        """Starts to write. The values are taken before this returns, files are written after."""
        await _let_siblings_refuse()
        tree = save.tree.manifest.tree
        with paused_collection():
            futures = await self._storage.async_save(
                directory,
                args=ocp.args.PyTreeSave(
                    item=storage_tree(tree, lambda path: _storable(save.tree, path)),
                    save_args=storage_tree(tree, lambda path: save.save_args.get(path_names(path)) or ocp.SaveArgs()),
                    ocdbt_target_data_file_size=save.request.data_file_nbytes,
                    custom_metadata=save.request.custom_metadata,
                ),
            )
        commits = list(futures or [])
        if self.is_primary:
            write = asyncio.to_thread(write_records, directory, save.tree.manifest)
            commits.append(CommitFutureAwaitingContractedSignals(write, name="explicit_sharding"))
        return commits

    @property
    def is_primary(self) -> bool:
        """Whether this process writes the record."""
        return self._primary_host in (None, jax.process_index())

    def finalize(self, directory: epath.Path) -> None:
        """Merges what the processes wrote, when all have. The primary process calls it, before the item is committed."""
        self._storage.finalize(directory)
        write_digests(directory)

    def plan(self, directory: epath.Path, request: RestoreRequest, present: Present | None = None) -> PlannedRestore:
        """Plans a restore, and reads no array.

        Args:
            directory: The directory of the item, or of a step that holds it.
            request: What to restore.
            present: What is here now; None to ask JAX, in the caller's thread.

        Raises:
            RestoreRefusedError: Something cannot be restored as asked; lists everything.
            FormatError: The record is damaged or from a newer version.
        """
        present = present or read_present()
        directory = find_item(directory)
        manifest = read_item_manifest(directory)
        for note in manifest.notes:
            warnings.warn(f"{directory}: {note}", stacklevel=2)
        bound = bind_restore(
            manifest,
            present,
            target=request.target,
            mesh=request.mesh,
            policy=request.policy,
            strict=request.strict,
            fallback=request.fallback,
        )
        return PlannedRestore(directory=directory, bound=bound, request=request)

    def describe(self, directory: epath.Path, request: RestoreRequest, present: Present | Inventory) -> RestorePlan:
        """The plan of a restore, refused or not, onto devices that are here or elsewhere.

        Raises:
            FormatError: The record is damaged or from a newer version.
        """
        return plan_manifest(
            read_item_manifest(find_item(directory)),
            present,
            target=request.target,
            mesh=request.mesh,
            policy=request.policy,
            strict=request.strict,
            fallback=request.fallback,
        )

    async def read(self, restore: PlannedRestore) -> PyTree:
        """Reads what was planned.

        Raises:
            FormatError: Something is missing or damaged.
        """
        bound, request = restore.bound, restore.request
        values = await read_leaves(
            restore.directory,
            bound,
            cast=request.policy.cast,
            strict=request.strict,
            with_layouts=request.with_layouts,
            max_in_flight_nbytes=request.max_in_flight_nbytes,
        )
        if bound.target is None:
            assert bound.plan.tree is not None
            return rebuild_tree(bound.plan.tree, values.__getitem__)
        return bound.target.treedef.unflatten([values[path] for path in bound.target.leaves])

    def manifest(self, directory: epath.Path) -> Manifest:
        """What is recorded of the item, once Orbax's list of its leaves was found to be what was written.

        Raises:
            FormatError: The record, or Orbax's list of the leaves, is damaged.
        """
        return read_item_manifest(_find_listed(directory))

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's v0 metadata of the tree.

        Raises:
            FormatError: The record, or Orbax's list of the leaves, is damaged.
        """
        return self._storage.metadata(_find_listed(directory))

    def close(self) -> None:
        """Releases what Orbax's handler holds."""
        self._storage.close()


def _find_listed(directory: epath.Path) -> epath.Path:
    """The directory of the item, once Orbax's list of its leaves was found to be what was written.

    Raises:
        FormatError: The list is damaged.
    """
    directory = find_item(directory)
    read_array_store(directory, read_digests(directory))
    return directory


def _type_handlers(
    policy: RestorePolicy | None, primary_host: int | None, codec_policy: CodecPolicy
) -> ocp.type_handlers.TypeHandlerRegistry:
    policy = policy.for_arrays_alone() if policy is not None else None
    numbers = ExplicitScalarHandler(codec_policy=codec_policy, primary_host=primary_host)
    arrays = ExplicitArrayHandler(policy=policy, records=False, primary_host=primary_host, codec_policy=codec_policy)
    return ocp.type_handlers.create_type_handler_registry(
        (int, numbers),
        (float, numbers),
        (np.number, numbers),
        (np.ndarray, ExplicitNumpyHandler(codec_policy=codec_policy, primary_host=primary_host)),
        (str, ocp.type_handlers.StringHandler()),
        (jax.Array, arrays),
    )


def _leaf_save_args(save_args: PyTree | None) -> SaveArgs:
    """The arguments of each leaf that has any, by the text of its keys.

    Raises:
        SaveRefusedError: Something else than `ocp.SaveArgs` and None is among them.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(save_args, is_leaf=lambda x: isinstance(x, ocp.SaveArgs))
    if odd := [jax.tree_util.keystr(keypath) for keypath, arg in flat if not isinstance(arg, ocp.SaveArgs)]:
        raise SaveRefusedError(
            Problem(
                could_not="cannot follow save_args that are no ocp.SaveArgs",
                present=", ".join(odd),
                fix="use ocp.SaveArgs, or None for the defaults",
            )
        )
    # Orbax asks the dtype for its itemsize, which a scalar type such as jnp.bfloat16 does not have.
    return {
        ocp.tree.str_keypath(keypath): arg if arg.dtype is None else dataclasses.replace(arg, dtype=_dtype(arg.dtype))
        for keypath, arg in flat
    }


def _check_chunk_arguments(captured: CapturedTree, save_args: SaveArgs) -> None:
    """Refuses chunks that no array can be cut into, as stock Orbax does.

    Raises:
        SaveRefusedError: A chunk would hold no element, or be cut along a dimension that there is not.
    """
    wrong = []
    for path, record in captured.manifest.leaves.items():
        arg = save_args.get(path_names(path))
        if arg is None or not record.dtype:
            continue
        least, dimensions = dtype_itemsize(record.dtype), len(record.stored_shape)
        if arg.chunk_byte_size is not None and arg.chunk_byte_size < least:
            why = f"cannot cut {path_text(path)} into chunks of {arg.chunk_byte_size} bytes"
            wrong.append(Problem(could_not=why, affects=(path_text(path),), fix=f"at least {least}, or None"))
        if any(not 0 <= axis < dimensions for axis in arg.shard_axes or ()):
            why = f"cannot cut {path_text(path)} along shard_axes={tuple(arg.shard_axes)}"
            wrong.append(Problem(could_not=why, affects=(path_text(path),), fix=f"it has {dimensions} dimensions"))
    if wrong:
        raise SaveRefusedError(*wrong)


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        known: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise SaveRefusedError(
            Problem(could_not=f"cannot store dtype {dtype!r}", fix="name a dtype that NumPy knows")
        ) from error
    return known


def _storable(captured: CapturedTree, path: LeafPath) -> Any:
    """The leaf as Orbax stores it without loss, and as stock Orbax reads it back.

    Bytes go as their octets; scalars that are neither int nor float, of which stock knows no Python type, as arrays
    without dimensions.
    """
    value = captured.values[path]
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, complex) or (isinstance(value, np.generic) and not _is_plain_number(value)):
        return np.asarray(value)
    return value


def _is_plain_number(value: np.generic) -> bool:
    return value.dtype.isbuiltin == 1 and value.dtype.kind in "iuf"


async def _let_siblings_refuse() -> None:
    """Lets the other items of a composite save be captured, and refused, before this one starts to write.

    Orbax runs all of them in one event loop; a refusal takes a few of its rounds to end the save. Goes when Orbax waits
    for every item's `async_save`, or cancels it, before it raises.
    """
    for _ in range(5):
        await asyncio.sleep(0)
