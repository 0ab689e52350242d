"""The floors of the package: imports point down, and each floor knows only what it may.

The floors are the table below; a file that is in none of them fails. Each rule has a test that it can fail.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping

import pytest

import orbax_explicit

PACKAGE = "orbax_explicit"

# A name that ends in a slash is a directory: every file below it is on that floor.
FLOORS: dict[int, tuple[str, ...]] = {
    # Vocabulary: the standard library only.
    0: ("_errors", "_records", "_policy", "_outcomes", "_report", "_plan"),
    # Pure: neither JAX nor Orbax.
    1: (
        "_framing",
        "_wire",
        "_wire_schema",
        "_wire_stream",
        "_wire_encoding",
        "_wire_decoding",
        "_refusals",
        "_targets",
        "_matching",
        "_topology",
        "_mesh_planning",
        "_spec_planning",
        "_planning",
        "_containers",
        "_stock",
        "_stock_json",
        "_stock_sharding",
        "_stock_tree",
        "_sidecar",
        "_digests",
        "_strings",
        "_boxes",
        "_chunking",
        "_codecs",
        "_zarr",
        "_storage",
        "_small_arrays",
        "_budget",
        "_allocator",
        "_garbage",
        "_event_loops",
        "_array_writing",
        "_verifying",
    ),
    # JAX. `_compat` is here for JAX's sake; it may import Orbax too, for it is where private names are imported.
    2: ("_leaf_capture", "_capture", "_target_capture", "_binding", "_restoring", "_compat"),
    # Orbax.
    3: (
        "_blocks",
        "_array_reading",
        "_array_shares",
        "_array_metadata",
        "_param_info",
        "_arrays",
        "_host_handlers",
        "_leaf_reading",
        "_trees",
        "handler",
        "args",
        "checkpointer",
        "registration",
        "_v1_handler",
        "v1",
    ),
    # Edges.
    4: ("__init__", "__main__", "testing", "_device_process", "cli/", "integrations/"),
}

COMPAT = "_compat"
UPSTREAM = ("jax", "jaxlib", "orbax")


def floor_of(name: str) -> int | None:
    """The floor of a file, named without its suffix (`cli/demo/__init__`); None if it is in no floor."""
    for floor, entries in FLOORS.items():
        if any(name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in entries):
            return floor
    return None


def problems_of(files: Mapping[str, str]) -> list[str]:
    """Everything that is wrong with the imports of a package, given as names of files -> their sources."""
    problems = []
    for name, source in files.items():
        floor = floor_of(name)
        if floor is None:
            problems.append(f"{name} is in no floor")
            continue
        tree = ast.parse(source)
        for module, line in imported_modules(tree):
            where = f"{name}:{line} (floor {floor})"
            root = module.partition(".")[0]
            if root == PACKAGE:
                problems += internal_problems(module, files, floor, where)
            elif root == "":
                problems.append(f"{where} imports relatively")
            elif floor == 0 and root not in sys.stdlib_module_names:
                problems.append(f"{where} imports {root}: floor 0 is the standard library only")
            elif floor < 2 and root in UPSTREAM:
                problems.append(f"{where} imports {root}: only floors 2 and up know JAX, only floors 3 and up Orbax")
            elif floor < 3 and root == "orbax" and name != COMPAT:
                problems.append(f"{where} imports orbax: only floors 3 and up, and {COMPAT}, know Orbax")
        if name != COMPAT:
            problems += [
                f"{name}:{line} (floor {floor}) uses the private {private}: only {COMPAT} does"
                for private, line in private_names(tree)
            ]
    return problems


def internal_problems(module: str, files: Mapping[str, str], floor: int, where: str) -> list[str]:
    """What is wrong with one import of a module, or of a name in a module, of this package."""
    imported = file_of(module, files)
    above = floor_of(imported)
    problems = []
    if above is not None and above > floor:
        problems.append(f"{where} imports {imported} (floor {above}): an arrow that points up")
    if imported.startswith("integrations/") and not where.startswith("integrations/"):
        problems.append(f"{where} imports {imported}: the package never imports an integration")
    if where.startswith("__init__:") and above == 4:
        problems.append(f"{where} imports {imported}: the root must not need what an edge needs")
    return problems


def file_of(module: str, files: Mapping[str, str]) -> str:
    """The file that holds a module, or a name in a module: `orbax_explicit._wire.FRAME` is in `_wire`."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        for name in ("/".join(parts[:length]), "/".join([*parts[:length], "__init__"])):
            if name in files:
                return name
    # A module that is not there yet, or a name that `__init__` gives.
    return parts[0] if parts and floor_of(parts[0]) is not None else "__init__"


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, with `from` names joined on; relative ones start with a dot."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = "." * level + (module or "")
                yield from ((f"{start}.{alias.name}", node.lineno) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module, node.lineno


def private_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name of upstream's that starts with an underscore: imported, reached through `_src`, or in a string."""
    for module, line in imported_modules(tree):
        parts = module.split(".")
        if parts[0] in UPSTREAM and any(part.startswith("_") for part in parts):
            yield module, line
    upstream = re.compile(rf"({'|'.join(UPSTREAM)})(\.\w+)*\._\w+[\w.:]*")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="_src"):
                yield ast.unparse(node), node.lineno
            case ast.Constant(value=str(text)) if upstream.fullmatch(text):
                yield text, node.lineno


