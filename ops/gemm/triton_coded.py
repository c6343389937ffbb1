"""Linear layers with weights in codes (`ops.stored.CODED`), in Triton: any number of rows, any shape.

A format is data: kernels are compiled for the constants `Codes.facts`. Codes of fp8, w8 and w4 become numbers of x's dtype
in registers, or are multiplied by an x rounded to the same codes (`triton_round`); scales apply to a group's float32 sum.
Others (`ops.stored.DECODED`) are dequantised in float32 with their scales and minima, and rounded to x's dtype: products
equal those of the weight as plain numbers. With few rows K is split, and the parts are added in order. The weight is the
left side of each product, which Hopper can read from registers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous
from ops.stored import DECODED, TABLES, W4, WeightFormat

CHUNK = 128  # columns of 4-bit codes that a program reads at a time: a byte has a column's code, and the one half a chunk later


PLAIN = WeightFormat("plain")  # numbers of x's dtype, for experts only


class Codes(NamedTuple):
    """Codes of a matrix [N, K], or of one for each expert: `weight` [..., N, bytes], four bits in whole chunks; `scales` and
    `mins` [..., groups, N], `super_scales` and `super_mins` [..., coarser groups, N], or None. e4m3 comes as uint8. Scales
    of w4 are words: a float32 whose last 8 bits hold the zero point. `order` [..., K]: the column of x for each column."""

    kind: WeightFormat
    in_features: int
    weight: Tensor
    scales: Tensor
    super_scales: Tensor | None = None
    mins: Tensor | None = None
    super_mins: Tensor | None = None
    order: Tensor | None = None

    @property
    def groups(self) -> int:
        return 1 if self.kind == PLAIN else self.scales.shape[-2]

    def facts(self) -> dict[str, object]:
        """Return the compile-time constants of kernels."""
        return {
            "IN": self.in_features, "GROUPS": self.groups, "KIND": self.kind.name,
            "SUPERS": 0 if self.super_scales is None else self.super_scales.shape[-2],
            "MINS": self.mins is not None, "E4M3": self.scales.dtype == torch.uint8 and self.kind in TABLES,
        }  # fmt: skip

    def pointers(self) -> tuple[Tensor, ...]:
        scales = self.scales
        rest = (scales if each is None else each for each in (self.super_scales, self.mins, self.super_mins))
        return self.weight, table(self.kind, scales.device), scales, *rest

    def depth(self, most: int, groups: int = 1) -> int:
        """Return the columns of a step along the sum, at most `most`: a power of two that divides all groups of both sides."""
        if self.kind in DECODED:
            return CHUNK // 2  # groups are distinguished within it
        groups = max(groups, self.groups)
        group = self.in_features // groups
        return min(most, most if groups == 1 else group & -group, CHUNK // 2 if self.kind == W4 else most)


_tables: dict[tuple[WeightFormat, torch.device], Tensor] = {}


def table(kind: WeightFormat, device: torch.device) -> Tensor:
    """Return the sixteen values of a table kind on a device; unused for integer codes."""
    if (kind, device) not in _tables:
        _tables[kind, device] = torch.tensor(TABLES.get(kind, (0.0,)), dtype=torch.float32, device=device)
    return _tables[kind, device]


@triton.jit
def numbers(codes, word, KIND: tl.constexpr, dtype: tl.constexpr):
    # Codes [COLUMNS, DEPTH] of fp8, w8 or w4 and their words [COLUMNS] -> numbers, and the scale of their sum.
    if KIND == "w4":
        zero = (word & 15).to(tl.float32)
        scale = (word & -256).to(tl.float32, bitcast=True)
        found = (codes.to(tl.float32) - zero[:, None]).to(dtype)
    elif KIND == "fp8":
        scale = word
        found = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    else:
        scale = word
        found = codes.to(tl.int8, bitcast=True).to(dtype)
    return found, scale


@triton.jit
def worth(codes, table_ptr, KIND: tl.constexpr):
    # codes int32, of q8 as a byte -> float32.
    if KIND == "q8":
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "q4":
        numbers = codes.to(tl.float32)
    elif KIND == "e2m1":  # its exponent in the last bits of a float16's
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        numbers = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        numbers = tl.load(table_ptr + codes)
    return numbers


@triton.jit
def _of_groups(
    fine_at, coarse_at, group, STRIDE: tl.constexpr, PER: tl.constexpr, SUPERS: tl.constexpr, E4M3: tl.constexpr
):
    # [columns, groups]: factor of a group's numbers, or amount to subtract from them.
    found = tl.load(fine_at[:, None] + (group * STRIDE)[None, :])
    if E4M3:  # as e2m1; scales have no sign
        found = (found.to(tl.int32) << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    found = found.to(tl.float32)
    if SUPERS > 0:
        found *= tl.load(coarse_at[:, None] + (group // PER * STRIDE)[None, :]).to(tl.float32)
    return found


@triton.jit
def decoded(
    codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, STRIDE: tl.constexpr,
    IN: tl.constexpr, GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr, E4M3: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # codes [COLUMNS, WIDTH] of places begin .. begin + WIDTH -> numbers in float32. *_at [COLUMNS]: of the first group;
    # the next is STRIDE on. Group sizes are divisors or multiples of WIDTH.
    GROUP: tl.constexpr = IN // GROUPS
    PER_TILE: tl.constexpr = WIDTH // GROUP if GROUP < WIDTH else 1
    PER: tl.constexpr = GROUPS // SUPERS if SUPERS > 0 else 1
    group = tl.minimum(begin // GROUP + tl.arange(0, PER_TILE), GROUPS - 1)
    values = tl.reshape(worth(codes, table_ptr, KIND), [COLUMNS, PER_TILE, WIDTH // PER_TILE])
    scale = _of_groups(scale_at, super_scale_at, group, STRIDE, PER, SUPERS, E4M3)
    values *= scale[:, :, None]
    if MINS:
        values -= _of_groups(min_at, super_min_at, group, STRIDE, PER, SUPERS, False)[:, :, None]
    return tl.reshape(values, [COLUMNS, WIDTH])


@triton.jit
def columns_of(at, begin, DEPTH: tl.constexpr, IN: tl.constexpr, WHOLE: tl.constexpr):
    # Columns begin .. begin + DEPTH of rows that begin at `at` [rows]; zeros past IN, unless they are WHOLE.
    depth = begin + tl.arange(0, DEPTH)
    if WHOLE:
        return tl.load(at[:, None] + depth[None, :])
    return tl.load(at[:, None] + depth[None, :], mask=(depth < IN)[None, :], other=0)


@triton.jit
def half_chunks(weight_at, step, DEPTH: tl.constexpr, KIND: tl.constexpr):
    # Bytes [rows, DEPTH] of four bits: the codes of DEPTH columns, and of the columns 64 later.
    both = tl.load(weight_at[:, None] + (step * DEPTH + tl.arange(0, DEPTH))[None, :])
    return both if KIND == "w4" else both.to(tl.int32)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr, x_scale_ptr, weight_ptr, table_ptr, scale_ptr, super_scale_ptr, min_ptr, super_min_ptr, bias_ptr, out_ptr, num_rows,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr,
    E4M3: tl.constexpr, ROUNDED: tl.constexpr, X_GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [num_rows, IN], weight as of Codes -> out [num_rows, OUT], or of SPLITS parts of K float32 [SPLITS, num_rows,
    # OUT].
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    at_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    at_column = tl.minimum(column, OUT - 1).to(tl.int64)
    GROUP: tl.constexpr = IN // GROUPS
    X_GROUP: tl.constexpr = IN // X_GROUPS
    CHUNKS: tl.constexpr = (IN + 127) // 128
    STEPS: tl.constexpr = 64 // DEPTH if DEPTH < 64 else 1  # of half a chunk
    x_at, x_scale_at = x_ptr + at_row * IN, x_scale_ptr + at_row
    scale_at, super_scale_at = scale_ptr + at_column, super_scale_ptr + at_column
    min_at, super_min_at = min_ptr + at_column, super_min_ptr + at_column
    weight_at = weight_ptr + at_column * (IN if KIND == "fp8" or KIND == "w8" or KIND == "q8" else CHUNKS * 64)
    wait_for_previous(PDL)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if KIND == "fp8" or KIND == "w8":
        for begin in range(0, IN, DEPTH):
            word = tl.load(scale_ptr + begin // GROUP * OUT + at_column)
            codes = columns_of(weight_at, begin, DEPTH, IN, IN % DEPTH == 0)
            x = columns_of(x_at, begin, DEPTH, IN, IN % DEPTH == 0)
            if ROUNDED:
                if KIND == "fp8":
                    part = tl.dot(codes.to(tl.float8e4nv, bitcast=True), tl.trans(x.to(tl.float8e4nv, bitcast=True)))
                else:
                    part = tl.dot(codes.to(tl.int8, bitcast=True), tl.trans(x.to(tl.int8, bitcast=True)))
                x_scale = tl.load(x_scale_at + begin // X_GROUP * num_rows)
                total += part.to(tl.float32) * word[:, None] * x_scale[None, :]
            else:
                weight, scale = numbers(codes, word, KIND, x.dtype)
                total += tl.dot(weight, tl.trans(x), input_precision=PRECISION) * scale[:, None]
    else:
        first, last = 0, CHUNKS * STEPS
        if SPLITS > 1:
            first, last = CHUNKS * split // SPLITS, CHUNKS * (split + 1) // SPLITS
        for step in range(first, last):
            if KIND != "q8":
                both = half_chunks(weight_at, step, DEPTH, KIND)
            for half in tl.static_range(2):
                begin = step // STEPS * 128 + step % STEPS * DEPTH + half * 64
                x = columns_of(x_at, begin, DEPTH, IN, IN % 128 == 0)
                if KIND == "q8":
                    codes = columns_of(weight_at, begin, DEPTH, IN, False)
                else:
                    codes = both >> 4 if half else both & 15
                if KIND == "w4":
                    word = tl.load(scale_ptr + tl.minimum(begin // GROUP, GROUPS - 1) * OUT + at_column)
                    weight, scale = numbers(codes, word, KIND, x.dtype)
                    total += tl.dot(weight, tl.trans(x), input_precision=PRECISION) * scale[:, None]
                else:
                    weight = decoded(
                        codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, OUT, IN, GROUPS, SUPERS, KIND,
                        MINS, E4M3, COLUMNS, 64,
                    )  # fmt: skip
                    total = tl.dot(weight.to(x.dtype), tl.trans(x), total, input_precision=PRECISION)
    if BIASED:
        bias = tl.load(bias_ptr + at_column).to(tl.float32)[:, None]
        if SPLITS > 1:
            bias = tl.where(split == 0, bias, 0.0)
        total += bias
    out_row = split.to(tl.int64) * num_rows + at_row if SPLITS > 1 else at_row
    out_at = out_ptr + out_row[None, :] * OUT + column[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[None, :] & (column < OUT)[:, None])


@triton.jit
def _add_splits(part_ptr, out_ptr, num_numbers, SPLITS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < num_numbers
    wait_for_previous(PDL)
    total = tl.zeros((LANES,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + split * num_numbers.to(tl.int64) + lane, mask=inside, other=0.0)
    tl.store(out_ptr + lane, total.to(out_ptr.dtype.element_ty), mask=inside)


class CodedTile(NamedTuple):
    """Tile of the product that a program computes, with K in `splits` parts."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


