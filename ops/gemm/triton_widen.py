"""Dequantisation of a coded weight to plain numbers in Triton, for one product of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gemm.pieces import groups_of
from ops.gemm.triton_coded import CHUNK, Codes, decoded, half_chunks, table, worth
from ops.launch import overlap, wait_for_previous
from ops.stored import W4, WeightFormat

_ROWS = 16


@triton.jit
def _widen(
    weight_ptr, table_ptr, scale_ptr, super_scale_ptr, min_ptr, super_min_ptr, out_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr,
    E4M3: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A weight as of triton_coded.Codes -> out [OUT, IN].
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    at = tl.minimum(row, OUT - 1).to(tl.int64)
    depth = tl.arange(0, 64)
    CHUNKS: tl.constexpr = (IN + 127) // 128
    if KIND != "q8":
        both = half_chunks(weight_ptr + at * (CHUNKS * 64), chunk, 64, KIND)
    wait_for_previous(PDL)  # reads none of its results, but later kernels may wait for this one only
    for half in tl.static_range(2):
        begin = chunk * 128 + half * 64
        column = begin + depth
        inside = (row < OUT)[:, None] & (column < IN)[None, :]
        if KIND == "q8":
            codes = tl.load(weight_ptr + at[:, None] * IN + column[None, :], mask=inside, other=0)
        else:
            codes = both >> 4 if half else both & 15
        if KIND == "w4":
            group = tl.minimum(column // (IN // GROUPS), GROUPS - 1).to(tl.int64)
            word = tl.load(scale_ptr + group[None, :] * OUT + at[:, None])
            value = codes.to(tl.float32) - (word & 15).to(tl.float32)
            value *= (word & -256).to(tl.float32, bitcast=True)
        else:
            value = decoded(
                codes, begin, table_ptr, scale_ptr + at, super_scale_ptr + at, min_ptr + at, super_min_ptr + at, OUT, IN, GROUPS,
                SUPERS, KIND, MINS, E4M3, ROWS, 64,
            )  # fmt: skip
        tl.store(out_ptr + at[:, None] * IN + column[None, :], value.to(out_ptr.dtype.element_ty), mask=inside)


def widen(codes: Codes, dtype: torch.dtype) -> Tensor:
    """Return a 4-bit or q8 weight as plain numbers [N, K]."""
    out_features = codes.scales.shape[-1]
    out = torch.empty((out_features, codes.in_features), dtype=dtype, device=codes.weight.device)
    _widen[(triton.cdiv(out_features, _ROWS), triton.cdiv(codes.in_features, CHUNK))](
        *codes.pointers(), out, OUT=out_features, **codes.facts(), ROWS=_ROWS, num_warps=4, **overlap(out.device)
    )
    return out


@triton.jit
def _widen_pieces(
    piece_ptr, table_ptr, out_ptr, IN: tl.constexpr, OUT: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    # pieces [OUT / 32, chunks of 128 columns, 2048 or 4096 + 128 * GROUPS bytes], as pieces.py lays them -> out [OUT, IN].
    piece, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHUNKS: tl.constexpr = (IN + 127) // 128
    wait_for_previous(PDL)  # reads none of its results, but later kernels may wait for this one only
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
    elif KIND == "q4" or KIND == "q8":  # a float16 each
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
    """Return a weight in the pieces of pieces.py, except fp8, as plain numbers [out_features, in_features]."""
    out = torch.empty((out_features, in_features), dtype=dtype, device=pieces.device)
    groups = groups_of(codes, pieces)
    _widen_pieces[pieces.shape[:2]](
        pieces, table(codes, out.device), out, IN=in_features, OUT=out_features, GROUPS=groups, KIND=codes.name, num_warps=4,
        **overlap(out.device),
    )  # fmt: skip
    return out
