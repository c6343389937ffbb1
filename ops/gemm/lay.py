"""Layout of coded weights for CUDA kernels: pieces (pieces.py), or rows of bytes with separate scales.

Merged parts in fp8, w8 and w4 may have different group sizes; the merged weight has the smallest. Parts in other codes, or in
ggml's blocks, must have equal formats."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ops.blocks import as_codes
from ops.gemm import pieces
from ops.gemm.dequantize import apart, codes_of, of_groups
from ops.stored import BLOCKS, DECODED, FOUR_BITS, Q4, Q8, W4, StoredWeight, WeightFormat

_CHUNK = 128  # columns of 4-bit codes that share bytes
_ROLES = ("scales", "super_scales", "mins", "super_mins")
_WIDTH, _MIN_GROUP = 64, 16  # columns per tile; group sizes must be divisors or multiples of it
_HALF_MAX = 60000.0


def kind_of(part: StoredWeight) -> WeightFormat:
    """Return the format of a part's codes, after conversion if it is in blocks."""
    return BLOCKS[part.format].codes if part.format in BLOCKS else part.format


def in_features_of(part: StoredWeight) -> int:
    width = part.weight.shape[1]
    if part.format in BLOCKS:
        return width // BLOCKS[part.format].size * BLOCKS[part.format].columns
    return width * 2 if part.format in FOUR_BITS else width


def groups_of(part: StoredWeight) -> int:
    """Return the number of column groups per row. Each group has a scale."""
    if part.format not in BLOCKS:
        return part.tensors["scales"].shape[1]
    block = BLOCKS[part.format]
    return part.weight.shape[1] // block.size * block.groups


def fit_pieces(parts: tuple[StoredWeight, ...]) -> bool:
    """Return whether the stacked rows can be laid out in pieces."""
    kinds, groups = {kind_of(part) for part in parts}, {groups_of(part) for part in parts}
    if len(kinds) > 1 or (len(groups) > 1 and not kinds.isdisjoint(DECODED)):
        return False
    return pieces.fits(kinds.pop(), sum(len(part.weight) for part in parts), in_features_of(parts[0]), max(groups))


def lay(parts: tuple[StoredWeight, ...], *, in_pieces: bool, groups: int = 1) -> dict[str, Tensor]:
    """Stack rows of several parts and return tensors by role. The layout is "pieces", or "weight" [N, bytes of a row], "scales"
    [groups, N] and other roles of `triton_coded.Codes`. "order" [K] is present if columns are reordered. `groups`: minimum number
    of groups for w4, w8 and fp8. Raises ValueError if the parts cannot be one weight."""
    if kind_of(parts[0]) in DECODED:
        return {"pieces": _pieces_of_decoded(parts)} if in_pieces else _rows_of_decoded(parts)
    kind, stack = parts[0].format, stacked(parts, groups)
    if in_pieces:
        roles = {"pieces": pieces.in_pieces(kind, codes_of(kind, stack.weight).view(torch.uint8), stack.scales)}
    else:
        roles = {"weight": in_chunks(kind, stack.weight), "scales": stack.scales}
    return roles if stack.order is None else {**roles, "order": stack.order}


class RowStack(NamedTuple):
    """Stacked rows of several parts in fp8, w8 or w4. `weight`: as stored. `scales` [groups, N]: float32; for w4 32-bit
    words, a float32 whose last 8 bits are replaced by the zero point."""

    weight: Tensor
    scales: Tensor
    order: Tensor | None


def stacked(parts: tuple[StoredWeight, ...], groups: int = 1) -> RowStack:
    """Stack rows of several parts. Raises ValueError if they cannot be one weight."""
    if (why := apart(parts)) is not None:
        raise ValueError(f"these cannot be one weight: {why}")
    groups = max(groups, *map(groups_of, parts))
    scales = torch.cat([_finer(part.tensors["scales"], groups) for part in parts]).float()
    if parts[0].format == W4:
        eights = [torch.full_like(part.tensors["scales"], 8, dtype=torch.uint8) for part in parts]
        zeros = [part.tensors.get("zeros", eight) for part, eight in zip(parts, eights, strict=True)]
        words = (scales.view(torch.int32) + 128) & -256  # to nearest
        scales = words | torch.cat([_finer(each, groups) for each in zeros]).to(torch.int32)
    weight = torch.cat([part.weight.view(torch.uint8) for part in parts])
    return RowStack(weight, scales.t().contiguous(), parts[0].tensors.get("order"))


