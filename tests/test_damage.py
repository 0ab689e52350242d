"""A damaged byte never becomes a wrong value: a few of the trials of `benchmarks/fuzz_damage.py`, and what they judge by."""

from __future__ import annotations

import dataclasses
import gzip
import random
from collections.abc import Mapping

import damage_trials
import pytest
from damage import (
    CUT,
    DELETE,
    FLIP,
    LOST,
    RAISED,
    RAW,
    RIGHT,
    WRONG,
    Contents,
    Damage,
    Outcome,
    Reading,
    Region,
    Verdict,
    breaches,
    done,
    explanation,
    file_kind,
    flips,
    gunzip,
    one_of_each_kind,
    read_contents,
    table,
)
from damage_trials import UNCHECKED, VARIANTS

from orbax_explicit.testing import run_on_devices

# The fixture starts a process; with several workers, one of them is to have all tests of this file.
pytestmark = pytest.mark.xdist_group("damage")


def of_each_kind(contents: Contents, rng: random.Random) -> list[Damage]:
    return [*one_of_each_kind(contents, rng), *flips(contents, 6, rng)]


def anywhere(contents: Contents, rng: random.Random) -> list[Damage]:
    return flips(contents, 6, rng)


def in_chunks(contents: Contents, rng: random.Random) -> list[Damage]:
    chunks = {name: data for name, data in contents.items() if file_kind(name) == "<array>/<chunk>"}
    return flips(chunks, 6, rng)


TRIED = ("default", "uncompressed", "Zarr 3", "no OCDBT", "v1")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Mapping[str, list[Outcome]]:
    """What came of damage to a checkpoint of each variant, and to one without checksums."""
    choices = {name: (VARIANTS[name], of_each_kind if name == "default" else anywhere) for name in TRIED}
    choices["unchecked"] = (UNCHECKED, in_chunks)
    (tried,) = run_on_devices(damage_trials.trials_here, choices, tmp_path_factory.mktemp("damage"), 0, devices=8)
    return {name: [outcome for outcome in tried if outcome.variant == name] for name in choices}


@pytest.mark.parametrize("variant", TRIED)
def test_no_damage_gives_a_wrong_value(outcomes, variant):
    """Nor an error of another package; `verify` names what a restore stumbles over, and all else is known to be harmless."""
    assert outcomes[variant]
    broken = [outcome for outcome in outcomes[variant] if breaches(outcome)]
    assert not broken, table(broken)


def test_every_kind_of_file_is_damaged_in_every_way(outcomes):
    """Those that this package writes and those that are Orbax's."""
    done_to = {(outcome.damage.kind, outcome.kind) for outcome in outcomes["default"]}
    kinds = {kind for _, kind in done_to}
    assert kinds >= {"explicit_sharding.msgpack", "_METADATA", "_sharding", "manifest.ocdbt", "ocdbt.process_*/d/*"}
    assert done_to == {(how, kind) for how in (FLIP, CUT, DELETE) for kind in kinds}


def test_without_checksums_the_trials_find_wrong_values(outcomes):
    """Which shows that they can."""
    wrong = [outcome for outcome in outcomes["unchecked"] if outcome.readings["same mesh"].result == WRONG]
    assert wrong
    for outcome in wrong:
        assert outcome.readings["stock"].result == WRONG
        assert breaches(outcome)


# What is judged.

SEEN = Outcome(
    variant="default",
    damage=Damage(FLIP, "3/default/d/x", 8),
    item="3/default",
    region=Region("a chunk", leaf="w"),
    readings={"same mesh": Reading(RAISED, "FormatError"), "stock": Reading(RAISED, "ValueError")},
    verdict=Verdict(ok=False, files=("d/x",), leaves=("w",)),
)
HARMLESS = dataclasses.replace(
    SEEN,
    readings={"same mesh": Reading(RIGHT), "stock": Reading(LOST, "a text")},
    verdict=Verdict(ok=True),
    explanation="a field that nobody reads",
)
BESIDE = dataclasses.replace(
    SEEN,
    damage=Damage(DELETE, "3/_CHECKPOINT_METADATA"),
    readings={"same mesh": Reading(RAW, "KeyError")},
    verdict=Verdict(ok=True),
)


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(SEEN, id="raised by all, and named"),
        pytest.param(HARMLESS, id="harmless, but for what stock loses of what is no array"),
        pytest.param(dataclasses.replace(HARMLESS, verdict=SEEN.verdict), id="harmless, and named all the same"),
        pytest.param(BESIDE, id="Orbax's own error about a file that is Orbax's"),
    ],
)
def test_what_keeps_the_promise(outcome):
    """Damage that is noticed, or does no harm."""
    assert breaches(outcome) == []


