"""Token masks: one bit for each token of the vocabulary, in the format of `TokenMatcher.allowed` and of the sampling tables."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import numpy as np

from runtime.step import MaskWords


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


@lru_cache(2)
def mask_of_set(token_ids: frozenset[int], words: int) -> MaskWords:
    """Return `mask_of(token_ids, words)`. The result is cached, so do not write to it."""
    return mask_of(token_ids, words)


def mask_of(token_ids: Collection[int], words: int) -> MaskWords:
    """Return a mask [words] int32 that allows `token_ids` only."""
    bits = np.zeros((words, 32), dtype=np.uint8)
    bits.reshape(-1)[list(token_ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view("<i4")[:, 0].copy()


def allows(mask: MaskWords, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)


def only_token(mask: MaskWords) -> int | None:
    """Return the single allowed token of `mask`, or None if it allows several or none."""
    (words,) = mask.nonzero()
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1
