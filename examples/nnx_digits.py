"""Flax NNX: a model with partitioned kernels and its optimizer, trained, saved, and resumed on another mesh.

`nnx.eval_shape` says what the state is to be on the mesh that is set. Run once through and once resumed half-way on
another mesh, the training ends with the same loss.

    python examples/nnx_digits.py
"""

import pathlib
import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import orbax_explicit as oxe

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

DIGITS = load_digits()
IMAGES, LABELS = (DIGITS.data / 16).astype(np.float32), DIGITS.target


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.lecun_normal()
        self.hidden = nnx.Linear(64, 128, kernel_init=nnx.with_partitioning(normal, (None, "model")), rngs=rngs)
        self.logits = nnx.Linear(128, 10, kernel_init=nnx.with_partitioning(normal, ("model", None)), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.logits(nnx.relu(self.hidden(images)))


def make() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    def loss(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def train(model: Model, optimizer: nnx.Optimizer, steps: range) -> float:
    for number in steps:
        batch = slice(64 * number, 64 * number + 64)
        loss = step(model, optimizer, *jax.device_put((IMAGES[batch], LABELS[batch]), P("data")))
    return float(loss)


def make_mesh(data: int, model: int) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


with tempfile.TemporaryDirectory() as directory, oxe.StandardCheckpointer() as checkpointer:
    with jax.set_mesh(make_mesh(2, 4)):
        model, optimizer = nnx.jit(make)()
        train(model, optimizer, range(12))
        checkpointer.save(pathlib.Path(directory) / "half", nnx.state((model, optimizer)))
        checkpointer.wait_until_finished()
        loss = train(model, optimizer, range(12, 24))
    with jax.set_mesh(make_mesh(4, 2)):
        graph, target = nnx.split(nnx.eval_shape(make))
        resumed, optimizer = nnx.merge(graph, checkpointer.restore(pathlib.Path(directory) / "half", target))
        sharding = resumed.hidden.kernel[...].sharding
        resumed_loss = train(resumed, optimizer, range(12, 24))
print(f"restored: {sharding.spec} on {dict(sharding.mesh.shape)}")
print(f"loss {loss:.4f}, resumed {resumed_loss:.4f}")
