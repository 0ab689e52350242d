"""`integrations.optax`: the state of an optimizer follows its parameters, before it is made and within `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_values, matrix, place

import orbax_explicit as oxe
from orbax_explicit.integrations.optax import abstract_state

MASK = {"w": True, "b": False}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "a chain with a schedule": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    ),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nothing": optax.sgd(0.1),
    "masked": optax.masked(optax.adam(1e-3), MASK),
    "several": optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "in several steps": optax.MultiSteps(optax.adam(1e-3), 2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "lbfgs": optax.lbfgs(),
}
on_both_kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def make_params(kind: AxisType, sizes: tuple[int, int] = (2, 4)) -> dict[str, Any]:
    mesh = jax.make_mesh(sizes, ("d", "m"), axis_types=(kind, kind))
    return {"w": place(mesh, matrix(), P("d", "m")), "b": place(mesh, matrix()[0], P("m"))}


@on_both_kinds
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_is_laid_out_as_its_parameters(optimizer, kind):
    """As `init` makes it outside of `jit`, where it follows by itself; and by `out_shardings` within."""
    params = make_params(kind)
    mesh = params["w"].sharding.mesh
    with jax.set_mesh(mesh):
        made = optimizer.init(params)
        described = abstract_state(optimizer, params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, described)
        jitted = jax.jit(optimizer.init, out_shardings=shardings)(params)
    assert jax.tree.structure(described) == jax.tree.structure(made)

    def check(said: Any, array: Any, within: Any) -> None:
        assert (said.shape, said.dtype) == (array.shape, array.dtype)
        assert isinstance(said.sharding, NamedSharding)
        assert said.sharding.mesh == mesh
        assert said.sharding.is_equivalent_to(within.sharding, array.ndim)
        # A scalar is made of nothing; and sums over a part of a parameter lie otherwise where axes are auto.
        if (kind == AxisType.Explicit and array.ndim) or (
            array.shape in {(8, 8), (8,)} and optimizer is not OPTIMIZERS["factored"]
        ):
            assert said.sharding.is_equivalent_to(array.sharding, array.ndim)

    jax.tree.map(check, described, made, jitted)


@on_both_kinds
def test_it_is_a_target_on_another_mesh(tmp_path, kind):
    """With parameters that are nothing but shapes."""
    optimizer, params = OPTIMIZERS["adamw"], make_params(kind)
    state = {"params": params, "opt_state": optimizer.init(params)}
    there = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), make_params(kind, (4, 2))
    )
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "a", {"params": there, "opt_state": abstract_state(optimizer, there)}
        )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(assert_same_values, restored, state)
    mu = restored["opt_state"][0].mu
    assert mu["w"].sharding == NamedSharding(there["w"].sharding.mesh, P("d", "m"), memory_kind="device")
    assert mu["b"].sharding == NamedSharding(there["w"].sharding.mesh, P("m"), memory_kind="device")


def test_within_jit_on_auto_axes_it_does_not_follow_by_itself():
    """Or this module can go."""
    params = make_params(AxisType.Auto)
    with jax.set_mesh(params["w"].sharding.mesh):
        state = jax.jit(optax.adamw(1e-3).init)(params)
        shapes = jax.eval_shape(optax.adamw(1e-3).init, params)
    assert state[0].mu["w"].sharding.is_fully_replicated
    assert shapes[0].mu["w"].sharding is None


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"w": matrix()},
        {"w": jax.ShapeDtypeStruct((8, 8), "float32")},
        {"w": jax.numpy.ones(8)},
    ],
    ids=["none", "of NumPy", "a shape alone", "on one device"],
)
def test_parameters_have_to_be_placed(params):
    """And said to be."""
    with pytest.raises(ValueError, match="each parameter must have a NamedSharding, all on one mesh"):
        abstract_state(optax.adamw(1e-3), params)


def test_parameters_have_to_be_on_one_mesh():
    """Which says where all else lies."""
    params = {"a": make_params(AxisType.Auto), "b": make_params(AxisType.Auto, (4, 2))}
    with pytest.raises(ValueError, match="all on one mesh"):
        abstract_state(optax.adamw(1e-3), params)


def test_what_has_no_layout_is_refused():
    """An optimizer of all parameters in a row, which are split otherwise."""
    with pytest.raises(
        ValueError, match=r"what it makes of parameters has no one layout: .*\n  fix: restore it without"
    ):
        abstract_state(optax.flatten(optax.adam(1e-3)), make_params(AxisType.Auto))


def test_what_is_wrong_with_an_optimizer_is_its_own_error():
    """Not one of layouts."""
    with pytest.raises(ZeroDivisionError):
        abstract_state(optax.GradientTransformation(lambda params: 1 // 0, len), make_params(AxisType.Auto))
