"""Preprocessing: what a client wrote, as the token ids the engine reads.

Long texts are worked on off the loop, in pieces, and of a text that is far too long for the context only the beginning is
tokenised before it is refused: what a client can make us do is bounded by the context, not by what it sends. Where a text need
not fit (it is to be cut, or counted), the bound is four times the context, and at least 262,144 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from runtime.api import MediaItem
from server.generate.logprobs import Echo
from server.generate.request import GenerateRequest, Infill, Prompts, Truncation
from server.generate.sampling import check_token_ids
from server.http.errors import ContextLengthExceeded, Field, InvalidRequest
from server.http.offload import Offload, Pieces, to_the_end
from server.media.embeds import prompt_item
from server.media.part import Base64, MediaPart
from server.media.placeholders import PlaceholderError
from server.media.source import base64_bytes
from server.models.model import LoadedModel
from server.models.text_pieces import PIECE_CHARS
from server.models.tokenizer import Tokenizer, TooManyTokens

MAX_TOKENS = 1 << 18  # of a text that need not fit the context, if four times the context is less
MAX_CHARS_PER_TOKEN = 8  # of these; usual text has 3 to 5
CHARS_PER_PROMPT = 100  # what a prompt costs that is empty
BORDER_TOKENS = 64
PIECE = 8192  # ids, of which so many are checked in a fifth of a millisecond
PROMPT, SUFFIX, TRUNCATE = Field("prompt"), Field("suffix"), Field("truncate_prompt_tokens")


async def text_ids(
    loaded: LoadedModel,
    offload: Offload,
    text: str,
    *,
    add_special_tokens: bool,
    param: Field,
    fits: bool = True,
    plain: bool = False,
) -> list[int]:
    """The ids of `text`. One that is too long raises ContextLengthExceeded if it has to fit, else InvalidRequest, at the cost of
    its beginning only; one that is a little too long comes back whole."""
    return await offload.run_pieces(
        len(text),
        encode_pieces(loaded, text, add_special_tokens=add_special_tokens, param=param, fits=fits, plain=plain),
    )


async def predicted_ids(loaded: LoadedModel, offload: Offload, text: str, param: Field) -> list[int]:
    """The ids of what an answer may be like, as far as an answer can be: special tokens in it are text."""
    ids = await text_ids(loaded, offload, text, add_special_tokens=False, param=param, fits=False, plain=True)
    return ids[: loaded.engine.model.max_model_len]


def encode(
    loaded: LoadedModel, text: str, *, add_special_tokens: bool, param: Field, fits: bool, plain: bool = False
) -> list[int]:
    """`text_ids`, in the thread it is called in."""
    work = encode_pieces(loaded, text, add_special_tokens=add_special_tokens, param=param, fits=fits, plain=plain)
    return to_the_end(work)


def encode_pieces(
    loaded: LoadedModel, text: str, *, add_special_tokens: bool, param: Field, fits: bool, plain: bool = False
) -> Pieces[list[int]]:
    """`text_ids`, piece by piece. `plain`: see `Tokenizer.encode`."""
    limit = loaded.engine.model.max_model_len
    # What follows can change the last few tokens of a beginning, not more.
    max_tokens = limit + BORDER_TOKENS if fits else max_tokens_of_text(limit)
    if not fits and len(text) > MAX_CHARS_PER_TOKEN * max_tokens:
        raise InvalidRequest(
            param, f" has {len(text)} characters; at most {MAX_CHARS_PER_TOKEN * max_tokens} are tokenised", param=param
        )
    try:
        return (yield from loaded.tokenizer.encode_pieces(text, add_special_tokens, max_tokens, plain))
    except TooManyTokens as error:
        if not fits:
            raise InvalidRequest(
                param, f" has more than the {max_tokens} tokens of which a text may be", param=param
            ) from None
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens; the first {error.num_chars} of {len(text)} characters in ",
            param,
            f" are {error.num_tokens}",
            param=param,
        ) from None


def max_tokens_of_text(max_model_len: int) -> int:
    """Of a text that need not fit the context."""
    return max(MAX_TOKENS, 4 * max_model_len)


async def prompt_ids(loaded: LoadedModel, offload: Offload, given: Prompts, *, fits: bool) -> list[list[int]]:
    """The ids of every prompt, in order. `fits`: see `text_ids`.

    Raises InvalidRequest for ids outside the vocabulary."""
    cost = sum(CHARS_PER_PROMPT + len(prompt) for prompt in given.prompts) - CHARS_PER_PROMPT
    return await offload.run_pieces(cost, _prompt_ids(loaded, given, fits))


def _prompt_ids(loaded: LoadedModel, given: Prompts, fits: bool) -> Pieces[list[list[int]]]:
    found: list[list[int]] = []
    since_rest = 0
    for prompt in given.prompts:
        since_rest += CHARS_PER_PROMPT + len(prompt)
        if since_rest > PIECE_CHARS and found:
            since_rest = 0
            yield
        if isinstance(prompt, str):
            prompt = yield from encode_pieces(
                loaded,
                prompt,
                add_special_tokens=given.add_special_tokens,
                param=PROMPT,
                fits=fits,
                plain=not given.allow_special_tokens,
            )
        else:
            yield from check_ids(prompt, loaded.engine.model.vocab_size, PROMPT)
        found.append(prompt)
    return found


async def media_ids(
    loaded: LoadedModel, offload: Offload, given: Prompts, *, fits: bool
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """The ids of a text with placeholders, and what stands at them. Raises InvalidRequest where these are not as many."""
    [text] = given.prompts
    assert isinstance(text, str), "placeholders are text"
    media = await loaded.media.read(given.media, given.processor_kwargs)
    try:
        special = given.add_special_tokens and media.layout is None
        text, ordered = media.written(text if media.layout is None else media.layout(text))
        ids = await text_ids(loaded, offload, text, add_special_tokens=special, param=PROMPT, fits=fits)
        return media.placed(ids, ordered)
    except PlaceholderError as error:
        raise InvalidRequest(str(error), param=PROMPT) from None


async def embeds_ids(
    loaded: LoadedModel, offload: Offload, part: MediaPart, max_bytes: int
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """What stands for a prompt that is given as embeddings, and these. Raises InvalidRequest."""
    if not loaded.engine.model.takes_embeds:
        raise InvalidRequest(
            f"this server takes no {part.kind}: it was started without --enable-prompt-embeds, or its model has no room for them",
            param=part.where,
        )
    assert isinstance(part.source, Base64), "as it comes in JSON"
    text = part.source.text

    def read() -> Pieces[MediaItem]:
        data = base64_bytes(text, part.where, max_bytes)
        yield
        return prompt_item(data, part.where)

    item = await offload.run_pieces(len(text), read())
    return [0] * len(item.positions), (item,)


async def infill_ids(loaded: LoadedModel, offload: Offload, given: Infill, *, fits: bool) -> list[list[int]]:
    """The ids of the prompt between each prefix and the suffix, in order. Special tokens in the texts are text: what is written
    may be about them.

    Raises InvalidRequest where the model does not fill in the middle, or for ids outside the vocabulary."""
    infill = loaded.infill
    if infill is None:
        raise InvalidRequest(
            SUFFIX, " needs a model that was trained to fill in the middle; the tokenizer of this one has no tokens for that",
            param=SUFFIX,
        )  # fmt: skip
    plain = Prompts(given.prefixes, add_special_tokens=False, allow_special_tokens=False)
    prefixes = await prompt_ids(loaded, offload, plain, fits=fits)
    num_chars = len(given.suffix) + len(given.middle) + sum(len(name) + len(text) for name, text in given.extra)

    def ids() -> list[list[int]]:
        encode = lru_cache(None)(partial(_plain, loaded, fits))  # one suffix stands behind all prefixes
        # What the tokenizer puts before every text (BOS, mostly), and nothing of what it may put behind.
        head = loaded.tokenizer.encode("")
        head = head if head == [loaded.tokenizer.bos_token_id] else []
        return [
            head + infill.ids(encode, prefix, given.suffix, extra=given.extra, middle=given.middle)
            for prefix in prefixes
        ]

    return await offload.run(num_chars, ids)


def _plain(loaded: LoadedModel, fits: bool, text: str) -> list[int]:
    return encode(loaded, text, add_special_tokens=False, param=SUFFIX, fits=fits, plain=True)


def check_ids(ids: Sequence[int], vocab_size: int, param: Field) -> Pieces[None]:
    """Checks as `check_token_ids` does."""
    for start in range(0, len(ids), PIECE):
        if start:
            yield
        check_token_ids(ids[start : start + PIECE], vocab_size, param)


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
