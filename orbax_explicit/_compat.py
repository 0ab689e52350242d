"""Every branch on a JAX or Orbax version, and every private upstream name.

Each entry says why it is here and when it can go. Nothing else in the package asks for a version or imports
from an `_src` module; `tests/test_compat.py` fails with a sentence when upstream moves one of these.

Orbax is imported inside the functions, so that the modules that only know JAX do not import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import jax

from orbax_explicit._records import ReductionKind

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    import orbax.checkpoint.experimental.v1 as ocp1

# --- JAX -------------------------------------------------------------------------------------------------------

_UNREDUCED_KIND = getattr(jax.sharding, "UnreducedKind", None)


def partition_spec(
    partitions: Iterable[Any],
    *,
    unreduced: Iterable[str] = (),
    reduced: Iterable[str] = (),
    unreduced_kind: ReductionKind | None = None,
) -> jax.sharding.PartitionSpec:
    """A `PartitionSpec` with its pending reductions.

    `unreduced_kind` came with jax 0.11: before, the only kind was a sum. The branch goes when that is the oldest
    supported release.

    Raises:
        ValueError: The kind is not a sum and this JAX knows no other.
    """
    extra: dict[str, Any] = {}
    if unreduced := frozenset(unreduced):
        extra["unreduced"] = unreduced
        if _UNREDUCED_KIND is not None:
            extra["unreduced_kind"] = _UNREDUCED_KIND[unreduced_kind or "sum"]
        elif unreduced_kind not in (None, "sum"):
            raise ValueError(f"jax {jax.__version__} has no reduction of kind {unreduced_kind!r}")
    if reduced := frozenset(reduced):
        extra["reduced"] = reduced
    return jax.sharding.PartitionSpec(*partitions, **extra)


def unreduced_kind(spec: jax.sharding.PartitionSpec) -> ReductionKind | None:
    """The pending reduction of a spec; None where nothing is unreduced. Goes together with `partition_spec`'s branch."""
    if not spec.unreduced:
        return None
    kind = getattr(spec, "unreduced_kind", None)
    return cast(ReductionKind, kind.name) if kind is not None else "sum"


# --- Orbax -----------------------------------------------------------------------------------------------------


def array_metadata_store() -> Any:
    """Orbax's store of `array_metadatas/process_N`, without which it neither saves nor restores PRNG keys.

    Orbax gives it to the array handler of its own registry and exports no name for it. Goes when a handler that
    is made by its public constructor has one.
    """
    from orbax.checkpoint._src.metadata import array_metadata_store as store

    return store.Store()


def array_metadata(
    *,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    chunk: tuple[int, ...],
    use_ocdbt: bool,
    use_zarr3: bool,
    prng_impl: str | None,
) -> Any:
    """An entry for `array_metadata_store().write`: an array, written in chunks of this shape.

    Its class has no public name. Goes with the store.

    Args:
        name: Name of the array in the store.
        shape: Shape of what is stored.
        dtype: Name of the dtype that is stored.
        chunk: Shape of a chunk.
        use_ocdbt: Whether it is in an OCDBT database.
        use_zarr3: Whether it is Zarr version 3.
        prng_impl: PRNG implementation of the keys whose data it is; None for an ordinary array.
    """
    from orbax.checkpoint._src.metadata import array_metadata as metadata

    return metadata.ArrayMetadata(
        param_name=name,
        shape=shape,
        dtype=dtype,
        write_shape=chunk,
        chunk_shape=chunk,
        use_ocdbt=use_ocdbt,
        use_zarr3=use_zarr3,
        ext_metadata={metadata.RANDOM_KEY_IMPL: prng_impl} if prng_impl is not None else None,
    )


def max_transfer_nbytes(info: ocp.type_handlers.ParamInfo) -> int | None:
    """What `save_concurrent_gb` or `restore_concurrent_gb` amounts to in bytes; None where nothing was said.

    Orbax passes it on inside of an object that has no public type. Goes when it is a number again.
    """
    limit = getattr(info.byte_limiter, "max_bytes", None)
    return limit if isinstance(limit, int) else None


def prng_impls(array_metadatas: Any) -> dict[str, str]:
    """The PRNG implementation of each array that is the data of keys, by its name.

    What the first process wrote decides, as in Orbax; all of them list every array. Goes when the name under which Orbax
    keeps the implementation is public.

    Args:
        array_metadatas: What `array_metadata_store().read` gave of all processes.
    """
    from orbax.checkpoint._src.metadata import array_metadata

    first = next(iter(array_metadatas.values())) if array_metadatas else ()
    impls = {entry.param_name: (entry.ext_metadata or {}).get(array_metadata.RANDOM_KEY_IMPL) for entry in first}
    return {name: impl for name, impl in impls.items() if impl}


def record_as_stock(handler: type[ocp.CheckpointHandler]) -> None:
    """Makes a handler class go by the type string of stock's `StandardCheckpointHandler` in `_CHECKPOINT_METADATA`.

    A stock `CheckpointManager` looks the string up to restore a step without being told how; ours would be unknown
    where this package is not imported. Two classes cannot be registered under one string, hence this is called after
    the handler's arguments have been registered. Goes when Orbax lets a checkpoint name a fallback.
    """
    import orbax.checkpoint as ocp

    stock = ocp.StandardCheckpointHandler.typestr()
    handler.typestr = classmethod(lambda cls: stock)


def record_as_stock_v1(handler: type[ocp1.handlers.CheckpointableHandler]) -> None:
    """Makes a v1 handler class go by the type string of stock's `StandardCheckpointHandler` in `_CHECKPOINT_METADATA`.

    v1 makes the string of the names of the class, and looks it up to load what it was not told how to; ours would be
    unknown where this package is not imported. Stock's v1 and v0 both know this one. Goes when Orbax lets a checkpoint
    name a fallback.
    """
    import orbax.checkpoint as ocp

    handler.__module__, _, handler.__qualname__ = ocp.StandardCheckpointHandler.typestr().rpartition(".")


def active_context() -> ocp1.Context:
    """The v1 context that is active, or the default one. v1 has no public name for asking; goes when it has."""
    from orbax.checkpoint.experimental.v1._src.context import context

    active: ocp1.Context = context.get_context()
    return active


def save_operation_id() -> str:
    """What tells the barriers of one v1 save from those of another, alike in all processes.

    A v1 handler meets the other processes itself, at barriers whose names are used once. Goes when v1 passes it on.
    """
    from orbax.checkpoint._src.futures import synchronization

    return str(synchronization.OperationIdGenerator.get_current_operation_id())


def is_created_by_v0(directory: ocp1.path.PathAwaitingCreation) -> bool:
    """Whether v0's checkpointer creates the directory of a v1 save, as under `training.Checkpointer`.

    Then it does so even if the save is refused. Goes with `_arrays.await_directories`.
    """
    from orbax.checkpoint.experimental.v1._src.handlers import compatibility

    return isinstance(directory, compatibility._PathAwaitingCreation)
