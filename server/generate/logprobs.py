"""Formats of log-probabilities: a list of tokens in chats, four parallel lists in completions, a table by id for prompts.

A token can be part of a character, so chats include its bytes. Minus infinity is written as -9999, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from runtime.api import TokenLogprobs
from server.models.tokenizer import Tokenizer

Entry = tuple[int, TokenLogprobs | None]  # an id and what is known of it; nothing of the first of a prompt


class OneToken(Struct):
    token: str
    logprob: float
    bytes: list[int]


class SampledToken(OneToken):
    top_logprobs: list[OneToken]


class ChatLogprobs(Struct):
    content: list[SampledToken]
    refusal: None = None


class TextLogprobs(Struct):
    """Log-probabilities of the answer's tokens, and with `echo` of the prompt's, whose first token has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptToken(Struct):
    logprob: float
    rank: int  # from 1, the most likely
    decoded_token: str


# By token id, the prompt's own and the most likely there; null for the first.
PromptLogprobs = list[dict[str, PromptToken] | None]

ChatWriter = Callable[[Sequence[Entry]], ChatLogprobs]  # of one choice; called with its entries in order, in pieces
CompletionWriter = Callable[[Sequence[Entry]], TextLogprobs]

_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompt that an answer repeats. `text`: its text in the answer."""

    ids: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True)
class Style:
    """Style of log-probabilities. `as_ids`: "token_id:5" instead of a token's text. `skip_special_tokens`: the text leaves
    them out. `echo`: entries and text begin with the prompt's."""

    as_ids: bool = False
    skip_special_tokens: bool = True
    echo: Echo | None = None


def chat_writer(tokenizer: Tokenizer, style: Style) -> ChatWriter:
    def token(id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = tokenizer.token_bytes(id)
        text = f"token_id:{id}" if style.as_ids else raw.decode(errors="replace")
        return text, max(logprob, _LOWEST), list(raw)

    def write(entries: Sequence[Entry]) -> ChatLogprobs:
        return ChatLogprobs([
            SampledToken(*token(id, found.logprob), [OneToken(*token(*other)) for other in found.top])
            for id, found in entries
            if found is not None
        ])  # fmt: skip

    return write


def completion_writer(tokenizer: Tokenizer, style: Style) -> CompletionWriter:
    place = _places(tokenizer, style)

    def text(id: int) -> str:
        return f"token_id:{id}" if style.as_ids else tokenizer.token_bytes(id).decode(errors="replace")

    def alternatives(id: int, found: TokenLogprobs) -> dict[str, float]:
        """Return the alternatives and the token itself by text. If several have the same text, the most likely counts."""
        shown: dict[str, float] = {}
        for other, logprob in (*found.top, (id, found.logprob)):
            shown.setdefault(text(other), max(logprob, _LOWEST))
        return shown

    def write(entries: Sequence[Entry]) -> TextLogprobs:
        return TextLogprobs(
            text_offset=[place(id) for id, _ in entries],
            token_logprobs=[None if found is None else max(found.logprob, _LOWEST) for _, found in entries],
            tokens=[text(id) for id, _ in entries],
            top_logprobs=[None if found is None else alternatives(id, found) for id, found in entries],
        )

    return write


def _places(tokenizer: Tokenizer, style: Style) -> Callable[[int], int]:
    """Return a function from each next token to its character offset in the answer. A token that completes a character has
    the offset of that character."""
    detokenizer = tokenizer.table.detokenizer(skip_special_tokens=style.skip_special_tokens, continues=True)
    end, num_echoed = 0, 0
    if style.echo is not None:
        prompt = tokenizer.table.detokenizer(skip_special_tokens=False)
        num_echoed, end = len(style.echo.ids), -_num_unseen(tokenizer, style.echo)

    def place(id: int) -> int:
        nonlocal end, num_echoed
        start = max(end, 0)
        if num_echoed:
            num_echoed -= 1
            end += len(prompt.feed((id,)))
            if not num_echoed:
                assert style.echo is not None
                end = len(style.echo.text)
        else:
            end += len(detokenizer.feed((id,)))
        return start

    return place


def _num_unseen(tokenizer: Tokenizer, echo: Echo) -> int:
    """Return the number of characters of prompt tokens that the echoed text lacks, such as BOS."""
    decoded = tokenizer.decode(echo.ids, skip_special_tokens=False)
    return len(decoded) - len(echo.text) if decoded.endswith(echo.text) else 0


def prompt_table(tokenizer: Tokenizer, entries: Sequence[Entry], count: int, *, as_ids: bool) -> PromptLogprobs:
    """Return for each prompt token the `count` most likely tokens and itself, by id."""

    def row(logprob: float, rank: int, id: int) -> PromptToken:
        text = f"token_id:{id}" if as_ids else tokenizer.token_bytes(id).decode(errors="replace")
        return PromptToken(max(logprob, _LOWEST), rank, text)

    table: PromptLogprobs = []
    for id, found in entries:
        if found is None:
            table.append(None)
            continue
        rows = {str(id): row(found.logprob, found.rank, id)}
        for rank, (other, logprob) in enumerate(found.top[:count], start=1):
            rows.setdefault(str(other), row(logprob, rank, other))
        table.append(rows)
    return table
