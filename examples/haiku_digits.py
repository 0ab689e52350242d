"""Haiku: matrices split by columns and by rows in turn, trained, saved, and resumed on another mesh.

`init` gives parameters that are placed, on explicit axes; they are gathered for use, and gradients are split again. Run
once through and once resumed half-way on another mesh, the training ends with the same loss.

    python examples/haiku_digits.py
"""

import pathlib
import tempfile
from typing import Any

import haiku as hk
import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import orbax_explicit as oxe
from orbax_explicit.integrations import haiku as oxh
from orbax_explicit.integrations.optax import abstract_state

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

DIGITS = load_digits()
IMAGES, LABELS = (DIGITS.data / 16).astype(np.float32), DIGITS.target
OPTIMIZER = optax.adamw(1e-2)
PLACEMENT = oxh.Placement(oxh.alternate("model"), used=oxh.replicated)


@hk.without_apply_rng
@hk.transform
@PLACEMENT
def model(images: Any) -> Any:
    return hk.nets.MLP([128, 10])(images)


@jax.jit
def step(state: dict[str, Any], images: jax.Array, labels: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: Any) -> jax.Array:
        logits = jax.nn.log_softmax(model.apply(params, images))
        return -(logits * jax.nn.one_hot(labels, 10)).sum(-1).mean()

    value, gradient = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradient, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


def train(state: dict[str, Any], steps: range) -> tuple[dict[str, Any], float]:
    for number in steps:
        batch = slice(64 * number, 64 * number + 64)
        state, loss = step(state, *jax.device_put((IMAGES[batch], LABELS[batch]), P("data")))
    return state, float(loss)


def make_mesh(data: int, model: int) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


with tempfile.TemporaryDirectory() as directory, oxe.StandardCheckpointer() as checkpointer:
    with jax.set_mesh(make_mesh(2, 4)):
        params = jax.jit(model.init)(jax.random.key(0), IMAGES[:1])
        half, _ = train({"params": params, "opt_state": OPTIMIZER.init(params)}, range(12))
        checkpointer.save(pathlib.Path(directory) / "half", half)
        checkpointer.wait_until_finished()
        _, loss = train(half, range(12, 24))
    with jax.set_mesh(make_mesh(4, 2)):
        params = PLACEMENT.abstract(model.init, jax.random.key(0), IMAGES[:1])
        target = {"params": params, "opt_state": abstract_state(OPTIMIZER, params)}
        resumed = checkpointer.restore(pathlib.Path(directory) / "half", target)
        _, resumed_loss = train(resumed, range(12, 24))

for layer in ("mlp/~/linear_0", "mlp/~/linear_1"):
    sharding = resumed["params"][layer]["w"].sharding
    print(f"restored: {sharding.spec} on {dict(sharding.mesh.shape)}")
print(f"loss {loss:.4f}, resumed {resumed_loss:.4f}")
