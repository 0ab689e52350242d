"""One measurement, in the process that was started for it: raw file I/O, a save, or a restore.

Every workload and round begins with the raw process, which leaves the checksums of the state's leaves; a restore is
compared with them, and its shardings with the target, after the clock has stopped. JAX's backend and its first program
are started before the clock; what a contender compiles or imports by itself counts.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pathlib
import shutil
import time
import zlib
from typing import Any

import numpy as np
from measured_process import peak_of

from bytes.contenders import CONTENDERS, Contender
from bytes.workloads import WORKLOADS, Tree, Workload

METADATA = ("_sharding", "explicit_sharding.msgpack")
# Shards looked at one by one: an array's list of them takes milliseconds on 512 devices.
MAX_SHARDS_COMPARED = 20_000

Sample = dict[str, Any]
"""Seconds and bytes by what they are; where the contender raised, `cannot` says how instead."""


def measure(task: str, workload_name: str, contender_name: str, scale: float, directory: pathlib.Path) -> Sample:
    """Runs a task of a child process: `raw`, `save` or `restore`."""
    workload = WORKLOADS[workload_name]
    start_devices(workload.devices)
    if task == "raw":
        return measure_raw(workload, scale, directory)
    run = {"save": measure_save, "restore": measure_restore}[task]
    try:
        return run(workload, CONTENDERS[contender_name](), scale, directory)
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, that is what the table says
        return {"cannot": f"{task}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def start_devices(count: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    mesh = jax.sharding.Mesh(jax.devices(), "all")
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.device_put(0, replicated)))
    assert jax.device_count() == count


def measure_raw(workload: Workload, scale: float, directory: pathlib.Path) -> Sample:
    """Writes one copy of the state's bytes to one file, flushed, and reads it into new memory."""
    import jax

    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(workload.fill(workload.layout(scale)))]
    (directory / "checksums.json").write_text(json.dumps([checksum(array) for array in arrays]))
    blocks = [bytes_of(array) for array in arrays]
    path = directory / "raw"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            written = 0
            while written < len(block):
                written += file.write(block[written:])
        os.fsync(file.fileno())
    save_seconds = time.perf_counter() - start
    evict(path)
    gc.collect()

    def read() -> list[Any]:
        buffers = [np.empty(len(block), np.uint8) for block in blocks]
        with path.open("rb", buffering=0) as file:
            for buffer in buffers:
                view = memoryview(buffer)
                while view:
                    view = view[file.readinto(view) :]
        return buffers

    start = time.perf_counter()
    buffers = read()
    restore_seconds = time.perf_counter() - start
    assert [zlib.crc32(buffer) for buffer in buffers] == [checksum(array) for array in arrays]
    nbytes = path.stat().st_size
    path.unlink()
    return {
        "save_seconds": save_seconds,
        "blocking_seconds": save_seconds,
        "restore_seconds": restore_seconds,
        "disk_nbytes": nbytes,
    }


def measure_save(workload: Workload, contender: Contender, scale: float, directory: pathlib.Path) -> Sample:
    """Saves the state once, or twice; the last checkpoint stays."""
    import jax

    # Replicas are still being copied when `device_put` returns: no save is to wait for that.
    state = jax.block_until_ready(workload.fill(workload.layout(scale)))
    other = workload.fill(workload.layout(scale), seed=1) if workload.first_touch else None
    if workload.touched:
        for leaf in jax.tree.leaves(state):
            np.asarray(leaf.addressable_data(0))
    gc.collect()
    path = directory / "checkpoint"
    sample = timed_save(contender, path, state)
    if other is not None:
        start = time.perf_counter()
        for leaf in jax.tree.leaves(other):
            np.asarray(leaf.addressable_data(0))
        sample["first_touch_seconds"] = time.perf_counter() - start
    if workload.steady:
        shutil.rmtree(path)
        gc.collect()
        sample |= {f"steady_{name}": value for name, value in timed_save(contender, path, state).items()}
    files = [file for file in path.rglob("*") if file.is_file()]
    sample["disk_nbytes"] = sum(file.stat().st_size for file in files)
    sample["metadata_nbytes"] = sum(file.stat().st_size for file in files if file.name in METADATA)
    return sample


def timed_save(contender: Contender, path: pathlib.Path, state: Tree) -> Sample:
    start = time.perf_counter()
    wait = contender.save(path, state)
    blocking_seconds = time.perf_counter() - start
    wait()
    return {"save_seconds": time.perf_counter() - start, "blocking_seconds": blocking_seconds}


def measure_restore(workload: Workload, contender: Contender, scale: float, directory: pathlib.Path) -> Sample:
    """Restores the checkpoint that is there, and makes sure of what came back."""
    import jax

    path = directory / "checkpoint"
    target = (workload.restored_layout or workload.layout)(scale)
    for file in path.rglob("*"):
        if file.is_file():
            evict(file)
    gc.collect()

    def timed() -> tuple[float, Tree]:
        start = time.perf_counter()
        restored = jax.block_until_ready(contender.restore(path, target))
        return time.perf_counter() - start, restored

    peak_nbytes, (seconds, restored) = peak_of(timed)
    compare(restored, target, json.loads((directory / "checksums.json").read_text()))
    return {"restore_seconds": seconds, "peak_nbytes": peak_nbytes, "lands_nbytes": landing_nbytes(target)}


def compare(restored: Tree, target: Tree, checksums: list[int]) -> None:
    """Asserts that each leaf has the target's sharding, the values of these checksums, and the same in all replicas."""
    import jax

    assert jax.tree.structure(restored) == jax.tree.structure(target)
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    stride = max(1, len(leaves) * jax.device_count() // MAX_SHARDS_COMPARED)
    pairs = zip(leaves, jax.tree.leaves(target), checksums, strict=True)
    for index, ((path, leaf), wanted, expected) in enumerate(pairs):
        name = jax.tree_util.keystr(path)
        assert leaf.sharding.mesh == wanted.sharding.mesh, name
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), name
        assert leaf.dtype == wanted.dtype, name
        whole = np.asarray(leaf)
        assert checksum(whole) == expected, f"{name}: other values than were saved"
        if index % stride == 0:
            for shard in leaf.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), whole[shard.index]), f"{name}, on {shard.device}"


def landing_nbytes(target: Tree) -> int:
    """Bytes on all devices, each replica counted."""
    import jax

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.device_set)
        for leaf in jax.tree.leaves(target)
    )


def bytes_of(array: Any) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def checksum(array: Any) -> int:
    return zlib.crc32(bytes_of(array))


def evict(path: pathlib.Path) -> None:
    """Drops a file from the page cache, so that a disk is read; tmpfs has nothing else and keeps it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only what is on the disk can be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
