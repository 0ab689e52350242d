"""Small inputs that real users hit, through every door: one case each, with its right answer.

The doors are `StandardCheckpointer`, a `CheckpointManager` with the handler, and one with `handler_registry` whose callers
know stock's arguments alone. Cases on another number of devices run in processes that have it, once each; what other files
show behind each door, such as restores in several processes, is not repeated here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import pathlib
import shutil
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import nnx
from fronts import FRONTS, OUR_FRONTS, REGISTRY, Front
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from nodes import Layer
from trees import Moments, array_state, assert_same_tree, assert_same_values, host_state, matrix, place

import orbax_explicit as oxe
from orbax_explicit.integrations import haiku as oxh
from orbax_explicit.integrations.optax import abstract_state
from orbax_explicit.testing import run_on_devices

# The fixture starts processes once; with several workers, one of them is to have all tests of this file.
pytestmark = pytest.mark.xdist_group("cases")

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
Policy = oxe.RestorePolicy


@pytest.fixture(params=FRONTS)
def front(request) -> Front:
    """Each door in turn."""
    return FRONTS[request.param]


@pytest.fixture(params=OUR_FRONTS)
def our_front(request) -> Front:
    """Each door at which a target and its leaves arrive as they are."""
    return OUR_FRONTS[request.param]


def make_mesh(sizes: tuple[int, int] = (2, 4), kind: AxisType = EXPLICIT) -> Mesh:
    return jax.make_mesh(sizes, ("d", "m"), axis_types=(kind, kind))


def struct(shape: tuple[int, ...] = (8, 8), dtype: Any = np.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# Meshes.


def test_an_explicit_target_under_an_auto_mesh_is_refused(tmp_path, mesh, our_front):
    """The error shows both; a mesh that is passed is taken, also there."""
    our_front.save(tmp_path / "a", {"w": place(mesh, matrix(), P("d", "m"))})
    target = {"w": struct(sharding=NamedSharding(mesh.abstract_mesh, P("d")))}
    auto = make_mesh(kind=AUTO)
    with jax.set_mesh(auto):
        with pytest.raises(oxe.MeshMismatchError) as error:
            our_front.restore(tmp_path / "a", target)
        restored = our_front.restore(tmp_path / "a", target, mesh=mesh)["w"]
    assert "(d=2 explicit, m=4 explicit)" in str(error.value)
    assert "(d=2 auto, m=4 auto)" in str(error.value)
    assert restored.sharding == NamedSharding(mesh, P("d"), memory_kind="device")


def test_a_mesh_at_hand_takes_the_recorded_specs(tmp_path, mesh, front):
    """Of other sizes, with the same axis names; all leaves on that one mesh."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "v": place(mesh, matrix(), P(None, ("d", "m")))}
    front.save(tmp_path / "a", state)
    other = make_mesh((4, 2))
    restored = front.restore(tmp_path / "a", mesh=other)
    for name, array in state.items():
        assert restored[name].sharding == NamedSharding(other, array.sharding.spec, memory_kind="device")
        assert_same_values(restored[name], array)


@pytest.mark.parametrize(
    ("trained", "resumed"),
    [pytest.param(AUTO, EXPLICIT, id="auto resumed as explicit"), pytest.param(EXPLICIT, AUTO, id="explicit as auto")],
)
@pytest.mark.parametrize("under_set_mesh", [True, False], ids=["under jax.set_mesh", "outside of it"])
def test_a_trainer_with_other_axis_types_resumes(tmp_path, front, trained, resumed, under_set_mesh):
    """`axis_types` in the policy does it, with the same specs and devices; under the mesh of the new trainer too."""
    saved = {"w": place(make_mesh(kind=trained), matrix(), P("d", "m")), "step": jnp.int32(5)}
    front.save(tmp_path / "a", saved)
    mesh = make_mesh(kind=resumed)
    policy = Policy(axis_types=resumed)
    if under_set_mesh:
        with jax.set_mesh(mesh):
            restored = front.restore(tmp_path / "a", policy=policy)
    else:
        restored = front.restore(tmp_path / "a", policy=policy)
    assert restored["w"].sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")
    assert restored["w"].sharding.mesh.axis_types == (resumed, resumed)
    assert_same_values(restored["w"], matrix())
    assert not restored["step"].committed


