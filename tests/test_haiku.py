"""`integrations.haiku`: parameters come out of `init` as they are placed, and stay so."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, assert_same_values

import orbax_explicit as oxe
from orbax_explicit.integrations import haiku as oxh
from orbax_explicit.integrations.optax import abstract_state
from orbax_explicit.testing import run_on_devices

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RNG = np.zeros(2, np.uint32)  # jax.random.PRNGKey(0), in no backend
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)

KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "mixed": (EXPLICIT, AUTO),
    "mixed back": (AUTO, EXPLICIT),
}
on_every_kind = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
on_both_kinds = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
jitted_and_not = pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jitted", "eager"])


def make_mesh(kinds: tuple[AxisType, AxisType], sizes: tuple[int, int] = (2, 4)) -> Mesh:
    return jax.make_mesh(sizes, ("d", "m"), axis_types=kinds)


def mlp(x: Any) -> Any:
    """Three matrices: columns, rows, columns."""
    return hk.nets.MLP([16, 32, 8])(x)


ALTERNATING = {
    "mlp/~/linear_0": {"w": P(None, "m"), "b": P()},
    "mlp/~/linear_1": {"w": P("m", None), "b": P()},
    "mlp/~/linear_2": {"w": P(None, "m"), "b": P()},
}


def placement_on(*kinds: AxisType) -> oxh.Placement:
    """Alternating, and gathered for use where a product over a split dimension would have to be told its output."""
    return oxh.Placement(oxh.alternate("m"), used=oxh.replicated if EXPLICIT in kinds else None)


def assert_placed(tree: Any, mesh: Mesh, specs: Any) -> None:
    """Each array lies so, on the devices in the order of the mesh."""

    def check(keypath: Any, array: jax.Array, spec: P) -> None:
        name = jax.tree_util.keystr(keypath)
        assert isinstance(array.sharding, NamedSharding), name
        assert array.sharding.mesh == mesh, name
        assert array.sharding.mesh.axis_types == mesh.axis_types, name
        assert list(array.sharding.mesh.devices.flat) == list(mesh.devices.flat), name
        assert array.sharding.memory_kind == "device", name
        whole = tuple(spec) + (None,) * (array.ndim - len(spec))
        assert tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec)) == whole, name

    jax.tree_util.tree_map_with_path(check, tree, specs)


def assert_near(these: Any, those: Any) -> None:
    """Sums in other orders; what is 0 but for them is that within 1e-4."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-4), these, those
    )


# The report's own model: matrices split by columns and by rows in turn.


@jitted_and_not
@on_every_kind
def test_parameters_come_out_of_init_placed(kinds, jit):
    """By columns, by rows, by columns, the rest replicated; and with the values of a model that is not placed."""
    mesh = make_mesh(kinds)
    with jax.set_mesh(mesh):
        params = jit(hk.transform(placement_on(*kinds)(mlp)).init)(RNG, X)
    assert_placed(params, mesh, ALTERNATING)
    for ours, theirs in zip(*map(jax.tree.leaves, (params, jit(hk.transform(mlp).init)(RNG, X))), strict=True):
        # The same random bits; what is made of them is rounded by how the compiler has fused it.
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


@on_every_kind
def test_forward_and_backward_give_the_numbers_of_the_model_that_is_not_placed(kinds):
    """And gradients lie as their parameters."""

    def loss(apply: Any, params: Any) -> Any:
        return (apply(params, None, X) ** 2).sum()

    mesh, plain = make_mesh(kinds), hk.transform(mlp)
    model = hk.transform(placement_on(*kinds)(mlp))
    expected = jax.jit(plain.init)(RNG, X)
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(RNG, X)
        value, gradient = jax.jit(jax.value_and_grad(lambda params: loss(model.apply, params)))(params)
    assert_placed(gradient, mesh, ALTERNATING)
    assert_near((value, gradient), jax.jit(jax.value_and_grad(lambda params: loss(plain.apply, params)))(expected))


class ReportsGetter:
    """What the public report has: constrains what is accessed, in turn; its cache is asked by another name than is kept."""

    def __init__(self, lay_out: Callable[[Any, P], Any]) -> None:
        self.by_columns = True
        self.cache: dict[str, Any] = defaultdict(dict)
        self.given: list[P] = []
        self.lay_out = lay_out

    def __call__(self, next_getter: Any, value: Any, context: hk.GetterContext) -> Any:
        spec = P()
        if value.ndim == 2:
            if context.full_name in self.cache:
                spec = self.cache[context.full_name]
            else:
                spec = P(None, "m") if self.by_columns else P("m", None)
                self.cache[context.module_name][context.name] = spec
                self.by_columns = not self.by_columns
            self.given.append(spec)
        return next_getter(self.lay_out(value, spec))


class ToldDense(hk.Module):
    """A layer that tells the product how it is split, as Explicit axes want it and Auto ones do not allow it."""

    def __call__(self, x: Any, size: int) -> Any:
        w = hk.get_parameter("w", (x.shape[-1], size), init=hk.initializers.TruncatedNormal())
        is_explicit = EXPLICIT in jax.sharding.get_abstract_mesh().axis_types
        return jnp.matmul(x, w, out_sharding=P(None, None) if is_explicit else None)


def told_mlp(x: Any) -> Any:
    for name, size in (("a", 16), ("b", 32), ("c", 8)):
        x = ToldDense(name=name)(x, size)
    return x


@on_both_kinds
def test_the_reports_own_getter_places_nothing_and_slips(kind):
    """The same model: replicated out of `init`; and from the first trace to the second, columns have become rows."""
    mesh = make_mesh((kind, kind))
    getter = ReportsGetter(jax.lax.with_sharding_constraint if kind == AUTO else jax.sharding.reshard)

    def getting(x: Any) -> Any:
        with hk.custom_getter(getter):
            return told_mlp(x)

    placement = oxh.Placement(oxh.alternate("m"))
    theirs, ours = hk.transform(getting), hk.transform(placement(told_mlp))
    columns, rows = P(None, "m"), P("m", None)
    with jax.set_mesh(mesh):
        params = jax.jit(theirs.init)(RNG, X)
        assert_placed(params, mesh, {name: {"w": P()} for name in "abc"})
        assert getter.given == [columns, rows, columns]
        jax.jit(theirs.apply)(params, None, X)
        assert getter.given[3:] == [rows, columns, rows]

        params = jax.jit(ours.init)(RNG, X)
        for _ in range(2):
            assert_placed(params, mesh, {"a": {"w": columns}, "b": {"w": rows}, "c": {"w": columns}})
            assert_near(jax.jit(ours.apply)(params, None, X), jax.jit(hk.transform(told_mlp).apply)(params, None, X))
            params = jax.jit(functools.partial(ours.init))(RNG, X)


