"""Stock Orbax's `_sharding` file, in both directions.

`parse_sharding_file` turns its bytes into sharding records, `render_sharding_file` turns records into the
bytes that stock Orbax itself would write. Which arrays there are, and where the file lies, is left to the
callers; nothing here opens a file or knows a device.

The file is one JSON object: the URL-safe base64 of each array's storage name -> a JSON *text* that describes
its sharding (`orbax/checkpoint/_src/metadata/sharding.py`). It has no field for memory kinds, for `reduced`
and `unreduced` axes, for the platform of a mesh, or for whether an array was committed. A damaged entry costs
that array its layout and nothing else, so parsing never raises: it says why, array by array.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence

from orbax_explicit._errors import Problem, RecordError, SaveRefusedError
from orbax_explicit._records import (
    AXIS_TYPES,
    UNCONSTRAINED,
    ArrayRecord,
    AxisType,
    Inventory,
    MeshRecord,
    NamedShardingRecord,
    Partition,
    ShardingRecord,
    SingleDeviceRecord,
    SpecRecord,
)
from orbax_explicit._stock_json import Json, UnreadableError, is_text, parse_json_object, shown

_NAMED = "NamedSharding"
_SINGLE_DEVICE = "SingleDeviceSharding"

# `str(jax.sharding.AxisType.Explicit)` is what stock writes.
_AXIS_TYPE_TEXTS: Mapping[AxisType, str] = {kind: f"AxisType.{kind.capitalize()}" for kind in AXIS_TYPES}
_AXIS_TYPES_BY_TEXT: Mapping[str, AxisType] = {text: kind for kind, text in _AXIS_TYPE_TEXTS.items()}

# `str(jax.Device)`. CPU devices were TFRT_CPU_0 before JAX 0.10; a TPU's name goes on with its coordinates.
_DEVICE_NAMES = (
    ("cpu", re.compile(r"(?:TFRT_CPU_|cpu:)(\d{1,18})")),
    ("gpu", re.compile(r"(?:cuda|rocm|gpu):(\d{1,18})")),
    ("tpu", re.compile(r"(?:TPU_|tpu:)(\d{1,18})(?:\(.*\))?")),
)

# A file that names no devices could otherwise ask for a list of any length.
_MAX_MESH_DEVICES = 1 << 22


def parse_sharding_file(
    data: bytes, arrays: Mapping[str, ArrayRecord]
) -> tuple[dict[str, ShardingRecord], dict[str, str]]:
    """The sharding of each array, and the reason for each that has none.

    A mesh without device ids stands for all of `jax.devices()` in order: it is given ids 0, 1, 2, ... The spec
    stored for PRNG keys is that of their key data: it is cut to the dimensions of the array of keys.

    Args:
        data: Contents of the file.
        arrays: Storage name -> shape and PRNG implementation; their `sharding` is not looked at.

    Returns:
        Storage name -> sharding, and storage name -> why there is none; each name is in exactly one of them.
    """
    try:
        entries = parse_json_object(data)
    except UnreadableError as error:
        return {}, dict.fromkeys(arrays, f"the _sharding file is {error}")
    shardings: dict[str, ShardingRecord] = {}
    reasons: dict[str, str] = {}
    parser = _Parser()
    for name, array in arrays.items():
        try:
            shardings[name] = _fit(parser.parse(entries.get(_entry_key(name))), array)
        except UnreadableError as error:
            reasons[name] = str(error)
    return shardings, reasons


def render_sharding_file(
    arrays: Mapping[str, ArrayRecord], inventory: Inventory, more: Mapping[str, str] | None = None
) -> bytes:
    """The bytes of the `_sharding` file that stock Orbax would write for these arrays.

    Every array gets an entry, because one missing entry fails a whole stock restore. What stock's form lacks is
    left out: memory kinds, `reduced` and `unreduced` axes, and that an array was uncommitted (stock brings it back
    committed). Three things differ from what stock writes:

    - Device ids are left out where a mesh is exactly all devices of the run in order: stock's reader then takes
      `jax.devices()`, and the file does not grow with devices x arrays.
    - An unconstrained partition is written as an unpartitioned one: stock fails to save it.
    - On a platform whose device names cannot be made from an id (a TPU's holds its coordinates) an array on a
      single device is written as one on a mesh of that device: stock's reader refuses a name it does not find.

    Args:
        arrays: Storage name -> the array, with its sharding.
        inventory: The devices of the run that saves.
        more: Members to add, of which stock takes no notice: their names are no base64.

    Raises:
        SaveRefusedError: Arrays have no sharding, or one without devices.
    """
    lacking = tuple(name for name, array in arrays.items() if not _has_devices(array.sharding))
    if lacking:
        raise SaveRefusedError(
            Problem(
                could_not="cannot write a `_sharding` file that stock Orbax can restore from",
                recorded="no sharding, or one without devices",
                affects=lacking,
                of=len(arrays),
                fix="record the sharding of every array",
            )
        )
    renderer = _Renderer(inventory)
    entries = {_entry_key(name): renderer.render(array) for name, array in arrays.items()} | dict(more or {})
    # TensorStore writes an object's members sorted and without spaces.
    return json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()


class _Parser:
    """Entries of one file -> records; equal texts and equal meshes are read once and shared."""

    def __init__(self) -> None:
        self._shardings: dict[str, ShardingRecord | UnreadableError] = {}
        self._meshes: dict[MeshRecord, MeshRecord] = {}

    def parse(self, text: Json) -> ShardingRecord:
        if text is None:
            raise UnreadableError("the _sharding file has no entry")
        if not isinstance(text, str):
            raise UnreadableError(f"its entry in _sharding is not text but {shown(text)}")
        found = self._shardings.get(text)
        if found is None:
            try:
                found = self._parse_text(text)
            except UnreadableError as error:
                found = error
            except RecordError as error:
                found = UnreadableError("; ".join(problem.could_not for problem in error.problems))
            self._shardings[text] = found
        if isinstance(found, UnreadableError):
            raise UnreadableError(*found.args)
        return found

    def _parse_text(self, text: str) -> ShardingRecord:
        try:
            entry = parse_json_object(text)
        except UnreadableError as error:
            raise UnreadableError(f"its entry in _sharding is {error}") from error
        kind = entry.get("sharding_type")
        if kind == _NAMED:
            mesh = _parse_mesh(entry)
            return NamedShardingRecord(mesh=self._meshes.setdefault(mesh, mesh), spec=_parse_spec(entry))
        if kind == _SINGLE_DEVICE:
            return _parse_device(entry)
        raise UnreadableError(f"unknown kind of sharding {shown(kind)}")


class _Renderer:
    """Records -> entries of one file; each distinct layout is rendered once."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._texts: dict[tuple[int, int, int], str] = {}
        # Each with its mesh, so that no other mesh gets its identity meanwhile.
        self._device_meshes: dict[int, tuple[MeshRecord, Json]] = {}

    def render(self, array: ArrayRecord) -> str:
        # By identity: hashing a mesh costs O(devices), and the arrays of a capture share their shardings.
        key_rank = len(array.prng.key_shape) if array.prng else 0
        key = (id(array.sharding), len(array.shape), key_rank)
        if key not in self._texts:
            self._texts[key] = json.dumps(self._entry(array))
        return self._texts[key]

    def _entry(self, array: ArrayRecord) -> dict[str, Json]:
        sharding = array.sharding
        if isinstance(sharding, NamedShardingRecord):
            return self._named_entry(sharding.mesh, _stored_partitions(array, sharding.spec))
        assert sharding is not None  # refused in render_sharding_file
        name = self._device_name(sharding)
        if name is not None:
            return {"sharding_type": _SINGLE_DEVICE, "device_str": name}
        mesh = MeshRecord(
            axis_names=("device",), axis_sizes=(1,), axis_types=("auto",), device_ids=(sharding.device_id,)
        )
        return self._named_entry(mesh, [])

    def _named_entry(self, mesh: MeshRecord, partitions: list[Json]) -> dict[str, Json]:
        entry: dict[str, Json] = {
            "sharding_type": _NAMED,
            "shape": list(mesh.axis_sizes),
            "axis_names": list(mesh.axis_names),
        }
        if mesh.axis_types is not None:
            entry["axis_types"] = [_AXIS_TYPE_TEXTS[kind] for kind in mesh.axis_types]
        entry["partition_spec"] = partitions
        whole = mesh.platform == self._inventory.platform and mesh.device_ids == self._inventory.device_ids
        if not whole:
            if id(mesh) not in self._device_meshes:
                devices = _nested([{"id": i} for i in mesh.device_ids or ()], mesh)
                self._device_meshes[id(mesh)] = mesh, {"mesh": devices}
            entry["device_mesh"] = self._device_meshes[id(mesh)][1]
        return entry

    def _device_name(self, sharding: SingleDeviceRecord) -> str | None:
        """`str(jax.Device)` as JAX 0.10 and newer spell it; None where an id is not enough to make it."""
        platform = sharding.platform or self._inventory.platform
        if platform == "cpu":
            return f"cpu:{sharding.device_id}"
        if platform == "gpu":
            kind = self._inventory.device_kind
            return f"{'rocm' if re.search(r'AMD|Radeon|gfx', kind) else 'cuda'}:{sharding.device_id}"
        return None


def _fit(sharding: ShardingRecord, array: ArrayRecord) -> ShardingRecord:
    """The sharding of the array itself, from that of what is stored of it."""
    if not isinstance(sharding, NamedShardingRecord):
        return sharding
    partitions, rank = sharding.spec.partitions, len(array.shape)
    if len(partitions) <= rank:
        return sharding
    if len(partitions) > len(array.stored_shape) or any(partition is not None for partition in partitions[rank:]):
        raise UnreadableError(f"spec {sharding.spec} has more entries than the array has dimensions")
    return dataclasses.replace(sharding, spec=SpecRecord(partitions=partitions[:rank]))


def _stored_partitions(array: ArrayRecord, spec: SpecRecord) -> list[Json]:
    """The spec of what is stored of an array: for PRNG keys the one that `jax.random.key_data` has."""
    partitions: list[Json] = []
    for partition in spec.partitions:
        if partition is None or partition is UNCONSTRAINED:
            partitions.append(None)
        else:
            partitions.append(partition if isinstance(partition, str) else list(partition))
    if array.prng:
        partitions += [None] * (len(array.stored_shape) - len(partitions))
    return partitions


def _parse_mesh(entry: dict[str, Json]) -> MeshRecord:
    sizes, names, types = entry.get("shape"), entry.get("axis_names"), entry.get("axis_types")
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise UnreadableError(f"mesh shape {shown(sizes)} is not a list of positive numbers")
    if not isinstance(names, list) or not all(is_text(name) for name in names):
        raise UnreadableError(f"mesh axis names {shown(names)} are not a list of texts")
    axis_sizes = tuple(size for size in sizes if isinstance(size, int))
    axis_names = tuple(name for name in names if is_text(name))
    axis_types: tuple[AxisType, ...] | None = None if axis_names else ()
    if types:  # absent before Orbax 0.11.26; stock's own reader takes an empty list for absent
        if not isinstance(types, list):
            raise UnreadableError(f"mesh axis types {shown(types)} are not a list")
        unknown = [kind for kind in types if not isinstance(kind, str) or kind not in _AXIS_TYPES_BY_TEXT]
        if unknown:
            raise UnreadableError(f"unknown mesh axis type {shown(unknown[0])}")
        axis_types = tuple(_AXIS_TYPES_BY_TEXT[kind] for kind in types if isinstance(kind, str))
    size = math.prod(axis_sizes)
    if size > _MAX_MESH_DEVICES:
        raise UnreadableError(f"a mesh of shape {shown(sizes)} has more than {_MAX_MESH_DEVICES} devices")
    device_mesh = entry.get("device_mesh")
    return MeshRecord(
        axis_names=axis_names,
        axis_sizes=axis_sizes,
        axis_types=axis_types,
        device_ids=_parse_device_ids(device_mesh) if device_mesh else tuple(range(size)),
    )


def _parse_device_ids(device_mesh: Json) -> tuple[int, ...]:
    """Ids of the nested lists of `{"id": 3}`, in row-major order."""
    ids: list[int] = []
    pending = [device_mesh.get("mesh") if isinstance(device_mesh, dict) else device_mesh]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(reversed(node))
            continue
        device_id = node.get("id") if isinstance(node, dict) else None
        if type(device_id) is not int:
            raise UnreadableError(f"the devices of a mesh hold {shown(node)}")
        ids.append(device_id)
    return tuple(ids)


def _parse_spec(entry: dict[str, Json]) -> SpecRecord:
    spec = entry.get("partition_spec")
    if not isinstance(spec, list):
        raise UnreadableError(f"partition spec {shown(spec)} is not a list")
    partitions: list[Partition] = []
    for partition in spec:
        if isinstance(partition, list) and all(is_text(axis) for axis in partition):
            partitions.append(tuple(axis for axis in partition if is_text(axis)))
        elif partition is None or is_text(partition):
            partitions.append(partition)
        else:
            raise UnreadableError(f"unknown partition {shown(partition)}")
    return SpecRecord(partitions=tuple(partitions))


def _parse_device(entry: dict[str, Json]) -> SingleDeviceRecord:
    name = entry.get("device_str")
    for platform, pattern in _DEVICE_NAMES:
        match = pattern.fullmatch(name) if isinstance(name, str) else None
        if match:
            return SingleDeviceRecord(device_id=int(match[1]), platform=platform)
    raise UnreadableError(f"unknown device {shown(name)}")


def _has_devices(sharding: ShardingRecord | None) -> bool:
    return sharding is not None and not (isinstance(sharding, NamedShardingRecord) and sharding.mesh.device_ids is None)


def _nested(flat: Sequence[Json], mesh: MeshRecord) -> Json:
    """A row-major list as nested ones, as `numpy.ndarray.tolist` gives them; for no dimensions its only item."""
    nested = list(flat)
    for size in reversed(mesh.axis_sizes):
        nested = [nested[i : i + size] for i in range(0, len(nested), size)]
    return nested[0]


def _entry_key(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()
