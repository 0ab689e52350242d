"""What Orbax tells a type handler about a leaf (`ParamInfo`), in the terms of this package."""

from __future__ import annotations

from typing import TypeAlias

import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from orbax_explicit import _compat
from orbax_explicit._array_writing import ArrayWrite, write_arrays
from orbax_explicit._capture import record_path
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._leaf_capture import Unrecordable
from orbax_explicit._records import Key, LeafPath
from orbax_explicit._storage import ArrayStore

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo


def directory_of(info: ParamInfo) -> epath.Path:
    """The directory of the item, once Orbax has created it."""
    return epath.Path(info.parent_dir)


def store_of(info: ParamInfo, metadata_key: str | None = None) -> ArrayStore:
    """Where the arrays of the item lie.

    Args:
        info: Of any leaf of the item; Orbax has created its directory.
        metadata_key: Name of the Zarr metadata; None for the usual one.
    """
    return ArrayStore(
        directory=directory_of(info).as_posix(),
        use_ocdbt=bool(info.is_ocdbt_checkpoint),
        use_zarr3=bool(info.use_zarr3),
        metadata_key=metadata_key,
        fills_missing=not info.raise_array_data_missing_error,
    )


def context_of(info: ParamInfo) -> ts.Context | None:
    """The TensorStore context of this save or restore."""
    context: ts.Context | None = info.ts_context
    return context


def path_of(info: ParamInfo) -> LeafPath:
    """The path of a leaf; keys that have no record go by the text that Orbax gives them."""
    try:
        return record_path(info.keypath or ())
    except Unrecordable:
        return (Key("dict", info.name),)


def codec_policy_of(info: ParamInfo, policy: CodecPolicy) -> CodecPolicy:
    """How chunks are encoded, where a stock handler may have been told not to compress."""
    return policy if info.use_compression else CodecPolicy(checksum=policy.checksum, compression=None)


async def write_beside(
    info: ParamInfo, writes: list[ArrayWrite], policy: CodecPolicy, process: int, metadata_key: str | None = None
) -> None:
    """Writes what this process has to write into the store of an item, when Orbax has created its directory.

    Args:
        info: Of any leaf of the item.
        writes: What this process writes.
        policy: How chunks are encoded.
        process: Index of this process.
        metadata_key: Name of the Zarr metadata; None for the usual one.
    """
    await info.await_path_creation()
    await write_arrays(
        writes,
        store_of(info, metadata_key),
        process=process,
        policy=codec_policy_of(info, policy),
        context=info.ts_context,
        max_in_flight_nbytes=_compat.max_transfer_nbytes(info),
        data_file_nbytes=info.ocdbt_target_data_file_size,
    )
