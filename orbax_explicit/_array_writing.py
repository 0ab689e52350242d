"""Arrays on the host -> stored arrays: each block is written once, in chunks whose bytes are checked when they are read.

Large arrays go through TensorStore's driver for arrays, as many bytes at a time as may be in flight. For an array of a
few hundred bytes that driver is most of the work: small ones are encoded here, and go into the store as keys, many at a
time. What is stored is the same.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from orbax_explicit._boxes import Box, Shape, chunks_of, intersect, slices_within
from orbax_explicit._budget import Budget, batches, gather_all
from orbax_explicit._codecs import CodecPolicy
from orbax_explicit._small_arrays import SMALL_NBYTES, encode_array
from orbax_explicit._storage import ArrayStore, key_of

# Encoded chunks wait in memory until a data file is full.
_MAX_IN_FLIGHT_NBYTES = 512 << 20

# Small arrays are committed together, until there are so many bytes or so many arrays in a batch.
_BATCH_NBYTES = 32 << 20
_BATCH_ARRAYS = 1 << 16

_nbytes = operator.attrgetter("nbytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayWrite:
    """What one process writes of an array.

    Attributes:
        name: Name of the array in the store.
        shape: Shape of the array.
        dtype: Name of the dtype to store.
        chunk: Shape of its chunks.
        blocks: The elements of each block that this process writes. They do not change until they are written. No chunk
            lies in two blocks.
    """

    name: str
    shape: Shape
    dtype: str
    chunk: Shape
    blocks: Mapping[Box, np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, as they are in memory."""
        return sum(block.nbytes for block in self.blocks.values())


async def write_arrays(
    writes: Sequence[ArrayWrite],
    store: ArrayStore,
    *,
    process: int,
    policy: CodecPolicy,
    context: ts.Context,
    max_in_flight_nbytes: int | None = None,
    data_file_nbytes: int | None = None,
) -> None:
    """Writes arrays. Each process that has a part to write calls it, with its part.

    Args:
        writes: What this process writes.
        store: Where.
        process: Index of this process.
        policy: How chunks are encoded.
        context: TensorStore context of this save.
        max_in_flight_nbytes: Bytes that may be on their way at a time, if that is less than the default.
        data_file_nbytes: Bytes at which OCDBT starts another data file; None for the default.

    Raises:
        ValueError: TensorStore could not write, or the policy has a codec that the store's Zarr version has not.
    """
    policy.check_format(use_zarr3=store.use_zarr3)
    if not writes:
        return
    keys = await ts.KvStore.open(store.writing_spec(process, data_file_nbytes), context=context)
    budget = Budget(min(_MAX_IN_FLIGHT_NBYTES, max_in_flight_nbytes or _MAX_IN_FLIGHT_NBYTES))
    small = [write for write in writes if write.nbytes <= SMALL_NBYTES]
    large = [write for write in writes if write.nbytes > SMALL_NBYTES]

    async def write_batch(batch: Sequence[ArrayWrite]) -> None:
        async with budget.reserved(sum(write.nbytes for write in batch)):
            await asyncio.to_thread(_write_small, batch, store, keys, policy)

    await gather_all(
        itertools.chain(
            (
                write_batch(batch)
                for batch in batches(small, _nbytes, max_nbytes=_BATCH_NBYTES, max_items=_BATCH_ARRAYS)
            ),
            (_write_large(write, store, keys, policy, context, budget) for write in large),
        )
    )


# Large arrays: by TensorStore's driver.


async def _write_large(
    write: ArrayWrite, store: ArrayStore, keys: ts.KvStore, policy: CodecPolicy, context: ts.Context, budget: Budget
) -> None:
    codec = await asyncio.to_thread(policy.codec, write.blocks.values(), use_zarr3=store.use_zarr3)
    with budget.unless_failed():
        array = await ts.open(
            ts.Spec(store.new_array_spec(write.shape, write.chunk, write.dtype, codec)),
            kvstore=keys / key_of(write.name, ""),
            create=True,
            open=True,
            context=context,
        )

    async def write_part(block: Box, part: Box) -> None:
        values = write.blocks[block][slices_within(part, block)]
        async with budget.reserved(values.nbytes):
            target = ts.cast(array, ts.dtype(values.dtype)) if values.dtype != array.dtype.numpy_dtype else array
            region = target[tuple(slice(*span) for span in part)] if part else target
            await region.write(values, can_reference_source_data_indefinitely=True)

    await gather_all(
        write_part(block, intersect(block, chunk))
        for block in write.blocks
        for _, chunk in chunks_of(block, write.chunk)
    )


# Small arrays: as keys.


def _write_small(batch: Sequence[ArrayWrite], store: ArrayStore, keys: ts.KvStore, policy: CodecPolicy) -> None:
    """Writes arrays as the keys that TensorStore's driver would write, in one commit."""
    with ts.Transaction() as transaction:
        committing = keys.with_transaction(transaction)
        for write in batch:
            codec = policy.codec(write.blocks.values(), use_zarr3=store.use_zarr3)
            keys_of_array = encode_array(
                store, shape=write.shape, dtype=write.dtype, chunk=write.chunk, codec=codec, blocks=write.blocks
            )
            for key, value in keys_of_array:
                committing[key_of(write.name, key)] = value
