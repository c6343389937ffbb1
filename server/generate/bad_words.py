"""Bad words: token sequences that must not appear in an answer.

Each word is encoded twice: as at the start of a text, and as after a space. If an encoding has several tokens, only the last
token is banned, and only after the preceding tokens. This is vLLM's `bad_words`, except that both encodings are banned even if
they differ in length. Other spellings of a word remain possible. The prompt is not searched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from runtime.api import MatcherFactory
from server.generate.structured.bitmask import all_but, without_bits

Encode = Callable[[str], Sequence[int]]


def forbid(words: Iterable[str], encode: Encode, vocab_size: int) -> MatcherFactory:
    """Return a factory of matchers that ban `words`. The first matcher encodes the words, on the thread that creates it."""
    given = tuple(words)

    @cache
    def rules() -> _Rules:
        return _Rules({tuple(encode(text)) for word in given for text in _spellings(word)}, vocab_size)

    return lambda: BadWords(rules())


def _spellings(word: str) -> tuple[str, str]:
    bare = word.lstrip(" ")
    return (bare, f" {bare}") if bare else (word, word)


class _Rules:
    """Banned token id sequences, shared by all answers of a request."""

    def __init__(self, sequences: set[tuple[int, ...]], vocab_size: int) -> None:
        self.mask = bytes(all_but((ids[0] for ids in sequences if len(ids) == 1), vocab_size))
        self.longest = max(map(len, sequences), default=0)
        self.by_last_drawn: dict[int, list[tuple[int, ...]]] = {}  # sequences by their last token but one
        for ids in sequences:
            if len(ids) > 1:
                self.by_last_drawn.setdefault(ids[-2], []).append(ids)


class BadWords:
    """TokenMatcher that bans the last token of each banned sequence, when the preceding tokens have been generated."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        self._drawn: deque[int] = deque(maxlen=max(1, rules.longest - 1))

    def allowed(self) -> bytes | bytearray:
        rules = self._rules
        near = rules.by_last_drawn.get(self._drawn[-1], ()) if self._drawn else ()
        drawn = tuple(self._drawn) if near else ()
        ends = [ids[-1] for ids in near if drawn[1 - len(ids) :] == ids[:-1]]
        return without_bits(rules.mask, ends) if ends else rules.mask

    def accept(self, token_id: int) -> None:
        self._drawn.append(token_id)

    def checkpoint(self) -> Callable[[], None]:
        drawn = self._drawn.copy()

        def take_back() -> None:
            self._drawn = drawn

        return take_back
