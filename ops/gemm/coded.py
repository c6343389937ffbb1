"""Linear layers on CUDA whose weight stays in codes (`ops.stored.CODED`), or in ggml's blocks, which are converted to codes.

The weight's layout is pieces if tiled_w4.cu multiplies it (on Hopper), otherwise rows.

- Few rows of x: few_rows_coded.cu streams the codes, and x stays in 16 bits.
- More rows, fp8 and w8: x is quantised, because tensor cores support these codes. cuBLAS multiplies fp8 with one scale per row,
  and on Hopper tiled_fp8.cu fp8 with scales per 128 columns. Triton computes other groups and int8.
- More rows, other codes: x stays in 16 bits. If the product is compute-bound, the weight is dequantised for one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.backends import on_cuda_at_any_size
from ops.blocks import Q4_0, as_w4
from ops.cuda.program import missing, missing_for_hopper
from ops.gemm import few_rows_coded, pieces, rounded, tiled_fp8, tiled_w4
from ops.gemm.lay import fit_pieces, groups_of, in_features_of, kind_of, lay
from ops.gemm.rounded import RoundedRows
from ops.gemm.weight import LinearWeight, check_refill, overwrite
from ops.registry import ShapeClass
from ops.stored import BLOCKS, CODED, DECODED, FP8, W4, W8, Stored, WeightFormat, bias_of, formats_of, parts_of

FEW = 64  # up to this number of rows, a product is memory-bound
_ROUNDED = (FP8, W8)  # codes that matrix units support directly
_ALIGNED = 16  # alignment that cuBLAS requires of both dims of an fp8 weight

# Decoded codes are faster than 16 bits on Hopper only (tests/benches/ops/decoded.py), and are converted to plain
# numbers elsewhere: for a layer of the 8B shape and few rows on an H200, Triton's kernel takes about 300 us,
# bfloat16 123. Q4_0 is converted to w4.
_MIN_CAPABILITY = {FP8: (8, 9), W8: (8, 0), W4: (8, 0)}
_HOPPER = (9, 0)


def supports(case: ShapeClass) -> str | None:
    """Return why the weight is not supported, or None. All rows must be codes of one kind, or blocks that are converted to such
    codes."""
    if len(case.weight) != 1:
        return "it reads weights in codes and scales, all of one kind"
    return _refusal(case, frozenset({Q4_0}))


def supports_experts(case: ShapeClass) -> str | None:
    """Return why the experts' weights are not supported, or None. Each must be in codes or blocks of a supported kind."""
    return _refusal(case, frozenset())


def _refusal(case: ShapeClass, anywhere: frozenset[WeightFormat]) -> str | None:
    if (why := on_cuda_at_any_size(case)) is not None:
        return why
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    unread = [each for each in case.weight if each not in BLOCKS and each not in CODED]
    if unread or not case.weight:
        return f"it reads no weights in {', '.join(map(str, unread))}"
    if case.capability is None:
        return None
    for each in case.weight:
        if each in _MIN_CAPABILITY and case.capability < _MIN_CAPABILITY[each]:
            return "the device's matrix units have no such codes"
        if each not in _MIN_CAPABILITY and each not in anywhere and case.capability != _HOPPER:
            return "its tiles are Hopper's, and 16 bits quicker than what is not in tiles"
    return None


def prepare(stored: Stored) -> LinearWeight:
    """Convert codes to the fastest form for the weight's device. Raises ValueError for parts that cannot be merged."""
    parts = parts_of(stored)
    if all(part.format == Q4_0 for part in parts):
        parts = tuple(map(as_w4, parts))
    in_tiles = kind_of(parts[0]) not in _ROUNDED and missing_for_hopper() is None and fit_pieces(parts)
    return TiledLinearWeight(parts) if in_tiles else RowsLinearWeight(parts)


