"""`ExplicitCheckpointHandler`: whole trees through Orbax's v0 API, and the arguments it takes.

Arguments in Orbax's terms, translated for `_trees`, which saves and restores.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint.future import Future

from orbax_explicit import _compat
from orbax_explicit._arrays import await_directories
from orbax_explicit._codecs import Checksum, CodecPolicy, Compression
from orbax_explicit._errors import SaveRefusedError
from orbax_explicit._event_loops import run
from orbax_explicit._policy import RestorePolicy, checked_policy
from orbax_explicit._trees import RestoreRequest, SaveRequest, Trees, Unreduced, checked_unreduced

PyTree: TypeAlias = Any

_DEFAULT_CONCURRENT_GB = 96  # As in stock's StandardCheckpointHandler.


class ExplicitCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores a PyTree together with how each of its arrays was laid out.

    For `ocp.Checkpointer`, `ocp.AsyncCheckpointer` and `ocp.CheckpointManager`. It takes `ExplicitSave` and
    `ExplicitRestore`, and stock's `ocp.args.StandardSave` and `StandardRestore`.

    Every process calls `save`, `restore` and `metadata`. The primary process writes the record; each writes and reads
    its own shards.
    """

    def __init__(
        self,
        *,
        policy: RestorePolicy | None = None,
        save_concurrent_gb: int | None = _DEFAULT_CONCURRENT_GB,
        restore_concurrent_gb: int | None = _DEFAULT_CONCURRENT_GB,
        multiprocessing_options: ocp.options.MultiprocessingOptions | None = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        checksum: Checksum = "crc32",
        compression: Compression = "auto",
        **kwargs: Any,
    ) -> None:
        """Creates the handler.

        Args:
            policy: The choices for restores that bring none of their own.
            save_concurrent_gb: Gigabytes that may be in flight to storage at once; None for the default.
            restore_concurrent_gb: Gigabytes that may be in flight from storage at once; None for the default.
            multiprocessing_options: Which process is the primary one, and which take part.
            use_ocdbt: Whether to store arrays in an OCDBT database rather than in a directory each.
            use_zarr3: Whether to write Zarr version 3 rather than 2.
            checksum: `"crc32"` gives every chunk a checksum, so that a damaged one is noticed by whoever reads it, stock
                Orbax included; None leaves it out.
            compression: `"auto"` compresses what is nearly one value, such as zeros, since that takes less time than
                writing it; `"zstd"` everything; None nothing. `"zstd"` has a checksum in Zarr version 3 only.
            **kwargs: Other arguments of `ocp.PyTreeCheckpointHandler`.

        Raises:
            ValueError: There is no such checksum or compression, or not with this version of Zarr.
        """
        options = multiprocessing_options or ocp.options.MultiprocessingOptions()
        self._policy = checked_policy(policy)
        self._restore_concurrent_nbytes = restore_concurrent_gb * 10**9 if restore_concurrent_gb is not None else None
        self._trees = Trees(
            lambda type_handlers: ocp.PyTreeCheckpointHandler(
                save_concurrent_gb=save_concurrent_gb,
                restore_concurrent_gb=restore_concurrent_gb,
                multiprocessing_options=options,
                use_ocdbt=use_ocdbt,
                use_zarr3=use_zarr3,
                type_handler_registry=type_handlers,
                **kwargs,
            ),
            codec_policy=CodecPolicy(checksum=checksum, compression=compression),
            use_ocdbt=use_ocdbt,
            use_zarr3=use_zarr3,
            primary_host=options.primary_host,
            policy=self._policy,
        )

    async def async_save(
        self, directory: epath.Path, args: ExplicitSave | ocp.args.StandardSave
    ) -> list[Future] | None:
        """Starts a save. The record and the values are taken before this returns, files are written after.

        Raises:
            SaveRefusedError: Leaves could not come back as they are. No array has been written.
        """
        try:
            captured = self._trees.capture(_save_request(args))
        except SaveRefusedError:
            await_directories()
            raise
        return await self._trees.write(directory, captured)

    def check(self, args: ExplicitSave | ocp.args.StandardSave) -> None:
        """Refuses what a save would refuse, and does nothing else. A checkpointer's `force=True` removes first.

        Args:
            args: The arguments of the save.

        Raises:
            SaveRefusedError: Leaves could not come back as they are.
        """
        self._trees.capture(_save_request(args))

    def save(self, directory: epath.Path, args: ExplicitSave | ocp.args.StandardSave) -> None:
        """Saves, and returns when everything is written.

        Raises:
            SaveRefusedError: Leaves could not come back as they are. No array has been written.
        """

        async def save() -> None:
            for future in await self.async_save(directory, args=args) or []:
                future.result()

        run(save())

    def restore(self, directory: epath.Path, args: ExplicitRestore | ocp.args.StandardRestore | None = None) -> PyTree:
        """Restores the tree, with every array laid out as planned.

        Raises:
            RestoreRefusedError: Something cannot be restored as asked; lists everything. Nothing has been read.
            FormatError: The record is damaged or from a newer version.
        """
        args = _explicit(args)
        planned = self._trees.plan(
            directory,
            RestoreRequest(
                target=args.item,
                mesh=args.mesh,
                policy=args.policy or self._policy or RestorePolicy(),
                strict=args.strict,
                fallback=args.fallback_sharding,
                with_layouts=args.support_layout,
                max_in_flight_nbytes=self._restore_concurrent_nbytes,
            ),
        )
        return run(self._trees.read(planned))

    def metadata(self, directory: epath.Path) -> Any:
        """Orbax's metadata of the tree: shapes, dtypes and shardings, without the devices that saved it.

        Raises:
            FormatError: The record, or Orbax's list of the leaves, is damaged.
        """
        return self._trees.metadata(directory)

    def finalize(self, directory: epath.Path) -> None:
        """Merges what the processes wrote. Orbax calls it on the primary process, before it commits the item."""
        self._trees.finalize(directory)

    def close(self) -> None:
        """Releases what the handler holds."""
        self._trees.close()