@pytest.mark.parametrize("indivisible", ["replicate", "error"])
def test_a_dimension_that_the_mesh_at_hand_does_not_divide_is(tmp_path, front, indivisible):
    """Whole, which the plan says; or refused by the name of the leaf."""
    saved_on = make_mesh((4, 2))
    state = {"odd": place(saved_on, matrix(6, 4), P("m", "d")), "even": place(saved_on, matrix(), P("m"))}
    front.save(tmp_path / "a", state)
    mesh = make_mesh((2, 4))
    policy = Policy(indivisible=indivisible)
    plan = oxe.plan_restore(front.item(tmp_path / "a"), mesh=mesh, policy=policy)
    if indivisible == "error":
        with pytest.raises(oxe.RestoreRefusedError) as error:
            front.restore(tmp_path / "a", mesh=mesh, policy=policy)
        (problem,) = error.value.problems
        assert plan.refused == (problem,)
        assert problem.affects == ("odd",)
        assert problem.could_not.startswith("cannot split a dimension of length 6 over m=4")
        return
    assert "whole along dimension 0 of (6, 4), which m=4 does not divide: odd" in str(plan)
    restored = front.restore(tmp_path / "a", mesh=mesh, policy=policy)
    assert restored["odd"].sharding == NamedSharding(mesh, P(None, "d"), memory_kind="device")
    assert restored["even"].sharding == NamedSharding(mesh, P("m"), memory_kind="device")
    assert_same_values(restored["odd"], matrix(6, 4))


def test_a_policy_puts_by_rules_what_was_on_no_mesh(tmp_path, mesh, front):
    """A NumPy leaf and an array of one device, onto the recorded mesh; the rest stays where it was, numbers too."""
    state = {
        "layer": {"kernel": matrix(), "bias": jax.device_put(matrix(8, 1), jax.devices()[3])},
        "w": place(mesh, -matrix(), P("m", "d")),
        "free": jnp.arange(8),
        "host": np.arange(3),
        "kernel_size": 3,
    }
    front.save(tmp_path / "a", state)
    policy = Policy(rules=[("kernel", P("d", "m")), ("^layer/bias$", P(("d", "m"))), ("^(w|free)$", P("d"))])
    restored = front.restore(tmp_path / "a", policy=policy)
    layer = restored["layer"]
    assert layer["kernel"].sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")
    assert layer["bias"].sharding == NamedSharding(mesh, P(("d", "m")), memory_kind="device")
    assert restored["free"].sharding == NamedSharding(mesh, P("d"), memory_kind="device")
    assert restored["w"].sharding == state["w"].sharding
    assert type(restored["host"]) is np.ndarray
    assert restored["kernel_size"] == 3
    for name in ("kernel", "bias"):
        assert_same_values(np.asarray(layer[name]), np.asarray(state["layer"][name]))


def test_a_tree_without_any_mesh_is_put_by_rules_on_the_mesh_at_hand(tmp_path, front):
    """A checkpoint of a single machine, onto a cluster; keys too."""
    state = {"kernel": matrix(), "scale": jax.device_put(matrix(8, 1)), "keys": jax.random.split(jax.random.key(0), 8)}
    front.save(tmp_path / "a", state)
    mesh = make_mesh((4, 2))
    policy = Policy(rules=[("kernel", P("d", "m")), ("", P("d"))])
    restored = front.restore(tmp_path / "a", mesh=mesh, policy=policy)
    assert restored["kernel"].sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")
    for name in ("scale", "keys"):
        assert restored[name].sharding == NamedSharding(mesh, P("d"), memory_kind="device")
        assert_same_values(restored[name], state[name])
    if front is not FRONTS[REGISTRY]:
        with pytest.raises(oxe.MeshMismatchError, match="there is no mesh to place it on"):
            front.restore(tmp_path / "a", policy=policy)


# Part of a checkpoint, and more than a checkpoint.


def bytes_read() -> int:
    """How many bytes TensorStore has read from files in this process."""
    (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for value in metric["values"])


