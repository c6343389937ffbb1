"""Encoding of prompts that are not conversations: texts, text with media, embeddings, infilling. Also truncates, echoes, checks
and hashes all kinds of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from runtime.api import Adapter, MediaItem, PreparedPrompt
from server.config.server_config import ServerConfig
from server.generate.encode import EncodedPrompts, encode, encode_pieces, encode_prompt, text_ids
from server.generate.logprobs import Echo
from server.generate.request import PROMPT, Embeds, GenerateRequest, Infill, Texts, TextWithMedia, Truncation
from server.generate.sampling import check_token_ids
from server.http.call import Call
from server.http.errors import Field, InvalidRequest
from server.http.offload import SHORT_CHARS, Pieces
from server.media.embeds import prompt_item
from server.media.part import Base64
from server.media.placeholders import PlaceholderError
from server.media.source import base64_bytes
from server.models.model import LoadedModel
from server.models.tokenizer import PIECE_CHARS, Tokenizer

CHARS_PER_PROMPT = 100  # what a prompt costs that is empty
PIECE = 8192  # ids, of which so many are checked in a fifth of a millisecond
LONG_PROMPT = SHORT_CHARS  # tokens: to check and hash them is about as much work as to tokenise so many characters
PIECE_TOKENS = 16 * LONG_PROMPT  # of short prompts, behind which other callers have their turn
SUFFIX, TRUNCATE = Field("suffix"), Field("truncate_prompt_tokens")


async def predicted_ids(loaded: LoadedModel, call: Call, text: str, param: Field) -> list[int]:
    """Return the token ids of the client's `prediction`, at most as many as the context. Special tokens are encoded as text."""
    ids = await text_ids(loaded, call, text, add_special_tokens=False, param=param, fits=False, plain=True)
    return ids[: loaded.engine.model.max_model_len]


@encode_prompt.register
async def _encode_texts(
    given: Texts, request: GenerateRequest, loaded: LoadedModel, call: Call, config: ServerConfig
) -> EncodedPrompts:
    return EncodedPrompts(await prompt_ids(loaded, call, given, fits=request.truncation is None))


async def prompt_ids(loaded: LoadedModel, call: Call, given: Texts, *, fits: bool) -> list[list[int]]:
    """Return the token ids of each prompt. `fits`: see `text_ids`. Raises InvalidRequest, also for ids outside the vocabulary."""
    cost = sum(CHARS_PER_PROMPT + len(prompt) for prompt in given.prompts) - CHARS_PER_PROMPT
    return await call.run_pieces(cost, _prompt_ids(loaded, given, fits))


def _prompt_ids(loaded: LoadedModel, given: Texts, fits: bool) -> Pieces[list[list[int]]]:
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


@encode_prompt.register
async def _encode_with_media(
    given: TextWithMedia, request: GenerateRequest, loaded: LoadedModel, call: Call, config: ServerConfig
) -> EncodedPrompts:
    """Encode a text with media. Raises InvalidRequest if the number of placeholders differs from the number of media items."""
    text, fits = given.text, request.truncation is None
    media = await loaded.media.read(given.media, given.processor_kwargs, call.tenant)
    try:
        special = given.add_special_tokens and media.layout is None
        text, ordered = media.written(text if media.layout is None else media.layout(text))
        ids = await text_ids(loaded, call, text, add_special_tokens=special, param=PROMPT, fits=fits)
        ids, items = media.placed(ids, ordered)
    except PlaceholderError as error:
        raise InvalidRequest(str(error), param=PROMPT) from None
    return EncodedPrompts([ids], items)


@encode_prompt.register
async def _encode_embeds(
    given: Embeds, request: GenerateRequest, loaded: LoadedModel, call: Call, config: ServerConfig
) -> EncodedPrompts:
    """Encode precomputed embeddings: one placeholder id per vector, and the vectors as media item. Raises InvalidRequest."""
    part = given.part
    if not loaded.engine.model.takes_embeds:
        raise InvalidRequest(
            f"this server does not accept {part.kind}: start it with --enable-prompt-embeds and a model that supports them",
            param=part.where,
        )
    assert isinstance(part.source, Base64), "as it comes in JSON"
    text = part.source.text

    def read() -> Pieces[MediaItem]:
        data = base64_bytes(text, part.where, config.max_media_size)
        yield
        return prompt_item(data, part.where)

    item = await call.run_pieces(len(text), read())
    return EncodedPrompts([[0] * len(item.positions)], (item,))


