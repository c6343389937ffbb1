"""What a client of /v1/chat/completions, /v1/completions, /tokenize and /detokenize may send, field by field, with its limits.

A field is one line here. One that OpenAI or vLLM have and we do not yet stands in a refusal table with the values that ask for
nothing; every other value is refused by name (see `server.http.schema`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from server.api.openai.media_parts import AnyMediaPart
from server.http.errors import InvalidRequest, UnsupportedParameter
from server.http.schema import (
    CONSTRAINTS,
    INT64,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOPS,
    MAX_TOOLS,
    OTHER_LENGTHS,
    AnyText,
    CacheSalt,
    ConstrainedOutput,
    InputGrammar,
    JsonObject,
    Name,
    Priority,
    ReasoningEffort,
    RequestId,
    StopString,
    Timeout,
    TokenId,
    ToolName,
    Wire,
    asks_for_nothing,
)

MAX_N = 128
MAX_PROMPTS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk; together with include_usage
    include_obfuscation: Any = None


class NamedSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """`strict` changes nothing: a schema is always held to."""

    schema: dict[str, Any] | bool
    name: Name | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class StructuralTagFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"):
    """`format`, or `structures` with `triggers`, which is the older way to say it."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def check(self, where: str) -> None:
        if (self.format is None) == (self.structures is None):
            raise InvalidRequest("give either format or structures", param=f"{where}.format")
        if (self.triggers is None) != (self.structures is None):
            raise InvalidRequest("structures and triggers go together", param=f"{where}.triggers")


class ObjectFormat(JsonObject, kw_only=True, tag_field="type", tag="json_object"):
    """`value`: the object's schema, as clients of TGI send it, Hugging Face's InferenceClient among them."""

    value: dict[str, Any] | str | None = None


class JsonFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json"):
    """JSON of a schema, as TGI has it."""

    value: dict[str, Any] | str


