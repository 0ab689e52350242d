"""Arrays of few bytes as the keys and values of a store, without TensorStore's driver for arrays.

For an array of a few hundred bytes the driver is nearly all of the work: opening it takes longer than reading many. What
is under the keys is what the driver would write, and any reader of Zarr finds it; where an array is stored in a way
that only the driver knows, these functions say so.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from orbax_explicit._boxes import Box, Shape, chunks_of, intersect, slices_within
from orbax_explicit._codecs import decode_gzip, encode_gzip
from orbax_explicit._storage import ArrayStore, Json
from orbax_explicit._zarr import ZarrArray

SMALL_NBYTES = 256 << 10
"""Bytes of an array, at most, for which the driver would take longer than encoding and decoding it here."""


def encode_array(
    store: ArrayStore,
    *,
    shape: Shape,
    dtype: str,
    chunk: Shape,
    codec: Json | None,
    blocks: Mapping[Box, np.ndarray[Any, Any]],
) -> Iterator[tuple[str, bytes]]:
    """The keys of an array, without its name, and what is under each.

    Args:
        store: Where it is going to lie.
        shape: Shape of the array.
        dtype: Name of the dtype to store.
        chunk: Shape of its chunks.
        codec: Codec of its chunks; None for none.
        blocks: The elements to write, by block. No chunk lies in two of them.
    """
    spec = store.new_array_spec(shape, chunk, dtype, codec)
    if codec is not None and codec["name"] != "gzip":
        yield from _encode_by_driver(spec, dtype, blocks)
    else:
        yield store.metadata_file, _zarr_metadata(json.dumps(spec), store.metadata_file)
        for block, values in blocks.items():
            stored = _cast(values, dtype)
            for place, box in chunks_of(block, chunk):
                part = intersect(block, box)
                elements = stored[slices_within(part, block)]
                if part != box:
                    # A chunk that stands out beyond the array is stored whole, its rest as bytes of zeros.
                    whole = np.zeros(chunk, stored.dtype)
                    whole[slices_within(part, box)] = elements
                    elements = whole
                data = elements.tobytes()
                yield store.chunk_key(place), data if codec is None else encode_gzip(data, **codec["configuration"])
    if 0 in shape and not store.use_zarr3:
        # Orbax checks after the merge that every Zarr 2 array has some chunk. No reader asks one of size zero for it.
        yield store.chunk_key((0,) * len(shape)), b""


def decode_chunk(array: ZarrArray, data: bytes) -> np.ndarray[Any, Any]:
    """The elements of a chunk of an array that has an `encoding`.

    Raises:
        ValueError: It is damaged.
    """
    assert array.chunk is not None
    dtype: np.dtype[Any] = ts.dtype(array.dtype).numpy_dtype
    if array.encoding == "gzip":
        data = decode_gzip(data, max_nbytes=math.prod(array.chunk) * dtype.itemsize)
    # A length that does not fit is an error of NumPy's.
    return np.frombuffer(data, dtype).reshape(array.chunk)


def fill_block(
    buffer: np.ndarray[Any, Any], block: Box, array: ZarrArray, chunks: Mapping[Shape, np.ndarray[Any, Any]]
) -> None:
    """Copies what a block covers of some chunks into its memory, cast to its dtype.

    Args:
        buffer: The memory of the block.
        block: The block; it may stand out beyond the array.
        array: The stored array.
        chunks: The elements of each chunk by its place, of all that the block touches.
    """
    assert array.chunk is not None
    covered = intersect(block, tuple((0, n) for n in array.shape))
    for place, box in chunks_of(covered, array.chunk):
        part = intersect(covered, box)
        elements = _cast(chunks[place][slices_within(part, box)], buffer.dtype.name)
        buffer[slices_within(part, block)] = elements


@functools.lru_cache(maxsize=1024)
def _zarr_metadata(spec: str, file: str) -> bytes:
    """The Zarr metadata that TensorStore writes for a new array; most small arrays of a tree share theirs."""
    return dict(_written_to_memory(json.loads(spec), {}))[file]


def _encode_by_driver(
    spec: Json, dtype: str, blocks: Mapping[Box, np.ndarray[Any, Any]]
) -> Iterator[tuple[str, bytes]]:
    yield from _written_to_memory(spec, {block: _cast(values, dtype) for block, values in blocks.items()})


def _written_to_memory(spec: Json, blocks: Mapping[Box, np.ndarray[Any, Any]]) -> Iterator[tuple[str, bytes]]:
    array = ts.open(ts.Spec({**spec, "kvstore": "memory://"}), create=True, context=ts.Context()).result()
    for block, values in blocks.items():
        region = array[tuple(slice(*span) for span in block)] if block else array
        region.write(values).result()
    assert array.kvstore is not None
    for key in array.kvstore.list().result():
        yield key.decode(), array.kvstore.read(key).result().value


def _cast(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Values in another dtype, by TensorStore's conversion, as its driver does it."""
    if values.dtype.name == dtype:
        return values
    cast: np.ndarray[Any, Any] = ts.cast(ts.array(values), ts.dtype(dtype)).read().result()
    return cast