SIZE = 1024


@on_both_kinds
def test_a_compiled_init_holds_no_unsharded_copy(kind):
    """In no buffer of any device: not of the values, nor of the random bits that they are made of."""

    def model(x: Any) -> Any:
        return hk.Linear(SIZE)(x)

    def reshard(next_creator: Any, shape: Any, dtype: Any, init: Any, context: hk.GetterContext) -> Any:
        value = next_creator(shape, dtype, init)
        return jax.sharding.reshard(value, P(None, "m")) if len(shape) == 2 else value

    def resharded(x: Any) -> Any:
        with hk.custom_creator(reshard):
            return model(x)

    def compile_init(function: Any) -> Any:
        x = jax.ShapeDtypeStruct((1, SIZE), jnp.float32)
        return jax.jit(hk.transform(function).init).lower(RNG, x).compile()

    def holds_whole(compiled: Any) -> bool:
        memory = compiled.memory_analysis()
        return f"[{SIZE},{SIZE}]" in compiled.as_text() or (
            memory.output_size_in_bytes + memory.temp_size_in_bytes > 4 * SIZE * SIZE
        )

    mesh = jax.make_mesh((8,), ("m",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        assert not holds_whole(compile_init(oxh.Placement(oxh.alternate("m"), used=oxh.replicated)(model)))
        if kind == EXPLICIT:  # what one would write, whose copies show that these would be seen
            assert holds_whole(compile_init(resharded))


# Saved and restored.


@on_both_kinds
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (1, 8)], ids=str)
def test_a_checkpoint_keeps_the_placement(tmp_path, kind, sizes):
    """Parameters and optimizer, without a target, and on another mesh into what is said beforehand."""
    placement, optimizer = placement_on(kind), optax.adamw(1e-3)
    model = hk.transform(placement(mlp))

    def make() -> Any:
        params = model.init(RNG, X)
        return {"params": params, "opt_state": optimizer.init(params)}

    def describe() -> Any:
        params = placement.abstract(model.init, RNG, X)
        return {"params": params, "opt_state": abstract_state(optimizer, params)}

    with jax.set_mesh(make_mesh((kind, kind))):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, describe())
        state = jax.jit(make, out_shardings=shardings)()
    assert_placed(state["params"], make_mesh((kind, kind)), ALTERNATING)
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        assert_same_tree(checkpointer.restore(tmp_path / "a"), state)
        mesh = make_mesh((kind, kind), sizes)
        with jax.set_mesh(mesh):
            target = describe()
        restored = checkpointer.restore(tmp_path / "a", target)
    adam = restored["opt_state"][0]
    for tree in (restored["params"], adam.mu, adam.nu):
        assert_placed(tree, mesh, ALTERNATING)
    jax.tree.map(assert_same_values, restored, state)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda params: model.apply(params, None, X).sum()))(restored["params"])
        updates, _ = jax.jit(optimizer.update)(gradient, restored["opt_state"], restored["params"])
    assert_placed(updates, mesh, ALTERNATING)


def save_from_every_process(path: str) -> Any:
    """Run in two processes of four devices."""
    optimizer = optax.adamw(1e-3)
    for kind in (AUTO, EXPLICIT):
        model = hk.transform(placement_on(kind)(mlp))
        mesh = make_mesh((kind, kind))
        with jax.set_mesh(mesh), oxe.StandardCheckpointer() as checkpointer:
            params = jax.jit(model.init)(RNG, X)
            assert_placed(params, mesh, ALTERNATING)
            checkpointer.save(f"{path}/{kind.name}", {"params": params, "opt_state": optimizer.init(params)})


def test_two_processes_place_the_same(tmp_path):
    """And one process restores it, without a target, onto a mesh of its own eight devices."""
    run_on_devices(save_from_every_process, str(tmp_path), devices=4, processes=2)
    expected = jax.jit(hk.transform(mlp).init)(RNG, X)
    for kind in (AUTO, EXPLICIT):
        with oxe.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / kind.name)
        for tree in (restored["params"], restored["opt_state"][0].mu):
            assert_placed(tree, make_mesh((kind, kind)), ALTERNATING)
        assert_near(restored["params"], expected)


def test_in_a_new_process_apply_may_come_first():
    """In another order than `init` accesses them: `abstract` has traced `init` before."""

    def both() -> Any:
        first, second = hk.Linear(8, name="first"), hk.Linear(8, name="second")
        return lambda x: second(first(x)), (first, second)

    def of(placement: oxh.Placement) -> hk.MultiTransformed:
        def placed() -> Any:
            template, functions = both()
            return placement(template), tuple(placement(function) for function in functions)

        return hk.multi_transform(placed)

    specs = {"first": {"w": P(None, "m"), "b": P()}, "second": {"w": P("m", None), "b": P()}}
    mesh = make_mesh((AUTO, AUTO))
    with jax.set_mesh(mesh):
        params = jax.jit(of(oxh.Placement(oxh.alternate("m"))).init)(RNG, X)
        assert_placed(params, mesh, specs)
        placement = oxh.Placement(oxh.alternate("m"))
        model = of(placement)
        placement.abstract(model.init, RNG, X)
        jax.jit(model.apply[1])(params, None, X)
        assert jax.tree.map(lambda sharding: sharding.spec, placement.shardings(params)) == specs
        slipped = oxh.Placement(oxh.alternate("m"))
        jax.jit(of(slipped).apply[1])(params, None, X)
        assert slipped.shardings({"second": params["second"]})["second"]["w"].spec == P(None, "m")


# What Haiku builds models of.


def linear(size: int = 8) -> Callable[[Any], Any]:
    """A function, for Haiku's modules are made within one."""

    def call(x: Any) -> Any:
        return hk.Linear(size)(x)

    return call


def layer_stack(x: Any) -> Any:
    return hk.experimental.layer_stack(3)(linear())(x)


