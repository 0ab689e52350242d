"""Every reason why a restore is refused, in words: one function, one `Problem`.

Each says what could not be done, what was recorded, what is present and what to do; which leaves are affected is added
where the plan is put together. `tests/golden/refusals` shows each of them as a caller sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orbax_explicit._errors import Problem
from orbax_explicit._policy import Cast, LeafNames, SpecRule
from orbax_explicit._records import (
    ArrayRecord,
    Inventory,
    LeafRecord,
    MeshRecord,
    SpecRecord,
    plural,
)
from orbax_explicit._topology import Room

# Meshes.


def target_mesh_is_too_large(wanted: MeshRecord, present: Inventory) -> Problem:
    """An abstract mesh of the target has more devices than the machine."""
    return Problem(
        could_not=f"cannot resolve the target's mesh {wanted}: it has {plural(wanted.size, 'device')}",
        present=str(present),
        fix=f"give the target a mesh of at most {plural(present.device_count, 'device')}",
        about="mesh",
    )


def target_mesh_is_not_shared_equally(wanted: MeshRecord, present: Inventory) -> Problem:
    """An abstract mesh of the target would not have equally many devices of each process."""
    return Problem(
        could_not=f"cannot resolve the target's mesh {wanted}: each process must contribute equally many devices",
        present=str(present),
        fix=f"give the target a mesh whose size {present.process_count} divides, or pass mesh=",
        about="mesh",
    )


def target_mesh_is_contradicted(wanted: MeshRecord, at_hand: MeshRecord, name: str, *, is_context: bool) -> Problem:
    """A mesh that was passed, or that of `jax.set_mesh`, is not the one that the target names."""
    return Problem(
        could_not=f"cannot resolve the target's mesh {wanted} on {name} {at_hand}",
        present=f"{name} is {at_hand}",
        fix="make the two agree in axis names, sizes and types"
        + (", pass mesh=, or restore outside jax.set_mesh" if is_context else ""),
        about="mesh",
    )


def mesh_lacks_axes(missing: Sequence[str], mesh: MeshRecord, recorded: MeshRecord) -> Problem:
    """A mesh that was passed lacks axes of recorded specs, as the policy names them."""
    renamed = "" if set(missing) <= set(recorded.axis_names) else ", named so by rename_axes"
    return Problem(
        could_not=f"cannot place recorded specs over {_listed(missing)}{renamed}: the mesh that was passed has no such axis",
        recorded=f"mesh {recorded}",
        present=f"mesh {mesh}",
        fix="pass a mesh that has these axes, say in rename_axes what they are called there (None drops one), or give "
        "specs by rules",
        about="mesh",
    )


def context_mesh_is_other(recorded: MeshRecord, wanted: MeshRecord, context: MeshRecord) -> Problem:
    """The mesh of `jax.set_mesh` lacks the axes of a recorded one, or types them otherwise than it is to be rebuilt."""
    what, retype = f"a recorded mesh {recorded}", ""
    if wanted != recorded:
        what += f", {wanted} by the policy,"
    elif set(recorded.axis_names) <= set(context.axis_names):
        retype = ", axis_types= in the policy to retype the recorded axes"
    else:
        retype = (
            ", rename_axes= in the policy to say what the recorded axes are called there, rules= to give other specs"
        )
    return Problem(
        could_not=f"cannot place {what} on the mesh of jax.set_mesh {context}",
        recorded=f"mesh {recorded}",
        present=f"the mesh of jax.set_mesh is {context}",
        fix=f"pass mesh= to place the recorded specs on a mesh of your own{retype}, or restore outside jax.set_mesh",
        about="mesh",
    )


def mesh_is_not_in_every_process(mesh: MeshRecord, present: Inventory) -> Problem:
    """A concrete mesh has no device of some process, which could not take part in the restore."""
    in_mesh = set(mesh.device_ids or ())
    owned = present.device_ids_by_process()
    without = ", ".join(str(process) for process, ids in sorted(owned.items()) if in_mesh.isdisjoint(ids))
    return Problem(
        could_not=f"cannot restore onto mesh {mesh}: it has no device of process {without}",
        present=str(present),
        fix="pass a mesh, or a target with shardings, over devices of every process",
        about="mesh",
    )


def mesh_does_not_fit(mesh: MeshRecord, saved: Inventory | None, present: Inventory) -> Problem:
    """A recorded mesh does not fit the present devices, and the policy allows no other sizes."""
    return Problem(
        could_not=f"cannot rebuild mesh {mesh} on {plural(present.device_count, 'device')}",
        recorded=_saved_on(mesh, saved),
        present=str(present),
        fix="topology='adapt' in the policy fits it to these; or pass mesh= with the axes "
        + ", ".join(mesh.axis_names),
        about="mesh",
    )


def mesh_cannot_be_resized(
    mesh: MeshRecord, saved: Inventory | None, present: Inventory, resize: Sequence[str], room: Room
) -> Problem:
    """No sizes of a recorded mesh fit the present devices by the rule of `_topology`."""
    limit = f" with resize={tuple(resize)}" if resize else ""
    fixed = {axis: size for axis, size in mesh.shape.items() if resize and axis not in resize}
    if math.prod(fixed.values()) > room.devices:
        kept = ", ".join(f"{axis}={size}" for axis, size in fixed.items())
        why = f"{kept}, which may not change, {'take' if len(fixed) > 1 else 'takes'} {math.prod(fixed.values())}"
    else:
        why = "no sizes that divide what it splits have equally many devices of each process"
    return Problem(
        could_not=f"cannot resize mesh {mesh} to {plural(present.device_count, 'device')}{limit}: {why}",
        recorded=_saved_on(mesh, saved),
        present=str(present),
        fix=("name more axes in resize, or " if resize else "")
        + f"pass mesh= with the axes {', '.join(mesh.axis_names)} over present devices",
        about="mesh",
    )


def _saved_on(mesh: MeshRecord, saved: Inventory | None) -> str:
    where = str(saved) if saved is not None else "devices that were not recorded"
    return f"mesh {mesh} of {plural(mesh.size, 'device')}, saved on {where}"


# The policy.


def policy_names_unknown_axes(field: str, unknown: Sequence[str], recorded: Iterable[str]) -> Problem:
    """A field of the policy names mesh axes that no recorded mesh has: a misspelt one would change nothing, silently."""
    return Problem(
        could_not=f"cannot follow {field}: no recorded mesh has an axis {_listed(unknown)}",
        recorded=f"mesh axes {_listed(sorted(recorded))}",
        fix=f"name recorded axes in {field}" + (": recorded axis -> its new name" if field == "rename_axes" else ""),
    )


def policy_gives_two_axes_one_name(mesh: MeshRecord, names: Sequence[str]) -> Problem:
    """Renamed axes of a recorded mesh would have the name of another one."""
    return Problem(
        could_not=f"cannot rename the axes of mesh {mesh}: two of them would be called {_listed(names)}",
        recorded=f"mesh {mesh}",
        fix="give each axis a name of its own in rename_axes",
        about="mesh",
    )


def renamed_leaf_is_not_saved(result: LeafNames, source: LeafNames) -> Problem:
    """`rename_leaves` reads from a path that the checkpoint lacks."""
    return Problem(
        could_not=f"cannot read {_path(result)} from {_path(source)}, as rename_leaves says",
        recorded=f"nothing at {_path(source)}",
        fix="in rename_leaves map a path in the result to its path in the checkpoint; print(read_manifest(path)) lists these",
    )


def renamed_leaf_is_not_wanted(result: LeafNames, source: LeafNames) -> Problem:
    """`rename_leaves` names a path that the target lacks."""
    return Problem(
        could_not=f"cannot restore {_path(source)} as {_path(result)}, as rename_leaves says",
        present=f"the target has nothing at {_path(result)}, or a longer entry of rename_leaves covers all of it",
        fix="in rename_leaves map a path in the target to its path in the checkpoint",
    )


def leaf_cannot_be_moved(result: LeafNames, source: LeafNames, why: str) -> Problem:
    """Without a target, `rename_leaves` asks for a place where nothing can be put."""
    return Problem(
        could_not=f"cannot move {_path(source)} to {_path(result)}, as rename_leaves says: {why}",
        present="no target, so that the result is the recorded tree",
        fix="name another path in rename_leaves, or restore into a target that has the structure you want",
    )


def numpy_is_not_on_a_mesh(mesh: MeshRecord) -> Problem:
    """`arrays="numpy"` and `mesh=` together."""
    return Problem(
        could_not="cannot place arrays on a mesh and restore them as NumPy",
        present=f"mesh= is {mesh}, and the policy has arrays='numpy'",
        fix="leave out one of them",
    )


def memory_kind_is_not_here(kind: str, who: str, present: Inventory) -> Problem:
    """The platform lacks a memory kind that was asked for."""
    otherwise = "what was recorded" if who == "policy" else "the default"
    return Problem(
        could_not=f"cannot restore into memory kind {kind!r}, which the {who} names",
        present=f"{present.platform} devices with {', '.join(present.memory_kinds)}",
        fix=f"name one of these, or none for {otherwise}",
    )


def rule_matches_nothing(rule: SpecRule, example: str) -> Problem:
    """A spec by name that is found in the path of no leaf: a misspelt one would change nothing, silently."""
    return Problem(
        could_not=f"cannot follow rules: {rule.pattern!r} is found in the path of no leaf",
        present=f"paths such as {example}",
        fix="write it as re.search takes it; print(read_manifest(path)) lists the paths",
    )


def rule_has_no_mesh(rule: SpecRule, meshes: int) -> Problem:
    """A spec by name, and no mesh to place it on, or several of the target or of the checkpoint."""
    which = f"{meshes} meshes to choose from" if meshes else "no mesh to place it on"
    return Problem(
        could_not=f"cannot place {rule.spec}, of rules {rule.pattern!r}: there {'are' if meshes else 'is'} {which}",
        present="neither mesh= nor the mesh of jax.set_mesh",
        fix="pass mesh=, or restore under jax.set_mesh",
        about="mesh",
    )


def rule_names_unknown_axes(rule: SpecRule, missing: Sequence[str], mesh: MeshRecord) -> Problem:
    """A spec by name has axes that the mesh lacks."""
    return Problem(
        could_not=f"cannot place {rule.spec}, of rules {rule.pattern!r}: the mesh has no axis {_listed(missing)}",
        present=f"mesh {mesh}",
        fix="name axes of the mesh in rules, or pass a mesh that has these",
        about="mesh",
    )


# Leaves on one side alone.


def leaves_are_extra() -> Problem:
    """Saved leaves that the target lacks."""
    return Problem(
        could_not="cannot restore into a target that lacks saved leaves",
        present="nothing under these names in the target",
        fix="extra='ignore' in the policy reads the others alone; or give the target a leaf for each",
    )


def leaves_are_missing() -> Problem:
    """Leaves of the target that the checkpoint lacks."""
    return Problem(
        could_not="cannot restore leaves of the target that the checkpoint lacks",
        recorded="nothing under these names",
        fix="missing='keep' in the policy keeps the target's own values, rename_leaves says where else they are saved "
        "(print(read_manifest(path)) lists what is); or take them off the target",
    )


def leaves_have_no_value() -> Problem:
    """Leaves that the checkpoint lacks, and of which an abstract target has no value to keep."""
    return Problem(
        could_not="cannot keep the target's value of leaves that are abstract, and that the checkpoint lacks",
        recorded="nothing under these names",
        present="a shape and a dtype alone, or an array that was deleted",
        fix="give the target real values for these leaves, or say in rename_leaves where they are saved",
    )


# What a leaf is.


def leaf_cannot_be_asked_for(reason: str, fix: str) -> Problem:
    """A leaf of the target says something that has no record."""
    return Problem(could_not=reason, present="the target asks for it", fix=fix)


def type_is_other(recorded: LeafRecord, wanted: str, *, is_prng: bool) -> Problem:
    """Text, bytes and PRNG keys come back as nothing else."""
    return Problem(
        could_not=f"cannot restore {recorded.dtype_text} as {wanted}",
        recorded=_leaf(recorded),
        present=f"the target asks for {wanted}",
        fix="give the target's leaf the saved PRNG implementation" if is_prng else _TYPE_FIX,
    )


def scalar_is_of_another_kind(recorded: LeafRecord, wanted: str, cast: Cast) -> Problem:
    """A Python scalar of another kind than was saved."""
    return Problem(
        could_not=f"cannot restore {recorded.dtype_text} as {wanted} with cast={cast!r}",
        recorded=_leaf(recorded),
        present=f"the target asks for {wanted}",
        fix=f"{_TYPE_FIX}, or cast='unsafe' in the policy",
    )


def cast_is_not_allowed(recorded: LeafRecord, wanted: str, cast: Cast) -> Problem:
    """A dtype that the policy does not cast the saved one to."""
    return Problem(
        could_not=f"cannot cast {recorded.dtype} to {wanted} with cast={cast!r}",
        recorded=recorded.dtype,
        present=f"the target asks for {wanted}",
        fix=f"give the target's leaf dtype {recorded.dtype}, or "
        + ("another cast in the policy, 'same_kind' by default" if cast == "never" else "cast='unsafe' in the policy"),
    )


def cast_does_not_exist(recorded: LeafRecord, wanted: str) -> Problem:
    """A cast that TensorStore does not make, or makes wrongly."""
    return Problem(
        could_not=f"cannot cast {recorded.dtype} to {wanted} while it is read",
        recorded=recorded.dtype,
        present=f"the target asks for {wanted}",
        fix=f"give the target's leaf dtype {recorded.dtype}, and cast what is restored",
    )


def shape_is_other(recorded: LeafRecord, wanted: tuple[int, ...]) -> Problem:
    """A shape that is not the saved one."""
    return Problem(
        could_not=f"cannot restore shape {recorded.shape} into shape {wanted}",
        recorded=_leaf(recorded),
        present=f"the target asks for shape {wanted}",
        fix="give the target's leaf the saved shape",
    )


def dtype_needs_x64(dtype: str, recorded: LeafRecord) -> Problem:
    """A 64-bit dtype that no `jax.Array` can have here."""
    return Problem(
        could_not=f"cannot hold {dtype} in a jax.Array",
        recorded=recorded.dtype,
        present="jax_enable_x64 is off",
        fix="switch jax_enable_x64 on, restore into a target of 32 bits, or into NumPy",
    )


_TYPE_FIX = "give the target a leaf of the saved type"

# Specs.


def axes_are_manual(mesh: MeshRecord) -> Problem:
    """A mesh on which nothing can be placed from outside."""
    return Problem(
        could_not=f"cannot place an array on {mesh}: manual axes exist within jax.shard_map alone",
        present=f"mesh {mesh}",
        fix="pass a mesh, or a target on one, with explicit or auto axes",
    )


def spec_is_unreduced(spec: SpecRecord) -> Problem:
    """A target asks for a pending reduction."""
    return Problem(
        could_not=f"cannot restore into a sharding with pending reductions, {spec}",
        present=f"the target asks for {spec}",
        fix="give the target's leaf a spec without unreduced axes",
    )


def reduced_axes_are_not_explicit(spec: SpecRecord, mesh: MeshRecord) -> Problem:
    """Reduced axes that would not be explicit."""
    return Problem(
        could_not=f"cannot place {spec} on {mesh}: reduced axes must be explicit",
        present=f"mesh {mesh}",
        fix="leave these axes explicit, in axis_types of the policy or in the mesh; or restore into a target with another spec",
    )


def open_dimension_needs_auto(spec: SpecRecord, mesh: MeshRecord) -> Problem:
    """An unconstrained dimension on a mesh without an auto axis."""
    return Problem(
        could_not=f"cannot place {spec} on {mesh}: an unconstrained dimension takes an auto axis",
        present=f"mesh {mesh}",
        fix="leave an axis auto, in axis_types of the policy or in the mesh; or restore into a target with another spec",
    )


def spec_is_too_long(spec: SpecRecord, shape: tuple[int, ...]) -> Problem:
    """A spec with more entries than the array has dimensions."""
    return Problem(
        could_not=f"cannot place an array of {plural(len(shape), 'dimension')} by {spec}",
        recorded=f"shape {shape}",
        present=f"{spec} is asked for",
        fix="use a spec that is no longer than the shape, in the target or in rules",
    )


def dimension_is_indivisible(length: int, axes: Sequence[str], mesh: MeshRecord, *, by_target: bool) -> Problem:
    """A mesh does not divide a dimension that a spec splits."""
    sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    return Problem(
        could_not=f"cannot split a dimension of length {length} over {sizes}",
        recorded=f"a dimension of length {length}",
        present=f"mesh {mesh}",
        fix="give the target's leaf another spec, or a mesh whose axes divide the dimension"
        if by_target
        else "indivisible='replicate' in the policy makes it whole along the dimension; or pass a mesh whose axes divide "
        "it",
    )


def _leaf(recorded: LeafRecord) -> str:
    what = f"{recorded.dtype_text}[{','.join(map(str, recorded.shape))}]" if recorded.shape else recorded.dtype_text
    return what if isinstance(recorded, ArrayRecord) else f"{what}, a value on the host"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _path(names: LeafNames) -> str:
    return "/".join(names)
