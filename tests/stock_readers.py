"""What stock Orbax makes of a checkpoint, for processes in which the package under test is not installed.

Imports neither that package nor a module that does. What was restored is returned as plain values, so that it can
travel to a process with other devices.
"""

from __future__ import annotations

import importlib.util
import pathlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

Layout: TypeAlias = tuple[Any, ...]

STEP = 7


@dataclass(frozen=True)
class Wanted:
    """One array of a target, as it travels to a process with other devices.

    Attributes:
        shape: Shape of the array.
        dtype: Name of its dtype; of PRNG keys that of their implementation, after `key:`.
        spec: How it is to be placed on the mesh there.
        memory_kind: The memory kind.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...] = ()
    memory_kind: str = "device"

    def on(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The target's leaf, on a mesh over the devices of this process."""
        if self.dtype.startswith("key:"):
            dtype = jax.random.key(0, impl=self.dtype.removeprefix("key:")).dtype
        else:
            dtype = jax.numpy.dtype(self.dtype)
        sharding = NamedSharding(mesh, P(*self.spec), memory_kind=self.memory_kind)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)


@dataclass(frozen=True)
class Seen:
    """One restored leaf, as plain values.

    Attributes:
        type: Name of its Python type, `Array` for a `jax.Array`.
        dtype: Name of its dtype; empty where it has none.
        layout: What `layout` says of its sharding; None for a value on the host.
        value: Its value, of PRNG keys their data; of an array that spans processes None.
        shards: The index and the data of each shard of this process, of an array that spans processes.
    """

    type: str
    dtype: str
    layout: Layout | None
    value: Any
    shards: tuple[tuple[Any, np.ndarray[Any, Any]], ...] = ()


def layout(sharding: Sharding) -> Layout:
    """A sharding as plain values that are equal exactly where the layouts are."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        return (
            "named",
            tuple(mesh.shape.items()),
            tuple(kind.name for kind in mesh.axis_types),
            tuple(device.id for device in mesh.devices.flat),
            repr(sharding.spec),
            sharding.memory_kind,
        )
    return ("single", *sorted(device.id for device in sharding.device_set), sharding.memory_kind)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves, `None` and empty containers of a tree by name. Stock keeps names, but not all kinds of container."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: not jax.tree.leaves(node))
    return {"/".join(ocp.tree.str_keypath(keypath)): leaf for keypath, leaf in flat}


def look_at(tree: Any) -> dict[str, Seen]:
    """What was restored, leaf by leaf."""
    return {name: _look_at_leaf(leaf) for name, leaf in named_leaves(tree).items()}


def _look_at_leaf(leaf: Any) -> Seen:
    if not isinstance(leaf, jax.Array):
        return Seen(type(leaf).__name__, str(getattr(leaf, "dtype", "")), None, leaf)
    dtype, where = str(leaf.dtype), layout(leaf.sharding)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.is_fully_addressable:
        return Seen("Array", dtype, where, np.asarray(leaf))
    shards = tuple((shard.index, np.asarray(shard.data)) for shard in leaf.addressable_shards)
    return Seen("Array", dtype, where, None, shards)


def make_target(wanted: Any, mesh: Mesh) -> Any:
    """A target from a tree of `Wanted` and of values on the host."""
    return jax.tree.map(
        lambda leaf: leaf.on(mesh) if isinstance(leaf, Wanted) else leaf,
        wanted,
        is_leaf=lambda leaf: isinstance(leaf, Wanted),
    )


# Every way to read with stock Orbax. Each takes a directory with the checkpoint `item` and the CheckpointManager's root
# `root` that holds the same as step 7, and a target.


def _standard(directory: pathlib.Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory / "item", target)


def _pytree(directory: pathlib.Path, target: Any) -> Any:
    args = ocp.args.PyTreeRestore()
    if target is not None:
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(directory / "item", args=args)


def _v1(directory: pathlib.Path, target: Any) -> Any:
    return ocp1.load(directory / "item", target)


def _v1_step(directory: pathlib.Path, target: Any) -> Any:
    return ocp1.load(directory / "root" / str(STEP), target)


def _manager(directory: pathlib.Path, target: Any) -> Any:
    with ocp.CheckpointManager(directory / "root") as manager:
        return manager.restore(STEP, args=ocp.args.StandardRestore(target))


def _manager_without_arguments(directory: pathlib.Path, target: Any) -> Any:
    with ocp.CheckpointManager(directory / "root") as manager:
        return manager.restore(STEP)


Reader: TypeAlias = Callable[[pathlib.Path, Any], Any]

WITH_OR_WITHOUT_TARGET: Mapping[str, Reader] = {
    "StandardCheckpointer": _standard,
    "PyTreeCheckpointer": _pytree,
    "v1 load": _v1,
    "v1 load of a CheckpointManager's step": _v1_step,
    "CheckpointManager with StandardRestore": _manager,
}
WITHOUT_TARGET = {**WITH_OR_WITHOUT_TARGET, "CheckpointManager without arguments": _manager_without_arguments}


def target_mesh() -> Mesh:
    """The mesh of targets: other axes than the saved ones, one of them auto."""
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))


@dataclass(frozen=True)
class Readings:
    """What stock Orbax made of a checkpoint, by the way to read it: what it saw, or the text of the error.

    Attributes:
        without_target: Without a target.
        into_target: Into a target.
        metadata: Shape, dtype, mesh axes, axis types and spec of each array, as `item_metadata` tells them.
    """

    without_target: Mapping[str, dict[str, Seen] | str]
    into_target: Mapping[str, dict[str, Seen] | str]
    metadata: Mapping[str, tuple[Any, ...]]


def read_every_way(directory: pathlib.Path, targetable: pathlib.Path, wanted: Any) -> Readings:
    """Reads in every way.

    Args:
        directory: What is read without a target.
        targetable: What is read into a target.
        wanted: The target, see `make_target`.
    """
    target = make_target(wanted, target_mesh())
    return Readings(
        without_target={name: _read(reader, directory, None) for name, reader in WITHOUT_TARGET.items()},
        into_target={name: _read(reader, targetable, target) for name, reader in WITH_OR_WITHOUT_TARGET.items()},
        metadata=_read_item_metadata(directory),
    )


def read_where_only_stock_is(directory: pathlib.Path, targetable: pathlib.Path, wanted: Any) -> Readings:
    """`read_every_way`, and that the package under test cannot be imported here."""
    assert_only_stock_is_here()
    return read_every_way(directory, targetable, wanted)


def _read(reader: Reader, directory: pathlib.Path, target: Any) -> dict[str, Seen] | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Stock warns of every restore without a target.
            return look_at(reader(directory, target))
    except Exception as error:  # noqa: BLE001 - the test of this way shows it
        return f"{type(error).__name__}: {error}"


def _read_item_metadata(directory: pathlib.Path) -> dict[str, tuple[Any, ...]]:
    with ocp.CheckpointManager(directory / "root", item_handlers=ocp.StandardCheckpointHandler()) as manager:
        metadata = manager.item_metadata(STEP)
    seen = {}
    for name, leaf in named_leaves(metadata.tree).items():
        if isinstance(leaf, ocp.metadata.value.ArrayMetadata):
            axes = types = spec = None
            if isinstance(leaf.sharding, ocp.metadata.NamedShardingMetadata):
                axes = tuple(leaf.sharding.axis_names)
                types = tuple(kind.name for kind in leaf.sharding.axis_types)
                spec = tuple(tuple(p) if isinstance(p, list) else p for p in leaf.sharding.partition_spec)
            seen[name] = (leaf.shape, str(leaf.dtype), axes, types, spec)
    return seen


def restore_into_concrete(items: Mapping[str, pathlib.Path], wanted: Any) -> dict[str, dict[str, Seen]]:
    """Stock's StandardCheckpointer with a target of concrete shardings on all devices, in several processes too."""
    assert_only_stock_is_here()
    target = make_target(wanted, target_mesh())
    with ocp.StandardCheckpointer() as checkpointer:
        return {name: look_at(checkpointer.restore(item, target)) for name, item in items.items()}


