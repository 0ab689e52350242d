"""`_compat`: what is relied on of versions and private names. Each test fails with a sentence that says what moved."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from etils import epath
from jax.sharding import PartitionSpec as P

from orbax_explicit import ExplicitCheckpointHandler, _compat
from orbax_explicit._records import REDUCTION_KINDS

HAS_KINDS = hasattr(jax.sharding, "UnreducedKind")


def private(module: str, name: str) -> Any:
    """A private name of upstream's, or the sentence that says that it is gone."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(f"{module}.{name} moved: _compat imports it from there, so find its new place, or do without it")


def parameters(function: Any) -> list[str]:
    """The names of a function's parameters."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


# JAX.


@pytest.mark.parametrize(
    ("partitions", "reductions", "expected"),
    [
        pytest.param((), {}, P(), id="the empty spec"),
        pytest.param(("d", None, ("m", "x")), {}, P("d", None, ("m", "x")), id="every kind of partition"),
        pytest.param((P.UNCONSTRAINED,), {}, P(P.UNCONSTRAINED), id="an unconstrained dimension"),
        pytest.param(("d",), {"reduced": ("m",)}, P("d", reduced={"m"}), id="a reduced axis"),
        pytest.param(
            ("d",), {"unreduced": ("m",), "unreduced_kind": "sum"}, P("d", unreduced={"m"}), id="a pending sum"
        ),
        pytest.param(
            (),
            {"unreduced": ("d",), "reduced": ("m", "x"), "unreduced_kind": "sum"},
            P(unreduced={"d"}, reduced={"m", "x"}),
            id="both",
        ),
    ],
)
def test_a_spec_is_made_as_jax_makes_it(partitions, reductions, expected):
    """On every supported JAX."""
    assert _compat.partition_spec(partitions, **reductions) == expected


@pytest.mark.parametrize("kind", REDUCTION_KINDS)
def test_a_reduction_of_every_kind_is_made_or_named(kind):
    """Before jax 0.11 there is only the sum: another kind is an error that names it, never a sum."""
    if HAS_KINDS or kind == "sum":
        spec = _compat.partition_spec(("d",), unreduced=("m",), unreduced_kind=kind)
        assert _compat.unreduced_kind(spec) == kind
    else:
        with pytest.raises(ValueError, match=f"has no reduction of kind '{kind}'"):
            _compat.partition_spec(("d",), unreduced=("m",), unreduced_kind=kind)


def test_a_spec_without_a_pending_reduction_is_of_no_kind():
    """Nothing is unreduced, so nothing is summed."""
    assert _compat.unreduced_kind(P("d", reduced={"m"})) is None


def test_a_partition_spec_has_the_attributes_that_are_read():
    """`partitions`, `unreduced`, `reduced`, and the kind where JAX has kinds."""
    spec = P("d", None, reduced={"m"})
    for name, value in (("partitions", ("d", None)), ("unreduced", frozenset()), ("reduced", frozenset({"m"}))):
        assert getattr(spec, name, None) == value, f"jax.sharding.PartitionSpec.{name} moved or changed its type"
    assert hasattr(P("d", unreduced={"m"}), "unreduced_kind") == HAS_KINDS, (
        "jax.sharding.UnreducedKind and PartitionSpec.unreduced_kind no longer come together"
    )


# Orbax: the store of array metadata.


def test_the_store_of_array_metadata_is_where_it_was():
    """And writes and reads by the names that the array handler uses."""
    store = private("orbax.checkpoint._src.metadata.array_metadata_store", "Store")
    assert type(_compat.array_metadata_store()) is store
    for name, expected in (
        ("write", {"checkpoint_dir", "array_metadatas", "process_index"}),
        ("read", {"checkpoint_dir", "process_index"}),
    ):
        method = getattr(store, name, None)
        assert inspect.iscoroutinefunction(method), f"array_metadata_store.Store.{name} is no coroutine any more"
        assert expected <= set(parameters(method)), (
            f"array_metadata_store.Store.{name} no longer takes {sorted(expected - set(parameters(method)))}"
        )


def test_each_store_is_a_new_one():
    """Orbax sets the primary host on it: two handlers must not share one."""
    assert _compat.array_metadata_store() is not _compat.array_metadata_store()


def test_an_array_handler_takes_the_store():
    """By the keyword that the array handler passes on."""
    assert "array_metadata_store" in parameters(ocp.type_handlers.ArrayHandler.__init__), (
        "ocp.type_handlers.ArrayHandler no longer takes array_metadata_store="
    )


# Orbax: the TensorStore spec of an array.


def test_the_builder_of_write_specs_is_where_it_was():
    """And takes the arguments that it is given."""
    build = private("orbax.checkpoint._src.serialization.tensorstore_utils", "build_array_write_spec")
    expected = {"info", "arg", "global_shape", "local_shape", "dtype", "use_ocdbt", "process_index", "ext_metadata"}
    missing = expected - set(parameters(build))
    assert not missing, f"tensorstore_utils.build_array_write_spec no longer takes {sorted(missing)}"


def test_the_index_of_a_processs_directory_is_where_it_was():
    """With OCDBT each process writes into a directory of its own, which the merge then looks for."""
    index = private("orbax.checkpoint._src.serialization.ocdbt_utils", "get_process_index_for_subdir")
    assert index(True) == 0, "ocdbt_utils.get_process_index_for_subdir(True) is no longer the index of the process"
    assert index(False) is None, "ocdbt_utils.get_process_index_for_subdir(False) is no longer None"


def test_the_key_of_a_prng_implementation_is_where_it_was():
    """Stock restores typed keys only where it finds it, and the name is in every file."""
    key = private("orbax.checkpoint._src.metadata.array_metadata", "RANDOM_KEY_IMPL")
    assert key == "random_key_impl", f"Orbax now stores PRNG implementations under {key!r}"


def info_for(directory: Any, use_ocdbt: bool, use_zarr3: bool) -> ocp.type_handlers.ParamInfo:
    """What Orbax tells a handler about an array."""
    return ocp.type_handlers.ParamInfo(
        name="a.b",
        path=epath.Path(directory) / "a.b",
        parent_dir=epath.Path(directory),
        is_ocdbt_checkpoint=use_ocdbt,
        use_zarr3=use_zarr3,
        use_compression=True,
        ts_context=tensorstore.Context({"cache_pool#ocdbt": {}, "ocdbt_coordinator": {}}),
    )


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["in Zarr 2", "in Zarr 3"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["in a directory", "in OCDBT"])
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        pytest.param((2, 3), (2, 3), id="one chunk covers the array"),
        pytest.param((0, 3), (1, 3), id="a dimension of size 0 has chunks of size 1"),
        pytest.param((), (), id="a scalar"),
    ],
)
def test_a_write_spec_opens(tmp_path, shape, chunk, use_ocdbt, use_zarr3):
    """TensorStore takes it, and the array is of the shape and dtype, in the one chunk, that were asked for."""
    info = info_for(tmp_path, use_ocdbt, use_zarr3)
    spec, metadata = _compat.array_write_spec(
        info,
        shape=shape,
        dtype=np.dtype("float32"),
        save_dtype=np.dtype("float16"),
        prng_impl=None,
    )
    base = spec["base"]
    assert spec["driver"] == "cast", "build_array_write_spec no longer casts while it writes"
    assert base["driver"] == ("zarr3" if use_zarr3 else "zarr"), "build_array_write_spec chose another driver"
    assert base["kvstore"]["driver"] == ("ocdbt" if use_ocdbt else "file"), "build_array_write_spec chose another store"
    store = tensorstore.open(tensorstore.Spec(spec), create=True, context=info.ts_context).result()
    assert (store.shape, store.chunk_layout.read_chunk.shape or ()) == (shape, chunk)
    assert store.dtype.name == "float32"
    assert (metadata.param_name, metadata.shape, metadata.use_ocdbt, metadata.use_zarr3) == (
        "a.b",
        shape,
        use_ocdbt,
        use_zarr3,
    )
    assert (metadata.write_shape, metadata.chunk_shape, metadata.ext_metadata) == (chunk, chunk, None)
    assert np.dtype(metadata.dtype) == np.float16


def test_a_write_spec_of_keys_names_their_implementation(tmp_path):
    """In the metadata that stock reads."""
    _, metadata = _compat.array_write_spec(
        info_for(tmp_path, True, False),
        shape=(2,),
        dtype=np.dtype("uint32"),
        save_dtype=None,
        prng_impl="rbg",
    )
    assert metadata.ext_metadata == {"random_key_impl": "rbg"}


# Orbax: reading.


def test_the_builder_of_read_specs_is_where_it_was():
    """And takes the arguments that it is given."""
    build = private("orbax.checkpoint._src.serialization.tensorstore_utils", "build_array_read_spec")
    missing = {"info", "use_ocdbt", "metadata_key", "raise_array_data_missing_error"} - set(parameters(build))
    assert not missing, f"tensorstore_utils.build_array_read_spec no longer takes {sorted(missing)}"


@pytest.mark.parametrize("use_zarr3", [False, True], ids=["in Zarr 2", "in Zarr 3"])
@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["in a directory", "in OCDBT"])
@pytest.mark.parametrize("may_miss", [False, True], ids=["data must be there", "data may be missing"])
def test_a_read_spec_is_of_the_stored_array(tmp_path, may_miss, use_ocdbt, use_zarr3):
    """In its stored dtype; and missing data are an error where Orbax says so."""
    info = info_for(tmp_path, use_ocdbt, use_zarr3)
    info.raise_array_data_missing_error = not may_miss
    spec = _compat.array_read_spec(info, "other.json")
    assert spec["driver"] == ("zarr3" if use_zarr3 else "zarr"), "build_array_read_spec chose another driver"
    assert spec["kvstore"]["driver"] == ("ocdbt" if use_ocdbt else "file"), "build_array_read_spec chose another store"
    assert spec["metadata_key"] == "other.json"
    assert spec["fill_missing_data_reads"] == may_miss, "build_array_read_spec no longer says what missing data are"


@pytest.mark.parametrize("handler", [ocp.type_handlers.ArrayHandler, ocp.type_handlers.NumpyHandler])
def test_a_handler_keeps_its_metadata_key(handler):
    """Where it is looked for."""
    assert hasattr(handler(), "_metadata_key"), f"{handler.__name__} no longer keeps _metadata_key"
    assert _compat.zarr_metadata_key(handler()) is None
    assert _compat.zarr_metadata_key(handler(metadata_key="other.json")) == "other.json"


def test_how_much_may_be_in_flight_is_told(tmp_path):
    """By the object that Orbax limits its own reads with."""
    get = private("orbax.checkpoint._src.serialization.limits", "get_byte_limiter")
    info = info_for(tmp_path, True, False)
    for nbytes in (None, 1000):
        info.byte_limiter = get(nbytes)
        assert _compat.max_restore_nbytes(info) == nbytes, "limits.get_byte_limiter no longer tells its max_bytes"
    info.byte_limiter = None
    assert _compat.max_restore_nbytes(info) is None


def test_the_implementations_of_keys_are_read_from_the_metadata():
    """Of the process that comes first; arrays that are no keys have none."""
    metadata = private("orbax.checkpoint._src.metadata.array_metadata", "SerializedArrayMetadata")

    def entry(name: str, ext_metadata: Any) -> Any:
        return metadata(param_name=name, write_shape=(1,), chunk_shape=(1,), ext_metadata=ext_metadata)

    first = [entry("a", {"random_key_impl": "rbg"}), entry("b", None), entry("c", {})]
    assert _compat.prng_impls({0: first, 1: []}) == {"a": "rbg"}
    assert _compat.prng_impls(None) == {}


# Orbax: the name of the handler.


def test_our_handler_goes_by_the_name_of_stocks():
    """A stock `CheckpointManager` then knows how to restore what we wrote, where this package is not there."""
    stock = ocp.StandardCheckpointHandler.typestr()
    assert ExplicitCheckpointHandler.typestr() == stock
    assert stock == "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler", (
        "stock's StandardCheckpointHandler goes by another name: a checkpoint that names the old one may not be found"
    )


def test_going_by_stocks_name_leaves_other_handlers_alone():
    """Neither stock's class nor another one changes its name."""

    class Handler(ocp.StandardCheckpointHandler):
        """A handler of some other package."""

    before = Handler.typestr()
    stock = ocp.StandardCheckpointHandler.typestr()
    assert before != stock
    _compat.record_as_stock(Handler)
    assert Handler.typestr() == stock
    assert Handler().typestr() == stock
    assert ocp.PyTreeCheckpointHandler.typestr().endswith(".PyTreeCheckpointHandler")
    assert ocp.StandardCheckpointHandler.typestr() == stock
