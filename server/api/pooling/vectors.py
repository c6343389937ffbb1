"""Vectors: numbers as an answer has them. JSON, base64, or the small integers that Cohere's clients ask for.

An answer is written a vector at a time, so that one of millions of numbers is written on a thread in pieces and sent in
chunks: no call here takes longer than one vector's."""

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
    """View `numbers` as an array without a copy. The engine has imported numpy by then."""
    import numpy

    return numpy.asarray(numbers)


def json_of(numbers: memoryview) -> bytes:
    """Write numbers with as few digits as distinguish a float32 from its neighbours."""
    return dumps(as_array(numbers))


def base64_of(numbers: memoryview) -> bytes:
    """A JSON string: little-endian float32, as OpenAI's clients read it."""
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
    """127 times each number of the vector, normalised, and rounded."""
    return dumps(_scaled(numbers).astype("i1"))


def uint8_of(numbers: memoryview) -> bytes:
    """The same and 128: what was nought."""
    return dumps((_scaled(numbers) + 128).astype("u1"))


def _scaled(numbers: memoryview) -> Any:
    import numpy

    vector = as_array(numbers)
    return (vector * (127 / (numpy.linalg.norm(vector) or 1))).round()


def ubinary_of(numbers: memoryview) -> bytes:
    """One bit a number, whether it is at least nought: eight a byte, the first the highest."""
    return dumps(_bits(numbers))


def binary_of(numbers: memoryview) -> bytes:
    """The same bytes less 128, so that they fit signed ones."""
    return dumps((_bits(numbers).astype("i2") - 128).astype("i1"))


def _bits(numbers: memoryview) -> Any:
    import numpy

    return numpy.packbits(as_array(numbers) >= 0)
