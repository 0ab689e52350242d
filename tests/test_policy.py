"""`_policy`: a policy is checked when it is made, and is a value from then on."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import get_args

import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from orbax_explicit import RestorePolicy
from orbax_explicit._policy import (
    ArrayType,
    Cast,
    Extra,
    Indivisible,
    Missing,
    SpecRule,
    Topology,
    checked_policy,
    leaf_names,
)
from orbax_explicit._records import UNCONSTRAINED, SpecRecord

DEFAULTS = {
    "topology": "adapt",
    "resize": (),
    "axis_types": None,
    "rename_axes": {},
    "indivisible": "replicate",
    "memory_kind": "recorded",
    "missing": "error",
    "extra": "error",
    "cast": "same_kind",
    "rename_leaves": {},
    "rules": (),
    "arrays": "jax",
}
# Another value of each field, as it is given and as it is kept.
OTHERWISE = {
    "topology": ("exact", "exact"),
    "resize": (["data", "model"], ("data", "model")),
    "axis_types": ({"d": AxisType.Auto}, {"d": "auto"}),
    "rename_axes": ({"d": "data", "m": None}, {"d": "data", "m": None}),
    "indivisible": ("error", "error"),
    "memory_kind": ("pinned_host", "pinned_host"),
    "missing": ("keep", "keep"),
    "extra": ("ignore", "ignore"),
    "cast": ("never", "never"),
    "rename_leaves": ({"a/b": ("c/d", 0)}, {("a", "b"): ("c/d", "0")}),
    "rules": (
        [("kernel$", P(None, "m"))],
        (SpecRule(pattern="kernel$", spec=SpecRecord(partitions=(None, "m"))),),
    ),
    "arrays": ("numpy", "numpy"),
}
FIELDS = [field.name for field in dataclasses.fields(RestorePolicy)]


def test_the_tables_have_every_field():
    """A field that is added and forgotten fails here."""
    assert list(DEFAULTS) == list(OTHERWISE) == FIELDS


@pytest.mark.parametrize("field", FIELDS)
def test_the_default_of_each_field(field):
    """What surprises least: nothing is retyped, renamed, dropped, moved to other memory, or cast across kinds."""
    assert getattr(RestorePolicy(), field) == DEFAULTS[field]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_takes_another_value(field):
    """And keeps it in the form that records have."""
    given, kept = OTHERWISE[field]
    assert getattr(RestorePolicy(**{field: given}), field) == kept


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        pytest.param("topology", ("adapt", "exact"), id="topology"),
        pytest.param("indivisible", ("replicate", "error"), id="indivisible"),
        pytest.param("missing", ("error", "keep"), id="missing"),
        pytest.param("extra", ("error", "ignore"), id="extra"),
        pytest.param("cast", ("same_kind", "never", "unsafe"), id="cast"),
        pytest.param("arrays", ("jax", "numpy"), id="arrays"),
    ],
)
def test_every_choice_is_taken_and_no_other(field, choices):
    """Those that are documented, and that the annotation has; a message lists them."""
    annotation = {
        "topology": Topology,
        "indivisible": Indivisible,
        "missing": Missing,
        "extra": Extra,
        "cast": Cast,
        "arrays": ArrayType,
    }[field]
    assert get_args(annotation) == choices
    for choice in choices:
        assert getattr(RestorePolicy(**{field: choice}), field) == choice
    for other in ("always", "", None, True, [choices[0]]):
        with pytest.raises(ValueError, match="must be one of") as error:
            RestorePolicy(**{field: other})
        assert str(error.value) == f"{field} must be one of {list(choices)}, not {other!r}"


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


ONLY_TYPES = "axis_types must be AxisType members or names among ['explicit', 'auto'], not "


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        pytest.param({"axis_types": "explict"}, f"{ONLY_TYPES}'explict'", id="a misspelt axis type"),
        pytest.param({"axis_types": {"d": "auto", "m": 3}}, f"{ONLY_TYPES}3", id="an axis type in a mapping"),
        pytest.param({"axis_types": {"d": None}}, f"{ONLY_TYPES}None", id="no axis type in a mapping"),
        pytest.param({"axis_types": ("auto",)}, f"{ONLY_TYPES}('auto',)", id="a tuple of axis types"),
        pytest.param(
            {"axis_types": {3: "auto"}},
            "axis_types must map mesh axis names to types, not {3: 'auto'}",
            id="an axis that is no name",
        ),
        pytest.param(
            {"memory_kind": ""},
            "memory_kind must be 'recorded' or the name of a memory kind, not ''",
            id="an empty memory kind",
        ),
        pytest.param(
            {"memory_kind": None},
            "memory_kind must be 'recorded' or the name of a memory kind, not None",
            id="no memory kind",
        ),
        pytest.param(
            {"resize": "data"},
            "resize must be a sequence of mesh axis names, not 'data'",
            id="one axis, not in a tuple",
        ),
        pytest.param({"resize": 3}, "resize must be a sequence of mesh axis names, not 3", id="a number to resize"),
        pytest.param({"resize": None}, "resize must be a sequence of mesh axis names, not None", id="None to resize"),
        pytest.param(
            {"resize": {"data": 2}},
            "resize must be a sequence of mesh axis names, not {'data': 2}",
            id="axes with sizes",
        ),
        pytest.param(
            {"resize": ("d", 0)}, "resize must be a sequence of mesh axis names, not ('d', 0)", id="a position"
        ),
        pytest.param(
            {"resize": ("d", "d")}, "resize names a mesh axis twice: ('d', 'd')", id="an axis to resize twice"
        ),
        pytest.param(
            {"rename_axes": {"d": ""}},
            "rename_axes must map mesh axis names to names or None, not {'d': ''}",
            id="an axis without a name",
        ),
        pytest.param(
            {"rename_axes": "d"},
            "rename_axes must map mesh axis names to names or None, not 'd'",
            id="axes in no mapping",
        ),
        pytest.param(
            {"rename_axes": None}, "rename_axes must map mesh axis names to names or None, not None", id="no axes"
        ),
        pytest.param(
            {"rename_axes": {"d": 0}},
            "rename_axes must map mesh axis names to names or None, not {'d': 0}",
            id="an axis to a number",
        ),
        pytest.param(
            {"rename_axes": {0: "d"}},
            "rename_axes must map mesh axis names to names or None, not {0: 'd'}",
            id="a number to an axis",
        ),
        pytest.param(
            {"rename_axes": {"d": "x", "m": "x"}},
            "rename_axes gives two mesh axes one name: {'d': 'x', 'm': 'x'}",
            id="two axes to one",
        ),
        pytest.param(
            {"rename_leaves": [("a", "b")]},
            "rename_leaves must map leaf paths to leaf paths, not [('a', 'b')]",
            id="leaves in no mapping",
        ),
        pytest.param(
            {"rename_leaves": {"a": None}},
            "a leaf path must be text such as 'params/kernel', or a tuple of keys, not None",
            id="a leaf from nowhere",
        ),
        pytest.param(
            {"rename_leaves": {(): "a"}},
            "a leaf path must be text such as 'params/kernel', or a tuple of keys, not ()",
            id="a leaf without keys",
        ),
        pytest.param(
            {"rename_leaves": {("a", 1.5): "a"}},
            "a leaf path must be text such as 'params/kernel', or a tuple of keys, not ('a', 1.5)",
            id="a key that is no key",
        ),
        pytest.param(
            {"rename_leaves": {"a/b": "c", ("a", "b"): "d"}},
            "rename_leaves gives one path in the result twice: {'a/b': 'c', ('a', 'b'): 'd'}",
            id="one leaf from two places, in two spellings",
        ),
        pytest.param({"rules": None}, "rules must be a sequence of pairs, not None", id="no rules"),
        pytest.param({"rules": {"a": P()}}, f"rules must be a sequence of pairs, not {{'a': {P()!r}}}", id="a mapping"),
        pytest.param(
            {"rules": [("a", P(), 3)]},
            f"rules must be pairs of a regular expression and a PartitionSpec, not ('a', {P()!r}, 3)",
            id="a rule of three",
        ),
        pytest.param(
            {"rules": ["ab"]},
            "rules must be pairs of a regular expression and a PartitionSpec, not 'ab'",
            id="a rule that is a text",
        ),
        pytest.param(
            {"rules": [(3, P())]},
            f"rules must be pairs of a regular expression and a PartitionSpec, not (3, {P()!r})",
            id="a rule without an expression",
        ),
        pytest.param(
            {"rules": [("(", P())]},
            "rules has '(', which is no regular expression: missing ), unterminated subpattern at position 0",
            id="a rule whose expression is none",
        ),
        pytest.param(
            {"rules": [("a", ("d",))]},
            "rules must give each expression a jax.sharding.PartitionSpec, not ('d',)",
            id="a rule whose spec is a tuple",
        ),
        pytest.param(
            {"rules": [("a", P(unreduced={"d"}))]},
            f"rules has {P(unreduced={'d'})}: nothing that is read is a pending reduction",
            id="a rule with a pending reduction",
        ),
    ],
)
def test_a_choice_that_is_none_is_refused_when_the_policy_is_made(choice, message):
    """Not half-way through a restore; the message shows what was given and what is allowed."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RestorePolicy(**choice)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        pytest.param("params/layer_0/kernel", ("params", "layer_0", "kernel"), id="text, at its slashes"),
        pytest.param("w", ("w",), id="one key"),
        pytest.param(("layer/0", "w"), ("layer/0", "w"), id="a tuple, as it is"),
        pytest.param(["l", 0], ("l", "0"), id="a list, with a number"),
        pytest.param(("l", -3), ("l", "-3"), id="a number below zero"),
    ],
)
def test_a_path_is_the_text_of_its_keys(path, names):
    """As `plan_restore` prints it, or as a tuple."""
    assert leaf_names(path) == names


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        pytest.param(P(), SpecRecord(), id="nothing is split"),
        pytest.param(P("d", None), SpecRecord(partitions=("d", None)), id="verbatim"),
        pytest.param(P(("d", "m")), SpecRecord(partitions=(("d", "m"),)), id="two axes"),
        pytest.param(P(P.UNCONSTRAINED), SpecRecord(partitions=(UNCONSTRAINED,)), id="an open dimension"),
        pytest.param(P("d", reduced={"x", "m"}), SpecRecord(partitions=("d",), reduced=("m", "x")), id="reduced axes"),
        pytest.param(SpecRecord(partitions=("d",)), SpecRecord(partitions=("d",)), id="a record"),
    ],
)
def test_the_spec_of_a_rule_is_a_record(spec, kept):
    """Which the lowest floor makes of JAX's without importing it."""
    (rule,) = RestorePolicy(rules=[("a", spec)]).rules
    assert rule == SpecRule(pattern="a", spec=kept)


