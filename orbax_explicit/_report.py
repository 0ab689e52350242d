"""Plans for people and for programs: text and JSON.

Only words and layout. What is said is decided in `_planning` and added up in `_plan`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orbax_explicit._outcomes import RULES, ChangeKind, MeshSource, NotPlaced, PlannedMesh, Rule
from orbax_explicit._records import Key, LeafPath, MeshRecord, Tree, iterate_containers, path_text, plural

if TYPE_CHECKING:
    from orbax_explicit._plan import RestorePlan

_PATHS_SHOWN = 3
_CHANGES_SHOWN = 10
_PROBLEMS_SHOWN = 10
_DEVICES_SHOWN = 8

# Text.


def plan_text(plan: RestorePlan) -> str:
    """The plan as a person reads it, in a length that does not grow with the number of leaves."""
    placed = [outcome for outcome in plan.outcomes if not isinstance(outcome.placement, NotPlaced)]
    count = f"{len(placed)} {_leaves(len(placed))}"
    lines = [f"restore of {count}, {bytes_text(plan.bytes_read)} to read"]
    if plan.refused:
        affected = len(plan.outcomes) - len(placed)
        lines = [f"restore REFUSED: {plural(len(plan.refused), 'problem')}"]
        if affected:
            lines[0] += f", {affected} of {len(plan.outcomes)} {_leaves(len(plan.outcomes))}"
    lines += _labelled(
        "recorded", [str(plan.recorded) if plan.recorded is not None else "devices that were not recorded"]
    )
    lines += _labelled("present", [str(plan.present)])
    for planned in plan.meshes:
        lines += _mesh_lines(planned, plan.present.device_count)
    if plan.idle_device_ids:
        idle = _ids(plan.idle_device_ids)
        lines += _labelled(
            "idle", [f"{len(plan.idle_device_ids)} of {plural(plan.present.device_count, 'device')}: {idle}"]
        )
    rules = Counter(outcome.rule for outcome in placed)
    width = len(str(max(rules.values(), default=0)))
    lines += _labelled("leaves", [f"{rules[rule]:>{width}} x {_RULE_TEXT[rule]}" for rule in RULES if rule in rules])
    if not plan.refused:
        lines += _labelled("memory", _memory_lines(plan))
    changed: dict[tuple[ChangeKind, str], list[LeafPath]] = {}
    for outcome in placed:
        for change in outcome.changes:
            if change.kind not in ("resized", "retyped"):  # Its mesh stands above.
                changed.setdefault((change.kind, change.text), []).append(outcome.path)
    shown = [_change_line(kind, text, paths) for (kind, text), paths in list(changed.items())[:_CHANGES_SHOWN]]
    if len(changed) > _CHANGES_SHOWN:
        shown.append(f"and {len(changed) - _CHANGES_SHOWN} changes more; to_json() has all of them")
    lines += _labelled("changed", shown)
    kept = [outcome.path for outcome in placed if outcome.rule == "kept"]
    if kept:
        lines += _labelled("kept", [f"the target's own values: {_some(kept)}"])
    if plan.left_out:
        lines += _labelled("left out", [f"saved, and not read: {_some(plan.left_out)}"])
    lines += _labelled("note", plan.notes)
    for problem in plan.refused[:_PROBLEMS_SHOWN]:
        lines += _labelled("refused", str(problem).splitlines())
    if len(plan.refused) > _PROBLEMS_SHOWN:
        more = plural(len(plan.refused) - _PROBLEMS_SHOWN, "problem")
        lines += _labelled("refused", [f"and {more} more; to_json() has all of them"])
    return "\n".join(lines)


def bytes_text(nbytes: int) -> str:
    """A number of bytes as a person reads it: `512 B`, `1.07 GB`; thousands, not 1024s."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # What would round up to 1000 has the next unit.
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{nbytes} B" if unit == "B" else f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"


def _change_line(kind: ChangeKind, text: str, paths: Sequence[LeafPath]) -> str:
    # The text of a rename names the leaf already.
    return text if kind == "renamed" and len(paths) == 1 else f"{text}: {_some(paths)}"


