"""The states that are saved and restored, and how they are laid out.

A workload is two functions: what the state is, as shapes and shardings on real devices, and what fills it. Both give
the same in every process, so a restored state can be compared with one that this process never saw.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Tree: TypeAlias = Any

STEP_OUTPUTS = 50

WITHOUT_RIVALS = ("ours", "stock v0")
RIVALS = ("stock v1", "safetensors", "equinox")
COMMON = ("ours", "ours v1", "stock v0", *RIVALS)
ALL = ("ours", "ours v1", "ours, no compression", "stock v0", "stock v0, uncompressed", *RIVALS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A state, and what is done with it.

    Attributes:
        layout: The state as `jax.ShapeDtypeStruct`s with shardings, for a scale: the part of the full bytes or leaves.
        fill: Makes the state that `layout` describes.
        restored_layout: What is restored, where that is not as it was saved.
        contenders: Who takes part.
        devices: CPU devices in each process.
        rounds: How often each contender is measured, where the command line does not say.
        stock_rounds: The same for stock Orbax, where it takes a minute; None for as often.
        steady: Whether the same arrays are saved twice; the second save finds everything compiled and touched.
        restores: Whether it is restored too.
        touched: Whether every array has been read on the host before it is saved.
        first_touch: Whether reading the first shard of each of as many other fresh arrays is timed beside the save.
        by_bytes: Whether its bytes decide, so that raw I/O and peak memory are something to compare with.
    """

    layout: Callable[[float], Tree]
    fill: Callable[[Tree], Tree]
    restored_layout: Callable[[float], Tree] | None = None
    contenders: tuple[str, ...] = COMMON
    devices: int = 8
    rounds: int = 5
    stock_rounds: int | None = None
    steady: bool = True
    restores: bool = True
    touched: bool = False
    first_touch: bool = False
    by_bytes: bool = True


