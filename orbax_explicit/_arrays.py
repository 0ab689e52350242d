"""`ExplicitArrayHandler`: the Orbax `TypeHandler` for `jax.Array`. Array bytes out and in.

It is stock's `ArrayHandler` with other answers to three questions. What is written beside the bytes: one record,
not a sharding per array. What can be written: also arrays of size zero and, in several processes, arrays that are
local to each. Where arrays land: where the record, or the target's abstract mesh, says, on the devices at hand.

Inside `ExplicitCheckpointHandler` it does the bytes alone: the checkpoint handler records and plans for the whole
tree. On its own (`register`) it does both for the arrays that it is given, which is all that Orbax shows it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from orbax_explicit import _compat
from orbax_explicit._array_metadata import (
    RecordedLayout,
    RecordedLayoutMetadata,
    RecordedSharding,
    by_storage_name,
    flat_path,
)
from orbax_explicit._array_reading import ArrayRead, Known, read_arrays
from orbax_explicit._binding import UncommittedSharding, read_present
from orbax_explicit._capture import record_arrays, record_path
from orbax_explicit._errors import SaveRefusedError
from orbax_explicit._leaf_capture import Unrecordable, record_prng
from orbax_explicit._policy import RestorePolicy, checked_array_policy
from orbax_explicit._records import (
    ArrayRecord,
    Key,
    LeafPath,
    Manifest,
    path_names,
)
from orbax_explicit._restoring import bind_restore
from orbax_explicit._sidecar import read_array_records, write_records
from orbax_explicit._whole_arrays import WholeArray, is_written_whole

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo


@dataclasses.dataclass
class KnownArrayRestoreArgs(ocp.ArrayRestoreArgs):
    """How to restore an array that a record knows.

    Attributes:
        known: What the record says of what is stored.
    """

    known: Known | None = None


class ExplicitArrayHandler(ocp.type_handlers.ArrayHandler):
    """Saves and restores `jax.Array` leaves together with their shardings.

    Every process calls it. The process `primary_host` writes the record, and the arrays that one process writes
    whole; all write their shards of the others, as in stock Orbax.
    """

    def __init__(
        self,
        *,
        policy: RestorePolicy | None = None,
        records: bool = True,
        primary_host: int | None = 0,
        **kwargs: Any,
    ) -> None:
        """Creates the handler.

        Args:
            policy: The choices for restores; those about the tree and its leaves (`missing`, `extra`, `cast`,
                `rename_leaves`, `rules`, `arrays`) cannot be followed here, and are refused.
            records: Whether to write the record; False where another handler records the whole tree.
            primary_host: Index of the process that writes what is written once; None where every process has a
                storage of its own.
            **kwargs: Other arguments of `ocp.type_handlers.ArrayHandler`.
        """
        self._store = _compat.array_metadata_store()
        super().__init__(
            primary_host=primary_host,
            enable_write_sharding_file=False,
            array_metadata_store=self._store,
            **kwargs,
        )
        self._policy = checked_array_policy(policy)
        self._records = records
        self._is_primary = primary_host is None or jax.process_index() == primary_host

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Future]:
        """Starts to write arrays; the record is taken before this returns.

        Raises:
            SaveRefusedError: Arrays could not come back as they are. Nothing has been written.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        manifest = self._record(values, infos, args) if self._records else None
        leaves = list(zip(values, infos, args, strict=True))
        sharded = [leaf for leaf in leaves if not is_written_whole(leaf[0])]
        futures: list[Future] = []
        if sharded:
            futures.extend(await super().serialize(*map(list, zip(*sharded, strict=True))))
        if len(sharded) < len(leaves):
            whole = [WholeArray.of(value, info, arg) for value, info, arg in leaves if is_written_whole(value)]
            futures.append(self._commit(self._write_whole(whole, tuple(futures)), "whole_arrays"))
        if manifest is not None and self._is_primary:
            futures.append(self._commit(_write_records_beside(infos[0], manifest), "explicit_sharding"))
        return futures

    def _commit(self, coroutine: Any, name: str) -> Future:
        return CommitFutureAwaitingContractedSignals(coroutine, name=name)

    def _record(
        self, values: Sequence[jax.Array], infos: Sequence[ParamInfo], args: Sequence[ocp.SaveArgs]
    ) -> Manifest:
        paths = [_path_of(info) for info in infos]
        dtypes = {path_names(path): arg.dtype for path, arg in zip(paths, args, strict=True) if arg.dtype is not None}
        try:
            return record_arrays(list(zip(paths, values, strict=True)), dtypes)
        except SaveRefusedError:
            await_directories()
            raise

    async def _write_whole(self, arrays: Sequence[WholeArray], after: Iterable[Future]) -> None:
        """Writes arrays that the primary process has whole; every process lists them in its array metadata."""
        for future in after:
            # Orbax keeps one metadata file a process and appends to it by reading and writing it anew.
            await asyncio.to_thread(future.result)
        metadatas = []
        for array in arrays:
            metadatas.append(await array.write() if self._is_primary else await array.describe())
        await self._store.write(
            checkpoint_dir=arrays[0].info.parent_dir,
            array_metadatas=metadatas,
            process_index=jax.process_index(),
        )

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[ocp.RestoreArgs] | None = None
    ) -> Sequence[jax.Array]:
        """Reads arrays onto the shardings that the arguments name, or that were recorded.

        Raises:
            RestoreRefusedError: A sharding cannot be had on the present devices. Nothing has been read.
        """
        args = list(args or [ocp.RestoreArgs()] * len(infos))
        for info in infos:
            await info.await_path_creation()
        # Inside a checkpoint handler everything is decided: it has planned for the whole tree.
        undecided = [i for i, arg in enumerate(args) if self._records and not _is_decided(arg)]
        if undecided:
            decided = self._decide(list(zip(infos, args, strict=True)), undecided)
            for i, arg in zip(undecided, decided, strict=True):
                args[i] = arg
        here = [i for i, arg in enumerate(args) if not self.has_dispatcher() and _sharding_to_read(arg) is not None]
        arrays = dict(zip(here, await self._read([(infos[i], args[i]) for i in here]), strict=True))
        if stocks := [i for i in range(len(infos)) if i not in arrays]:
            read = await super().deserialize([infos[i] for i in stocks], [args[i] for i in stocks])
            arrays.update((i, _placed(array, args[i])) for i, array in zip(stocks, read, strict=True))
        return [arrays[i] for i in range(len(infos))]

    async def _read(self, leaves: Sequence[tuple[ParamInfo, ocp.RestoreArgs]]) -> list[jax.Array]:
        """Reads arrays, and makes keys of those that are key data."""
        if not leaves:
            return []
        infos = [info for info, _ in leaves]
        arrays = await read_arrays(
            [
                ArrayRead(
                    name=info.name,
                    spec=_compat.array_read_spec(info, _compat.zarr_metadata_key(self)),
                    context=info.ts_context,
                    sharding=_sharding_to_read(arg),
                    dtype=arg.dtype,
                    shape=arg.global_shape,
                    strict=arg.strict,
                    known=getattr(arg, "known", None),
                )
                for info, arg in leaves
            ],
            max_in_flight_nbytes=_compat.max_restore_nbytes(infos[0]),
        )
        prng_impls = _compat.prng_impls(await self._store.read(checkpoint_dir=infos[0].parent_dir))
        for i, info in enumerate(infos):
            if info.name in prng_impls:
                arrays[i] = jax.random.wrap_key_data(arrays[i], impl=prng_impls[info.name])
        return arrays

    def _decide(
        self, leaves: Sequence[tuple[ParamInfo, ocp.RestoreArgs]], undecided: Sequence[int]
    ) -> list[ocp.ArrayRestoreArgs]:
        """Plans where the arrays at these positions land, whose arguments name no concrete sharding.

        Beside the others: a leaf that a target gives no sharding lands on the mesh of those that have one.
        """
        recorded = by_storage_name(read_array_records(leaves[0][0].parent_dir))
        asked = {info.name: _Wanted(recorded.arrays[flat_path(info.name)], arg) for info, arg in leaves}
        own = {leaves[i][0].name for i in undecided}
        target = {name: wanted for name, wanted in asked.items() if name in own or wanted.says_where_others_land}
        # Of the whole record, so that a mesh gets the same sizes whichever of its arrays are asked for.
        policy = dataclasses.replace(self._policy or RestorePolicy(), extra="ignore")
        bound = bind_restore(recorded, read_present(), target=target, policy=policy)
        decided = []
        for info, arg in (leaves[i] for i in undecided):
            sharding = bound.shardings[flat_path(info.name)]
            given = arg if isinstance(arg, ocp.ArrayRestoreArgs) else ocp.ArrayRestoreArgs(dtype=arg.dtype)
            if given.dtype is not None and jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
                # What is read is key data, of the stored shape; Orbax makes keys of them afterwards.
                given = dataclasses.replace(given, dtype=None, shape=None, global_shape=None)
            decided.append(dataclasses.replace(given, restore_type=jax.Array, sharding=sharding))
        return decided

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[ocp.metadata.value.ArrayMetadata]:
        """Describes arrays from the record, without opening them.

        Of a stock checkpoint, layout that cannot be read is left out and never raises.

        Raises:
            FormatError: The record is damaged or from a newer version.
        """
        for info in infos:
            await info.await_path_creation()
        recorded = by_storage_name(read_array_records(infos[0].parent_dir))
        layout = RecordedLayout(recorded, self._policy)
        return [layout.metadata(info) for info in infos]


