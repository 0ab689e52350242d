"""`_small_arrays`: the keys and values of an array are those that TensorStore's driver writes, and it reads them."""

from __future__ import annotations

import gzip
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_arrays import GZIP, GZIP_1, ZSTD, contents, numbers, spec_by_hand, write_by_driver
from strategies import array_shapes, boxes, chunk_shapes

from orbax_explicit._boxes import Box, Shape, box_shape, chunks_of, intersect, slices_within, whole_box
from orbax_explicit._leaf_capture import STORABLE_DTYPES
from orbax_explicit._small_arrays import decode_chunk, encode_array, fill_block
from orbax_explicit._storage import ArrayStore, Json
from orbax_explicit._zarr import parse_zarr

VERSIONS = pytest.mark.parametrize("use_zarr3", [False, True], ids=["Zarr 2", "Zarr 3"])


def store_of(use_zarr3: bool, **options: Any) -> ArrayStore:
    return ArrayStore(directory="/nowhere", use_ocdbt=False, use_zarr3=use_zarr3, **options)


def encoded(
    values: np.ndarray[Any, Any],
    chunk: Shape,
    *,
    use_zarr3: bool,
    codec: Json | None = GZIP,
    dtype: str | None = None,
    blocks: list[Box] | None = None,
) -> dict[str, bytes]:
    """The keys of an array, encoded here."""
    whole = whole_box(values.shape)
    parts = [whole] if blocks is None else blocks
    keys = list(
        encode_array(
            store_of(use_zarr3),
            shape=values.shape,
            dtype=dtype or values.dtype.name,
            chunk=chunk,
            codec=codec,
            blocks={part: values[slices_within(part, whole)] for part in parts} if values.size else {},
        )
    )
    assert len(dict(keys)) == len(keys)
    return dict(keys)


def by_driver(
    values: np.ndarray[Any, Any], chunk: Shape, use_zarr3: bool, codec: Json | None = GZIP
) -> dict[str, bytes]:
    """The keys of an array that TensorStore's driver wrote."""
    keys = ts.KvStore.open("memory://").result()
    write_by_driver(keys, "w", values, chunk, spec_by_hand(use_zarr3, chunk, codec))
    return {key.removeprefix("w/"): value for key, value in contents(keys).items()}


def read_by_driver(keys: dict[str, bytes], use_zarr3: bool) -> np.ndarray[Any, Any]:
    """What TensorStore's driver reads of these keys."""
    store = ts.KvStore.open("memory://").result()
    for key, value in keys.items():
        store[key] = value
    spec = {"driver": "zarr3" if use_zarr3 else "zarr", "fill_missing_data_reads": False}
    values: np.ndarray[Any, Any] = ts.open(ts.Spec(spec), kvstore=store, open=True).result().read().result()
    return values


def decoded(keys: dict[str, bytes], use_zarr3: bool, block: Box, dtype: Any = None) -> np.ndarray[Any, Any]:
    """A block of an array whose keys these are, decoded here."""
    store = store_of(use_zarr3)
    array = parse_zarr(keys[store.metadata_file])
    assert array.chunk is not None
    places = [place for place, _ in chunks_of(intersect(block, whole_box(array.shape)), array.chunk)]
    chunks = {place: decode_chunk(array, keys[store.chunk_key(place)]) for place in places}
    buffer = np.zeros(box_shape(block), jnp.dtype(dtype or array.dtype))
    fill_block(buffer, block, array, chunks)
    return buffer