def choose(num_rows: int, codes: Codes, multiprocessors: int, *, rounded: bool = False) -> CodedTile:
    """Return the fastest tile. For decoded kinds with few rows, K is split until there are about four programs a multiprocessor."""
    if codes.kind in DECODED:
        rows = min(128, max(16, triton.next_power_of_2(num_rows)))
        columns = 32 if rows <= 16 else 64
        programs = triton.cdiv(codes.scales.shape[-1], columns) * triton.cdiv(num_rows, rows)
        splits = min(8, 4 * multiprocessors // programs, codes.in_features // (4 * CHUNK)) if rows <= 64 else 1
        return CodedTile(rows, columns, 64, max(1, splits), 4 if rows <= 64 else 8, 4 if rows <= 64 else 3)
    if num_rows <= 16:
        return CodedTile(16, 32, 128, 1, 4, 4)
    if num_rows <= 128:
        return CodedTile(max(32, triton.next_power_of_2(num_rows)), 64, 128, 1, 4, 4 if num_rows <= 64 else 3)
    return CodedTile(128, 128, 128, 1, 8, 4) if rounded else CodedTile(256, 64, 64, 1, 8, 3)


def linear(
    x: Tensor, codes: Codes, bias: Tensor | None, multiprocessors: int = 1, *, x_scales: Tensor | None = None,
    out_dtype: torch.dtype | None = None, tile: CodedTile | None = None,
) -> Tensor:  # fmt: skip
    """Return the product [M, N] for x [M, K], whose columns are in the order of the codes. `out_dtype`: dtype of the result, by
    default that of x. `x_scales` [groups of x, M]: given if x [M, K] uint8 is in codes of the same kind. Group sizes are multiples
    of 16 columns."""
    num_rows, out_features = x.shape[0], codes.scales.shape[-1]
    out = torch.empty((num_rows, out_features), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    x_groups = 1 if x_scales is None else x_scales.shape[0]
    rows, columns, depth, splits, warps, stages = tile or choose(
        num_rows, codes, multiprocessors, rounded=x_scales is not None
    )
    parts = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    _linear[(triton.cdiv(num_rows, rows), triton.cdiv(out_features, columns), splits)](
        x.contiguous(), codes.scales if x_scales is None else x_scales, *codes.pointers(), out if bias is None else bias, parts,
        num_rows, OUT=out_features, **codes.facts(), ROUNDED=x_scales is not None, X_GROUPS=x_groups, ROWS=rows, COLUMNS=columns,
        DEPTH=codes.depth(depth, x_groups), SPLITS=splits, BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages, **overlap(x.device),
    )  # fmt: skip
    if splits > 1:
        _add_splits[(triton.cdiv(out.numel(), 1024),)](
            parts, out, out.numel(), SPLITS=splits, LANES=1024, num_warps=4, **overlap(x.device)
        )
    return out