def _labelled(label: str, texts: Iterable[str]) -> list[str]:
    return [f"  {label if i == 0 else '':<9} {text}" for i, text in enumerate(texts)]


def _leaves(count: int) -> str:
    return "leaf" if count == 1 else "leaves"


_SOURCE_TEXT: Mapping[MeshSource, str] = {
    "given": "the mesh that was passed",
    "context": "the mesh of jax.set_mesh",
    "target": "the target's own mesh",
    "recorded devices": "as recorded",
    "recorded positions": "at the recorded positions",
    "recorded processes": "the same axes over processes as recorded",
    "new": "in the order of jax.make_mesh",
}

_RULE_TEXT: Mapping[Rule, str] = {
    "target": "the target's sharding",
    "target's abstract mesh": "the target's spec, its abstract mesh made concrete",
    "recorded": "the recorded spec",
    "rules": "a spec of the policy's rules",
    "fallback": "the fallback sharding",
    "one device": "on one device, as recorded",
    "uncommitted": "uncommitted, as recorded",
    "host": "a value on the host",
    "kept": "the target's own value, not read",
    "refused": "refused",
}


def _mesh_lines(planned: PlannedMesh, present: int) -> list[str]:
    before, after = str(planned.recorded), str(planned.mesh)
    where = _SOURCE_TEXT[planned.source]
    if not planned.is_at_hand:
        count = len(planned.device_ids)
        of = plural(present, "device")
        all_of = f"all {of}" if present > 1 else "the only device"
        where = f"on {all_of if count == present else f'{count} of {of}'}, {where}"
    text = f"{after} {where}" if where.startswith("on ") else f"{after}, {where}"
    if planned.recorded is None or before == after:
        return _labelled("mesh", [text])
    return _labelled("mesh", [before]) + _labelled("  ->", [text])


def _memory_lines(plan: RestorePlan) -> list[str]:
    lines = []
    for kind, by_device in plan.bytes_by_memory.items():
        amounts = set(by_device.values())
        most = max(amounts)
        if most == 0:
            continue
        if len(amounts) == 1:
            text = f"{bytes_text(most)} on {'each of ' if len(by_device) > 1 else ''}{plural(len(by_device), 'device')}"
        else:
            fullest = next(device_id for device_id, nbytes in by_device.items() if nbytes == most)
            total = bytes_text(sum(by_device.values()))
            text = (
                f"at most {bytes_text(most)}, on device {fullest}; {total} on {plural(len(by_device), 'device')} in all"
            )
        lines.append(f"{kind}: {text}")
    if plan.bytes_on_host:
        lines.append(f"host values: {bytes_text(plan.bytes_on_host)} in each process")
    if plan.unaccounted:
        lines.append(f"not known, for shardings that have no record: {_some(plan.unaccounted)}")
    return lines


def _some(paths: Sequence[LeafPath]) -> str:
    shown = ", ".join(map(path_text, paths[:_PATHS_SHOWN]))
    return shown if len(paths) <= _PATHS_SHOWN else f"{shown} and {len(paths) - _PATHS_SHOWN} more"


def _ids(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:_DEVICES_SHOWN]))
    return shown if len(ids) <= _DEVICES_SHOWN else f"{shown} and {len(ids) - _DEVICES_SHOWN} more"


# JSON.


