"""Where the arrays of an item lie: TensorStore's specs of their store and of each array, in one place.

An item keeps the chunks of its arrays, and the Zarr metadata of each, under keys: `layer.w/.zarray`, `layer.w/0.1`. With
OCDBT they are in one database; while it is written every process has its own, in `ocdbt.process_<n>`, which Orbax
merges. Without it each key is a file.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorstore as ts

Json: TypeAlias = dict[str, Any]

STORE_ERRORS = (ValueError, OSError, NotImplementedError)
"""What TensorStore raises; `NotImplementedError` is its status UNIMPLEMENTED."""

# What reading a key came to: None where nothing is under it.
StoredValue: TypeAlias = "bytes | Exception | None"

OCDBT_MANIFEST = "manifest.ocdbt"

_CACHE_NBYTES = 100_000_000  # Of OCDBT's inner nodes, so that each is fetched once.

# A data file takes up values until it has so many bytes, in memory. Several of them are written at a time.
_DATA_FILE_NBYTES = 128 << 20

# As Orbax writes them. Zarr metadata and tiny chunks lie within the nodes, which OCDBT compresses and checks by CRC32C.
_OCDBT_CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}

# Neighbouring reads are one request to an object store.
_REMOTE_READS = {
    "experimental_read_coalescing_threshold_bytes": 1_000_000,
    "experimental_read_coalescing_merged_bytes": 500_000_000_000,
    "experimental_read_coalescing_interval": "1ms",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayStore:
    """The store of an item's arrays.

    Attributes:
        directory: The directory of the item: an absolute path, or a URL that TensorStore knows.
        use_ocdbt: Whether the keys are in one OCDBT database, rather than files.
        use_zarr3: Whether arrays are Zarr version 3, rather than 2.
        metadata_key: Name of the Zarr metadata; None for the usual one.
        fills_missing: Whether a chunk that is missing stands for zeros. Orbax before 0.5 left such chunks out.
    """

    directory: str
    use_ocdbt: bool
    use_zarr3: bool
    metadata_key: str | None = None
    fills_missing: bool = False

    @property
    def metadata_file(self) -> str:
        """Last part of the key of an array's Zarr metadata."""
        return self.metadata_key or ("zarr.json" if self.use_zarr3 else ".zarray")

    def chunk_key(self, place: tuple[int, ...]) -> str:
        """Last part of the key of a chunk, from its place in the grid."""
        if self.use_zarr3:
            return "/".join(("c", *map(str, place)))
        return ".".join(map(str, place)) or "0"

    def spec(self) -> Json | str:
        """Spec of the store, to read from it."""
        base = _base(self.directory)
        if not self.use_ocdbt:
            return base
        spec: Json = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
        if isinstance(base, str):
            return {**spec, **_REMOTE_READS}
        # Data files have unique names, and nobody reads one before a manifest mentions it: only that must be whole.
        return {**spec, "base": {**base, "file_io_locking": {"mode": "non_atomic"}}, "manifest": base}

    def writing_spec(self, process: int, data_file_nbytes: int | None = None) -> Json | str:
        """Spec of the store that a process writes to.

        Args:
            process: Index of the process.
            data_file_nbytes: Bytes at which OCDBT starts another data file; 0 for never, None for the default.
        """
        if not self.use_ocdbt:
            return self.spec()
        own = ArrayStore(
            directory=f"{self.directory.rstrip('/')}/ocdbt.process_{process}", use_ocdbt=True, use_zarr3=self.use_zarr3
        )
        spec = own.spec()
        assert isinstance(spec, dict)
        nbytes = _DATA_FILE_NBYTES if data_file_nbytes is None else data_file_nbytes
        # No other process writes to it, hence no empty manifest needs to be written first.
        return {**spec, "config": _OCDBT_CONFIG, "assume_config": True, "target_data_file_size": nbytes}

    def array_spec(self) -> Json:
        """Spec of an array in the store, to read it."""
        return {**self._driver(), "fill_missing_data_reads": self.fills_missing}

    def new_array_spec(self, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str, codec: Json | None) -> Json:
        """Spec of a new array in the store.

        Args:
            shape: Shape of the array.
            chunk: Shape of its chunks.
            dtype: Name of its dtype.
            codec: The codec that compresses chunks, as Zarr version 3 writes it; None for none.
        """
        metadata: Json
        if self.use_zarr3:
            grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
            to_bytes = {"name": "bytes", "configuration": {"endian": "little"}}
            metadata = {"shape": list(shape), "chunk_grid": grid, "codecs": [to_bytes, *([codec] if codec else [])]}
        else:
            compressor = {"id": codec["name"], **codec["configuration"]} if codec else None
            metadata = {"shape": list(shape), "chunks": list(chunk), "compressor": compressor}
        # A chunk that is not there is one that was lost, also if it held zeros.
        return {**self._driver(), "metadata": metadata, "dtype": dtype, "store_data_equal_to_fill_value": True}

    def _driver(self) -> Json:
        spec: Json = {"driver": "zarr3" if self.use_zarr3 else "zarr"}
        if self.metadata_key is not None:
            spec["metadata_key"] = self.metadata_key
        return {**spec, "recheck_cached_data": False, "recheck_cached_metadata": False}


def error_text(error: Exception) -> str:
    """What an error of TensorStore's says, without the spec that it says it of."""
    return str(error).partition("[tensorstore_spec=")[0].strip()


def key_of(name: str, part: str) -> str:
    """The key of a part of an array: its Zarr metadata, or a chunk; of all that it has, where the part is empty.

    Args:
        name: Name of the array; empty where it is the whole tree.
        part: Last part of the key.
    """
    # As TensorStore does: one "/" behind a name that does not end in one.
    return f"{name}/{part}" if name and not name.endswith("/") else f"{name}{part}"


def open_store(store: ArrayStore, context: ts.Context | None = None) -> ts.KvStore:
    """Opens a store to read from it; in a new context, if none is given."""
    return ts.KvStore.open(store.spec(), context=context or new_context()).result()


def read_keys(keys: ts.KvStore, names: Sequence[str]) -> list[StoredValue]:
    """What is under each of many keys, read concurrently."""
    with ts.Batch() as batch:
        reads = [keys.read(name, batch=batch) for name in names]
    values: list[StoredValue] = []
    for read in reads:
        try:
            result = read.result()
            # Of a value whose data file is gone OCDBT gives nothing; no key that is read holds nothing.
            values.append(result.value or None)
        except STORE_ERRORS as error:
            values.append(error)
    return values


def new_context() -> ts.Context:
    """A TensorStore context for one save or one restore: what it caches is not used for another."""
    return ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": _CACHE_NBYTES}, "file_io_concurrency": {"limit": 128}})


def _base(directory: str) -> Json | str:
    if "://" in directory:
        return f"{directory.rstrip('/')}/"
    return {"driver": "file", "path": f"{pathlib.Path(os.path.normpath(directory)).absolute()}/"}
