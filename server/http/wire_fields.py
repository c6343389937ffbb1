"""Request fields shared by APIs, declared once as mixins of wire types.

A sampling field of a mixin is part of every API that uses the mixin, and of `LLM`'s SamplingParams. It is passed to the engine
if the engine's SamplingParams have a field of that name (`generate/sampling.py`). There is no other list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from server.http.errors import InvalidRequest
from server.http.schema import INT64, MAX_BIASES, MAX_STOPS, CacheSalt, Priority, StopString, Timeout, TokenId

MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_REPEAT_STOPS = 64

RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]  # outside of it logits overflow; vLLM takes any above 0
_Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
_MoreStops = StopString | Annotated[list[StopString], Meta(max_length=MAX_REPEAT_STOPS)]


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the strings of a field that accepts a string or a list of strings."""
    return (given,) if isinstance(given, str) else tuple(given or ())


class WireType(msgspec.StructMeta):
    """Metaclass of wire types, which lets a type inherit fields from several bases. msgspec itself allows only one.

    The first base stays a base class. Fields and methods of other bases are copied; these methods must not call `super()`."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> WireType:
        copied: dict[str, Any] = {"__annotations__": {}}
        for mixin in bases[1:]:
            for info in msgspec.structs.fields(mixin):
                copied["__annotations__"][info.name] = info.type
                copied[info.name] = field(name=info.encode_name, default=info.default)
            copied |= {
                attribute: value
                for base in reversed(mixin.__mro__[:-2])
                for attribute, value in vars(base).items()
                if not attribute.startswith("__") and attribute not in copied["__annotations__"]
            }
        annotations = copied["__annotations__"] | namespace.get("__annotations__", {})
        return super().__new__(mcls, name, bases[:1], {**copied, **namespace, "__annotations__": annotations}, **config)


# --- sampling -----------------------------------------------------------------------------------------------------


class AdvisedFields(Struct, kw_only=True, metaclass=WireType):
    """Sampling fields whose default value can come from the model's generation_config.json."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None


class DrawFields(AdvisedFields, kw_only=True):
    """Sampling fields whose default does not depend on the model: penalties and seed."""

    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None  # -1: none


class SamplingFields(DrawFields, kw_only=True):
    """Fields that bias logits or end the output: logit_bias and stop tokens."""

    # By token id, as JSON has keys.
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None


class Sampling(SamplingFields, kw_only=True):
    """All sampling fields of a request. Token ids and counts are checked against the model later."""

    min_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    # In place of the most likely tokens, together with logprobs.
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None


class RepeatFields(DrawFields, kw_only=True):
    """Sampling fields under the names of llama.cpp and Ollama."""

    repetition_penalty: RepetitionPenalty | None = field(name="repeat_penalty", default=None)
    repeat_last_n: Annotated[int, Meta(ge=-1, le=INT64)] | None = None  # 0: no penalty; -1: of all tokens
    stop: _MoreStops | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return _texts(self.stop)

    def penalty(self, ignored: list[str], name: str) -> float | None:
        """Return the repetition penalty, for all tokens. If the request sets a different window, append `name` to `ignored`."""
        if self.repeat_last_n == 0:
            return None if self.repetition_penalty is None else 1.0
        if self.repeat_last_n not in (None, -1) and self.repetition_penalty not in (None, 1):
            ignored.append(name)
        return self.repetition_penalty


_NAMES = frozenset(Sampling.__struct_fields__)


def sampling_of(wire: DrawFields, **changes: Any) -> Sampling:
    """Return a Sampling with all sampling fields of `wire`. `changes`: fields that get other values."""
    return Sampling(**{name: getattr(wire, name) for name in wire.__struct_fields__ if name in _NAMES} | changes)


# --- text and terms -----------------------------------------------------------------------------------------------


class TextFields(Struct, kw_only=True, metaclass=WireType):
    """Fields of stop strings, and of the text that is returned."""

    stop: _Stops | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return _texts(self.stop)


class TruncationFields(Struct, kw_only=True, metaclass=WireType):
    """Fields that set how a long prompt is truncated."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64)] | None = None  # -1: as many as the context holds
    truncation_side: Literal["left", "right"] | None = None  # the end that is cut off

    def check_truncation(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens 0 would leave no prompt", param="truncate_prompt_tokens")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")


class QueueFields(Struct, kw_only=True, metaclass=WireType):
    """Fields that set priority, deadline and cache salt of a request."""

    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    timeout: Timeout | None = None

    @property
    def queue_terms(self) -> dict[str, Any]:
        """Return these fields under the names that GenerateRequest uses."""
        return {"priority": self.priority or 0, "cache_salt": self.cache_salt, "timeout_s": self.timeout}


class TermFields(QueueFields, kw_only=True):
    """Fields that change how the engine runs a request, but not the answer."""

    speculative: bool | None = None  # False: the server does not draft tokens of this answer

    @property
    def terms(self) -> dict[str, Any]:
        """Return these fields and those of QueueFields under the names that GenerateRequest uses."""
        return {**self.queue_terms, "speculative": self.speculative is not False}


class CallerFields(Struct, kw_only=True, metaclass=WireType):
    """Fields that identify the caller and have no effect on the answer."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TemplateFields(Struct, kw_only=True, metaclass=WireType):
    """Fields that control the rendering of a conversation, for every API with messages."""

    chat_template_kwargs: dict[str, Any] | None = None
    allow_special_tokens: bool | None = None  # in what the client wrote; None: as the server has it


class ReasoningFields(Struct, kw_only=True, metaclass=WireType):
    """Fields that limit reasoning, and that show or hide it."""

    thinking_token_budget: Annotated[int, Meta(ge=-1, le=INT64)] | None = None  # then reasoning is ended; -1: never
    include_reasoning: bool | None = None  # False: it is counted, and not shown
