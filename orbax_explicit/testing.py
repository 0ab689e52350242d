"""What users need to test their own restores: devices that are not there, and device counts that are.

`fake_inventory` makes the devices of a run up, for plans that never touch one. `run_on_devices` runs a function
where a given number of devices is real: JAX fixes the count when its backend starts, so each count needs
processes of its own.

Nothing here imports JAX; the processes that `run_on_devices` starts do (see `_device_process`).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orbax_explicit._errors import OrbaxExplicitError, Problem
from orbax_explicit._records import Inventory, plural

_Result = TypeVar("_Result")

# JAX's CPU backend numbers the devices of process i from i * 2048 on.
_IDS_PER_PROCESS = 2048

# Below the ports that systems hand to outgoing connections, which could take one between choice and use.
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 200

_POLL_SECONDS = 0.02
# How long the peers of a failed process may take to fail by themselves, and so to say why.
_GRACE_SECONDS = 1.0
_OUTPUT_LINES_SHOWN = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailure:
    """How one process of `run_on_devices` failed.

    Attributes:
        process: Index of the process.
        returncode: Its exit status, negative for the signal that ended it; None if it ran past the timeout.
        traceback: The traceback of the exception that ended it; empty where there was none.
        output: The end of what it wrote to standard output and standard error.
    """

    process: int
    returncode: int | None
    traceback: str
    output: str

    def __str__(self) -> str:
        how = "ran past the timeout" if self.returncode is None else f"ended with status {self.returncode}"
        lines = [f"process {self.process} {how}"]
        for title, text in (("traceback", self.traceback), ("end of its output", self.output)):
            if text.strip():
                lines += [f"--- process {self.process}, {title} ---", text.rstrip()]
        return "\n".join(lines)


class DeviceProcessError(OrbaxExplicitError, RuntimeError):
    """A function that failed in a process of `run_on_devices`.

    Attributes:
        failures: Every process that failed, in process order. Those that were only stopped because another had
            failed are not among them.
    """

    def __init__(self, problem: Problem, failures: Sequence[ProcessFailure]) -> None:
        self.failures = tuple(failures)
        super().__init__(problem)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *map(str, self.failures)])


class DeviceProcessTimeoutError(DeviceProcessError, TimeoutError):
    """A function that did not return in time in a process of `run_on_devices`."""


def fake_inventory(
    devices: int,
    *,
    processes: int = 1,
    platform: str = "cpu",
    first_id: int = 0,
    device_kind: str | None = None,
    memory_kinds: Sequence[str] = ("device", "pinned_host", "unpinned_host"),
    default_memory_kind: str = "device",
) -> Inventory:
    """The inventory of a run that need not exist, numbered as JAX's CPU backend numbers its devices.

    Args:
        devices: Devices of each process, as in `run_on_devices`.
        processes: Processes of the run. The ids of process i start at `first_id + 2048 * i`.
        platform: `jax.Device.platform`.
        first_id: Id of the first device of the first process.
        device_kind: `jax.Device.device_kind`; the platform's name if it is not given.
        memory_kinds: Memory kinds that the devices offer.
        default_memory_kind: The kind that an array gets when none is named.

    Raises:
        RecordError: There is no device, or the default memory kind is not among the kinds.
        ValueError: One process has more devices than there are ids between two processes.
    """
    if processes > 1 and devices > _IDS_PER_PROCESS:
        raise ValueError(f"a process has at most {_IDS_PER_PROCESS} devices where there are several, not {devices}")
    owners = [(process, device) for process in range(processes) for device in range(devices)]
    return Inventory(
        platform=platform,
        device_kind=platform if device_kind is None else device_kind,
        device_ids=tuple(first_id + _IDS_PER_PROCESS * process + device for process, device in owners),
        process_indices=tuple(process for process, _ in owners),
        memory_kinds=tuple(sorted(memory_kinds)),
        default_memory_kind=default_memory_kind,
    )


def run_on_devices(
    function: Callable[..., _Result],
    *args: Any,
    devices: int,
    processes: int = 1,
    timeout_seconds: float = 180,
    hidden_modules: Sequence[str] = (),
) -> list[_Result]:
    """Runs a function in fresh processes that have the given number of virtual CPU devices.

    With several processes, `jax.distributed` joins them over loopback, with gloo for collectives; JAX then has
    `processes * devices` devices, and every process calls the function with the same arguments. The function's
    file is imported there by its path, with its own directory on `sys.path`, before the devices exist: on import it
    may configure JAX, but not make arrays. `JAX_*` variables and `XLA_FLAGS` of
    this process do not reach them.

    Args:
        function: A function that a module's file defines at its top level.
        *args: Its arguments, which travel by pickle.
        devices: Devices of each process.
        processes: Number of processes.
        timeout_seconds: When all of them are killed, from their start on.
        hidden_modules: Modules that cannot be imported there, as if they were not installed.

    Returns:
        What the function returned in each process, by pickle, in process order.

    Raises:
        DeviceProcessError: The function raised, or its process died; shows the traceback and the last output.
        DeviceProcessTimeoutError: A process did not come to its end in time.
        ValueError: The function cannot be found again by its file and name, or a count is below 1.
    """
    if devices < 1 or processes < 1:
        raise ValueError(f"devices and processes must be at least 1, not {devices} and {processes}")
    call = {
        **_location(function),
        "devices": devices,
        "processes": processes,
        "hidden_modules": tuple(hidden_modules),
        "arguments": pickle.dumps(args),
    }
    with tempfile.TemporaryDirectory(prefix="run-on-devices-") as name, _reserved_port(processes > 1) as port:
        directory = pathlib.Path(name)
        (directory / "call.pickle").write_bytes(pickle.dumps({**call, "port": port}))
        _run_processes(directory, call, processes, timeout_seconds)
        return [
            pickle.loads((directory / f"result-{process}.pickle").read_bytes())  # noqa: S301 - our own processes'
            for process in range(processes)
        ]


def _location(function: Callable[..., Any]) -> dict[str, str]:
    """Where another process finds the function: its file, its module's name and its own qualified name."""
    qualname = getattr(function, "__qualname__", "")
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or not pathlib.Path(file).is_file() or "<" in qualname:
        raise ValueError(
            f"{function!r} cannot be found again in another process: it must be defined with `def` at the top level "
            "of a module that is a file"
        )
    return {"file": str(pathlib.Path(file).resolve()), "module": function.__module__, "qualname": qualname}