class CodedLinearWeight(LinearWeight):
    """Weight of several parts in codes of one kind, stacked by rows. It is stored by role, as returned by `lay`, and refilled in
    place."""

    in_pieces: bool

    def __init__(self, stored: Stored) -> None:
        parts = parts_of(stored)
        (self._format,), self.codes = formats_of(parts), kind_of(parts[0])
        self.out_features, self.in_features = sum(len(part.weight) for part in parts), in_features_of(parts[0])
        self.groups = max(map(groups_of, parts))
        self._kept = lay(parts, in_pieces=self.in_pieces)
        self._order, self._bias = self._kept.get("order"), bias_of(parts)
        self.nbytes = sum(each.nbytes for each in (*self._kept.values(), self._bias) if each is not None)
        self._tuning = tuning.of(next(iter(self._kept.values())).device)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    def first_bytes(self) -> Tensor | None:
        return next(iter(self._kept.values()))

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding is kept in plain numbers")

    def refill(self, stored: Stored) -> bool:
        parts = parts_of(stored)
        if all("weight" in part.tensors for part in parts):
            parts = tuple(map(as_w4, parts)) if self.codes == W4 else parts
            if formats_of(parts) != (self._format,):
                written = " and ".join(map(str, formats_of(parts)))
                raise ValueError(f"a weight in {written} where {self._format} is kept")
            size = sum(len(part.weight) for part in parts), in_features_of(parts[0])
            check_refill("weight", size, (self.out_features, self.in_features))
            if self.in_pieces and not fit_pieces(parts):
                new = " and ".join(map(str, sorted({self.in_features // groups_of(part) for part in parts})))
                kept = self.in_features // self.groups
                raise ValueError(f"{self._format}: group size {new} is not supported; the loaded weight has {kept}")
            given = lay(parts, in_pieces=self.in_pieces, groups=self.groups)
            if given.keys() != self._kept.keys():
                raise ValueError(f"a weight with {', '.join(given)} where {', '.join(self._kept)} are kept")
            for role, current in self._kept.items():
                check_refill(role, given[role].shape, current.shape)
            for role, current in self._kept.items():
                overwrite(current, given[role], role)
        overwrite(self._bias, bias_of(parts), "bias")
        return True


class TiledLinearWeight(CodedLinearWeight):
    """Coded weight in the layout of pieces.py."""

    in_pieces = True

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        self._pieces = self._kept["pieces"]
        self._of_chunk = pieces.groups_of(self.codes, self._pieces)

    def matmul(self, x: Tensor) -> Tensor:
        x = self._ordered(x)
        if not len(x):
            return x.new_empty(0, self.out_features)
        if self._may_stream(len(x)):
            return self.stream(x)
        return self.in_tiles(x) if self._is_tiled(x) else self.by_widened(x)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        if not len(x) or not self._is_tiled(x) or not pieces.can_gate(self.out_features):
            return None
        x = self._ordered(x)
        return self.stream(x, gated=True) if self._may_stream(len(x)) else self.in_tiles(x, gated=True)

    def _may_stream(self, num_rows: int) -> bool:
        by = self._tuning.coded
        few = num_rows <= by.max_streamed_rows and self.out_features <= by.max_streamed_out_features
        return few and few_rows_coded.fits(self.codes, self.out_features, self.in_features, self.groups)

    def _is_tiled(self, x: Tensor) -> bool:
        """Return whether tiled_w4.cu computes x. With a scale for each 16 columns, float16 numbers could underflow, so it does
        not."""
        too_small = self._of_chunk == pieces.FINEST and x.dtype == torch.float16
        return len(x) <= self._tuning.coded.max_tiled_rows and not too_small

    def stream(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """Return the product with few rows x; see `few_rows_coded.few_rows`."""
        shape = self.out_features, self.groups
        few_rows_coded.compile_ahead(self.codes, self.in_features, *shape, x.dtype, x.device)
        return few_rows_coded.few_rows(
            x, self.codes, self._pieces, None, self._bias, *shape, gated=gated, ahead=self.next_bytes, **how
        )

    def in_tiles(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """Return the product with x, whose columns are in the order of the codes; see `tiled_w4.tiled_w4`."""
        ahead = self.next_bytes if len(x) <= FEW else None
        return tiled_w4.tiled_w4(
            x, self._pieces, self.out_features, self._bias, gated=gated, codes=self.codes, ahead=ahead, **how
        )

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_widen import widen_pieces  # not imported on CPUs, which lack Triton

        weight = widen_pieces(self._pieces, self.out_features, self.in_features, x.dtype, self.codes)
        return functional.linear(x, weight, self._bias)


class RowsLinearWeight(CodedLinearWeight):
    """Coded weight in rows of bytes [N, bytes of a row] with scales [groups, N]."""

    in_pieces = False

    def __init__(self, stored: Stored) -> None:
        from ops.gemm.triton_coded import Codes  # not imported on CPUs, which lack Triton

        super().__init__(stored)
        if self.codes in _ROUNDED:
            self._kept["scales"] = tiled_fp8.with_slack(self._kept["scales"])
        self._codes = Codes(self.codes, self.in_features, **self._kept)
        self._in_tiles = (
            self.codes == FP8
            and missing_for_hopper() is None
            and tiled_fp8.fits(self.out_features, self.in_features, self.groups)
        )
        self._few = (
            self.codes in _ROUNDED
            and missing() is None
            and few_rows_coded.fits(self.codes, self.out_features, self.in_features, self.groups)
        )
        self._rounds_norms = self._in_tiles and self._order is None and rounded.fits(self.in_features, self.groups)
        self._by_cublas = (
            self.codes == FP8 and self.groups == 1 and not (self.out_features % _ALIGNED or self.in_features % _ALIGNED)
        )

    def first_bytes(self) -> Tensor | None:
        return None if self.codes in DECODED else super().first_bytes()

    def matmul(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if self._few:
            shape = self.out_features, self.groups
            few_rows_coded.compile_ahead(self.codes, self.in_features, *shape, x.dtype, x.device)
        x = self._ordered(x)
        if self._may_stream(num_rows):
            return self.stream(x, gated=False)
        if self.codes in _ROUNDED:
            return self.by_triton(x) if num_rows <= few_rows_coded.MAX_ROWS else self.by_rounded(x)
        return self.by_widened(x) if self._is_widened(num_rows) else self.by_triton(x)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        if self._may_stream(x.shape[0]):
            return self.stream(self._ordered(x), gated=True)
        if x.shape[0] > few_rows_coded.MAX_ROWS and self._is_tiled(x.shape[0], x.dtype):
            return self.in_tiles(self._ordered(x), gated=True)
        return None

    def matmul_of_gated(self, gate_up: Tensor) -> Tensor:
        if self.codes not in _ROUNDED or self._order is not None or len(gate_up) <= few_rows_coded.MAX_ROWS:
            return super().matmul_of_gated(gate_up)
        return self.by_rounded(gate_up, of_gated=True)

    def _may_stream(self, num_rows: int) -> bool:
        return self._few and 0 < num_rows <= few_rows_coded.MAX_ROWS

    def _is_widened(self, num_rows: int) -> bool:
        by = self._tuning.coded
        is_small = self.codes == W4 and self.out_features * self.in_features <= by.small_weight
        return num_rows >= by.min_widened_rows or (is_small and num_rows > few_rows_coded.MAX_ROWS)

    def stream(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """Return the product with few rows x, whose columns are in the order of the codes; see `few_rows_coded.few_rows`."""
        weight, scales = self._kept["weight"], self._kept["scales"]
        return few_rows_coded.few_rows(
            x, self.codes, weight, scales, self._bias, self.out_features, self.groups, gated=gated, ahead=self.next_bytes, **how
        )  # fmt: skip

    def by_triton(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_coded import linear

        return linear(x, self._codes, self._bias, self._tuning.multiprocessors)

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_widen import widen

        return functional.linear(x, widen(self._codes, x.dtype), self._bias)

    def by_rounded(self, x: Tensor, *, of_gated: bool = False) -> Tensor:
        """Quantise x and return its product. `of_gated`: x contains gate and up, and silu(gate) * up is quantised."""
        from ops.gemm.triton_coded import linear
        from ops.gemm.triton_round import round_rows

        if self._is_tiled(x.shape[0], x.dtype):
            return self.in_tiles(x, of_gated=of_gated)
        if self._by_cublas and x.dtype == torch.bfloat16:
            return self.by_cublas(x, of_gated=of_gated)
        codes, scales = round_rows(x, self.codes, self.groups, gated=of_gated)
        return linear(codes, self._codes, self._bias, x_scales=scales, out_dtype=x.dtype)

    def normed(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor | RoundedRows:
        if not self._rounds_norms or len(residual) <= few_rows_coded.MAX_ROWS:
            return super().normed(x, residual, weight, eps)
        from ops.gemm.triton_normed import rms_norm

        return rms_norm(x, residual, weight, eps, self.groups, tiled_fp8.SLACK)

    def matmul_rounded(self, x: RoundedRows) -> Tensor:
        return self.in_tiles(x) if self._is_tiled(x.num_rows, x.dtype) else self.by_cublas(x)

    def gated_matmul_rounded(self, x: RoundedRows) -> Tensor | None:
        return self.in_tiles(x, gated=True) if self._is_tiled(x.num_rows, x.dtype) else None

    def _is_tiled(self, num_rows: int, dtype: torch.dtype) -> bool:
        if not self._in_tiles:
            return False
        by = self._tuning.coded
        narrow = self.out_features <= by.narrow_out_features and num_rows <= by.max_narrow_rows
        return narrow or num_rows <= by.max_rounded_rows or not self._by_cublas or dtype != torch.bfloat16

    def _rounded(self, x: Tensor | RoundedRows, of_gated: bool) -> RoundedRows:
        if isinstance(x, RoundedRows):
            return x
        from ops.gemm.triton_round import round_rows

        return RoundedRows(*round_rows(x, FP8, self.groups, tiled_fp8.SLACK, gated=of_gated), x.dtype)

    def by_cublas(self, x: Tensor | RoundedRows, *, of_gated: bool = False) -> Tensor:
        codes, scales, dtype = self._rounded(x, of_gated)
        weight, weight_scales = self._kept["weight"].view(torch.float8_e4m3fn), self._kept["scales"]
        return torch._scaled_mm(
            codes.view(torch.float8_e4m3fn), weight.t(), scales.view(-1, 1), weight_scales, bias=self._bias, out_dtype=dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def in_tiles(
        self, x: Tensor | RoundedRows, *, gated: bool = False, of_gated: bool = False, **how: Any
    ) -> Tensor:  # fmt: skip
        """Quantise x, whose columns are in the order of the codes, to fp8 and return its product. `of_gated`: see `by_rounded`. See
        `tiled_fp8.tiled_fp8`."""
        codes, x_scales, dtype = self._rounded(x, of_gated)
        weight, scales = self._kept["weight"], self._kept["scales"]
        return tiled_fp8.tiled_fp8(codes, x_scales, weight, scales, self._bias, dtype, gated=gated, **how)
