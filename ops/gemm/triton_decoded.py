"""Linear layers on weights in codes that are decoded before they are multiplied (`ops.stored.DECODED`), in Triton.

A tile of codes becomes numbers in float32, by a table, by bits or as integers, meets its scales and minima, and is rounded to x's
dtype: products are those of the weight as plain numbers. Few rows of x are shared out along K, so that the device is full of
programs that read; what they make is added in the order of the parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous
from ops.stored import FOUR_BITS, TABLES, WeightFormat

CHUNK = 128  # columns that a program reads at a time: of four bits a byte has one, and the one half a chunk on
_ROWS = 16


class Codes(NamedTuple):
    """Of a matrix [N, K], or of as many as there are experts: `weight` [..., N, bytes], of four bits whole chunks; `scales` and
    `mins` [..., groups, N], `super_scales` and `super_mins` [..., coarser groups, N], or None. e4m3 comes as uint8."""

    kind: WeightFormat
    in_features: int
    weight: Tensor
    scales: Tensor
    super_scales: Tensor | None
    mins: Tensor | None
    super_mins: Tensor | None

    def facts(self) -> dict[str, object]:
        """What kernels are compiled for."""
        return {
            "IN": self.in_features, "GROUPS": self.scales.shape[-2], "KIND": self.kind.name,
            "SUPERS": 0 if self.super_scales is None else self.super_scales.shape[-2],
            "MINS": self.mins is not None, "E4M3": self.scales.dtype == torch.uint8 and self.kind in TABLES,
        }  # fmt: skip

    def pointers(self) -> tuple[Tensor, ...]:
        scales = self.scales
        rest = (scales if each is None else each for each in (self.super_scales, self.mins, self.super_mins))
        return self.weight, table(self.kind, scales.device), scales, *rest


_tables: dict[tuple[WeightFormat, torch.device], Tensor] = {}


def table(kind: WeightFormat, device: torch.device) -> Tensor:
    """The sixteen numbers of a kind on a device; of integers anything."""
    if (kind, device) not in _tables:
        _tables[kind, device] = torch.tensor(TABLES.get(kind, (0.0,)), dtype=torch.float32, device=device)
    return _tables[kind, device]


@triton.jit
def worth(codes, table_ptr, KIND: tl.constexpr):
    # codes int32, of q8 as a byte -> float32.
    if KIND == "q8":
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "q4":
        numbers = codes.to(tl.float32)
    elif KIND == "e2m1":  # its exponent in the last bits of a half float's
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        numbers = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        numbers = tl.load(table_ptr + codes)
    return numbers


@triton.jit
def _of_groups(
    fine_at, coarse_at, group, STRIDE: tl.constexpr, PER: tl.constexpr, SUPERS: tl.constexpr, E4M3: tl.constexpr
):
    # [columns, groups]: what is to be multiplied with the numbers of a group, or to be taken off them.
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
    # codes [COLUMNS, WIDTH] of places begin .. begin + WIDTH -> numbers in float32. *_at [COLUMNS]: of the first group; the next is
    # STRIDE on. Groups are whole parts of WIDTH or whole times as many.
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


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr, weight_ptr, table_ptr, scale_ptr, super_scale_ptr, min_ptr, super_min_ptr, bias_ptr, out_ptr, num_rows,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr,
    E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # x [num_rows, IN], weight as of Codes -> out [num_rows, OUT], or of SPLITS parts of K float32 [SPLITS, num_rows, OUT].
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    at_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    at_column = tl.minimum(column, OUT - 1).to(tl.int64)
    x_at = x_ptr + at_row[:, None] * IN
    scale_at, super_scale_at = scale_ptr + at_column, super_scale_ptr + at_column
    min_at, super_min_at = min_ptr + at_column, super_min_ptr + at_column
    CHUNKS: tl.constexpr = (IN + 127) // 128
    first, last = CHUNKS * split // SPLITS, CHUNKS * (split + 1) // SPLITS
    wait_for_previous(PDL)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    depth = tl.arange(0, 64)
    if KIND == "q8":
        weight_at = weight_ptr + at_column[:, None] * IN
    else:
        weight_at = weight_ptr + at_column[:, None] * (CHUNKS * 64)
    for chunk in range(first, last):
        if KIND != "q8":
            both = tl.load(weight_at + (chunk * 64 + depth)[None, :]).to(tl.int32)
        for half in tl.static_range(2):
            begin = chunk * 128 + half * 64
            if KIND == "q8":
                codes = tl.load(weight_at + (begin + depth)[None, :], mask=(begin + depth < IN)[None, :], other=0)
            else:
                codes = both >> 4 if half else both & 15
            weight = decoded(
                codes, begin, table_ptr, scale_at, super_scale_at, min_at, super_min_at, OUT, IN, GROUPS, SUPERS, KIND, MINS, E4M3,
                COLUMNS, 64,
            )  # fmt: skip
            if IN % 128 == 0:
                x = tl.load(x_at + (begin + depth)[None, :])
            else:
                x = tl.load(x_at + (begin + depth)[None, :], mask=(begin + depth < IN)[None, :], other=0.0)
            total = tl.dot(weight.to(x.dtype), tl.trans(x), total, input_precision=PRECISION)
    if BIASED:  # noqa: SIM102  (known to the compiler; the other is not)
        if split == 0:
            total += tl.load(bias_ptr + at_column).to(tl.float32)[:, None]
    out_at = out_ptr + (split.to(tl.int64) * num_rows + at_row)[None, :] * OUT + column[:, None]
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


class Tile(NamedTuple):
    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def tile(num_rows: int, out_features: int, in_features: int, multiprocessors: int) -> Tile:
    """What a program computes; few rows are shared out until there are some four programs a multiprocessor."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    columns = 32 if rows <= 16 else 64
    programs = triton.cdiv(out_features, columns) * triton.cdiv(num_rows, rows)
    splits = max(1, min(8, 4 * multiprocessors // programs, in_features // (4 * CHUNK))) if rows <= 64 else 1
    return Tile(rows, columns, splits, 4 if rows <= 64 else 8, 4 if rows <= 64 else 3)


def linear(x: Tensor, codes: Codes, bias: Tensor | None, chosen: Tile) -> Tensor:
    """x [M, K] -> [M, N], M at least 1."""
    num_rows, out_features = x.shape[0], codes.scales.shape[-1]
    rows, columns, splits, warps, stages = chosen
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    _linear[(triton.cdiv(num_rows, rows), triton.cdiv(out_features, columns), splits)](
        x.contiguous(), *codes.pointers(), out if bias is None else bias, parts, num_rows, OUT=out_features, **codes.facts(),
        ROWS=rows, COLUMNS=columns, SPLITS=splits, BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages, **overlap(x.device),
    )  # fmt: skip
    if splits > 1:
        _add_splits[(triton.cdiv(out.numel(), 1024),)](
            parts, out, out.numel(), SPLITS=splits, LANES=1024, num_warps=4, **overlap(x.device)
        )
    return out


@triton.jit
def _widen(
    weight_ptr, table_ptr, scale_ptr, super_scale_ptr, min_ptr, super_min_ptr, out_ptr,
    OUT: tl.constexpr, IN: tl.constexpr, GROUPS: tl.constexpr, SUPERS: tl.constexpr, KIND: tl.constexpr, MINS: tl.constexpr,
    E4M3: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A weight as of Codes -> out [OUT, IN].
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, OUT - 1).to(tl.int64)
    chunk = tl.program_id(1)
    depth = tl.arange(0, 64)
    CHUNKS: tl.constexpr = (IN + 127) // 128
    wait_for_previous(PDL)  # nothing that it wrote is read here, but what reads this may wait for this alone
    for half in tl.static_range(2):
        begin = chunk * 128 + half * 64
        inside = (row < OUT)[:, None] & (begin + depth < IN)[None, :]
        if KIND == "q8":
            codes = tl.load(weight_ptr + at[:, None] * IN + (begin + depth)[None, :], mask=inside, other=0)
        else:
            both = tl.load(weight_ptr + at[:, None] * (CHUNKS * 64) + (chunk * 64 + depth)[None, :]).to(tl.int32)
            codes = both >> 4 if half else both & 15
        values = decoded(
            codes, begin, table_ptr, scale_ptr + at, super_scale_ptr + at, min_ptr + at, super_min_ptr + at, OUT, IN, GROUPS,
            SUPERS, KIND, MINS, E4M3, ROWS, 64,
        )  # fmt: skip
        tl.store(
            out_ptr + at[:, None] * IN + (begin + depth)[None, :], values.to(out_ptr.dtype.element_ty), mask=inside
        )


def widen(codes: Codes, dtype: torch.dtype) -> Tensor:
    """[N, K] as plain numbers."""
    out_features = codes.scales.shape[-1]
    out = torch.empty((out_features, codes.in_features), dtype=dtype, device=codes.weight.device)
    _widen[(triton.cdiv(out_features, _ROWS), triton.cdiv(codes.in_features, CHUNK))](
        *codes.pointers(), out, OUT=out_features, **codes.facts(), ROWS=_ROWS, num_warps=4, **overlap(out.device)
    )
    return out


def in_chunks(kind: WeightFormat, weight: Tensor) -> Tensor:
    """Codes as they are stored -> bytes [N, bytes of a row] as kernels read them."""
    if kind not in FOUR_BITS:
        return weight.view(torch.uint8)
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % (CHUNK // 2)))
    codes = torch.stack([padded & 15, padded >> 4], dim=2).view(len(padded), -1, 2, CHUNK // 2)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
