"""Equinox: a module, split as it is made, trained, saved, and resumed on another mesh.

What is saved are the arrays of the module; `eqx.filter_eval_shape` says what they are, and where they lie the checkpoint
knows. Run once through and once resumed half-way on another mesh, the training ends with the same loss.

    python examples/equinox_digits.py
"""

import pathlib
import tempfile
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import orbax_explicit as oxe

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

DIGITS = load_digits()
IMAGES, LABELS = (DIGITS.data / 16).astype(np.float32), DIGITS.target
OPTIMIZER = optax.adamw(1e-2)
SPECS = (P("model", None), P(None, "model"))  # by rows, then by columns: a weight of Equinox is (out, in)


def make() -> Any:
    model = eqx.nn.MLP(64, 10, 128, depth=1, key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def place(model: Any) -> Any:
    weights = lambda model: [layer.weight for layer in model.layers]  # noqa: E731
    return eqx.tree_at(weights, model, [jax.device_put(w, s) for w, s in zip(weights(model), SPECS, strict=True)])


@eqx.filter_jit
def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    def loss(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()

    model, opt_state = state
    value, gradient = eqx.filter_value_and_grad(loss)(model)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, eqx.filter(model, eqx.is_array))
    return (eqx.apply_updates(model, updates), opt_state), value


def train(state: Any, steps: range) -> tuple[Any, float]:
    for number in steps:
        batch = slice(64 * number, 64 * number + 64)
        state, loss = step(state, *jax.device_put((IMAGES[batch], LABELS[batch]), P("data")))
    return state, float(loss)


def make_mesh(data: int, model: int) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


with tempfile.TemporaryDirectory() as directory, oxe.StandardCheckpointer() as checkpointer:
    with jax.set_mesh(make_mesh(2, 4)):
        model = place(make()[0])
        half, _ = train((model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))), range(12))
        checkpointer.save(pathlib.Path(directory) / "half", eqx.filter(half, eqx.is_array))
        checkpointer.wait_until_finished()
        _, loss = train(half, range(12, 24))
    arrays, rest = eqx.partition(eqx.filter_eval_shape(make), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    with jax.set_mesh(make_mesh(4, 2)):
        resumed = eqx.combine(checkpointer.restore(pathlib.Path(directory) / "half", arrays), rest)
        sharding = resumed[0].layers[0].weight.sharding
        _, resumed_loss = train(resumed, range(12, 24))
print(f"restored: {sharding.spec} on {dict(sharding.mesh.shape)}")
print(f"loss {loss:.4f}, resumed {resumed_loss:.4f}")