def package_files() -> dict[str, str]:
    root = pathlib.Path(orbax_explicit.__path__[0])
    return {
        path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }


def test_the_package_keeps_its_floors() -> None:
    """Nothing is wrong with any import of the package."""
    files = package_files()
    assert {"_errors", "_records", "testing"} <= files.keys()
    assert problems_of(files) == []


def test_floors_do_not_overlap() -> None:
    """Each file stands in the table once."""
    entries = [entry for floor in FLOORS.values() for entry in floor]
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        pytest.param("_records", "from orbax_explicit._wire import decode", "points up", id="floor 0 imports floor 1"),
        pytest.param("_planning", "import orbax_explicit._capture", "points up", id="floor 1 imports floor 2"),
        pytest.param("_capture", "from orbax_explicit import handler", "points up", id="floor 2 imports floor 3"),
        pytest.param("handler", "from orbax_explicit import testing", "points up", id="floor 3 imports floor 4"),
        pytest.param("handler", "import orbax_explicit", "points up", id="the root is on floor 4"),
        pytest.param("handler", "from orbax_explicit import RestorePolicy", "points up", id="a name of the root"),
        pytest.param("handler", "from orbax_explicit.cli import main", "points up", id="a directory on floor 4"),
        pytest.param("_wire", "def f():\n    from orbax_explicit import v1", "points up", id="a lazy arrow up"),
        pytest.param(
            "_wire", "if TYPE_CHECKING:\n    from orbax_explicit.v1 import x", "points up", id="a typing arrow up"
        ),
        pytest.param("_wire", "import_module('orbax_explicit.v1')", "points up", id="an arrow up by import_module"),
        pytest.param("_wire", "from . import _records", "relatively", id="a relative import"),
        pytest.param("_records", "import numpy as np", "standard library", id="floor 0 imports NumPy"),
        pytest.param("_wire", "import jax", "imports jax", id="floor 1 imports JAX"),
        pytest.param(
            "_wire", "def f():\n    import jaxlib.xla_client", "imports jaxlib", id="floor 1 imports JAX lazily"
        ),
        pytest.param("_stock", "from orbax import checkpoint", "imports orbax", id="floor 1 imports Orbax"),
        pytest.param("_capture", "import orbax.checkpoint as ocp", "imports orbax", id="floor 2 imports Orbax"),
        pytest.param("_binding", "from jax._src import mesh", "private jax._src.mesh", id="a private module of JAX"),
        pytest.param("testing", "from jax import _src", "private jax._src", id="a private name of JAX"),
        pytest.param("testing", "import jax\njax._src.mesh", "private jax._src", id="a private attribute"),
        pytest.param("v1", "from orbax.checkpoint.experimental.v1._src.path import types", "private", id="private v1"),
        pytest.param("handler", "from orbax.checkpoint._src import x", "private", id="a private module of Orbax"),
        pytest.param("handler", "f('orbax.checkpoint._src.x')", "private", id="a private module in a string"),
        pytest.param("cli/_app", "import orbax_explicit.integrations.flax", "never", id="an integration is imported"),
        pytest.param("__init__", "from orbax_explicit.cli import main", "must not need", id="the root imports an edge"),
        pytest.param("_shiny", "", "in no floor", id="a file in no floor"),
        pytest.param("nested/_wire", "", "in no floor", id="a directory in no floor"),
    ],
)
def test_each_rule_can_fail(name: str, source: str, problem: str) -> None:
    """A file that breaks one rule is found, with one problem that says which."""
    files = {**dict.fromkeys(("__init__", "cli/__init__", "cli/_app", "integrations/flax"), ""), name: source}
    (found,) = problems_of(files)
    assert found.startswith(name)
    assert problem in found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param("_planning", "from orbax_explicit._records import Manifest", id="an arrow down"),
        pytest.param("_planning", "from orbax_explicit import _wire", id="an arrow on one floor"),
        pytest.param("_records", "import json\nfrom collections import abc", id="floor 0 and the standard library"),
        pytest.param(
            "_sidecar", "from etils import epath\nimport msgpack", id="floor 1 and what is neither JAX nor Orbax"
        ),
        pytest.param(
            "_compat", "from jax._src import mesh\nimport orbax.checkpoint._src.x", id="_compat and what is private"
        ),
        pytest.param("_wire", '"""As `orbax.checkpoint._src.x` does."""', id="a private name in a docstring"),
        pytest.param("__init__", "from orbax_explicit.handler import x\nfrom orbax_explicit import v1", id="the root"),
        pytest.param(
            "integrations/flax", "import orbax_explicit.integrations.flax", id="integrations among themselves"
        ),
    ],
)
def test_what_is_allowed(name: str, source: str) -> None:
    """The rules do not refuse what the floors are for."""
    assert problems_of({name: source}) == []
