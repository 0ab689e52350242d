"""Haiku parameters, placed on a mesh by how they are used.

    placement = oxh.Placement(oxh.alternate("model"))
    model = hk.transform(placement(forward))
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(rng, x)                   # placed
        target = placement.abstract(model.init, rng, x)        # to restore into, here or on another mesh

`init` returns what the creators of parameters made, and drops what the getters made of it for the forward pass. So a
getter that constrains a parameter places nothing that `init` returns: a `Placement` acts on both.

A rule decides from what a `Parameter` tells, once, when the parameter is first accessed; the decision is kept by the full
name, so that another trace, another call of the module, and `apply` come to the same. In a new process, where `apply` may
access them in another order than `init` did, let `Placement.abstract` trace `init` first.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar, get_args

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_explicit.integrations._laying_out import AnyMesh, Indivisible, Unfit, axes_of, behind, fitting, lay_out, only

__all__ = ["Parameter", "Placement", "Rule", "alternate", "by_name", "first_of", "largest_dimension", "replicated"]

PyTree: TypeAlias = Any
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What a rule is told of a parameter, or of an entry of state.

    Attributes:
        name: The module's name and its own, as in the tree that `init` returns: `mlp/~/linear_0/w`.
        shape: The shape that its module asked for; of a stack of layers, that of one layer.
        dtype: The dtype that its module asked for.
        index: How many parameters were accessed before it; of an entry of state, how many entries.
        matrix_index: How many of those are matrices.
        axis_sizes: The size of each axis of the mesh, by name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    index: int
    matrix_index: int
    axis_sizes: Mapping[str, int]

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions, of more than one element each: what is `(1, n)` to broadcast is no matrix."""
        return len(self.shape) == 2 and min(self.shape) > 1


Rule: TypeAlias = Callable[[Parameter], P | None]
"""Gives the spec of a parameter; None where it has nothing to say."""


def replicated(parameter: Parameter) -> P:
    """Every device has the whole parameter. As `used`: gathered for each use, as in fully sharded data parallelism."""
    del parameter
    return P()


def alternate(axis: str) -> Rule:
    """Splits every other matrix by columns, the first one so, and those between by rows.

    The product with the one, whose columns are split, is what the product with the other, whose rows are, wants.
    """

    def rule(parameter: Parameter) -> P | None:
        if not parameter.is_matrix:
            return None
        return P(axis, None) if parameter.matrix_index % 2 else P(None, axis)

    return rule


def by_name(rules: Sequence[tuple[str, P]]) -> Rule:
    """Gives the spec of the first pair whose regular expression `re.search` finds in the full name."""
    compiled = [(re.compile(pattern), spec) for pattern, spec in rules]

    def rule(parameter: Parameter) -> P | None:
        return next((spec for pattern, spec in compiled if pattern.search(parameter.name)), None)

    return rule


def largest_dimension(axis: str, *, min_size: int = 1) -> Rule:
    """Splits the largest of the dimensions that the axis divides, the last of equals.

    Args:
        axis: The axis.
        min_size: The least number of elements of a parameter that is worth to be split.
    """

    def rule(parameter: Parameter) -> P | None:
        shape, size = parameter.shape, parameter.axis_sizes[axis]
        divided = [dimension for dimension, length in enumerate(shape) if length and length % size == 0]
        if not divided or math.prod(shape) < min_size:
            return None
        largest = max(divided, key=lambda dimension: (shape[dimension], dimension))
        return P(*(axis if dimension == largest else None for dimension in range(len(shape))))

    return rule


def first_of(*rules: Rule) -> Rule:
    """Gives what the first rule says that has something to say."""

    def rule(parameter: Parameter) -> P | None:
        return next((spec for each in rules if (spec := each(parameter)) is not None), None)

    return rule