def whole_state(mesh: Mesh) -> dict[str, Any]:
    """A few parameters, and much more beside them that does not compress."""
    noise = np.random.default_rng(0).integers(0, 2**32, (1024, 256), dtype=np.uint32)
    return {
        "params": {"w": place(mesh, matrix(), P("d", "m")), "b": place(mesh, matrix(), P("m"))},
        "opt": {"m": place(mesh, noise, P("d", "m")), "host": noise, "count": jnp.int32(7)},
    }


PARAMS = {"w": struct(), "b": struct()}


def test_part_of_a_checkpoint_is_restored(tmp_path, mesh, front):
    """`extra="ignore"` reads only that part's bytes; by default an error lists what would be left out."""
    state = whole_state(mesh)
    front.save(tmp_path / "a", state)
    target = {"params": PARAMS}

    with pytest.raises(oxe.RestoreRefusedError) as error:
        front.restore(tmp_path / "a", target)
    (problem,) = error.value.problems
    assert problem.could_not == "cannot restore into a target that lacks saved leaves"
    assert problem.affects == ("opt/count", "opt/host", "opt/m")
    assert "extra='ignore'" in problem.fix

    before = bytes_read()
    restored = front.restore(tmp_path / "a", target, policy=Policy(extra="ignore"))
    part = bytes_read() - before
    assert_same_tree(restored, {"params": state["params"]})
    front.restore(tmp_path / "a")
    whole = bytes_read() - before - part
    assert 2 * matrix().nbytes * 0.5 < part < 20_000
    assert whole > 2 * state["opt"]["host"].nbytes * 0.9


@pytest.mark.parametrize(
    ("target", "policy"),
    [
        pytest.param({"params": PARAMS}, Policy(extra="ignore"), id="extra='ignore'"),
        pytest.param({"params": PARAMS, "opt": dict.fromkeys(("m", "host", "count"), ...)}, None, id="placeholders"),
    ],
)
def test_what_is_left_out_need_not_be_there(tmp_path, mesh, front, target, policy):
    """It is never opened: its directories may be gone. A placeholder comes back as itself."""
    state = whole_state(mesh)
    front.save(tmp_path / "a", state, use_ocdbt=False)
    item = front.item(tmp_path / "a")
    for name in ("opt.m", "opt.host", "opt.count"):
        shutil.rmtree(item / name)
    restored = front.restore(tmp_path / "a", target, policy=policy)
    assert_same_tree(restored["params"], state["params"])
    assert restored.keys() == target.keys()
    if "opt" in target:
        assert all(leaf is ocp.PLACEHOLDER for leaf in restored["opt"].values())


def test_a_leaf_that_the_checkpoint_lacks_is_refused_by_name(tmp_path, mesh, front):
    """Whether the target has a value for it or not; the error says what would help."""
    state = {"w": place(mesh, matrix(), P("d", "m"))}
    front.save(tmp_path / "a", state)
    target = {"w": struct(), "new": {"a": struct(), "b": jnp.int32(1)}}
    with pytest.raises(oxe.RestoreRefusedError) as error:
        front.restore(tmp_path / "a", target)
    (problem,) = error.value.problems
    assert problem.could_not == "cannot restore leaves of the target that the checkpoint lacks"
    assert problem.affects == ("new/a", "new/b")
    assert "missing='keep'" in problem.fix
    with pytest.raises(
        oxe.RestoreRefusedError, match="cannot keep the target's value of leaves that are abstract"
    ) as e:
        front.restore(tmp_path / "a", target, policy=Policy(missing="keep"))
    assert e.value.problems[0].affects == ("new/a",)


def test_the_targets_own_values_are_kept(tmp_path, mesh, front):
    """The very objects, whatever they are, beside what is restored; and the plan says so."""
    state = {"w": place(mesh, matrix(), P("d", "m"))}
    front.save(tmp_path / "a", state)
    kept = {
        "on_mesh": place(mesh, -matrix(), P("m")),
        "free": jnp.arange(3),
        "key": jax.random.key(1),
        "numpy": np.arange(4),
        "int": 12345678,
        "str": "text",
        "left": ...,
    }
    restored = front.restore(tmp_path / "a", {"w": struct(), "new": kept}, policy=Policy(missing="keep"))
    assert_same_tree(restored["w"], state["w"])
    assert restored["new"].keys() == kept.keys()
    for name, value in kept.items():
        assert restored["new"][name] is value, name
    plan = oxe.plan_restore(front.item(tmp_path / "a"), {"w": struct(), "new": kept}, policy=Policy(missing="keep"))
    assert f"{len(kept)} x the target's own value, not read" in str(plan)