def test_the_first_rule_that_is_found_counts():
    """Anywhere in the path, as `re.search` finds it."""
    policy = RestorePolicy(rules=[("kernel$", P("d")), ("layer_[01]/", P("m")), ("kernel", P())])
    assert policy.spec_for("layer_0/kernel") is policy.rules[0]
    assert policy.spec_for("layer_0/bias") is policy.rules[1]
    assert policy.spec_for("layer_2/kernel_scale") is policy.rules[2]
    assert policy.spec_for("layer_2/bias") is None
    assert RestorePolicy().spec_for("w") is None


def test_choices_are_keywords_and_frozen():
    """A policy may be shared between restores."""
    with pytest.raises(TypeError, match="positional"):
        RestorePolicy("exact")
    policy = RestorePolicy()
    for field in FIELDS:
        with pytest.raises(AttributeError, match="cannot assign to field"):
            setattr(policy, field, DEFAULTS[field])


@pytest.mark.parametrize(
    ("field", "key", "value"),
    [
        pytest.param("axis_types", "d", "auto", id="axis types"),
        pytest.param("rename_axes", "d", "data", id="names of axes"),
        pytest.param("rename_leaves", ("a",), ("b",), id="names of leaves"),
    ],
)
def test_a_mapping_is_frozen(field, key, value):
    """Neither through the policy nor through the caller's dict."""
    given = {key: value}
    policy = RestorePolicy(**{field: given})
    given.clear()
    assert getattr(policy, field) == {key: value}
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(policy, field)[key] = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, {}, id="defaults"),
        pytest.param({}, DEFAULTS, id="defaults that are spelled out"),
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
        pytest.param({"resize": ["d"]}, {"resize": ("d",)}, id="axes in a list and in a tuple"),
        pytest.param(
            {"rename_axes": {"d": "x", "m": None}}, {"rename_axes": {"m": None, "d": "x"}}, id="axes in two orders"
        ),
        pytest.param(
            {"rename_leaves": {"a/b": "c", "d": "e"}},
            {"rename_leaves": {("d",): ("e",), ("a", "b"): "c"}},
            id="paths in two spellings, in two orders",
        ),
        pytest.param({"rules": [["a", P("d")]]}, {"rules": (("a", P("d")),)}, id="rules in lists and in tuples"),
    ],
)
def test_equal_policies_hash_alike(one, other):
    """They are one key of a dict."""
    one, other = RestorePolicy(**one), RestorePolicy(**other)
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("field", FIELDS)
def test_policies_that_differ_are_not_equal(field):
    """In any one field."""
    assert RestorePolicy(**{field: OTHERWISE[field][0]}) != RestorePolicy()