def batch_norm(x: Any) -> Any:
    h = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(8)(x), is_training=True)
    return hk.Linear(8)(h)


def lifted(x: Any) -> Any:
    """Modules whose inner names are those of one outside."""
    inner = hk.transform(lambda x: hk.Linear(8)(hk.Linear(8)(x)))
    params = hk.lift(inner.init, name="lifted")(hk.next_rng_key() if hk.running_init() else None, x)
    return inner.apply(params, None, x) + hk.Linear(8)(x)


def transparently_lifted(x: Any) -> Any:
    inner = hk.transform(linear())
    params = hk.transparent_lift(inner.init)(hk.next_rng_key() if hk.running_init() else None, x)
    return inner.apply(params, None, x)


def ensemble(x: Any) -> Any:
    """Three of them, by `jax.vmap` of an inner `init`."""
    inner = hk.transform(linear())
    init = hk.lift(lambda rng, x: jax.vmap(inner.init, (0, None))(jax.random.split(rng, 3), x), name="ensemble")
    params = init(hk.next_rng_key() if hk.running_init() else RNG, x)
    return jax.vmap(inner.apply, in_axes=(0, None, None))(params, None, x).sum(0)


def vmapped(x: Any) -> Any:
    return hk.vmap(linear(), split_rng=False)(x)


