"""`_refusals`: every reason why a restore is refused, as a caller reads it.

`tests/golden/refusals` has the whole error for each function of `_refusals`. Read each as someone who has lost a day.
`python tests/test_refusals.py` writes them anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P
from plans import KEYS, abstract, array, manifest_of, mesh_of, on, plan_of, wanted

from orbax_explicit import RestorePlan, RestorePolicy, RestoreRefusedError, _refusals
from orbax_explicit._errors import Problem
from orbax_explicit._planning import TargetRecord
from orbax_explicit._records import UNCONSTRAINED, SingleDeviceRecord, ValueRecord
from orbax_explicit.testing import fake_inventory

GOLDEN = pathlib.Path(__file__).parent / "golden" / "refusals"

DATA_MODEL = mesh_of({"data": 2, "model": 4})
MODEL = {
    "bias": array(on(DATA_MODEL, "model"), (512,)),
    "embed": array(on(DATA_MODEL, "model", None), (32000, 512)),
    "kernel": array(on(DATA_MODEL, "data", "model"), (512, 512)),
    "norm": array(on(DATA_MODEL), (512,)),
    "step": array(SingleDeviceRecord(device_id=0, platform="cpu"), (), dtype="int32", committed=False),
}
SAVED = manifest_of(MODEL)
LIKE_SAVED = {name: TargetRecord(shape=leaf.shape, dtype=leaf.dtype) for name, leaf in MODEL.items()}


def saved_with(**leaves: Any) -> Any:
    """The model with some leaves more, or others."""
    return manifest_of({**MODEL, **leaves})


def target_with(**leaves: TargetRecord) -> dict[str, TargetRecord]:
    """A target like the model, with some leaves more, or others."""
    return {**LIKE_SAVED, **leaves}


def on_mesh(mesh: Any, *partitions: Any, **fields: Any) -> dict[str, TargetRecord]:
    """A target like the model, whose kernel is on an abstract mesh."""
    sharding = on(abstract(mesh), *(partitions or ("data", "model")), kind=fields.pop("kind", None), **fields)
    return target_with(kernel=dataclasses.replace(LIKE_SAVED["kernel"], sharding=sharding))


# By the function that words it, and what tells two of its texts apart: a restore in which it is the only reason.
SCENARIOS: dict[str, Callable[[], RestorePlan]] = {
    "target_mesh_is_too_large": lambda: plan_of(
        SAVED, on_mesh(mesh_of({"data": 8, "model": 4})), policy=RestorePolicy(topology="exact")
    ),
    "target_mesh_is_not_shared_equally": lambda: plan_of(
        SAVED, on_mesh(mesh_of({"data": 3, "model": 1})), present=fake_inventory(4, processes=2)
    ),
    "target_mesh_is_contradicted": lambda: plan_of(
        SAVED,
        on_mesh(DATA_MODEL),
        context=mesh_of({"data": 2, "model": 4}, "auto"),
        policy=RestorePolicy(axis_types="auto"),
    ),
    "mesh_lacks_axes": lambda: plan_of(SAVED, mesh=mesh_of({"data": 2, "tensor": 4})),
    "mesh_is_not_in_every_process": lambda: plan_of(
        SAVED, present=fake_inventory(4, processes=2), mesh=mesh_of({"data": 1, "model": 4})
    ),
    "context_mesh_is_other": lambda: plan_of(SAVED, context=mesh_of({"data": 2, "model": 4}, "auto")),
    "mesh_does_not_fit": lambda: plan_of(SAVED, present=fake_inventory(4), policy=RestorePolicy(topology="exact")),
    "mesh_cannot_be_resized": lambda: plan_of(SAVED, present=fake_inventory(2), policy=RestorePolicy(resize=("data",))),
    "mesh_cannot_be_resized.equal_shares": lambda: plan_of(SAVED, present=fake_inventory(1, processes=3)),
    "policy_names_unknown_axes": lambda: plan_of(SAVED, policy=RestorePolicy(resize=("data", "mdoel"))),
    "policy_gives_two_axes_one_name": lambda: plan_of(SAVED, policy=RestorePolicy(rename_axes={"data": "model"})),
    "renamed_leaf_is_not_saved": lambda: plan_of(SAVED, policy=RestorePolicy(rename_leaves={"head": "lm_head"})),
    "renamed_leaf_is_not_wanted": lambda: plan_of(
        SAVED, LIKE_SAVED, policy=RestorePolicy(rename_leaves={"embedding": "embed"})
    ),
    "leaf_cannot_be_moved": lambda: plan_of(SAVED, policy=RestorePolicy(rename_leaves={"kernel": "norm"})),
    "numpy_is_not_on_a_mesh": lambda: plan_of(SAVED, mesh=DATA_MODEL, policy=RestorePolicy(arrays="numpy")),
    "memory_kind_is_not_here": lambda: plan_of(
        SAVED,
        present=fake_inventory(8, memory_kinds=["unpinned_host"], default_memory_kind="unpinned_host"),
        policy=RestorePolicy(memory_kind="pinned_host"),
    ),
    "rule_matches_nothing": lambda: plan_of(
        SAVED, mesh=DATA_MODEL, policy=RestorePolicy(rules=[("kernal$", P("data", "model"))])
    ),
    "rule_has_no_mesh": lambda: plan_of(
        manifest_of({"kernel": array(None, (512, 512)), "step": array(None, ())}),
        policy=RestorePolicy(rules=[("kernel", P("data", "model"))]),
    ),
    "rule_names_unknown_axes": lambda: plan_of(
        manifest_of({"kernel": array(None, (512, 512)), "step": array(None, ())}),
        mesh=DATA_MODEL,
        policy=RestorePolicy(rules=[("kernel", P("data", "tensor"))]),
    ),
    "leaves_are_extra": lambda: plan_of(SAVED, {"kernel": LIKE_SAVED["kernel"]}),
    "leaves_are_missing": lambda: plan_of(SAVED, target_with(ema=LIKE_SAVED["kernel"], head=LIKE_SAVED["bias"])),
    "leaves_have_no_value": lambda: plan_of(
        SAVED, target_with(head=LIKE_SAVED["bias"]), policy=RestorePolicy(missing="keep")
    ),
    "leaf_cannot_be_asked_for": lambda: plan_of(
        SAVED,
        target_with(
            step=TargetRecord(
                odd=(
                    "cannot restore into a leaf of type builtins.set",
                    "use arrays, jax.ShapeDtypeStruct, NumPy or Python values",
                )
            )
        ),
    ),
    "type_is_other": lambda: plan_of(saved_with(rng=KEYS), target_with(rng=TargetRecord(shape=(8,), prng_impl="rbg"))),
    "scalar_is_of_another_kind": lambda: plan_of(
        saved_with(rate=ValueRecord(type="float", dtype="float64")), target_with(rate=TargetRecord(value_type="int"))
    ),
    "cast_is_not_allowed": lambda: plan_of(SAVED, target_with(kernel=wanted(shape=(512, 512), dtype="int8"))),
    "cast_does_not_exist": lambda: plan_of(SAVED, target_with(kernel=wanted(shape=(512, 512), dtype="float8_e8m0fnu"))),
    "shape_is_other": lambda: plan_of(SAVED, target_with(embed=wanted(shape=(50304, 512)))),
    "dtype_needs_x64": lambda: plan_of(saved_with(loss=array(on(DATA_MODEL), (), dtype="float64")), x64=False),
    "axes_are_manual": lambda: plan_of(SAVED, on_mesh(mesh_of({"data": 2, "model": 4}, ("explicit", "manual")))),
    "spec_is_unreduced": lambda: plan_of(
        SAVED, on_mesh(DATA_MODEL, "data", unreduced=("model",), unreduced_kind="sum")
    ),
    "reduced_axes_are_not_explicit": lambda: plan_of(
        saved_with(scale=array(on(DATA_MODEL, "data", reduced=("model",)), (512,))),
        policy=RestorePolicy(axis_types="auto"),
    ),
    "open_dimension_needs_auto": lambda: plan_of(
        saved_with(scale=array(on(mesh_of({"data": 2, "model": 4}, "auto"), UNCONSTRAINED), (512,))),
        policy=RestorePolicy(axis_types="explicit"),
    ),
    "spec_is_too_long": lambda: plan_of(
        manifest_of({"bias": array(None, (512,)), "kernel": array(None, (512, 512))}),
        mesh=DATA_MODEL,
        policy=RestorePolicy(rules=[(".", P("data", "model"))]),
    ),
    "dimension_is_indivisible": lambda: plan_of(
        SAVED, mesh=mesh_of({"data": 1, "model": 7}), policy=RestorePolicy(indivisible="error")
    ),
}


def public_functions() -> dict[str, Callable[..., Problem]]:
    """The functions of `_refusals` that word a refusal."""
    return {
        name: function
        for name, function in vars(_refusals).items()
        if inspect.isfunction(function) and function.__module__ == _refusals.__name__ and not name.startswith("_")
    }


def function_of(name: str) -> str:
    """The function that words a scenario's refusal."""
    return name.partition(".")[0]


