"""`Manifest` <-> the bytes of `explicit_sharding.msgpack`.

This owns the version ledger. The frame is for `_framing`, the payload of each version for `_wire_encoding` and
`_wire_decoding`, the file itself for `_sidecar`. `docs/format.md` is normative.

Version ledger. A version is a set of rules, not a release of this package. Every version that was ever
written is read for ever; a newer one is refused by its number.

    1   2026-11-30   The first. Meshes, specs and shardings in tables; devices, processes and memory kinds of
                     the run; containers with typed keys; PRNG keys; values on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from orbax_explicit._framing import Frame
from orbax_explicit._records import Manifest
from orbax_explicit._wire_decoding import decode_payload
from orbax_explicit._wire_encoding import encode_payload
from orbax_explicit._wire_schema import MAX_PAYLOAD_NBYTES

FRAME: Final = Frame(
    # As in PNG: a byte above 127, both line endings and a control-Z show at once that a transfer changed the bytes.
    magic=b"\x89OXE\r\n\x1a\n",
    version=1,
    max_payload_nbytes=MAX_PAYLOAD_NBYTES,
)

_DECODERS: Final[Mapping[int, Callable[[bytes], Manifest]]] = {1: decode_payload}


def encode(manifest: Manifest) -> bytes:
    """The file that records `manifest`: the same bytes for equal manifests.

    Raises:
        RecordError: The manifest holds what the format cannot, such as notes, an integer beyond 64 bits, or a tree
            deeper than 128 containers. All that is found is listed.
    """
    return FRAME.put_on(encode_payload(manifest))


def decode(data: bytes) -> Manifest:
    """The manifest that the file `data` records.

    The bytes may be anything: memory and time stay in proportion to their number, and nothing in them is run.

    Raises:
        FormatError: The bytes are damaged, or of a newer version, or not what a writer writes. Lists every problem
            that can be found.
    """
    version, payload = FRAME.take_off(data)
    return _DECODERS[version](payload)
