"""Linear layers on CUDA whose codes are decoded before they are multiplied (`ops.stored.DECODED`), and ggml's blocks, which become
such codes. On Hopper they lie in the pieces of pieces.py, and tiled_w4.py multiplies them; elsewhere triton_decoded.py does. Where
rows are so many that products take all the time, the weight becomes plain numbers for the length of one product. Whatever stands in
blocks Q4_0 is coded.py's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ops import tuning
from ops.backends import on_cuda_at_any_size
from ops.blocks import Q4_0, as_codes, as_w4
from ops.cuda.program import missing_for_hopper
from ops.gemm import coded, pieces, tiled_w4
from ops.gemm.dequantize import codes_of, of_groups
from ops.gemm.weight import LinearWeight, check_refill, overwrite
from ops.registry import ShapeClass
from ops.stored import BLOCKS, DECODED, FOUR_BITS, Q4, Q8, Stored, StoredWeight, WeightFormat, bias_of, parts_of

_ROLES = ("scales", "super_scales", "mins", "super_mins")
_WIDTH = 64  # columns of a tile, of which groups are whole parts or whole times as many
_MIN_GROUP = 16
_HALF_MAX = 60000.0

# What is quicker than 16 bits; the others become plain numbers. On Hopper all are (tests/benches/ops/decoded.py); elsewhere what
# becomes w4: Triton's kernel of the others takes some 300 us for a layer of the 8B shape and few rows of an H200, bfloat16 123.
TAKEN = frozenset(BLOCKS) | DECODED
TAKEN_ANYWHERE = frozenset({Q4_0})
_HOPPER = (9, 0)


def supports(case: ShapeClass) -> str | None:
    """Codes of one kind, or blocks that become such."""
    return _refusal(case, TAKEN_ANYWHERE) or (None if len(case.weight) == 1 else "it reads weights of one kind")


def supports_experts(case: ShapeClass) -> str | None:
    """Codes and blocks of any kinds, in weights of one each."""
    return _refusal(case, frozenset())


def _refusal(case: ShapeClass, anywhere: frozenset[WeightFormat]) -> str | None:
    if (why := on_cuda_at_any_size(case)) is not None:
        return why
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "it computes in bfloat16 or float16"
    unread = [each for each in case.weight if each not in TAKEN]
    if unread or not case.weight:
        return f"it reads no weights in {', '.join(map(str, unread))}"
    if case.capability not in (None, _HOPPER) and not anywhere.issuperset(case.weight):
        return "its tiles are Hopper's, and 16 bits quicker than what is not in tiles"
    return None


def prepare(stored: Stored) -> LinearWeight:
    """Raises ValueError for groups that no tile has whole."""
    parts = parts_of(stored)
    if all(part.format == Q4_0 for part in parts):
        return coded.prepare([as_w4(part) for part in parts])
    return (
        TiledDecodedWeight(parts) if missing_for_hopper() is None and tiles_fit(parts) else DecodedLinearWeight(parts)
    )


def tiles_fit(parts: tuple[StoredWeight, ...]) -> bool:
    """Whether pieces hold these rows."""
    kinds = {kind_of(part) for part in parts}
    groups = {groups_of(part) for part in parts}
    if len(kinds) > 1 or len(groups) > 1:
        return False
    return pieces.fits(kinds.pop(), sum(len(part.weight) for part in parts), in_features_of(parts[0]), groups.pop())


def kind_of(part: StoredWeight) -> WeightFormat:
    """Of the codes that it is in, or becomes."""
    return BLOCKS[part.format].codes if part.format in BLOCKS else part.format


def in_features_of(part: StoredWeight) -> int:
    width = part.weight.shape[1]
    if part.format in BLOCKS:
        return width // BLOCKS[part.format].size * BLOCKS[part.format].columns
    return width * 2 if part.format in FOUR_BITS else width


def groups_of(part: StoredWeight) -> int:
    if part.format not in BLOCKS:
        return part.tensors["scales"].shape[1]
    block = BLOCKS[part.format]
    return part.weight.shape[1] // block.size * block.groups


def in_pieces(parts: tuple[StoredWeight, ...]) -> Tensor:
    """Rows of several parts stacked, as pieces.py lays them; `tiles_fit`."""
    found = [_codes_and_words(as_codes(part)) for part in parts]
    codes, words = (torch.cat(each) for each in zip(*found, strict=True))
    return pieces.in_pieces(kind_of(parts[0]), codes.view(torch.uint8), words.t().contiguous())


def _codes_and_words(part: StoredWeight) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns], and words [rows, groups] int32: float32 scales; of q4 and q8 a scale and a zero point in half
    floats."""
    codes, scales, mins = codes_of(part.format, part.weight), of_groups(part, "scales"), of_groups(part, "mins")
    assert scales is not None
    if part.format not in (Q4, Q8):
        return codes, scales.float().view(torch.int32)
    mins = torch.zeros_like(scales) if mins is None else mins
    zeros = mins / scales.half().double()
    # A group whose zero point no half float holds, since its numbers are nearly the same: code 0, a scale below zero point 1.
    same = (zeros.abs() >= _HALF_MAX) | (zeros.isnan() & (mins != 0))
    codes = (codes.unflatten(1, (scales.shape[1], -1)) * ~same.unsqueeze(2)).flatten(1)
    halves, zeros = torch.where(same, mins, scales).half(), torch.where(same, 1.0, zeros.nan_to_num(0.0)).half()
    return codes, halves.view(torch.int16).int() << 16 | zeros.view(torch.int16).int() & 0xFFFF


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


