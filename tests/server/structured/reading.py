"""Grammars put to the test: compiled for a tokenizer, and asked about texts."""

from __future__ import annotations

from runtime.api import TokenMatcher
from server.generate.structured.compiler import Grammars
from server.models.model import Constraint
from server.models.tokenizer import Tokenizer
from tests.server.tiny import EOS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def has(mask: bytes | bytearray | memoryview | None, token_id: int) -> bool:
    return mask is None or (token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1))


def reads(matcher: TokenMatcher, token_ids: list[int], end: int = EOS) -> bool:
    """Whether `token_ids` may be drawn one after another, and then `end`."""
    for token_id in token_ids:
        if not has(matcher.allowed(), token_id):
            return False
        matcher.accept(token_id)
    return has(matcher.allowed(), end)


async def accepted(grammar: Constraint, *texts: str, tokenizer: Tokenizer = TOKENIZER) -> set[str]:
    """Which of `texts` the grammar takes, whole."""
    make = await Grammars(tokenizer, frozenset({EOS})).factory(grammar)
    return {text for text in texts if reads(make(), tokenizer.encode(text))}