# Dtypes, shapes and names.


@pytest.mark.parametrize(
    ("dtype", "cast", "says"),
    [
        pytest.param(jnp.bfloat16, "same_kind", "", id="a float is cast to another"),
        pytest.param(jnp.bfloat16, "never", "cannot cast float32 to bfloat16 with cast='never'", id="unless never"),
        pytest.param(np.int32, "same_kind", "cannot cast float32 to int32 with cast='same_kind'", id="no int"),
        pytest.param(np.int32, "unsafe", "", id="an int where unsafe is said"),
    ],
)
def test_a_target_of_another_dtype(tmp_path, mesh, front, dtype, cast, says):
    """The layout stays; an array of one device, an uncommitted and a NumPy one are cast alike."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "free": jnp.float32(2), "host": matrix(), "n": 5}
    front.save(tmp_path / "a", state)
    target = {"w": struct(dtype=dtype), "free": struct((), dtype), "host": np.zeros((8, 8), dtype), "n": 0}
    if says:
        with pytest.raises(oxe.RestoreRefusedError) as error:
            front.restore(tmp_path / "a", target, policy=Policy(cast=cast))
        assert {problem.could_not for problem in error.value.problems} == {says}
        assert {path for problem in error.value.problems for path in problem.affects} == {"free", "host", "w"}
        return
    restored = front.restore(tmp_path / "a", target, policy=Policy(cast=cast))
    assert restored["w"].sharding == state["w"].sharding
    assert not restored["free"].committed
    assert restored["n"] == 5
    for name in ("w", "free", "host"):
        assert restored[name].dtype == dtype
        assert_same_values(np.asarray(restored[name]), np.asarray(state[name]).astype(dtype))


def test_every_leaf_of_another_shape_is_listed(tmp_path, mesh, front):
    """By name and with both shapes, all at once."""
    names = ("a", "b", "c")
    front.save(tmp_path / "a", {name: place(mesh, matrix(), P("d")) for name in names} | {"n": matrix()})
    target = {"a": struct((8, 4)), "b": struct(), "c": struct((8, 8, 1)), "n": np.zeros((4, 8), np.float32)}
    with pytest.raises(oxe.RestoreRefusedError) as error:
        front.restore(tmp_path / "a", target)
    found = {problem.could_not: problem.affects for problem in error.value.problems}
    assert found == {
        "cannot restore shape (8, 8) into shape (8, 4)": ("a",),
        "cannot restore shape (8, 8) into shape (8, 8, 1)": ("c",),
        "cannot restore shape (8, 8) into shape (4, 8)": ("n",),
    }


@pytest.mark.parametrize("with_target", [True, False], ids=["into a target", "without a target"])
@pytest.mark.parametrize(
    ("old", "new", "renames"),
    [
        pytest.param({"old": 0}, {"new": 0}, {"new": "old"}, id="a leaf"),
        pytest.param(
            {"net": {"body": {"a": 0, "b": 1}}, "z": 2},
            {"net": {"encoder": {"a": 0, "b": 1}}, "z": 2},
            {"net/encoder": "net/body"},
            id="a subtree",
        ),
        pytest.param({"w": 0, "v": 1}, {"w": 1, "v": 0}, {"w": "v", "v": "w"}, id="two that change places"),
        pytest.param(
            {"a/b": 0, "c": {3: 1}},
            {"x": 0, "c": {4: 1}},
            {("x",): ("a/b",), ("c", "4"): ("c", "3")},
            id="keys that are no plain names",
        ),
    ],
)
def test_what_was_saved_under_another_name_keeps_its_sharding(tmp_path, mesh, front, old, new, renames, with_target):
    """Renamed in the result, with values, layout and memory kind; the plan says where each is read from."""
    arrays = [
        place(mesh, matrix(), P("d", "m"), memory_kind="pinned_host"),
        place(mesh, -matrix(), P(("m", "d"))),
        place(mesh, 2 * matrix(), P(None, "m")),
    ]
    front.save(tmp_path / "a", jax.tree.map(arrays.__getitem__, old))
    expected = jax.tree.map(arrays.__getitem__, new)
    target = jax.tree.map(lambda _: struct(), new) if with_target else None
    policy = Policy(rename_leaves=renames)
    assert_same_tree(front.restore(tmp_path / "a", target, policy=policy), expected)
    plan = oxe.plan_restore(front.item(tmp_path / "a"), target, policy=policy)
    moved = [outcome for outcome in plan.outcomes if outcome.path != outcome.source]
    assert len(moved) == 2 or new == {"new": 0}
    assert [outcome for outcome in plan.outcomes if "renamed" in {c.kind for c in outcome.changes}] == moved


# Values on the host.


def on_host(leaf: Any) -> Any:
    """An array as NumPy, PRNG keys as their data, and a value on the host as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    is_keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_keys else leaf)


