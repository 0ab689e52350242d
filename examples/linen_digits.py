"""Flax Linen: boxed parameters in a `TrainState`, trained, saved, and resumed on another mesh.

`nn.get_sharding` says by the names in the boxes where each parameter lies on the mesh. Run once through and once resumed
half-way on another mesh, the training ends with the same loss.

    python examples/linen_digits.py
"""

import pathlib
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import orbax_explicit as oxe

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

DIGITS = load_digits()
IMAGES, LABELS = (DIGITS.data / 16).astype(np.float32), DIGITS.target


class Model(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        normal = nn.initializers.lecun_normal()
        hidden = nn.relu(nn.Dense(128, kernel_init=nn.with_partitioning(normal, (None, "model")))(images))
        return nn.Dense(10, kernel_init=nn.with_partitioning(normal, ("model", None)))(hidden)


MODEL, OPTIMIZER = Model(), optax.adamw(1e-2)


def make() -> TrainState:
    params = MODEL.init(jax.random.key(0), IMAGES[:1])
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


@jax.jit
def step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss(params: object) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply(params, images), labels).mean()

    value, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), value


def train(state: TrainState, steps: range) -> tuple[TrainState, float]:
    for number in steps:
        batch = slice(64 * number, 64 * number + 64)
        state, loss = step(state, *jax.device_put((IMAGES[batch], LABELS[batch]), P("data")))
    return state, float(loss)


def make_mesh(data: int, model: int) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


with tempfile.TemporaryDirectory() as directory, oxe.StandardCheckpointer() as checkpointer:
    with jax.set_mesh(mesh := make_mesh(2, 4)):
        shardings = nn.get_sharding(jax.eval_shape(make), mesh)
        half, _ = train(jax.jit(make, out_shardings=shardings)(), range(12))
        checkpointer.save(pathlib.Path(directory) / "half", half)
        checkpointer.wait_until_finished()
        _, loss = train(half, range(12, 24))
    with jax.set_mesh(make_mesh(4, 2)):
        resumed = checkpointer.restore(pathlib.Path(directory) / "half", jax.eval_shape(make))
        box = resumed.params["params"]["Dense_0"]["kernel"]
        _, resumed_loss = train(resumed, range(12, 24))
sharding = box.value.sharding
print(f"restored: {type(box).__name__} of {box.names}, {sharding.spec} on {dict(sharding.mesh.shape)}")
print(f"loss {loss:.4f}, resumed {resumed_loss:.4f}")