class TiledDecodedWeight(LinearWeight):
    """In the pieces of pieces.py."""

    def __init__(self, stored: Stored) -> None:
        parts = parts_of(stored)
        self._format, self._codes = parts[0].format, kind_of(parts[0])
        self.out_features, self.in_features = sum(len(part.weight) for part in parts), in_features_of(parts[0])
        self._kept = in_pieces(parts)
        self._bias = bias_of(parts)
        self.nbytes = self._kept.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self._max_rows = tuning.of(self._kept.device).coded.max_tiled_rows
        self._finest = pieces.groups_of(self._codes, self._kept) == pieces.FINEST

    def first_bytes(self) -> Tensor | None:
        return self._kept

    def matmul(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.out_features)
        return self.in_tiles(x) if self._is_tiled(x) else self.by_widened(x)

    def gated_matmul(self, x: Tensor) -> Tensor | None:
        if not len(x) or not self._is_tiled(x) or not pieces.can_gate(self.out_features):
            return None
        return self.in_tiles(x, gated=True)

    def _is_tiled(self, x: Tensor) -> bool:
        """Numbers that meet scales of groups of 16 may be less than float16 has."""
        return len(x) <= self._max_rows and not (self._finest and x.dtype == torch.float16)

    def in_tiles(self, x: Tensor, *, gated: bool = False, **how: Any) -> Tensor:
        """`how`: as of `tiled_w4.tiled_w4`."""
        ahead = self.next_bytes if len(x) <= coded.FEW else None
        return tiled_w4.tiled_w4(
            x, self._kept, self.out_features, self._bias, gated=gated, codes=self._codes, ahead=ahead, **how
        )

    def by_widened(self, x: Tensor) -> Tensor:
        from ops.gemm.triton_widen import widen_pieces  # no CPU needs Triton

        weight = widen_pieces(self._kept, self.out_features, self.in_features, x.dtype, self._codes)
        return functional.linear(x, weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("an embedding is kept in plain numbers")

    def refill(self, stored: Stored) -> bool:
        parts = parts_of(stored)
        if all("weight" in part.tensors for part in parts):
            check_format(parts, self._format)
            rows, columns = sum(len(part.weight) for part in parts), in_features_of(parts[0])
            check_refill("weight", (rows, columns), (self.out_features, self.in_features))
            if not tiles_fit(parts):
                raise ValueError(f"rows of {self._format} in other groups than are kept")
            overwrite(self._kept, in_pieces(parts), "weight")
        overwrite(self._bias, bias_of(parts), "bias")
        return True


def check_format(parts: tuple[StoredWeight, ...], kept: WeightFormat) -> None:
    """Raises ValueError."""
    if any(part.format != kept for part in parts):
        written = " and ".join(sorted({str(part.format) for part in parts}))
        raise ValueError(f"a weight in {written} where {kept} is kept")


class DecodedLinearWeight(LinearWeight):
    """Parts in codes that are written alike, stacked by rows, refilled where they lie."""

    def __init__(self, stored: Stored) -> None:
        from ops.gemm.triton_decoded import Codes

        parts = parts_of(stored)
        kept = laid(parts)
        self._format, kind = parts[0].format, kind_of(parts[0])
        self.out_features, self.in_features = kept["scales"].shape[1], in_features_of(parts[0])
        self._kept = kept
        roles = (kept.get(role) for role in ("super_scales", "mins", "super_mins"))
        self._codes = Codes(kind, self.in_features, kept["weight"], kept["scales"], *roles)
        self._bias = bias_of(parts)
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
        if all("weight" in part.tensors for part in parts):
            check_format(parts, self._format)
            given = laid(parts)
            if given.keys() != self._kept.keys():
                raise ValueError(f"a weight with {', '.join(given)} where {', '.join(self._kept)} are kept")
            for role, current in self._kept.items():
                check_refill(role, given[role].shape, current.shape)
            for role, current in self._kept.items():
                overwrite(current, given[role], role)
        overwrite(self._bias, bias_of(parts), "bias")
        return True
