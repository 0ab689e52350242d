"""States of the frameworks that people train with, as far as they go through unaided."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, assert_same_values, matrix, place

import orbax_explicit as oxe


def restored(directory: Any, state: Any, target: Any = None, **restore: Any) -> Any:
    """What comes back of a saved state."""
    with oxe.StandardCheckpointer(**restore) as checkpointer:
        checkpointer.save(directory / "a", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory / "a", target)


OPTIMIZERS = {
    "a chain": optax.chain(optax.identity(), optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))),
    "masked": optax.masked(optax.adam(1e-3), {"w": True}),
    "several": optax.multi_transform({"a": optax.adam(0.1)}, {"w": "a"}),
    "in several steps": optax.MultiSteps(optax.adam(1e-3), 2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=optax.cosine_decay_schedule(0.1, 10)),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "if finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optax_state_comes_back_as_its_classes(tmp_path, mesh, optimizer):
    """Without a target. Tuples are tuples, NamedTuples their class, and the empty one is not None."""
    params = {"w": place(mesh, matrix(), P("d", "m"))}
    with jax.set_mesh(mesh):
        state = optimizer.init(params)
    result = restored(tmp_path, {"opt": state})["opt"]
    assert_same_tree(result, state)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(optimizer.update)(params, result, params)
    assert updates["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def test_the_empty_state_of_optax_is_not_none(tmp_path, mesh):
    """It has no leaf, and is a NamedTuple still."""
    state = optax.chain(optax.identity(), optax.sgd(0.1)).init({"w": place(mesh, matrix(), P("d", "m"))})
    assert type(restored(tmp_path, {"opt": state})["opt"][0]) is optax.EmptyState


def test_logical_names_are_kept(tmp_path, mesh):
    """`with_logical_partitioning` boxes, placed by the rules that the names have on a mesh."""
    dense = nn.Dense(8, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("in", "out")))
    rules = [("in", "d"), ("out", "m")]
    auto = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def init() -> Any:
        return dense.init(jax.random.key(0), jnp.ones((4, 8)))

    abstract = jax.eval_shape(init)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), auto, rules)
    variables = jax.jit(init, out_shardings=shardings)()
    result = restored(tmp_path, variables, abstract)
    kernel = result["params"]["kernel"]
    assert isinstance(kernel, nn.LogicallyPartitioned)
    assert kernel.names == ("in", "out")
    assert kernel.value.sharding == NamedSharding(auto, P("d", "m"), memory_kind="device")
    assert_same_tree(result, variables)


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


def test_what_an_nnx_model_holds_beside_parameters_is_kept(tmp_path, mesh):
    """Statistics, counts and typed keys, each as its variable."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def init() -> Model:
        return Model(nnx.Rngs(params=0, dropout=1))

    model = init()
    jax.block_until_ready(model.dropout(model.norm(model.linear(jnp.ones((4, 8))))))
    graph, state = nnx.split(model)
    result = restored(tmp_path, state, nnx.split(nnx.eval_shape(init))[1])
    assert jax.tree.structure(result) == jax.tree.structure(state)
    jax.tree.map(assert_same_values, result, state)
    kinds = {type(variable) for _, variable in nnx.to_flat_state(result)}
    assert {nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.RngCount} <= kinds
    np.testing.assert_array_equal(
        nnx.merge(graph, result).dropout(jnp.ones((4, 8))), nnx.merge(graph, state).dropout(jnp.ones((4, 8)))
    )


def test_rules_place_what_a_framework_says_nothing_of(tmp_path, mesh):
    """`eqx.filter_eval_shape` knows no sharding, and what was saved of a model that was on no mesh neither."""

    def init() -> Any:
        return eqx.nn.MLP(8, 8, 16, depth=1, key=jax.random.key(0))

    arrays = eqx.filter(init(), eqx.is_array)
    target = eqx.filter(eqx.filter_eval_shape(init), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    policy = oxe.RestorePolicy(rules=[("layers/0/weight", P("m", None)), ("layers/1/weight", P(None, "m")), ("", P())])
    with jax.set_mesh(mesh):
        result = restored(tmp_path, arrays, target, policy=policy)
    first, second = result.layers
    assert first.weight.sharding == NamedSharding(mesh, P("m", None), memory_kind="device")
    assert second.weight.sharding == NamedSharding(mesh, P(None, "m"), memory_kind="device")
    assert first.bias.sharding == NamedSharding(mesh, P(), memory_kind="device")
    jax.tree.map(assert_same_values, result, arrays)


def test_an_equinox_target_has_no_shardings_outside_of_explicit_axes(tmp_path, mesh):
    """The recorded ones count then. Within them every leaf says that it is whole, as a target may."""

    def init() -> Any:
        return eqx.nn.Linear(8, 8, key=jax.random.key(0))

    def target() -> Any:
        return eqx.filter(eqx.filter_eval_shape(init), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    arrays = eqx.filter(init(), eqx.is_array)
    arrays = eqx.tree_at(lambda model: model.weight, arrays, place(mesh, matrix(), P("m", None)))
    outside = target()
    with jax.set_mesh(mesh):
        result = restored(tmp_path, arrays, outside)
        within = target()
    assert result.weight.sharding == NamedSharding(mesh, P("m", None), memory_kind="device")
    assert outside.weight.sharding is None
    assert within.weight.sharding.spec == P(None, None)


def test_a_whole_equinox_module_is_refused_by_the_names_of_its_functions(tmp_path):
    """They are no values; `eqx.filter(model, eqx.is_array)` has those."""
    with pytest.raises(oxe.SaveRefusedError) as error:
        restored(tmp_path, eqx.nn.MLP(8, 8, 16, depth=1, key=jax.random.key(0)))
    assert {"activation", "final_activation"} == {name for problem in error.value.problems for name in problem.affects}