@pytest.mark.parametrize(
    "make_target",
    [
        pytest.param(lambda state: None, id="without a target"),
        pytest.param(lambda state: jax.tree.map(_as_struct, state), id="into an abstract target with shardings"),
    ],
)
def test_a_whole_tree_comes_back_as_numpy(tmp_path, mesh, our_front, make_target):
    """By `arrays="numpy"`: keys as their data, bfloat16, size zero, pinned memory; and no device gets an array."""
    state = {
        "arrays": array_state(mesh),
        "one_device": jax.device_put(matrix(), jax.devices()[3]),
        "moments": Moments(mean=place(mesh, matrix(), P("m")), variance=(jnp.float32(1), [])),
        "by_int": {0: place(mesh, matrix(), P("d"))},
        "host": host_state(),
    }
    our_front.save(tmp_path / "a", state)
    target = make_target(state)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    restored = our_front.restore(tmp_path / "a", target, policy=Policy(arrays="numpy"))
    assert {id(array) for array in jax.live_arrays()} <= before
    assert_same_tree(restored, jax.tree.map(on_host, state))


def _as_struct(leaf: Any) -> Any:
    return struct(leaf.shape, leaf.dtype, leaf.sharding) if isinstance(leaf, jax.Array) else leaf


@pytest.mark.parametrize(
    "as_target",
    [
        pytest.param(lambda leaf: np.zeros(leaf.shape, leaf.dtype), id="of NumPy arrays"),
        pytest.param(lambda leaf: types.SimpleNamespace(shape=leaf.shape, dtype=leaf.dtype), id="of plain objects"),
    ],
)
def test_a_target_that_knows_no_device_gives_numpy(tmp_path, mesh, our_front, as_target):
    """Leaves with a shape and a dtype alone name no place; nothing is put on a device on the way."""
    arrays = array_state(mesh)
    state = {name: array for name, array in arrays.items() if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)}
    state["numpy"] = np.arange(5, dtype=np.float64)
    our_front.save(tmp_path / "a", state)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    restored = our_front.restore(tmp_path / "a", jax.tree.map(as_target, state))
    assert {id(array) for array in jax.live_arrays()} <= before
    assert_same_tree(restored, jax.tree.map(np.asarray, state))


# Containers.


def test_an_optax_state_comes_back_as_its_classes(tmp_path, mesh, front):
    """Tuples are tuples, NamedTuples their class, the empty one is not None; and it goes on to be updated."""
    params = {"w": place(mesh, matrix(), P("d", "m"))}
    optimizer = optax.chain(optax.identity(), optax.adamw(1e-3))
    state = optimizer.init(params)
    front.save(tmp_path / "a", (state, None))
    restored, none = front.restore(tmp_path / "a")
    assert none is None
    assert_same_tree(restored, state)
    assert type(restored[0]) is optax.EmptyState
    updates, _ = jax.jit(optimizer.update)(params, restored, params)
    assert updates["w"].sharding.spec == P("d", "m")