@encode_prompt.register
async def _encode_infill(
    given: Infill, request: GenerateRequest, loaded: LoadedModel, call: Call, config: ServerConfig
) -> EncodedPrompts:
    """Encode one fill-in-the-middle prompt per prefix. Special tokens in the texts are encoded as text. `stop_ids` are the model's
    tokens that start another file, prefix or suffix.

    Raises InvalidRequest if the model does not support infilling, or for ids outside the vocabulary."""
    fits = request.truncation is None
    infill = loaded.infill
    if infill is None:
        raise InvalidRequest(
            SUFFIX, " needs a fill-in-the-middle model; this model's tokenizer has no tokens for it",
            param=SUFFIX,
        )  # fmt: skip
    plain = Texts(given.prefixes, add_special_tokens=False, allow_special_tokens=False)
    prefixes = await prompt_ids(loaded, call, plain, fits=fits)
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

    return EncodedPrompts(await call.run(num_chars, ids), stop_ids=infill.stop_ids)


def _plain(loaded: LoadedModel, fits: bool, text: str) -> list[int]:
    return encode(loaded, text, add_special_tokens=False, param=SUFFIX, fits=fits, plain=True)


def check_ids(ids: Sequence[int], vocab_size: int, param: Field) -> Pieces[None]:
    """Check token ids as `check_token_ids` does, yielding between short pieces of work."""
    for start in range(0, len(ids), PIECE):
        if start:
            yield
        check_token_ids(ids[start : start + PIECE], vocab_size, param)


def truncated(ids: Sequence[int], truncation: Truncation, max_tokens: int | None, limit: int) -> Sequence[int]:
    """Return the prompt `ids` truncated as requested. `limit`: context length. Truncation to the context reserves `max_tokens`
    tokens for the answer, or one token if `max_tokens` is None.

    Raises InvalidRequest if `truncation` exceeds the context."""
    wanted = truncation.num_tokens
    if wanted >= limit:
        raise InvalidRequest(
            TRUNCATE, f" {wanted} leaves no room for an answer in a context of {limit} tokens", param=TRUNCATE
        )
    keep = max(1, limit - (max_tokens or 1)) if wanted == -1 else wanted
    return ids[:keep] if truncation.side == "right" else ids[-keep:]


def echoed(tokenizer: Tokenizer, request: GenerateRequest, number: int, ids: Sequence[int], *, is_cut: bool) -> Echo:
    """Return the echo of prompt `number`, whose token ids are `ids`. Use the client's text unless the prompt was truncated."""
    given = None if is_cut else request.prompt.text_of(number)
    return Echo(ids, tokenizer.decode(ids, skip_special_tokens=False) if given is None else given)


# --- for the engine -----------------------------------------------------------------------------------------------


async def all_prepared(
    loaded: LoadedModel,
    call: Call,
    prompts: Sequence[Sequence[int]],
    salt: str | None,
    media: tuple[MediaItem, ...] = (),
    adapter: Adapter | None = None,
) -> Sequence[PreparedPrompt | None]:
    """Check and hash long prompts on a thread, so that submitting them does not block the event loop. Return one PreparedPrompt
    per prompt, or None for each prompt if all prompts are short."""
    num_tokens = sum(map(len, prompts))
    if num_tokens <= LONG_PROMPT:
        return [None] * len(prompts)
    prepare = partial(loaded.engine.prepare, cache_salt=salt, adapter=adapter or loaded.adapter, media=media)

    def pieces() -> Pieces[list[PreparedPrompt]]:
        made: list[PreparedPrompt] = []
        since_rest = 0
        for ids in prompts:
            since_rest += len(ids)
            if since_rest > PIECE_TOKENS and made:
                since_rest = 0
                yield
            made.append(prepare(ids))
        return made

    return await call.run_pieces(num_tokens, pieces())
