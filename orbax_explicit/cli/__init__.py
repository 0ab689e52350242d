"""The command line: `orbax-explicit COMMAND`.

`main` is the entry point. Typer is an extra, so it is imported when the entry point is called and not before; a
command imports what it needs when it runs, so that `--help` waits for nothing.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from orbax_explicit.cli._app import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"orbax-explicit: the command line needs {missing.name}: pip install 'orbax-explicit[demo]'")
    app()
