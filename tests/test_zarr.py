"""`_zarr`: what the metadata of an array say, as TensorStore, stock Orbax and others write them; and hostile ones."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from stored_arrays import GZIP, ZSTD, spec_by_hand

from orbax_explicit import _zarr
from orbax_explicit._leaf_capture import STORABLE_DTYPES
from orbax_explicit._stock_json import UnreadableError
from orbax_explicit._zarr import ZarrArray, parse_zarr

VERSIONS = pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])

ZARR2: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [4, 6],
    "chunks": [2, 3],
    "dtype": "<f4",
    "compressor": {"id": "gzip", "level": 0},
    "fill_value": None,
    "order": "C",
    "filters": None,
    "dimension_separator": ".",
}
LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
BIG: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "big"}}
ZARR3: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 6],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [LITTLE, {"name": "gzip", "configuration": {"level": 0}}],
    "fill_value": 0.0,
}
# What both of them say.
PLAIN = ZarrArray(shape=(4, 6), dtype="float32", is_little_endian=True, chunk=(2, 3), is_checked=True, encoding="gzip")


def parsed(metadata: Any) -> ZarrArray:
    return parse_zarr(json.dumps(metadata).encode())


def facts(array: ZarrArray) -> tuple[Any, ...]:
    return array.chunk, array.is_little_endian, array.is_checked, array.encoding


def sharded(*inner: dict[str, Any]) -> list[dict[str, Any]]:
    """Codecs of version 3 that put several chunks into one value."""
    configuration = {"chunk_shape": [1, 1], "codecs": list(inner), "index_codecs": [LITTLE, {"name": "crc32c"}]}
    return [{"name": "sharding_indexed", "configuration": configuration}]


def zstd(**configuration: Any) -> dict[str, Any]:
    return {"name": "zstd", "configuration": {"level": 3, **configuration}}


@VERSIONS
@pytest.mark.parametrize("codec", [None, GZIP, ZSTD], ids=["no codec", "gzip", "zstd"])
@pytest.mark.parametrize("dtype", sorted(STORABLE_DTYPES))
def test_what_tensorstore_writes_is_read(dtype: str, codec, use_zarr3: bool) -> None:
    """Of every dtype that can be stored; dtypes of eight bits have no order of their bytes."""
    spec = {**spec_by_hand(use_zarr3, (2, 3), codec), "kvstore": "memory://"}
    array = ts.open(spec, create=True, shape=(4, 6), dtype=dtype).result()
    metadata = parse_zarr(array.kvstore["zarr.json" if use_zarr3 else ".zarray"])
    assert metadata == ZarrArray(
        shape=(4, 6),
        dtype=dtype,
        is_little_endian=True,
        chunk=(2, 3),
        is_checked=codec == GZIP,
        encoding={"gzip": "gzip", "zstd": None}[codec["name"]] if codec else "raw",
    )


@VERSIONS
def test_what_stock_writes_is_read(tmp_path, use_zarr3: bool) -> None:
    """Compressed, by codecs of stock's choice that check nothing."""
    values = {
        "w": jnp.zeros((4, 6), jnp.bfloat16),
        "n": np.zeros((3,), np.int64),
        "s": jnp.float32(1),
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "a", args=ocp.args.PyTreeSave(values))
    file = "zarr.json" if use_zarr3 else ".zarray"
    found = {name: parse_zarr((tmp_path / "a" / name / file).read_bytes()) for name in values}
    assert {name: (array.shape, array.dtype, array.chunk) for name, array in found.items()} == {
        "w": ((4, 6), "bfloat16", (4, 6)),
        "n": ((3,), "int64", (3,)),
        "s": ((), "float32", ()),
    }
    assert {(array.is_little_endian, array.is_checked, array.encoding) for array in found.values()} == {
        (True, False, None)
    }