def test_a_namedtuple_whose_module_is_not_imported_is_a_dict(tmp_path, mesh, front, monkeypatch):
    """And the plan says which module to import."""
    module = types.ModuleType("no_longer_imported")
    module.Pair = collections.namedtuple("Pair", "x y", module=module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pair = module.Pair(place(mesh, matrix(), P("d")), jnp.int32(1))
    front.save(tmp_path / "a", {"pair": pair})
    assert_same_tree(front.restore(tmp_path / "a"), {"pair": pair})
    monkeypatch.delitem(sys.modules, module.__name__)
    assert_same_tree(front.restore(tmp_path / "a"), {"pair": pair._asdict()})
    assert "no_longer_imported" in str(oxe.plan_restore(front.item(tmp_path / "a")))


# States of frameworks, into what these say of them beforehand, on this and on other numbers of devices.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """A node with a field that is no leaf."""

    params: Any
    step: Any
    name: str = dataclasses.field(metadata={"static": True}, default="unnamed")


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **kwargs: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def init_nnx() -> Any:
    """A model with a partitioned kernel, and its optimizer."""
    kernel_init = nnx.with_partitioning(normal, ("d", "m"))
    model = nnx.Linear(12, 8, rngs=nnx.Rngs(0), kernel_init=kernel_init)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)}


def make_nnx() -> Any:
    return nnx.split(nnx.jit(init_nnx)())[1]


def abstract_nnx() -> Any:
    return nnx.split(nnx.eval_shape(init_nnx))[1]


def init_linen() -> Any:
    """Boxes around arrays, with the names of their dimensions."""
    dense = nn.Dense(8, kernel_init=nn.with_partitioning(normal, ("d", "m")))
    return dense.init(jax.random.key(0), jnp.ones((4, 12)))


def make_linen() -> Any:
    """Placed by the names in its boxes, as Flax's guides do it."""
    shardings = nn.get_sharding(jax.eval_shape(init_linen), jax.sharding.get_mesh())
    return jax.jit(init_linen, out_shardings=shardings)()


def abstract_linen() -> Any:
    abstract = jax.eval_shape(init_linen)
    shardings = nn.get_sharding(abstract, jax.sharding.get_mesh())
    return jax.tree.map(
        lambda sharding, box: jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype, sharding), box),
        shardings,
        abstract,
    )


def haiku_placement() -> tuple[Any, Any]:
    """A model whose matrices are split by columns and by rows in turn, and what splits them."""

    def model(x: Any) -> Any:
        return hk.nets.MLP([16, 8])(x)

    placement = oxh.Placement(oxh.alternate("m"), used=oxh.replicated)
    return hk.transform(placement(model)), placement


def make_haiku() -> Any:
    """Placed by `init`; what the optimizer holds follows."""
    model, _ = haiku_placement()
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((4, 12)))
    return {"params": params, "opt": optax.adamw(1e-3).init(params)}


def abstract_haiku() -> Any:
    model, placement = haiku_placement()
    params = placement.abstract(model.init, jax.random.key(0), jnp.ones((4, 12)))
    return {"params": params, "opt": abstract_state(optax.adamw(1e-3), params)}


def init_equinox() -> Any:
    linear = eqx.nn.Linear(12, 8, key=jax.random.key(0))
    return eqx.tree_at(lambda x: x.weight, linear, jax.reshard(linear.weight, P("m", "d")))


def init_dataclass() -> TrainState:
    kernel = jax.reshard(normal(jax.random.key(0), (12, 8)), P("d", "m"))
    params = {"w": kernel, "layers": (Layer(2 * kernel, None), {0: -kernel})}
    return TrainState(params, jnp.int32(5), name="named")


@dataclasses.dataclass(frozen=True)
class Framework:
    """How the state of one framework is made, and described, under `jax.set_mesh`.

    Attributes:
        make: Makes the state.
        target: Says what `jax.eval_shape` says of it.
        split: How many of its arrays the target splits.
        kind: The axis types of the mesh.
    """

    make: Callable[[], Any]
    target: Callable[[], Any]
    split: int
    kind: AxisType = EXPLICIT

    def mesh(self, sizes: tuple[int, int] = (2, 4)) -> Mesh:
        return make_mesh(sizes, self.kind)

    @functools.cache  # noqa: B019 - one for each framework and mesh of a process
    def here(self, sizes: tuple[int, int]) -> tuple[Any, Any]:
        """The state on a mesh of these sizes, and what is said of it."""
        with jax.set_mesh(self.mesh(sizes)):
            return self.make(), self.target()


