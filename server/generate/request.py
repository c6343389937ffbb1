"""Generation request in a neutral form, to which every API converts its own request.

Checks that depend on the loaded model are in `start`. None means the default of the model or the server. Error messages use
these field names, which are vLLM's. An API with other field names maps them (`server.http.errors`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, structs

from server.generate.beams import BeamParams
from server.generate.structured.grammar import ANY_OBJECT, Alternatives, JsonSchema, Regex, Rules, Whitespace
from server.generate.structured.tags import StructuralTag
from server.http.errors import Field, InvalidRequest, clip
from server.http.schema import StructuredOutputs
from server.http.wire_fields import Sampling
from server.media.part import MediaPart
from server.models.model import Constraint
from server.models.prompt import ChatTemplate

MESSAGES, TOOLS, TOOL_CHOICE, CONTINUE = map(Field, ("messages", "tools", "tool_choice", "continue_final_message"))
PROMPT = Field("prompt")


class Prompt(Struct, frozen=True):
    """Base class of prompts: Chat, Texts, TextWithMedia, Embeds and Infill."""

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def field(self) -> Field:
        """Name of the request field that contains the prompt."""
        return PROMPT

    def text_of(self, number: int) -> str | None:
        """Return prompt `number` as the client's text, or None if it was not plain text."""
        return None


# --- a conversation -----------------------------------------------------------------------------------------------


class PastToolCall(Struct):
    """Tool call in an earlier message. `arguments`: a JSON object, or its text."""

    id: str
    name: str
    arguments: str | dict[str, Any]


Content = str | list[str | MediaPart]  # a text, or parts, of which those that are texts are just that


class ChatMessage(Struct, kw_only=True):
    """Message of a conversation. `name`: name of the author or, in a tool result, of the function. `tool_call_id`: in a tool
    result, id of the call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[PastToolCall] = ()
    tool_call_id: str | None = None


class ToolFunction(Struct, frozen=True):
    """Function that the model may call. `parameters`: JSON schema of the arguments. `strict`: calls must match the schema.
    `input_grammar`: grammar of the argument `input`, for custom tools."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    input_grammar: Regex | Rules | None = None


class OnlyFunction(Struct, frozen=True):
    """Tool choice that forces a call of the function `name`."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | OnlyFunction


class Chat(Prompt, frozen=True, kw_only=True):
    """Conversation as a prompt. `template_kwargs`: additional variables of the chat template."""

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolFunction] = ()
    tool_choice: ToolChoice | None = None  # None: auto, if there are tools
    parallel_tool_calls: bool = True  # False: at most one call
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on in the last message, the assistant's
    template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    processor_kwargs: Mapping[str, Any] | None = None  # how its media are processed, over the operator's
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool = False
    allow_special_tokens: bool | None = None  # those in what the client wrote; None: as the server has it

    def __post_init__(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        if self.continue_final_message and (self.messages[-1].role != "assistant" or self.messages[-1].tool_calls):
            raise InvalidRequest(CONTINUE, " needs a last message of the assistant, without tool calls", param=CONTINUE)
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest(f"there are two tools named {twice!r}", param=TOOLS)
        if self.tool_choice not in (None, "none") and not names:
            raise InvalidRequest(TOOL_CHOICE, " is only allowed when there are ", TOOLS, param=TOOL_CHOICE)
        if isinstance(self.tool_choice, OnlyFunction) and (named := self.tool_choice.name) not in names:
            raise InvalidRequest(TOOL_CHOICE, f" names {clip(named)!r}, which is not in ", TOOLS, param=TOOL_CHOICE)

    @property
    def field(self) -> Field:
        return MESSAGES

    @property
    def media(self) -> list[MediaPart]:
        """Media parts of all messages, in order."""
        lists = [message.content for message in self.messages if isinstance(message.content, list)]
        return [part for parts in lists for part in parts if isinstance(part, MediaPart)]

    @property
    def shown_tools(self) -> Sequence[ToolFunction]:
        """Functions that are described in the prompt."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """True if the answer must consist of tool calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, OnlyFunction)

    @property
    def callable_functions(self) -> Sequence[ToolFunction]:
        """Functions that the answer may call."""
        if isinstance(self.tool_choice, OnlyFunction):
            return [tool for tool in self.tools if tool.name == self.tool_choice.name]
        return self.shown_tools


