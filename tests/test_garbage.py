"""`_garbage`: collection is paused, and goes on as it was."""

from __future__ import annotations

import gc

import pytest

from orbax_explicit._garbage import paused_collection


@pytest.fixture(params=[True, False], ids=["collection is on", "collection is off"])
def was_on(request: pytest.FixtureRequest):
    """Whether garbage is collected where the context begins."""
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_collection_is_paused_and_goes_on_as_it_was(was_on: bool) -> None:
    """Also where it was off."""
    with paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled() == was_on


def test_an_error_ends_the_pause(was_on: bool) -> None:
    """A refused save leaves collection as it was."""
    with pytest.raises(ValueError, match="refused"), paused_collection():
        raise ValueError("refused")
    assert gc.isenabled() == was_on
