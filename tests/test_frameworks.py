"""States of the frameworks that people train with, as far as they go through unaided."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, matrix, place

import orbax_explicit as oxe


def restored(directory: Any, state: Any, target: Any = None) -> Any:
    """What comes back of a saved state."""
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "a", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "a", target)


def test_an_optax_state_comes_back_as_its_classes(tmp_path, mesh):
    """Tuples are tuples, NamedTuples their class, and the empty one is not None."""
    params = {"w": place(mesh, matrix(), P("d", "m"))}
    optimizer = optax.chain(optax.identity(), optax.adamw(1e-3))
    state = optimizer.init(params)
    result = restored(tmp_path, {"opt": state})["opt"]
    assert_same_tree(result, state)
    assert type(result[0]) is optax.EmptyState
    updates, _ = optimizer.update(params, result, params)
    assert updates["w"].sharding.spec == P("d", "m")


def test_linen_boxes_and_their_names_are_kept(tmp_path, mesh):
    """`with_partitioning` boxes, restored into what `eval_shape` says."""
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("d", "m")))
    x = jnp.ones((4, 8))
    with jax.set_mesh(jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        variables = jax.jit(dense.init)(jax.random.key(0), x)
        target = jax.eval_shape(dense.init, jax.random.key(0), x)
    result = restored(tmp_path, variables, target)
    kernel = result["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == ("d", "m")
    assert_same_tree(result, variables)


def test_a_linen_train_state_comes_back_into_itself(tmp_path, mesh):
    """A dataclass that is registered with JAX, with fields that are no leaves."""
    params = {"w": place(mesh, matrix(), P("d", "m"))}
    state = TrainState.create(apply_fn=len, params=params, tx=optax.sgd(0.1, momentum=0.9))
    result = restored(tmp_path, state, state)
    assert isinstance(result, TrainState)
    assert_same_tree(result, state)


def test_an_nnx_state_comes_back_into_its_abstract_state(tmp_path, mesh):
    """Partitioned kernels under an explicit mesh, by `nnx.eval_shape`."""

    def init() -> nnx.Module:
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_init=nnx.with_partitioning(_normal, ("d", "m")))

    with jax.set_mesh(mesh):
        graphdef, state = nnx.split(nnx.jit(init)())
        _, target = nnx.split(nnx.eval_shape(init))
    result = restored(tmp_path, state, target)
    assert_same_tree(result, state)
    assert result["kernel"].get_value().sharding.spec == P("d", "m")
    assert isinstance(nnx.merge(graphdef, result), nnx.Linear)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **kwargs: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def test_an_equinox_module_comes_back_into_itself(tmp_path, mesh):
    """Its arrays are leaves, its static fields are the target's."""
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    linear = eqx.filter_shard(linear, NamedSharding(mesh, P()))
    arrays, static = eqx.partition(linear, eqx.is_array)
    result = eqx.combine(restored(tmp_path, arrays, arrays), static)
    assert_same_tree(eqx.filter(result, eqx.is_array), arrays)
    assert result.in_features == 8
