"""Trees that tests save, and what it means that one came back."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_explicit._records import Key, LeafPath


class Moments(NamedTuple):
    """A NamedTuple of this module, which is imported wherever a test is."""

    mean: Any
    variance: Any


class Nothing(NamedTuple):
    """A NamedTuple without fields, like `optax.EmptyState`."""


def place(mesh: Mesh, values: Any, spec: P = P(), memory_kind: str | None = None) -> jax.Array:
    """An array on `mesh`, made in every process alike."""
    values = np.asarray(values)
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def matrix(rows: int = 8, columns: int = 8, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Distinct values: 0, 1, 2, ..."""
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


def array_state(mesh: Mesh) -> dict[str, Any]:
    """Arrays of every kind of layout, on a mesh with axes d and m; no value on the host."""
    keys = jax.random.split(jax.random.key(7), 8)
    return {
        "sharded": place(mesh, matrix(), P("d", "m")),
        "two_axes": place(mesh, matrix(dtype=jnp.bfloat16), P(("d", "m"), None)),
        "inner": place(mesh, matrix(), P(None, "m")),
        "replicated": place(mesh, matrix(), P()),
        "reduced": place(mesh, matrix(), P("d", reduced={"m"})),
        "pinned": place(mesh, matrix(), P("d"), memory_kind="pinned_host"),
        "empty": place(mesh, np.zeros((0, 3), np.float32), P("d")),
        "scalar_on_mesh": place(mesh, np.float32(2.5), P()),
        "step": jnp.int32(5),
        "key": jax.random.key(3),
        "keys": jax.jit(lambda: keys, out_shardings=NamedSharding(mesh, P("d")))(),
        "rbg_keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
    }


def pending_sum(mesh: Mesh) -> jax.Array:
    """A product of two matrices whose sum over the mesh axis m has yet to be made; `mesh` has explicit axes d and m."""
    with jax.set_mesh(mesh):
        a, b = place(mesh, matrix(), P("d", "m")), place(mesh, matrix(), P("m", None))
        return jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=P("d", unreduced={"m"})))(a, b)


def host_state() -> dict[str, Any]:
    """Values on the host of every type that can be saved, and empty containers."""
    return {
        "int": 3,
        "big_int": 2**63 + 1,
        "float": 2.5,
        "bool": True,
        "complex": 1 + 2j,
        "str": "text with / and ~",
        "empty_str": "",
        "bytes": b"nul \0 inside and behind \0",
        "empty_bytes": b"",
        "float32": np.float32(1.5),
        "int8": np.int8(-3),
        "np_bool": np.bool_(True),
        "complex64": np.complex64(1 - 1j),
        "bfloat16": jnp.bfloat16.dtype.type(1.5),
        "array": np.arange(3),
        "array_0d": np.array(4.0),
        "array_bf16": np.arange(3).astype(jnp.bfloat16),
        "empty_array": np.zeros((0, 2)),
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "nothing": Nothing(),
    }


def training_state(mesh: Mesh) -> dict[str, Any]:
    """What a training loop saves: parameters, an optax state, a step, keys, and containers of every kind."""
    params = {"layers": {0: {"w": place(mesh, matrix(), P("d", "m"))}, 1: {"w": place(mesh, -matrix(), P("d", "m"))}}}
    optimizer = optax.adamw(1e-3)
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "moments": Moments(mean=place(mesh, matrix(), P("m")), variance=(jnp.float32(1), [jnp.float32(2)])),
        "arrays": array_state(mesh),
        "host": host_state(),
    }


def path(*names: str | int) -> LeafPath:
    """The path through dicts with these keys."""
    return tuple(Key("dict", name) for name in names)


def assert_same_tree(restored: Any, saved: Any, *, shardings: bool = True) -> None:
    """Structure, types, dtypes, values and, where the devices are the same, shardings and commitment."""
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree_util.tree_map_with_path(lambda p, r, s: _assert_same_leaf(p, r, s, shardings), restored, saved)


def _assert_same_leaf(keypath: Any, restored: Any, saved: Any, shardings: bool) -> None:
    name = jax.tree_util.keystr(keypath)
    assert type(restored) is type(saved), name
    if isinstance(saved, jax.Array):
        assert restored.committed == saved.committed, name
        assert restored.dtype == saved.dtype, name
        if shardings:
            assert type(restored.sharding) is type(saved.sharding), name
            assert restored.sharding == saved.sharding, name
            assert restored.sharding.memory_kind == saved.sharding.memory_kind, name
    assert_same_values(restored, saved, name)


def assert_same_values(restored: Any, saved: Any, name: str = "") -> None:
    """Shape, dtype and values; of an array that spans processes, those of this one's shards."""
    if isinstance(saved, jax.Array) and jnp.issubdtype(saved.dtype, jax.dtypes.prng_key):
        restored, saved = jax.random.key_data(restored), jax.random.key_data(saved)
    if isinstance(saved, jax.Array) and not saved.is_fully_addressable:
        pairs = zip(restored.addressable_shards, saved.addressable_shards, strict=True)
        for mine, other in pairs:
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(other.data), name, strict=True)
        return
    np.testing.assert_array_equal(np.asarray(restored), np.asarray(saved), name, strict=True)
