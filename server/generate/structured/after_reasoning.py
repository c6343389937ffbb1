"""Matchers whose grammar applies only after the reasoning. During the reasoning, all tokens are allowed except end tokens, so
that an answer follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from runtime.api import Bitmask, MatcherFactory, ModelInfo, TokenMatcher
from server.generate.structured.bitmask import all_but, has_bit, with_bits
from server.models.tokenizer import Tokenizer


class _Phase(Enum):
    OPENING = "opening"  # what is written may become an opening marker, or an answer, or either
    REASONING = "reasoning"
    ANSWER = "answer"


def after_reasoning(
    make: MatcherFactory,
    tokenizer: Tokenizer,
    model: ModelInfo,
    *,
    opens: Sequence[str],
    closes: Sequence[str],
    reasoning_open: bool,
) -> MatcherFactory:
    """Return a factory of matchers that apply those of `make` only after the first of the closing tags `closes`.

    `reasoning_open`: the prompt ends inside the reasoning. Otherwise reasoning starts with one of the opening tags `opens`. If
    the first tokens are not an opening tag, they belong to the answer."""
    markers = tuple(close.encode() for close in closes)
    beginnings = (
        () if reasoning_open else tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in opens)
    )
    unended = all_but(model.eos_token_ids, model.vocab_size)
    return lambda: _ReasoningAwareMatcher(make, tokenizer, beginnings, markers, reasoning_open, unended)


class _ReasoningAwareMatcher:
    def __init__(
        self,
        make: MatcherFactory,
        tokenizer: Tokenizer,
        opens: Sequence[tuple[int, ...]],
        closes: Sequence[bytes],
        reasoning_open: bool,
        unended: Bitmask,
    ) -> None:
        self._make = make
        self._unended = unended
        self._matcher: TokenMatcher | None = make()  # None: what is written is no beginning of an answer
        self._tokenizer = tokenizer
        self._opens = [open for open in opens if open]  # those that what is written may still become
        self._closes = closes
        self._longest = max(map(len, closes))
        self._phase = _Phase.REASONING if reasoning_open else _Phase.OPENING
        self._num_written = 0  # tokens, while that is open
        self._tail = b""  # of the reasoning, as long as a marker may still begin in it

    def allowed(self) -> Bitmask | None:
        if self._phase is _Phase.REASONING:
            return self._unended
        mask = b"" if self._matcher is None else self._matcher.allowed()
        if mask is None or self._phase is _Phase.ANSWER:
            return mask
        return with_bits(mask, [open[self._num_written] for open in self._opens])

    def accept(self, token_id: int) -> None:
        if self._phase is _Phase.REASONING:
            self._read(token_id)
            return
        if self._phase is _Phase.OPENING and self._opened(token_id):
            self._phase, self._matcher = _Phase.REASONING, self._make()
        elif self._matcher is not None:
            self._matcher.accept(token_id)

    def checkpoint(self) -> Callable[[], None]:
        phase, opens, num_written, tail = self._phase, self._opens, self._num_written, self._tail
        matcher = self._matcher
        take_matcher_back = None if matcher is None else matcher.checkpoint()

        def take_back() -> None:
            self._phase, self._opens, self._num_written, self._tail = phase, opens, num_written, tail
            self._matcher = matcher
            if take_matcher_back is not None:
                take_matcher_back()

        return take_back

    def _opened(self, token_id: int) -> bool:
        """Return True if `token_id` completes an opening tag."""
        self._opens = [open for open in self._opens if open[self._num_written] == token_id]
        self._num_written += 1
        if not self._opens:
            self._phase = _Phase.ANSWER
        elif self._matcher is not None and not has_bit(self._matcher.allowed(), token_id):
            self._matcher = None
        return any(len(open) == self._num_written for open in self._opens)

    def _read(self, token_id: int) -> None:
        self._tail += self._tokenizer.token_bytes(token_id)
        if any(close in self._tail for close in self._closes):
            self._phase = _Phase.ANSWER
        self._tail = self._tail[-self._longest :]
