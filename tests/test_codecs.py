"""`_codecs`: the codec that an array gets, and that gzip notices what happened to a chunk."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_explicit._codecs import CodecPolicy, decode_gzip, encode_gzip

N = 1 << 16
RNG = np.random.default_rng(3)
NORMALS = RNG.standard_normal(N, np.float32)
TOKENS = RNG.zipf(1.3, N).clip(0, 50_000).astype(np.int32)
ZEROS = np.zeros(N, np.float32)


def gzip_of(level: int) -> dict[str, Any]:
    return {"name": "gzip", "configuration": {"level": level}}


ZSTD = {"name": "zstd", "configuration": {"level": 3}}
ZSTD_CHECKED = {"name": "zstd", "configuration": {"level": 3, "checksum": True}}
ZSTD_UNCHECKED = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
NOT_IN_ZARR2 = "compression='zstd' has no checksum in Zarr version 2"


@pytest.mark.parametrize(
    ("checksum", "compression", "zarr2", "zarr3"),
    [
        pytest.param("crc32", "auto", gzip_of(0), gzip_of(0), id="checked, compressed where it pays"),
        pytest.param("crc32", None, gzip_of(0), gzip_of(0), id="checked alone"),
        pytest.param("crc32", "zstd", NOT_IN_ZARR2, ZSTD_CHECKED, id="checked and compressed"),
        pytest.param(None, "auto", None, None, id="not checked, nor compressed, since gzip would check"),
        pytest.param(None, "zstd", ZSTD, ZSTD_UNCHECKED, id="compressed alone"),
        pytest.param(None, None, None, None, id="neither"),
    ],
)
def test_the_codec_of_each_policy(checksum, compression, zarr2, zarr3) -> None:
    """Of data that compressing does not pay for."""
    policy = CodecPolicy(checksum=checksum, compression=compression)
    for use_zarr3, expected in ((False, zarr2), (True, zarr3)):
        if isinstance(expected, str):
            for refused in (policy.check_format, lambda use_zarr3: policy.codec([NORMALS], use_zarr3=use_zarr3)):
                with pytest.raises(ValueError, match=expected):
                    refused(use_zarr3=use_zarr3)
        else:
            policy.check_format(use_zarr3=use_zarr3)
            assert policy.codec([NORMALS], use_zarr3=use_zarr3) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"checksum": "md5"}, "checksum must be one of ['crc32', None], not 'md5'", id="a checksum"),
        pytest.param({"checksum": False}, "checksum must be one of ['crc32', None], not False", id="no checksum"),
        pytest.param(
            {"compression": "gzip"}, "compression must be one of ['auto', 'zstd', None], not 'gzip'", id="a compression"
        ),
        pytest.param(
            {"compression": True}, "compression must be one of ['auto', 'zstd', None], not True", id="a yes or no"
        ),
    ],
)
def test_what_is_no_policy_is_refused(options, message) -> None:
    """When it is made, with what there is."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        CodecPolicy(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("blocks", "level"),
    [
        pytest.param([ZEROS], 1, id="zeros"),
        pytest.param([np.full(N, 0.1, ml_dtypes.bfloat16)], 1, id="one value"),
        pytest.param([np.ones((256, 256), bool)], 1, id="truth values"),
        pytest.param([np.zeros((256, 512), np.float32)[:, ::2]], 1, id="zeros that are not contiguous"),
        pytest.param([NORMALS], 0, id="normals"),
        pytest.param([NORMALS.astype(ml_dtypes.bfloat16).astype(np.float32)], 0, id="values of half the precision"),
        pytest.param([TOKENS], 0, id="tokens, which would become smaller, but not in time"),
        pytest.param([np.arange(N)], 0, id="a range"),
        pytest.param([ZEROS, NORMALS], 0, id="one block of several that would not become smaller"),
        pytest.param([ZEROS, ZEROS[:0]], 1, id="an empty block beside zeros"),
        pytest.param([np.concatenate([ZEROS, NORMALS])], 0, id="zeros in the first half alone"),
        pytest.param([np.concatenate([NORMALS, ZEROS])], 0, id="zeros in the second half alone"),
        pytest.param([ZEROS[:10]], 0, id="few zeros, which lie within compressed nodes"),
        pytest.param([np.float32(0).reshape(())], 0, id="a scalar"),
        pytest.param([], 0, id="nothing"),
        pytest.param([ZEROS[:0]], 0, id="blocks of size zero"),
    ],
)
def test_the_level_follows_from_a_sample(blocks, level) -> None:
    """Compressed is what is nearly one value; and nothing where the policy says so."""
    assert CodecPolicy().codec(blocks, use_zarr3=False) == gzip_of(level)
    assert CodecPolicy().codec(iter(blocks), use_zarr3=True) == gzip_of(level)
    assert CodecPolicy(compression=None).codec(blocks, use_zarr3=False) == gzip_of(0)


@pytest.mark.parametrize("level", [0, 1])
@given(data=st.binary(max_size=300))
def test_a_gzip_member_holds_what_was_put_in(level: int, data: bytes) -> None:
    """Python's own reader finds it too."""
    encoded = encode_gzip(data, level)
    assert decode_gzip(encoded) == data
    assert gzip.decompress(encoded) == data


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("max_nbytes", [0, 40, 1000], ids=["any number", "as many as there are", "more"])
def test_every_flipped_bit_of_a_chunk_raises(level: int, max_nbytes: int) -> None:
    """But for bits that say nothing of the elements: in gzip's header, and those that fill up a byte."""
    data = NORMALS[:10].tobytes()
    encoded = encode_gzip(data, level)
    unnoticed = set()
    for position in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[position // 8] ^= 1 << position % 8
        try:
            found = decode_gzip(bytes(flipped), max_nbytes=max_nbytes)
        except ValueError:
            continue
        assert found == data
        unnoticed.add(position // 8)
    # Flags, time and system; what is left of the first byte of a stored block, and of the last one of any other.
    assert unnoticed <= {3, 4, 5, 6, 7, 8, 9, 10, len(encoded) - 9}


@pytest.mark.parametrize("max_nbytes", [0, 14, 100], ids=["any number", "as many as there are", "more"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="nothing"),
        pytest.param(lambda data: data[:-1], id="cut off in the checksum"),
        pytest.param(lambda data: data[:-8], id="cut off before the checksum"),
        pytest.param(lambda data: data[: len(data) // 2], id="cut off in the data"),
        pytest.param(gzip.decompress, id="not encoded"),
        pytest.param(lambda data: zlib.compress(gzip.decompress(data)), id="another format"),
        pytest.param(lambda data: data + b"x", id="something follows"),
        pytest.param(lambda data: data + data, id="another member follows"),
    ],
)
def test_what_is_no_gzip_member_raises(damage, max_nbytes: int) -> None:
    """One `ValueError`, whatever zlib says."""
    with pytest.raises(ValueError, match="damaged gzip member"):
        decode_gzip(damage(encode_gzip(b"what is stored", 0)), max_nbytes=max_nbytes)


def test_a_chunk_never_becomes_larger_than_it_may_be() -> None:
    """A few bytes that say that they hold many are refused before there are many."""
    bomb = encode_gzip(bytes(64 << 20), 9)
    assert len(bomb) < 100 << 10
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="holds more than 1000 bytes"):
            decode_gzip(bomb, max_nbytes=1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert decode_gzip(encode_gzip(bytes(1000), 9), max_nbytes=1000) == bytes(1000)