def assert_only_stock_is_here() -> None:
    """Fails where the package under test can be imported."""
    assert importlib.util.find_spec("orbax_explicit") is None


# Each API of stock Orbax, at a path that any of them may have written.


def load_v0(path: pathlib.Path, target: Any = None) -> Any:
    """v1 keeps a tree one directory further down than v0."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "state" if (path / "state").exists() else path, target)


LOADERS: Mapping[str, Reader] = {"stock v0": load_v0, "stock v1": ocp1.load}


@dataclass(frozen=True)
class Loaded:
    """What came back: leaves, the structure as text, and which arrays are uncommitted; or the text of the error."""

    leaves: Mapping[str, Seen]
    structure: str
    uncommitted: tuple[str, ...]
    error: str = ""


def load_each(loaders: Mapping[str, Reader], path: pathlib.Path) -> dict[str, Loaded]:
    """What each loader makes of a checkpoint, without a target."""
    return {name: look_at_load(load, path) for name, load in loaders.items()}


def look_at_load(load: Reader, path: pathlib.Path, target: Any = None) -> Loaded:
    """What a loader makes of a checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = load(path, target)
    except Exception as error:  # noqa: BLE001 - the test of this pair shows it
        return Loaded({}, "", (), f"{type(error).__name__}: {error}")
    free = [name for name, leaf in named_leaves(tree).items() if isinstance(leaf, jax.Array) and not leaf.committed]
    return Loaded(look_at(tree), str(jax.tree.structure(tree)), tuple(free))


def load_where_only_stock_is(paths: Mapping[str, pathlib.Path]) -> dict[str, dict[str, Loaded]]:
    """What each API of stock Orbax makes of each checkpoint, and that the package cannot be imported here."""
    assert_only_stock_is_here()
    return {name: load_each(LOADERS, path) for name, path in paths.items()}
