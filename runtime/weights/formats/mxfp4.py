"""Scheme of MXFP4 in safetensors. A weight is two tensors: numbers of four bits, and an exponent for each block of 32 numbers.

GPT-OSS has `NAME_blocks` [..., G, 16] bytes, each with two adjacent numbers, the first in the low half, and `NAME_scales` [..., G],
one byte per block. compressed-tensors has the same bytes as `NAME.weight_packed` [N, 16 G] and `NAME.weight_scale` [N, G]. Kernels
use ggml's layout: blocks of 17 bytes with the scale first, and the first 16 numbers in the low halves.

Format: Open Compute Project, Microscaling Formats 1.0 (2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from runtime.weights.dequantize import FORMATS, Bytes, Floats, block_columns, dequantize
from runtime.weights.formats.scheme import Composite, StoredTensor
from runtime.weights.rules import Shape, Span

_BLOCKS, _SCALES = "_blocks", "_scales"  # name suffixes
_BYTES = 16  # bytes of the numbers of a block


class Mxfp4Written:
    """MXFP4 weight, see `Written`."""

    format = "MXFP4"
    whole = False

    def rows(self, role: str, span: Span) -> Span:
        return span

    def stored_form(self, raw: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        return {"weight": _as_ggml(raw)}

    def columns(self, arrays: Mapping[str, Bytes], span: Span) -> dict[str, Bytes]:
        return {"weight": block_columns(arrays["weight"], FORMATS[self.format], span)}

    def decode(self, raw: Mapping[str, Bytes], out: Floats, first_row: int) -> None:
        dequantize(_as_ggml(raw), FORMATS[self.format], out)


class Mxfp4:
    """Scheme of MXFP4. The name of a weight is that of its tensor with the numbers."""

    ignored = ()

    def __init__(self, section: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Create the scheme. The format has no parameters in a config's `section`."""

    def composites(self, stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
        for name, blocks in stored.items():
            scales_name = name.removesuffix(_BLOCKS) + _SCALES
            scales = stored.get(scales_name) if name.endswith(_BLOCKS) else None
            if scales is not None and blocks.dtype == scales.dtype == "U8" and _are_pair(blocks.shape, scales.shape):
                shape = (*scales.shape[:-1], scales.shape[-1] * 2 * _BYTES)
                yield Composite(name, shape, {"weight": name, "scales": scales_name}, Mxfp4Written())


def of_compressed_tensors(stored: Mapping[str, StoredTensor]) -> Iterator[Composite]:
    for packed, (dtype, shape) in stored.items():
        name = packed.removesuffix("_packed")
        scales = stored.get(f"{name}_scale") if packed.endswith(".weight_packed") else None
        if scales is not None and dtype == scales.dtype == "U8" and len(shape) == 2 and 0 not in shape:
            num_rows, row_bytes = shape
            if scales.shape == (num_rows, row_bytes // _BYTES) and row_bytes % _BYTES == 0:
                tensors = {"weight": packed, "scales": f"{name}_scale"}
                yield Composite(name, (num_rows, 2 * row_bytes), tensors, Mxfp4Written())


def _as_ggml(raw: Mapping[str, Bytes]) -> Bytes:
    packed = raw["weight"].reshape(-1, _BYTES)
    numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 2, _BYTES)
    out = np.empty((len(packed), 1 + _BYTES), np.uint8)
    out[:, 0] = raw["scales"].reshape(-1)
    out[:, 1:] = numbers[:, 0] | (numbers[:, 1] << 4)
    return out.reshape(len(raw["weight"]), -1)


def _are_pair(blocks: Shape, scales: Shape) -> bool:
    return blocks == (*scales, _BYTES) and len(scales) > 1 and 0 not in scales


SCHEMES = {"mxfp4": Mxfp4}
