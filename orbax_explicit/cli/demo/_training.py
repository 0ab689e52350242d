"""A small transformer that learns to read handwritten digits on a mesh with explicit axes.

This is ordinary training code, with nothing in it that knows about checkpoints: a model (Flax NNX), an optimizer
(optax), data (the 1797 digits that scikit-learn ships) and one jitted step. It is written to be read as an example of
training with explicit axes: a layer says how its own weights are split, an operation says how its result is split
where its operands leave that open, and JAX carries the rest in the types.

Everything that decides the next loss is in the state, so a run that gets the same state back goes on as if nothing had
happened. The state has one array of every kind that is hard to bring back: parameters split over a mesh axis, Adam's
moments in `pinned_host` memory, an uncommitted step and a typed PRNG key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

State: TypeAlias = dict[str, Any]
"""`{"params": ..., "opt_state": ..., "step": ..., "rng": ...}`."""

AXES = {"data": 2, "model": 4}
BATCH, CLASSES = 128, 10
PATCHES, PATCH_PIXELS = 16, 4
OPTIMIZER = optax.adamw(2e-3)


def split(*axes: str | None) -> dict[str, tuple[str | None, ...]]:
    """Metadata of a weight: the mesh axis that each of its dimensions is split over; None for a whole dimension."""
    return {"out_sharding": axes}


class Block(nnx.Module):
    """Attention and a perceptron. Both are split over "model" inside; what goes in and comes out is split over "data"."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        head = (heads, width // heads)
        by_head = split(None, "model", None)
        # A norm's scale would only multiply into the weights of the layer that follows.
        self.norm = nnx.RMSNorm(width, use_scale=False, rngs=rngs)
        self.q = nnx.LinearGeneral(width, head, use_bias=False, kernel_metadata=by_head, rngs=rngs)
        self.k = nnx.LinearGeneral(width, head, use_bias=False, kernel_metadata=by_head, rngs=rngs)
        self.v = nnx.LinearGeneral(width, head, use_bias=False, kernel_metadata=by_head, rngs=rngs)
        self.out = nnx.LinearGeneral(
            head, width, axis=(-2, -1), use_bias=False, kernel_metadata=split("model", None, None), rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, use_bias=False, kernel_metadata=split(None, "model"), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, kernel_metadata=split("model", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm(x)
        h = jax.nn.dot_product_attention(self.q(h), self.k(h), self.v(h))
        # Both operands are split over "model" along the dimension that is summed over, so the result has to be named:
        # P("data") asks for the sum over "model" here and now.
        x = x + self.out(h, out_sharding=P("data"))
        h = jax.nn.gelu(self.up(self.norm(x)))
        return x + self.down(h, out_sharding=P("data"))


class DigitReader(nnx.Module):
    """A transformer over the 16 patches of an image. Weights that name no split are whole on every device."""

    def __init__(self, *, width: int = 64, heads: int = 4, depth: int = 2, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(PATCH_PIXELS, width, rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((PATCHES, width)))
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, use_scale=False, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, use_bias=False, rngs=rngs)

    def __call__(self, patches: jax.Array) -> jax.Array:
        x = self.embed(patches) + self.position[...]
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.head(self.norm(x).mean(axis=1))
        return logits


def initial_weights() -> tuple[Any, optax.OptState]:
    """Parameters and optimizer state, all in device memory. Traced under a mesh."""
    params = nnx.to_pure_dict(nnx.state(DigitReader(rngs=nnx.Rngs(0)), nnx.Param))
    return params, OPTIMIZER.init(params)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    params: Any, opt_state: optax.OptState, rng: jax.Array, step: jax.Array, images: jax.Array, labels: jax.Array
) -> tuple[Any, optax.OptState, jax.Array]:
    """One step of AdamW on a batch that `rng` and `step` draw: the new weights, and the loss under the old ones."""
    batch = jax.random.randint(jax.random.fold_in(rng, step), (BATCH,), 0, len(images))
    x = images.at[batch].get(out_sharding=P("data"))
    y = labels.at[batch].get(out_sharding=P("data"))

    def loss_fn(params: Any) -> jax.Array:
        model = nnx.eval_shape(lambda: DigitReader(rngs=nnx.Rngs(0)))  # the structure alone
        nnx.update(model, params)
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
        return losses.mean()

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def map_moments(function: Callable[[Any], Any], opt_state: optax.OptState) -> optax.OptState:
    """The optimizer state with `function` applied to each of Adam's moments; its step count stays as it is."""
    adam, *rest = opt_state
    return (adam._replace(mu=jax.tree.map(function, adam.mu), nu=jax.tree.map(function, adam.nu)), *rest)


def to_host(moment: jax.Array) -> Any:
    """The array in the host's memory, split for the same devices as before."""
    return jax.device_put(moment, moment.sharding.with_memory_kind("pinned_host"))


def to_device(moment: jax.Array) -> Any:
    """The array in the devices' memory, split over the same devices as before."""
    return jax.device_put(moment, moment.sharding.with_memory_kind("device"))


def new_state() -> State:
    """The state before the first step, on a new mesh over the first eight devices."""
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Explicit,) * len(AXES))
    # Outside of the mesh's context, where a new scalar is uncommitted: it follows whatever it is used with.
    step, rng = jnp.int32(0), jax.random.key(0)
    with jax.set_mesh(mesh):
        params, opt_state = jax.jit(initial_weights)()
    return {"params": params, "opt_state": map_moments(to_host, opt_state), "step": step, "rng": rng}


def abstract_state() -> State:
    """What `new_state` would return, as shapes, dtypes and shardings on an `AbstractMesh`, which names no device."""
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Explicit,) * len(AXES))
    with jax.sharding.use_abstract_mesh(mesh):
        params, opt_state = nnx.eval_shape(initial_weights)
    step, rng = jax.eval_shape(lambda: (jnp.int32(0), jax.random.key(0)))

    def in_host_memory(moment: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = moment.sharding.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=sharding)

    return {"params": params, "opt_state": map_moments(in_host_memory, opt_state), "step": step, "rng": rng}


def mesh_of(state: State) -> Mesh:
    """The mesh that the state is on: a restored state needs no other hint."""
    mesh: Mesh = jax.tree.leaves(state["params"])[0].sharding.mesh
    return mesh


def load_data(mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Images of shape (digits, patches, pixels) and labels of shape (digits,), whole on every device of the mesh."""
    digits = load_digits()
    pixels = (digits.images / 16).astype(np.float32).reshape(-1, 4, 2, 4, 2)
    patches = pixels.swapaxes(2, 3).reshape(-1, PATCHES, PATCH_PIXELS)
    with jax.set_mesh(mesh):
        images, labels = jax.device_put((patches, digits.target.astype(np.int32)), P())
    return images, labels


def advance(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, float]:
    """The state after one more step, and the loss of that step. The given state's weights are consumed."""
    # Around the jitted step and not within it, which JAX before 0.10 cannot do on CPU devices.
    opt_state = map_moments(to_device, state["opt_state"])
    with jax.set_mesh(mesh_of(state)):
        params, opt_state, loss = train_step(state["params"], opt_state, state["rng"], state["step"], images, labels)
    state = {
        "params": params,
        "opt_state": map_moments(to_host, opt_state),
        "step": state["step"] + 1,
        "rng": state["rng"],
    }
    return state, float(loss)