class Thinking(NamedTuple):
    """Reasoning options, for APIs with a switch for reasoning. `switches`: variables of the chat template."""

    switches: Mapping[str, bool] = {}
    effort: str | None = None
    budget: int | None = None  # tokens of reasoning; 0 ends it as it begins, where the template has no switch
    shown: bool = True

    @classmethod
    def switched(cls, template: ChatTemplate, is_on: bool, *, with_tools: bool, budget: int | None = None) -> Thinking:
        """Return options that turn reasoning on or off with the template's variables. `budget`: maximum number of reasoning
        tokens."""
        switches = template.switches(is_on, with_tools=with_tools)
        return cls(switches, budget=budget if is_on else None if switches else 0, shown=is_on)


# --- plain prompts ------------------------------------------------------------------------------------------------


class Texts(Prompt, frozen=True):
    """One or more independent prompts. Each is a text or a list of token ids."""

    prompts: Sequence[str | list[int]]
    add_special_tokens: bool = True
    allow_special_tokens: bool = True  # False: in prompts they are text

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def text_of(self, number: int) -> str | None:
        given = self.prompts[number]
        return given if isinstance(given, str) else None


class TextWithMedia(Prompt, frozen=True):
    """Text prompt with one placeholder for each item in `media`."""

    text: str
    media: Sequence[MediaPart]
    processor_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool = True

    def text_of(self, number: int) -> str | None:
        return self.text


class Embeds(Prompt, frozen=True):
    """Prompt that consists of precomputed embeddings, in a safetensors file."""

    part: MediaPart


class Infill(Prompt, frozen=True):
    """Fill-in-the-middle prompts: the model writes the text between a prefix and `suffix`. `prefixes`: one text or id list per
    prompt. `extra`: (name, text) of further files. `middle`: beginning of the answer."""

    prefixes: Sequence[str | list[int]]
    suffix: str
    extra: Sequence[tuple[str, str]] = ()
    middle: str = ""

    @property
    def num_prompts(self) -> int:
        return len(self.prefixes)


# --- how ----------------------------------------------------------------------------------------------------------


class Shown(Struct, frozen=True, kw_only=True):
    """Options for the contents and end of an answer. `logprobs`, `prompt_logprobs`: number of alternatives per token, or None
    for no log-probabilities."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    reasoning: bool = True  # False: it is counted, and not shown
    token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False  # "token_id:5" for the token's text
    echo: bool = False  # the answer begins with the prompt


class OutputConstraint(NamedTuple):
    """Constraint on an answer's text. `param`: name of the request field that sets it."""

    grammar: Constraint
    param: str


class Truncation(Struct, frozen=True):
    """Truncation of a prompt to `num_tokens` tokens; -1 means the context minus the answer. `side`: the side that is removed."""

    num_tokens: int
    side: Literal["left", "right"] = "left"


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Generation request of any API. `n`: number of answers per prompt. `best_of`: number of generated answers, of which the `n`
    most likely are returned. `max_tokens`: the client's limit. `default_max_tokens`: limit if `max_tokens` is None, cut to the
    context; None allows the whole context."""

    prompt: Prompt
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    shown: Shown = msgspec.field(default_factory=Shown)
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    n: int = 1
    best_of: int | None = None
    beams: BeamParams | None = None  # answers are found by beam search
    constraint: OutputConstraint | None = None  # what the text of an answer has to look like
    thinking_token_budget: int | None = None  # then reasoning is ended; None or -1: never
    truncation: Truncation | None = None
    stream: bool = False
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    timeout_s: float | None = None  # for the whole answer, from the request's arrival on
    speculative: bool = True  # its tokens may be guessed, and checked
    prediction: str | None = None  # what the answers may be like

    @property
    def num_candidates(self) -> int:
        """Number of generated answers per prompt."""
        return self.best_of or self.n

    @property
    def candidates_field(self) -> Field:
        """Name of the request field that sets `num_candidates`."""
        return Field("best_of" if self.best_of else "n")

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token, or None. With an echo, it is at least the number for answer tokens."""
        shown = self.shown
        wanted = [
            count for count in (shown.prompt_logprobs, shown.logprobs if shown.echo else None) if count is not None
        ]
        return max(wanted, default=None)