@ocp.args.register_with_handler(ExplicitCheckpointHandler, for_save=True)
@dataclasses.dataclass
class ExplicitSave(ocp.args.CheckpointArgs):
    """Arguments of a save.

    Attributes:
        item: The tree to save.
        save_args: A tree of `ocp.SaveArgs` (or None) like `item`; None for the defaults.
        custom_metadata: JSON to keep beside the tree, opaque to Orbax.
        unreduced: For an array with a pending reduction: `"error"` refuses it by leaf name, `"reduce"` saves it reduced,
            by a collective before the save returns. The array that was passed stays as it is.

    Raises:
        ValueError: `unreduced` is neither.
    """

    item: PyTree
    save_args: PyTree | None = None
    custom_metadata: Any = None
    unreduced: Unreduced = "error"

    def __post_init__(self) -> None:
        checked_unreduced(self.unreduced)


@ocp.args.register_with_handler(ExplicitCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class ExplicitRestore(ocp.args.CheckpointArgs):
    """Arguments of a restore.

    Attributes:
        item: The tree to restore into; None for the tree as it was saved.
        mesh: The mesh to place recorded specs on; None for the recorded one.
        policy: The choices for this restore; None for the handler's.
        strict: Whether a target's shape must be the saved one; otherwise Orbax truncates or pads.
        fallback_sharding: The sharding of arrays whose recorded mesh does not fit as it is, as in `StandardRestore`;
            None to resize such a mesh, as the policy says.
        support_layout: Whether to restore with the on-device layouts of the target's leaves, as in `StandardRestore`.
    """

    item: PyTree = None
    mesh: Mesh | None = None
    policy: RestorePolicy | None = None
    strict: bool = True
    fallback_sharding: jax.sharding.Sharding | None = None
    support_layout: bool = False


_compat.record_as_stock(ExplicitCheckpointHandler)


def _save_request(args: ExplicitSave | ocp.args.StandardSave) -> SaveRequest:
    return SaveRequest(
        item=args.item,
        save_args=args.save_args,
        custom_metadata=args.custom_metadata,
        reduce=isinstance(args, ExplicitSave) and args.unreduced == "reduce",
    )


def _explicit(args: ExplicitRestore | ocp.args.StandardRestore | None) -> ExplicitRestore:
    """Stock's arguments, and none, as ours. A drift test names the field that stock gets and this does not carry."""
    if args is None:
        return ExplicitRestore()
    if isinstance(args, ExplicitRestore):
        return args
    return ExplicitRestore(
        args.item,
        strict=args.strict,
        fallback_sharding=args.fallback_sharding,
        support_layout=args.support_layout,
    )
