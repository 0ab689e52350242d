"""How much memory a restore takes at its peak, beside the bytes that it leaves on the devices or on the host.

    python benchmarks/bench_restore_memory.py [--check] [--case NAME] [--megabytes N]

Each case writes one checkpoint and restores it twice, each time in a fresh process of eight CPU devices: with this
package and with stock Orbax. A process resets the high-water mark of its resident set just before the restore (Linux:
`5` to `/proc/self/clear_refs`) and reads it just after, so nothing between two samples is missed. What imports, set-up
and compilation take during the restore counts too.

"lands" is what the restored arrays hold on the devices, each replica counted; "distinct" is one copy of it, which is
all that there is where replicas share memory. With `--check` the program fails where this package's peak is more than
1.2 times the distinct bytes, and 16 KiB for each array: so much, whatever it holds, do an array's own objects take.

A chunk is decoded whole, so a restore needs room for one beside what lands, encoded and decoded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from machine import date_line, machine_line, versions_line
from measured_process import peak_of, run_child

MAX_RATIO = 1.2
ARRAY_NBYTES = 16 << 10
DEVICES = 8
READERS = ("ours", "stock")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A state of about so many bytes, and how it is restored.

    Attributes:
        build: Makes the state on a mesh, of this many bytes.
        on_host: Whether it is restored to NumPy on the host.
        use_zarr3: Whether it is written as Zarr 3.
        megabytes: Size of the state, whatever the command line says; 0 for what it says.
    """

    build: Callable[[Any, int], Any]
    on_host: bool = False
    use_zarr3: bool = False
    megabytes: int = 0


