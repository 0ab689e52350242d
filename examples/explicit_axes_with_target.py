"""A target from `jax.eval_shape` is resolved on the devices at hand, with its specs and axis types.

Under `jax.set_mesh` the shapes that `jax.eval_shape` gives have shardings on an abstract mesh. Restored into them, the
arrays are on the concrete one; the product names its own sharding, which JAX allows on explicit axes only.

    python examples/explicit_axes_with_target.py [--stock]

With `--stock` it stays with `ocp.StandardCheckpointer`, after one call of `oxe.register()`.
"""

import pathlib
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import orbax_explicit as oxe

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def init() -> dict[str, jax.Array]:
    """A weight and a bias, sharded over the mesh of `jax.set_mesh`."""
    return {
        "kernel": jax.reshard(jnp.arange(32.0).reshape(8, 4), P("data", "model")),
        "bias": jax.reshard(jnp.ones(4), P("model")),
    }


def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer. `out_sharding` raises where the axes of its mesh are auto."""
    return jnp.matmul(x, params["kernel"], out_sharding=P(None, "model")) + params["bias"]


def main(checkpointer_class: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    with tempfile.TemporaryDirectory() as directory, jax.set_mesh(mesh), checkpointer_class() as checkpointer:
        path = pathlib.Path(directory) / "checkpoint"
        checkpointer.save(path, init())
        checkpointer.wait_until_finished()
        params = checkpointer.restore(path, jax.eval_shape(init))

    with jax.set_mesh(params["kernel"].sharding.mesh):
        y = jax.jit(apply)(params, jnp.ones((2, 8)))
    for name, array in {**params, "y": y}.items():
        print(f"{name}: {jax.typeof(array)} on {[kind.name for kind in array.sharding.mesh.axis_types]} axes")
    print(f"y = {y.tolist()}")


if __name__ == "__main__":
    if stock := "--stock" in sys.argv[1:]:
        oxe.register()
    main(ocp.StandardCheckpointer if stock else oxe.StandardCheckpointer)