def _run_processes(directory: pathlib.Path, call: Mapping[str, Any], processes: int, timeout_seconds: float) -> None:
    """Starts the processes and waits until all have succeeded; leaves none behind, whatever happens."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(processes):
            running.append(_start(directory, process))
        unfinished, timed_out = _wait(running, timeout_seconds)
    finally:
        for child in running:
            _kill(child)
    failures = [
        ProcessFailure(
            process=process,
            returncode=None if process in unfinished else child.returncode,
            traceback=_text(directory / f"traceback-{process}.txt"),
            output=_tail(_text(directory / f"output-{process}.txt")),
        )
        for process, child in enumerate(running)
        if (timed_out if process in unfinished else child.returncode)
    ]
    if not failures:
        return
    where = f"{plural(processes, 'process')} with {plural(call['devices'], 'device')} each"
    if timed_out:
        problem = Problem(
            could_not=f"{call['qualname']} did not return within {timeout_seconds:g} s on {where}",
            fix="raise timeout_seconds=, or see below how far it came; a collective hangs where a process skips it",
        )
        raise DeviceProcessTimeoutError(problem, failures)
    raise DeviceProcessError(Problem(could_not=f"{call['qualname']} failed on {where}"), failures)


def _start(directory: pathlib.Path, process: int) -> subprocess.Popen[bytes]:
    """Starts one process, as the leader of a process group of its own, with its output going to a file."""
    script = pathlib.Path(__file__).with_name("_device_process.py")
    with (directory / f"output-{process}.txt").open("wb") as output:
        return subprocess.Popen(
            # -P: the script's directory, which is this package's, must not be on the child's path.
            [sys.executable, "-P", str(script), str(directory), str(process)],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _environment() -> dict[str, str]:
    """This process's environment without what configures JAX, or could come between processes on one machine."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_") and name != "XLA_FLAGS" and not name.lower().endswith("_proxy")
    }
    return {**kept, "JAX_PLATFORMS": "cpu"}


def _wait(running: Sequence[subprocess.Popen[bytes]], timeout_seconds: float) -> tuple[frozenset[int], bool]:
    """Waits until all have ended, or one has failed and its peers have had a moment to, or time is up.

    Returns:
        The processes that are still running, and whether that is because time is up.
    """
    deadline = time.monotonic() + timeout_seconds
    someone_failed = False
    # A list: each one is polled, or the failure of a later one would go unseen while an earlier one waits for it.
    while None in [child.poll() for child in running]:
        if not someone_failed and any(child.returncode for child in running):
            someone_failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() >= deadline:
            unfinished = frozenset(process for process, child in enumerate(running) if child.returncode is None)
            return unfinished, not someone_failed
        time.sleep(_POLL_SECONDS)
    return frozenset(), False


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it has started, and waits for it."""
    # The group outlives its leader while it has members; its id is not given to another process until then.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def _reserved_port(needed: bool) -> Iterator[int]:
    """A loopback TCP port that is free, and that no other caller of this function gets while it is held."""
    if not needed:
        yield 0
        return
    choose = random.SystemRandom()
    for _ in range(_PORT_TRIES):
        port = choose.choice(_PORTS)
        # The UDP port of the same number is the lock between test runs on one machine: it leaves TCP's free.
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lock,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe,
        ):
            try:
                lock.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.close()
            yield port
            return
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop} in {_PORT_TRIES} tries")


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_OUTPUT_LINES_SHOWN:])