def scanned(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        return hk.Linear(8)(carry), None

    return step(x, None)[0] if hk.running_init() else hk.scan(step, x, jnp.arange(3))[0]


def shared(x: Any) -> Any:
    """One module, called twice."""
    linear = hk.Linear(8)
    return linear(linear(hk.Linear(8, name="other")(x)))


def nested(x: Any) -> Any:
    class Block(hk.Module):
        def __call__(self, x: Any) -> Any:
            return hk.Sequential([hk.Linear(16), jax.nn.relu, hk.Linear(8)])(x)

    return Block()(Block()(x))


def rematerialized(x: Any) -> Any:
    return hk.remat(hk.Linear(8))(x)


def branch(x: Any) -> Any:
    linear = hk.Linear(8)
    return linear(x) if hk.running_init() else hk.cond(True, linear, lambda x: x, x)


def attention(x: Any) -> Any:
    return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(x, x, x)


def of_surroundings(x: Any) -> Any:
    """An initializer that uses what it closes over."""
    w = hk.get_parameter("w", (8, 8), init=lambda shape, dtype: jnp.broadcast_to(x.mean(), shape).astype(dtype))
    return x @ w


COLUMNS, ROWS = P(None, "m"), P("m", None)
MODELS: dict[Callable[..., Any], dict[str, P]] = {
    layer_stack: {"__layer_stack_no_per_layer/linear/w": P(None, None, "m")},
    batch_norm: {"linear/w": COLUMNS, "batch_norm/scale": P(), "linear_1/w": ROWS},
    lifted: {"lifted/linear_1/w": COLUMNS, "lifted/linear/w": ROWS, "linear/w": COLUMNS},
    transparently_lifted: {"linear/w": COLUMNS},
    ensemble: {"ensemble/linear/w": P(None, None, "m")},
    vmapped: {"linear/w": COLUMNS},
    scanned: {"linear/w": COLUMNS},
    rematerialized: {"linear/w": COLUMNS},
    branch: {"linear/w": COLUMNS},
    shared: {"other/w": COLUMNS, "linear/w": ROWS},
    nested: {
        "block/linear/w": COLUMNS,
        "block/linear_1/w": ROWS,
        "block_1/linear/w": COLUMNS,
        "block_1/linear_1/w": ROWS,
    },
    attention: {"multi_head_attention/linear/w": ROWS},
    of_surroundings: {"~/w": COLUMNS},
}


@on_both_kinds
@pytest.mark.parametrize(("model", "specs"), MODELS.items(), ids=[model.__name__ for model in MODELS])
def test_each_kind_of_module_is_placed(model, specs, kind):
    """As decided on first access, in each trace; with the same values, outputs and gradients as not placed."""
    placement = placement_on(kind)
    placed, plain = hk.transform_with_state(placement(model)), hk.transform_with_state(model)
    expected = jax.jit(plain.init)(RNG, X)
    mesh = make_mesh((kind, kind))
    with jax.set_mesh(mesh):
        for _ in range(2):
            params, state = made = jax.jit(functools.partial(placed.init))(RNG, X)
            assert_placed(made, mesh, jax.tree.map(lambda sharding: sharding.spec, placement.shardings(made)))
            for name, spec in specs.items():
                module, _, leaf = name.rpartition("/")
                assert_placed(params[module][leaf], mesh, spec)
            assert_near(made, expected)
            target = placement.abstract(placed.init, RNG, X)
            assert jax.tree.map(lambda leaf: leaf.sharding, target) == placement.shardings(made)
            output, _ = jax.jit(functools.partial(placed.apply))(params, state, None, X)
            assert_near(output, jax.jit(plain.apply)(*expected, None, X)[0])

    def gradient(apply: Any, params: Any, state: Any) -> Any:
        return jax.jit(jax.grad(lambda params: (apply(params, state, None, X)[0] ** 2).sum()))(params)

    with jax.set_mesh(mesh):
        ours = gradient(placed.apply, params, state)
    assert_near(ours, gradient(plain.apply, *expected))


@on_both_kinds
def test_state_is_placed_by_a_rule_of_its_own(kind):
    """Where it is made, and where it is set."""
    placement = oxh.Placement(oxh.replicated, state=oxh.by_name([("average|hidden", P(None, "m"))]))
    model = hk.transform_with_state(placement(batch_norm))
    mesh = make_mesh((kind, kind))
    specs = {"average": P(None, "m"), "counter": P(), "hidden": P(None, "m")}
    with jax.set_mesh(mesh):
        params, state = jax.jit(model.init)(RNG, X)
        _, after = jax.jit(model.apply)(params, state, None, X)
        assert_placed(after, mesh, dict.fromkeys(state, specs))
        assert_placed(state, mesh, dict.fromkeys(state, specs))
        _, target = placement.abstract(model.init, RNG, X)
    assert {leaf.sharding.spec for leaf in target["batch_norm/~/mean_ema"].values()} == set(specs.values())


def test_what_a_module_sees_is_not_how_it_lies():
    """Gathered for use, by the type that it sees; split between."""
    seen = []

    def model(x: Any) -> Any:
        w = hk.get_parameter("w", (8, 8), init=jnp.ones)
        seen.append(jax.typeof(w).sharding.spec)
        return x @ w

    mesh = make_mesh((EXPLICIT, EXPLICIT))
    transformed = hk.transform(oxh.Placement(oxh.alternate("m"), used=oxh.replicated)(model))
    with jax.set_mesh(mesh):
        params = jax.jit(transformed.init)(RNG, X)
        jax.jit(transformed.apply)(params, None, X)
    assert seen == [P(None, None)] * 2
    assert_placed(params, mesh, {"~": {"w": COLUMNS}})


def test_apply_places_what_it_is_given_elsewhere():
    """Parameters that were made without a placement."""
    params = hk.transform(mlp).init(RNG, X)
    placement = oxh.Placement(oxh.alternate("m"))
    model = hk.transform(placement(mlp))
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        placement.abstract(model.init, RNG, X)
        whole = jax.jit(model.apply).lower(params, None, X).as_text()
        assert whole.count("sharding_constraint") >= 6
        assert_near(jax.jit(model.apply)(params, None, X), hk.transform(mlp).apply(params, None, X))


def test_a_mesh_may_be_passed_where_its_axes_are_auto():
    """Without `jax.set_mesh`."""
    mesh = make_mesh((AUTO, AUTO))
    placement = oxh.Placement(oxh.alternate("m"), mesh=mesh)
    model = hk.transform(placement(mlp))
    assert_placed(jax.jit(model.init)(RNG, X), mesh, ALTERNATING)
    assert_placed(model.init(RNG, X), mesh, ALTERNATING)
    assert placement.abstract(model.init, RNG, X)["mlp/~/linear_1"]["w"].sharding == NamedSharding(mesh, ROWS)


class InNumberedModules(hk.LayerStackTransparencyMapping):
    """Gives each layer of a stack a module of its own."""

    def stacked_to_flat(self, stacked_module_name: str, scan_index: int) -> str:
        return f"{stacked_module_name}_{scan_index}"

    def flat_to_stacked(self, unstacked_module_name: str) -> tuple[str, int] | None:
        name, _, index = unstacked_module_name.rpartition("_")
        return (name, int(index)) if index.isdigit() else None


@on_both_kinds
def test_layers_that_haiku_names_anew_are_placed_and_not_known(kind):
    """After they were made: they lie as decided; of which names `shardings` does not learn, and says so."""
    placement = placement_on(kind)

    def stack(x: Any) -> Any:
        return hk.layer_stack(2, transparency_map=InNumberedModules())(linear())(x)

    model = hk.transform(placement(stack))
    mesh = make_mesh((kind, kind))
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(RNG, X)
        assert_placed(params, mesh, {name: {"w": COLUMNS, "b": P()} for name in ("linear_0", "linear_1")})
        assert_near(jax.jit(model.apply)(params, None, X), hk.transform(stack).apply(params, None, X))
        with pytest.raises(ValueError, match=r"linear_1/w \(8, 8\) has not been accessed by this name"):
            placement.shardings(params)


# Rules.


def parameter(shape: tuple[int, ...], *, name: str = "mlp/~/linear_0/w", matrix_index: int = 0) -> oxh.Parameter:
    return oxh.Parameter(
        name=name, shape=shape, dtype=np.float32, index=9, matrix_index=matrix_index, axis_sizes={"d": 2, "m": 4}
    )


@pytest.mark.parametrize(
    ("rule", "of", "spec"),
    [
        pytest.param(oxh.alternate("m"), parameter((8, 8)), COLUMNS, id="the first matrix"),
        pytest.param(oxh.alternate("m"), parameter((8, 8), matrix_index=3), ROWS, id="the fourth matrix"),
        pytest.param(oxh.alternate("m"), parameter((8,)), None, id="a vector"),
        pytest.param(oxh.alternate("m"), parameter((1, 8)), None, id="a row to broadcast"),
        pytest.param(oxh.alternate("m"), parameter((3, 3, 8, 8)), None, id="a convolution"),
        pytest.param(oxh.replicated, parameter((8, 8)), P(), id="replicated"),
        pytest.param(
            oxh.by_name([("w$", ROWS), ("", P())]), parameter((8, 8)), ROWS, id="the first name that is found"
        ),
        pytest.param(oxh.by_name([("^w", ROWS)]), parameter((8, 8)), None, id="no name that is found"),
        pytest.param(oxh.largest_dimension("m"), parameter((8, 16)), COLUMNS, id="the largest"),
        pytest.param(oxh.largest_dimension("m"), parameter((8, 8)), COLUMNS, id="the last of equals"),
        pytest.param(oxh.largest_dimension("m"), parameter((8, 9)), ROWS, id="the largest that is divided"),
        pytest.param(oxh.largest_dimension("m"), parameter((3, 9)), None, id="none that is divided"),
        pytest.param(oxh.largest_dimension("m"), parameter((0, 3)), None, id="nothing to divide"),
        pytest.param(oxh.largest_dimension("m", min_size=65), parameter((8, 8)), None, id="not worth it"),
        pytest.param(oxh.largest_dimension("m"), parameter(()), None, id="a scalar"),
        pytest.param(
            oxh.first_of(oxh.by_name([("b$", P("d"))]), oxh.alternate("m")), parameter((8, 8)), COLUMNS, id="next"
        ),
        pytest.param(oxh.first_of(), parameter((8, 8)), None, id="none of none"),
    ],
)
def test_a_rule_says(rule, of, spec):
    """From what it is told, alone."""
    assert rule(of) == spec


def test_a_rule_is_told_of_each_parameter_once():
    """In the order of access, by full name, with the sizes of the mesh."""
    told: list[oxh.Parameter] = []

    def rule(parameter: oxh.Parameter) -> None:
        told.append(parameter)

    model = hk.transform(oxh.Placement(rule)(shared))
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        params = jax.jit(model.init)(RNG, X)
        jax.jit(model.apply)(params, None, X)
    assert [(each.name, each.shape, each.index, each.matrix_index) for each in told] == [
        ("other/w", (8, 8), 0, 0),
        ("other/b", (8,), 1, 1),
        ("linear/w", (8, 8), 2, 1),
        ("linear/b", (8,), 3, 2),
    ]
    assert all(each.axis_sizes == {"d": 2, "m": 4} for each in told)
    assert all(each.dtype == jnp.float32 for each in told)


# What does not fit.


def refusal(placement: oxh.Placement, model: Any, kinds: tuple[AxisType, AxisType] = (AUTO, AUTO), x: Any = X) -> str:
    with jax.set_mesh(make_mesh(kinds)), pytest.raises(ValueError, match="cannot place what Haiku makes") as error:
        jax.jit(hk.transform(placement(model)).init)(RNG, x)
    return str(error.value)


@on_both_kinds
def test_all_that_does_not_fit_is_listed(kind):
    """By name, with the shape, the spec and what to do."""

    def model(x: Any) -> Any:
        return hk.nets.MLP([10, 6, 16])(x)

    sizes = {"d": 2, "m": 4}
    rule = oxh.by_name([("linear_2/w", P("d", "x")), ("linear_2/b", P("d", None)), ("w", COLUMNS)])
    assert refusal(oxh.Placement(rule, used=oxh.replicated), model, (kind, kind)).splitlines() == [
        "cannot place what Haiku makes:",
        f"  mlp/~/linear_0/w (8, 10): {COLUMNS} splits 10 over ('m',), of [4] devices, which does not divide it; "
        'decide otherwise for it, or pass indivisible="replicate"',
        f"  mlp/~/linear_1/w (10, 6): {COLUMNS} splits 6 over ('m',), of [4] devices, which does not divide it; "
        'decide otherwise for it, or pass indivisible="replicate"',
        f"  mlp/~/linear_2/w (6, 16): {P('d', 'x')} names ['x'], and the mesh has the axes {sizes}",
        f"  mlp/~/linear_2/b (16,): {P('d', None)} is for 2 dimensions; of a stack of layers, give it for one layer",
    ]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        pytest.param(P("m", "m"), "names ['m'] more than once", id="an axis twice"),
        pytest.param(P(("d", "m"), "d"), "names ['d'] more than once", id="an axis twice, once with another"),
        pytest.param(P(P.UNCONSTRAINED, "m"), "says more than where it lies", id="an open dimension"),
        pytest.param(P("d", unreduced={"m"}), "says more than where it lies", id="a pending sum"),
    ],
)
def test_a_spec_that_is_no_place_is_refused(spec, says):
    """By the name of the parameter."""
    refused = refusal(oxh.Placement(oxh.by_name([("w", spec)])), linear())
    assert "linear/w (8, 8): " in refused
    assert says in refused


