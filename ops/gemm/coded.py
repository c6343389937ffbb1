"""Linear layers on CUDA whose weight stays in codes and scales (fp8, w8 and w4 of `ops.stored`), by the number of rows.

Few rows are a stream of the codes (few_rows_coded.cu), which x meets in 16 bits. With more, x is rounded to the weight's codes, row
by row as it comes, where those have matrix units of their own: cuBLAS multiplies fp8 with one scale a row, tiled_fp8.cu in groups
of 128 columns on Hopper; other groups and int8 are Triton's. With four bits x stays as it is: on Hopper one kernel takes few rows
and many (tiled_w4.cu), and where rows are so many that products take all the time, the weight becomes plain numbers for the length
of one product."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.backends import on_cuda_at_any_size
from ops.blocks import as_w4
from ops.cuda.program import missing, missing_for_hopper
from ops.gemm import few_rows_coded, pieces, rounded, tiled_fp8, tiled_w4
from ops.gemm.dequantize import apart, codes_of
from ops.gemm.rounded import RoundedRows
from ops.gemm.weight import LinearWeight, check_refill, overwrite
from ops.registry import ShapeClass
from ops.stored import CODED, DECODED, FP8, W4, W8, Stored, StoredWeight, bias_of, formats_of, parts_of

_CHUNK = 128  # columns of w4 whose codes share bytes
FEW = 64  # rows up to which a product is bound by the weight's bytes
_STREAMED = (FP8, W8)  # by few_rows_coded.cu, as bytes of rows
_ALIGNED = 16  # what cuBLAS wants of either side of a weight in fp8


def supports(case: ShapeClass) -> str | None:
    """Codes of one kind; of fp8 on a device that has it."""
    if (why := on_cuda_at_any_size(case)) is not None:
        return why
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    if len(case.weight) != 1 or case.weight[0] not in CODED - DECODED:
        return "it reads weights in codes and scales, all of one kind"
    if case.capability is not None and case.capability < ((8, 9) if case.weight[0] == FP8 else (8, 0)):
        return "the device's matrix units have no such codes"
    return None


def prepare(stored: Stored) -> LinearWeight:
    """The form that is the quickest on the weight's device. Raises ValueError as `CodedLinearWeight` does."""
    parts = parts_of(stored)
    if formats_of(parts) == (W4,) and missing_for_hopper() is None:
        in_features = parts[0].weight.shape[1] * 2
        groups = max(part.tensors["scales"].shape[1] for part in parts)
        if pieces.fits(W4, sum(len(part.weight) for part in parts), in_features, groups):
            return TiledLinearWeight(stored)
    return CodedLinearWeight(stored)


class StackedCodes(LinearWeight):
    """Parts in codes of one kind, stacked by rows, refilled where they lie. Those that are in other groups get the finest groups of
    all; those whose columns are in different orders cannot be one weight (ValueError)."""

    def __init__(self, stored: Stored) -> None:
        parts = parts_of(stored)
        (self.codes,) = formats_of(parts)
        stack = stacked(parts)
        self._order, self.in_features = stack.order, stack.in_features
        self.groups, self.out_features = stack.scales.shape
        self._kept = self._lay(stack)
        self._bias = bias_of(parts)
        self.nbytes = sum(each.nbytes for each in (*self._kept, self._order, self._bias) if each is not None)
        self._tuning = tuning.of(self._kept[0].device).coded

    @staticmethod
    @abstractmethod
    def _lay(stack: Stack) -> tuple[Tensor, ...]:
        """Codes and scales as the kernels read them."""

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    def first_bytes(self) -> Tensor | None:
        return self._kept[0]

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding is kept in plain numbers")

    def refill(self, stored: Stored) -> bool:
        parts = tuple(map(as_w4, parts_of(stored)))
        if all("weight" in part.tensors for part in parts):
            if formats_of(parts) != (self.codes,):
                written = " and ".join(map(str, formats_of(parts)))
                raise ValueError(f"a weight in {written} where {self.codes} is kept")
            stack = stacked(parts, self.groups)
            check_refill("weight", (len(stack.weight), stack.in_features), (self.out_features, self.in_features))
            check_refill("scales", stack.scales.shape, (self.groups, self.out_features))
            if (stack.order is None) != (self._order is None):
                raise ValueError("columns in an order of their own take the place of others alone that are")
            for current, given in zip(self._kept, self._lay(stack), strict=True):
                overwrite(current, given, "weight")
            overwrite(self._order, stack.order, "order")
        overwrite(self._bias, bias_of(parts), "bias")
        return True


