"""One process of `orbax_explicit.testing.run_on_devices`: a script, run by its path and never imported.

It owns what happens in the child: modules are hidden, JAX gets its devices and its peers, the function is
found in its file and called, and what comes of it is left in a file. `testing` owns the rest.

It imports nothing of this package, and JAX only once the hidden modules are hidden, so that a test can show
what works where a module is absent.
"""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def main(directory: pathlib.Path, process: int) -> None:
    """Makes the call that `directory` describes as its process number `process`, and leaves the outcome there."""
    try:
        call = pickle.loads((directory / "call.pickle").read_bytes())  # noqa: S301 - the parent wrote it
        hide_modules(call["hidden_modules"])
        module = load_module(call["module"], pathlib.Path(call["file"]))
        start_jax(process, call["processes"], call["devices"], call["port"])
        function: Callable[..., Any] = operator.attrgetter(call["qualname"])(module)
        arguments = pickle.loads(call["arguments"])  # noqa: S301 - the parent wrote it
        result = pickle.dumps(function(*arguments))
        (directory / f"result-{process}.pickle").write_bytes(result)
        if call["processes"] > 1:
            shut_down_jax()
    except BaseException:  # noqa: BLE001 - whatever it is, the parent reports it
        (directory / f"traceback-{process}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: JAX would wait at exit for peers that may never come.
        os._exit(1)


def hide_modules(names: Sequence[str]) -> None:
    """Makes the named modules and all below them unimportable; `find_spec` no longer finds them either."""
    for name in names:
        loaded = [other for other in sys.modules if other == name or other.startswith(f"{name}.")]
        for other in loaded:
            del sys.modules[other]
        # Python's own mark for "there is no such module"; typeshed knows only modules.
        sys.modules[name] = None  # type: ignore[assignment]


def load_module(name: str, file: pathlib.Path) -> ModuleType:
    """Imports a module from its file, under its name, so that its classes pickle alike here and in the parent."""
    depth = name.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]
    if root.joinpath(*name.split(".")) in (file.with_suffix(""), file.parent) and depth:
        # Last, so that what is installed goes before what happens to lie beside the package.
        sys.path.append(str(root))
        return importlib.import_module(name)
    # What a test module finds beside itself, it finds here as well.
    sys.path.insert(0, str(file.parent))
    main_module = name == "__main__"
    # As multiprocessing does: the parent's main module is imported here, but must not run as a program.
    spec = importlib.util.spec_from_file_location("__mp_main__" if main_module else name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python source file", name=name, path=str(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if main_module:
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


def start_jax(process: int, processes: int, devices: int, port: int) -> None:
    """Gives JAX its virtual CPU devices and, where there are several processes, joins them. Collective."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            coordinator_address=address,
            coordinator_bind_address=address,
            num_processes=processes,
            process_id=process,
            cluster_detection_method="deactivate",
        )
    present = (jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count())
    if present != (process, processes, devices, processes * devices):
        raise RuntimeError(
            f"process {process} of {processes} with {devices} devices each was asked for, but JAX has process "
            f"{present[0]} of {present[1]}, with {present[2]} devices here and {present[3]} in all"
        )


def shut_down_jax() -> None:
    """Waits until every process has come as far, then leaves the others. Collective."""
    import jax

    jax.distributed.shutdown()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