@pytest.mark.parametrize("metadata", [ZARR2, ZARR3], ids=["Zarr 2", "Zarr 3"])
def test_plain_metadata_are_read(metadata) -> None:
    """Both versions say the same of the same array."""
    assert parsed(metadata) == PLAIN


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        pytest.param({"compressor": None}, ((2, 3), True, False, "raw"), id="no compressor"),
        pytest.param({"compressor": {"id": "zlib", "level": 1}}, ((2, 3), True, True, None), id="zlib checks too"),
        pytest.param({"compressor": {"id": "blosc"}}, ((2, 3), True, False, None), id="a compressor that checks not"),
        pytest.param({"compressor": {"id": "zstd"}}, ((2, 3), True, False, None), id="zstd, of which is not told"),
        pytest.param({"compressor": {}}, ((2, 3), True, False, None), id="a compressor without a name"),
        pytest.param({"compressor": {"id": ["gzip"]}}, ((2, 3), True, False, None), id="a name that is a list"),
        pytest.param({"compressor": 3}, ((2, 3), True, False, None), id="a compressor that is a number"),
        pytest.param({"dtype": ">f4"}, ((2, 3), False, True, None), id="the highest byte first"),
        pytest.param({"dtype": "|i1"}, ((2, 3), True, True, "gzip"), id="one byte"),
        pytest.param({"order": "F"}, ((2, 3), True, True, None), id="the first dimension fastest"),
        pytest.param({"filters": [{"id": "delta"}]}, ((2, 3), True, True, None), id="a filter"),
        pytest.param({"dimension_separator": "/"}, ((2, 3), True, True, None), id="other keys of chunks"),
        pytest.param({"chunks": [2]}, (None, True, True, "gzip"), id="chunks of too few dimensions"),
        pytest.param({"chunks": [2, 0]}, (None, True, True, "gzip"), id="chunks of size zero"),
        pytest.param({"chunks": [2, "3"]}, (None, True, True, "gzip"), id="chunks that are no sizes"),
        pytest.param({"chunks": None}, (None, True, True, "gzip"), id="no chunks"),
        pytest.param({"shape": [], "chunks": []}, ((), True, True, "gzip"), id="a scalar"),
    ],
)
def test_what_version_2_says(edit, expected) -> None:
    """Chunk, order of bytes, whether it is checked, and what only TensorStore can read."""
    assert facts(parsed({**ZARR2, **edit})) == expected


def test_the_usual_keys_of_chunks_need_not_be_named() -> None:
    """Version 2 leaves `dimension_separator` out."""
    assert parsed({name: value for name, value in ZARR2.items() if name != "dimension_separator"}) == PLAIN


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        pytest.param({"codecs": [LITTLE]}, ((2, 3), True, False, "raw"), id="no compression"),
        pytest.param({"codecs": [{"name": "bytes"}]}, ((2, 3), True, False, "raw"), id="no order of bytes"),
        pytest.param({"codecs": [BIG]}, ((2, 3), False, False, None), id="the highest byte first"),
        pytest.param({"codecs": [LITTLE, {"name": "crc32c"}]}, ((2, 3), True, True, None), id="a checksum alone"),
        pytest.param({"codecs": [LITTLE, zstd(checksum=True)]}, ((2, 3), True, True, None), id="zstd that checks"),
        pytest.param({"codecs": [LITTLE, zstd(checksum=False)]}, ((2, 3), True, False, None), id="that does not"),
        pytest.param({"codecs": [LITTLE, zstd()]}, ((2, 3), True, False, None), id="zstd that does not say"),
        pytest.param({"codecs": [LITTLE, zstd(checksum=1)]}, ((2, 3), True, False, None), id="zstd that says a number"),
        pytest.param({"codecs": [LITTLE, GZIP, {"name": "crc32c"}]}, ((2, 3), True, True, None), id="three codecs"),
        pytest.param({"codecs": [{"name": "transpose"}, LITTLE, GZIP]}, ((2, 3), True, True, None), id="a transpose"),
        pytest.param({"codecs": sharded(LITTLE, GZIP)}, ((2, 3), True, True, None), id="shards that are checked"),
        pytest.param({"codecs": sharded(LITTLE)}, ((2, 3), True, False, None), id="shards of which only the index is"),
        pytest.param({"codecs": []}, ((2, 3), True, False, None), id="no codecs"),
        pytest.param({"codecs": None}, ((2, 3), True, False, None), id="nil for codecs"),
        pytest.param({"codecs": ["bytes"]}, ((2, 3), True, False, None), id="a codec that is a text"),
        pytest.param({"codecs": [LITTLE, {"name": ["gzip"]}]}, ((2, 3), True, False, None), id="a name that is a list"),
        pytest.param({"codecs": [LITTLE, 3]}, ((2, 3), True, False, None), id="a codec that is a number"),
        pytest.param({"chunk_key_encoding": {"name": "v2"}}, ((2, 3), True, True, None), id="other keys of chunks"),
        pytest.param({"chunk_grid": {"name": "rectangular"}}, (None, True, True, "gzip"), id="another grid"),
        pytest.param({"chunk_grid": 3}, (None, True, True, "gzip"), id="no grid"),
    ],
)
def test_what_version_3_says(edit, expected) -> None:
    """The same facts, from other fields."""
    assert facts(parsed({**ZARR3, **edit})) == expected


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param({"name": "default", "configuration": {"separator": "."}}, id="a point"),
        pytest.param({"name": "default", "configuration": {"separator": 3}}, id="no separator"),
    ],
)
def test_other_separators_are_left_to_tensorstore(configuration) -> None:
    """A chunk would be looked for under a key that is not there."""
    assert parsed({**ZARR3, "chunk_key_encoding": configuration}).encoding is None


