"""The README's code runs, and what it shows is what the code prints and raises."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from trees import assert_same_tree, matrix, place

import orbax_explicit as oxe
from orbax_explicit.testing import run_on_devices

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def forward(x: Any) -> Any:
    return hk.nets.MLP([16, 8])(x)


@pytest.fixture
def names(tmp_path, mesh):
    """What the README takes for granted: a state, and places to put it."""
    state = {"w": place(mesh, matrix(), P("d", "m")), "step": jnp.int32(3)}
    before = ocp.type_handlers.get_type_handler(jax.Array)
    names = {
        "state": state,
        "path": tmp_path / "checkpoint",
        "new_path": tmp_path / "another",
        "directory": tmp_path / "steps",
        "step": 7,
        "abstract_state": jax.eval_shape(lambda tree: tree, state),
        "abstract_mesh": mesh.abstract_mesh,
        "mesh": mesh,
        "auto_mesh": jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
        "forward": forward,
        "rng": jax.random.key(0),
        "x": jnp.ones((4, 8)),
    }
    yield names
    oxe.unregister()
    assert ocp.type_handlers.get_type_handler(jax.Array) is before


def test_the_readme_has_the_blocks_that_run_here():
    """A guard against a README that shows nothing."""
    assert len(BLOCKS) == 5


def test_every_block_runs_in_order(names, capsys):
    """As one program, from the first to the last; the state is what it was."""
    saved = names["state"]
    for block in BLOCKS:
        exec(block, names)  # noqa: S102  # the README is ours
    assert_same_tree(names["state"], saved)
    assert names["retyped"]["w"].sharding.mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert names["params"]["mlp/~/linear_1"]["w"].sharding.spec == P("model")
    assert names["target"]["mlp/~/linear_1"]["w"].sharding.spec == P("model", None)
    assert "2 leaves" in capsys.readouterr().out


def save_a_state(path: str) -> None:
    """Run on 8 devices."""
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with oxe.StandardCheckpointer() as checkpointer:
        params = {"embed": place(mesh, matrix(), P("d")), "out": place(mesh, matrix(), P("d", "m"))}
        checkpointer.save(path, {"params": params, "step": jnp.int32(0)})


def plan_and_refusal(path: str) -> tuple[str, str]:
    """Run on 4 devices: what the plan says, and the error where no other mesh will do."""
    with oxe.StandardCheckpointer() as checkpointer:
        try:
            checkpointer.restore(path, policy=oxe.RestorePolicy(topology="exact"))
        except oxe.MeshMismatchError as error:
            return str(oxe.plan_restore(path)), f"MeshMismatchError: {error}"
    return "", "restored"


def test_the_plan_and_the_error_of_the_readme_are_those_of_the_code(tmp_path):
    """Saved on 8 devices, restored on 4."""
    run_on_devices(save_a_state, str(tmp_path / "a"), devices=8)
    (texts,) = run_on_devices(plan_and_refusal, str(tmp_path / "a"), devices=4)
    for text in texts:
        assert f"\n\n```\n{text}\n```\n" in README.read_text()
