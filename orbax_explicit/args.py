"""The arguments that `ExplicitCheckpointHandler` takes, spelled as `ocp.args` spells stock's."""

from orbax_explicit.handler import ExplicitRestore, ExplicitSave

__all__ = ["ExplicitRestore", "ExplicitSave"]
