"""Log-probabilities as OpenAI's two APIs show them: a list of tokens in chats, four parallel lists in completions.

A token's text may be half a character, so chats carry its exact bytes as well. Minus infinity has no JSON: -9999 stands for it,
as it does with vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runtime.api import TokenLogprobs
from server.tokenizer import Tokenizer

Json = dict[str, Any]
Entry = tuple[int, TokenLogprobs]  # a sampled id and what is known of it
Writer = Callable[[Sequence[Entry]], Json]  # of one choice; called with its entries in order, in pieces

_LOWEST = -9999.0


def chat_writer(tokenizer: Tokenizer) -> Writer:
    def token(id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    def write(entries: Sequence[Entry]) -> Json:
        content = [
            {**token(id, found.logprob), "top_logprobs": [token(other, logprob) for other, logprob in found.top]}
            for id, found in entries
        ]
        return {"content": content, "refusal": None}

    return write


def completion_writer(tokenizer: Tokenizer) -> Writer:
    offset = 0  # characters of this choice's tokens so far

    def text(id: int) -> str:
        return tokenizer.token_bytes(id).decode(errors="replace")

    def write(entries: Sequence[Entry]) -> Json:
        nonlocal offset
        tokens = [text(id) for id, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(found.logprob, _LOWEST) for _, found in entries],
            "tokens": tokens,
            # The sampled token is among them, likely or not.
            "top_logprobs": [
                {text(other): max(logprob, _LOWEST) for other, logprob in (*found.top, (id, found.logprob))}
                for id, found in entries
            ],
        }

    return write