class Placement:
    """Places the parameters and the state of a Haiku function, where they are made and where they are used.

    Call it with the function that is given to `hk.transform` or `hk.transform_with_state`; of `hk.multi_transform`, with
    the template and each of the others. It works within `jax.jit` and outside, on axes that are Explicit, Auto, or some
    of each. Every process traces the same.

    On Explicit axes a product that contracts a split dimension has to be told how its result is split, which Haiku's
    modules cannot be: `used=replicated` gathers each parameter for its use, and keeps it split between.

    Args:
        stored: How a parameter lies in memory; replicated where the rule has nothing to say.
        used: How its module sees it; as it lies where None, or where the rule has nothing to say.
        state: How an entry of state lies; replicated where the rule has nothing to say.
        mesh: The mesh; None for that of `jax.set_mesh`, where the function is traced. Explicit axes want the latter.
        indivisible: Where the size of the axes does not divide a dimension: `"error"`, or `"replicate"`, which leaves
            the dimension whole.
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
            raise ValueError(f"indivisible must be one of {list(get_args(Indivisible))}, not {indivisible!r}")
        self._mesh = mesh
        self._indivisible = indivisible
        self._params = _Decisions(stored, used)
        self._state = _Decisions(state, None)

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        """The function, its parameters and state placed.

        Raises:
            ValueError: By the function: there is no mesh, or specs do not fit; lists all of these.
        """

        @functools.wraps(function)
        def placed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            placing = _Placing(self._params, self._state, self._present_mesh(), self._indivisible)
            with placing.active():
                result = function(*args, **kwargs)
            placing.raise_problems()
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
        shapes = jax.eval_shape(init, *args, **kwargs)
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
        mesh = self._mesh if self._mesh is not None else _concrete(self._present_mesh())

        def sharding(decisions: _Decisions, keypath: Any, leaf: Any) -> NamedSharding:
            name = "/".join(str(key.key) for key in keypath[:2])
            decision = decisions.find(name)
            try:
                if decision is None:
                    raise Unfit(
                        f"{name} {leaf.shape} has not been accessed by this name; trace `init` with this placement before"
                    )
                whole = leaf.ndim - len(decision.parameter.shape)
                if whole < 0 or tuple(leaf.shape[whole:]) != decision.parameter.shape:
                    raise Unfit(f"{name} {leaf.shape} had the shape {decision.parameter.shape} when it was placed")
                return NamedSharding(mesh, behind(whole, decision.fitting(decision.stored, mesh, self._indivisible)))
            except Unfit as unfit:
                problems[str(unfit)] = None
                return NamedSharding(mesh, P())

        def shardings(decisions: _Decisions, part: PyTree) -> PyTree:
            return jax.tree_util.tree_map_with_path(functools.partial(sharding, decisions), part)

        if isinstance(tree, tuple):
            params, state = tree
            result = shardings(self._params, params), shardings(self._state, state)
        else:
            result = shardings(self._params, tree)
        if problems:
            raise ValueError(_listed(problems))
        return result

    def _present_mesh(self) -> AnyMesh:
        present = jax.sharding.get_abstract_mesh()
        mesh = present if self._mesh is None else self._mesh
        if mesh.empty:
            raise ValueError(
                "there is no mesh to place parameters on\n"
                "  fix: call the function, or what it became, within `jax.set_mesh(mesh)`; or pass Placement(..., mesh=mesh)"
            )
        if present.empty and AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"the axes {axes_of(mesh, AxisType.Explicit)} of the mesh are explicit, and no mesh is set\n"
                "  fix: call the function, or what it became, within `jax.set_mesh(mesh)`"
            )
        return mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """How one parameter, or entry of state, is placed.

    Attributes:
        parameter: What it was decided from.
        stored: How it lies.
        used: How its module sees it.
    """

    parameter: Parameter
    stored: P
    used: P

    def fitting(self, spec: P, mesh: AnyMesh, indivisible: Indivisible) -> P:
        """One of the two, as it fits the mesh.

        Raises:
            Unfit: It does not.
        """
        return fitting(self.parameter.name, self.parameter.shape, spec, mesh, indivisible)


class _Decisions:
    """What has been decided, by full name.

    Args:
        stored: The rule for how something lies.
        used: The rule for how it is used; None for as it lies.
    """

    def __init__(self, stored: Rule, used: Rule | None) -> None:
        self._stored = stored
        self._used = used
        self._by_name: dict[str, _Decision] = {}
        self._by_inner_name: dict[str, list[_Decision]] = {}

    def find(self, name: str) -> _Decision | None:
        """What was decided of what `init` returns by this name."""
        return self._by_name.get(name)

    def decide(
        self, name: str, prefix: str | None, shape: tuple[int, ...], dtype: Any, mesh: AnyMesh
    ) -> _Decision | None:
        """How something lies that is accessed by this name: decided now, if not before.

        Args:
            name: What the function that is traced calls it.
            prefix: What `hk.lift` puts before the name, which it tells `init` alone: `apply` knows the name within.
            shape: The shape that its module asked for.
            dtype: The dtype that its module asked for.
            mesh: The mesh.

        Returns:
            The decision; None where `hk.lift` has lifted several by one name, and it differs between them.

        Raises:
            Unfit: It had another shape before.
        """
        full_name = (prefix or "") + name
        known = [self._by_name[full_name]] if full_name in self._by_name else []
        if not hk.running_init():
            known += self._by_inner_name.get(name, [])
        if known:
            same = [decision for decision in known if decision.parameter.shape == shape]
            if not same:
                raise Unfit(
                    f"{known[0].parameter.name} has the shape {shape}, and had {known[0].parameter.shape} when it was placed "
                    "first; make a new Placement for a new model"
                )
            return same[0] if len({(decision.stored, decision.used) for decision in same}) == 1 else None
        before = [decision.parameter for decision in self._by_name.values()]
        parameter = Parameter(
            name=full_name,
            shape=shape,
            dtype=dtype,
            index=len(before),
            matrix_index=sum(parameter.is_matrix for parameter in before),
            axis_sizes=dict(mesh.shape),
        )
        stored = self._stored(parameter)
        stored = P() if stored is None else stored
        used = self._used(parameter) if self._used is not None else None
        decision = _Decision(parameter=parameter, stored=stored, used=stored if used is None else used)
        self._by_name[full_name] = decision
        if prefix:
            self._by_inner_name.setdefault(name, []).append(decision)
        return decision


class _Placing:
    """What acts on a function while it is called or traced: Haiku's creators, getters and setters.

    Haiku asks these before those of the layers within, so they see a stack of layers whole.
    """

    def __init__(self, params: _Decisions, state: _Decisions, mesh: AnyMesh, indivisible: Indivisible) -> None:
        self._params = params
        self._state = state
        self._mesh = mesh
        self._indivisible = indivisible
        self._problems: dict[str, None] = {}  # in order, each once

    def raise_problems(self) -> None:
        if self._problems:
            raise ValueError(_listed(self._problems))

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
        decision = self._decide(self._params, context, context.original_shape)
        if decision is None:
            return next_creator(shape, dtype, init)
        spec = self._fitting(decision, decision.stored)
        value = next_creator(shape, dtype, functools.partial(_initialize, init, self._mesh, spec))
        return self._lay_out(value, decision, spec)

    def _get_parameter(self, next_getter: Callable[..., Any], value: Any, context: hk.GetterContext) -> Any:
        decision = self._decide(self._params, context, context.original_shape)
        if decision is not None:
            for spec in dict.fromkeys((decision.stored, decision.used)):
                value = self._lay_out(value, decision, self._fitting(decision, spec))
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
        def lay_out(array: Any) -> Any:
            if not isinstance(array, jax.Array):
                return array
            decision = self._decide(self._state, context, array.shape)
            return (
                array if decision is None else self._lay_out(array, decision, self._fitting(decision, decision.stored))
            )

        return jax.tree.map(lay_out, value)

    def _decide(self, decisions: _Decisions, context: Any, shape: Sequence[int]) -> _Decision | None:
        try:
            return decisions.decide(
                context.full_name, context.lifted_prefix_name, tuple(shape), context.original_dtype, self._mesh
            )
        except Unfit as unfit:
            self._problems[str(unfit)] = None
            return None

    def _fitting(self, decision: _Decision, spec: P) -> P:
        try:
            return decision.fitting(spec, self._mesh, self._indivisible)
        except Unfit as unfit:
            self._problems[str(unfit)] = None
            return P()

    def _lay_out(self, value: Any, decision: _Decision, spec: P) -> Any:
        if not isinstance(value, jax.Array):  # hk.experimental.DO_NOT_STORE
            return value
        return lay_out(value, self._mesh, behind(value.ndim - len(decision.parameter.shape), spec))


def _listed(problems: Iterable[str]) -> str:
    return "\n".join(["cannot place what Haiku makes:", *(f"  {problem}" for problem in problems)])


def _initialize(
    init: hk.initializers.Initializer, mesh: AnyMesh, spec: P, shape: Sequence[int], dtype: Any
) -> jax.Array:
    """What an initializer gives, computed where it will lie.

    On Explicit axes each intermediate value has a type, that of whole arrays: all of it would be made on every device,
    and cut then. Here the axes are Auto for the initializer's own operations, and the compiler splits these as the result
    is split. The keys drawn are the same.
    """

    def initialize(rng: Any) -> tuple[jax.Array, Any]:
        _replace_rng(rng)
        return jnp.asarray(init(shape, dtype)), hk.maybe_get_rng_sequence_state()

    explicit = axes_of(mesh, AxisType.Explicit)
    if not explicit or _uses_surroundings(initialize):
        return jnp.asarray(init(shape, dtype))
    out_sharding = (only(spec, explicit), P())
    value: jax.Array
    value, rng = jax.sharding.auto_axes(initialize, axes=explicit, out_sharding=out_sharding)(
        hk.maybe_get_rng_sequence_state()
    )
    _replace_rng(rng)
    return value


def _uses_surroundings(initialize: Callable[[Any], Any]) -> bool:
    """Whether an initializer uses arrays that it closes over: their axes stay Explicit."""
    rng = hk.maybe_get_rng_sequence_state()
    jaxpr = jax.make_jaxpr(initialize)(rng)
    _replace_rng(rng)
    return any(not jax.typeof(constant).sharding.mesh.empty for constant in jaxpr.consts)


def _replace_rng(rng: Any) -> None:
    if rng is not None:
        hk.replace_rng_sequence_state(rng)


def _concrete(mesh: AnyMesh) -> AnyMesh:
    """The mesh of `jax.set_mesh` itself, where it is what was found to be set."""
    present = jax.sharding.get_mesh()
    return mesh if present.empty else present


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
