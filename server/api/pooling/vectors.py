"""Encodings of vectors in responses: JSON, base64, and Cohere's int8, uint8, binary and ubinary.

A response is written vector by vector, on a thread if large, and sent in chunks."""

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
    """View `numbers` as a numpy array without a copy."""
    import numpy

    return numpy.asarray(numbers)


def json_of(numbers: memoryview) -> bytes:
    """Write numbers with as few digits as distinguish a float32 from its neighbours."""
    return dumps(as_array(numbers))


def base64_of(numbers: memoryview) -> bytes:
    """Write numbers as a JSON string: base64 of little-endian float32."""
    return b'"' + binascii.b2a_base64(as_array(numbers).astype("<f4", copy=False).tobytes(), newline=False) + b'"'


def chunks(parts: Iterable[tuple[bytes, int]]) -> Pieces[list[bytes]]:
    """Join `parts` of a body, each with the count of its numbers, to chunks that can be sent one by one."""
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
    """Write the normalised vector times 127, rounded to integers."""
    return dumps(_scaled(numbers).astype("i1"))


def uint8_of(numbers: memoryview) -> bytes:
    """Write the values of `int8_of` plus 128."""
    return dumps((_scaled(numbers) + 128).astype("u1"))


def _scaled(numbers: memoryview) -> Any:
    import numpy

    vector = as_array(numbers)
    return (vector * (127 / (numpy.linalg.norm(vector) or 1))).round()


def ubinary_of(numbers: memoryview) -> bytes:
    """Write the signs as bytes: bit 1 for a number >= 0, eight per byte, most significant bit first."""
    return dumps(_bits(numbers))


def binary_of(numbers: memoryview) -> bytes:
    """Write the bytes of `ubinary_of` minus 128, as signed integers."""
    return dumps((_bits(numbers).astype("i2") - 128).astype("i1"))


def _bits(numbers: memoryview) -> Any:
    import numpy

    return numpy.packbits(as_array(numbers) >= 0)
