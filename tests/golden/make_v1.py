"""The manifests of the golden files of version 1, built by hand.

`python tests/golden/make_v1.py` writes the files that are not there yet. It never writes one that is: a golden
file is what a writer of version 1 once wrote, and every later reader must still read it.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping

from orbax_explicit._records import (
    UNCONSTRAINED,
    VALUE_TYPES,
    ArrayRecord,
    AxisType,
    ContainerKind,
    ContainerRecord,
    Inventory,
    Key,
    Manifest,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    PrngRecord,
    ReductionKind,
    SingleDeviceRecord,
    SpecRecord,
    Tree,
    ValueRecord,
)
from orbax_explicit._wire import encode

DIRECTORY = pathlib.Path(__file__).parent / "v1"
WRITER = (("orbax_explicit", "0.1.0"), ("jax", "0.10.2"), ("orbax", "0.12.8"))


def mesh(*axes: tuple[str, int], ids: tuple[int, ...] | None = None, first: int = 0) -> MeshRecord:
    size = math.prod(n for _, n in axes)
    explicit: AxisType = "explicit"
    return MeshRecord(
        axis_names=tuple(name for name, _ in axes),
        axis_sizes=tuple(n for _, n in axes),
        axis_types=(explicit,) * len(axes),
        device_ids=tuple(range(first, first + size)) if ids is None else ids,
        platform="cpu",
    )


def on(mesh: MeshRecord, *partitions: Partition, memory_kind: str | None = "device") -> NamedShardingRecord:
    return NamedShardingRecord(mesh=mesh, spec=SpecRecord(partitions=partitions), memory_kind=memory_kind)


def array(
    *shape: int, sharding: NamedShardingRecord | SingleDeviceRecord | None, dtype: str = "float32"
) -> ArrayRecord:
    return ArrayRecord(shape=shape, dtype=dtype, sharding=sharding)


def tree(children: Mapping[str | int, Tree]) -> ContainerRecord:
    return ContainerRecord(
        kind="dict", keys=tuple(Key("dict", name) for name in children), children=tuple(children.values())
    )


def sequence(kind: ContainerKind, *children: Tree) -> ContainerRecord:
    return ContainerRecord(kind=kind, keys=tuple(Key("index", i) for i in range(len(children))), children=children)


def train_state() -> Manifest:
    """A training state as most are: parameters, the moments of Adam, a step and a key."""
    devices = mesh(("data", 2), ("model", 4))
    kernel = array(512, 2048, sharding=on(devices, None, "model"), dtype="bfloat16")
    bias = array(2048, sharding=on(devices, "model"), dtype="bfloat16")
    params = tree({f"layers_{i}": tree({"bias": bias, "kernel": kernel}) for i in range(3)})
    count = array(sharding=on(devices), dtype="int32")
    adam = ContainerRecord(
        kind="namedtuple",
        keys=(Key("attr", "count"), Key("attr", "mu"), Key("attr", "nu")),
        children=(count, params, params),
        module="optax._src.transform",
        qualname="ScaleByAdamState",
    )
    rng = ArrayRecord(
        shape=(), dtype="uint32", sharding=on(devices), prng=PrngRecord(impl="threefry2x32", key_shape=(2,))
    )
    nothing = ContainerRecord(kind="none")
    state = tree({"opt_state": sequence("tuple", adam, nothing), "params": params, "rng": rng, "step": count})
    inventory = Inventory(
        platform="cpu",
        device_kind="cpu",
        device_ids=tuple(range(8)),
        process_indices=(0,) * 8,
        memory_kinds=("device", "pinned_host", "unpinned_host"),
        default_memory_kind="device",
    )
    return Manifest(tree=state, inventory=inventory, writer=WRITER)


def meshes() -> Manifest:
    """Concrete, abstract and untyped meshes, of every axis type, without a platform, without an axis."""
    typed = MeshRecord(
        axis_names=("e", "a", "m"),
        axis_sizes=(1, 2, 2),
        axis_types=("explicit", "auto", "manual"),
        device_ids=(3, 2, 1, 0),
        platform="tpu",
    )
    abstract = MeshRecord(axis_names=("data",), axis_sizes=(2**40,), axis_types=("auto",))
    untyped = MeshRecord(axis_names=("data", "model"), axis_sizes=(2, 1), axis_types=None, device_ids=(0, 1))
    empty = MeshRecord(axis_names=(), axis_sizes=(), axis_types=(), device_ids=(5,), platform="gpu")
    return Manifest(
        tree=sequence(
            "list",
            array(4, sharding=on(typed, "a")),
            array(4, sharding=on(abstract, "data", memory_kind=None)),
            array(4, sharding=on(untyped, ("data", "model"), memory_kind="pinned_host")),
            array(4, sharding=on(empty)),
        )
    )


def specs() -> Manifest:
    """Every form of a partition, and pending reductions of every kind."""
    devices = mesh(("a", 2), ("b", 2), ("c", 2))
    partitions: list[tuple[Partition, ...]] = [
        (),
        (None,),
        ((),),
        ("a",),
        (("a",),),
        (("b", "a"), "c"),
        (UNCONSTRAINED, None, "b"),
    ]
    kinds: tuple[ReductionKind, ...] = ("sum", "max", "min")
    reductions = [
        SpecRecord(partitions=("a",), unreduced=("b",), reduced=("c",), unreduced_kind=kind) for kind in kinds
    ]
    reduced = SpecRecord(reduced=("a", "b", "c"))
    return Manifest(
        tree=sequence(
            "tuple",
            *(array(8, 8, 8, sharding=on(devices, *p)) for p in partitions),
            *(array(8, sharding=NamedShardingRecord(mesh=devices, spec=spec)) for spec in (*reductions, reduced)),
        )
    )


def device_lists() -> Manifest:
    """Ranges, runs, and packed ids of each width; negative ids and ids of 64 bits."""
    hosts = tuple(process * 131072 + i for process in range(4) for i in range(8))
    lists = (
        (7,),
        tuple(range(-3, 3)),
        hosts,
        (0, 1, 2, 3, 5, 4, 7, 6),
        (1, 0),
        (2**63 - 1, -(2**63)),
        (-(2**63),),
        (70, 2, 65537, 3),
        (300, 0, 2, 1),
        (2**63 - 1, 2**63 - 2),
        tuple(range(299, -1, -1)),
    )
    leaves = [array(600, sharding=on(mesh(("d", len(ids)), ids=ids), "d")) for ids in lists]
    inventory = Inventory(
        platform="cpu",
        device_kind="cpu",
        device_ids=hosts,
        process_indices=tuple(i // 8 for i in range(32)),
        memory_kinds=("unpinned_host",),
        default_memory_kind="unpinned_host",
    )
    return Manifest(tree=sequence("list", *leaves), inventory=inventory)


def inventory() -> Manifest:
    """Processes that own devices in turns, and devices that are not in the order of their ids."""
    return Manifest(
        tree=ContainerRecord(kind="none"),
        inventory=Inventory(
            platform="tpu",
            device_kind="TPU v5p",
            device_ids=(0, 1, 8, 9, 2, 3, 10, 11),
            process_indices=(0, 0, 1, 1, 0, 0, 300, 300),
            memory_kinds=("device", "pinned_host"),
            default_memory_kind="device",
        ),
        writer=WRITER,
    )


def leaves() -> Manifest:
    """Single devices, uncommitted arrays, arrays without a sharding, keys, zero sizes, and every host value."""
    single = SingleDeviceRecord(device_id=3, platform="cpu", memory_kind="pinned_host")
    bare = SingleDeviceRecord(device_id=0)
    host: dict[str | int, Tree] = {
        kind: ValueRecord(
            type=kind, shape=(3, 0) if kind == "np.ndarray" else (), dtype="" if kind == "str" else "int64"
        )
        for kind in VALUE_TYPES
    }
    return Manifest(
        tree=tree(
            {
                "single": array(4, sharding=single),
                "uncommitted": ArrayRecord(shape=(), dtype="float32", sharding=bare, committed=False),
                "unknown": array(2**64 - 1, 0, sharding=None, dtype="float8_e4m3fn"),
                "keys": ArrayRecord(
                    shape=(5,), dtype="uint32", sharding=bare, prng=PrngRecord(impl="rbg", key_shape=(4,))
                ),
                "host": tree(host),
                "raw": ValueRecord(type="bytes", shape=(17,), dtype="uint8"),
            }
        )
    )


def containers() -> Manifest:
    """Every kind of container, empty and not, and every kind of key."""
    leaf = ValueRecord(type="int", dtype="int64")
    empty = [
        ContainerRecord(kind="none"),
        tree({}),
        sequence("list"),
        sequence("tuple"),
        ContainerRecord(kind="namedtuple", module="m", qualname="Empty"),
        ContainerRecord(kind="node", module="m", qualname="Outer.Node"),
    ]
    node = ContainerRecord(
        kind="node",
        keys=(
            Key("attr", "w"),
            Key("index", 0),
            Key("index", 7),
            Key("dict", "w"),
            Key("dict", 0),
            Key("attr", "b"),
        ),
        children=(leaf,) * 6,
        module="m",
        qualname="Node",
    )
    pair = ContainerRecord(
        kind="namedtuple",
        keys=(Key("attr", "first"), Key("attr", "second")),
        children=(node, leaf),
        module="",
        qualname="Pair",
    )
    integers = tree({-(2**63): leaf, -1: leaf, 0: leaf, 2**64 - 1: leaf, "0": leaf})
    return Manifest(tree=tree({"empty": sequence("list", *empty), "pair": pair, "ints": integers}))


def texts() -> Manifest:
    """Texts beyond ASCII, empty, with a NUL, with lone surrogates, and as long as can be."""
    leaf = ValueRecord(type="float", dtype="float64")
    names = ("", "\0", "größe", "層/0", "a.b", "\U0001f600", "\ud800", "a\udcffb", "\ud83d\ude00", "x" * 2**14)
    return Manifest(tree=tree(dict.fromkeys(names, leaf)), writer=(("名前", "1"),))


def arrays_alone() -> Manifest:
    """What a type handler records: arrays and their paths, not the containers."""
    return Manifest(tree=tree({"a": array(8, sharding=on(mesh(("x", 8)), "x"))}), scope="arrays", writer=WRITER)


def one_leaf() -> Manifest:
    """A tree that is one leaf, and nothing else known."""
    return Manifest(tree=ValueRecord(type="str"))


def deepest() -> Manifest:
    """As many containers within one another as can be."""
    node: Tree = array(1, sharding=None)
    for _ in range(128):
        node = tree({"a": node})
    return Manifest(tree=node)


def many() -> Manifest:
    """More arrays, texts and structures than one byte can count."""
    devices = mesh(("data", 512), ids=tuple(i ^ 1 for i in range(512)))
    sharding = on(devices, "data")
    children: dict[str | int, Tree] = {}
    for i in range(300):
        children[f"block_{i}"] = tree({f"w_{i}": array(512, i, sharding=sharding), "b": array(512, sharding=sharding)})
    return Manifest(tree=tree(children))


MANIFESTS = {
    build.__name__: build()
    for build in (
        train_state,
        meshes,
        specs,
        device_lists,
        inventory,
        leaves,
        containers,
        texts,
        arrays_alone,
        one_leaf,
        deepest,
        many,
    )
}


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, manifest in MANIFESTS.items():
        path = DIRECTORY / f"{name}.msgpack"
        if path.exists():
            print(f"{path.name}: kept")
        else:
            path.write_bytes(encode(manifest))
            print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
