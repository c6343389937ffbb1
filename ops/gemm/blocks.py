"""Conversion of a coded weight to ggml's blocks of 32 columns, for the compiled CPU kernels.

Codes are unchanged. Scales become float16, as do offsets (scale * zero point) of 4-bit codes with a zero point. The error is below
a hundredth of a quantisation step. Codes with a table (nf4, fp4, e2m1) have no such block type. Their values are rounded to 8 bits,
with an error of at most 1/254 of a block's largest value, which is logged once."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ops.gemm.dequantize import codes_of, dequantize
from ops.stored import DECODED, Q4, W4, W8, StoredWeight, WeightFormat

CODES = frozenset({W4, W8}) | DECODED
_BLOCK = 32
log = logging.getLogger("oneloop.start")
_HALF_ERROR = 2.0**-10  # relative error of a scale: twice that of rounding to float16; larger errors mean lost bits


def as_blocks(stored: StoredWeight) -> StoredWeight:
    """Convert codes "w4", "q4" and "w8" to blocks Q4_0, Q4_1 or Q8_0, and other coded formats to values to be rounded to 8 bits.
    Convert to float32 if columns are reordered, blocks would span groups, or float16 cannot represent the scales."""
    if stored.format in DECODED - {Q4}:
        _tell(stored.format)
        return StoredWeight.int8(dequantize(stored), stored.bias)
    scales = stored.tensors["scales"]
    num_rows, num_columns = len(stored.weight), stored.weight.shape[1] * (1 if stored.format == W8 else 2)
    group = num_columns // scales.shape[1]
    halves = scales.half()
    exact = bool(((halves.float() - scales).abs() <= scales.abs() * _HALF_ERROR).all())
    if "order" in stored.tensors or group % _BLOCK or not exact:
        return StoredWeight.dense(dequantize(stored), stored.bias)
    scale = _bytes(halves, group)
    codes = codes_of(stored.format, stored.weight).reshape(num_rows, -1, _BLOCK)
    if stored.format == W8:
        return _blocks("Q8_0", [scale, codes.view(torch.uint8)], stored)
    quants = codes[:, :, : _BLOCK // 2] | codes[:, :, _BLOCK // 2 :] << 4
    if stored.format == Q4:
        mins = stored.tensors.get("mins", torch.zeros_like(scales))
        return _blocks("Q4_1", [scale, _bytes((-mins).half(), group), quants], stored)
    if (zeros := stored.tensors.get("zeros")) is None:
        return _blocks("Q4_0", [scale, quants], stored)
    return _blocks("Q4_1", [scale, _bytes((-zeros.float() * scales).half(), group), quants], stored)


@functools.cache
def _tell(written: WeightFormat) -> None:
    log.info("weights in %s are rounded to 8-bit blocks, the only format of the CPU's kernels for them", written)


def _bytes(halves: Tensor, group: int) -> Tensor:
    return halves.repeat_interleave(group // _BLOCK, dim=1).unsqueeze(2).view(torch.uint8)


def _blocks(kind: str, fields: list[Tensor], stored: StoredWeight) -> StoredWeight:
    return StoredWeight.blocks(kind, torch.cat(fields, dim=2).flatten(1), stored.bias)
