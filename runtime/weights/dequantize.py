"""Dequantise GGUF blocks with numpy, bit for bit as the `gguf` package does, several times faster.

A quantised row is a run of blocks: a few scales, then packed integers (layouts: ggml's `block_q4_0` and its kin). Work goes
in slices that stay in the cache, with no temporary larger than a slice. numpy releases the GIL, so threads help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_SLICE = 1 << 16  # weights worked on at a time: 256 KiB of float32


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, [n, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: npt.NDArray[Any]) -> None:
    """packed [..., k] -> out [..., 2, k]: low halves of the bytes, then high ones."""
    np.bitwise_and(packed, 15, out=out[..., 0, :], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., 1, :], casting="unsafe")


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out.reshape(-1, 2, 16))
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out.reshape(-1, 2, 16))
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """high [n, 4] is one bit per weight, low [n, 16] nibbles -> [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")
    bits <<= 4
    quants = np.empty_like(bits)
    _nibbles(low, quants.reshape(-1, 2, 16))
    quants |= bits
    return quants


def _q5_0(blocks: Bytes, out: Floats) -> None:
    out[...] = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """Parameters of Q4_K and Q5_K: scale and minimum of the 8 sub-blocks, each [n, 8, 1]. Bytes 4 to 15 pack 16 six-bit numbers:
    four scales, four minima, then the nibbles of the other eight, whose upper bits sit atop the first."""
    scales, mins, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six_bits = np.concatenate([scales & 63, (rest & 15) | ((scales >> 2) & 48)], axis=1)
    min_bits = np.concatenate([mins & 63, (rest >> 4) | ((mins >> 2) & 48)], axis=1)
    scale = _half(blocks, 0) * six_bits.astype(np.float32)
    minimum = _half(blocks, 2) * min_bits.astype(np.float32)
    return scale[:, :, None], minimum[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = _scales_and_mins(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32))
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= scale
    sub_blocks -= minimum


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = _scales_and_mins(blocks)
    quants = np.empty((len(blocks), 8, 32), np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), quants.reshape(-1, 4, 2, 32))
    for i in range(8):
        quants[:, i] |= ((blocks[:, 16:48] >> i) & 1) << 4
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks[...] = quants
    sub_blocks *= scale
    sub_blocks -= minimum


def _q6_k(blocks: Bytes, out: Floats) -> None:
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), quants.reshape(-1, 2, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for i in range(4):
        quants[:, :, i] |= ((high >> (2 * i)) & 3) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    sub_blocks = out.reshape(-1, 16, 16)
    sub_blocks[...] = quants.reshape(-1, 16, 16)
    sub_blocks -= 32
    sub_blocks *= scale[:, :, None]


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # of half the block's scale


def _mxfp4(blocks: Bytes, out: Floats) -> None:
    quants = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 1:], quants)
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    np.multiply(_E2M1[quants.reshape(-1, 32)], scale, out=out)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`weights` values in `size` bytes. `decode` turns blocks [n, size] uint8 into out [n, weights] float32."""

    weights: int
    size: int
    decode: Callable[[Bytes, Floats], None]


FORMATS = {
    "F32": BlockFormat(1, 4, _f32),
    "F16": BlockFormat(1, 2, _f16),
    "BF16": BlockFormat(1, 2, _bf16),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "MXFP4": BlockFormat(32, 17, _mxfp4),
}


def dequantize(raw: Bytes, block_format: BlockFormat, out: Floats) -> None:
    """Contiguous bytes `raw` [any] of whole blocks into `out` [any] float32, as many weights as they hold, C order."""
    blocks = raw.reshape(-1, block_format.size)
    values = out.reshape(-1, block_format.weights)
    step = max(1, _SLICE // block_format.weights)
    for start in range(0, len(blocks), step):
        block_format.decode(blocks[start : start + step], values[start : start + step])


def block_columns(rows: Bytes, block_format: BlockFormat, columns: tuple[int, int]) -> Bytes:
    """Rows of whole blocks [rows, bytes] -> columns from the first up to the second, both at the edge of a block."""
    first, last = (each // block_format.weights * block_format.size for each in columns)
    return np.ascontiguousarray(rows[:, first:last])