def some_of(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Values of a dtype, zeros and negative ones among them."""
    if dtype == "bool":
        return numbers(*shape) % 3 == 0
    values = numbers(*shape, dtype=np.float32) % 7
    return (values - 3 if jnp.dtype(dtype).kind != "u" and not dtype.startswith("uint") else values).astype(
        jnp.dtype(dtype)
    )


@VERSIONS
@pytest.mark.parametrize("dtype", sorted(STORABLE_DTYPES))
def test_every_dtype_is_stored_as_the_driver_stores_it(dtype: str, use_zarr3: bool) -> None:
    """The same keys, and under each the same bytes; and what the driver wrote is decoded."""
    values = some_of(dtype, 5, 6)
    keys = by_driver(values, (2, 4), use_zarr3)
    assert len(keys) == 7
    assert encoded(values, (2, 4), use_zarr3=use_zarr3) == keys
    found = decoded(keys, use_zarr3, whole_box(values.shape))
    assert found.dtype == values.dtype
    assert found.tobytes() == values.tobytes()


@VERSIONS
@pytest.mark.parametrize("codec", [None, GZIP, GZIP_1, ZSTD], ids=["no codec", "gzip", "gzip at level 1", "zstd"])
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        pytest.param((), (), id="a scalar"),
        pytest.param((5,), (5,), id="one chunk"),
        pytest.param((5,), (2,), id="a chunk that stands out beyond the array"),
        pytest.param((3, 5), (2, 4), id="chunks that stand out along both dimensions"),
        pytest.param((3, 5), (8, 8), id="one chunk that is larger than the array"),
        pytest.param((2, 3, 4), (1, 3, 2), id="three dimensions"),
        pytest.param((12, 12), (1, 12), id="places of two digits"),
    ],
)
def test_every_shape_and_codec_is_stored_as_the_driver_stores_it(shape, chunk, codec, use_zarr3) -> None:
    """Chunks as Python's zlib compresses them may differ in their bytes, never in what they hold."""
    values = numbers(*shape) + 1
    mine = encoded(values, chunk, use_zarr3=use_zarr3, codec=codec)
    drivers = by_driver(values, chunk, use_zarr3, codec)
    assert mine.keys() == drivers.keys()
    metadata = store_of(use_zarr3).metadata_file
    for key, value in drivers.items():
        if codec == GZIP_1 and key != metadata:
            assert gzip.decompress(mine[key]) == gzip.decompress(value)
        else:
            assert mine[key] == value
    np.testing.assert_array_equal(read_by_driver(mine, use_zarr3), values)


@VERSIONS
@pytest.mark.parametrize("codec", [None, GZIP, ZSTD], ids=["no codec", "gzip", "zstd"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (0, 0)], ids=str)
def test_an_array_of_size_zero_has_no_chunk_that_anyone_reads(shape, codec, use_zarr3) -> None:
    """In Zarr 2 there is an empty key, since Orbax's merge asks for one; the driver reads the array all the same."""
    values, chunk = np.zeros(shape, np.float32), tuple(max(1, n) for n in shape)
    mine = encoded(values, chunk, use_zarr3=use_zarr3, codec=codec)
    expected = by_driver(values, chunk, use_zarr3, codec)
    if not use_zarr3:
        expected[".".join("0" * len(shape))] = b""
    assert mine == expected
    assert read_by_driver(mine, use_zarr3).shape == shape
    assert decoded(mine, use_zarr3, whole_box(shape)).shape == shape


@VERSIONS
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        pytest.param("float32", "bfloat16", id="a narrower dtype"),
        pytest.param("bfloat16", "float32", id="a wider one"),
        pytest.param("float32", "int8", id="another kind"),
        pytest.param("int32", "int4", id="4 bits"),
        pytest.param("float64", "float32", id="from 64 bits"),
        pytest.param("float32", "float8_e4m3fn", id="8 bits"),
    ],
)
@pytest.mark.parametrize("codec", [GZIP, ZSTD], ids=["gzip", "zstd"])
def test_values_are_cast_as_the_driver_casts_them(stored, dtype, codec, use_zarr3) -> None:
    """While they are written, and while they are read."""
    values = (numbers(4, 4) / 3 - 2).astype(jnp.dtype(stored))
    cast = ts.cast(ts.array(values), ts.dtype(dtype)).read().result()
    assert encoded(values, (2, 4), use_zarr3=use_zarr3, dtype=dtype, codec=codec) == by_driver(
        cast, (2, 4), use_zarr3, codec
    )
    if codec == GZIP:
        keys = by_driver(values, (2, 4), use_zarr3)
        found = decoded(keys, use_zarr3, whole_box(values.shape), dtype)
        assert found.dtype == cast.dtype
        assert found.tobytes() == cast.tobytes()


@VERSIONS
def test_values_that_are_not_contiguous_are_stored_in_order(use_zarr3: bool) -> None:
    """Looks at other arrays: transposed, and with steps."""
    values = numbers(8, 6)
    for view in (values.T, values[::2, ::-1]):
        assert encoded(view, (2, 4), use_zarr3=use_zarr3) == by_driver(np.ascontiguousarray(view), (2, 4), use_zarr3)


