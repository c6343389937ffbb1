"""A weight in four bits as plain numbers, for the length of a product whose rows are so many that nobody notices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gemm.pieces import groups_of
from ops.gemm.triton_decoded import table, worth
from ops.launch import overlap, wait_for_previous
from ops.stored import W4, WeightFormat

_ROWS = 16


@triton.jit
def _widen(weight_ptr, scale_ptr, out_ptr, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    # weight [OUT, chunks of 64 bytes] and words scale [GROUPS, OUT], both as coded.py lays them -> out [OUT, IN].
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    at = tl.minimum(row, OUT - 1).to(tl.int64)
    lane = tl.arange(0, 64)
    CHUNKS: tl.constexpr = (IN + 127) // 128
    codes = tl.load(weight_ptr + at[:, None] * (CHUNKS * 64) + chunk * 64 + lane[None, :])
    wait_for_previous(PDL)  # nothing that it wrote is read here, but what reads this may wait for this alone
    for half in tl.static_range(2):
        column = chunk * 128 + half * 64 + lane
        group = tl.minimum(column // (IN // GROUPS), GROUPS - 1).to(tl.int64)
        word = tl.load(scale_ptr + group[None, :] * OUT + at[:, None])
        code = (codes >> 4 if half else codes & 15).to(tl.float32) - (word & 15).to(tl.float32)
        value = code * (word & -256).to(tl.float32, bitcast=True)
        inside = (row < OUT)[:, None] & (column < IN)[None, :]
        tl.store(out_ptr + at[:, None] * IN + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


def widen(weight: Tensor, scales: Tensor, in_features: int, dtype: torch.dtype) -> Tensor:
    """[N, in_features] of a w4 weight as coded.py lays it."""
    groups, out_features = scales.shape
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.device)
    _widen[(triton.cdiv(out_features, _ROWS), triton.cdiv(in_features, 128))](
        weight,
        scales,
        out,
        IN=in_features,
        OUT=out_features,
        GROUPS=groups,
        ROWS=_ROWS,
        num_warps=4,
        **overlap(out.device),
    )
    return out


@triton.jit
def _widen_pieces(
    piece_ptr, table_ptr, out_ptr, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    # pieces [OUT / 32, chunks of 128 columns, 2048 or 4096 + 128 * GROUPS bytes], as pieces.py lays them -> out [OUT, IN].
    piece, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHUNKS: tl.constexpr = (IN + 127) // 128
    wait_for_previous(PDL)  # nothing that it wrote is read here, but what reads this may wait for this alone
    row = tl.arange(0, 32)
    lane = tl.arange(0, 128)
    if KIND == "q8":
        byte = lane // 64 * 2048 + lane % 8 // 2 * 16 + lane % 64 // 16 * 4 + lane % 16 // 8 * 2 + lane % 2
        at_piece = piece_ptr + (piece * CHUNKS + chunk) * (4096 + 128 * GROUPS)
        code = tl.load(at_piece + row[:, None] * 64 + byte[None, :]).to(tl.int8, bitcast=True).to(tl.int32)
        word_ptr = at_piece.to(tl.pointer_type(tl.int32)) + 1024
    else:
        word_ptr = (piece_ptr + (piece * CHUNKS + chunk) * (2048 + 128 * GROUPS)).to(tl.pointer_type(tl.int32))
        word = tl.load(word_ptr + row[:, None] * 16 + (lane % 8 // 2 * 4 + lane // 32)[None, :])
        if KIND == "nf4" or KIND == "fp4":
            code = word >> (lane % 32 // 8 * 8 + lane % 2 * 4)[None, :] & 15
        else:
            code = word >> (lane % 2 * 16 + lane % 32 // 8 * 4)[None, :] & 15
        word_ptr += 512
    scale = tl.load(word_ptr + (lane // (128 // GROUPS) * 32)[None, :] + row[:, None])
    if KIND == "w4":
        value = (code - (scale & 15)).to(tl.float32) * (scale & -256).to(tl.float32, bitcast=True)
    elif KIND == "q4" or KIND == "q8":  # a half float each
        zero = (scale & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        value = (code.to(tl.float32) - zero) * (scale >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = worth(code, table_ptr, KIND) * scale.to(tl.float32, bitcast=True)
    at, column = piece * 32 + row, chunk * 128 + lane
    inside = (at < OUT)[:, None] & (column < IN)[None, :]
    tl.store(out_ptr + at[:, None] * IN + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


def widen_pieces(
    pieces: Tensor, out_features: int, in_features: int, dtype: torch.dtype, codes: WeightFormat = W4
) -> Tensor:  # fmt: skip
    """[out_features, in_features] of a weight in the pieces of pieces.py, but for fp8."""
    out = torch.empty((out_features, in_features), dtype=dtype, device=pieces.device)
    groups = groups_of(codes, pieces)
    _widen_pieces[pieces.shape[:2]](
        pieces, table(codes, out.device), out, IN=in_features, OUT=out_features, GROUPS=groups, KIND=codes.name, num_warps=4,
        **overlap(out.device),
    )  # fmt: skip
    return out