FRAMEWORKS = {
    "flax.nnx with an optax state": Framework(make_nnx, abstract_nnx, split=3),
    "flax.linen boxes": Framework(make_linen, abstract_linen, split=1, kind=AUTO),
    "haiku parameters with an optax state": Framework(make_haiku, abstract_haiku, split=6),
    "an equinox module": Framework(eqx.filter_jit(init_equinox), lambda: eqx.filter_eval_shape(init_equinox), split=1),
    "a registered dataclass": Framework(jax.jit(init_dataclass), lambda: jax.eval_shape(init_dataclass), split=3),
}


def check_framework(framework: Framework, front: Front, root: pathlib.Path, sizes: tuple[int, int]) -> None:
    """What was saved on 8 devices comes back as what the framework makes here: classes, values, layouts."""
    mesh = framework.mesh(sizes)
    made, target = framework.here(sizes)
    # Kernels, and what the optimizer holds beside them.
    placed = [leaf for leaf in jax.tree.leaves(target) if _asks_for_split(leaf)]
    assert len(placed) == framework.split
    with jax.set_mesh(mesh):
        under = front.restore(root, target)
    outside = front.restore(root, target)
    for restored in (under, outside):
        assert jax.tree.structure(restored) == jax.tree.structure(made)
        assert type(restored) is type(made)
        leaves = zip(jax.tree.leaves(restored), jax.tree.leaves(made), jax.tree.leaves(target), strict=True)
        for leaf, expected, asked in leaves:
            if not isinstance(expected, jax.Array):
                assert leaf == expected
                continue
            assert leaf.dtype == expected.dtype
            assert leaf.sharding.device_set <= set(mesh.devices.flat)
            if _asks_for_split(asked):
                assert leaf.sharding == NamedSharding(mesh, asked.sharding.spec, memory_kind="device")
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                np.testing.assert_allclose(np.asarray(leaf), np.asarray(expected), rtol=1e-6)
            else:
                assert_same_values(np.asarray(on_host(leaf)), np.asarray(on_host(expected)))


