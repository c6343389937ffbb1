"""Gumbel noise keyed by (seed, position, token id): the sample is the token with the largest logit / T + noise.

(Gumbel 1954; "Gumbel-max": that token has the probability softmax(logits / T).) Counter-based: the noise of any token can be
computed without that of others, in any order, and by any kernel. The hash is a 32-bit finaliser of Wellons' hash-prospector
with one key word before its first multiplication and one before its second; a kernel that computes it in the same integers
samples the same ids."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1
MULTIPLIER_1 = 0x21F0AAAD
MULTIPLIER_2 = 0xD35A2D97
OTHER_KEY = 0x85EBCA6B
_MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * MULTIPLIER_1 & _MASK
    x ^= x >> 15
    x = x * MULTIPLIER_2 & _MASK
    return x ^ x >> 15


def noise_keys(seed_low: int, seed_high: int, position: int) -> tuple[int, int]:
    """Return two hash words for one draw, from the halves of its 64-bit seed and its position modulo 2^32."""
    seed_low, seed_high = seed_low & _MASK, seed_high & _MASK
    place = mix((position + GOLDEN) & _MASK)
    return mix(mix(place ^ seed_low) ^ seed_high), mix(mix((place + OTHER_KEY & _MASK) ^ seed_high) ^ seed_low)


def gumbel(ids: Tensor | int, keys: tuple[int, int]) -> Tensor:
    """Return the noise of token ids [N] int32, or of all ids below an int `ids`: [N] float32, -2.9 to 22.2.

    E = -log(1 - v) is exponential for uniform v, and -log(E) Gumbel. v has 31 bits and full precision near 0, which yields
    the large noise by which rare tokens win: one of probability 1e-8 is still sampled in proportion."""
    x = (_spread(ids) if isinstance(ids, int) else ids * _signed(GOLDEN)) + _signed(keys[0])
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted)
    x.mul_(_signed(MULTIPLIER_1)).bitwise_xor_(_signed(keys[1]))
    _xor_shift(x, 15, shifted)
    x.mul_(_signed(MULTIPLIER_2))
    _xor_shift(x, 15, shifted)
    torch.bitwise_right_shift(x, 1, out=shifted).bitwise_and_(0x7FFFFFFF)
    v = x.view(torch.float32).copy_(shifted)  # allocating memory costs a CPU more than half of these operations
    v.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


@functools.lru_cache(maxsize=4)
def _spread(vocab_size: int) -> Tensor:
    return torch.arange(vocab_size, dtype=torch.int32) * _signed(GOLDEN)


def _xor_shift(x: Tensor, by: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(x, by, out=scratch).bitwise_and_(_MASK >> by)  # torch's shift copies the sign
    x.bitwise_xor_(scratch)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
