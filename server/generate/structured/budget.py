"""Reasoning budget: a matcher that limits the number of reasoning tokens, and then forces the closing tag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.api import Bitmask, MatcherFactory
from server.generate.structured.bitmask import all_but, only
from server.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers of reasoning. `pairs`: (opening, closing) markers. `reasoning_open`: the prompt ends after the first opening
    marker. `again`: common prefix of opening markers that may occur repeatedly; no opening marker may follow it once the budget
    is used up. If `again` is None, reasoning occurs only at the beginning."""

    pairs: tuple[tuple[str, str], ...]
    reasoning_open: bool = False
    again: str | None = None


def thinking_budget(limit: int, markers: ReasoningMarkers, tokenizer: Tokenizer, vocab_size: int) -> MatcherFactory:
    """Return a factory of matchers that end reasoning after `limit` tokens, summed over all reasoning blocks of an answer."""
    pairs = [
        (open.encode(), close.encode(), tokenizer.encode(close, add_special_tokens=False))
        for open, close in markers.pairs
    ]
    banned: dict[bytes, list[int]] = {}
    if markers.again is not None:
        openings = [open.removeprefix(markers.again) for open, _ in markers.pairs]
        banned[markers.again.encode()] = [tokenizer.encode(text, add_special_tokens=False)[0] for text in openings]
    return lambda: _Budget(limit, pairs, banned, tokenizer, vocab_size, reasoning_open=markers.reasoning_open)


class _Budget:
    """TokenMatcher of the reasoning budget. Markers are searched in the text's bytes, so their tokenisation does not matter."""

    def __init__(
        self,
        limit: int,
        pairs: Sequence[tuple[bytes, bytes, Sequence[int]]],
        banned: dict[bytes, list[int]],
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        reasoning_open: bool,
    ) -> None:
        self._left = limit
        self._pairs = pairs
        self._banned = banned
        self._only_first = not banned
        self._over = False  # what follows is the answer, whatever it mentions
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._longest = max(len(mark) for open, close, _ in pairs for mark in (open, close))
        self._tail = b""
        self._closes = b""  # of the block that is open, else b""
        self._close_ids: Sequence[int] = ()
        self._forced: list[int] = []  # what has to come next, last first
        if reasoning_open:
            self._open(*pairs[0][1:])

    def allowed(self) -> Bitmask | None:
        if self._forced:
            return only(self._forced[-1])
        if self._left <= 0:
            for behind, token_ids in self._banned.items():
                if self._tail.endswith(behind):
                    return all_but(token_ids, self._vocab_size)
        return None

    def accept(self, token_id: int) -> None:
        forced = bool(self._forced)
        if forced:
            self._forced.pop()
        self._tail = (self._tail + self._tokenizer.token_bytes(token_id))[-self._longest :]
        if self._closes:
            self._inside(paid=not forced)
        elif not self._over:
            self._outside()

    def checkpoint(self) -> Callable[[], None]:
        left, over, tail, closes, forced = self._left, self._over, self._tail, self._closes, self._forced.copy()
        close_ids = self._close_ids

        def take_back() -> None:
            self._left, self._over, self._tail, self._closes, self._forced = left, over, tail, closes, forced
            self._close_ids = close_ids

        return take_back

    def _inside(self, *, paid: bool) -> None:
        if self._tail.endswith(self._closes):
            self._closes, self._over = b"", self._only_first
            return
        self._left -= paid
        if self._left <= 0 and not self._forced:
            self._force()

    def _outside(self) -> None:
        for open, close, close_ids in self._pairs:
            if self._tail.endswith(open):
                self._open(close, close_ids)
                return
        written = self._tail.lstrip()
        self._over = self._only_first and not any(open.startswith(written) for open, _, _ in self._pairs)

    def _open(self, close: bytes, close_ids: Sequence[int]) -> None:
        self._closes, self._close_ids = close, close_ids
        if self._left <= 0:
            self._force()

    def _force(self) -> None:
        self._forced = list(reversed(self._close_ids))