def error_text(plan: RestorePlan) -> str:
    """The last lines of the traceback that a caller sees."""
    try:
        plan.raise_if_refused()
    except RestoreRefusedError as error:
        return "".join(traceback.format_exception_only(error))
    raise AssertionError("nothing was refused")


def test_every_refusal_has_a_scenario_and_a_golden_file():
    """None is missing, and none is left over."""
    assert set(public_functions()) == set(map(function_of, SCENARIOS))
    assert {file.name for file in GOLDEN.iterdir()} == {f"{name}.txt" for name in SCENARIOS}


def worded_by(name: str, scenario: Callable[[], RestorePlan], monkeypatch: pytest.MonkeyPatch) -> RestorePlan:
    """The plan of a scenario; fails where a function of another name words any of its problems."""
    made: dict[str, list[Problem]] = {}
    for function_name, function in public_functions().items():

        def spy(*args: Any, _name: str = function_name, _function: Any = function, **fields: Any) -> Problem:
            problem = _function(*args, **fields)
            made.setdefault(_name, []).append(problem)
            return problem

        monkeypatch.setattr(_refusals, function_name, spy)
    plan = scenario()
    assert plan.refused, f"{name} refuses nothing"
    for problem in plan.refused:
        bare = dataclasses.replace(problem, affects=(), of=0)
        makers = [maker for maker, problems in made.items() if bare in problems]
        assert makers == [function_of(name)], f"{bare.could_not} is of {makers}, not of {name}"
    return plan


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_refusal_reads_like_its_golden_file(name, monkeypatch):
    """The whole error; and every problem of it is of the function that the file is named after."""
    plan = worded_by(name, SCENARIOS[name], monkeypatch)
    assert error_text(plan) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_a_scenario_of_another_refusal_is_noticed(monkeypatch):
    """The check above can fail."""
    with pytest.raises(AssertionError, match="not of leaves_are_missing"):
        worded_by("leaves_are_missing", SCENARIOS["leaves_are_extra"], monkeypatch)


ABOUT_THE_POLICY = {
    "policy_names_unknown_axes",
    "renamed_leaf_is_not_saved",
    "renamed_leaf_is_not_wanted",
    "leaf_cannot_be_moved",
    "numpy_is_not_on_a_mesh",
    "rule_matches_nothing",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_refusal_has_its_five_parts(name):
    """What could not be done, what was recorded or is present, how much is affected, what to do."""
    for problem in SCENARIOS[name]().refused:
        assert problem.could_not.startswith("cannot ")
        assert not problem.could_not.endswith(".")
        assert problem.recorded or problem.present
        assert problem.fix
        assert not problem.fix.endswith(".")
        assert bool(problem.affects) == (name not in ABOUT_THE_POLICY)
        assert 0 <= len(problem.affects) <= problem.of


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_refusal_is_short(name):
    """A line for each part, which fits a terminal twice at most."""
    lines = error_text(SCENARIOS[name]()).splitlines()
    assert max(map(len, lines)) <= 200, [line for line in lines if len(line) > 200]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for scenario_name, make in SCENARIOS.items():
        (GOLDEN / f"{scenario_name}.txt").write_text(error_text(make()), encoding="utf-8")