def test_the_usual_separator_may_be_named() -> None:
    """It is a slash."""
    encoding = {"name": "default", "configuration": {"separator": "/"}}
    assert parsed({**ZARR3, "chunk_key_encoding": encoding}) == PLAIN


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"{", "not JSON", id="cut short"),
        pytest.param(b"\xff", "not JSON", id="no text"),
        pytest.param(b"[" * 100_000, "not JSON", id="a deep nest"),
        pytest.param(b"[]", "not a JSON object but []", id="a list"),
        pytest.param(b" " * (1 << 20) + b"{}", "larger than 1048576 bytes", id="much"),
        pytest.param(b"{}", "no shape but None", id="an empty object"),
        *(
            pytest.param(json.dumps({**ZARR2, "shape": shape}).encode(), f"no shape but {shape!r}", id=says)
            for shape, says in (
                (4, "a number for a shape"),
                ("46", "a text for a shape"),
                ([4, -1], "a negative size"),
                ([4, 6.0], "a size that is no integer"),
                ([True, 6], "a size that is a truth value"),
                ([4, 1 << 63], "a size beyond 63 bits"),
                ([[4], 6], "a nested shape"),
            )
        ),
        *(
            pytest.param(json.dumps({**ZARR2, "dtype": dtype}).encode(), f"unknown dtype {dtype!r}", id=says)
            for dtype, says in (
                (None, "no dtype"),
                ("", "an empty dtype"),
                ("<f3", "a float of three bytes"),
                ("<i16", "an integer of sixteen bytes"),
                ("<U8", "text"),
                ("|O", "objects"),
                ("<M8[ns]", "times"),
                ([["a", "<f4"]], "a structure"),
                (["<f4"], "a list"),
            )
        ),
        *(
            pytest.param(json.dumps({**ZARR3, "data_type": dtype}).encode(), f"unknown dtype {dtype!r}", id=says)
            for dtype, says in (
                (None, "no data type"),
                ("<f4", "a dtype of the other version"),
                ("string", "texts"),
                ("json", "JSON"),
                ("char", "characters"),
                ("r16", "raw bits"),
                ({"name": "float32"}, "an object"),
            )
        ),
    ],
)
def test_metadata_of_no_array_are_refused(data: bytes, reason: str) -> None:
    """With what is there instead."""
    with pytest.raises(UnreadableError) as caught:
        parse_zarr(data)
    assert str(caught.value) == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("metadata", [ZARR2, ZARR3], ids=["Zarr 2", "Zarr 3"])
@given(data=st.data())
def test_anything_may_stand_anywhere(metadata, data: st.DataObject) -> None:
    """What is said of an array is still of the right kind, or one exception."""
    fields = data.draw(st.lists(st.sampled_from([*metadata, "other"]), min_size=1, max_size=3, unique=True))
    edited = {**metadata, **{field: data.draw(JSON) for field in fields}}
    try:
        array = parsed(edited)
    except UnreadableError:
        return
    assert all(type(n) is int and n >= 0 for n in array.shape)
    assert array.chunk is None or (len(array.chunk) == len(array.shape) and all(n > 0 for n in array.chunk))
    assert ts.dtype(array.dtype).name == array.dtype
    assert array.encoding in ("raw", "gzip", None)
    assert type(array.is_checked) is type(array.is_little_endian) is bool


@given(data=st.data())
def test_anything_may_stand_within_a_codec(data: st.DataObject) -> None:
    """Codecs nest: those of a shard have codecs of their own."""
    codec = st.fixed_dictionaries(
        {"name": st.sampled_from(("bytes", "gzip", "zstd", "sharding_indexed")) | JSON, "configuration": JSON}
    )
    array = parsed({**ZARR3, "codecs": data.draw(st.lists(codec | JSON, max_size=3))})
    assert (array.shape, array.dtype, array.chunk) == ((4, 6), "float32", (2, 3))


@pytest.mark.parametrize("depth", [10, 200, 2_000, 50_000])
def test_shards_may_be_nested_to_any_depth(depth: int) -> None:
    """As deep as they can be read they are; beyond that it is one exception."""
    start, end = '{"name": "sharding_indexed", "configuration": {"codecs": [', "]}}"
    data = json.dumps({**ZARR3, "codecs": ["here"]}).replace('"here"', start * depth + json.dumps(GZIP) + end * depth)
    try:
        array = parse_zarr(data.encode())
    except UnreadableError as error:
        reason = str(error)
    else:
        reason = ""
        assert array.is_checked
    assert reason in ("", "not JSON", "too deeply nested", "larger than 1048576 bytes")
    assert not reason or depth > 10


def test_checking_codecs_are_ones_that_tensorstore_has() -> None:
    """A name that is spelt otherwise would leave arrays unchecked that are not."""
    assert {"gzip", "zlib", "crc32c"} == _zarr._CHECKING_CODECS
    for name in ("gzip", "zlib"):
        spec = {"driver": "zarr", "kvstore": "memory://", "metadata": {"compressor": {"id": name}}}
        ts.open(spec, create=True, shape=(2,), dtype="float32").result()
    for name in ("gzip", "crc32c"):
        codecs = [LITTLE, {"name": name}]
        spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": {"codecs": codecs}}
        ts.open(spec, create=True, shape=(2,), dtype="float32").result()