def plan_json(plan: RestorePlan, *, indent: int | None = None) -> str:
    """The whole plan as a JSON object.

    Meshes stand in two lists, so that a plan of many arrays on many devices stays small: a placement's `"mesh"` is a
    position in `"meshes"`, that of what was recorded one in `"recorded_meshes"`. A path is text under `"path"`, and its
    typed keys under `"keys"`; devices are named by their ids.
    """
    table = _MeshTable(plan.meshes)
    outcomes = [_outcome_json(outcome, table) for outcome in plan.outcomes]
    document = {
        "version": 1,
        "refused": [_json(problem) for problem in plan.refused],
        "present": _json(plan.present),
        "recorded": _json(plan.recorded),
        "meshes": [_json(planned) for planned in plan.meshes],
        "idle_device_ids": list(plan.idle_device_ids),
        "default_device_ids": list(plan.default_device_ids),
        "bytes_read": plan.bytes_read,
        "bytes_on_host": plan.bytes_on_host,
        "bytes_by_memory": {kind: {str(i): n for i, n in of.items()} for kind, of in plan.bytes_by_memory.items()},
        "unaccounted": [path_text(path) for path in plan.unaccounted],
        "notes": list(plan.notes),
        "left_out": [{"path": path_text(path), "keys": _json(path)} for path in plan.left_out],
        "containers": _containers_json(plan.tree),
        "outcomes": outcomes,
        "recorded_meshes": [_json(mesh) for mesh in table.recorded],
    }
    return json.dumps(document, indent=indent)


class _MeshTable:
    """Meshes by position, looked up by identity: to compare two costs O(devices)."""

    def __init__(self, planned: Sequence[PlannedMesh]) -> None:
        self._planned = {mesh: i for i, mesh in enumerate(planned)}
        self._by_id: dict[int, int] = {}
        self._recorded: dict[Any, int] = {}
        self._recorded_by_id: dict[int, int] = {}
        self._json: dict[int, Any] = {}

    def json(self, value: Any) -> Any:
        """A record or a placement, which many leaves share, as JSON."""
        if id(value) not in self._json:
            self._json[id(value)] = _json(value, self)
        return self._json[id(value)]

    @property
    def recorded(self) -> list[Any]:
        return list(self._recorded)

    def planned(self, mesh: PlannedMesh) -> int:
        if id(mesh) not in self._by_id:
            self._by_id[id(mesh)] = self._planned[mesh]
        return self._by_id[id(mesh)]

    def of_record(self, mesh: Any) -> int:
        if id(mesh) not in self._recorded_by_id:
            self._recorded_by_id[id(mesh)] = self._recorded.setdefault(mesh, len(self._recorded))
        return self._recorded_by_id[id(mesh)]


def _containers_json(tree: Tree | None) -> list[dict[str, Any]] | None:
    """The containers of the result, whose leaves the outcomes are; None where a target has them."""
    return (
        None
        if tree is None
        else [
            {
                "path": path_text(path),
                "keys": _json(path),
                "kind": node.kind,
                "children": _json(node.keys),
                "class": node.class_text,
            }
            for path, node in iterate_containers(tree)
        ]
    )


def _outcome_json(outcome: Any, table: _MeshTable) -> dict[str, Any]:
    fields: dict[str, Any] = {"path": path_text(outcome.path), "keys": _json(outcome.path)}
    if outcome.source is None:
        fields["source"] = None
    elif outcome.source != outcome.path:
        fields["source"] = {"path": path_text(outcome.source), "keys": _json(outcome.source)}
    fields["rule"] = outcome.rule
    fields["recorded"] = table.json(outcome.recorded)
    fields["placement"] = table.json(outcome.placement)
    fields["shape"] = list(outcome.shape)
    fields["dtype"] = outcome.dtype or (outcome.recorded.dtype if outcome.recorded is not None else None)
    fields["changes"] = [_json(change) for change in outcome.changes]
    fields["bytes_read"] = outcome.bytes_read
    fields["bytes_per_device"] = outcome.bytes_per_device
    return fields


def _json(value: Any, table: _MeshTable | None = None) -> Any:
    """A frozen value as JSON: each dataclass an object with all of its fields, and its class as its kind if it has none."""
    if isinstance(value, Key):
        return [value.kind, value.name]
    if isinstance(value, enum.Enum):
        return {"kind": type(value).__name__}  # Not its text, which could be the name of a mesh axis.
    if table is not None and isinstance(value, PlannedMesh):
        return table.planned(value)
    if table is not None and isinstance(value, MeshRecord):
        return table.of_record(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _json(getattr(value, field.name), table) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [_json(item, table) for item in value]
    return value