def mesh_of(*shape: int) -> Any:
    import jax

    return jax.make_mesh(shape, ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def abstract(mesh: Any, shape: tuple[int, ...], spec: tuple[Any, ...], dtype: str = "float32") -> Any:
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def normals(layout: Tree) -> Tree:
    """Normals, which hardly compress, put on the devices from the host."""
    import jax

    random = generator()
    return jax.tree.map(lambda leaf: jax.device_put(draw(random, leaf), leaf.sharding), layout)


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def draw(random: np.random.Generator, leaf: Any) -> np.ndarray:
    return random.standard_normal(leaf.shape, np.float32).astype(leaf.dtype, copy=False)


def side(length: int, scale: float) -> int:
    """The side of a square of `scale` times the area; 64 divides it, so it can be split on every mesh here."""
    return max(64, int(length * math.sqrt(scale)) // 64 * 64)


def one_square(
    length: int,
    spec: tuple[Any, ...],
    scale: float,
    *,
    mesh: tuple[int, int] = (2, 4),
    dtype: str = "float32",
) -> Tree:
    return {"w": abstract(mesh_of(*mesh), (side(length, scale),) * 2, spec, dtype)}


def small_arrays(count: int, elements: int, scale: float) -> Tree:
    """So many arrays, each split over "d" and replicated over "m", ten to a layer."""
    mesh, layers = mesh_of(2, 4), max(1, int(count * scale) // 10)
    leaf = abstract(mesh, (elements,), ("d",))
    return {f"layer_{i}": {f"w{j}": leaf for j in range(10)} for i in range(layers)}


def wide(spec: tuple[Any, ...], scale: float) -> Tree:
    """Arrays of (8, 16) on a mesh (8, 64): what is split over "d" is 8 rows of 64 bytes, each on 64 devices."""
    leaf = abstract(mesh_of(8, 64), (8, 16), spec)
    return {f"w{i}": leaf for i in range(max(1, round(1000 / STEP_OUTPUTS * scale)) * STEP_OUTPUTS)}


def jitted_steps(layout: Tree, seed: int = 0) -> Tree:
    """Outputs of a jitted function, which nothing has looked at; many to a call, but what XLA compiles in a second."""
    import jax

    leaves, structure = jax.tree.flatten(layout)

    @functools.partial(jax.jit, out_shardings=[leaves[0].sharding] * STEP_OUTPUTS)
    def step(key: Any) -> list[Any]:
        return list(jax.random.normal(key, (STEP_OUTPUTS, *leaves[0].shape)))

    keys = jax.random.split(jax.random.key(seed), len(leaves) // STEP_OUTPUTS)
    outputs = [output for key in keys for output in step(key)]
    return jax.block_until_ready(jax.tree.unflatten(structure, outputs))


# The transformer of the demonstration, wide enough to weigh something, and its optimizer's state after one step.


def flax_width(scale: float) -> int:
    return max(1, round(12 * math.sqrt(scale))) * 64


def flax_weights(width: int) -> tuple[Any, Any]:
    from flax import nnx

    from orbax_explicit.cli.demo import _training as demo

    model = demo.DigitReader(width=width, heads=8, depth=4, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return params, demo.OPTIMIZER.init(params)


def flax_layout(scale: float) -> Tree:
    import jax
    from flax import nnx

    mesh = mesh_of(2, 4)
    # The names that the demonstration's layers are split by.
    named = jax.sharding.Mesh(mesh.devices, ("data", "model"), axis_types=mesh.axis_types)
    with jax.set_mesh(named):
        params, opt_state = nnx.eval_shape(functools.partial(flax_weights, flax_width(scale)))

    def concrete(leaf: Any) -> Any:
        return abstract(named, leaf.shape, leaf.sharding.spec if leaf.sharding else (), leaf.dtype)

    step = jax.ShapeDtypeStruct((), "int32")
    return jax.tree.map(concrete, {"params": params, "opt_state": opt_state, "step": step})


def flax_state(layout: Tree) -> Tree:
    """Weights of a transformer's size, and the moments that AdamW holds after one step with normals for gradients.

    Drawn on the host: to compile the model's own initialisation would take longer than what is measured.
    """
    import jax

    adam, *rest = layout["opt_state"]
    random, shardings = generator(), jax.tree.map(lambda leaf: leaf.sharding, layout)
    weights, gradients = (jax.tree.map(functools.partial(draw, random), layout["params"]) for _ in range(2))
    state = {
        "params": jax.tree.map(lambda weight: weight / 32, weights),
        "opt_state": (
            adam._replace(
                count=np.int32(1),
                mu=jax.tree.map(lambda gradient: gradient * np.float32(0.1), gradients),
                nu=jax.tree.map(lambda gradient: gradient**2 * np.float32(0.001), gradients),
            ),
            *rest,
        ),
        "step": np.int32(1),
    }
    return jax.device_put(state, shardings)


SHARDED = functools.partial(one_square, 16384, ("d", "m"))
WIDE = {
    "fill": jitted_steps,
    "contenders": (*WITHOUT_RIVALS, "stock v1"),
    "devices": 512,
    "steady": False,
    "by_bytes": False,
}

WORKLOADS = {
    "sharded": Workload(layout=SHARDED, fill=normals, contenders=ALL),
    "sharded, unchecked": Workload(
        layout=SHARDED, fill=normals, contenders=("ours, unchecked", "stock v0, uncompressed")
    ),
    "replicated": Workload(
        layout=functools.partial(one_square, 10048, ()),
        fill=normals,
        contenders=(*WITHOUT_RIVALS, "stock v0, uncompressed", *RIVALS),
    ),
    "resharded": Workload(
        layout=SHARDED,
        fill=normals,
        restored_layout=functools.partial(one_square, 16384, ("m", "d"), mesh=(4, 2)),
        steady=False,
    ),
    # On (4, 2) the swapped spec makes the same blocks as on (2, 4), for other devices. The spec as it was makes others.
    "resharded, other blocks": Workload(
        layout=SHARDED,
        fill=normals,
        contenders=WITHOUT_RIVALS,
        restored_layout=functools.partial(one_square, 16384, ("d", "m"), mesh=(4, 2)),
        steady=False,
    ),
    "bfloat16": Workload(layout=functools.partial(SHARDED, dtype="bfloat16"), fill=normals, contenders=ALL),
    "small": Workload(layout=functools.partial(small_arrays, 2_000, 64), fill=normals, by_bytes=False),
    "tiny leaves": Workload(
        layout=functools.partial(small_arrays, 20_000, 16),
        fill=normals,
        contenders=WITHOUT_RIVALS,
        stock_rounds=1,
        steady=False,
        by_bytes=False,
    ),
    "wide, fresh": Workload(layout=functools.partial(wide, ("d",)), first_touch=True, **WIDE),
    "wide, touched": Workload(layout=functools.partial(wide, ("d",)), touched=True, restores=False, **WIDE),
    "wide, replicated": Workload(layout=functools.partial(wide, ()), restores=False, **WIDE),
    "flax": Workload(layout=flax_layout, fill=flax_state, contenders=ALL),
}
