"""The state of an Optax optimizer, laid out as the parameters that it is for.

Outside of `jax.jit`, and on Explicit axes within it, `optimizer.init(params)` follows the parameters by itself. On Auto axes
within `jax.jit` it does not, for the zeros that it makes are constants there; and `jax.eval_shape` knows no Auto axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = ["abstract_state"]

PyTree: TypeAlias = Any


class Optimizer(Protocol):
    """An `optax.GradientTransformation`, or another with such an `init`."""

    init: Callable[[PyTree], PyTree]


def abstract_state(optimizer: Optimizer, params: PyTree) -> PyTree:
    """What `optimizer.init(params)` returns, without making it: a `jax.ShapeDtypeStruct` for each array.

    It is a target to restore into; its shardings are the `out_shardings` of a jitted `optimizer.init`.

    Args:
        optimizer: The optimizer.
        params: Parameters, or their shapes, with `NamedSharding`s on one mesh.

    Returns:
        A tree, on that mesh, in the default memory. What is made of a parameter is laid out as JAX would on Explicit axes,
        whatever their types; all else is replicated.

    Raises:
        ValueError: A parameter has no `NamedSharding`, or there is none, or they are on several meshes; or the optimizer
            joins parameters that are split otherwise, which has no one layout on Explicit axes.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)]
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    if len(meshes) != 1 or not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        raise ValueError(
            "each parameter must have a NamedSharding, all on one mesh; place them, or their shapes, before. What has none, to be "
            "restored as it was saved, needs no more than jax.eval_shape(optimizer.init, params)"
        )
    (mesh,) = meshes
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))

    def on(mesh: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.sharding.use_abstract_mesh(explicit):
        try:
            state = jax.eval_shape(optimizer.init, jax.tree.map(lambda leaf: on(explicit, leaf), params))
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":  # JAX has no public name for it.
                raise
            raise ValueError(
                f"cannot say how the state of the optimizer lies, for what it makes of parameters has no one layout: {error}\n"
                "  fix: restore it without a target, or into jax.eval_shape(optimizer.init, params) with shardings of yours"
            ) from error
    return jax.tree.map(lambda leaf: on(mesh, leaf), state)
