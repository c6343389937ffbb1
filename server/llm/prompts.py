"""Prompts of `LLM`: text, token ids, or vLLM's dicts with one of these. Invalid prompts raise ValueError; the HTTP API returns 4xx.

Validation is done only by the wire types."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict

import msgspec

from server.config.option import did_you_mean
from server.http.errors import ApiError
from server.http.schema import Wire
from server.llm.media import beside_prompt, prompt_embeds
from server.media.part import MediaPart


def decoded(kind: Wire[Any], body: Mapping[str, Any]) -> Any:
    """Decode `body` as if an HTTP client had sent it. Raises ValueError."""
    try:
        return kind.decode(msgspec.json.encode(body))
    except ApiError as error:
        raise as_value_error(error) from None
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a value cannot be converted to JSON: {error}") from None


def as_value_error(error: ApiError) -> ValueError:
    named = error.param is None or error.param in error.message
    return ValueError(error.message if named else f"{error.param}: {error.message}")


class TextPrompt(TypedDict, total=False):
    prompt: Required[str]
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: Required[list[int]]
    prompt: str
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """Prompt that consists of embeddings. `prompt_embeds`: tensor of shape [tokens, hidden size]."""

    prompt_embeds: Required[Any]
    cache_salt: str


Prompt = str | Sequence[int] | Mapping[str, Any]

_READ = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs", "prompt_embeds")
# What vLLM's prompts may have beside these, and nothing here reads.
_UNREAD = {
    "multi_modal_uuids": "media are known by what they are",
    "token_type_ids": "no model here has them",
    "encoder_prompt": "models with an encoder are not served",
    "decoder_prompt": "models with an encoder are not served",
}


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """Prompt in a uniform form. `given`: prompt in the form of the HTTP API. `text`: the text, if the prompt is text. `media`:
    items for its placeholders. `processor_kwargs`: processing options of the media. `embeds`: embeddings that replace the
    prompt."""

    given: str | list[list[int]]
    text: str | None
    cache_salt: str | None = None
    media: Sequence[MediaPart] = ()
    processor_kwargs: Mapping[str, Any] | None = None
    embeds: str | None = None


def plain(prompt: Prompt) -> PlainPrompt:
    """Return `prompt` as a PlainPrompt. Raises ValueError for a dict with unknown keys or without a prompt."""
    if not isinstance(prompt, Mapping):
        return PlainPrompt(prompt, prompt) if isinstance(prompt, str) else PlainPrompt(_ids(prompt), None)
    for key, value in prompt.items():
        if key in _UNREAD:
            if value:  # {} and None say nothing
                raise ValueError(f"a prompt's {key} is not supported: {_UNREAD[key]}")
        elif key not in _READ:
            raise ValueError(f"a prompt has no key {key!r}{did_you_mean(str(key), _READ)}")
    text, ids, salt, data, processor_kwargs, embeds = (prompt.get(key) for key in _READ)
    if embeds is not None:
        if unread := [key for key in ("prompt", "prompt_token_ids", "multi_modal_data") if prompt.get(key)]:
            raise ValueError(f"prompt_embeds cannot be combined with {unread[0]}: give one of them")
        return PlainPrompt("", None, salt, embeds=prompt_embeds(embeds))
    media = beside_prompt(data or {})
    if text is not None and not isinstance(text, str):
        raise ValueError(f"a prompt's 'prompt' must be text, not {type(text).__name__}")
    if ids is not None:
        if media:
            raise ValueError("multi_modal_data requires a text prompt with placeholders")
        return PlainPrompt(_ids(ids), text, salt)
    if text is None:
        raise ValueError("a prompt that is a dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'")
    return PlainPrompt(text, text, salt, media, processor_kwargs)


def several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return `prompts`, a prompt or a sequence of prompts, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    found: list[Any] = list(prompts)
    return [found] if found and not isinstance(found[0], str | Iterable) else found


def _ids(ids: Iterable[Any]) -> list[list[int]]:
    return [[operator.index(token_id) for token_id in ids]]