@VERSIONS
def test_each_process_writes_the_chunks_of_its_blocks(use_zarr3: bool) -> None:
    """And the same metadata: together they are the array."""
    values = numbers(8, 6)
    blocks = [tuple(box) for box in itertools.product([(0, 4), (4, 8)], [(0, 3), (3, 6)])]
    expected = by_driver(values, (2, 3), use_zarr3)
    metadata = store_of(use_zarr3).metadata_file
    parts = [encoded(values, (2, 3), use_zarr3=use_zarr3, blocks=[block]) for block in blocks]
    assert [len(part) for part in parts] == [3] * 4
    assert all(part[metadata] == expected[metadata] for part in parts)
    assert {key: value for part in parts for key, value in part.items()} == expected
    assert encoded(values, (2, 3), use_zarr3=use_zarr3, blocks=[]) == {metadata: expected[metadata]}


def test_metadata_go_under_the_name_that_the_store_has_for_them() -> None:
    """As the driver's option `metadata_key` says, which only that of Zarr 2 has."""

    def encode(use_zarr3: bool) -> dict[str, bytes]:
        store = store_of(use_zarr3, metadata_key="other.json")
        blocks = {((0, 2),): numbers(2)}
        return dict(encode_array(store, shape=(2,), dtype="float32", chunk=(2,), codec=GZIP, blocks=blocks))

    keys = encode(False)
    assert keys.keys() == {"other.json", "0"}
    assert parse_zarr(keys["other.json"]).shape == (2,)
    with pytest.raises(ValueError, match="metadata_key"):
        encode(True)


@VERSIONS
@settings(max_examples=50)
@given(data=st.data())
def test_what_is_encoded_is_decoded(data: st.DataObject, use_zarr3: bool) -> None:
    """Whatever chunks it is stored in, and whichever block is wanted, beyond the end of the array too."""
    shape = data.draw(array_shapes())
    chunk = data.draw(chunk_shapes(len(shape)))
    values = numbers(*shape, dtype=np.int16) + 1
    keys = encoded(values, chunk, use_zarr3=use_zarr3, codec=data.draw(st.sampled_from((None, GZIP, GZIP_1))))
    block = data.draw(boxes(tuple(n + 3 for n in shape)))
    padded = np.pad(values, [(0, 3)] * len(shape)) if shape else values
    np.testing.assert_array_equal(decoded(keys, use_zarr3, block), padded[tuple(slice(*span) for span in block)])


@VERSIONS
def test_every_flipped_bit_of_a_stored_chunk_is_noticed_or_tells_nothing(use_zarr3: bool) -> None:
    """Here, and by the driver, which is how large arrays are read and how stock reads all."""
    values = numbers(2, 2)
    keys = encoded(values, (2, 2), use_zarr3=use_zarr3)
    key = store_of(use_zarr3).chunk_key((0, 0))

    def read_here(keys: dict[str, bytes], use_zarr3: bool) -> np.ndarray[Any, Any]:
        return decoded(keys, use_zarr3, whole_box((2, 2)))

    noticed = 0
    for position in range(8 * len(keys[key])):
        flipped = bytearray(keys[key])
        flipped[position // 8] ^= 1 << position % 8
        damaged = {**keys, key: bytes(flipped)}
        for read in (read_here, read_by_driver):
            try:
                found = read(damaged, use_zarr3)
            except ValueError:
                noticed += 1
            else:
                np.testing.assert_array_equal(found, values)
    assert noticed >= 2 * 8 * (values.nbytes + 8)


@VERSIONS
def test_without_a_codec_a_flipped_bit_is_another_value(use_zarr3: bool) -> None:
    """The test above can fail."""
    keys = encoded(numbers(2, 2), (2, 2), use_zarr3=use_zarr3, codec=None)
    key = store_of(use_zarr3).chunk_key((0, 0))
    flipped = {**keys, key: keys[key][:3] + b"\x7f" + keys[key][4:]}
    assert decoded(flipped, use_zarr3, whole_box((2, 2)))[0, 0] != 0


@VERSIONS
@pytest.mark.parametrize("codec", [None, GZIP], ids=["no codec", "gzip"])
def test_a_chunk_of_another_length_is_an_error(codec, use_zarr3) -> None:
    """Too few elements, too many, and parts of one; whole gzip members all."""
    array = parse_zarr(encoded(numbers(4), (4,), use_zarr3=use_zarr3, codec=codec)[store_of(use_zarr3).metadata_file])
    for nbytes in (0, 4, 12, 15, 17, 20, 32):
        data = gzip.compress(bytes(nbytes)) if codec else bytes(nbytes)
        with pytest.raises(ValueError, match=r"reshape|multiple of element size|holds more"):
            decode_chunk(array, data)
    assert decode_chunk(array, gzip.compress(bytes(16)) if codec else bytes(16)).shape == (4,)
