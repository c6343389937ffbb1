"""Decoders of ggml's blocks into codes and scales, for numpy arrays and for torch tensors on any device.

A new block type needs a line in formats.json and a decoder in DECODERS. The layouts are those of ggml's `block_q4_0` and similar
structs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ops.stored import BLOCKS, E2M1, Q8, W4, StoredWeight, WeightFormat

Array = Any  # of numpy or of torch
Q4_0 = WeightFormat("Q4_0")


class DecodedBlocks(NamedTuple):
    """Decoded blocks: codes [..., columns of a block] uint8 or int8, and roles [..., groups of a block]. A weight's value is
    (code - zero) * scales * super_scales + adds - mins * super_mins. Scales of MXFP4 count halves of its numbers."""

    codes: Array
    roles: dict[str, Array]
    zero: int = 0


def as_codes(stored: StoredWeight) -> StoredWeight:
    """Convert blocks to codes "q4", "q8" or "e2m1" with scales. Other formats are returned unchanged."""
    if stored.format not in BLOCKS:
        return stored
    kind, (codes, roles, zero) = BLOCKS[stored.format].codes, decode(stored.format.name, stored.weight, torch)
    if zero:
        roles["mins"] = roles["scales"] * float(zero)
    if (added := roles.pop("adds", None)) is not None:
        roles["mins"] = -added
    if kind == E2M1:
        roles["scales"] = (roles["scales"] * 2).bfloat16()
    weight = codes.view(torch.int8) if kind == Q8 else codes[:, 0::2] | codes[:, 1::2] << 4
    return StoredWeight(kind, {"weight": weight, **roles}).with_bias(stored.bias)


def as_w4(stored: StoredWeight) -> StoredWeight:
    """Convert blocks "Q4_0" to "w4", which has the same zero point; return other formats unchanged."""
    if stored.format != Q4_0:
        return stored
    found = as_codes(stored)
    return StoredWeight(W4, {role: found.tensors[role] for role in ("weight", "scales")}).with_bias(stored.bias)


def decode(kind: str, rows: Array, library: Any) -> DecodedBlocks:
    """Decode rows [rows, bytes] uint8 of whole blocks to codes [rows, columns] and roles [rows, groups]. `library`: numpy or torch,
    of which `rows` is an array."""
    blocks = rows.reshape(len(rows), -1, BLOCKS[WeightFormat(kind)].size)
    codes, roles, zero = DECODERS[kind](blocks, library)
    return DecodedBlocks(
        codes.reshape(len(rows), -1), {role: each.reshape(len(rows), -1) for role, each in roles.items()}, zero
    )


def _half(blocks: Array, at: int, library: Any) -> Array:
    return library.stack((blocks[..., at], blocks[..., at + 1]), -1).view(library.float16)


def _nibbles(packed: Array, library: Any) -> Array:
    return library.concatenate((packed & 15, packed >> 4), -1)


def _five_bits(high: Array, low: Array, library: Any) -> Array:
    """Combine high [..., 4], one bit per weight, and low [..., 16], four bits per weight, to five-bit codes [..., 32]."""
    shifts = library.asarray([i % 8 for i in range(32)], dtype=library.uint8, device=high.device)
    bits = high[..., [i // 8 for i in range(32)]] >> shifts & 1
    return _nibbles(low, library) | bits << 4


def _q4_0(blocks: Array, library: Any) -> DecodedBlocks:
    scales = library.asarray(_half(blocks, 0, library), dtype=library.float32)
    return DecodedBlocks(_nibbles(blocks[..., 2:], library), {"scales": scales}, 8)


def _q4_1(blocks: Array, library: Any) -> DecodedBlocks:
    roles = {"scales": _half(blocks, 0, library), "adds": _half(blocks, 2, library)}
    return DecodedBlocks(_nibbles(blocks[..., 4:], library), roles)


def _q5_0(blocks: Array, library: Any) -> DecodedBlocks:
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:], library).view(library.int8) - 16
    return DecodedBlocks(codes, {"scales": _half(blocks, 0, library)})


def _q5_1(blocks: Array, library: Any) -> DecodedBlocks:
    roles = {"scales": _half(blocks, 0, library), "adds": _half(blocks, 2, library)}
    return DecodedBlocks(_five_bits(blocks[..., 4:8], blocks[..., 8:], library), roles)


def _q8_0(blocks: Array, library: Any) -> DecodedBlocks:
    return DecodedBlocks(blocks[..., 2:].view(library.int8), {"scales": _half(blocks, 0, library)})


def _scales_and_mins(blocks: Array, library: Any) -> dict[str, Array]:
    """Return scales and minima of Q4_K and Q5_K blocks. Bytes 4 to 15 contain 16 six-bit numbers: four scales, four minima, then
    the lower four bits of the other eight, whose upper bits are in the first eight bytes. They are multiplied by two float16
    numbers."""
    scales, mins, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return {
        "scales": library.concatenate((scales & 63, rest & 15 | scales >> 2 & 48), -1),
        "mins": library.concatenate((mins & 63, rest >> 4 | mins >> 2 & 48), -1),
        "super_scales": _half(blocks, 0, library),
        "super_mins": _half(blocks, 2, library),
    }


def _q4_k(blocks: Array, library: Any) -> DecodedBlocks:
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return DecodedBlocks(_nibbles(packed, library), _scales_and_mins(blocks, library))


def _q5_k(blocks: Array, library: Any) -> DecodedBlocks:
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., 48:].reshape(*shape, 4, 32), library).reshape(*shape, 8, 32)
    high = library.stack([blocks[..., 16:48] >> i & 1 for i in range(8)], -2)
    return DecodedBlocks(low | high << 4, _scales_and_mins(blocks, library))


def _q6_k(blocks: Array, library: Any) -> DecodedBlocks:
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64), library).reshape(*shape, 2, 4, 32)
    high = library.stack([blocks[..., 128:192].reshape(*shape, 2, 32) >> i & 3 for i in (0, 2, 4, 6)], -2)
    roles = {"scales": blocks[..., 192:208].view(library.int8), "super_scales": _half(blocks, 208, library)}
    return DecodedBlocks((low | high << 4).view(library.int8) - 32, roles)


def _mxfp4(blocks: Array, library: Any) -> DecodedBlocks:
    exponent = library.asarray(blocks[..., :1], dtype=library.int32)
    bits = library.where(exponent > 1, (exponent - 1) << 23, (exponent + 1) << 21)  # of 2^(exponent - 128) in float32
    bits = library.asarray(bits, dtype=library.int32)
    return DecodedBlocks(_nibbles(blocks[..., 1:], library), {"scales": bits.view(library.float32)})


DECODERS: dict[str, Callable[[Array, Any], DecodedBlocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