@on_every_kind
def test_a_dimension_may_be_split_over_several_axes_of_one_type(kinds):
    """In their order. JAX has no order between those of two types, and they are refused."""
    mesh = make_mesh(kinds)
    specs = {"w": P(("d", "m"), None), "b": P(("m", "d"))}
    placement = oxh.Placement(oxh.by_name(list(specs.items())), used=oxh.replicated)
    if len(set(kinds)) > 1:
        assert "splits one dimension over ('d', 'm'), of which some are explicit" in refusal(placement, linear(), kinds)
        return
    with jax.set_mesh(mesh):
        params = jax.jit(hk.transform(placement(linear())).init)(RNG, X)
    assert_placed(params["linear"], mesh, specs)


@on_both_kinds
def test_what_is_not_divided_may_be_whole(kind):
    """By choice; the other dimensions are split still."""

    def model(x: Any) -> Any:
        return hk.Linear(10)(x)

    placement = oxh.Placement(oxh.by_name([("w", P("d", "m"))]), used=oxh.replicated, indivisible="replicate")
    mesh = make_mesh((kind, kind))
    transformed = hk.transform(placement(model))
    with jax.set_mesh(mesh):
        assert_placed(jax.jit(transformed.init)(RNG, X), mesh, {"linear": {"w": P("d", None), "b": P()}})
        assert placement.abstract(transformed.init, RNG, X)["linear"]["w"].sharding.spec == P("d", None)


def test_a_placement_is_for_the_model_whose_init_was_traced_last():
    """Another one by the same names has other shapes. A first trace with a wrong input does no harm."""
    placement = oxh.Placement(oxh.alternate("m"))
    first, second = (hk.transform(placement(linear(size))) for size in (8, 16))
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        params = jax.jit(first.init)(RNG, X)
        wide = jax.jit(second.init)(RNG, X)
        assert_placed(wide["linear"], make_mesh((AUTO, AUTO)), {"w": P(None, "m"), "b": P()})
        with pytest.raises(ValueError, match=r"linear/w has the shape \(8, 8\), and had \(8, 16\) when `init` made it"):
            first.apply(params, None, X)
        assert placement.abstract(first.init, RNG, X)["linear"]["w"].shape == (8, 8)
        assert_near(first.apply(params, None, X), hk.transform(linear()).apply(params, None, X))


def test_what_is_decided_on_one_mesh_is_decided_anew_on_another():
    """By the same indices: a run that goes on comes to what a new process would."""
    placement = oxh.Placement(oxh.first_of(oxh.largest_dimension("m"), oxh.alternate("d")))
    model = hk.transform(placement(linear(12)))
    specs = {(2, 4): {"w": P(None, "m"), "b": P("m")}, (1, 8): {"w": P("m", None), "b": P()}}
    for sizes, expected in (*specs.items(), *specs.items()):
        mesh = make_mesh((AUTO, AUTO), sizes)
        with jax.set_mesh(mesh):
            assert_placed(jax.jit(model.init)(RNG, X)["linear"], mesh, expected)
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        params = jax.jit(model.init)(RNG, X)
    with jax.set_mesh(make_mesh((AUTO, AUTO), (1, 8))):
        assert placement.shardings(params)["linear"]["w"].spec == P("m", None)


def test_two_models_of_one_placement_are_numbered_apart():
    """Each from its first matrix on."""
    placement = oxh.Placement(oxh.alternate("m"))
    mesh = make_mesh((AUTO, AUTO))
    with jax.set_mesh(mesh):
        for name in ("encoder", "decoder"):
            params = jax.jit(hk.transform(placement(lambda x, name=name: hk.Linear(8, name=name)(x))).init)(RNG, X)
            assert_placed(params, mesh, {name: {"w": P(None, "m"), "b": P()}})
        shardings = placement.shardings({"encoder": params["decoder"]})
    assert shardings["encoder"]["w"].spec == P(None, "m")


