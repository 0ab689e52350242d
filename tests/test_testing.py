"""`testing`: inventories that are made up, and functions that run where the devices are real."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from orbax_explicit import testing
from orbax_explicit._errors import OrbaxExplicitError, RecordError
from orbax_explicit.testing import DeviceProcessError, DeviceProcessTimeoutError, fake_inventory, run_on_devices


@dataclasses.dataclass(frozen=True)
class Seen:
    """A class of this module, as an argument and as a result."""

    value: int


def describe_run() -> dict[str, Any]:
    return {
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "local": jax.local_device_count(),
        "ids": tuple(device.id for device in jax.devices()),
        "owners": tuple(device.process_index for device in jax.devices()),
        "platform": jax.devices()[0].platform,
        "kind": jax.devices()[0].device_kind,
        "memory_kinds": tuple(sorted(memory.kind for memory in jax.devices()[0].addressable_memories())),
        "default_memory_kind": jax.devices()[0].default_memory().kind,
    }


def gather_process_indices() -> list[int]:
    return [int(i) for i in multihost_utils.process_allgather(np.asarray(jax.process_index()))]


def add(seen: Seen, more: int) -> Seen:
    return Seen(seen.value + more)


def environment() -> dict[str, str]:
    return dict(os.environ)


def module_search_path() -> list[str]:
    return sys.path


def imports(*names: str) -> list[bool]:
    found = []
    for name in names:
        try:
            __import__(name)
        except ModuleNotFoundError:
            found.append(False)
        else:
            found.append(True)
    return found


def fail_on(process: int) -> None:
    if jax.process_index() == process:
        print("about to fail", file=sys.stderr)
        raise ArithmeticError(f"process {process} cannot go on")
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def return_what_cannot_be_pickled() -> object:
    return lambda: None


def hang(pid_file: str) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(pid_file).write_text(f"{os.getpid()} {grandchild.pid}")
    print("came this far", flush=True)
    time.sleep(600)


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class TestFakeInventory:
    def test_one_process(self) -> None:
        """Ids count up from the first one, and every device belongs to process 0."""
        inventory = fake_inventory(4, first_id=8)
        assert inventory.device_ids == (8, 9, 10, 11)
        assert inventory.process_indices == (0, 0, 0, 0)
        assert str(inventory) == "4 cpu devices, 1 process"

    def test_several_processes(self) -> None:
        """Each process has that many devices, with ids 2048 apart."""
        inventory = fake_inventory(2, processes=3)
        assert inventory.device_ids == (0, 1, 2048, 2049, 4096, 4097)
        assert inventory.process_indices == (0, 0, 1, 1, 2, 2)

    def test_other_platform(self) -> None:
        """A platform with other memories is made up by its words."""
        inventory = fake_inventory(8, platform="tpu", device_kind="TPU v4", memory_kinds=["device", "a"])
        assert (inventory.platform, inventory.device_kind) == ("tpu", "TPU v4")
        assert inventory.memory_kinds == ("a", "device")

    def test_no_device_is_refused(self) -> None:
        """An inventory without devices breaks the record's own invariant."""
        with pytest.raises(RecordError, match="no devices"):
            fake_inventory(0)

    def test_overlapping_ids_are_refused(self) -> None:
        """More devices than JAX leaves ids for would overlap those of the next process."""
        with pytest.raises(ValueError, match="at most 2048"):
            fake_inventory(2049, processes=2)


