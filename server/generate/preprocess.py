"""Preprocessing: what a client wrote, as the token ids the engine reads.

Long texts are worked on off the loop, and of a text that is far too long for the context only the beginning is tokenised
before it is refused: what a client can make us do is bounded by the context, not by what it sends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from server.errors import ContextLengthExceeded, Field, InvalidRequest
from server.generate.logprobs import Echo
from server.generate.request import GenerateRequest, Prompts, Truncation
from server.generate.sampling import check_token_ids
from server.loaded.model import LoadedModel
from server.loaded.tokenizer import Tokenizer
from server.offload import Offload

CHARS_TOO_LONG = 8  # characters per token of context from which on a text is suspected; usual text has 3 to 5
BORDER_TOKENS = 64
PIECE = 8192  # ids, of which so many are checked in a fifth of a millisecond
PROMPT, TRUNCATE = Field("prompt"), Field("truncate_prompt_tokens")


async def text_ids(
    served: LoadedModel, offload: Offload, text: str, *, add_special_tokens: bool, param: Field, fits: bool = True
) -> list[int]:
    """The ids of `text`. With `fits`, a text far too long for the context raises ContextLengthExceeded at the cost of its
    beginning only; one that is a little too long comes back whole."""
    return await offload.run(
        len(text), lambda: encode(served, text, add_special_tokens=add_special_tokens, param=param, fits=fits)
    )


def encode(served: LoadedModel, text: str, *, add_special_tokens: bool, param: Field, fits: bool) -> list[int]:
    """`text_ids`, in the thread it is called in."""
    tokenizer, limit = served.tokenizer, served.engine.model.max_model_len if fits else None
    beginning = len(text) if limit is None else CHARS_TOO_LONG * limit
    while limit is not None and beginning < len(text):
        num_tokens = len(tokenizer.encode(text[:beginning], add_special_tokens=add_special_tokens))
        # What follows can change the last few tokens of the beginning, not more.
        if num_tokens > limit + BORDER_TOKENS:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens; the first {beginning} of {len(text)} characters in ",
                param,
                f" are {num_tokens}",
                param=param,
            )
        beginning *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def prompt_ids(served: LoadedModel, offload: Offload, given: Prompts, *, fits: bool) -> list[list[int]]:
    """The ids of every prompt, in order. `fits`: see `text_ids`.

    Raises InvalidRequest for ids outside the vocabulary."""
    found: list[list[int]] = []
    for prompt in given.prompts:
        if isinstance(prompt, str):
            prompt = await text_ids(
                served, offload, prompt, add_special_tokens=given.add_special_tokens, param=PROMPT, fits=fits
            )
        else:
            await offload.run(len(prompt), partial(_check_ids, prompt, served.engine.model.vocab_size))
        found.append(prompt)
    return found


def _check_ids(ids: list[int], vocab_size: int) -> None:
    """Checks as `check_token_ids` does, and lets the interpreter go after each piece: to the loop this is one more thread."""
    for start in range(0, len(ids), PIECE):
        if start:
            time.sleep(0)
        check_token_ids(ids[start : start + PIECE], vocab_size, PROMPT)


def truncated(ids: Sequence[int], truncation: Truncation, max_tokens: int | None, limit: int) -> Sequence[int]:
    """What `truncation` leaves of a prompt. `limit`: tokens of the context, of which `max_tokens` are spoken for.

    Raises InvalidRequest where it wants more than the context holds."""
    wanted = truncation.num_tokens
    if wanted >= limit:
        raise InvalidRequest(
            TRUNCATE, f" {wanted} leaves no room for an answer in a context of {limit} tokens", param=TRUNCATE
        )
    keep = max(1, limit - (max_tokens or 1)) if wanted == -1 else wanted
    return ids[:keep] if truncation.side == "right" else ids[-keep:]


def echoed(tokenizer: Tokenizer, request: GenerateRequest, number: int, ids: Sequence[int], *, is_cut: bool) -> Echo:
    """Prompt `number` of `request`, `ids` as the engine gets it, to stand before its answers: as it was written, if it was text
    and is whole."""
    given = request.prompt.prompts[number] if isinstance(request.prompt, Prompts) else None
    text = given if isinstance(given, str) and not is_cut else tokenizer.decode(ids, skip_special_tokens=False)
    return Echo(ids, text)
