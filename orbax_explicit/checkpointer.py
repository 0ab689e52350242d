"""`StandardCheckpointer`: the drop-in for `ocp.StandardCheckpointer`."""

from __future__ import annotations

from os import PathLike
from typing import Any, TypeAlias

import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from orbax_explicit._policy import RestorePolicy
from orbax_explicit._trees import Unreduced
from orbax_explicit.handler import ExplicitCheckpointHandler, ExplicitRestore, ExplicitSave

PyTree: TypeAlias = Any


class StandardCheckpointer(ocp.AsyncCheckpointer):
    """Saves asynchronously and restores a PyTree, with every array laid out as it was meant.

    ::

        with oxe.StandardCheckpointer() as ckptr:
            ckptr.save(path, state)
            ckptr.wait_until_finished()
            state = ckptr.restore(path)

    Every process calls `save`, `restore` and `wait_until_finished`.
    """

    def __init__(
        self,
        *,
        handler: ExplicitCheckpointHandler | None = None,
        async_options: ocp.options.AsyncOptions | None = None,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        file_options: ocp.options.FileOptions | None = None,
        atomicity_options: Any = None,
        checkpoint_metadata_store: ocp.metadata.MetadataStore | None = None,
        temporary_path_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Creates the checkpointer.

        Args:
            handler: The handler; None for a new one.
            async_options: See `ocp.AsyncCheckpointer`.
            multiprocessing_options: See `ocp.AsyncCheckpointer`.
            file_options: See `ocp.AsyncCheckpointer`.
            atomicity_options: See `ocp.AsyncCheckpointer`.
            checkpoint_metadata_store: See `ocp.AsyncCheckpointer`.
            temporary_path_class: See `ocp.AsyncCheckpointer`.
            **kwargs: Arguments of `ExplicitCheckpointHandler`, where none is given.

        Raises:
            ValueError: Both a handler and arguments for one are given.
        """
        if handler is not None and kwargs:
            raise ValueError(f"pass {sorted(kwargs)} to the handler, or no handler")
        options = {
            "async_options": async_options,
            "multiprocessing_options": multiprocessing_options,
            "file_options": file_options,
            "atomicity_options": atomicity_options,
            "checkpoint_metadata_store": checkpoint_metadata_store,
            "temporary_path_class": temporary_path_class,
        }
        super().__init__(
            handler or ExplicitCheckpointHandler(multiprocessing_options=multiprocessing_options, **kwargs),
            # What is left out takes Orbax's default.
            **{name: value for name, value in options.items() if value is not None},
        )

    def save(
        self,
        directory: str | PathLike[str],
        state: PyTree,
        *,
        save_args: PyTree | None = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        unreduced: Unreduced = "error",
    ) -> None:
        """Starts a save; `wait_until_finished` ends it.

        The values and their layout are taken before this returns: arrays may be donated, and NumPy arrays changed,
        while files are written.

        Args:
            directory: Where to save; it does not exist yet.
            state: The tree to save.
            save_args: A tree of `ocp.SaveArgs` (or None) like `state`.
            force: Whether to replace what is there.
            custom_metadata: JSON to keep in the checkpoint's own metadata.
            unreduced: For an array with a pending reduction: `"error"` refuses it by leaf name, `"reduce"` saves it
                reduced, by a collective before this returns.

        Raises:
            SaveRefusedError: Leaves could not come back as they are. No array has been written.
            ValueError: The path is not absolute.
        """
        if not epath.Path(directory).is_absolute():
            # Orbax would say so in the background, after the call has returned.
            raise ValueError(f"the path must be absolute, as in Orbax, not {str(directory)!r}")
        args = ExplicitSave(state, save_args, unreduced=unreduced)
        if force and isinstance(self.handler, ExplicitCheckpointHandler):
            # Orbax removes what is there before the handler could refuse.
            self.handler.check(args)
        super().save(directory, args=args, force=force, custom_metadata=custom_metadata)

    def restore(
        self,
        directory: str | PathLike[str],
        target: PyTree = None,
        *,
        strict: bool = True,
        mesh: Mesh | None = None,
        policy: RestorePolicy | None = None,
    ) -> PyTree:
        """Restores a tree. Every array lands as `plan_restore` with the same arguments says.

        Args:
            directory: What was passed to `save`, or the directory of a step or item.
            target: The tree to restore into: arrays, or `jax.ShapeDtypeStruct`s with or without shardings, on
                concrete or abstract meshes. None for the tree and the layout as they were saved.
            strict: Whether a target's shape must be the saved one; otherwise Orbax truncates or pads.
            mesh: The mesh to place recorded specs on; None for the recorded one.
            policy: The choices for this restore; None for the handler's.

        Returns:
            The restored tree.

        Raises:
            RestoreRefusedError: Something cannot be restored as asked; lists everything. Nothing has been read.
            FormatError: The record is damaged or from a newer version.
        """
        return super().restore(directory, args=ExplicitRestore(target, mesh=mesh, policy=policy, strict=strict))
