"""ggml's blocks as codes and scales, in plain torch, on any device: the same numbers, kept where the blocks' own bytes are.

Blocks of five and six bits become codes of eight. Layouts: runtime/weights/dequantize.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ops.stored import E2M1, Q4, Q8, W4, StoredWeight, WeightFormat

Q4_0 = WeightFormat("Q4_0")
_EIGHT = 8.0


class _Blocks(NamedTuple):
    """`columns` in `size` bytes, with `groups` scales; `decode`: blocks [rows, blocks of a row, size] uint8 -> codes
    [rows, columns], and other roles."""

    codes: WeightFormat
    columns: int
    size: int
    groups: int
    decode: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


def as_codes(stored: StoredWeight) -> StoredWeight:
    """Blocks -> "q4", "q8" or "e2m1"; what is in other formats as it is."""
    found = BLOCKS.get(stored.format)
    if found is None:
        return stored
    codes, roles = found.decode(stored.weight.view(len(stored.weight), -1, found.size))
    weight = codes if found.codes == Q8 else _paired(codes)
    return StoredWeight(found.codes, {"weight": weight, **roles}).with_bias(stored.bias)


def as_w4(stored: StoredWeight) -> StoredWeight:
    """Blocks "Q4_0" as "w4", which has no other minimum than a whole number of its scales; what is in other formats as it is."""
    if stored.format != Q4_0:
        return stored
    blocks = stored.weight.view(len(stored.weight), -1, 18)
    tensors = {"weight": _paired(_nibbles(blocks[..., 2:]).flatten(1)), "scales": _halves(blocks, 0).float()}
    return StoredWeight(W4, tensors).with_bias(stored.bias)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., k] -> [..., 2 * k]: low halves of the bytes, then high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _paired(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """high [..., 4] is one bit per weight, low [..., 16] nibbles -> [..., 32]."""
    bits = (high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=high.device) & 1).flatten(-2)
    return _nibbles(low) | bits << 4


def _q4_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    scales = _halves(blocks, 0).float()
    return _nibbles(blocks[..., 2:]).flatten(1), {"scales": scales, "mins": scales * _EIGHT}


def _q4_1(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _nibbles(blocks[..., 4:]).flatten(1), {"scales": _halves(blocks, 0), "mins": -_halves(blocks, 2)}


def _q5_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:]).view(torch.int8) - 16
    return codes.flatten(1), {"scales": _halves(blocks, 0)}


def _q5_1(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:]).view(torch.int8)
    return codes.flatten(1), {"scales": _halves(blocks, 0), "mins": -_halves(blocks, 2)}


def _q8_0(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), {"scales": _halves(blocks, 0)}


def _scales_and_mins(blocks: Tensor) -> dict[str, Tensor]:
    """Of Q4_K and Q5_K: eight of six bits each in a block, which two half floats multiply."""
    scales, mins, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return {
        "scales": torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], dim=-1).flatten(1),
        "mins": torch.cat([mins & 63, rest >> 4 | mins >> 2 & 48], dim=-1).flatten(1),
        "super_scales": _halves(blocks, 0),
        "super_mins": _halves(blocks, 2),
    }


def _q4_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1), _scales_and_mins(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    high = blocks[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1) & 1
    return (low | high << 4).view(torch.int8).flatten(1), _scales_and_mins(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return ((low | high << 4).view(torch.int8) - 32).flatten(1), {
        "scales": scales,
        "super_scales": _halves(blocks, 208),
    }


def _mxfp4(blocks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    exponents = blocks[..., 0].to(torch.int16)
    bits = torch.where(
        exponents > 0, exponents << 7, 1 << 6
    )  # of 2^(e - 127) in bfloat16, whose smallest has no such exponent
    return _nibbles(blocks[..., 1:]).flatten(1), {"scales": bits.to(torch.int16).view(torch.bfloat16)}


BLOCKS = {
    WeightFormat("Q4_0"): _Blocks(Q4, 32, 18, 1, _q4_0),
    WeightFormat("Q4_1"): _Blocks(Q4, 32, 20, 1, _q4_1),
    WeightFormat("Q5_0"): _Blocks(Q8, 32, 22, 1, _q5_0),
    WeightFormat("Q5_1"): _Blocks(Q8, 32, 24, 1, _q5_1),
    WeightFormat("Q8_0"): _Blocks(Q8, 32, 34, 1, _q8_0),
    WeightFormat("Q4_K"): _Blocks(Q4, 256, 144, 8, _q4_k),
    WeightFormat("Q5_K"): _Blocks(Q8, 256, 176, 8, _q5_k),
    WeightFormat("Q6_K"): _Blocks(Q8, 256, 210, 16, _q6_k),
    WeightFormat("MXFP4"): _Blocks(E2M1, 32, 17, 1, _mxfp4),
}