def test_the_order_of_axes_and_of_rules_counts():
    """The first one wins."""
    assert RestorePolicy(resize=("d", "m")) != RestorePolicy(resize=("m", "d"))
    rules = [("a", P("d")), ("b", P("m"))]
    assert RestorePolicy(rules=rules) != RestorePolicy(rules=rules[::-1])


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({}, id="the default one"),
        *(pytest.param({field: given}, id=f"another {field}") for field, (given, _) in OTHERWISE.items()),
        pytest.param(
            {field: given for field, (given, _) in OTHERWISE.items()}, id="one of which every field is another"
        ),
    ],
)
def test_a_policy_can_be_copied_replaced_and_sent_to_another_process(choice):
    """It is a value like any other; what comes back is as frozen."""
    policy = RestorePolicy(**choice)
    for again in (
        dataclasses.replace(policy),
        copy.copy(policy),
        copy.deepcopy(policy),
        *(pickle.loads(pickle.dumps(policy, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert type(again.rename_axes) is type(policy.rename_axes)
    assert dataclasses.replace(policy, missing="keep").missing == "keep"


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


@pytest.mark.parametrize("policy", [None, RestorePolicy()], ids=["none", "a policy"])
def test_a_policy_that_is_passed_on_is_checked(policy):
    """It, or None for the default one."""
    assert checked_policy(policy) is policy


@pytest.mark.parametrize("other", [{}, "exact", RestorePolicy], ids=["a dict", "a choice", "the class"])
def test_what_is_no_policy_is_a_type_error(other):
    """Not an error of ours: the call is wrong, not the checkpoint."""
    with pytest.raises(TypeError, match="policy must be a RestorePolicy, not "):
        checked_policy(other)
