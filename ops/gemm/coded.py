"""Linear layers on CUDA whose weight stays in codes and scales (`ops.stored.CODED`), by the number of rows.

Few rows are a stream of the codes (few_rows_coded.cu), which x meets in 16 bits. With more, x is rounded to the weight's codes, row
by row as it comes, where those have matrix units of their own: cuBLAS multiplies fp8 with one scale a row; groups of columns and
int8 are Triton's. With four bits x stays as it is, and where rows are so many that products take all the time, the weight becomes
plain numbers for the length of one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.backends import on_cuda_at_any_size
from ops.cuda.program import missing
from ops.gemm import few_rows_coded
from ops.gemm.dequantize import apart
from ops.gemm.weight import LinearWeight, check_refill, overwrite
from ops.registry import ShapeClass
from ops.stored import CODED, FP8, W4, Stored, StoredWeight, formats_of, parts_of

_CHUNK = 128  # columns of w4 whose codes share bytes
_ALIGNED = 16  # what cuBLAS wants of either side of a weight in fp8


def supports(case: ShapeClass) -> str | None:
    """Codes of one kind; of fp8 on a device that has it."""
    if (why := on_cuda_at_any_size(case)) is not None:
        return why
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    if len(case.weight) != 1 or case.weight[0] not in CODED:
        return "it reads weights in codes and scales, all of one kind"
    if case.capability is not None and case.capability < ((8, 9) if case.weight[0] == FP8 else (8, 0)):
        return "the device's matrix units have no such codes"
    return None


class CodedLinearWeight(LinearWeight):
    """Rows of several parts that are in other groups get the finest groups of all; those whose columns are in different orders
    cannot be one weight (ValueError). Kept are bytes [N, bytes of a row], and scales [groups, N]: float32; of w4 words of 32 bits,
    a float32 without its last 8 bits, in which the zero point is."""

    def __init__(self, stored: Stored) -> None:
        parts = parts_of(stored)
        (self.codes,) = formats_of(parts)
        self._weight, self._scales, self._order, self.in_features = laid(parts)
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = torch.cat(biases).contiguous() if biases else None
        groups, self.out_features = self._scales.shape
        kept = (self._weight, self._scales, self._order, self._bias)
        self.nbytes = sum(each.nbytes for each in kept if each is not None)
        self._few = missing() is None and few_rows_coded.fits(self.codes, self.out_features, self.in_features, groups)
        self._by_cublas = (
            self.codes == FP8 and groups == 1 and not (self.out_features % _ALIGNED or self.in_features % _ALIGNED)
        )
        self._tuning = tuning.of(self._weight.device).coded

    def matmul(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if self._few:
            shape = self.in_features, self.out_features, self._scales.shape[0]
            few_rows_coded.compile_ahead(self.codes, *shape, x.dtype, x.device)
        if self._order is not None:
            x = x.index_select(1, self._order)
        if self._may_stream(num_rows):
            return self.stream(x, gated=False)
        if self.codes == W4:
            return self.by_widened(x) if self._is_widened(num_rows) else self.by_triton(x)
        return self.by_triton(x) if num_rows <= few_rows_coded.MAX_ROWS else self.by_rounded(x)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        if not self._may_stream(x.shape[0]):
            return None
        return self.stream(x if self._order is None else x.index_select(1, self._order), gated=True)

    def _may_stream(self, num_rows: int) -> bool:
        return self._few and 0 < num_rows <= (2 if self.codes == W4 else 1) * few_rows_coded.MAX_ROWS

    def _is_widened(self, num_rows: int) -> bool:
        by, elements = self._tuning, self.out_features * self.in_features
        return num_rows >= by.min_widened_rows or (elements <= by.small_weight and num_rows > few_rows_coded.MAX_ROWS)

    def stream(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """For few rows; as the other ways, x in the order of the codes. `how`: as of `few_rows_coded.few_rows`."""
        return few_rows_coded.few_rows(x, self.codes, self._weight, self._scales, self._bias, gated=gated, **how)

    def by_triton(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_coded import linear  # no CPU needs Triton

        return linear(x, self.codes, self._weight, self._scales, self._bias, x.dtype)

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_widen import widen

        weight = widen(self._weight, self._scales, self.in_features, x.dtype)
        return functional.linear(x, weight, self._bias)

    def by_rounded(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_coded import linear, round_rows

        if self._by_cublas and x.dtype == torch.bfloat16:
            codes, scales = round_rows(x, self.codes)
            return torch._scaled_mm(
                codes.view(torch.float8_e4m3fn), self._weight.view(torch.float8_e4m3fn).t(), scales.view(-1, 1), self._scales,
                bias=self._bias, out_dtype=x.dtype, use_fast_accum=True,
            )  # fmt: skip
        groups = self._scales.shape[0]
        codes, scales = round_rows(x, self.codes, groups)
        return linear(codes, self.codes, self._weight, self._scales, self._bias, x.dtype, scales)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding is kept in plain numbers")

    def refill(self, stored: Stored) -> bool:
        parts = parts_of(stored)
        biases = [part.bias for part in parts if part.bias is not None]
        if all("weight" in part.tensors for part in parts):
            if formats_of(parts) != (self.codes,):
                written = " and ".join(map(str, formats_of(parts)))
                raise ValueError(f"a weight in {written} where {self.codes} is kept")
            weight, scales, order, in_features = laid(parts, groups=self._scales.shape[0])
            check_refill("weight", (len(weight), in_features), (self.out_features, self.in_features))
            if (order is None) != (self._order is None):
                raise ValueError("columns in an order of their own take the place of others alone that are")
            overwrite(self._scales, scales, "scales")
            overwrite(self._weight, weight, "weight")
            overwrite(self._order, order, "order")
        overwrite(self._bias, torch.cat(biases) if biases else None, "bias")
        return True


def laid(parts: tuple[StoredWeight, ...], groups: int = 1) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Weight [N, bytes] uint8, scales [groups, N], order, in features; `groups`: at least so many. Raises ValueError."""
    if (why := apart(parts)) is not None:
        raise ValueError(f"these cannot be one weight: {why}")
    groups = max(groups, *(part.tensors["scales"].shape[1] for part in parts))
    is_w4 = parts[0].format == W4
    in_features = parts[0].weight.shape[1] * (2 if is_w4 else 1)
    scales = torch.cat([_finer(part.tensors["scales"], groups) for part in parts]).float()
    if is_w4:
        eights = [torch.full_like(part.tensors["scales"], 8, dtype=torch.uint8) for part in parts]
        zeros = [part.tensors.get("zeros", eight) for part, eight in zip(parts, eights, strict=True)]
        words = (scales.view(torch.int32) + 128) & -256  # to nearest
        scales = words | torch.cat([_finer(each, groups) for each in zeros]).to(torch.int32)
        weight = torch.cat([_halves(part.weight) for part in parts])
    else:
        weight = torch.cat([part.weight.view(torch.uint8) for part in parts])
    return weight.contiguous(), scales.t().contiguous(), parts[0].tensors.get("order"), in_features


def _finer(per_group: Tensor, groups: int) -> Tensor:
    """[N, g] -> [N, groups], whole times as many."""
    return per_group.repeat_interleave(groups // per_group.shape[1], dim=1)


def _halves(weight: Tensor) -> Tensor:
    """Two neighbouring columns a byte -> a column and the one 64 on, in whole chunks of 128: [N, K / 2] -> [N, chunks * 64]."""
    padded = functional.pad(weight, (0, -weight.shape[1] % (_CHUNK // 2)))
    codes = torch.stack([padded & 15, padded >> 4], dim=2).view(len(weight), -1, 2, _CHUNK // 2)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