def test_an_inner_transform_that_is_not_lifted_is_named_apart():
    """Its names are those of the model, and nothing tells the two apart."""

    def model(x: Any) -> Any:
        inner = hk.transform(linear(4))
        return hk.Linear(8)(x)[:, :4] + inner.apply(inner.init(jax.random.key(0), x), None, x)

    assert "linear/w has the shape (8, 4) and the shape (8, 8); lift an inner transform by `hk.lift`" in refusal(
        oxh.Placement(oxh.replicated), model
    )


def test_names_with_slashes_are_not_confused():
    """A parameter `b/w` of `a`, and a parameter `w` of `a/b`."""

    def model(x: Any) -> Any:
        class Block(hk.Module):
            def __call__(self, x: Any) -> Any:
                return hk.Linear(8, with_bias=False, name="b")(x) + hk.get_parameter("b/w", [8], init=jnp.ones)

        return Block(name="a")(x)

    mesh = make_mesh((AUTO, AUTO))
    placement = oxh.Placement(lambda parameter: P("m") if len(parameter.shape) == 1 else P(None, "m"))
    with jax.set_mesh(mesh):
        params = jax.jit(hk.transform(placement(model)).init)(RNG, X)
        assert_placed(params, mesh, {"a": {"b/w": P("m")}, "a/b": {"w": P(None, "m")}})
        assert jax.tree.map(lambda sharding: sharding.spec, placement.shardings(params)) == {
            "a": {"b/w": P("m")},
            "a/b": {"w": P(None, "m")},
        }


def test_what_a_lifted_module_and_one_outside_have_in_common_holds_for_both():
    """Both are gathered for use, though they are stored otherwise; `apply` knows them by one name."""

    def model(x: Any) -> Any:
        inner = hk.transform(linear())
        params = hk.lift(inner.init, name="lifted")(hk.next_rng_key() if hk.running_init() else None, x)
        return inner.apply(params, None, hk.Linear(8)(x))

    mesh = make_mesh((EXPLICIT, EXPLICIT))
    placed, plain = hk.transform(placement_on(EXPLICIT)(model)), hk.transform(model)
    with jax.set_mesh(mesh):
        params = jax.jit(placed.init)(RNG, X)
        specs = {"lifted/linear": {"w": P(None, "m"), "b": P()}, "linear": {"w": P("m", None), "b": P()}}
        assert_placed(params, mesh, specs)
        result = jax.jit(placed.apply)(params, None, X)
    assert_near(result, plain.apply(jax.device_get(params), None, X))


def test_state_that_is_lifted_by_one_name_is_left_as_it_lies():
    """Where the rule says one thing of the one and another of the other, which `apply` cannot tell apart."""

    def count(x: Any) -> Any:
        counts = hk.get_state("counts", (8,), init=jnp.zeros)
        hk.set_state("counts", counts + 1)
        return x

    def model(x: Any) -> Any:
        inner = hk.transform_with_state(count)
        for name in ("one", "two"):
            init, updater = hk.lift_with_state(inner.init, name=name)
            _, state = inner.apply(*init(None, x), None, x)
            updater.update(state)
        return x

    mesh = make_mesh((EXPLICIT, EXPLICIT))
    rule = oxh.by_name([("one/", P("d")), ("two/", P("m"))])
    placed = hk.transform_with_state(oxh.Placement(oxh.replicated, state=rule)(model))
    with jax.set_mesh(mesh):
        params, state = jax.jit(placed.init)(RNG, X)
        names = [name for name in state if name.startswith(("one/", "two/"))]
        specs = {name: {"counts": P("d") if name.startswith("one/") else P("m")} for name in names}
        assert len(names) == 2
        assert_placed(state, mesh, specs)
        _, state = jax.jit(placed.apply)(params, state, None, X)
        assert_placed(state, mesh, specs)


@on_both_kinds
def test_an_initializer_may_use_other_parameters(kind):
    """And state; it is run as it is then."""

    def scaled(shape: Any, dtype: Any) -> Any:
        hk.set_state("calls", jnp.ones(8))
        return hk.get_parameter("gain", (8,), init=lambda shape, dtype: 2 * jnp.ones(shape, dtype)) * jnp.ones(
            shape, dtype
        )

    def model(x: Any) -> Any:
        return x @ hk.get_parameter("w", (8, 8), init=scaled)

    mesh = make_mesh((kind, kind))
    placed = hk.transform_with_state(placement_on(kind)(model))
    with jax.set_mesh(mesh):
        params, state = jax.jit(placed.init)(RNG, X)
        assert_placed((params, state), mesh, ({"~": {"w": P(None, "m"), "gain": P()}}, {"~": {"calls": P()}}))
        result, _ = jax.jit(placed.apply)(params, state, None, X)
    np.testing.assert_array_equal(params["~"]["w"], np.full((8, 8), 2.0))
    assert_near(result, 2 * X.sum(1, keepdims=True).repeat(8, 1))


@on_every_kind
def test_an_initializer_is_called_once(kinds):
    """What draws from a source of its own draws what it would."""
    calls: list[tuple[int, ...]] = []

    def initializer(shape: Any, dtype: Any) -> Any:
        calls.append(tuple(shape))
        return jnp.ones(shape, dtype)

    def model(x: Any) -> Any:
        return x @ hk.get_parameter("w", (8, 8), init=initializer)

    with jax.set_mesh(make_mesh(kinds)):
        jax.jit(hk.transform(placement_on(*kinds)(model)).init)(RNG, X)
    assert calls == [(8, 8)]


@jitted_and_not
@on_both_kinds
def test_state_may_be_of_numpy_and_of_python(kind, jit):
    """Arrays of NumPy are placed; numbers lie wherever JAX has numbers."""

    def model(x: Any) -> Any:
        hk.get_state("table", (8,), init=np.zeros)
        hk.set_state("count", np.int32(3))
        hk.set_state("rate", 0.5)
        return x

    mesh = make_mesh((kind, kind))
    placement = oxh.Placement(oxh.replicated, state=lambda entry: P("m") if entry.shape else P())
    placed = hk.transform_with_state(placement(model))
    with jax.set_mesh(mesh):
        _, state = jit(placed.init)(RNG, X)
        _, target = placement.abstract(placed.init, RNG, X)
    assert_placed(state["~"]["table"], mesh, P("m"))
    assert_placed(state["~"]["count"], mesh, P())
    assert float(state["~"]["rate"]) == 0.5
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, target) == {"~": {"table": P("m"), "count": P(), "rate": P()}}


