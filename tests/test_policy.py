"""`_policy`: a policy is checked when it is made, and is a value from then on."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import get_args

import pytest
from jax.sharding import AxisType

from orbax_explicit import RestorePolicy
from orbax_explicit._policy import Cast


def test_defaults_keep_what_was_recorded():
    """Nothing is retyped, moved to other memory, or cast across kinds."""
    policy = RestorePolicy()
    assert (policy.axis_types, policy.memory_kind, policy.cast) == (None, "recorded", "same_kind")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(AxisType.Explicit, "explicit", id="JAX's Explicit"),
        pytest.param(AxisType.Auto, "auto", id="JAX's Auto"),
        pytest.param("explicit", "explicit", id="the name of a type"),
        pytest.param("Auto", "auto", id="the name as JAX spells it"),
        pytest.param(
            {"d": AxisType.Auto, "m": "explicit"}, {"d": "auto", "m": "explicit"}, id="a mapping with both spellings"
        ),
        pytest.param({}, {}, id="a mapping for no axis"),
        pytest.param(None, None, id="nothing"),
    ],
)
def test_axis_types_are_taken_in_every_spelling(given, kept):
    """Kept as the names that records use."""
    assert RestorePolicy(axis_types=given).axis_types == kept


@pytest.mark.parametrize("member", AxisType, ids=lambda member: member.name)
def test_every_axis_type_that_jax_has_is_taken_but_manual(member):
    """No array can be placed on a manual axis. Drift: a new member of `jax.sharding.AxisType` needs a name here."""
    if member is AxisType.Manual:
        with pytest.raises(ValueError, match="not Manual"):
            RestorePolicy(axis_types=member)
    else:
        assert RestorePolicy(axis_types=member).axis_types == member.name.lower(), f"{member} is unknown to the policy"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        pytest.param(
            {"axis_types": "explict"},
            r"axis_types must be AxisType members or names among \['explicit', 'auto'\], not 'explict'",
            id="a misspelt axis type",
        ),
        pytest.param({"axis_types": {"d": "auto", "m": 3}}, "not 3", id="an axis type in a mapping"),
        pytest.param({"axis_types": {"d": None}}, "not None", id="no axis type in a mapping"),
        pytest.param({"axis_types": (AxisType.Auto,)}, "axis_types must be", id="a tuple of axis types"),
        pytest.param({"memory_kind": ""}, "memory_kind must be 'recorded' or the name", id="an empty memory kind"),
        pytest.param({"memory_kind": None}, "memory_kind must be .*, not None", id="no memory kind"),
        pytest.param(
            {"cast": "always"},
            r"cast must be one of \['same_kind', 'never', 'unsafe'\], not 'always'",
            id="an unknown cast",
        ),
        pytest.param({"cast": None}, "cast must be one of .*, not None", id="no cast"),
    ],
)
def test_a_choice_that_is_none_is_refused_when_the_policy_is_made(choice, message):
    """Not half-way through a restore."""
    with pytest.raises(ValueError, match=message):
        RestorePolicy(**choice)


@pytest.mark.parametrize("cast", get_args(Cast))
def test_every_cast_is_taken(cast):
    """The three that are documented."""
    assert RestorePolicy(cast=cast).cast == cast


def test_choices_are_keywords_and_frozen():
    """A policy may be shared between restores."""
    with pytest.raises(TypeError, match="positional"):
        RestorePolicy(AxisType.Auto)
    policy = RestorePolicy()
    with pytest.raises(AttributeError, match="cannot assign to field"):
        policy.cast = "never"


def test_a_mapping_of_axis_types_is_frozen():
    """Neither through the policy nor through the caller's dict."""
    given = {"d": AxisType.Auto}
    policy = RestorePolicy(axis_types=given)
    given["d"] = AxisType.Explicit
    given["m"] = AxisType.Explicit
    assert policy.axis_types == {"d": "auto"}
    with pytest.raises(TypeError, match="does not support item assignment"):
        policy.axis_types["d"] = "explicit"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, {}, id="defaults"),
        pytest.param({"axis_types": AxisType.Auto}, {"axis_types": "auto"}, id="a type in two spellings"),
        pytest.param(
            {"axis_types": {"d": AxisType.Auto}}, {"axis_types": {"d": "auto"}}, id="a mapping in two spellings"
        ),
        pytest.param(
            {"axis_types": {"d": "auto", "m": "explicit"}},
            {"axis_types": {"m": "explicit", "d": "auto"}},
            id="a mapping in two orders",
        ),
        pytest.param({"memory_kind": "device"}, {"memory_kind": "device"}, id="a memory kind"),
    ],
)
def test_equal_policies_hash_alike(one, other):
    """They are one key of a dict."""
    one, other = RestorePolicy(**one), RestorePolicy(**other)
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    "choice",
    [{"axis_types": "auto"}, {"axis_types": {"d": "auto"}}, {"memory_kind": "device"}, {"cast": "never"}],
    ids=lambda choice: f"another {next(iter(choice))}",
)
def test_policies_that_differ_are_not_equal(choice):
    """In any one field."""
    assert RestorePolicy(**choice) != RestorePolicy()


@pytest.mark.parametrize(
    "policy",
    [RestorePolicy(axis_types="auto", cast="never"), RestorePolicy(axis_types={"d": "auto", "m": "explicit"})],
    ids=["with one axis type", "with a mapping"],
)
def test_a_policy_can_be_copied_replaced_and_sent_to_another_process(policy):
    """It is a value like any other."""
    assert dataclasses.replace(policy) == policy
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("choice", "types"),
    [
        pytest.param(None, ("explicit", "auto"), id="nothing keeps the recorded types"),
        pytest.param("auto", ("auto", "auto"), id="one type goes to every axis"),
        pytest.param({"m": "explicit"}, ("explicit", "explicit"), id="a mapping retypes the axes it names"),
        pytest.param({}, ("explicit", "auto"), id="a mapping for no axis keeps all"),
    ],
)
def test_a_recorded_mesh_is_typed_by_the_policy(choice, types):
    """Axis by axis, in the recorded order."""
    assert RestorePolicy(axis_types=choice).typed(("d", "m"), ("explicit", "auto")) == types
