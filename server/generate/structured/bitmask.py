"""Token bitmasks, as returned by `TokenMatcher.allowed`. Bit t % 32 of little-endian 32-bit word t // 32 allows token t."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.api import Bitmask


def has_bit(mask: Bitmask | None, token_id: int) -> bool:
    if mask is None:
        return True
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def only(token_id: int) -> bytearray:
    return with_bits(b"", [token_id])


def all_but(token_ids: Iterable[int], vocab_size: int) -> bytearray:
    return without_bits(b"\xff" * ((vocab_size + 31) // 32 * 4), token_ids)


def with_bits(mask: Bitmask, token_ids: Iterable[int]) -> bytearray:
    words = bytearray(mask)
    for token_id in token_ids:
        words.extend(bytes(max(0, (token_id // 32 + 1) * 4 - len(words))))
        words[token_id >> 3] |= 1 << (token_id & 7)
    return words


def without_bits(mask: Bitmask, token_ids: Iterable[int]) -> bytearray:
    """Return a copy of `mask` with the bits of `token_ids` cleared. Ids beyond the end of `mask` are skipped, because a
    tokenizer can have more tokens than its model."""
    words = bytearray(mask)
    for token_id in token_ids:
        if token_id >> 3 < len(words):
            words[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    return words