@on_both_kinds
def test_state_may_be_a_tree_and_change_its_shape(kind):
    """Each leaf is decided for by its own name, and each shape by itself."""
    told: dict[str, set[tuple[int, ...]]] = defaultdict(set)

    def rule(entry: oxh.Parameter) -> P:
        told[entry.name].add(entry.shape)
        return P(None, "m") if len(entry.shape) == 2 else P("m")

    def model(x: Any) -> Any:
        hk.set_state("moments", {"mean": jnp.ones(8), "table": jnp.ones((4, 4))})
        hk.set_state("last", x)
        return x

    mesh = make_mesh((kind, kind))
    placement = oxh.Placement(oxh.replicated, state=rule)
    placed = hk.transform_with_state(placement(model))
    with jax.set_mesh(mesh):
        params, state = jax.jit(placed.init)(RNG, X)
        specs = {"~": {"moments": {"mean": P("m"), "table": P(None, "m")}, "last": P(None, "m")}}
        assert_placed(state, mesh, specs)
        assert jax.tree.map(lambda sharding: sharding.spec, placement.shardings(({}, state))[1]) == specs
        _, state = jax.jit(placed.apply)(params, state, None, np.ones((6, 4), np.float32))
        assert_placed(state, mesh, specs)
    assert told == {"~/moments/mean": {(8,)}, "~/moments/table": {(4, 4)}, "~/last": {(4, 8), (6, 4)}}


def test_without_a_mesh_there_is_nothing_to_place_on():
    """In `init`, in `apply`, and before them; explicit axes want to be set."""
    placement = oxh.Placement(oxh.alternate("m"))
    model = hk.transform(placement(mlp))
    params = hk.transform(mlp).init(RNG, X)
    for call in (
        lambda: model.init(RNG, X),
        lambda: jax.jit(model.apply)(params, None, X),
        lambda: placement.abstract(model.init, RNG, X),
        lambda: placement.shardings(params),
    ):
        with pytest.raises(ValueError, match=r"there is no mesh to place parameters on\n  fix: .*jax.set_mesh"):
            call()
    explicit = oxh.Placement(oxh.alternate("m"), mesh=make_mesh((AUTO, EXPLICIT)))
    with pytest.raises(ValueError, match=r"the axes \('m',\) of the mesh are explicit, and no mesh is set"):
        jax.jit(hk.transform(explicit(mlp)).init)(RNG, X)


@pytest.mark.parametrize(
    ("passed", "present"),
    [
        pytest.param(((EXPLICIT, EXPLICIT), (1, 8)), ((EXPLICIT, EXPLICIT), (2, 4)), id="other sizes"),
        pytest.param(((AUTO, AUTO), (2, 4)), ((EXPLICIT, EXPLICIT), (2, 4)), id="auto, and explicit is set"),
        pytest.param(((EXPLICIT, EXPLICIT), (2, 4)), ((AUTO, AUTO), (2, 4)), id="explicit, and auto is set"),
    ],
)
def test_a_mesh_that_is_passed_agrees_with_the_one_that_is_set(passed, present):
    """On Explicit axes there is but one."""
    placement = oxh.Placement(oxh.alternate("m"), mesh=make_mesh(*passed))
    model = hk.transform(placement(linear()))
    with jax.set_mesh(make_mesh(*present)):
        for call in (model.init, jax.jit(model.init), functools.partial(placement.abstract, model.init)):
            with pytest.raises(
                ValueError, match=r"the mesh that was passed has the axes d=.* and that of `jax.set_mesh` d="
            ):
                call(RNG, X)


def test_an_abstract_mesh_wants_one_that_is_set():
    """It has no devices to place on."""
    mesh = make_mesh((AUTO, AUTO))
    placement = oxh.Placement(oxh.alternate("m"), mesh=mesh.abstract_mesh)
    model = hk.transform(placement(linear()))
    with pytest.raises(ValueError, match="there is no mesh to place parameters on"):
        jax.jit(model.init)(RNG, X)
    with jax.set_mesh(mesh):
        assert_placed(jax.jit(model.init)(RNG, X)["linear"], mesh, {"w": P(None, "m"), "b": P()})
        assert placement.abstract(model.init, RNG, X)["linear"]["w"].sharding == NamedSharding(mesh, P(None, "m"))


def test_a_mesh_of_auto_axes_that_is_passed_counts_over_another_that_is_set():
    """A constraint names its mesh."""
    mesh = make_mesh((AUTO, AUTO), (1, 8))
    model = hk.transform(oxh.Placement(oxh.alternate("m"), mesh=mesh)(linear()))
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        assert_placed(jax.jit(model.init)(RNG, X)["linear"], mesh, {"w": P(None, "m"), "b": P()})


def test_a_passed_mesh_serves_within_shard_map():
    """Where its axes are manual, there is nothing left to place."""
    mesh = make_mesh((AUTO, AUTO))
    model = hk.transform(oxh.Placement(oxh.alternate("m"), mesh=mesh)(linear()))
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(RNG, X)
        mapped = jax.shard_map(
            lambda params, x: model.apply(params, None, x), in_specs=(P(), P("d")), out_specs=P("d"), axis_names={"d"}
        )
        assert_near(jax.jit(mapped)(params, X), model.apply(params, None, X))


def test_shardings_within_jit_are_on_the_abstract_mesh():
    """JAX tells no other one there."""
    placement = oxh.Placement(oxh.alternate("m"))
    model = hk.transform(placement(linear()))
    mesh, found = make_mesh((AUTO, AUTO)), []
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(RNG, X)
        jax.jit(lambda params: found.append(placement.shardings(params)))(params)
    assert found[0]["linear"]["w"] == NamedSharding(mesh.abstract_mesh, P(None, "m"))


