"""MXFP4 as GPT-OSS's safetensors hold it: two tensors, numbers of four bits and the exponents of each 32, for one of values.

Blocks [..., G, 16] bytes, two neighbouring numbers in each, low half first; scales [..., G], one byte a block. ggml keeps both
in one block of 17 bytes, the first 16 numbers in the low halves: that is the form in which the rest of loading knows MXFP4.

Format: Open Compute Project, Microscaling Formats 1.0 (2023)."""

from __future__ import annotations

import numpy as np

from runtime.weights.dequantize import Bytes
from runtime.weights.rules import Shape

BLOCKS_END, SCALES_END = "_blocks", "_scales"
_BYTES = 16  # of the numbers of a block


def is_pair(blocks: Shape, scales: Shape) -> bool:
    return blocks == (*scales, _BYTES) and len(scales) > 1 and 0 not in scales


def values_shape(scales: Shape) -> Shape:
    return (*scales[:-1], scales[-1] * 2 * _BYTES)


def as_ggml(blocks: Bytes, scales: Bytes) -> Bytes:
    """Blocks [any] and as many scales [any], both contiguous -> [n, 17]."""
    packed = blocks.reshape(-1, _BYTES)
    numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 2, _BYTES)
    out = np.empty((len(packed), 1 + _BYTES), np.uint8)
    out[:, 0] = scales.reshape(-1)
    out[:, 1:] = numbers[:, 0] | (numbers[:, 1] << 4)
    return out
