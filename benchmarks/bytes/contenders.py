"""Who saves and restores: each way as its own documentation shows it, with its defaults unless its name says otherwise.

A contender starts a save and gives what waits for its end; one that saves all at once has nothing to wait for. Those
that know host arrays alone, safetensors and Equinox, put what they have read onto the target's shardings, and flush
their file as the others do: else less would be done in the same time.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bytes.workloads import Tree

Wait = Callable[[], object]


class Contender(Protocol):
    """Saves a tree of arrays and restores it.

    Methods:
        save: Starts a save; what it returns waits for the end of it.
        restore: Restores onto a tree of `jax.ShapeDtypeStruct`s with shardings.
    """

    def save(self, path: pathlib.Path, state: Tree) -> Wait: ...

    def restore(self, path: pathlib.Path, target: Tree) -> Tree: ...


class Checkpointer:
    """`StandardCheckpointer`: ours and stock's have the same calls."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def save(self, path: pathlib.Path, state: Tree) -> Wait:
        self._checkpointer.save(path, state)
        return self._checkpointer.wait_until_finished

    def restore(self, path: pathlib.Path, target: Tree) -> Tree:
        return self._checkpointer.restore(path, target)


class PyTreeCheckpointer:
    """Stock Orbax v0 without compression, which `StandardCheckpointer` has no argument for."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def save(self, path: pathlib.Path, state: Tree) -> Wait:
        import orbax.checkpoint as ocp

        self._checkpointer.save(path, args=ocp.args.PyTreeSave(state))
        return self._checkpointer.wait_until_finished

    def restore(self, path: pathlib.Path, target: Tree) -> Tree:
        import orbax.checkpoint as ocp

        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        return self._checkpointer.restore(path, args=ocp.args.PyTreeRestore(target, restore_args=restore_args))


class V1:
    """Stock Orbax's next API, or ours of the same shape."""

    def __init__(self, module: str) -> None:
        self._v1 = importlib.import_module(module)

    def save(self, path: pathlib.Path, state: Tree) -> Wait:
        return self._v1.save_async(path, state).result

    def restore(self, path: pathlib.Path, target: Tree) -> Tree:
        return self._v1.load(path, target)


class Safetensors:
    """`safetensors.numpy`: a dict of host arrays; the tree is flattened to the paths of its leaves.

    `safetensors.flax` does the same, and on reading copies all to one device first: it takes two to four times as long.
    """

    def __init__(self) -> None:
        import safetensors.numpy

        self._safetensors = safetensors.numpy

    def save(self, path: pathlib.Path, state: Tree) -> Wait:
        import jax

        path.mkdir()
        leaves = {
            jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        self._safetensors.save_file(leaves, path / "state.safetensors")
        flush(path / "state.safetensors")
        return nothing_left

    def restore(self, path: pathlib.Path, target: Tree) -> Tree:
        import jax

        read = self._safetensors.load_file(path / "state.safetensors")
        return jax.tree_util.tree_map_with_path(
            lambda key, leaf: jax.device_put(read.pop(jax.tree_util.keystr(key)), leaf.sharding), target
        )


class Equinox:
    """`eqx.tree_serialise_leaves`: the leaves one after the other, as `jnp.save` writes them."""

    def __init__(self) -> None:
        import equinox

        self._equinox = equinox

    def save(self, path: pathlib.Path, state: Tree) -> Wait:
        path.mkdir()
        self._equinox.tree_serialise_leaves(path / "state.eqx", state)
        flush(path / "state.eqx")
        return nothing_left

    def restore(self, path: pathlib.Path, target: Tree) -> Tree:
        import jax

        read = self._equinox.tree_deserialise_leaves(path / "state.eqx", target)
        return jax.tree.map(lambda array, leaf: jax.device_put(array, leaf.sharding), read, target)


def flush(path: pathlib.Path) -> None:
    """Has what was written to the file reach the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def nothing_left() -> None:
    pass


def ours(**options: Any) -> Contender:
    import orbax_explicit as oxe

    return Checkpointer(oxe.StandardCheckpointer(**options))


def stock_v0() -> Contender:
    import orbax.checkpoint as ocp

    return Checkpointer(ocp.StandardCheckpointer())


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "ours": ours,
    "ours, no compression": lambda: ours(compression=None),
    "ours, unchecked": lambda: ours(checksum=None, compression=None),
    "ours v1": lambda: V1("orbax_explicit.v1"),
    "stock v0": stock_v0,
    "stock v0, uncompressed": PyTreeCheckpointer,
    "stock v1": lambda: V1("orbax.checkpoint.experimental.v1"),
    "safetensors": Safetensors,
    "equinox": Equinox,
}