class TiledLinearWeight(StackedCodes):
    """Four bits in the pieces of pieces.py, scales among them."""

    @staticmethod
    def _lay(stack: Stack) -> tuple[Tensor, ...]:
        return (pieces.in_pieces(W4, codes_of(W4, stack.weight), stack.scales),)

    def matmul(self, x: Tensor) -> Tensor:
        x = self._ordered(x)
        if not len(x):
            return x.new_empty(0, self.out_features)
        if self._may_stream(len(x)):
            return self.stream(x)
        return self.by_widened(x) if len(x) > self._tuning.max_tiled_rows else self.in_tiles(x)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        if not 0 < len(x) <= self._tuning.max_tiled_rows or not pieces.can_gate(self.out_features):
            return None
        x = self._ordered(x)
        return self.stream(x, gated=True) if self._may_stream(len(x)) else self.in_tiles(x, gated=True)

    def _may_stream(self, num_rows: int) -> bool:
        by = self._tuning
        few = num_rows <= by.max_streamed_rows and self.out_features <= by.max_streamed_out_features
        return few and few_rows_coded.fits(W4, self.out_features, self.in_features, self.groups)

    def stream(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """For few rows. `how`: as of `few_rows_coded.few_rows`."""
        shape = self.out_features, self.groups
        few_rows_coded.compile_ahead(W4, self.in_features, *shape, x.dtype, x.device)
        return few_rows_coded.few_rows(
            x, W4, self._kept[0], None, self._bias, *shape, gated=gated, ahead=self.next_bytes, **how
        )

    def in_tiles(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """x in the order of the codes. `how`: as of `tiled_w4.tiled_w4`."""
        return tiled_w4.tiled_w4(
            x,
            self._kept[0],
            self.out_features,
            self._bias,
            gated=gated,
            ahead=self.next_bytes if len(x) <= FEW else None,
            **how,
        )

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_widen import widen_pieces  # no CPU needs Triton

        weight = widen_pieces(self._kept[0], self.out_features, self.in_features, x.dtype)
        return functional.linear(x, weight, self._bias)


class CodedLinearWeight(StackedCodes):
    """Kept are bytes [N, bytes of a row], and scales [groups, N]."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        self._weight, self._scales = self._kept
        self._in_tiles = (
            self.codes == FP8
            and missing_for_hopper() is None
            and tiled_fp8.fits(self.out_features, self.in_features, self.groups)
        )
        self._few = (
            self.codes in _STREAMED
            and missing() is None
            and few_rows_coded.fits(self.codes, self.out_features, self.in_features, self.groups)
        )
        self._rounds_norms = self._in_tiles and self._order is None and rounded.fits(self.in_features, self.groups)
        self._by_cublas = (
            self.codes == FP8 and self.groups == 1 and not (self.out_features % _ALIGNED or self.in_features % _ALIGNED)
        )

    @staticmethod
    def _lay(stack: Stack) -> tuple[Tensor, ...]:
        return in_rows(stack), tiled_fp8.with_slack(stack.scales)

    def matmul(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if self._few:
            shape = self.out_features, self.groups
            few_rows_coded.compile_ahead(self.codes, self.in_features, *shape, x.dtype, x.device)
        x = self._ordered(x)
        if self._may_stream(num_rows):
            return self.stream(x, gated=False)
        if self.codes == W4:
            return self.by_widened(x) if self._is_widened(num_rows) else self.by_triton(x)
        return self.by_triton(x) if num_rows <= few_rows_coded.MAX_ROWS else self.by_rounded(x)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        if self._may_stream(x.shape[0]):
            return self.stream(self._ordered(x), gated=True)
        if x.shape[0] > few_rows_coded.MAX_ROWS and self._is_tiled(x.shape[0], x.dtype):
            return self.in_tiles(self._ordered(x), gated=True)
        return None

    def matmul_of_gated(self, gate_up: Tensor) -> Tensor:
        if self.codes == W4 or self._order is not None or len(gate_up) <= few_rows_coded.MAX_ROWS:
            return super().matmul_of_gated(gate_up)
        return self.by_rounded(gate_up, of_gated=True)

    def _may_stream(self, num_rows: int) -> bool:
        return self._few and 0 < num_rows <= few_rows_coded.MAX_ROWS

    def _is_widened(self, num_rows: int) -> bool:
        by, elements = self._tuning, self.out_features * self.in_features
        return num_rows >= by.min_widened_rows or (elements <= by.small_weight and num_rows > few_rows_coded.MAX_ROWS)

    def stream(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """For few rows; as the other ways, x in the order of the codes. `how`: as of `few_rows_coded.few_rows`."""
        shape = self.out_features, self.groups
        return few_rows_coded.few_rows(
            x, self.codes, self._weight, self._scales, self._bias, *shape, gated=gated, ahead=self.next_bytes, **how
        )

    def by_triton(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_coded import linear  # no CPU needs Triton

        return linear(x, self.codes, self._weight, self._scales, self._bias, x.dtype)

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_widen import widen

        weight = widen(self._weight, self._scales, self.in_features, x.dtype)
        return functional.linear(x, weight, self._bias)

    def by_rounded(self, x: Tensor, *, of_gated: bool = False) -> Tensor:
        """`of_gated`: x is gates and ups, and silu of the one times the other is what is rounded and multiplied."""
        from ops.gemm.triton_coded import linear, round_rows

        if self._is_tiled(x.shape[0], x.dtype):
            return self.in_tiles(x, of_gated=of_gated)
        if self._by_cublas and x.dtype == torch.bfloat16:
            return self.by_cublas(x, of_gated=of_gated)
        codes, scales = round_rows(x, self.codes, self.groups, gated=of_gated)
        return linear(codes, self.codes, self._weight, self._scales, self._bias, x.dtype, scales)

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
        by = self._tuning
        narrow = self.out_features <= by.narrow_out_features and num_rows <= by.max_narrow_rows
        return narrow or num_rows <= by.max_rounded_rows or not self._by_cublas or dtype != torch.bfloat16

    def _rounded(self, x: Tensor | RoundedRows, of_gated: bool) -> RoundedRows:
        if isinstance(x, RoundedRows):
            return x
        from ops.gemm.triton_coded import round_rows

        return RoundedRows(*round_rows(x, FP8, self.groups, tiled_fp8.SLACK, gated=of_gated), x.dtype)

    def by_cublas(self, x: Tensor | RoundedRows, *, of_gated: bool = False) -> Tensor:
        codes, scales, dtype = self._rounded(x, of_gated)
        return torch._scaled_mm(
            codes.view(torch.float8_e4m3fn), self._weight.view(torch.float8_e4m3fn).t(), scales.view(-1, 1), self._scales,
            bias=self._bias, out_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip

    def in_tiles(
        self, x: Tensor | RoundedRows, *, gated: bool = False, of_gated: bool = False, **how: Any
    ) -> Tensor:  # fmt: skip
        """x in the order of the codes, to be rounded to fp8; `of_gated` as of `by_rounded`. `how`: as of `tiled_fp8.tiled_fp8`."""
        codes, x_scales, dtype = self._rounded(x, of_gated)
        return tiled_fp8.tiled_fp8(codes, x_scales, self._weight, self._scales, self._bias, dtype, gated=gated, **how)


class Stack(NamedTuple):
    """Rows of several parts in codes of one kind. `weight`: as stored. `scales` [groups, N]: float32; of w4 words of 32 bits, a
    float32 without its last 8 bits, in which the zero point is."""

    weight: Tensor
    scales: Tensor
    order: Tensor | None
    in_features: int


def stacked(parts: tuple[StoredWeight, ...], groups: int = 1) -> Stack:
    """`groups`: at least so many. Raises ValueError."""
    if (why := apart(parts)) is not None:
        raise ValueError(f"these cannot be one weight: {why}")
    groups = max(groups, *(part.tensors["scales"].shape[1] for part in parts))
    is_w4 = parts[0].format == W4
    scales = torch.cat([_finer(part.tensors["scales"], groups) for part in parts]).float()
    if is_w4:
        eights = [torch.full_like(part.tensors["scales"], 8, dtype=torch.uint8) for part in parts]
        zeros = [part.tensors.get("zeros", eight) for part, eight in zip(parts, eights, strict=True)]
        words = (scales.view(torch.int32) + 128) & -256  # to nearest
        scales = words | torch.cat([_finer(each, groups) for each in zeros]).to(torch.int32)
    weight = torch.cat([part.weight.view(torch.uint8) for part in parts])
    in_features = weight.shape[1] * (2 if is_w4 else 1)
    return Stack(weight, scales.t().contiguous(), parts[0].tensors.get("order"), in_features)


def in_rows(stack: Stack) -> Tensor:
    """Weight [N, bytes of a row], as Triton's kernels and few_rows_coded.cu read it: of four bits two columns a byte, a column and
    the one 64 on, in whole chunks of 128."""
    if stack.scales.dtype != torch.int32:
        return stack.weight
    padded = functional.pad(stack.weight, (0, -stack.weight.shape[1] % (_CHUNK // 2)))
    codes = codes_of(W4, padded).view(len(padded), -1, 2, _CHUNK // 2)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)


def laid(parts: tuple[StoredWeight, ...], groups: int = 1) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Weight as of `in_rows`, scales [groups, N], order, in features; `groups`: at least so many. Raises ValueError."""
    stack = stacked(parts, groups)
    return in_rows(stack), stack.scales, stack.order, stack.in_features


def _finer(per_group: Tensor, groups: int) -> Tensor:
    """[N, g] -> [N, groups], whole times as many."""
    return per_group.repeat_interleave(groups // per_group.shape[1], dim=1)
