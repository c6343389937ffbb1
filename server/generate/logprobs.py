"""Formats of log-probabilities: a list of tokens (chats), four parallel lists (completions), and a table by token id (prompts).

A token can be a part of a character, so the chat format includes bytes. Minus infinity is written as -9999, as in vLLM."""

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
    """Log-probabilities in the completion format: one entry per token of the answer. With `echo`, the prompt's tokens come
    first; the first prompt token has no log-probability."""

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
    """Prompt that is repeated at the start of an answer. `text`: its text, as written in the answer."""

    ids: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True)
class Style:
    """Options for writing log-probabilities. `as_ids`: write "token_id:5" instead of a token's text. `skip_special_tokens`: the
    answer's text has no special tokens. `echo`: prompt at the start of the answer, or None."""

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
        """Return the log-probability of each alternative and of token `id`, by text. Of equal texts, the most likely is kept."""
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
    """Return a function that receives the answer's token ids one by one, and returns each token's character offset in the text.
    A token that completes a character has that character's offset."""
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
    """Return the number of characters at the prompt's start, such as BOS, that are missing in the echoed text."""
    decoded = tokenizer.decode(echo.ids, skip_special_tokens=False)
    return len(decoded) - len(echo.text) if decoded.endswith(echo.text) else 0


def prompt_table(tokenizer: Tokenizer, entries: Sequence[Entry], count: int, *, as_ids: bool) -> PromptLogprobs:
    """Return one table per prompt token, keyed by token id: the token itself and the `count` most likely tokens."""

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