def _asks_for_split(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and any(sharding.spec)


# On other numbers of devices.

DEVICES: Mapping[int, tuple[tuple[int, int], tuple[int, int]]] = {
    1: ((1, 1), (1, 1)),
    4: ((1, 4), (2, 2)),
    6: ((1, 4), (3, 2)),
    16: ((4, 4), (4, 4)),
}
"""To what (d=2, m=4) is resized on so many devices, and on which mesh frameworks make their states there."""


def check_resized(front: Front, root: pathlib.Path) -> None:
    """No target: present devices, the same axis names and types, sizes by the rule; and one mesh for all."""
    sizes, _ = DEVICES[jax.device_count()]
    restored = front.restore(root)
    count = sizes[0] * sizes[1]
    mesh = jax.make_mesh(sizes, ("d", "m"), axis_types=(EXPLICIT, EXPLICIT), devices=jax.devices()[:count])
    assert restored["w"].sharding == NamedSharding(mesh, P("d", "m"), memory_kind="device")
    assert restored["v"].sharding == NamedSharding(mesh, P(None, "m"), memory_kind="device")
    assert restored["w"].sharding.mesh is restored["v"].sharding.mesh
    assert_same_values(np.asarray(restored["w"]), matrix())
    assert not restored["step"].committed
    product = jax.jit(lambda w, step: w * step)(restored["w"], restored["step"])
    np.testing.assert_array_equal(np.asarray(product), 5 * matrix())
    plan = str(oxe.plan_restore(front.item(root)))
    of = f"{count} of {jax.device_count()}" if count < jax.device_count() else f"all {count}"
    of = "the only" if jax.device_count() == 1 else of
    assert f"(d={sizes[0]} explicit, m={sizes[1]} explicit) on {of} device" in plan
    assert ("idle" in plan) == (count < jax.device_count())


def check_exact(front: Front, root: pathlib.Path) -> None:
    """`topology="exact"`: one error with the recorded mesh, the present devices, how much is affected, what to do."""
    with pytest.raises(oxe.MeshMismatchError) as error:
        front.restore(root, policy=Policy(topology="exact"))
    (problem,) = error.value.problems
    here = f"{jax.device_count()} device{'s' * (jax.device_count() > 1)}"
    assert problem.could_not == f"cannot rebuild mesh (d=2 explicit, m=4 explicit) on {here}"
    assert problem.recorded.endswith("saved on 8 cpu devices, 1 process")
    assert problem.present == f"{here.replace(' ', ' cpu ')}, 1 process"
    assert (problem.affects, problem.of) == (("v", "w"), 3)
    assert "topology='adapt' in the policy fits it to these; or pass mesh=" in problem.fix


def look(root: pathlib.Path) -> dict[str, str]:
    """The traceback of each check that fails here, behind each door; empty where it does not."""
    _, sizes = DEVICES[jax.device_count()]
    checks: dict[str, Callable[[], None]] = {}
    for name, front in FRONTS.items():
        checks[f"resized, {name}"] = lambda front=front, name=name: check_resized(front, root / f"base, {name}")
        checks[f"exact, {name}"] = lambda front=front, name=name: check_exact(front, root / f"base, {name}")
        for title, framework in FRAMEWORKS.items() if name in OUR_FRONTS else ():
            checks[f"{title}, {name}"] = lambda framework=framework, front=front, path=root / f"{title}, {name}": (
                check_framework(framework, front, path, sizes)
            )
    reports = {}
    for name, check in checks.items():
        try:
            check()
            reports[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test that asks for this case shows it
            reports[name] = traceback.format_exc()
    return reports


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> pathlib.Path:
    """What 8 devices saved behind each door: arrays on a mesh, and the state of each framework."""
    assert jax.device_count() == 8
    root = tmp_path_factory.mktemp("cases")
    mesh = make_mesh()
    base = {"w": place(mesh, matrix(), P("d", "m")), "v": place(mesh, matrix(), P(None, "m")), "step": jnp.int32(5)}
    states = {"base": base}
    for title, framework in FRAMEWORKS.items():
        states[title], _ = framework.here((2, 4))
    for name, front in FRONTS.items():
        for title, state in states.items():
            front.save(root / f"{title}, {name}", state)
    return root


@pytest.fixture(scope="session")
def elsewhere(saved) -> Mapping[int, dict[str, str]]:
    """How each check went on each other number of devices."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as executor:
        running = {count: executor.submit(run_on_devices, look, saved, devices=count) for count in DEVICES}
        return {count: future.result()[0] for count, future in running.items()}


on_other_devices = pytest.mark.parametrize(
    "count", [pytest.param(count, id=f"on {count} device{'s' * (count > 1)}") for count in DEVICES]
)
behind_every_door = pytest.mark.parametrize("name", FRONTS)
behind_ours = pytest.mark.parametrize("name", OUR_FRONTS)


@on_other_devices
@behind_every_door
def test_what_eight_devices_saved_comes_back_without_a_target(elsewhere, name, count):
    """On the present devices, with the same axis names and types, in sizes that the plan says; a scalar stays free."""
    assert not elsewhere[count][f"resized, {name}"]


@on_other_devices
@behind_every_door
def test_a_mesh_that_is_to_be_exact_is_refused(elsewhere, name, count):
    """By one error for all its arrays, that says what would help."""
    assert not elsewhere[count][f"exact, {name}"]


@on_other_devices
@behind_ours
@pytest.mark.parametrize("title", FRAMEWORKS)
def test_the_state_of_a_framework_comes_back_elsewhere(elsewhere, title, name, count):
    """Into what the framework says on the mesh there, under `jax.set_mesh` and outside of it: as its own classes."""
    assert not elsewhere[count][f"{title}, {name}"]


@behind_ours
@pytest.mark.parametrize("title", FRAMEWORKS)
def test_the_state_of_a_framework_comes_back_here(saved, title, name):
    """On the devices that saved it, and on a mesh of other sizes over them."""
    for sizes in ((2, 4), (4, 2)):
        check_framework(FRAMEWORKS[title], FRONTS[name], saved / f"{title}, {name}", sizes)