# --- output constraints -------------------------------------------------------------------------------------------


def json_schema(schema: Any, param: str) -> OutputConstraint:
    """Return a constraint to JSON that matches `schema`. `schema`: an object or its JSON text."""
    return OutputConstraint(JsonSchema(schema), param)


def json_object(param: str) -> OutputConstraint:
    """Return a constraint to any JSON object."""
    return OutputConstraint(ANY_OBJECT, param)


def regex(pattern: str, param: str) -> OutputConstraint:
    """Return a constraint to text that matches `pattern`."""
    return OutputConstraint(Regex(pattern), param)


def rules(text: str, param: str) -> OutputConstraint:
    """Return a constraint to texts of the grammar `text`, in Lark or GBNF syntax."""
    return OutputConstraint(Rules(text), param)


def structural_tag(tag: Mapping[str, Any], param: str) -> OutputConstraint:
    """Return a constraint to texts that match `tag`, a structural tag in xgrammar's format."""
    return OutputConstraint(StructuralTag(tag), param)


def _grammar_of(wanted: StructuredOutputs) -> Constraint:
    """Return the grammar that the checked request fields `wanted` define."""
    whitespace, closed = _whitespace(wanted), wanted.disable_additional_properties is not False
    if wanted.regex is not None:
        return Regex(wanted.regex)
    if wanted.choice is not None:
        return Alternatives(tuple(wanted.choice))
    if wanted.grammar is not None:
        return Rules(wanted.grammar)
    if wanted.structural_tag is not None:
        return StructuralTag(wanted.structural_tag, whitespace, wanted.whitespace_pattern, closed)
    schema = ANY_OBJECT.schema if wanted.json is None else wanted.json
    return JsonSchema(schema, whitespace, wanted.whitespace_pattern, closed)


def one_constraint(
    found: Sequence[OutputConstraint], wanted: Mapping[str, StructuredOutputs]
) -> OutputConstraint | None:
    """Return the single constraint that a request defines. `found`: from the API's own fields. `wanted`: from other fields, by
    name.

    Clients may repeat a constraint in old and new fields. A field that only sets a style determines how JSON is formatted.
    Raises InvalidRequest if constraints differ."""
    constraints = list(found)
    constraints += (OutputConstraint(_grammar_of(one), param) for param, one in wanted.items() if not one.is_style)
    for param, style in wanted.items():
        if style.is_style:
            constraints = [_styled(one, style) for one in constraints]
            if not any(isinstance(one.grammar, JsonSchema | StructuralTag) for one in constraints):
                raise InvalidRequest(f"{param} sets a style of JSON, but no field requests JSON", param=param)
    if not constraints:
        return None
    first, *others = constraints
    if any(_meaning(one.grammar) != _meaning(first.grammar) for one in others):
        names = " and ".join(dict.fromkeys(one.param.partition(".")[0] for one in constraints))
        raise InvalidRequest(f"{names}: more than one output format; give one of them", param=first.param)
    return first


def _styled(constraint: OutputConstraint, style: StructuredOutputs) -> OutputConstraint:
    if not isinstance(constraint.grammar, JsonSchema | StructuralTag):
        return constraint
    pattern, closed = style.whitespace_pattern, style.disable_additional_properties is not False
    changed = structs.replace(constraint.grammar, whitespace=_whitespace(style), pattern=pattern, closed=closed)
    return constraint._replace(grammar=changed)


def _whitespace(wanted: StructuredOutputs) -> Whitespace:
    if wanted.disable_any_whitespace is None:
        return "compact"
    return "none" if wanted.disable_any_whitespace else "any"


def _meaning(grammar: Constraint) -> object:
    """Return a key that is equal for equivalent grammars."""
    if not isinstance(grammar, JsonSchema) or not isinstance(grammar.schema, str):
        return grammar
    try:
        return structs.replace(grammar, schema=json.loads(grammar.schema))
    except (ValueError, RecursionError):
        return grammar