async def _write_records_beside(info: ParamInfo, manifest: Manifest) -> None:
    await info.await_path_creation()
    await asyncio.to_thread(write_records, epath.Path(info.parent_dir), manifest)


def await_directories() -> None:
    """Returns when Orbax has created the directories of the save that is going on.

    It creates them in the background; one that is still being created when the save is refused would be in the way of
    the next save to the same path, which removes what it finds there. Goes when a save of Orbax that raises waits for
    its own directories.
    """
    CommitFutureAwaitingContractedSignals(asyncio.sleep(0), name="refused").result()


def _path_of(info: ParamInfo) -> LeafPath:
    """The path of a leaf that Orbax shows; keys that have no record go by the text that Orbax gives them."""
    try:
        return record_path(info.keypath or ())
    except Unrecordable:
        return (Key("dict", info.name),)


# Placing restored arrays.


def _is_decided(arg: ocp.RestoreArgs) -> bool:
    """Whether restore arguments name a concrete sharding by themselves."""
    if not isinstance(arg, ocp.ArrayRestoreArgs):
        return False
    if arg.mesh is not None and arg.mesh_axes is not None:
        return True
    if arg.sharding is None or isinstance(arg.sharding, RecordedSharding | RecordedLayoutMetadata):
        return False
    if isinstance(arg.sharding, SingleDeviceSharding) and not isinstance(arg.sharding, UncommittedSharding):
        return False  # Perhaps that of an uncommitted array: the record knows.
    if arg.dtype is not None and jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        return False  # Keys of which implementation were saved the record knows too.
    return not isinstance(getattr(arg.sharding, "mesh", None), AbstractMesh)


