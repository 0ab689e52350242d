"""`ExplicitArrayHandler`: the Orbax `TypeHandler` for `jax.Array`. Array bytes out and in.

It takes the place of stock's `ArrayHandler`, writes what that one reads, and reads what that one wrote. Other than there,
each distinct block is written once and read once, in chunks that are checked; one record lies beside them, not a sharding
per array; arrays of size zero are written too and, in several processes, arrays that are local to each; and arrays land
where the record, or the target's abstract mesh, says, on the devices at hand.

Inside `ExplicitCheckpointHandler` it does the bytes alone: the checkpoint handler records and plans for the whole
tree. On its own (`register`) it does both for the arrays that it is given, which is all that Orbax shows it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
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
from orbax_explicit._array_reading import ArrayRead, read_arrays
from orbax_explicit._array_shares import StoredArray, share_arrays
from orbax_explicit._binding import UncommittedSharding, read_present
from orbax_explicit._capture import record_arrays
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._errors import SaveRefusedError
from orbax_explicit._leaf_capture import record_prng
from orbax_explicit._param_info import context_of, directory_of, path_of, store_of, write_beside
from orbax_explicit._policy import RestorePolicy, checked_array_policy
from orbax_explicit._records import (
    ArrayRecord,
    Manifest,
    path_names,
)
from orbax_explicit._restoring import bind_restore
from orbax_explicit._sidecar import read_array_records, write_records

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo


class ExplicitArrayHandler(ocp.type_handlers.ArrayHandler):
    """Saves and restores `jax.Array` leaves together with their shardings.

    Every process calls it. The process `primary_host` writes the record, and arrays that are local to each process; of
    the others each process writes its share.
    """

    def __init__(
        self,
        *,
        policy: RestorePolicy | None = None,
        records: bool = True,
        primary_host: int | None = 0,
        codec_policy: CodecPolicy | None = None,
        metadata_key: str | None = None,
    ) -> None:
        """Creates the handler.

        Args:
            policy: The choices for restores; those about the tree and its leaves (`missing`, `extra`, `cast`,
                `rename_leaves`, `rules`, `arrays`) cannot be followed here, and are refused.
            records: Whether to write the record; False where another handler records the whole tree.
            primary_host: Index of the process that writes what is written once; None where every process has a
                storage of its own.
            codec_policy: How chunks are encoded; None for the default.
            metadata_key: Name of the Zarr metadata; None for the usual one.
        """
        self._store = _compat.array_metadata_store()
        super().__init__(
            metadata_key=metadata_key,
            primary_host=primary_host,
            enable_write_sharding_file=False,
            array_metadata_store=self._store,
        )
        self._policy = checked_array_policy(policy)
        self._codec_policy = codec_policy or CodecPolicy()
        self._key = metadata_key
        self._records = records
        self._primary = primary_host

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Future]:
        """Starts to write arrays; the record and the elements are taken before this returns.

        Raises:
            SaveRefusedError: Arrays could not come back as they are. Nothing has been written.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        manifest = self._record(values, infos, args) if self._records else None
        stored, writes = share_arrays(values, [info.name for info in infos], args, self._primary)
        futures = [
            CommitFutureAwaitingContractedSignals(
                write_beside(infos[0], writes, self._codec_policy, jax.process_index(), self._key), name="arrays"
            ),
            CommitFutureAwaitingContractedSignals(self._describe(infos[0], stored), name="array_metadatas"),
        ]
        if manifest is not None and self._primary in (None, jax.process_index()):
            recording = _write_records_beside(infos[0], manifest)
            futures.append(CommitFutureAwaitingContractedSignals(recording, name="explicit_sharding"))
        return futures

    def _record(
        self, values: Sequence[jax.Array], infos: Sequence[ParamInfo], args: Sequence[ocp.SaveArgs]
    ) -> Manifest:
        paths = [path_of(info) for info in infos]
        dtypes = {path_names(path): arg.dtype for path, arg in zip(paths, args, strict=True) if arg.dtype is not None}
        try:
            return record_arrays(list(zip(paths, values, strict=True)), dtypes)
        except SaveRefusedError:
            await_directories()
            raise

    async def _describe(self, info: ParamInfo, stored: Sequence[StoredArray]) -> None:
        """Writes Orbax's metadata of the arrays. Every process lists all of them."""
        await info.await_path_creation()
        store = store_of(info, self._key)
        await self._store.write(
            checkpoint_dir=directory_of(info),
            array_metadatas=[
                _compat.array_metadata(
                    name=array.name,
                    shape=array.shape,
                    dtype=array.dtype,
                    chunk=array.chunk,
                    prng_impl=array.prng_impl,
                    use_ocdbt=store.use_ocdbt,
                    use_zarr3=store.use_zarr3,
                )
                for array in stored
            ],
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
        undecided = [i for i, arg in enumerate(args) if not _is_decided(arg)]
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
                    sharding=_sharding_to_read(arg),
                    dtype=arg.dtype,
                    shape=arg.global_shape,
                    strict=arg.strict,
                )
                for info, arg in leaves
            ],
            store_of(infos[0], self._key),
            context=context_of(infos[0]),
            max_in_flight_nbytes=_compat.max_transfer_nbytes(infos[0]),
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
    await asyncio.to_thread(write_records, directory_of(info), manifest)


def await_directories() -> None:
    """Returns when Orbax has created the directories of the save that is going on.

    It creates them in the background; one that is still being created when the save is refused would be in the way of
    the next save to the same path, which removes what it finds there. Goes when a save of Orbax that raises waits for
    its own directories.
    """
    CommitFutureAwaitingContractedSignals(asyncio.sleep(0), name="refused").result()


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
