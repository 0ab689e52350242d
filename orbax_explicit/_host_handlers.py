"""Orbax `TypeHandler`s for values on the host: NumPy arrays and numbers. Their bytes are stored as those of arrays are.

Stock's handlers check nothing that they read, refuse arrays of size zero, and open each array to describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from orbax_explicit._array_shares import share_host_arrays
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._param_info import directory_of, write_beside
from orbax_explicit._records import storage_name
from orbax_explicit._sidecar import read_item_manifest

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo


class ExplicitNumpyHandler(ocp.type_handlers.NumpyHandler):
    """Saves `numpy.ndarray` leaves. The process `primary_host` writes them."""

    def __init__(self, *, codec_policy: CodecPolicy, primary_host: int | None = 0) -> None:
        """Creates the handler.

        Args:
            codec_policy: How chunks are encoded.
            primary_host: Index of the process that writes; None where every process has a storage of its own.
        """
        super().__init__()
        self._codec_policy = codec_policy
        self._is_primary = primary_host in (None, jax.process_index())

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Future]:
        """Starts to write values, of which copies are taken before this returns."""
        if not self._is_primary:
            return []
        arrays = [np.asarray(value) for value in values]
        writes = share_host_arrays(arrays, [info.name for info in infos], args or [ocp.SaveArgs()] * len(values))
        writing = write_beside(infos[0], writes, self._codec_policy, jax.process_index())
        return [CommitFutureAwaitingContractedSignals(writing, name=f"{self.typestr()}_leaves")]

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[ocp.metadata.value.ArrayMetadata]:
        """Describes arrays from the record, without opening them."""
        return [
            ocp.metadata.value.ArrayMetadata(
                name=info.name, directory=info.parent_dir, shape=shape, sharding=None, dtype=dtype
            )
            for info, shape, dtype in await _described(infos)
        ]


class ExplicitScalarHandler(ExplicitNumpyHandler):
    """Saves numbers, each as an array without dimensions. The process `primary_host` writes them."""

    def typestr(self) -> str:
        """The type by which Orbax knows such leaves."""
        return "scalar"

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[ocp.metadata.value.ScalarMetadata]:
        """Describes numbers from the record, without opening them."""
        return [
            ocp.metadata.value.ScalarMetadata(name=info.name, directory=info.parent_dir, dtype=dtype)
            for info, _, dtype in await _described(infos)
        ]


async def _described(infos: Sequence[ParamInfo]) -> list[tuple[ParamInfo, tuple[int, ...], np.dtype[Any]]]:
    """Each leaf with its recorded shape and dtype."""
    for info in infos:
        await info.await_path_creation()
    leaves = read_item_manifest(directory_of(infos[0])).leaves
    by_name = {storage_name(path): leaf for path, leaf in leaves.items()}
    records = [by_name[info.name] for info in infos]
    return [(info, record.stored_shape, np.dtype(record.dtype)) for info, record in zip(infos, records, strict=True)]
