"""`_compat`: what is relied on of versions and private names. Each test fails with a sentence that says what moved."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
from typing import Any

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P

from orbax_explicit import ExplicitCheckpointHandler, _compat
from orbax_explicit import v1 as oxe1
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


# Orbax: the metadata of an array.


def test_the_key_of_a_prng_implementation_is_where_it_was():
    """Stock restores typed keys only where it finds it, and the name is in every file."""
    key = private("orbax.checkpoint._src.metadata.array_metadata", "RANDOM_KEY_IMPL")
    assert key == "random_key_impl", f"Orbax now stores PRNG implementations under {key!r}"


def test_the_metadata_of_an_array_are_where_they_were():
    """And are made of the fields that they are given."""
    metadata = private("orbax.checkpoint._src.metadata.array_metadata", "ArrayMetadata")
    fields = {field.name for field in dataclasses.fields(metadata)}
    expected = {"param_name", "shape", "dtype", "write_shape", "chunk_shape", "use_ocdbt", "use_zarr3", "ext_metadata"}
    assert expected <= fields, f"array_metadata.ArrayMetadata no longer has {sorted(expected - fields)}"
    required = {
        field.name
        for field in dataclasses.fields(metadata)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert required <= expected, f"array_metadata.ArrayMetadata now also wants {sorted(required - expected)}"


@pytest.mark.parametrize(
    ("prng_impl", "ext_metadata"),
    [
        pytest.param(None, None, id="an ordinary array says nothing more"),
        pytest.param("rbg", {"random_key_impl": "rbg"}, id="keys name their implementation"),
    ],
)
def test_the_metadata_of_an_array_are_written_and_read(tmp_path, prng_impl, ext_metadata):
    """By Orbax's store: stock finds the shape that is written, the chunks, and what keys are."""
    entry = _compat.array_metadata(
        name="a.b",
        shape=(4, 6),
        dtype="float16",
        chunk=(2, 3),
        use_ocdbt=True,
        use_zarr3=False,
        prng_impl=prng_impl,
    )
    assert (entry.shape, entry.dtype, entry.use_ocdbt, entry.use_zarr3) == ((4, 6), "float16", True, False)
    store, directory = _compat.array_metadata_store(), epath.Path(tmp_path)
    asyncio.run(store.write(checkpoint_dir=directory, array_metadatas=[entry], process_index=0))
    ((process, (read,)),) = asyncio.run(store.read(checkpoint_dir=directory)).items()
    assert process == 0
    assert (read.param_name, read.write_shape, read.chunk_shape) == ("a.b", (2, 3), (2, 3))
    assert read.ext_metadata == ext_metadata
    assert _compat.prng_impls({0: [read]}) == ({"a.b": prng_impl} if prng_impl else {})


# Orbax: reading.


def test_how_much_may_be_in_flight_is_told():
    """By the object that Orbax limits its own transfers with."""
    get = private("orbax.checkpoint._src.serialization.limits", "get_byte_limiter")
    info = ocp.type_handlers.ParamInfo(name="a.b", parent_dir=epath.Path("/a"))
    for nbytes in (None, 1000):
        info.byte_limiter = get(nbytes)
        assert _compat.max_transfer_nbytes(info) == nbytes, "limits.get_byte_limiter no longer tells its max_bytes"
    info.byte_limiter = None
    assert _compat.max_transfer_nbytes(info) is None


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


# Orbax v1.


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (ocp1, "AsyncResponse"),
        (ocp1, "CheckpointMetadata"),
        (ocp1, "Context"),
        (ocp1, "load"),
        (ocp1, "save_checkpointables_async"),
        (ocp1.handlers, "CheckpointableHandler"),
        (ocp1.handlers, "CheckpointableHandlerRegistry"),
        (ocp1.handlers, "PyTreeHandler"),
        (ocp1.handlers, "local_registry"),
        (ocp1.multihost, "sync_global_processes"),
        (ocp1.options, "CheckpointLayout"),
        (ocp1.path, "PathAwaitingCreation"),
        (ocp, "BasePyTreeCheckpointHandler"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_that_v1_is_used_by_is_where_it_was(where, name):
    """Each of them is public."""
    assert hasattr(where, name), f"{where.__name__}.{name} moved: orbax_explicit.v1 uses it"


PROTOCOL = {
    "save": ["directory", "checkpointable"],
    "load": ["directory", "abstract_checkpointable"],
    "metadata": ["directory"],
    "is_handleable": ["checkpointable"],
    "is_abstract_handleable": ["abstract_checkpointable"],
}


def test_the_protocol_of_a_v1_handler_has_the_methods_that_ours_has():
    """No more, no fewer, and with the same parameters."""
    protocol = ocp1.handlers.CheckpointableHandler
    methods = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert methods == PROTOCOL.keys(), f"v1's handlers have other methods now: {sorted(methods ^ PROTOCOL.keys())}"
    for name, expected in PROTOCOL.items():
        theirs, ours = getattr(protocol, name), getattr(oxe1.ExplicitPyTreeHandler, name)
        assert parameters(theirs) == expected, f"{name} of v1's handlers takes other parameters now"
        assert parameters(ours) == expected, name
        assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(ours), f"{name} is awaited otherwise"


OPTIONS = {
    "array.saving": [
        "storage_options",
        "scoped_storage_options_creator",
        "use_ocdbt",
        "use_zarr3",
        "use_compression",
        "ocdbt_target_data_file_size",
        "enable_post_merge_validation",
    ],
    "array.saving.storage_options": ["dtype", "chunk_byte_size", "shard_axes"],
    "array.loading": ["enable_padding_and_truncation"],
    "pytree.loading": ["partial_load"],
    "memory": ["write_concurrent_bytes", "read_concurrent_bytes"],
    "multiprocessing": ["primary_host", "active_processes", "v0"],
    "asynchronous": ["timeout_secs"],
    "checkpointables": ["registry"],
    "checkpoint_layout": ["name"],
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in OPTIONS.items() for name in names])
def test_an_option_of_a_v1_context_is_where_it_was(group, name):
    """Each that is followed."""
    options: Any = ocp1.Context()
    for part in group.split("."):
        assert hasattr(options, part), f"{part} of {group} of a v1 context moved: orbax_explicit.v1 follows it"
        options = getattr(options, part)
    assert hasattr(options, name), f"{group}.{name} of a v1 context moved: orbax_explicit.v1 follows it"


