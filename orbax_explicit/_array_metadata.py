"""Orbax's metadata of arrays, made from the record: v0's, and a leaf of v1's.

Stock code asks such metadata for a JAX sharding when it restores without a target. Ours answers by the record's rules,
on the devices that are here when it is asked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding

from orbax_explicit._binding import axis_types_of, read_present
from orbax_explicit._containers import rebuild_tree
from orbax_explicit._policy import RestorePolicy
from orbax_explicit._records import (
    ArrayRecord,
    ContainerRecord,
    Key,
    LeafPath,
    Manifest,
    NamedShardingRecord,
    SingleDeviceRecord,
    ValueRecord,
    storage_name,
)
from orbax_explicit._restoring import bind_restore
from orbax_explicit._target_capture import AsRecorded

ParamInfo: TypeAlias = ocp.type_handlers.ParamInfo


class RecordedSharding(NamedSharding):
    """A recorded sharding, rebuilt on the present devices, that a target may still overrule.

    What `metadata` gives as the sharding of an array. Back in `deserialize` it means that the target named none, so
    that the array lands beside the target's other leaves. A restored array never carries it.
    """


class RecordedLayoutMetadata:
    """What our sharding metadata have in common: they are resolved by the record's rules, when they are asked."""

    layout: RecordedLayout
    name: str

    def to_jax_sharding(self) -> Sharding:
        """The recorded sharding on the present devices.

        Raises:
            MeshMismatchError: The recorded mesh does not fit them.
        """
        sharding = self.layout.sharding(self.name)
        if type(sharding) is NamedSharding:
            return RecordedSharding(sharding.mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return sharding


class RecordedNamedShardingMetadata(RecordedLayoutMetadata, ocp.metadata.NamedShardingMetadata):
    """Orbax's metadata of a `NamedSharding`, resolved by the record's rules."""


class RecordedSingleDeviceMetadata(RecordedLayoutMetadata, ocp.metadata.SingleDeviceShardingMetadata):
    """Orbax's metadata of a `SingleDeviceSharding`, resolved by the record's rules."""


class RecordedLayout:
    """The recorded shardings of one item, bound to the present devices when the first is asked for."""

    def __init__(self, manifest: Manifest, policy: RestorePolicy | None) -> None:
        self._manifest = manifest
        self._policy = policy

    def metadata(self, info: ParamInfo) -> ocp.metadata.value.ArrayMetadata:
        """Orbax's metadata of one array."""
        record = self._manifest.arrays[flat_path(info.name)]
        return ocp.metadata.value.ArrayMetadata(
            name=info.name,
            directory=info.parent_dir,
            shape=record.stored_shape,
            sharding=self.sharding_metadata(info.name, record),
            dtype=jax.numpy.dtype(record.dtype),
            storage=ocp.metadata.value.StorageMetadata(chunk_shape=None, write_shape=info.write_shape),
        )

    def sharding(self, name: str) -> Sharding:
        """Where one array lands on the present devices."""
        sharding = self._shardings[flat_path(name)]
        assert sharding is not None
        return sharding

    @functools.cached_property
    def _shardings(self) -> Mapping[LeafPath, Sharding | None]:
        return bind_restore(self._manifest, read_present(), policy=self._policy).shardings

    def sharding_metadata(self, name: str, record: ArrayRecord) -> RecordedLayoutMetadata | None:
        """Orbax's metadata of the sharding of one array; None where none was recorded."""
        metadata: RecordedNamedShardingMetadata | RecordedSingleDeviceMetadata
        if isinstance(record.sharding, NamedShardingRecord):
            mesh = record.sharding.mesh
            metadata = RecordedNamedShardingMetadata(
                shape=np.array(mesh.axis_sizes, dtype=int),
                axis_names=list(mesh.axis_names),
                axis_types=axis_types_of(mesh),
                partition_spec=tuple(record.sharding.spec.partitions),
            )
        elif isinstance(record.sharding, SingleDeviceRecord):
            metadata = RecordedSingleDeviceMetadata(
                device_str=f"{record.sharding.platform}:{record.sharding.device_id}"
            )
        else:
            return None
        metadata.layout = self
        metadata.name = name
        return metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafMetadata(AsRecorded):
    """What is recorded of an array. As a leaf of a target it asks for just that.

    Attributes:
        shape: Shape of the array; for PRNG keys that of the array of keys.
        dtype: Its dtype; of PRNG keys that this process does not know the implementation of, that of their data.
        sharding_metadata: Its layout, of which Orbax's classes keep no memory kind; None for a value on the host, or
            where none was recorded.
        record: All of it.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding_metadata: RecordedLayoutMetadata | None
    record: ArrayRecord | ValueRecord

    @property
    def sharding(self) -> Sharding | None:
        """The recorded sharding on the present devices, for which they are asked now.

        Raises:
            MeshMismatchError: The recorded mesh does not fit them.
        """
        return self.sharding_metadata.to_jax_sharding() if self.sharding_metadata is not None else None

    def __str__(self) -> str:
        return str(self.record)


_EXAMPLES: Mapping[str, Any] = {"int": 0, "float": 0.0, "bool": False, "str": "str", "bytes": b""}


def leaf_metadata(manifest: Manifest, policy: RestorePolicy | None) -> Any:
    """v1's metadata of a tree: the tree with `LeafMetadata` for arrays, and for values of Python one of their type."""
    # Where an array would lie as one of JAX, whatever the policy makes of it.
    layout = RecordedLayout(by_storage_name(manifest), policy.for_arrays_alone() if policy is not None else None)

    def of_leaf(path: LeafPath) -> Any:
        record = manifest.leaves[path]
        if isinstance(record, ArrayRecord):
            sharding = layout.sharding_metadata(storage_name(path), record)
            return LeafMetadata(shape=record.shape, dtype=_dtype_of(record), sharding_metadata=sharding, record=record)
        if record.type in _EXAMPLES:
            return _EXAMPLES[record.type]
        return LeafMetadata(
            shape=record.shape, dtype=jax.numpy.dtype(record.dtype), sharding_metadata=None, record=record
        )

    return rebuild_tree(manifest.tree, of_leaf)


def _dtype_of(record: ArrayRecord) -> Any:
    if record.prng is not None:
        try:
            return jax.eval_shape(lambda impl=record.prng.impl: jax.random.key(0, impl=impl)).dtype
        except ValueError:
            pass  # Not registered here.
    return jax.numpy.dtype(record.dtype)


def flat_path(name: str) -> LeafPath:
    """The path of an array in a manifest that goes by storage names."""
    return (Key("dict", name),)


def by_storage_name(manifest: Manifest) -> Manifest:
    """The arrays of a manifest in one dict, by the names under which Orbax stores them."""
    arrays = {storage_name(path): array for path, array in manifest.arrays.items()}
    keys = tuple(Key("dict", name) for name in arrays)
    tree = ContainerRecord(kind="dict", keys=keys, children=tuple(arrays.values()))
    return dataclasses.replace(manifest, tree=tree)