class RegexFormat(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """Text that a regular expression matches, as TGI has it."""

    value: Annotated[str, Meta(min_length=1)]


ResponseFormat = AnyText | ObjectFormat | JsonFormat | RegexFormat | JsonSchemaFormat | StructuralTagFormat


class GenerationRequest(ConstrainedOutput, kw_only=True):
    """What /v1/chat/completions and /v1/completions share. None means "as the model or the route has it"."""

    model: Name | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    # vLLM takes any number above 0; outside these bounds logits overflow and the answer is noise.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None  # so many are generated, and the n likeliest returned
    use_beam_search: bool | None = None  # with best_of beams, n if not transcript
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None  # as transformers has it

    max_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None  # 0: the prompt is scored, nothing generated
    n_predict: Annotated[int, Meta(ge=-2, le=INT64)] | None = (
        None  # llama.cpp's name of it; below 0 all that the context holds
    )
    min_tokens: Annotated[int, Meta(ge=0, le=INT64)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    # Special tokens in messages or prompts are meant. None: as the server has it in messages, True in prompts.
    allow_special_tokens: bool | None = None
    # Keep that many of the prompt's tokens; -1: as many as the context holds beside max_tokens.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # which end goes; left if not transcript
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # In place of the most likely tokens, together with logprobs.
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = None
    return_tokens_as_token_ids: bool | None = (
        None  # "token_id:5" for the token's text, where log-probabilities are shown
    )

    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    request_id: RequestId | None = None  # in place of X-Request-Id, which wins
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    timeout: Timeout | None = None
    speculative: bool | None = None  # False: no token of it is guessed, where the server guesses

    # Harmless: they describe the caller and ask nothing of the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def echoes(self) -> bool:
        """The answer begins with the prompt's text."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to show with each token; None for no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives to compute for each token of the prompt; None for no log-probabilities of it."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Fields that contradict each other."""
        if self.max_tokens == 0 and self.num_prompt_logprobs is None and not self.echoes:
            raise InvalidRequest("max_tokens 0 asks for nothing without echo or prompt_logprobs", param="max_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.logprob_token_ids and self.num_logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if isinstance(self.response_format, StructuralTagFormat):
            self.response_format.check("response_format")
        self.check_constraints()
        if self.n_predict is not None and self.max_tokens not in (None, self.n_predict):
            raise InvalidRequest(
                "n_predict is another server's name of max_tokens; give one of them", param="n_predict"
            )
        self._check_candidates()
        self._check_truncation()
        self._check_stream_options()

    def _check_candidates(self) -> None:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of {self.best_of} is less than n {n}", param="best_of")
        if self.stream and (self.best_of or n) > n:
            raise InvalidRequest(
                "best_of cannot be streamed: which answers are the best is known at their end", param="best_of"
            )
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if not asks_for_nothing(getattr(self, name), (1.0, 1, False)):
                    raise InvalidRequest(f"{name} is only allowed when use_beam_search is true", param=name)
            return
        for name, idle in _NOT_WITH_BEAMS.items():
            if not asks_for_nothing(getattr(self, name), idle):
                raise InvalidRequest(f"{name} cannot be honoured by a beam search", param=name)
        if self.max_tokens == 0:
            raise InvalidRequest("a beam search needs a token to generate", param="max_tokens")

    def _check_truncation(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens 0 would leave no prompt", param="truncate_prompt_tokens")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")

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


class TextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """`cache_control`: prefixes are cached anyway."""

    text: str
    cache_control: Any = None


class InputTextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """As the Responses API has it."""

    text: str


class OutputTextPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


AnyTextPart = TextPart | InputTextPart | OutputTextPart | RefusalPart


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    arguments: str | dict[str, Any]  # OpenAI's is a string of JSON


class CalledCustom(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    input: str


class PastCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool call of an earlier turn, as it came with an answer: of a function, or of a custom tool."""

    id: Name
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: int | None = None  # of a streamed call, which some clients send back

    def check(self, where: str) -> None:
        other = "custom" if self.type == "function" else "function"
        if getattr(self, self.type) is None:
            raise InvalidRequest(f"Missing required parameter: {where}.{self.type}", param=f"{where}.{self.type}")
        if getattr(self, other) is not None:
            raise InvalidRequest(
                f"{where}.{other} is only allowed with type {other}, not {self.type}", param=f"{where}.{other}"
            )


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[AnyTextPart | AnyMediaPart] | None = None
    name: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: Name | None = None
    function_call: CalledFunction | None = None
    audio: Any = None
    annotations: Any = None
    provider_specific_fields: Any = (
        None  # LiteLLM's notes on an answer of ours, which it sends back; nothing for a prompt
    )

    def check(self, where: str) -> None:
        for name in ("audio", "annotations"):
            if getattr(self, name) not in (None, []):
                raise UnsupportedParameter(f"{where}.{name}")
        for name in ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise InvalidRequest(f"{where}.{name} is only allowed with role assistant", param=f"{where}.{name}")
        if self.role not in ("user", "tool") and isinstance(self.content, list):
            for number, part in enumerate(self.content):
                if isinstance(part, AnyMediaPart):
                    place, kind = f"{where}.content[{number}]", part.__struct_config__.tag
                    raise InvalidRequest(f"{place} of type {kind} is only allowed with role user or tool", param=place)
        for number, call in enumerate(self.tool_calls or []):
            call.check(f"{where}.tool_calls[{number}]")
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequest(f"{where}.tool_call_id is only allowed with role tool", param=f"{where}.tool_call_id")
        if self.tool_call_id is None and self.role == "tool":
            raise InvalidRequest(f"{where}.tool_call_id is missing: whose result is it?", param=f"{where}.tool_call_id")
        if self.name is None and self.role == "function":
            raise InvalidRequest(f"{where}.name is missing: whose result is it?", param=f"{where}.name")
        if self.content is None and not (self.tool_calls or self.function_call or self.refusal is not None):
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")


Messages = Annotated[list[Message], Meta(min_length=1)]


class FunctionSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments; None: there are none
    strict: bool | None = None  # calls keep to the schema


class Tool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionSpec

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def is_constrained(self) -> bool:
        return bool(self.function.strict)


class TextInput(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class Grammar(InputGrammar, kw_only=True, forbid_unknown_fields=True):
    pass


class GrammarInput(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    grammar: Grammar


class CustomSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class CustomTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    """Called with a text, not with arguments."""

    custom: CustomSpec

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def grammar(self) -> Grammar | None:
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarInput) else None

    @property
    def is_constrained(self) -> bool:
        return self.grammar is not None


class ToolRef(Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: ToolRef

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    custom: ToolRef

    @property
    def name(self) -> str:
        return self.custom.name


class Allowed(Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """The others may as well not be there."""

    allowed_tools: Allowed


Tools = Annotated[list[Tool | CustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools


def check_messages(
    messages: Sequence[Message] | None, *, continued: bool | None, add_generation_prompt: bool | None
) -> None:
    """Fields that contradict each other. `continued`: as continue_final_message has it."""
    if continued and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt contradict each other: either the last message goes on, or a "
            "new one begins",
            param="continue_final_message",
        )
    for index, message in enumerate(messages or []):
        message.check(f"messages[{index}]")


class Prediction(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # None: auto, if there are tools
    parallel_tool_calls: bool | None = None  # False: at most one call
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer goes on in the last message, the assistant's
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=INT64)] | None = None  # then reasoning is ended; -1: never
    include_reasoning: bool | None = None  # False: it is counted, and not shown
    max_completion_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None  # what the answer may be like: it comes sooner where it is

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def check(self) -> None:
        super().check()
        check_messages(
            self.messages, continued=self.continue_final_message, add_generation_prompt=self.add_generation_prompt
        )
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
                raise InvalidRequest(f"{name} cannot be honoured by a beam search", param=name)


class CompletionRequest(GenerationRequest, kw_only=True):
    # One msgspec union cannot hold two list types, so a list is sorted out by `prompts`.
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)] | None = None
    prompt_embeds: str | None = None  # in its place: base64 of a safetensors file
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # what follows the answer, for models that fill in the middle

    def check(self) -> None:
        super().check()
        if self.prompt_embeds is not None:
            for name in ("prompt", "suffix", "echo", "prompt_logprobs", "truncate_prompt_tokens"):
                if getattr(self, name) not in (None, "", False):
                    raise InvalidRequest(
                        f"{name} and prompt_embeds contradict each other: nobody can read these", param=name
                    )
        elif self.prompt is None:
            raise InvalidRequest("Missing required parameter: prompt", param="prompt")
        if self.suffix and self.echo:
            raise InvalidRequest(
                "echo and suffix contradict each other: an answer in the middle repeats no prompt", param="echo"
            )

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
        """One entry per prompt, as text or as token ids."""
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


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`, the latter with what makes a prompt of them in a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    add_special_tokens: bool | None = None
    allow_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        check_messages(
            self.messages, continued=self.continue_final_message, add_generation_prompt=self.add_generation_prompt
        )


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
