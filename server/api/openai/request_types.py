"""Request types of /v1/chat/completions, /v1/completions, /tokenize and /detokenize, with the limits of each field.

A table lists each unsupported field of OpenAI or vLLM with the values that have no effect. Other values are rejected by name
(see `server.http.schema`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from server.api.openai.conversation_types import ConversationFields, Messages, TextPart
from server.http.errors import InvalidRequest, UnsupportedParameter
from server.http.schema import (
    CONSTRAINTS,
    INT64,
    MAX_LOGPROBS,
    OTHER_LENGTHS,
    AnyText,
    ConstrainedOutput,
    JsonObject,
    Name,
    RequestId,
    TokenId,
    Wire,
    asks_for_nothing,
)
from server.http.wire_fields import CallerFields, ReasoningFields, Sampling, TermFields, TextFields, TruncationFields

MAX_N = 128
MAX_PROMPTS = 1024


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk; together with include_usage
    include_obfuscation: Any = None


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """Named JSON schema. `strict` has no effect, because schemas are always enforced."""

    schema: dict[str, Any] | bool
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class StructuralTagFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"):
    """Response format "structural_tag": `format`, or the older `structures` with `triggers`."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def check(self, where: str) -> None:
        if (self.format is None) == (self.structures is None):
            raise InvalidRequest("give either format or structures", param=f"{where}.format")
        if (self.triggers is None) != (self.structures is None):
            raise InvalidRequest("structures and triggers go together", param=f"{where}.triggers")


class ObjectFormat(JsonObject, kw_only=True, tag_field="type", tag="json_object"):
    """Response format "json_object". `value`: JSON schema, as sent by TGI's clients such as Hugging Face's InferenceClient."""

    value: dict[str, Any] | str | None = None


class JsonFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json"):
    """TGI's response format for JSON that matches a schema."""

    value: dict[str, Any] | str


class RegexFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """TGI's response format for text that matches a regular expression."""

    value: Annotated[str, Meta(min_length=1)]


ResponseFormat = AnyText | ObjectFormat | JsonFormat | RegexFormat | JsonSchemaFormat | StructuralTagFormat


class GenerationRequest(
    Sampling, TextFields, ConstrainedOutput, TruncationFields, TermFields, CallerFields, kw_only=True
):
    """Fields shared by /v1/chat/completions and /v1/completions. None means the default of the model or the route."""

    model: Name | None = None

    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None  # so many are generated, and the n likeliest returned
    use_beam_search: bool | None = None  # with best_of beams, or n if that is not given
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None  # as transformers has it

    max_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None  # 0: the prompt is scored, nothing generated
    # llama.cpp's name of max_tokens; below 0 all that the context holds.
    n_predict: Annotated[int, Meta(ge=-2, le=INT64)] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # "token_id:5" for the token's text, where log-probabilities are shown.
    return_tokens_as_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    request_id: RequestId | None = None  # in place of X-Request-Id, which wins
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None

    @property
    def echoes(self) -> bool:
        """True if the answer begins with the prompt's text."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token, or None for no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token, or None for no log-probabilities."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        if self.max_tokens == 0 and self.num_prompt_logprobs is None and not self.echoes:
            raise InvalidRequest("max_tokens 0 requires echo or prompt_logprobs", param="max_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.logprob_token_ids and self.num_logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if isinstance(self.response_format, StructuralTagFormat):
            self.response_format.check("response_format")
        self.check_constraints()
        if self.n_predict is not None and self.max_tokens not in (None, self.n_predict):
            raise InvalidRequest("n_predict is llama.cpp's name of max_tokens; set only one of them", param="n_predict")
        self._check_candidates()
        if self.truncation_side is not None or self.truncate_prompt_tokens == 0:
            self.check_truncation()
        self._check_stream_options()

    def _check_candidates(self) -> None:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of {self.best_of} is less than n {n}", param="best_of")
        if self.stream and (self.best_of or n) > n:
            raise InvalidRequest(
                "best_of cannot be streamed: answers are ranked after they are complete", param="best_of"
            )
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if not asks_for_nothing(getattr(self, name), (1.0, 1, False)):
                    raise InvalidRequest(f"{name} is only allowed when use_beam_search is true", param=name)
            return
        for name, idle in _NOT_WITH_BEAMS.items():
            if not asks_for_nothing(getattr(self, name), idle):
                raise InvalidRequest(f"{name} is not supported with use_beam_search", param=name)
        if self.max_tokens == 0:
            raise InvalidRequest("a beam search requires max_tokens of at least 1", param="max_tokens")

    def _check_stream_options(self) -> None:
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if options.continuous_usage_stats and not options.include_usage:
            raise InvalidRequest(
                "continuous_usage_stats is only allowed when include_usage is true",
                param="stream_options.continuous_usage_stats",
            )
        if options.include_obfuscation not in (None, False):
            raise UnsupportedParameter("stream_options.include_obfuscation")


class Prediction(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, ConversationFields, ReasoningFields, kw_only=True):
    messages: Messages
    parallel_tool_calls: bool | None = None  # False: at most one call
    max_completion_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None  # what the answer may be like: it comes sooner where it is

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def check(self) -> None:
        super().check()
        self.check_messages(self.messages)
        self._check_beams()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidRequest(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) contradict "
                "each other; max_tokens is the older name",
                param="max_tokens",
            )

    def _check_beams(self) -> None:
        fields = {
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
            "tools": self.tool_choice != "none" and any(tool.is_constrained for tool in self.tools or []),
            "thinking_token_budget": self.thinking_token_budget not in (None, -1),
        }
        for name in fields:
            if self.use_beam_search and fields[name]:
                raise InvalidRequest(f"{name} is not supported with use_beam_search", param=name)


class CompletionRequest(GenerationRequest, kw_only=True):
    # One msgspec union cannot hold two list types, so a list is sorted out by `prompts`.
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    prompt_embeds: str | None = None  # in its place: base64 of a safetensors file
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # what follows the answer, for models that fill in the middle
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None  # those in prompts are meant; None: True

    def check(self) -> None:
        super().check()
        if self.prompt_embeds is not None:
            for name in ("prompt", "suffix", "echo", "prompt_logprobs", "truncate_prompt_tokens"):
                if getattr(self, name) not in (None, "", False):
                    raise InvalidRequest(
                        f"{name} and prompt_embeds contradict each other: embeddings have no text", param=name
                    )
        elif self.prompt is None:
            raise InvalidRequest("Missing required parameter: prompt", param="prompt")
        if self.suffix and self.echo:
            raise InvalidRequest("echo and suffix contradict each other; set one of them", param="echo")

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(wanted, default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Each is a text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        assert self.prompt is not None, "there are embeddings in its place"
        kinds = {type(item) for item in self.prompt}
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes strings and token ids", param="prompt")
        if kinds == {int}:
            return [cast("list[int]", self.prompt)]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"{len(self.prompt)} prompts; at most {MAX_PROMPTS} in one request", param="prompt")
        return cast("list[str | list[int]]", self.prompt)


class TokenizeRequest(ConversationFields, kw_only=True):
    """Body of /tokenize: either `prompt`, or `messages` with the fields that control how they are rendered."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        self.check_messages(self.messages or ())


