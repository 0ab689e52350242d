"""Making Orbax use the handlers without every call naming them.

`handler_registry` for a `CheckpointManager` whose callers say `ocp.args.StandardSave` and `StandardRestore`;
`register` for code that one does not own, which makes every stock v0 handler of the process use
`ExplicitArrayHandler` for its `jax.Array` leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp

from orbax_explicit._arrays import ExplicitArrayHandler
from orbax_explicit._policy import RestorePolicy
from orbax_explicit.handler import ExplicitCheckpointHandler, ExplicitRestore, ExplicitSave


def handler_registry(
    *item_names: str, policy: RestorePolicy | None = None, handler: ExplicitCheckpointHandler | None = None
) -> ocp.handlers.CheckpointHandlerRegistry:
    """A registry in which stock's `StandardSave` and `StandardRestore` lead to an `ExplicitCheckpointHandler`.

    Each of the four argument types is registered under no name and under each item's name, so that `restore(step)`
    and `item_metadata` work without arguments.

    Args:
        *item_names: Names of items; `"default"` for a manager without named items.
        policy: The choices for restores.
        handler: The handler; None for a new one.

    Raises:
        ValueError: Both a handler and a policy are given.
    """
    if handler is not None and policy is not None:
        raise ValueError("pass the policy to the handler, or no handler")
    handler = handler or ExplicitCheckpointHandler(policy=policy)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name in (None, *item_names):
        for args in (ExplicitSave, ExplicitRestore, ocp.args.StandardSave, ocp.args.StandardRestore):
            registry.add(name, args, handler)
    return registry


_replaced: list[ocp.type_handlers.TypeHandler] = []
"""The handler for `jax.Array` that `register` took out; empty while nothing is registered."""


def register(policy: RestorePolicy | None = None) -> None:
    """Makes every stock v0 handler in this process save and restore `jax.Array` leaves with their shardings.

    Handlers that are made later are meant too; those with a type handler registry of their own are not. Only arrays
    and their shardings: a type handler sees no containers, and no leaf of another type, so that an array and a NumPy
    array under one storage name are not told apart. Explicit `ArrayRestoreArgs` are honoured. In a running
    event loop (a notebook) the mesh of `jax.set_mesh` cannot be seen from where Orbax calls. What is refused without a
    target comes as stock's own `ValueError`, of which our error is the cause. Called again, it replaces
    the policy. Every process calls it.

    Args:
        policy: The choices for restores; those about the tree and its leaves (`missing`, `extra`, `cast`,
            `rename_leaves`, `rules`, `arrays`) cannot be followed here. Stock Orbax casts to the dtype of a target.

    Raises:
        ValueError: The policy has choices about the tree.
    """
    handler = ExplicitArrayHandler(policy=policy)
    if not _replaced:
        _replaced.append(ocp.type_handlers.get_type_handler(jax.Array))
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def unregister() -> None:
    """Puts back the handler that `register` replaced.

    Does nothing where nothing is registered, and leaves a handler alone that somebody else has registered since.
    """
    if not _replaced:
        return
    before = _replaced.pop()
    if isinstance(ocp.type_handlers.get_type_handler(jax.Array), ExplicitArrayHandler):
        ocp.type_handlers.register_type_handler(jax.Array, before, override=True)


@contextlib.contextmanager
def registered(policy: RestorePolicy | None = None) -> Iterator[None]:
    """`register` on entry, `unregister` on exit; within an outer registration, that one again.

    Args:
        policy: The choices for restores.
    """
    before = ocp.type_handlers.get_type_handler(jax.Array)
    outer = bool(_replaced)
    register(policy)
    try:
        yield
    finally:
        if outer:
            ocp.type_handlers.register_type_handler(jax.Array, before, override=True)
        else:
            unregister()