def reads(**readings: str) -> dict[str, Reading]:
    return {name.replace("_", " "): Reading(result, "what") for name, result in readings.items()}


@pytest.mark.parametrize(
    ("outcome", "change", "breach"),
    [
        pytest.param(SEEN, {"readings": reads(same_mesh=WRONG)}, "same mesh wrong: what", id="a wrong value"),
        pytest.param(SEEN, {"readings": reads(same_mesh=RAISED, stock=WRONG)}, "stock wrong: what", id="by stock"),
        pytest.param(SEEN, {"readings": reads(numpy=RAW)}, "numpy raised another's error: what", id="a raw error"),
        pytest.param(SEEN, {"verdict": Verdict(ok=True)}, "verify found nothing, and a restore did", id="unverified"),
        pytest.param(SEEN, {"verdict": Verdict(False, ("e",), ("w",))}, "verify does not name the file", id="no file"),
        pytest.param(
            SEEN, {"verdict": Verdict(False, ("d/x",), ("v",))}, "verify does not name the leaf: w", id="no leaf"
        ),
        pytest.param(SEEN, {"verdict": Verdict(None, detail="KeyError")}, "verify raised: KeyError", id="no verdict"),
        pytest.param(SEEN, {"died": "killed"}, "the process died: killed", id="a dead process"),
        pytest.param(HARMLESS, {"explanation": ""}, "harmless, and nobody knows why", id="unexplained"),
    ],
)
def test_what_breaks_the_promise(outcome, change, breach):
    """Each in its own words, which are told with the file and the bit."""
    broken = dataclasses.replace(outcome, **change)
    (found,) = breaches(broken)
    assert found.startswith(breach)
    assert found in table([broken])


@pytest.mark.parametrize("level", [0, 1, 6])
def test_a_flipped_bit_of_a_gzip_stream_is_noticed_or_harmless(level):
    """Each single bit of one: what decodes at all decodes to the same bytes, and it is known why."""
    values = random.Random(0).randbytes(200) + bytes(300)
    chunk = gzip.compress(values, level, mtime=0)
    region = Region("a chunk", stop=len(chunk), is_chunk=True)
    harmless = 0
    for bit in range(8 * len(chunk)):
        damage = Damage(FLIP, "w/0", bit)
        decoded = gunzip(damage.damaged(chunk))
        assert decoded in (None, values)
        assert bool(explanation(damage, region, chunk)) == (decoded is not None)
        harmless += decoded is not None
    # FTEXT, MTIME, XFL and OS; of a stored block five bits of padding.
    assert harmless >= 49 + 5 * (level == 0)
    assert harmless < 100


@pytest.mark.parametrize(
    ("old", "new", "is_known"),
    [
        pytest.param(b'"level":0', b'"level":4', True, id="a level"),
        pytest.param(b'"filters"', b'"filterr"', True, id="the name of a member that says what its default says"),
        pytest.param(b'"<f4"', b'">f4"', False, id="a byte order"),
        pytest.param(b"[16,16],", b"[14,16],", False, id="a shape"),
        pytest.param(b"}", b"|", False, id="no JSON"),
    ],
)
def test_a_flipped_bit_of_zarr_metadata_is_explained_by_what_they_say(old, new, is_known):
    """It must say the same of shape, chunks, dtype and codec."""
    metadata = (
        b'{"shape":[16,16],"chunks":[8,8],"compressor":{"id":"gzip","level":0},"dtype":"<f4","fill_value":null,'
        b'"filters":null,"order":"C","zarr_format":2}'
    )
    at = metadata.index(old)
    (byte,) = (i for i in range(len(old)) if old[i] != new[i])
    damage = Damage(FLIP, "w/.zarray", 8 * (at + byte) + (old[byte] ^ new[byte]).bit_length() - 1)
    damaged = damage.damaged(metadata)
    assert damaged is not None
    assert damaged[at:].startswith(new)
    assert bool(explanation(damage, Region("Zarr metadata", "w"), metadata)) == is_known


@pytest.mark.parametrize("how", [FLIP, CUT, DELETE])
def test_damage_is_undone(tmp_path, how):
    """With all that a reader has removed or added."""
    contents = {"a/b": b"abc", "c": b"", "d": b"def"}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    damage = Damage(how, "a/b", 1)
    with done(damage, tmp_path, contents):
        assert read_contents(tmp_path).get("a/b") == {FLIP: b"cbc", CUT: b"a", DELETE: None}[how]
        (tmp_path / "d").unlink()
        (tmp_path / "e").write_bytes(b"")
    assert read_contents(tmp_path) == contents
