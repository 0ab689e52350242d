"""What every test finds: eight CPU devices, a mesh over them, and Hypothesis that repeats itself."""

from __future__ import annotations

import importlib.metadata
import pathlib

import hypothesis
import jax
import pytest
from jax.sharding import AxisType

import orbax_explicit

# Before any backend starts, which is when the count is fixed. Other counts: `orbax_explicit.testing.run_on_devices`.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The same examples in every run: what fails here fails there. No deadline and no health check on time: a first
# example compiles, and other tests run beside it.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# For a hunt: pytest --hypothesis-profile=search.
hypothesis.settings.register_profile("search", deadline=None, max_examples=2_000)
hypothesis.settings.load_profile("ci")


def pytest_report_header() -> str:
    """Names the versions under test, and where the package comes from: the built wheel or the source tree."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "orbax-checkpoint", "numpy")]
    return f"orbax_explicit: {pathlib.Path(orbax_explicit.__path__[0])}, with {', '.join(versions)}"


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    """Eight devices as (d=2, m=4), both mesh axes explicit."""
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit, AxisType.Explicit))
