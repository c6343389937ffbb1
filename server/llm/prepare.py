"""Preparation of prompts and conversations, and SamplingParams. All are checked like the fields of the HTTP API."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from server.api.openai import request_types, requests
from server.config.option import did_you_mean
from server.generate.request import Chat, GenerateRequest, Texts, TextWithMedia
from server.http.errors import ApiError
from server.http.schema import StructuredOutputs
from server.http.wire_fields import Sampling, TextFields, TruncationFields
from server.llm.lora_request import LoRARequest
from server.llm.media import Objects
from server.llm.outputs import RequestOutputKind
from server.llm.prompts import Prompt, as_value_error, decoded, plain

Conversation = Sequence[Mapping[str, Any]]
StructuredOutputsParams = StructuredOutputs  # vLLM's name

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


# Fields of vLLM's SamplingParams that are none of the wire: what they may be, and why not something else.
_VLLM_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "guided_decoding": ((), "its name is structured_outputs"),
    "logits_processors": (
        (),
        "no Python function sees logits; logit_bias, bad_words and structured_outputs restrict tokens",
    ),
    "detokenize": ((True,), "an answer is always text"),
    "extra_args": (({},), "there is no plugin here that reads them"),
    "skip_clone": ((True, False), ""),
}


class SamplingParams:
    """Parameters of sampling: the fields of the HTTP API, with the same names and limits. Attributes can be read and set.

    The model provides the defaults. `max_tokens` is 16 by default for `generate`. For `chat`, or if set to None, it is the rest
    of the context. `output_kind`: kind of the outputs of an iteration; None uses the method's default. Raises ValueError that
    names the field."""

    __slots__ = ("fields", "fills_context", "output_kind")
    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in (*SAMPLING_FIELDS, "output_kind")
        ]
    )

    def __init__(self, *, output_kind: RequestOutputKind | None = None, **fields: Any) -> None:
        self._set(fields, output_kind)

    def _set(self, given: Mapping[str, Any], output_kind: RequestOutputKind | None) -> None:
        for name, value in given.items():
            if name not in SAMPLING_FIELDS and not _is_default(name, value):
                raise ValueError(f"SamplingParams has no field {name!r}{did_you_mean(name, SAMPLING_FIELDS)}")
            _check_finite(name, value)
        fields = {name: value for name, value in given.items() if value is not None and name in SAMPLING_FIELDS}
        decoded(request_types.COMPLETION, {"prompt": "", **fields})
        fills_context = given.get("max_tokens", 0) is None
        for name, value in {"fields": fields, "output_kind": output_kind, "fills_context": fills_context}.items():
            object.__setattr__(self, name, value)

    @property
    def _given(self) -> dict[str, Any]:
        return {**({"max_tokens": None} if self.fills_context else {}), **self.fields}

    def __getattr__(self, name: str) -> Any:
        """Return the value with which the field `name` was set. If it was not set, return 1 for `n`, else None, which means the
        model's default."""
        if name not in SAMPLING_FIELDS:
            raise AttributeError(f"SamplingParams has no field {name!r}{did_you_mean(name, SAMPLING_FIELDS)}")
        return self.fields.get(name, 1 if name == "n" else None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "output_kind":
            object.__setattr__(self, name, value)
        else:
            self._set({**self._given, name: value}, self.output_kind)

    def clone(self) -> SamplingParams:
        """Return an independent copy of the parameters."""
        return copy.deepcopy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _sampling_params, (self._given, self.output_kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return self._given == other._given and self.output_kind is other.output_kind

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


def _sampling_params(fields: Mapping[str, Any], output_kind: RequestOutputKind | None) -> SamplingParams:
    return SamplingParams(output_kind=output_kind, **fields)


def _is_default(name: str, value: Any) -> bool:
    """Return whether `name` is a field of vLLM of which only one value is supported. Raises ValueError for any other value."""
    if name not in _VLLM_FIELDS:
        return False
    allowed, why = _VLLM_FIELDS[name]
    if value is not None and value not in allowed:
        raise ValueError(f"SamplingParams: {name}={value!r} is not supported: {why}")
    return True


def check_chat_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in CHAT_FIELDS:
            raise ValueError(f"chat has no option {name!r}{did_you_mean(name, CHAT_FIELDS)}")


def _check_finite(name: str, value: Any) -> None:
    """Raise ValueError for infinity or NaN, which JSON cannot express. `name`: field name in the error."""
    for number in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(number, float) and not abs(number) < float("inf"):
            raise ValueError(f"Invalid {name!r}: {number} is not a finite number")


@contextlib.contextmanager
def naming(param: str, number: int, total: int) -> Iterator[None]:
    """Context that adds the number of a prompt, out of `total`, to errors raised in it. `param`: name of the prompts."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{param} {number}: {error}" if total > 1 else str(error)) from None


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """Checked prompt or conversation. `text`: the prompt, if it is text. `lora`: its adapter, if any. `chat_template`: template
    that replaces the model's."""

    request: GenerateRequest
    text: str | None
    lora: LoRARequest | None = None
    chat_template: str | None = None

    @property
    def param(self) -> str:
        return self.request.prompt.field


def of_prompt(prompt: Prompt, params: SamplingParams, lora: LoRARequest | None = None) -> PreparedInput:
    found = plain(prompt)
    salt = {} if found.cache_salt is None else {"cache_salt": found.cache_salt}
    asked = {"prompt": found.given} if found.embeds is None else {"prompt_embeds": found.embeds}
    request = requests.of_completion(decoded(request_types.COMPLETION, {**asked, **params.fields, **salt}))
    if params.fills_context:
        request = replace(request, default_max_tokens=None)
    if found.media:
        assert isinstance(request.prompt, Texts), "a prompt by itself"
        assert found.text is not None, "placeholders are text"
        special = request.prompt.add_special_tokens
        request = replace(
            request, prompt=TextWithMedia(found.text, found.media, found.processor_kwargs, add_special_tokens=special)
        )
    return PreparedInput(request, found.text, lora)


def of_conversation(
    messages: Conversation, params: SamplingParams, options: Mapping[str, Any], lora: LoRARequest | None = None,
    chat_template: str | None = None,
) -> PreparedInput:  # fmt: skip
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
    return PreparedInput(request, None, lora, chat_template)


def conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    conversations: list[Any] = list(given)
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise ValueError(f"sampling_params: {len(params)} for {num} prompts; give one for all or one for each")
    return list(params)