def normals(mesh: Any, count: int, nbytes: int, dtype: str = "float32", spec: tuple[Any, ...] = ("d", "m")) -> Any:
    """Arrays of normals, 1024 columns each, that amount to so many bytes."""
    import jax
    import numpy as np

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    random = np.random.default_rng(0)
    rows = max(8, nbytes // count // np.dtype(dtype).itemsize // 1024 // 8 * 8)
    return [
        jax.device_put(random.standard_normal((rows, 1024), np.float32).astype(dtype), sharding) for _ in range(count)
    ]


def one_array(mesh: Any, nbytes: int) -> Any:
    return {"large": normals(mesh, 1, nbytes)}


def medium_arrays(mesh: Any, nbytes: int) -> Any:
    return {"medium": normals(mesh, 256, nbytes)}


def bfloat16(mesh: Any, nbytes: int) -> Any:
    return {"bfloat16": normals(mesh, 32, nbytes, "bfloat16")}


def mixed(mesh: Any, nbytes: int) -> Any:
    return {
        "sharded": normals(mesh, 8, nbytes // 4),
        "partly": normals(mesh, 8, nbytes // 4, spec=(None, "m")),
        "replicated": normals(mesh, 8, nbytes // 4, spec=()),
        "medium": normals(mesh, 64, nbytes // 4, spec=("d",)),
    }


def tiny_arrays(mesh: Any, nbytes: int) -> Any:
    return {"tiny": normals(mesh, nbytes // 2**15, nbytes)}


def prng_keys(mesh: Any, nbytes: int) -> Any:
    import jax

    def keys(seed: int) -> Any:
        spec = jax.sharding.PartitionSpec(("d", "m"))
        data = jax.random.bits(jax.random.key(seed), (nbytes // 8 // 8, 2), "uint32")
        return jax.random.wrap_key_data(jax.device_put(data, jax.sharding.NamedSharding(mesh, spec)))

    return [keys(seed) for seed in range(8)]


CASES = {
    "one array": Case(build=one_array),
    "one array, Zarr 3": Case(build=one_array, use_zarr3=True),
    "256 arrays": Case(build=medium_arrays),
    "bfloat16": Case(build=bfloat16),
    "sharded and replicated": Case(build=mixed),
    "PRNG keys": Case(build=prng_keys),
    "tiny arrays": Case(build=tiny_arrays, megabytes=128),
    "one array, on the host": Case(build=one_array, on_host=True),
    "256 arrays, on the host": Case(build=medium_arrays, on_host=True),
    "mixed, on the host": Case(build=mixed, on_host=True),
}


# In the processes that write and measure.


def mesh_of_eight() -> Any:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def write(case: Case, directory: pathlib.Path, nbytes: int) -> None:
    mesh = mesh_of_eight()
    import jax
    import numpy as np

    import orbax_explicit as oxe

    state = case.build(mesh, nbytes)
    with oxe.StandardCheckpointer(use_zarr3=case.use_zarr3) as checkpointer:
        checkpointer.save(directory / "state", state)
    leaves = jax.tree.leaves(state)
    data = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    sums = [float(np.asarray(x).astype(np.float64).sum()) for x in data]
    (directory / "sums.json").write_text(json.dumps(sums))


def measure(case: Case, reader: str, directory: pathlib.Path, nbytes: int) -> dict[str, float]:
    mesh_of_eight()
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    import orbax_explicit as oxe

    path = directory / "state"
    target = stock_target(path)
    restore: Callable[[], Any]
    if reader == "ours":
        checkpointer = oxe.StandardCheckpointer()
        host = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), target) if case.on_host else None
        restore = lambda: checkpointer.restore(path, host)  # noqa: E731  # as the next two: what is measured
    elif case.on_host:
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
        restore = lambda: ocp.PyTreeCheckpointer().restore(path, restore_args=args)  # noqa: E731
    else:
        restore = lambda: ocp.StandardCheckpointer().restore(path, target)  # noqa: E731
    start = time.perf_counter()
    peak, state = peak_of(lambda: jax.block_until_ready(restore()))
    seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(state)
    data = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    sums = [float(np.asarray(x).astype(np.float64).sum()) for x in data]
    assert sums == json.loads((directory / "sums.json").read_text()), "other values than were saved"
    distinct = sum(x.nbytes for x in data)
    lands = distinct if case.on_host else sum(s.data.nbytes for x in data for s in x.addressable_shards)
    return {
        "lands": lands,
        "distinct": distinct,
        "peak": peak,
        "arrays": len(leaves),
        "seconds": seconds,
    }


def stock_target(path: pathlib.Path) -> Any:
    """The state's shapes, dtypes and shardings, from Orbax's metadata of it."""
    import jax
    import orbax.checkpoint as ocp

    metadata = ocp.StandardCheckpointer().metadata(path).item_metadata.tree

    def abstract(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding.to_jax_sharding())

    return jax.tree.map(abstract, metadata)


# In the process that starts them.


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of a restore.")
    parser.add_argument("--check", action="store_true", help=f"fail where ours is over {MAX_RATIO}")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be repeated")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of a state (default 1024)")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=READERS, help="whose restore to measure")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        task, name, directory = arguments.child
        case, nbytes = CASES[name], arguments.megabytes * 2**20
        if task == "write":
            print(json.dumps(write(case, pathlib.Path(directory), nbytes)))
        else:
            print(json.dumps(measure(case, task, pathlib.Path(directory), nbytes)))
        return 0
    print(machine_line(), versions_line("jax", "orbax-checkpoint", "tensorstore"), date_line(), "", sep="\n")
    print(f"{'case':<26}{'reader':<8}{'lands MB':>9}{'distinct':>9}{'peak':>8}{'/ lands':>9}{'/ distinct':>11}{'s':>7}")
    missed = []
    for name in arguments.case or CASES:
        megabytes = str(CASES[name].megabytes or arguments.megabytes)
        with tempfile.TemporaryDirectory() as directory:
            run_child(__file__, "--megabytes", megabytes, "--child", "write", name, directory)
            for reader in arguments.readers:
                found = run_child(__file__, "--megabytes", megabytes, "--child", reader, name, directory)
                ratio, of_distinct = found["peak"] / found["lands"], found["peak"] / found["distinct"]
                print(
                    f"{name:<26}{reader:<8}{found['lands'] / 1e6:>9,.0f}{found['distinct'] / 1e6:>9,.0f}"
                    f"{found['peak'] / 1e6:>8,.0f}{ratio:>9.2f}{of_distinct:>11.2f}{found['seconds']:>7.2f}",
                    flush=True,
                )
                allowed = MAX_RATIO * found["distinct"] + ARRAY_NBYTES * found["arrays"]
                if reader == "ours" and found["peak"] > allowed:
                    missed.append(f"{name}: {of_distinct:.2f}")
    if arguments.check and missed:
        print("\nmissed", *missed, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