FOLLOWED_OTHERWISE = {
    # How Orbax would share out what replicas hold: here the processes always do.
    "use_replica_parallel",
    "min_slice_bytes_for_replica_parallel",
    "max_replicas_for_replica_parallel",
    "enable_replica_parallel_separate_folder",
    # How devices are read: here large blocks of CPUs are looked at, others copied.
    "enable_pinned_host_transfer",
    # Written always: stock Orbax needs both.
    "enable_write_sharding_file",
    "array_metadata_store",
    # An array that is missing is an error, always.
    "raise_array_data_missing_error",
    # How Orbax's own handlers read once and send: here each process reads what lands on it.
    "use_load_and_broadcast",
    "load_and_broadcast_options",
    # How much, in which order, by whose leave and with whose knowledge Orbax's own handlers take arrays from devices: here all are
    # taken before the save returns.
    "transfer_concurrent_bytes",
    "is_prioritized_key_fn",
    "regulator_options",
    "expected_surge_bytes",
    "serialization_status_callback",
    "deepcopy_host_arrays",
}


def test_no_option_of_saving_is_left_out_unseen():
    """One that v1 gets is followed, or listed here with the reason why not."""
    saving = {field.name for field in dataclasses.fields(ocp1.Context().array.saving)}
    unseen = saving - set(OPTIONS["array.saving"]) - FOLLOWED_OTHERWISE
    assert not unseen, f"v1 has new options of saving arrays: {sorted(unseen)}; follow them in _v1_handler or _trees"


def test_the_active_context_is_told():
    """Within one, and outside of any."""
    private("orbax.checkpoint.experimental.v1._src.context.context", "get_context")
    base = ocp1.Context()
    with base:
        assert _compat.active_context() is base
    assert isinstance(_compat.active_context(), ocp1.Context)


def test_the_id_of_a_save_is_told():
    """A text that is another one for the next save."""
    generator = private("orbax.checkpoint._src.futures.synchronization", "OperationIdGenerator")
    first = _compat.save_operation_id()
    generator.next_operation_id()
    assert _compat.save_operation_id() != first


def test_who_creates_a_directory_is_told(tmp_path):
    """v0's checkpointers, under `training.Checkpointer`, do so even if the save is refused."""
    by_v0 = private("orbax.checkpoint.experimental.v1._src.handlers.compatibility", "_PathAwaitingCreation")
    seen = []

    class Handler(oxe1.ExplicitPyTreeHandler):
        async def save(self, directory, checkpointable):
            seen.append(_compat.is_created_by_v0(directory))
            return await super().save(directory, checkpointable)

    registry = ocp1.handlers.local_registry()
    registry.add(Handler, checkpointable_name="model")
    context = ocp1.Context()
    context.checkpointables.registry = registry
    with context:
        ocp1.save_checkpointables(tmp_path / "a", {"model": {"n": 3}})
        with ocp1.training.Checkpointer(tmp_path / "root") as checkpointer:
            checkpointer.save_checkpointables(0, {"model": {"n": 3}})
    assert seen == [False, True], f"{by_v0.__qualname__} is no longer what tells the two apart"


def test_our_v1_handler_goes_by_the_name_of_stocks():
    """Each class that is bound to choices; the one that users know keeps its own."""
    bound = oxe1.handler_type()
    typestr = private("orbax.checkpoint.experimental.v1._src.handlers.types", "typestr")
    assert typestr(bound) == ocp.StandardCheckpointHandler.typestr()
    assert oxe1.ExplicitPyTreeHandler.__module__ == "orbax_explicit.v1"
    known = ocp1.handlers.global_registry().get_secondary_typestrs(ocp1.handlers.PyTreeHandler)
    assert typestr(bound) in known, "stock's v1 no longer takes v0's StandardCheckpointHandler for its own"