def _finer(per_group: Tensor, groups: int) -> Tensor:
    return per_group.repeat_interleave(groups // per_group.shape[1], dim=1)


def in_chunks(kind: WeightFormat, weight: Tensor) -> Tensor:
    """Convert stored codes to bytes [N, bytes of a row] for Triton's kernels and few_rows_coded.cu. A byte of 4-bit codes
    holds column c and column c + 64 of a chunk of 128; rows are padded to whole chunks."""
    if kind not in FOUR_BITS:
        return weight.view(torch.uint8)
    padded = functional.pad(weight, (0, -weight.shape[1] % (_CHUNK // 2)))
    codes = codes_of(kind, padded).view(len(padded), -1, 2, _CHUNK // 2)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)


def _pieces_of_decoded(parts: tuple[StoredWeight, ...]) -> Tensor:
    found = [_codes_and_words(as_codes(part)) for part in parts]
    codes, words = (torch.cat(each) for each in zip(*found, strict=True))
    return pieces.in_pieces(kind_of(parts[0]), codes.view(torch.uint8), words.t().contiguous())


def _codes_and_words(part: StoredWeight) -> tuple[Tensor, Tensor]:
    """Return codes [rows, columns] and words [rows, groups] int32: float32 scales, or for q4 and q8 a float16 scale and a
    float16 zero point."""
    codes, scales, mins = codes_of(part.format, part.weight), of_groups(part, "scales"), of_groups(part, "mins")
    assert scales is not None
    if part.format not in (Q4, Q8):
        return codes, scales.float().view(torch.int32)
    mins = torch.zeros_like(scales) if mins is None else mins
    zeros = mins / scales.half().double()
    # Group whose zero point float16 cannot represent, since its numbers are nearly equal: code 0, a scale below zero
    # point 1.
    same = (zeros.abs() >= _HALF_MAX) | (zeros.isnan() & (mins != 0))
    codes = (codes.unflatten(1, (scales.shape[1], -1)) * ~same.unsqueeze(2)).flatten(1)
    halves, zeros = torch.where(same, mins, scales).half(), torch.where(same, 1.0, zeros.nan_to_num(0.0)).half()
    return codes, halves.view(torch.int16).int() << 16 | zeros.view(torch.int16).int() & 0xFFFF


def _rows_of_decoded(parts: tuple[StoredWeight, ...]) -> dict[str, Tensor]:
    """Stack decoded parts. Raises ValueError if their roles differ or no tile contains their groups whole."""
    parts = tuple(map(as_codes, parts))
    kinds = {(part.format, *((role, each.dtype, each.shape[1]) for role, each in _of_groups(part))) for part in parts}
    if len(kinds) > 1 or parts[0].format not in DECODED:
        raise ValueError(f"rows in {' and '.join(sorted({str(part.format) for part in parts}))} are not scaled alike")
    kind, in_features, groups = parts[0].format, in_features_of(parts[0]), groups_of(parts[0])
    group, rest = divmod(in_features, groups)
    whole = not rest and group >= _MIN_GROUP and (group % _WIDTH == 0 or _WIDTH % group == 0)
    if groups > 1 and not whole:
        raise ValueError(
            f"{in_features} columns in {groups} groups of {kind}, where groups of 16, 32 or whole times 64 are read"
        )
    roles = {
        role: torch.cat([_bytes(part.tensors[role]) for part in parts]).t().contiguous()
        for role, _ in _of_groups(parts[0])
    }
    return {"weight": in_chunks(kind, torch.cat([part.weight for part in parts])), **roles}


def _of_groups(part: StoredWeight) -> list[tuple[str, Tensor]]:
    return [(role, part.tensors[role]) for role in _ROLES if role in part.tensors]


def _bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales
