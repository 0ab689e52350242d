"""`ExplicitCheckpointHandler`: whole trees through Orbax's v0 API, and the arguments it takes.

A save is captured before anything is written: the record is taken, everything that could not come back is refused
at once, and Orbax is handed plain dicts and lists of leaves that it stores without loss. A restore is planned before
anything is read, the plan is bound to the devices at hand, and the tree is put together as it was, or as the target
is.

Orbax owns the directory, its atomic commit, the processes and the bytes of host values; `_arrays` owns the bytes of
`jax.Array`s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from orbax_explicit import _compat
from orbax_explicit._arrays import ExplicitArrayHandler, await_directories
from orbax_explicit._binding import read_present
from orbax_explicit._capture import CapturedTree, record_tree
from orbax_explicit._codecs import Checksum, CodecPolicy, Compression
from orbax_explicit._containers import rebuild_tree, storage_tree
from orbax_explicit._digests import read_digests, write_digests
from orbax_explicit._errors import Problem, SaveRefusedError
from orbax_explicit._garbage import paused_collection
from orbax_explicit._host_handlers import ExplicitNumpyHandler, ExplicitScalarHandler
from orbax_explicit._leaf_reading import read_leaves
from orbax_explicit._policy import RestorePolicy, checked_policy
from orbax_explicit._records import LeafPath, dtype_itemsize, path_names, path_text
from orbax_explicit._restoring import bind_restore
from orbax_explicit._sidecar import find_item, read_item_manifest, write_records
from orbax_explicit._stock import read_array_store

PyTree: TypeAlias = Any
_T = TypeVar("_T")

Unreduced: TypeAlias = Literal["error", "reduce"]

_DEFAULT_CONCURRENT_GB = 96  # As in stock's StandardCheckpointHandler.


class ExplicitCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores a PyTree together with how each of its arrays was laid out.

    For `ocp.Checkpointer`, `ocp.AsyncCheckpointer` and `ocp.CheckpointManager`. It takes `ExplicitSave` and
    `ExplicitRestore`, and stock's `ocp.args.StandardSave` and `StandardRestore`.

    Every process calls `save`, `restore` and `metadata`. The primary process writes the record; each writes and reads
    its own shards.
    """

    def __init__(
        self,
        *,
        policy: RestorePolicy | None = None,
        save_concurrent_gb: int | None = _DEFAULT_CONCURRENT_GB,
        restore_concurrent_gb: int | None = _DEFAULT_CONCURRENT_GB,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        checksum: Checksum = "crc32",
        compression: Compression = "auto",
        **kwargs: Any,
    ) -> None:
        """Creates the handler.

        Args:
            policy: The choices for restores that bring none of their own.
            save_concurrent_gb: Gigabytes that may be in flight to storage at once; None for the default.
            restore_concurrent_gb: Gigabytes that may be in flight from storage at once; None for the default.
            multiprocessing_options: Which process is the primary one, and which take part.
            use_ocdbt: Whether to store arrays in an OCDBT database rather than in a directory each.
            use_zarr3: Whether to write Zarr version 3 rather than 2.
            checksum: `"crc32"` gives every chunk a checksum, so that a damaged one is noticed by whoever reads it, stock
                Orbax included; None leaves it out.
            compression: `"auto"` compresses what is nearly one value, such as zeros, since that takes less time than
                writing it; `"zstd"` everything; None nothing. `"zstd"` has a checksum in Zarr version 3 only.
            **kwargs: Other arguments of `ocp.PyTreeCheckpointHandler`.

        Raises:
            ValueError: There is no such checksum or compression, or not with this version of Zarr.
        """
        options = multiprocessing_options or ocp.options.MultiprocessingOptions()
        codec_policy = CodecPolicy(checksum=checksum, compression=compression)
        codec_policy.check_format(use_zarr3=use_zarr3)
        self._policy = checked_policy(policy)
        self._restore_concurrent_nbytes = restore_concurrent_gb * 10**9 if restore_concurrent_gb is not None else None
        self._use_ocdbt = use_ocdbt
        self._primary_host = options.primary_host
        self._trees = ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=save_concurrent_gb,
            restore_concurrent_gb=restore_concurrent_gb,
            multiprocessing_options=options,
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            type_handler_registry=_type_handlers(
                policy.for_arrays_alone() if policy is not None else None, options.primary_host, codec_policy
            ),
            **kwargs,
        )

    async def async_save(
        self, directory: epath.Path, args: ExplicitSave | ocp.args.StandardSave
    ) -> list[Future] | None:
        """Starts a save. The record and the values are taken before this returns, files are written after.

        Raises:
            SaveRefusedError: Leaves could not come back as they are. No array has been written.
        """
        try:
            captured, save_args = self._capture(args)
        except SaveRefusedError:
            await_directories()
            raise
        await _let_siblings_refuse()
        with paused_collection():
            futures = await self._trees.async_save(
                directory,
                args=ocp.args.PyTreeSave(
                    item=storage_tree(captured.manifest.tree, lambda path: _storable(captured, path)),
                    save_args=storage_tree(
                        captured.manifest.tree, lambda path: save_args.get(path_names(path)) or ocp.SaveArgs()
                    ),
                    custom_metadata=args.custom_metadata,
                ),
            )
        commits = list(futures or [])
        if self._primary_host in (None, jax.process_index()):
            write = asyncio.to_thread(write_records, directory, captured.manifest)
            commits.append(CommitFutureAwaitingContractedSignals(write, name="explicit_sharding"))
        return commits

    def check(self, args: ExplicitSave | ocp.args.StandardSave) -> None:
        """Refuses what a save would refuse, and does nothing else. A checkpointer's `force=True` removes first.

        Args:
            args: The arguments of the save.

        Raises:
            SaveRefusedError: Leaves could not come back as they are.
        """
        self._capture(args)

    def _capture(
        self, args: ExplicitSave | ocp.args.StandardSave
    ) -> tuple[CapturedTree, Mapping[tuple[str, ...], ocp.SaveArgs]]:
        save_args = _leaf_save_args(args.save_args)
        captured = record_tree(
            args.item,
            {names: arg.dtype for names, arg in save_args.items() if arg.dtype is not None},
            in_directories=not self._use_ocdbt,
            reduce=isinstance(args, ExplicitSave) and args.unreduced == "reduce",
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
        return captured, save_args

    def save(self, directory: epath.Path, args: ExplicitSave | ocp.args.StandardSave) -> None:
        """Saves, and returns when everything is written.

        Raises:
            SaveRefusedError: Leaves could not come back as they are. No array has been written.
        """

        async def save() -> None:
            for future in await self.async_save(directory, args=args) or []:
                future.result()

        _run(save())

    def restore(self, directory: epath.Path, args: ExplicitRestore | ocp.args.StandardRestore | None = None) -> PyTree:
        """Restores the tree, with every array laid out as planned.

        Raises:
            RestoreRefusedError: Something cannot be restored as asked; lists everything. Nothing has been read.
            FormatError: The record is damaged or from a newer version.
        """
        args = _explicit(args)
        present = read_present()
        directory = find_item(directory)
        manifest = read_item_manifest(directory)
        bound = bind_restore(
            manifest,
            present,
            target=args.item,
            mesh=args.mesh,
            policy=args.policy or self._policy,
            strict=args.strict,
            fallback=args.fallback_sharding,
        )
        values = _run(
            read_leaves(
                directory,
                bound,
                cast=(args.policy or self._policy or RestorePolicy()).cast,
                strict=args.strict,
                with_layouts=args.support_layout,
                max_in_flight_nbytes=self._restore_concurrent_nbytes,
            )
        )
        if bound.target is None:
            assert bound.plan.tree is not None
            return rebuild_tree(bound.plan.tree, values.__getitem__)
        return bound.target.treedef.unflatten([values[path] for path in bound.target.leaves])

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's metadata of the tree: shapes, dtypes and shardings, without the devices that saved it.

        Raises:
            FormatError: The record, or Orbax's list of the leaves, is damaged.
        """
        directory = find_item(directory)
        read_array_store(directory, read_digests(directory))
        return self._trees.metadata(directory)

    def finalize(self, directory: epath.Path) -> None:
        """Merges what the processes wrote. Orbax calls it on the primary process, before it commits the item."""
        self._trees.finalize(directory)
        write_digests(directory)

    def close(self) -> None:
        """Releases what the handler holds."""
        self._trees.close()


@ocp.args.register_with_handler(ExplicitCheckpointHandler, for_save=True)
@dataclasses.dataclass
class ExplicitSave(ocp.args.CheckpointArgs):
    """Arguments of a save.

    Attributes:
        item: The tree to save.
        save_args: A tree of `ocp.SaveArgs` (or None) like `item`; None for the defaults.
        custom_metadata: JSON to keep beside the tree, opaque to Orbax.
        unreduced: For an array with a pending reduction: `"error"` refuses it by leaf name, `"reduce"` saves it reduced,
            by a collective before the save returns. The array that was passed stays as it is.

    Raises:
        ValueError: `unreduced` is neither.
    """

    item: PyTree
    save_args: PyTree | None = None
    custom_metadata: Any = None
    unreduced: Unreduced = "error"

    def __post_init__(self) -> None:
        if self.unreduced not in get_args(Unreduced):
            raise ValueError(f"unreduced must be one of {list(get_args(Unreduced))}, not {self.unreduced!r}")


@ocp.args.register_with_handler(ExplicitCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class ExplicitRestore(ocp.args.CheckpointArgs):
    """Arguments of a restore.

    Attributes:
        item: The tree to restore into; None for the tree as it was saved.
        mesh: The mesh to place recorded specs on; None for the recorded one.
        policy: The choices for this restore; None for the handler's.
        strict: Whether a target's shape must be the saved one; otherwise Orbax truncates or pads.
        fallback_sharding: The sharding of arrays whose recorded mesh does not fit as it is, as in `StandardRestore`;
            None to resize such a mesh, as the policy says.
        support_layout: Whether to restore with the on-device layouts of the target's leaves, as in `StandardRestore`.
    """

    item: PyTree = None
    mesh: Mesh | None = None
    policy: RestorePolicy | None = None
    strict: bool = True
    fallback_sharding: jax.sharding.Sharding | None = None
    support_layout: bool = False


_compat.record_as_stock(ExplicitCheckpointHandler)


def _explicit(args: ExplicitRestore | ocp.args.StandardRestore | None) -> ExplicitRestore:
    """Stock's arguments, and none, as ours. A drift test names the field that stock gets and this does not carry."""
    if args is None:
        return ExplicitRestore()
    if isinstance(args, ExplicitRestore):
        return args
    return ExplicitRestore(
        args.item,
        strict=args.strict,
        fallback_sharding=args.fallback_sharding,
        support_layout=args.support_layout,
    )


def _type_handlers(
    policy: RestorePolicy | None, primary_host: int | None, codec_policy: CodecPolicy
) -> ocp.type_handlers.TypeHandlerRegistry:
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


def _leaf_save_args(save_args: PyTree | None) -> Mapping[tuple[str, ...], ocp.SaveArgs]:
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


def _check_chunk_arguments(captured: CapturedTree, save_args: Mapping[tuple[str, ...], ocp.SaveArgs]) -> None:
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


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end. In a thread of its own: an event loop may be running in this one."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()