def _sharding_to_read(arg: ocp.RestoreArgs) -> Sharding | None:
    """The concrete sharding that restore arguments name; None where stock's handler is to read.

    That is what only stock knows: an on-device layout (a `Format`), and a key's dtype for the shape of its data.
    """
    if not isinstance(arg, ocp.ArrayRestoreArgs):
        return None
    if arg.dtype is not None and jnp.issubdtype(arg.dtype, jax.dtypes.prng_key):
        return None
    if arg.mesh is not None and arg.mesh_axes is not None:
        return NamedSharding(arg.mesh, arg.mesh_axes)
    return arg.sharding if isinstance(arg.sharding, Sharding) else None


def _placed(array: jax.Array, arg: ocp.RestoreArgs) -> jax.Array:
    """Finishes what Orbax's restore arguments cannot say."""
    wanted = getattr(arg, "sharding", None)
    if isinstance(wanted, UncommittedSharding):
        (device,) = cast(set[jax.Device], wanted.device_set)
        with jax.default_device(device):
            return _uncommitted(array)
    return array


def _uncommitted(array: jax.Array) -> jax.Array:
    """The same values, uncommitted. `jnp.asarray` would commit them under `jax.set_mesh`."""
    prng = record_prng(array)
    data = array if prng is None else jax.random.key_data(array)
    free: jax.Array = jax.device_put(np.asarray(data))
    return free if prng is None else jax.random.wrap_key_data(free, impl=prng.impl)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """A leaf of the target that Orbax's restore arguments amount to."""

    recorded: ArrayRecord
    args: ocp.RestoreArgs

    @property
    def says_where_others_land(self) -> bool:
        """Whether it names a mesh on which leaves may land that name none; keys and cut arrays have shapes of their own."""
        whole = getattr(self.args, "global_shape", None) is None or getattr(self.args, "strict", True)
        named = isinstance(getattr(self.args, "sharding", None), NamedSharding)
        return named and whole and self.recorded.prng is None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recorded.shape

    @property
    def dtype(self) -> Any:
        wanted = self.args.dtype
        if wanted is not None and jnp.issubdtype(wanted, jax.dtypes.prng_key):
            return wanted
        # Another dtype is a cast, which Orbax does; and of keys it is what stock's own metadata calls them.
        if self.recorded.prng is not None:
            return jax.eval_shape(functools.partial(jax.random.key, 0, impl=self.recorded.prng.impl)).dtype
        return jnp.dtype(self.recorded.dtype)

    @property
    def sharding(self) -> Sharding | None:
        given = getattr(self.args, "sharding", None)
        return None if isinstance(given, RecordedSharding | RecordedLayoutMetadata) else given
