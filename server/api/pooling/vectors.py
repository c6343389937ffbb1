"""Encodings of vectors in responses: JSON, base64, and Cohere's int8, uint8, binary and ubinary.

A response is encoded vector by vector, on a thread if it is large, and sent in chunks."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from orjson import OPT_SERIALIZE_NUMPY
from orjson import dumps as _dumps

from server.http.offload import Pieces

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    Floats = NDArray[float32]

CHUNK_BYTES = 1 << 16
PIECE_NUMBERS = 8192  # are written in half a millisecond

Write = Callable[[memoryview], bytes]  # a vector, or those of all tokens, as JSON

dumps = partial(_dumps, option=OPT_SERIALIZE_NUMPY)


def as_array(numbers: memoryview) -> Floats:
    """Return `numbers` as a float32 numpy array, without a copy."""
    import numpy

    return numpy.asarray(numbers)


def json_of(numbers: memoryview) -> bytes:
    """Encode floats as JSON, with as few digits as identify each float32."""
    return dumps(as_array(numbers))


def base64_of(numbers: memoryview) -> bytes:
    """Encode floats as a JSON string: base64 of little-endian float32."""
    return b'"' + binascii.b2a_base64(as_array(numbers).astype("<f4", copy=False).tobytes(), newline=False) + b'"'


def chunks(parts: Iterable[tuple[bytes, int]]) -> Pieces[list[bytes]]:
    """Join `parts`, each (bytes, number of floats), to chunks of about 64 KiB, yielding between short pieces of work."""
    found: list[bytes] = []
    held: list[bytes] = []
    num_bytes = num_numbers = 0
    for part, count in parts:
        held.append(part)
        num_bytes += len(part)
        num_numbers += count
        if num_bytes >= CHUNK_BYTES:
            found.append(b"".join(held))
            held, num_bytes = [], 0
        if num_numbers >= PIECE_NUMBERS:
            num_numbers = 0
            yield
    found.append(b"".join(held))
    return found


# --- Cohere's kinds -----------------------------------------------------------------------------------------------


def int8_of(numbers: memoryview) -> bytes:
    """Encode a vector as JSON integers: the normalised vector times 127, rounded."""
    return dumps(_scaled(numbers).astype("i1"))


def uint8_of(numbers: memoryview) -> bytes:
    """Encode a vector as JSON integers: the values of `int8_of` plus 128."""
    return dumps((_scaled(numbers) + 128).astype("u1"))


def _scaled(numbers: memoryview) -> Any:
    import numpy

    vector = as_array(numbers)
    return (vector * (127 / (numpy.linalg.norm(vector) or 1))).round()


def ubinary_of(numbers: memoryview) -> bytes:
    """Encode the signs of a vector as JSON integers of eight bits, most significant bit first. A bit is 1 for a value >= 0."""
    return dumps(_bits(numbers))


def binary_of(numbers: memoryview) -> bytes:
    """Encode the signs of a vector as signed JSON integers: the values of `ubinary_of` minus 128."""
    return dumps((_bits(numbers).astype("i2") - 128).astype("i1"))


def _bits(numbers: memoryview) -> Any:
    import numpy

    return numpy.packbits(as_array(numbers) >= 0)
