"""Every block of `docs/guide.md` runs, on as many devices as it says, and prints what the page shows.

The first block is the head of every program. A block that begins with `# On 4 devices.` begins a program, in a process
of its own with so many devices; the blocks after it continue that program. A block of text shows what the code before
it prints. All programs run from the first to the last, with one `path`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import pathlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from orbax_explicit import Manifest, RestorePolicy
from orbax_explicit._planning import plan_from_records
from orbax_explicit._records import ArrayRecord, MeshRecord, NamedShardingRecord, SpecRecord
from orbax_explicit.testing import DeviceProcessError, fake_inventory, run_on_devices

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "guide.md"

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_DEVICES = re.compile(r"# On (\d+) devices?\.")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code.

    Attributes:
        line: The line of the page that its first line is, from 1.
        code: The code.
        shown: What it prints, as the page shows it.
    """

    line: int
    code: str
    shown: str = ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Consecutive blocks that run in one process.

    Attributes:
        devices: How many it has.
        blocks: The head of the page, and its own.
    """

    devices: int
    blocks: list[Block] = field(default_factory=list)


def programs_of(page: str) -> list[Program]:
    """The programs of a page, in order.

    Raises:
        ValueError: Something of it would not be run, or not be compared.
    """
    blocks: list[Block] = []
    code_before = False
    for fence in _FENCE.finditer(page):
        line = page.count("\n", 0, fence.start("text")) + 1
        if fence["language"] == "python":
            blocks.append(Block(line=line, code=fence["text"]))
        elif fence["language"] == "text" and code_before:
            blocks[-1] = dataclasses.replace(blocks[-1], shown=fence["text"])
        else:
            raise ValueError(f"line {line}: neither code nor what the code before it prints")
        code_before = fence["language"] == "python"
    if page.count("```") != 2 * len(_FENCE.findall(page)):
        raise ValueError("a fence that is none")
    programs: list[Program] = []
    for block in blocks[1:]:
        if found := _DEVICES.match(block.code):
            programs.append(Program(devices=int(found[1]), blocks=[blocks[0]]))
        if not programs:
            raise ValueError(f"line {block.line}: on how many devices?")
        programs[-1].blocks.append(block)
    return programs


# As in pyproject.toml.
OLD_FRAMEWORKS = r"jax\.core\.(DropVar|Effect|get_opaque_trace_state) is deprecated"


def printed_by(blocks: Sequence[Block], path: pathlib.Path) -> list[str]:
    """Runs blocks as one program, and returns what each of them prints."""
    names = {"path": path}
    printed = []
    for block in blocks:
        # A traceback then names the line of the page, and shows it.
        code = compile("\n" * (block.line - 1) + block.code, str(GUIDE), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", OLD_FRAMEWORKS, DeprecationWarning)
            exec(code, names)  # noqa: S102 - the page is ours
        printed.append(output.getvalue())
    return printed


def check(page: str, path: pathlib.Path) -> None:
    """Runs every program of a page, and compares what it prints."""
    wrong = []
    for program in programs_of(page):
        (printed,) = run_on_devices(printed_by, program.blocks, path, devices=program.devices)
        for block, text in zip(program.blocks, printed, strict=True):
            if text != block.shown:
                wrong.append(f"line {block.line}: the page shows\n{block.shown}and the code prints\n{text}")
    if wrong:
        raise AssertionError("\n".join(wrong))


def test_every_program_runs_and_prints_what_the_page_shows(tmp_path):
    """From the first to the last, each in a process of its own."""
    check(GUIDE.read_text(), tmp_path / "checkpoint")


def test_every_block_of_the_page_is_in_a_program():
    """A guard against a page that shows little, or blocks that are lost on the way."""
    page = GUIDE.read_text()
    programs = programs_of(page)
    own = [block for program in programs for block in program.blocks[1:]]
    assert len(own) + 1 == page.count("```python\n") > 20
    assert sum(bool(block.shown) for block in own) == page.count("```text\n") > 10
    assert {program.devices for program in programs} >= {1, 4, 8, 16}


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its first two lines."""
    section = GUIDE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    return rows[2:]


def test_the_table_of_fields_is_that_of_the_policy():
    """Every field, in order, with its default."""
    policy = RestorePolicy()
    defaults = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    rows = {field.strip("`"): ast.literal_eval(default.strip("`")) for field, default, _ in _rows("`RestorePolicy`")}
    assert rows == defaults
    assert list(rows) == list(defaults)


def test_the_meshes_of_the_table_are_resized_so():
    """(data=2, model=4) on all of 8 devices, with an array of 24 x 8 on P('data', 'model')."""
    sharding = NamedShardingRecord(
        mesh=MeshRecord(
            axis_names=("data", "model"),
            axis_sizes=(2, 4),
            axis_types=("explicit", "explicit"),
            device_ids=tuple(range(8)),
            platform="cpu",
        ),
        spec=SpecRecord(partitions=("data", "model")),
    )
    array = ArrayRecord(dtype="float32", shape=(24, 8), sharding=sharding, committed=True)
    manifest = Manifest(tree=array, inventory=fake_inventory(8))
    for counts, sizes, _ in _rows("How a mesh is resized"):
        for count in map(int, counts.split(", ")):
            (planned,) = plan_from_records(manifest, None, fake_inventory(count)).meshes
            assert ", ".join(f"{axis}={size}" for axis, size in planned.mesh.shape.items()) == sizes, count


HEAD = "```python\nimport jax\n```\n"


def test_a_block_that_raises_is_noticed(tmp_path):
    """With the line of the page on which it did."""
    with pytest.raises(DeviceProcessError, match=r"guide\.md\", line 7(.|\n)*ZeroDivisionError"):
        check(HEAD + "\n```python\n# On 2 devices.\n1 / (jax.device_count() - 2)\n```\n", tmp_path)


def test_output_that_differs_is_noticed(tmp_path):
    """Output that the page lacks, and other output than it shows: the device count is real, and 2."""
    page = (
        HEAD
        + "```python\n# On 2 devices.\nprint('some')\n```\n```python\nprint(jax.device_count())\n```\n```text\n3\n```\n"
    )
    with pytest.raises(AssertionError) as noticed:
        check(page, tmp_path)
    assert "line 5: the page shows\nand the code prints\nsome\n" in str(noticed.value)
    assert "line 9: the page shows\n3\nand the code prints\n2\n" in str(noticed.value)


@pytest.mark.parametrize(
    "page",
    [
        HEAD + "```py\n1 / 0\n```\n",
        HEAD + "```\n1 / 0\n```\n",
        HEAD + "```python\n1 / 0\n```\n",
        HEAD + "- ```python\n  1 / 0\n  ```\n",
        HEAD + "```python\n# On 2 devices.\n```\n```text\n1\n```\n```text\n2\n```\n",
    ],
    ids=["another language", "no language", "no number of devices", "an indented block", "two blocks of output"],
)
def test_a_block_that_would_not_be_run_or_compared_is_refused(page):
    """Nothing of the page is skipped for the way it is written."""
    with pytest.raises(ValueError, match=r"line \d+|a fence"):
        programs_of(page)