class DetokenizeRequest(Struct, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]

    def check(self) -> None:
        pass


# --- known and not implemented ------------------------------------------------------------------------------------

# Field: the values that ask for nothing. Null always asks for nothing.
_REFUSED_BY_BOTH: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(OTHER_LENGTHS, ()),
    "guided_decoding_backend": ("auto", "guidance"),
    "store": (False,),
    "prompt_cache_retention": (),
    "spaces_between_special_tokens": (True,),
    "repetition_detection": (),
    "watermarking": (),
    "session_id": (),
    "return_prompt_text": (False,),
    "return_weight_versions": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "stream_interval": (1,),
}
_REFUSED_BY_CHAT: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "echo": (False,),
    "functions": (),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
}
_REFUSED_BY_COMPLETIONS: dict[str, tuple[Any, ...]] = _REFUSED_BY_BOTH | {
    "max_completion_tokens": (),
    "prediction": (),
}
_REFUSED_BY_TOKENIZE: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "media_io_kwargs": (),
}
# A beam search looks at the likeliest answers as the model has them, and draws nothing.
_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stop": ([],),
    "temperature": (0, 0.0, 1, 1.0),
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "response_format": (AnyText(),),
    **dict.fromkeys(CONSTRAINTS, ()),
}


# Of the above, what may as well be left undone if the client is told: nothing of the answer changes.
_MAY_BE_IGNORED = frozenset({
    "store", "prediction", "prompt_cache_retention", "session_id", "verbosity", "web_search_options",
})  # fmt: skip
# What to use instead of what OpenAI itself has replaced.
_REPLACED = {"functions": "tools", "function_call": "tool_choice", **dict.fromkeys(OTHER_LENGTHS, "max_tokens")}


CHAT: Wire[ChatRequest] = Wire(ChatRequest, _REFUSED_BY_CHAT, _MAY_BE_IGNORED, _REPLACED)
COMPLETION: Wire[CompletionRequest] = Wire(CompletionRequest, _REFUSED_BY_COMPLETIONS, _MAY_BE_IGNORED, _REPLACED)
TOKENIZE: Wire[TokenizeRequest] = Wire(TokenizeRequest, _REFUSED_BY_TOKENIZE, _MAY_BE_IGNORED, _REPLACED)
DETOKENIZE: Wire[DetokenizeRequest] = Wire(DetokenizeRequest, {})
