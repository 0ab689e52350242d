"""A restore takes little more memory than what lands: half a gigabyte, in processes of their own. Linux."""

from __future__ import annotations

import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from peak import peak_of

import orbax_explicit as oxe
from orbax_explicit.testing import run_on_devices

pytestmark = [
    pytest.mark.xdist_group("peak"),
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux's /proc"),
]

SHAPE = (8192, 16384)
NBYTES = 4 * SHAPE[0] * SHAPE[1]


def make_mesh(sizes: tuple[int, int] = (2, 4)) -> Mesh:
    return jax.make_mesh(sizes, ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def target(sizes: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
    return {"w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=NamedSharding(make_mesh(sizes), P("d", "m")))}


def save(path: pathlib.Path) -> None:
    normals = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    with oxe.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": jax.device_put(normals, NamedSharding(make_mesh(), P("d", "m")))})


def restore(path: pathlib.Path, sizes: tuple[int, int]) -> Any:
    with oxe.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target(sizes))


def restore_by_stock(path: pathlib.Path, sizes: tuple[int, int]) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target(sizes))


def restored_peak(restore: Callable[..., Any], path: pathlib.Path, sizes: tuple[int, int]) -> float:
    """The peak of a restore, over what lands on the devices of this process."""
    # JAX's backend, and what is imported by the first restore, are no part of it.
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))
    nbytes, restored = peak_of(lambda: jax.block_until_ready(restore(path, sizes)))
    assert restored["w"].sharding == target(sizes)["w"].sharding
    return nbytes / NBYTES


@pytest.fixture(scope="module")
def peaks(tmp_path_factory) -> Mapping[str, float]:
    """What was measured, by who restored onto which mesh."""
    path = tmp_path_factory.mktemp("peak") / "a"
    run_on_devices(save, path, devices=8)
    tried = {
        "onto the same mesh": (restore, (2, 4)),
        "resharded": (restore, (4, 2)),
        "by stock Orbax": (restore_by_stock, (2, 4)),
    }
    found = {
        name: run_on_devices(restored_peak, reader, path, sizes, devices=8)[0]
        for name, (reader, sizes) in tried.items()
    }
    shutil.rmtree(path)
    return found


@pytest.mark.parametrize("name", ["onto the same mesh", "resharded"])
def test_a_restore_takes_little_more_than_what_lands(peaks, name):
    """A fifth more at most; and no less than what lands."""
    assert 1.0 <= peaks[name] <= 1.2


def test_a_restore_that_takes_more_is_noticed(peaks):
    """Of stock Orbax, whose reads hold chunks and copies besides."""
    assert peaks["by stock Orbax"] > 1.2
