"""Arrays that one process writes whole, in one chunk.

Stock Orbax refuses them: arrays of size zero, of NumPy too, and, in several processes, arrays that are local to each.
They lie where all others do, and every reader finds them; only the primary process writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from orbax_explicit import _compat
from orbax_explicit._array_reading import ArrayRead, Known, read_arrays
from orbax_explicit._leaf_capture import record_prng

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo


def is_written_whole(value: jax.Array) -> bool:
    """Whether the primary process writes an array whole, by itself.

    Stock refuses both kinds: an array of size zero, and, in several processes, one that is local to each. Only the
    uncommitted ones of these get here.
    """
    return value.size == 0 or (jax.process_count() > 1 and value.is_fully_addressable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WholeArray:
    """An array on the host that is about to be written in one chunk.

    Attributes:
        info: Where it goes.
        data: A copy of its elements, or of its key data.
        save_dtype: The dtype to store; None for that of the data.
        prng_impl: PRNG implementation of the keys whose data it is; None for an ordinary array.
    """

    info: ParamInfo
    data: np.ndarray[Any, Any]
    save_dtype: Any = None
    prng_impl: str | None = None

    @classmethod
    def of(cls, value: jax.Array | np.ndarray[Any, Any], info: ParamInfo, arg: ocp.SaveArgs) -> WholeArray:
        """Copies a value, so that it may be donated or changed while it is written."""
        prng = record_prng(value) if isinstance(value, jax.Array) else None
        data: Any = jax.random.key_data(value) if prng is not None else value
        # An array of size zero may span processes; it has no element that this one could not see.
        copy = np.zeros(data.shape, data.dtype) if data.size == 0 else np.array(data)
        return cls(info=info, data=copy, save_dtype=arg.dtype, prng_impl=prng.impl if prng is not None else None)

    async def describe(self) -> Any:
        """Orbax's metadata of the array."""
        return (await self._spec())[1]

    async def write(self) -> Any:
        """Creates and writes the array; returns Orbax's metadata of it."""
        spec, metadata = await self._spec()
        store = await ts.open(ts.Spec(spec), create=True, open=True, context=self.info.ts_context)
        if self.data.size:
            await store.write(self.data)
        elif not self.info.use_zarr3:
            # Orbax checks after the merge that every Zarr 2 array has some chunk. No reader asks an array of size zero
            # for its first one.
            assert store.kvstore is not None
            await store.kvstore.write(".".join("0" * max(1, self.data.ndim)), b"")
        return metadata

    async def _spec(self) -> tuple[dict[str, Any], Any]:
        await self.info.await_path_creation()
        return _compat.array_write_spec(
            self.info,
            shape=self.data.shape,
            dtype=self.data.dtype,
            save_dtype=self.save_dtype,
            prng_impl=self.prng_impl,
        )


@dataclasses.dataclass
class KnownRestoreArgs(ocp.RestoreArgs):
    """How to restore to the host what a record knows.

    Attributes:
        known: What the record says of what is stored.
    """

    known: Known | None = None


class ExplicitNumpyHandler(ocp.type_handlers.NumpyHandler):
    """Stock's handler for `numpy.ndarray`, with arrays of size zero as well, and bounded memory. Process 0 writes."""

    async def serialize(
        self,
        values: Sequence[np.ndarray[Any, Any]],
        infos: Sequence[ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Future]:
        """Starts to write arrays, of which copies are taken before this returns."""
        leaves = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        filled = [leaf for leaf in leaves if leaf[0].size]
        empty = [WholeArray.of(*leaf) for leaf in leaves if not leaf[0].size]
        futures: list[Future] = []
        if filled:
            futures.extend(await super().serialize(*map(list, zip(*filled, strict=True))))
        if empty and jax.process_index() == 0:
            futures.append(CommitFutureAwaitingContractedSignals(_write_all(empty), name="empty_np_arrays"))
        return futures

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[ocp.RestoreArgs] | None = None
    ) -> Sequence[np.ndarray[Any, Any]]:
        """Reads arrays whole, each straight into its own memory.

        Raises:
            FormatError: An array, or a part of it, is missing or damaged.
        """
        for info in infos:
            await info.await_path_creation()
        return await read_arrays(
            [
                ArrayRead(
                    name=info.name,
                    spec=_compat.array_read_spec(info, _compat.zarr_metadata_key(self)),
                    context=info.ts_context,
                    sharding=None,
                    dtype=arg.dtype,
                    known=getattr(arg, "known", None),
                )
                for info, arg in zip(infos, args or [ocp.RestoreArgs()] * len(infos), strict=True)
            ],
            max_in_flight_nbytes=_compat.max_restore_nbytes(infos[0]),
        )


async def _write_all(arrays: Iterable[WholeArray]) -> None:
    for array in arrays:
        await array.write()
