"""A bound plan -> the leaves of the result: what is read, and as what it comes back.

Arrays and numbers are read from the store of the item, text from Orbax's file of texts; a leaf that the target keeps is
not read. What was read is compared with its record, so that a record and arrays of different saves do not go together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from orbax_explicit._array_reading import ArrayRead, Known, other_array_problem, read_arrays
from orbax_explicit._digests import read_digests
from orbax_explicit._errors import FormatError, Problem, RestoreRefusedError
from orbax_explicit._outcomes import AsTarget, Kept, OnHost, Outcome
from orbax_explicit._policy import Cast
from orbax_explicit._records import ArrayRecord, LeafPath, path_text, storage_name
from orbax_explicit._restoring import BoundPlan
from orbax_explicit._stock import read_array_store
from orbax_explicit._strings import read_strings
from orbax_explicit._targets import is_python_int


async def read_leaves(
    directory: epath.Path,
    bound: BoundPlan,
    *,
    cast: Cast,
    strict: bool = True,
    with_layouts: bool = False,
    max_in_flight_nbytes: int | None = None,
) -> dict[LeafPath, Any]:
    """The leaves of the result by their paths: those that the target keeps, and what is read of the others.

    Every process calls it; each reads what lands on its devices.

    Args:
        directory: The directory of the item.
        bound: What to restore, and where.
        cast: Which casts the policy allows.
        strict: Whether a target's shape must be the saved one; otherwise arrays are cut off or padded.
        with_layouts: Whether arrays get the on-device layouts of the target's leaves.
        max_in_flight_nbytes: Bytes that reading may need at a time beside what lands; None for the default.

    Raises:
        FormatError: Something is missing or damaged.
        RestoreRefusedError: A value does not fit into the dtype that the target asks for.
    """
    digests = read_digests(directory)
    values: dict[LeafPath, Any] = {}
    texts: dict[LeafPath, str] = {}
    reads: dict[LeafPath, tuple[Outcome, ArrayRead]] = {}
    for outcome in bound.plan.outcomes:
        if isinstance(outcome.placement, Kept):
            assert bound.target is not None
            values[outcome.path] = bound.target.leaves[outcome.path]
            continue
        assert outcome.source is not None
        if isinstance(outcome.placement, OnHost) and outcome.placement.type == "str":
            texts[outcome.path] = storage_name(outcome.source)
        else:
            reads[outcome.path] = outcome, _array_read(outcome, bound, strict=strict)
    strings = await asyncio.to_thread(read_strings, directory, texts.values(), digests)
    values.update((path, strings[name]) for path, name in texts.items())
    store = await asyncio.to_thread(read_array_store, directory, digests)
    arrays = await read_arrays(
        [read for _, read in reads.values()], store, max_in_flight_nbytes=max_in_flight_nbytes, digests=digests
    )
    read = {path: _keyed(array, outcome) for array, (path, (outcome, _)) in zip(arrays, reads.items(), strict=True)}
    if strict:
        _check_against_record(read, (outcome for outcome, _ in reads.values()))
    for path, (outcome, _) in reads.items():
        values[path] = _finished(read[path], outcome, cast)
        if with_layouts and bound.target is not None and isinstance(outcome.placement, AsTarget):
            layout = getattr(bound.target.leaves[path], "format", None)
            values[path] = values[path] if layout is None else jax.device_put(values[path], layout)
    return values


def _array_read(outcome: Outcome, bound: BoundPlan, *, strict: bool) -> ArrayRead:
    """How one leaf is read."""
    recorded = outcome.recorded
    assert recorded is not None
    assert outcome.source is not None
    shape = None
    if bound.target is not None and not strict and not isinstance(outcome.placement, OnHost):
        shape = outcome.shape
        if isinstance(recorded, ArrayRecord) and recorded.prng is not None:
            shape += recorded.prng.key_shape
    return ArrayRead(
        name=storage_name(outcome.source),
        # Numbers are stored alike, be they arrays or not: as an array each is cast, and compared with its record.
        sharding=bound.shardings[outcome.path],
        dtype=np.dtype(outcome.dtype) if outcome.dtype is not None and not _is_cast_when_read(outcome) else None,
        shape=shape,
        strict=strict,
        leaf=path_text(outcome.path),
        known=Known(shape=recorded.stored_shape, dtype=recorded.dtype, x64=bound.x64),
    )


def _keyed(array: Any, outcome: Outcome) -> Any:
    """The keys whose data were read, where the leaf is one of keys that lands on devices."""
    recorded = outcome.recorded
    if isinstance(recorded, ArrayRecord) and recorded.prng is not None and isinstance(array, jax.Array):
        return jax.random.wrap_key_data(array, impl=recorded.prng.impl)
    return array


def _is_cast_when_read(outcome: Outcome) -> bool:
    """Whether a leaf is cast by its value: an int of Python's own has no width to plan with."""
    return outcome.dtype is not None and isinstance(outcome.placement, OnHost) and is_python_int(outcome.recorded)


def _cast_int(stored: Any, outcome: Outcome, cast: Cast) -> Any:
    """An int of Python's own in the dtype that the target asks for.

    Raises:
        RestoreRefusedError: It does not fit, and the policy allows no unsafe cast.
    """
    with np.errstate(all="ignore"):
        found = stored.astype(outcome.dtype)
    if cast != "unsafe" and found.item() != stored.item():
        raise RestoreRefusedError(
            Problem(
                could_not=f"cannot hold {stored.item()} in {outcome.dtype}",
                recorded="int",
                present=f"the target asks for {outcome.dtype}",
                affects=(path_text(outcome.path),),
                fix="give the target's leaf a wider dtype, or cast='unsafe' in the policy",
            )
        )
    return found


def _finished(stored: Any, outcome: Outcome, cast: Cast) -> Any:
    """The leaf as it was, from what was read."""
    placement = outcome.placement
    if not isinstance(placement, OnHost):
        return stored
    if _is_cast_when_read(outcome):
        stored = _cast_int(stored, outcome, cast)
    match placement.type:
        case "np.ndarray" | "str":
            return stored
        case "np.generic":
            return stored[()]
        case "bytes":
            return stored.tobytes()
        case "int" | "float" | "bool" | "complex" as name:
            return {"int": int, "float": float, "bool": bool, "complex": complex}[name](stored.item())


def _check_against_record(read: Mapping[LeafPath, Any], outcomes: Iterable[Outcome]) -> None:
    """Refuses what was read where it is not what the record describes: one of them is damaged."""
    wrong = []
    for outcome in outcomes:
        recorded, value = outcome.recorded, read[outcome.path]
        if recorded is None or not isinstance(value, jax.Array | np.ndarray):
            continue
        dtype = recorded.dtype if _is_cast_when_read(outcome) else outcome.dtype or recorded.dtype
        is_keys = isinstance(recorded, ArrayRecord) and recorded.prng is not None
        if is_keys and isinstance(value, jax.Array):
            fits = value.shape == recorded.shape and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        else:
            fits = (value.shape, value.dtype.name) == (recorded.stored_shape, dtype) and value.dtype.isnative
        if not fits:
            stored, described = f"{value.dtype}{value.shape}", f"{recorded.dtype_text}{recorded.shape}"
            wrong.append(other_array_problem(path_text(outcome.path), stored, described))
    if wrong:
        raise FormatError(*wrong)
