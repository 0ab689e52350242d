"""The lines at the head of what a benchmark prints: numbers are comparable only beside the machine and the versions."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import pathlib
import platform


def cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())


def machine_line() -> str:
    return f"machine   {cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def versions_line(*packages: str) -> str:
    """The versions of Python and of these packages, each by the name it is installed by."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"versions  Python {platform.python_version()}, {versions}"


def date_line() -> str:
    return f"date      {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, load average {os.getloadavg()[0]:.1f}"