def test_shardings_are_of_what_has_been_accessed():
    """Each other leaf is listed."""
    params = hk.transform(mlp).init(RNG, X)
    with (
        jax.set_mesh(make_mesh((AUTO, AUTO))),
        pytest.raises(ValueError, match="has not been accessed by this name") as error,
    ):
        oxh.Placement(oxh.alternate("m")).shardings(params)
    assert len(str(error.value).splitlines()) == 1 + 6


def test_shardings_are_of_arrays_with_their_shapes():
    """Or what was decided is not for them."""
    placement = oxh.Placement(oxh.replicated)
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        hk.transform(placement(linear())).init(RNG, X)
        for shape in ((8,), (8, 9)):
            with pytest.raises(ValueError, match=r"linear/w \(8,.*\) had the shape \(8, 8\) when it was placed"):
                placement.shardings({"linear": {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}})


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        pytest.param(
            lambda: oxh.Placement(oxh.replicated, indivisible="pad"),
            ValueError,
            r"indivisible must be one of \['error', 'replicate'\], not 'pad'",
            id="no such choice",
        ),
        pytest.param(lambda: oxh.Placement("m"), TypeError, "stored must be a rule, .*, not 'm'", id="an axis"),
        pytest.param(
            lambda: oxh.Placement(oxh.replicated, used=P()), TypeError, "used must be a rule", id="a spec to use by"
        ),
        pytest.param(
            lambda: oxh.Placement(oxh.replicated, state=P()), TypeError, "state must be a rule", id="a spec of state"
        ),
        pytest.param(
            lambda: oxh.by_name([("(w", P())]),
            ValueError,
            r"'\(w', which is no regular expression",
            id="a bad expression",
        ),
        pytest.param(lambda: oxh.by_name({"w": P()}), ValueError, "by_name wants pairs .* not 'w'", id="a dict"),
        pytest.param(lambda: oxh.by_name([("w", None)]), ValueError, "by_name wants pairs", id="no spec"),
        pytest.param(
            lambda: oxh.by_name([], unmatched="warn"),
            ValueError,
            "unmatched must be one of",
            id="no such choice by name",
        ),
        pytest.param(
            lambda: oxh.Placement(oxh.replicated)(hk.transform(mlp)),
            TypeError,
            r"hk.transform\(placement\(function\)\)",
            id="the wrong way round",
        ),
        pytest.param(
            lambda: oxh.Placement(oxh.replicated, mesh=make_mesh((AUTO, AUTO))).shardings((1, 2, 3)),
            TypeError,
            "parameters, or these and a state",
            id="shardings of something else",
        ),
    ],
)
def test_what_is_no_choice_is_said_at_once(make, error, says):
    """Not where the function is traced."""
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("said", [(None, "m"), "m", oxh.alternate("m")], ids=["a tuple", "an axis", "a rule"])
def test_a_rule_gives_a_spec(said):
    """Or the parameter is named."""
    with (
        jax.set_mesh(make_mesh((AUTO, AUTO))),
        pytest.raises(TypeError, match=r"a rule must give a PartitionSpec or None, and gave .* for linear/w"),
    ):
        hk.transform(oxh.Placement(lambda parameter: said)(linear())).init(RNG, X)


def test_an_axis_that_the_mesh_lacks_is_refused_by_every_rule():
    """In the words of a spec that names it."""
    for rule in (oxh.alternate("x"), oxh.largest_dimension("x")):
        assert "names ['x'], and the mesh has the axes {'d': 2, 'm': 4}" in refusal(oxh.Placement(rule), linear())


@pytest.mark.parametrize(
    "rules",
    [
        lambda rule: {"stored": rule},
        lambda rule: {"stored": oxh.replicated, "used": rule},
        lambda rule: {"stored": oxh.first_of(rule, oxh.alternate("m"))},
    ],
    ids=["stored", "used", "among others"],
)
def test_an_expression_that_is_found_in_no_name_is_refused(rules):
    """A misspelt one would leave all as it was, silently; a rule for several models says that it is one."""
    pairs = [("linear/w", P()), ("linaer/b", P("m"))]
    refused = refusal(oxh.Placement(**rules(oxh.by_name(pairs))), linear())
    assert refused.splitlines()[1:] == [
        "  'linaer/b' is found in none of the names linear/w, linear/b; correct it, or pass unmatched=\"ignore\" to by_name"
    ]
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        hk.transform(oxh.Placement(**rules(oxh.by_name(pairs, unmatched="ignore")))(linear())).init(RNG, X)


def test_a_trace_that_fails_leaves_nothing():
    """Neither one that is refused, nor one in which the model itself fails."""

    def model(x: Any) -> Any:
        hk.get_parameter("early", (4,), init=jnp.ones)
        if x.shape[0] == 3:
            raise ZeroDivisionError
        return hk.Linear(8)(x)

    placement = oxh.Placement(oxh.by_name([("linear/w", P("m", None)), ("b", P("d"))]))
    with jax.set_mesh(make_mesh((AUTO, AUTO))):
        for x, error in ((X[:3], ZeroDivisionError), (X[:, :7], ValueError)):
            with pytest.raises(error):
                hk.transform(placement(model)).init(RNG, x)
            with pytest.raises(ValueError, match="has not been accessed"):
                placement.shardings({"~": {"early": X[0, :4]}})


def test_an_initializer_draws_the_keys_that_it_would():
    """Several, or none: what is drawn after it is the same. And it may ask for a sequence."""

    def model(x: Any) -> Any:
        def of_three(shape: Any, dtype: Any) -> Any:
            return sum(jax.random.normal(key, shape, dtype) for key in hk.next_rng_keys(3))

        pieces = [of_three, jnp.zeros, hk.initializers.RandomNormal(), hk.initializers.Orthogonal()]
        for name, init in zip("abcd", pieces, strict=True):
            hk.get_parameter(name, (8, 8), init=init)
        return x + jax.random.normal(hk.next_rng_key(), ())

    for kind, reserved in itertools.product((AUTO, EXPLICIT), (1, 3)):
        with jax.set_mesh(make_mesh((kind, kind))), hk.config.context(rng_reserve_size=reserved):
            params = jax.jit(hk.transform(oxh.Placement(oxh.alternate("m"), used=oxh.replicated)(model)).init)(RNG, X)
            expected = jax.jit(hk.transform(model).init)(RNG, X)
        assert_near(params, expected)
