"""Linear layers on CUDA whose codes are decoded before they are multiplied (`ops.stored.DECODED`), and ggml's blocks, which become
such codes: few rows by triton_decoded.py, and where rows are so many that products take all the time, the weight becomes plain
numbers for the length of one product. Whatever stands in blocks Q4_0 is coded.py's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.backends import on_cuda_at_any_size
from ops.gemm import coded
from ops.gemm.from_blocks import BLOCKS, Q4_0, as_codes, as_w4
from ops.gemm.weight import LinearWeight, check_refill, overwrite
from ops.registry import ShapeClass
from ops.stored import DECODED, FOUR_BITS, Q8, Stored, StoredWeight, WeightFormat, parts_of

_ROLES = ("scales", "super_scales", "mins", "super_mins")
_WIDTH = 64  # columns of a tile, of which groups are whole parts or whole times as many
_MIN_GROUP = 16

# What is quicker than 16 bits; the others become plain numbers. (All have run on an H200: Triton takes some 300 us for a layer of
# the 8B shape and few rows, where bfloat16 takes 123 and Q4_0 67: tests/ops/bench_decoded.py, 2026-11-23.)
TAKEN = frozenset({Q4_0})
TAKEN_EXPERTS: frozenset[WeightFormat] = frozenset()


def supports(case: ShapeClass) -> str | None:
    """Codes of one kind, or blocks that become such."""
    return _refusal(case, TAKEN) or (None if len(case.weight) == 1 else "it reads weights of one kind")


def supports_experts(case: ShapeClass) -> str | None:
    """Codes and blocks of any kinds, in weights of one each."""
    return _refusal(case, TAKEN_EXPERTS)


def _refusal(case: ShapeClass, taken: frozenset[WeightFormat]) -> str | None:
    if (why := on_cuda_at_any_size(case)) is not None:
        return why
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    unread = [each for each in case.weight if each not in taken]
    return f"it reads no weights in {', '.join(map(str, unread))}" if unread or not case.weight else None


def prepare(stored: Stored) -> LinearWeight:
    """Raises ValueError for groups that no tile has whole."""
    parts = parts_of(stored)
    if all(part.format == Q4_0 for part in parts):
        return coded.prepare([as_w4(part) for part in parts])
    return DecodedLinearWeight(parts)


def fits(in_features: int, groups: int) -> bool:
    """Whether tiles have whole groups."""
    group, rest = divmod(in_features, groups)
    whole = group >= _MIN_GROUP and (group % _WIDTH == 0 or _WIDTH % group == 0)
    return groups == 1 or (not rest and whole)


def laid(parts: tuple[StoredWeight, ...]) -> dict[str, Tensor]:
    """Rows of several parts stacked, by role as `triton_decoded.Codes` has them. Raises ValueError where they differ in what they
    have beside the codes, or have groups that no tile has whole."""
    from ops.gemm.triton_decoded import in_chunks  # no CPU needs Triton

    parts = tuple(map(as_codes, parts))
    kinds = {(part.format, *((role, each.dtype, each.shape[1]) for role, each in _of_groups(part))) for part in parts}
    if len(kinds) > 1 or parts[0].format not in DECODED:
        raise ValueError(f"rows in {' and '.join(sorted({str(part.format) for part in parts}))} are not scaled alike")
    kind, weight = parts[0].format, torch.cat([part.weight for part in parts])
    in_features, groups = weight.shape[1] * (2 if kind in FOUR_BITS else 1), parts[0].tensors["scales"].shape[1]
    if not fits(in_features, groups):
        raise ValueError(
            f"{in_features} columns in {groups} groups of {kind}, where groups of 16, 32 or whole times 64 are read"
        )
    roles = {
        role: torch.cat([_bytes(part.tensors[role]) for part in parts]).t().contiguous()
        for role, _ in _of_groups(parts[0])
    }
    return {"weight": in_chunks(kind, weight), **roles}


def _of_groups(part: StoredWeight) -> list[tuple[str, Tensor]]:
    return [(role, part.tensors[role]) for role in _ROLES if role in part.tensors]


def _bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales


class DecodedLinearWeight(LinearWeight):
    """Parts in codes that are written alike, stacked by rows, refilled where they lie."""

    def __init__(self, stored: Stored) -> None:
        from ops.gemm.triton_decoded import Codes

        parts = parts_of(stored)
        kept = laid(parts)
        self._format = parts[0].format
        kind = as_codes(parts[0]).format
        self.out_features = kept["scales"].shape[1]
        self.in_features = parts[0].weight.shape[1]
        if self._format in BLOCKS:
            self.in_features = self.in_features // BLOCKS[self._format].size * BLOCKS[self._format].columns
        elif kind != Q8:
            self.in_features *= 2
        self._kept = kept
        roles = (kept.get(role) for role in ("super_scales", "mins", "super_mins"))
        self._codes = Codes(kind, self.in_features, kept["weight"], kept["scales"], *roles)
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = torch.cat(biases).contiguous() if biases else None
        self.nbytes = sum(each.nbytes for each in (*kept.values(), self._bias) if each is not None)
        of = tuning.of(kept["weight"].device)
        self._max_rows, self._multiprocessors = of.coded.min_widened_rows, of.multiprocessors

    def matmul(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.out_features)
        return self.by_triton(x) if len(x) < self._max_rows else self.by_widened(x)

    def by_triton(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_decoded import linear, tile

        return linear(
            x, self._codes, self._bias, tile(len(x), self.out_features, self.in_features, self._multiprocessors)
        )

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_decoded import widen

        return functional.linear(x, widen(self._codes, x.dtype), self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding is kept in plain numbers")

    def refill(self, stored: Stored) -> bool:
        parts = parts_of(stored)
        biases = [part.bias for part in parts if part.bias is not None]
        if all("weight" in part.tensors for part in parts):
            if any(part.format != self._format for part in parts):
                written = " and ".join(sorted({str(part.format) for part in parts}))
                raise ValueError(f"a weight in {written} where {self._format} is kept")
            given = laid(parts)
            if given.keys() != self._kept.keys():
                raise ValueError(f"a weight with {', '.join(given)} where {', '.join(self._kept)} are kept")
            for role, current in self._kept.items():
                check_refill(role, given[role].shape, current.shape)
            for role, current in self._kept.items():
                overwrite(current, given[role], role)
        overwrite(self._bias, torch.cat(biases) if biases else None, "bias")
        return True