class TestRunOnDevices:
    @pytest.mark.parametrize("devices", [1, 16])
    def test_device_count(self, devices: int) -> None:
        """The function sees as many devices as were asked for, and they are what `fake_inventory` makes up."""
        (run,) = run_on_devices(describe_run, devices=devices)
        fake = fake_inventory(devices)
        assert run["local"] == len(run["ids"]) == devices
        assert run["ids"] == fake.device_ids
        assert run["owners"] == fake.process_indices
        assert (run["platform"], run["kind"]) == (fake.platform, fake.device_kind)
        assert run["memory_kinds"] == fake.memory_kinds
        assert run["default_memory_kind"] == fake.default_memory_kind

    def test_two_processes(self) -> None:
        """Two processes of four devices are one run of eight; results come in process order."""
        first, second = run_on_devices(describe_run, devices=4, processes=2)
        assert (first["process"], second["process"]) == (0, 1)
        assert first["processes"] == second["processes"] == 2
        assert first["local"] == second["local"] == 4
        assert len(first["ids"]) == 8
        assert first["ids"] == second["ids"] == fake_inventory(4, processes=2).device_ids
        assert first["owners"] == second["owners"] == fake_inventory(4, processes=2).process_indices

    def test_collectives(self) -> None:
        """Processes exchange data: each learns the other's index."""
        assert run_on_devices(gather_process_indices, devices=1, processes=2) == [[0, 1], [0, 1]]

    def test_classes_of_a_test_module_travel(self) -> None:
        """Arguments and results may be of classes that the function's own module defines."""
        assert run_on_devices(add, Seen(2), 3, devices=1) == [Seen(5)]

    def test_settings_of_this_process_do_not_reach_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Variables that configure JAX here are not there."""
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
        monkeypatch.setenv("JAX_ENABLE_X64", "1")
        monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
        (seen,) = run_on_devices(environment, devices=2)
        assert "XLA_FLAGS" not in seen
        assert {name: value for name, value in seen.items() if name.startswith("JAX_")} == {"JAX_PLATFORMS": "cpu"}

    def test_the_package_directory_is_not_on_the_path(self) -> None:
        """The child runs a script of the package, whose neighbours must not become top-level modules."""
        (path,) = run_on_devices(module_search_path, devices=1)
        assert str(pathlib.Path(testing.__file__).parent) not in path
        assert path[0] == str(pathlib.Path(__file__).parent)

    def test_hidden_modules(self) -> None:
        """Hidden modules, and what lies below them, are not to be imported; others are."""
        names = ("flax", "flax.linen", "sklearn.svm", "sklearn", "optax")
        hidden = ["flax", "sklearn.svm"]
        assert run_on_devices(imports, *names, devices=1, hidden_modules=hidden) == [[False, False, False, True, True]]

    def test_this_package_can_be_hidden(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function runs where this package cannot be imported: what starts it there does not need it."""
        (tmp_path / "leaving.py").write_text(
            "import importlib.util, sys\n"
            "def without():\n"
            "    try:\n"
            "        import orbax_explicit\n"
            "    except ModuleNotFoundError:\n"
            "        loaded = [m for m in sys.modules if m.startswith('orbax_explicit.')]\n"
            "        return loaded, importlib.util.find_spec('orbax_explicit')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        import leaving

        assert run_on_devices(leaving.without, devices=1, hidden_modules=["orbax_explicit"]) == [([], None)]

    def test_functions_of_a_package_are_found(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function of a package's module is imported as part of its package."""
        package = tmp_path / "outer_package"
        package.mkdir()
        (package / "__init__.py").write_text("BASE = 40\n")
        (package / "inner.py").write_text("from . import BASE\ndef answer():\n    return BASE + 2, __name__\n")
        monkeypatch.syspath_prepend(tmp_path)
        from outer_package import inner

        assert run_on_devices(inner.answer, devices=1) == [(42, "outer_package.inner")]

    def test_functions_of_a_program_are_found(self, tmp_path: pathlib.Path) -> None:
        """A function of the main program is found, and the program is not run again."""
        program = tmp_path / "program.py"
        program.write_text(
            "from orbax_explicit.testing import run_on_devices\n"
            "def answer():\n"
            "    return 42\n"
            "if __name__ == '__main__':\n"
            "    print('answers', run_on_devices(answer, devices=1))\n"
        )
        done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
        assert done.stdout == "answers [42]\n"

    @pytest.mark.parametrize(
        "function", [lambda: None, len, Seen(1), Seen], ids=["lambda", "builtin", "value", "class"]
    )
    def test_what_cannot_be_found_again_is_refused(self, function: Any) -> None:
        """Only what a file defines at its top level can be found by another process."""
        with pytest.raises(ValueError, match="top level of a module"):
            run_on_devices(function, devices=1)

    @pytest.mark.parametrize("counts", [{"devices": 0}, {"devices": 1, "processes": 0}], ids=str)
    def test_counts_below_one_are_refused(self, counts: dict[str, int]) -> None:
        """There is no run without a device or a process."""
        with pytest.raises(ValueError, match="at least 1"):
            run_on_devices(describe_run, **counts)

    def test_a_failure_shows_the_childs_traceback_and_output(self) -> None:
        """The error shows where the function raised, and what it wrote before."""
        with pytest.raises(DeviceProcessError) as caught:
            run_on_devices(fail_on, 0, devices=3)
        text = str(caught.value)
        assert text.startswith("fail_on failed on 1 process with 3 devices each\n")
        assert "ArithmeticError: process 0 cannot go on" in text
        assert 'raise ArithmeticError(f"process {process} cannot go on")' in text
        assert "about to fail" in text
        (failure,) = caught.value.failures
        assert (failure.process, failure.returncode) == (0, 1)
        assert isinstance(caught.value, OrbaxExplicitError)
        assert isinstance(caught.value, RuntimeError)

    def test_one_failure_stops_the_others(self) -> None:
        """Processes that wait for the failed one are killed, long before the timeout."""
        with pytest.raises(DeviceProcessError) as caught:
            run_on_devices(fail_on, 1, devices=1, processes=2, timeout_seconds=60)
        assert not isinstance(caught.value, DeviceProcessTimeoutError)
        (failure,) = [f for f in caught.value.failures if f.traceback]
        assert failure.process == 1
        assert "ArithmeticError: process 1 cannot go on" in failure.traceback

    def test_a_crash_is_a_failure(self) -> None:
        """A process that dies without an exception is reported with the signal."""
        with pytest.raises(DeviceProcessError) as caught:
            run_on_devices(die, devices=1)
        (failure,) = caught.value.failures
        assert (failure.returncode, failure.traceback) == (-signal.SIGSEGV, "")

    def test_a_result_that_cannot_be_pickled_is_a_failure(self) -> None:
        """The traceback says that the result could not travel."""
        with pytest.raises(DeviceProcessError, match=r"(?i)pickle"):
            run_on_devices(return_what_cannot_be_pickled, devices=1)

    def test_a_hung_process_is_killed_with_all_it_started(self, tmp_path: pathlib.Path) -> None:
        """At the timeout the whole process group goes, and the error shows how far it came."""
        pid_file = tmp_path / "pids"
        with pytest.raises(DeviceProcessTimeoutError) as caught:
            run_on_devices(hang, str(pid_file), devices=1, timeout_seconds=10)
        assert isinstance(caught.value, TimeoutError)
        assert "hang did not return within 10 s" in str(caught.value)
        assert "came this far" in str(caught.value)
        (failure,) = caught.value.failures
        assert failure.returncode is None
        for pid in pid_file.read_text().split():
            assert not is_running(int(pid))

    def test_ports_are_not_handed_out_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two runs at a time, as under pytest-xdist, get different ports."""
        with testing._reserved_port(True) as first:
            monkeypatch.setattr(testing, "_PORTS", range(first, first + 1))
            with pytest.raises(OSError, match="no free port"), testing._reserved_port(True):
                pass
