"""`_errors`: what a person reads in an error, and what a program finds in it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import orbax_explicit as oxe
from orbax_explicit import _errors
from orbax_explicit._errors import OrbaxExplicitError, Problem

ERRORS = tuple(
    cls
    for _, cls in inspect.getmembers(_errors, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == oxe.__name__
)

MESH = Problem(
    could_not="cannot rebuild mesh (data=2 explicit, model=4 explicit) on 4 devices",
    recorded="8 cpu devices, 1 process",
    present="4 cpu devices, 1 process",
    affects=tuple(f"params/layer_{i}/kernel" for i in range(311)),
    of=311,
    fix="pass mesh=",
    about="mesh",
)
SHAPE = Problem(could_not="cannot restore shape (8, 8) into shape (8, 4)", affects=("a",), of=4, fix="ask for (8, 8)")


def test_an_error_reads_in_five_parts():
    """Could not, recorded, present, affects, fix: in this order, in columns."""
    assert str(oxe.MeshMismatchError(MESH)) == (
        "cannot rebuild mesh (data=2 explicit, model=4 explicit) on 4 devices\n"
        "  recorded  8 cpu devices, 1 process\n"
        "  present   4 cpu devices, 1 process\n"
        "  affects   311 of 311 leaves, first: params/layer_0/kernel, params/layer_1/kernel, params/layer_2/kernel, "
        "params/layer_3/kernel, params/layer_4/kernel\n"
        "  fix       pass mesh="
    )


def test_several_problems_are_counted_and_listed_in_the_order_they_were_found():
    """One error for all of them."""
    assert str(oxe.RestoreRefusedError(SHAPE, "cannot read it", MESH)).splitlines()[:9] == [
        "3 problems",
        "",
        "cannot restore shape (8, 8) into shape (8, 4)",
        "  affects   1 of 4 leaves: a",
        "  fix       ask for (8, 8)",
        "",
        "cannot read it",
        "",
        "cannot rebuild mesh (data=2 explicit, model=4 explicit) on 4 devices",
    ]


@pytest.mark.parametrize(
    ("affects", "of", "text"),
    [
        pytest.param((), 0, None, id="no leaf is concerned"),
        pytest.param((), 7, None, id="no leaf of several is concerned"),
        pytest.param(("a/b",), 1, "a/b", id="the only leaf there is"),
        pytest.param(("a/b",), 0, "a/b", id="one leaf, of an unknown number"),
        pytest.param(("a/b",), 2, "1 of 2 leaves: a/b", id="one leaf of several"),
        pytest.param(("a", "b"), 0, "2 leaves: a, b", id="two leaves, of an unknown number"),
        pytest.param(tuple("abcde"), 9, "5 of 9 leaves: a, b, c, d, e", id="five leaves are all shown"),
        pytest.param(tuple("abcdef"), 9, "6 of 9 leaves, first: a, b, c, d, e", id="of six leaves the first five are"),
    ],
)
def test_affected_leaves_are_counted_and_the_first_ones_named(affects, of, text):
    """How much of the tree it is, and where to look."""
    shown = str(Problem(could_not="cannot", affects=affects, of=of))
    assert shown == ("cannot" if text is None else f"cannot\n  affects   {text}")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({}, "cannot", id="nothing but what could not be done"),
        pytest.param({"fix": "do"}, "cannot\n  fix       do", id="only what to do"),
        pytest.param(
            {"recorded": "r", "present": "p"}, "cannot\n  recorded  r\n  present   p", id="both sides of a mismatch"
        ),
    ],
)
def test_a_part_without_text_takes_no_line(fields, text):
    """An empty label would say nothing."""
    assert str(Problem(could_not="cannot", **fields)) == text


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        pytest.param(oxe.RecordError, (ValueError,), id="an untrue record is a ValueError"),
        pytest.param(oxe.FormatError, (ValueError,), id="damaged bytes are a ValueError"),
        pytest.param(oxe.CheckpointLayoutError, (ValueError,), id="a path that is no item is a ValueError"),
        pytest.param(oxe.SaveRefusedError, (ValueError,), id="a refused save is a ValueError"),
        pytest.param(oxe.RestoreRefusedError, (ValueError,), id="a refused restore is a ValueError"),
        pytest.param(
            oxe.MeshMismatchError,
            (oxe.RestoreRefusedError, ValueError),
            id="a mesh that does not fit refuses a restore",
        ),
    ],
)
def test_an_error_is_the_builtin_that_callers_already_catch(error, bases):
    """And one of this package's."""
    raised = error("cannot")
    for base in (*bases, OrbaxExplicitError):
        assert isinstance(raised, base), base


def test_every_error_is_public_and_drawn_in_the_tree():
    """The docstring of the module, `__all__` and the classes say the same."""
    assert len(ERRORS) == 7
    for error in ERRORS:
        assert issubclass(error, OrbaxExplicitError)
        assert getattr(oxe, error.__name__) is error, f"{error.__name__} is not public"
        assert error.__name__ in oxe.__all__, f"{error.__name__} is not in __all__"
        assert error.__name__ in _errors.__doc__, f"{error.__name__} is not drawn in the module's docstring"


def test_an_error_carries_its_problems_as_data():
    """A program need not parse the text; a bare sentence becomes a problem too."""
    error = oxe.RestoreRefusedError(MESH, "cannot read it")
    assert error.problems == (MESH, Problem(could_not="cannot read it"))
    assert error.problems[0].affects[310] == "params/layer_310/kernel"
    assert [problem.about for problem in error.problems] == ["mesh", "leaf"]


def test_an_error_without_a_problem_says_nothing():
    """It can be made all the same: an error within an error must not hide the first."""
    assert str(OrbaxExplicitError()) == ""
    assert OrbaxExplicitError().problems == ()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_travels_between_processes_with_its_data(error):
    """By pickle and by copy."""
    raised = error(MESH, SHAPE)
    for other in (pickle.loads(pickle.dumps(raised)), copy.copy(raised), copy.deepcopy(raised)):
        assert type(other) is error
        assert other.problems == (MESH, SHAPE)
        assert str(other) == str(raised)


def test_a_problem_is_a_frozen_value():
    """Equal problems are one, and keywords are the only way to make them."""
    assert Problem(could_not="a", affects=("x",)) == Problem(could_not="a", affects=("x",))
    assert len({Problem(could_not="a"), Problem(could_not="a"), Problem(could_not="b")}) == 2
    with pytest.raises(AttributeError, match="cannot assign to field"):
        SHAPE.fix = "other"
    with pytest.raises(TypeError, match="positional"):
        Problem("cannot")
