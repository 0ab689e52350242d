"""Haiku parameters, placed on a mesh by how they are used.

    placement = oxh.Placement(oxh.alternate("model"))
    model = hk.transform(placement(forward))
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(rng, x)                   # placed
        target = placement.abstract(model.init, rng, x)        # to restore into, here or on another mesh

`init` returns what the creators of parameters made, and drops what the getters made of it for the forward pass. So a
getter that constrains a parameter places nothing that `init` returns: a `Placement` acts on both.

A rule decides from what a `Parameter` tells, once, when `init` first accesses the parameter; the decision is kept by name, so
that another trace, another call of the module, and `apply` come to the same. In a new process, where `apply` may access
them in another order than `init` did, let `Placement.abstract` trace `init` first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar, get_args

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_explicit._policy import Indivisible
from orbax_explicit.integrations._decisions import Access, Decision, Decisions, Name
from orbax_explicit.integrations._laying_out import AnyMesh, Unfit, axes_of, behind, lay_out, only
from orbax_explicit.integrations._rules import (
    Parameter,
    Rule,
    alternate,
    by_name,
    first_of,
    largest_dimension,
    replicated,
)

__all__ = ["Parameter", "Placement", "Rule", "alternate", "by_name", "first_of", "largest_dimension", "replicated"]

PyTree: TypeAlias = Any
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Placement:
    """Places the parameters and the state of a Haiku function, where they are made and where they are used.

    Call it with the function that is given to `hk.transform` or `hk.transform_with_state`; of `hk.multi_transform`, with
    the template and each of the others. It works within `jax.jit` and outside, on axes that are Explicit, Auto, or some
    of each. Every process traces the same.

    On Explicit axes a product that contracts a split dimension has to be told how its result is split, which Haiku's
    modules cannot be: `used=replicated` gathers each parameter for its use, and keeps it split between.

    Of state, which may be of another shape each time, each shape is decided for by itself.

    Args:
        stored: How a parameter lies in memory; replicated where the rule has nothing to say.
        used: How its module sees it; as it lies where None, or where the rule has nothing to say.
        state: How an entry of state lies; replicated where the rule has nothing to say.
        mesh: The mesh; None for that of `jax.set_mesh`, where the function is traced. Explicit axes want the latter: a
            mesh that is passed has to agree with it.
        indivisible: Where the size of the axes does not divide a dimension: `"error"`, or `"replicate"`, which leaves
            the dimension whole.

    Raises:
        TypeError: A rule is none.
        ValueError: There is no such choice.
    """

    def __init__(
        self,
        stored: Rule,
        *,
        used: Rule | None = None,
        state: Rule = replicated,
        mesh: AnyMesh | None = None,
        indivisible: Indivisible = "error",
    ) -> None:
        if indivisible not in get_args(Indivisible):
            raise ValueError(f"indivisible must be one of {sorted(get_args(Indivisible))}, not {indivisible!r}")
        self._mesh = mesh
        self._indivisible = indivisible
        self._params = Decisions(stored, used)
        self._state = Decisions(state, reshapes=True)

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        """The function, its parameters and state placed.

        Raises:
            TypeError: It is no function, but what `hk.transform` made of one.
            ValueError: By the function: there is no mesh, specs do not fit, or expressions of `by_name` are found in no name;
                lists all of these.
        """
        if not callable(function):
            raise TypeError(f"a Placement places a function, not {function!r}; hk.transform(placement(function))")

        @functools.wraps(function)
        def placed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            is_init = hk.running_init()
            params, state = self._params.access(is_init=is_init), self._state.access(is_init=is_init)
            placing = _Placing(params, state, self._present_mesh(), self._indivisible)
            with placing.active():
                result = function(*args, **kwargs)
            placing.finish()
            return result

        return placed

    def abstract(
        self, init: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """What `init` returns for these arguments, without making it: a `jax.ShapeDtypeStruct` for each array.

        It is a target to restore into, and shapes to make the state of an optimizer of. `init` is traced.

        Raises:
            ValueError: There is no mesh, or specs do not fit; lists all of these.
        """
        # Another function each time, which JAX has not traced before: what is traced last counts.
        shapes = jax.eval_shape(functools.partial(init), *args, **kwargs)
        result: _Result = jax.tree.map(_with_sharding, shapes, self.shardings(shapes))
        return result

    def shardings(self, tree: PyTree) -> PyTree:
        """The `NamedSharding` of each leaf of what `init` returns: of parameters, or of these and a state.

        Args:
            tree: Arrays or their shapes, which have been accessed under this placement before.

        Raises:
            ValueError: There is no mesh, specs do not fit, or a leaf has not been accessed; lists all of these.
        """
        problems: dict[str, None] = {}
        mesh = _concrete(self._present_mesh())

        def sharding(decisions: Decisions, keypath: Any, leaf: Any) -> NamedSharding:
            module, own, *keys = (jax.tree_util.keystr((key,), simple=True) for key in keypath)
            name, shape = Name(module, own, keys=tuple(keys)), tuple(leaf.shape)
            decision = decisions.find(name, shape, mesh)
            try:
                if decision is None:
                    raise Unfit(
                        f"{name.text} {shape} has not been accessed by this name; trace the `init` of "
                        "hk.transform(placement(function)) before"
                    )
                whole = len(shape) - len(decision.parameter.shape)
                if whole < 0 or shape[whole:] != decision.parameter.shape:
                    raise Unfit(f"{name.text} {shape} had the shape {decision.parameter.shape} when it was placed")
                return NamedSharding(mesh, behind(whole, decision.fitting(decision.stored, mesh, self._indivisible)))
            except Unfit as unfit:
                problems[str(unfit)] = None
                return NamedSharding(mesh, P())

        def shardings(decisions: Decisions, part: PyTree) -> PyTree:
            return jax.tree_util.tree_map_with_path(functools.partial(sharding, decisions), part)

        match tree:
            case (params, state):
                result: PyTree = shardings(self._params, params), shardings(self._state, state)
            case dict():
                result = shardings(self._params, tree)
            case _:
                raise TypeError(
                    f"shardings are of what `init` returns: parameters, or these and a state; not {type(tree)}"
                )
        if problems:
            raise ValueError(_listed(problems))
        return result

    def _present_mesh(self) -> AnyMesh:
        """The mesh to place on: that of `jax.set_mesh`, or the one that was passed, if it can be."""
        present, passed = jax.sharding.get_abstract_mesh(), self._mesh
        if passed is None and not present.empty:
            return present
        if passed is None or passed.empty or (present.empty and isinstance(passed, AbstractMesh)):
            raise ValueError(
                "there is no mesh to place parameters on\n"
                "  fix: call the function, or what it became, within `jax.set_mesh(mesh)`; or pass Placement(..., mesh=mesh)"
            )
        if present.empty and AxisType.Explicit in passed.axis_types:
            raise ValueError(
                f"the axes {axes_of(passed, AxisType.Explicit)} of the mesh are explicit, and no mesh is set\n"
                "  fix: call the function, or what it became, within `jax.set_mesh(mesh)`"
            )
        is_auto = {*passed.axis_types, *present.axis_types} <= {AxisType.Auto}
        if not isinstance(passed, AbstractMesh) and is_auto:
            return passed
        if _is_like(passed, present):
            return present
        raise ValueError(
            f"the mesh that was passed has the axes {_axes_text(passed)}, and that of `jax.set_mesh` {_axes_text(present)}\n"
            "  fix: set the mesh that was passed; or pass none, for the one that is set"
        )


class _Placing:
    """What acts on a function while it is called or traced: Haiku's creators, getters and setters.

    Haiku asks these before those of the layers within, so they see a stack of layers whole.
    """

    def __init__(self, params: Access, state: Access, mesh: AnyMesh, indivisible: Indivisible) -> None:
        self._params = params
        self._state = state
        self._mesh = mesh
        self._indivisible = indivisible
        self._is_initializing = False
        self._problems: dict[str, None] = {}  # in order, each once

    def finish(self) -> None:
        """Keeps what was decided.

        Raises:
            ValueError: Something does not fit.
        """
        problems = self._problems or dict.fromkeys((*self._params.unmatched(), *self._state.unmatched()))
        if problems:
            raise ValueError(_listed(problems))
        self._params.keep()
        self._state.keep()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with (
            hk.custom_creator(self._create_parameter),
            hk.custom_getter(self._get_parameter),
            hk.custom_creator(self._create_state, params=False, state=True),
            hk.custom_getter(self._get_state, params=False, state=True),
            hk.custom_setter(self._set_state),
        ):
            yield

    def _create_parameter(
        self, next_creator: Callable[..., Any], shape: Any, dtype: Any, init: Any, context: hk.GetterContext
    ) -> Any:
        decisions = self._decide(self._params, context, context.original_shape, context.original_dtype)
        if not decisions:
            return next_creator(shape, dtype, init)
        (decision,) = decisions  # An `init` knows the whole name.
        spec = self._fitting(decision, decision.stored)
        value = next_creator(shape, dtype, functools.partial(self._initialize, init, spec))
        return self._lay_out(value, decision, spec)

    def _get_parameter(self, next_getter: Callable[..., Any], value: Any, context: hk.GetterContext) -> Any:
        decisions = self._decide(self._params, context, context.original_shape, context.original_dtype)
        stored, used = (decision.stored for decision in decisions), (decision.used for decision in decisions)
        for spec in dict.fromkeys((*_agreed(stored), *_agreed(used))):
            value = self._lay_out(value, decisions[0], self._fitting(decisions[0], spec))
        return next_getter(value)

    def _create_state(
        self, next_creator: Callable[..., Any], shape: Any, dtype: Any, init: Any, context: hk.GetterContext
    ) -> Any:
        return self._lay_out_state(next_creator(shape, dtype, init), context)

    def _get_state(self, next_getter: Callable[..., Any], value: Any, context: hk.GetterContext) -> Any:
        return next_getter(self._lay_out_state(value, context))

    def _set_state(self, next_setter: Callable[..., Any], value: Any, context: hk.SetterContext) -> Any:
        return next_setter(self._lay_out_state(value, context))

    def _lay_out_state(self, value: Any, context: hk.GetterContext | hk.SetterContext) -> Any:
        def lay_out(keypath: Any, leaf: Any) -> Any:
            decisions = self._decide(self._state, context, jnp.shape(leaf), jnp.result_type(leaf), keypath)
            for spec in _agreed(decision.stored for decision in decisions):
                leaf = self._lay_out(leaf, decisions[0], self._fitting(decisions[0], spec))
            return leaf

        return jax.tree_util.tree_map_with_path(lay_out, value)

    def _decide(
        self, access: Access, context: Any, shape: Sequence[int], dtype: Any, keypath: Any = ()
    ) -> tuple[Decision, ...]:
        """What is decided of what is accessed: nothing where it has a problem."""
        if self._is_initializing:
            raise _NotAloneError
        keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in keypath)
        # Not `context.module_name` and `context.name`, which take the name apart at its last slash.
        module = context.module.module_name if context.module is not None else "~"
        name = Name(module, context.full_name.removeprefix(f"{module}/"), context.lifted_prefix_name or "", keys)
        try:
            return access.decide(name, tuple(shape), dtype, self._mesh, is_whole_name=hk.running_init())
        except Unfit as unfit:
            self._problems[str(unfit)] = None
            return ()

    def _fitting(self, decision: Decision, spec: P) -> P:
        try:
            return decision.fitting(spec, self._mesh, self._indivisible)
        except Unfit as unfit:
            self._problems[str(unfit)] = None
            return P()

    def _lay_out(self, value: Any, decision: Decision, spec: P) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            value = jnp.asarray(value)
        if not isinstance(value, jax.Array):  # A number of Python; hk.experimental.DO_NOT_STORE
            return value
        return lay_out(value, self._mesh, behind(value.ndim - len(decision.parameter.shape), spec))

    def _initialize(self, init: hk.initializers.Initializer, spec: P, shape: Sequence[int], dtype: Any) -> jax.Array:
        """What an initializer gives, computed where it will lie.

        On Explicit axes each intermediate value has a type, that of whole arrays: all of it would be made on every device,
        and cut then. Here the axes are Auto for the initializer's own operations, and the compiler splits these as the
        result is split. The keys drawn are the same. One that uses more than its arguments, arrays that are on Explicit axes
        or other parameters, is run as it is.
        """
        explicit = axes_of(self._mesh, AxisType.Explicit)
        if not explicit:
            return jnp.asarray(init(shape, dtype))
        rng = hk.maybe_get_rng_sequence_state()

        def initialize(rng: Any) -> tuple[jax.Array, Any]:
            _replace_rng(rng)
            return jnp.asarray(init(shape, dtype)), hk.maybe_get_rng_sequence_state()

        self._is_initializing = True
        try:
            value: jax.Array
            value, drawn = jax.sharding.auto_axes(initialize, axes=explicit, out_sharding=(only(spec, explicit), P()))(
                rng
            )
        except Exception:  # noqa: BLE001  # it has many ways to need more; what is wrong with it, it says again
            _replace_rng(rng)
        else:
            _replace_rng(drawn)
            return value
        finally:
            self._is_initializing = False
        return jnp.asarray(init(shape, dtype))


class _NotAloneError(Exception):
    """An initializer uses what else is in the model."""


def _agreed(specs: Iterable[P]) -> tuple[P, ...]:
    """The spec, where all that go by one name agree on it."""
    distinct = set(specs)
    return tuple(distinct) if len(distinct) == 1 else ()


def _listed(problems: Iterable[str]) -> str:
    return "\n".join(["cannot place what Haiku makes:", *(f"  {problem}" for problem in problems)])


def _replace_rng(rng: Any) -> None:
    if rng is not None:
        hk.replace_rng_sequence_state(rng)


def _concrete(mesh: AnyMesh) -> AnyMesh:
    """The mesh of `jax.set_mesh` itself, where it is what was found to be set."""
    if not isinstance(mesh, AbstractMesh):
        return mesh
    try:
        present = jax.sharding.get_mesh()
    except ValueError:  # Within `jax.jit` none is told.
        return mesh
    return mesh if present.empty else present


def _is_like(passed: AnyMesh, present: AnyMesh) -> bool:
    """Whether they have the same axes, but for those that are manual where the function is traced."""
    kinds = zip(passed.axis_types, present.axis_types, strict=True)
    return passed.shape == present.shape and all(other in (one, AxisType.Manual) for one, other in kinds)


def _axes_text(mesh: AnyMesh) -> str:
    return ", ".join(
        f"{name}={size} {kind}" for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
    )


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
