"""Framing: special tokens that a tokenizer adds around a text or a pair of texts, and the token types of the pair.

The special tokens are derived from the tokenizer's output. Texts can therefore be truncated first and framed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class Framing:
    """Special token ids that a tokenizer adds to texts. `single`: ids before and after one text; None if unknown. `pair`: ids
    before, between and after two texts; empty lists if the tokenizer does not support pairs. `pair_types`: token types of the
    ids before the texts, the first text, the ids between, the second text, and the ids after."""

    single: tuple[list[int], list[int]] | None
    pair: tuple[list[int], list[int], list[int]]
    pair_types: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, *, token_types: bool) -> Framing:
        pair = backend.encode("a", "b")
        places = pair.sequence_ids
        if 0 not in places or 1 not in places:  # of a vocabulary without letters
            return cls(_single(backend), ([], [], []), (0, 0, 0, 0, 0))
        start, stop = places.index(0), len(places) - places[::-1].index(0)
        other, end = places.index(1), len(places) - places[::-1].index(1)
        ids, types = pair.ids, pair.type_ids if token_types else [0] * len(pair)
        before, behind = types[:start], types[end:]
        between = types[stop:other]
        return cls(
            _single(backend),
            (ids[:start], ids[stop:other], ids[end:]),
            (
                before[0] if before else 0, types[start], between[0] if between else 0, types[other],
                behind[0] if behind else 0,
            ),
        )  # fmt: skip

    @property
    def num_single(self) -> int:
        return 0 if self.single is None else sum(map(len, self.single))

    @property
    def num_pair(self) -> int:
        return sum(map(len, self.pair))

    def framed(self, ids: Sequence[int]) -> list[int]:
        """Return `ids`, the token ids of one text, with the special tokens around them."""
        before, behind = self.single or ([], [])
        return [*before, *ids, *behind]

    def framed_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """Return the token ids of two texts with special tokens, and the token type of each id; None if all types are 0."""
        before, between, behind = self.pair
        ids = [*before, *first, *between, *second, *behind]
        if not any(self.pair_types):
            return ids, None
        lengths = (len(before), len(first), len(between), len(second), len(behind))
        types: list[int] = []
        for kind, length in zip(self.pair_types, lengths, strict=True):
            types += [kind] * length
        return ids, types


def _single(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    with_them, without = (backend.encode("a", add_special_tokens=add).ids for add in (True, False))
    for start in range(len(with_them) - len(without) + 1):
        if without and with_them[start : start + len(without)] == without:
            return with_them[:start], with_them[start + len(without) :]
    return None
