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
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from orbax_explicit import _compat
from orbax_explicit._array_reading import Known, other_array_problem
from orbax_explicit._arrays import ExplicitArrayHandler, KnownArrayRestoreArgs, await_directories
from orbax_explicit._binding import read_present
from orbax_explicit._capture import CapturedTree, record_tree
from orbax_explicit._containers import rebuild_tree, storage_tree
from orbax_explicit._errors import FormatError, Problem, RestoreRefusedError, SaveRefusedError
from orbax_explicit._outcomes import AsTarget, Kept, OnHost, Outcome
from orbax_explicit._policy import Cast, RestorePolicy, checked_policy
from orbax_explicit._records import ArrayRecord, LeafPath, Manifest, path_names, path_text
from orbax_explicit._restoring import BoundPlan, bind_restore
from orbax_explicit._sidecar import find_item, read_item_manifest, write_records
from orbax_explicit._targets import is_python_int
from orbax_explicit._whole_arrays import ExplicitNumpyHandler, KnownRestoreArgs

PyTree: TypeAlias = Any

Unreduced: TypeAlias = Literal["error", "reduce"]

# A chunk is decoded whole. Larger ones would take more memory at a restore than what lands of them, and more reading of
# what a smaller shard on another mesh wants.
_MAX_CHUNK_NBYTES = 16 << 20

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
        save_concurrent_gb: int = _DEFAULT_CONCURRENT_GB,
        restore_concurrent_gb: int = _DEFAULT_CONCURRENT_GB,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        **kwargs: Any,
    ) -> None:
        """Creates the handler.

        Args:
            policy: The choices for restores that bring none of their own.
            save_concurrent_gb: Gigabytes that may be in flight to storage at once.
            restore_concurrent_gb: Gigabytes that may be in flight from storage at once.
            multiprocessing_options: Which process is the primary one, and which take part.
            use_ocdbt: Whether to store arrays in an OCDBT database rather than in a directory each.
            use_zarr3: Whether to write Zarr version 3 rather than 2.
            **kwargs: Other arguments of `ocp.PyTreeCheckpointHandler`.
        """
        options = multiprocessing_options or ocp.options.MultiprocessingOptions()
        self._policy = checked_policy(policy)
        self._use_ocdbt = use_ocdbt
        self._primary_host = options.primary_host
        self._trees = ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=save_concurrent_gb,
            restore_concurrent_gb=restore_concurrent_gb,
            multiprocessing_options=options,
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            type_handler_registry=_type_handlers(
                policy.for_arrays_alone() if policy is not None else None, options.primary_host
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
        futures = await self._trees.async_save(
            directory,
            args=ocp.args.PyTreeSave(
                item=storage_tree(captured.manifest.tree, lambda path: _storable(captured, path)),
                save_args=storage_tree(
                    captured.manifest.tree,
                    lambda path: _in_bounded_chunks(captured.values[path], save_args.get(path_names(path))),
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
        values = self._read(directory, manifest, bound, args)
        if bound.target is None:
            assert bound.plan.tree is not None
            return rebuild_tree(bound.plan.tree, values.__getitem__)
        return bound.target.treedef.unflatten([values[path] for path in bound.target.leaves])

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's metadata of the tree: shapes, dtypes and shardings, without the devices that saved it."""
        return self._trees.metadata(find_item(directory))

    def finalize(self, directory: epath.Path) -> None:
        """Merges what the processes wrote. Orbax calls it on the primary process, before it commits the item."""
        self._trees.finalize(directory)

    def close(self) -> None:
        """Releases what the handler holds."""
        self._trees.close()

    def _read(
        self, directory: epath.Path, manifest: Manifest, bound: BoundPlan, args: ExplicitRestore
    ) -> dict[LeafPath, Any]:
        """The leaves of the result by their paths: those that the target keeps, and what is read of the others."""
        values: dict[LeafPath, Any] = {}
        unread: dict[LeafPath, list[Outcome]] = {}
        for outcome in bound.plan.outcomes:
            if isinstance(outcome.placement, Kept):
                assert bound.target is not None
                values[outcome.path] = bound.target.leaves[outcome.path]
            else:
                assert outcome.source is not None
                unread.setdefault(outcome.source, []).append(outcome)
        # Once, unless the policy gives one saved leaf to several of the result.
        while unread:
            reading = {source: outcomes.pop() for source, outcomes in unread.items()}
            unread = {source: outcomes for source, outcomes in unread.items() if outcomes}
            values.update(self._read_once(directory, manifest, bound, args, reading))
        return values

    def _read_once(
        self,
        directory: epath.Path,
        manifest: Manifest,
        bound: BoundPlan,
        args: ExplicitRestore,
        reading: Mapping[LeafPath, Outcome],
    ) -> dict[LeafPath, Any]:
        """Reads each of these saved leaves, and no other."""

        def restore_args(path: LeafPath) -> ocp.RestoreArgs:
            return _restore_args(reading[path], bound, args) if path in reading else ocp.RestoreArgs()

        item = None
        if len(reading) < len(manifest.leaves):
            item = storage_tree(manifest.tree, lambda path: 0 if path in reading else ocp.PLACEHOLDER)
        stored = self._trees.restore(
            directory,
            args=ocp.args.PyTreeRestore(item=item, restore_args=storage_tree(manifest.tree, restore_args)),
        )
        flat, _ = jax.tree_util.tree_flatten_with_path(stored)
        by_name = {ocp.tree.str_keypath(keypath): value for keypath, value in flat}
        read = {outcome.path: by_name[path_names(source)] for source, outcome in reading.items()}
        if args.strict:
            _check_against_record(read, reading.values())
        cast = (args.policy or self._policy or RestorePolicy()).cast
        return {outcome.path: _finished(read[outcome.path], outcome, cast) for outcome in reading.values()}


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


def _type_handlers(policy: RestorePolicy | None, primary_host: int | None) -> ocp.type_handlers.TypeHandlerRegistry:
    scalars = ocp.type_handlers.ScalarHandler()
    return ocp.type_handlers.create_type_handler_registry(
        (int, scalars),
        (float, scalars),
        (np.number, scalars),
        (np.ndarray, ExplicitNumpyHandler()),
        (str, ocp.type_handlers.StringHandler()),
        (jax.Array, ExplicitArrayHandler(policy=policy, records=False, primary_host=primary_host)),
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


def _in_bounded_chunks(value: Any, arg: ocp.SaveArgs | None) -> ocp.SaveArgs:
    """The arguments of a leaf, with a bound on its chunks where they have none and can have one.

    Orbax cuts a shard by factors of its dimensions until a chunk is small enough. A large prime among them would leave
    chunks of a few bytes, and millions of them: such a shard is one chunk, as in stock Orbax.
    """
    arg = arg or ocp.SaveArgs()
    if arg.chunk_byte_size is not None or not isinstance(value, jax.Array | np.ndarray) or _has_large_factors(value):
        return arg
    return dataclasses.replace(arg, chunk_byte_size=_MAX_CHUNK_NBYTES)


def _has_large_factors(value: jax.Array | np.ndarray[Any, Any]) -> bool:
    """Whether a dimension of a shard has a prime factor above 7; every process finds the same."""
    shape = value.sharding.shard_shape(value.shape) if isinstance(value, jax.Array) else value.shape
    return any(_without_small_factors(length) > 1 for length in shape)


def _without_small_factors(length: int) -> int:
    """What is left of a length when it has been divided by 2, 3, 5 and 7 as often as it can be; 0 of 0."""
    for factor in (2, 3, 5, 7):
        while length and length % factor == 0:
            length //= factor
    return length


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


def _restore_args(outcome: Outcome, bound: BoundPlan, args: ExplicitRestore) -> ocp.RestoreArgs:
    """How Orbax is to read one leaf."""
    dtype = np.dtype(outcome.dtype) if outcome.dtype is not None and not _is_cast_when_read(outcome) else None
    sharding: Any = bound.shardings[outcome.path]
    recorded = outcome.recorded
    assert recorded is not None
    known = Known(shape=recorded.stored_shape, dtype=recorded.dtype, x64=bound.x64)
    if isinstance(outcome.placement, OnHost):
        # Numbers are stored alike, be they arrays or not: as an array each is cast, and compared with its record.
        is_text = outcome.placement.type == "str"
        return ocp.RestoreArgs() if is_text else KnownRestoreArgs(restore_type=np.ndarray, dtype=dtype, known=known)
    shape = None
    if bound.target is not None and not args.strict:
        shape = outcome.shape
        if isinstance(outcome.recorded, ArrayRecord) and outcome.recorded.prng is not None:
            shape += outcome.recorded.prng.key_shape
    if bound.target is not None and args.support_layout and isinstance(outcome.placement, AsTarget):
        sharding = getattr(bound.target.leaves[outcome.path], "format", None) or sharding
    return KnownArrayRestoreArgs(
        restore_type=jax.Array, sharding=sharding, dtype=dtype, global_shape=shape, strict=args.strict, known=known
    )


def _is_cast_when_read(outcome: Outcome) -> bool:
    """Whether a leaf is cast by its value: an int of Python's own has no width to plan with."""
    return outcome.dtype is not None and isinstance(outcome.placement, OnHost) and is_python_int(outcome.recorded)


def _cast_int(stored: Any, outcome: Outcome, cast: Cast) -> Any:
    """An int of Python's own in the dtype that the target asks for.

    Raises:
        RestoreRefusedError: It does not fit, and the policy allows no unsafe cast.
    """
    with np.errstate(all="ignore"):
        found = stored.astype(outcome.dtype)
    if cast != "unsafe" and found.item() != stored.item():
        raise RestoreRefusedError(
            Problem(
                could_not=f"cannot hold {stored.item()} in {outcome.dtype}",
                recorded="int",
                present=f"the target asks for {outcome.dtype}",
                affects=(path_text(outcome.path),),
                fix="give the target's leaf a wider dtype, or cast='unsafe' in the policy",
            )
        )
    return found


def _finished(stored: Any, outcome: Outcome, cast: Cast) -> Any:
    """The leaf as it was, from what Orbax read."""
    placement = outcome.placement
    if not isinstance(placement, OnHost):
        return stored
    if _is_cast_when_read(outcome):
        stored = _cast_int(stored, outcome, cast)
    match placement.type:
        case "np.ndarray" | "str":
            return stored
        case "np.generic":
            return stored[()]
        case "bytes":
            return stored.tobytes()
        case "int" | "float" | "bool" | "complex" as name:
            return {"int": int, "float": float, "bool": bool, "complex": complex}[name](stored.item())


async def _let_siblings_refuse() -> None:
    """Lets the other items of a composite save be captured, and refused, before this one starts to write.

    Orbax runs all of them in one event loop; a refusal takes a few of its rounds to end the save. Goes when Orbax waits
    for every item's `async_save`, or cancels it, before it raises.
    """
    for _ in range(5):
        await asyncio.sleep(0)


def _check_against_record(read: Mapping[LeafPath, Any], outcomes: Iterable[Outcome]) -> None:
    """Refuses what was read where it is not what the record describes: one of them is damaged."""
    wrong = []
    for outcome in outcomes:
        recorded, value = outcome.recorded, read[outcome.path]
        if recorded is None or not isinstance(value, jax.Array | np.ndarray):
            continue
        dtype = recorded.dtype if _is_cast_when_read(outcome) else outcome.dtype or recorded.dtype
        is_keys = isinstance(recorded, ArrayRecord) and recorded.prng is not None
        if is_keys and isinstance(value, jax.Array):
            fits = value.shape == recorded.shape and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        else:
            fits = (value.shape, value.dtype.name) == (recorded.stored_shape, dtype) and value.dtype.isnative
        if not fits:
            stored, described = f"{value.dtype}{value.shape}", f"{recorded.dtype_text}{recorded.shape}"
            wrong.append(other_array_problem(path_text(outcome.path), stored, described))
    if wrong:
        raise FormatError(*wrong)


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end. In a thread of its own: an event loop may be running in this one."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(asyncio.run, coroutine).result()
