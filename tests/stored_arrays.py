"""Arrays as TensorStore's own driver stores them, for tests of what is written and read without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from orbax_explicit._storage import ArrayStore, Json, new_context

GZIP: Json = {"name": "gzip", "configuration": {"level": 0}}
GZIP_1: Json = {"name": "gzip", "configuration": {"level": 1}}
ZSTD: Json = {"name": "zstd", "configuration": {"level": 3}}


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Distinct values: 0, 1, 2, ..."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))


def spec_by_hand(use_zarr3: bool, chunk: Sequence[int], codec: Json | None) -> Json:
    """What TensorStore is told of an array, written independently of the package."""
    if not use_zarr3:
        compressor = {"id": codec["name"], **codec["configuration"]} if codec else None
        return {"driver": "zarr", "metadata": {"chunks": list(chunk), "compressor": compressor}}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, *([codec] if codec else [])]
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    return {"driver": "zarr3", "metadata": {"chunk_grid": grid, "codecs": codecs}}


def write_by_driver(
    keys: ts.KvStore, name: str, values: np.ndarray[Any, Any], chunk: Sequence[int], spec: Json
) -> None:
    """Writes an array by TensorStore's driver alone, chunk by chunk as several processes would."""
    array = ts.open(
        ts.Spec({**spec, "store_data_equal_to_fill_value": True}),
        kvstore=keys / f"{name}/",
        create=True,
        shape=values.shape,
        dtype=values.dtype.name,
    ).result()
    assert tuple(array.chunk_layout.read_chunk.shape or ()) == tuple(chunk)
    array.write(values).result()


def stored(
    directory: Any,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    chunk: Sequence[int],
    *,
    use_ocdbt: bool = False,
    use_zarr3: bool = True,
    codec: Json | None = GZIP,
    fills_missing: bool = False,
) -> ArrayStore:
    """A store of arrays that TensorStore's driver wrote, in chunks of one shape."""
    store = ArrayStore(directory=str(directory), use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, fills_missing=fills_missing)
    keys = ts.KvStore.open(store.spec(), context=new_context()).result()
    for name, values in arrays.items():
        write_by_driver(keys, name, values, chunk, spec_by_hand(use_zarr3, chunk, codec))
    return store


def contents(keys: ts.KvStore) -> dict[str, bytes]:
    """Every key of a store, and what is under it."""
    return {key.decode(): keys[key] for key in keys.list().result()}
