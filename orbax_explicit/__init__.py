"""JAX checkpoints that come back laid out the way they were meant, on whatever devices are here now."""

from orbax_explicit import args
from orbax_explicit._arrays import ExplicitArrayHandler
from orbax_explicit._binding import resolve_mesh
from orbax_explicit._errors import (
    CheckpointLayoutError,
    FormatError,
    MeshMismatchError,
    OrbaxExplicitError,
    Problem,
    RecordError,
    RestoreRefusedError,
    SaveRefusedError,
)
from orbax_explicit._plan import RestorePlan
from orbax_explicit._policy import RestorePolicy
from orbax_explicit._records import Inventory, Manifest
from orbax_explicit._restoring import plan_restore
from orbax_explicit._sidecar import read_manifest
from orbax_explicit._verifying import Damage, VerifyReport, latest_good_step, verify
from orbax_explicit.checkpointer import StandardCheckpointer
from orbax_explicit.handler import ExplicitCheckpointHandler
from orbax_explicit.registration import handler_registry, register, registered, unregister

__all__ = [
    "CheckpointLayoutError",
    "Damage",
    "ExplicitArrayHandler",
    "ExplicitCheckpointHandler",
    "FormatError",
    "Inventory",
    "Manifest",
    "MeshMismatchError",
    "OrbaxExplicitError",
    "Problem",
    "RecordError",
    "RestorePlan",
    "RestorePolicy",
    "RestoreRefusedError",
    "SaveRefusedError",
    "StandardCheckpointer",
    "VerifyReport",
    "args",
    "handler_registry",
    "latest_good_step",
    "plan_restore",
    "read_manifest",
    "register",
    "registered",
    "resolve_mesh",
    "unregister",
    "verify",
]
