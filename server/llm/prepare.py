"""Preparation of prompts and conversations, and SamplingParams, checked as the fields of the HTTP API."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from server.api.openai import request_types, requests
from server.config.option import did_you_mean
from server.generate.request import Chat, GenerateRequest, Texts, TextWithMedia
from server.http.errors import ApiError
from server.http.wire_fields import Sampling, TextFields, TruncationFields
from server.llm.lora_request import LoRARequest
from server.llm.media import Objects
from server.llm.prompts import Prompt, as_value_error, decoded, plain

Conversation = Sequence[Mapping[str, Any]]

# The wire's fields that say how tokens are chosen and where text ends: the others are about HTTP, or change an answer's form.
SAMPLING_FIELDS = (
    *Sampling.__struct_fields__, *TextFields.__struct_fields__, *TruncationFields.__struct_fields__,
    "n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "max_tokens", "add_special_tokens", "priority",
    "cache_salt", "speculative", "logprobs", "prompt_logprobs", "response_format", "structured_outputs",
)  # fmt: skip
# Those that say what a prompt is made of beside messages, and what may be in an answer.
CHAT_FIELDS = (
    "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "documents", "reasoning_effort", "include_reasoning", "thinking_token_budget", "prediction",
)  # fmt: skip


class SamplingParams:
    """Parameters of sampling: the fields of the HTTP API, with the same names and limits.

    Defaults are those of the model's authors; `max_tokens` is 16 for `generate` and the rest of the context for `chat`.
    Raises ValueError naming the field."""

    __slots__ = ("fields",)
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in SAMPLING_FIELDS]
    )

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            if name not in SAMPLING_FIELDS:
                raise ValueError(f"SamplingParams has no field {name!r}{did_you_mean(name, SAMPLING_FIELDS)}")
            _check_finite(name, value)
        self.fields: Mapping[str, Any] = {name: value for name, value in fields.items() if value is not None}
        decoded(request_types.COMPLETION, {"prompt": "", **self.fields})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self.fields == other.fields

    __hash__ = None  # type: ignore[assignment]  # logit_bias is a dict

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


def check_chat_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in CHAT_FIELDS:
            raise ValueError(f"chat has no option {name!r}{did_you_mean(name, CHAT_FIELDS)}")


def _check_finite(name: str, value: Any) -> None:
    """JSON, in which the rules are written, has no word for these."""
    for number in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(number, float) and not abs(number) < float("inf"):
            raise ValueError(f"Invalid {name!r}: {number} is not a finite number")


@contextlib.contextmanager
def naming(param: str, number: int, total: int) -> Iterator[None]:
    """A complaint inside the block tells which of `total` prompts it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{param} {number}: {error}" if total > 1 else str(error)) from None


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt or conversation, checked. `text`: the prompt as given, where it was text. `lora`: with which adapter, if any."""

    request: GenerateRequest
    text: str | None
    lora: LoRARequest | None = None

    @property
    def param(self) -> str:
        return self.request.prompt.field


def of_prompt(prompt: Prompt, params: SamplingParams, lora: LoRARequest | None = None) -> Prepared:
    found = plain(prompt)
    salt = {} if found.cache_salt is None else {"cache_salt": found.cache_salt}
    asked = {"prompt": found.given} if found.embeds is None else {"prompt_embeds": found.embeds}
    request = requests.of_completion(decoded(request_types.COMPLETION, {**asked, **params.fields, **salt}))
    if found.media:
        assert isinstance(request.prompt, Texts), "a prompt by itself"
        assert found.text is not None, "placeholders are text"
        special = request.prompt.add_special_tokens
        request = replace(
            request, prompt=TextWithMedia(found.text, found.media, found.processor_kwargs, add_special_tokens=special)
        )
    return Prepared(request, found.text, lora)


def of_conversation(
    messages: Conversation, params: SamplingParams, options: Mapping[str, Any], lora: LoRARequest | None = None
) -> Prepared:
    objects = Objects()
    body = {
        "messages": objects.taken(messages),
        **{name: value for name, value in options.items() if value is not None},
    }
    fields = dict(params.fields)
    if "logprobs" in fields:  # a chat has its own names for it
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    given = decoded(request_types.CHAT, {**body, **fields})
    try:
        request = requests.of_chat(given)
    except ApiError as error:
        raise as_value_error(error) from None
    assert isinstance(request.prompt, Chat), "it was made here"
    objects.put_back(request.prompt.messages)
    return Prepared(request, None, lora)


def conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    conversations: list[Any] = list(given)
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise ValueError(f"sampling_params: {len(params)} for {num} prompts; give one for all or one for each")
    return list(params)
