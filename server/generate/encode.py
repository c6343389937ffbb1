"""Encoding of prompts to token ids: texts, conversations, and the dispatch between kinds of prompts.

The chat template renders a conversation. This module converts messages to what templates expect. Long texts are encoded off the
event loop, in pieces. If a text is far too long for the context, only its beginning is encoded before the text is rejected. The
work per request is therefore bounded by the context. A text that is to be truncated or counted may be longer: at most four times
the context, or 262,144 tokens if that is more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from runtime.api import MediaItem
from server.config.server_config import ServerConfig
from server.generate.request import (
    MESSAGES,
    TOOLS,
    Chat,
    ChatMessage,
    GenerateRequest,
    PastToolCall,
    Prompt,
    ToolFunction,
)
from server.http.call import Call
from server.http.errors import ContextLengthExceeded, Field, InvalidRequest, clip
from server.http.offload import LONG_CHARS, SHORT_CHARS, Pieces, to_the_end
from server.http.schema import Json
from server.media.part import MediaPart
from server.media.placeholders import PlaceholderError, PromptMedia, ReadMedia
from server.models.chat_format import ChatFormat, OutputParser
from server.models.control_tokens import ControlTokens, Shield
from server.models.model import LoadedModel
from server.models.prompt import MAX_RENDER_S, MEDIA_MARKS, NO_TEMPLATE, ChatTemplate, EndlessTemplate, PromptError
from server.models.tokenizer import PIECE_CHARS, TooManyTokens
from server.text.tools import prompted

MAX_TOKENS = 1 << 18  # of a text that need not fit the context, if four times the context is less
MAX_CHARS_PER_TOKEN = 8  # of these; usual text has 3 to 5
BORDER_TOKENS = 64
T = TypeVar("T")

# Arguments of the rendering itself, which a request sets by its own fields or not at all.
RESERVED_KWARGS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final", "chat_template", "tokenize"}
)
MAX_KWARGS = 100
SHORT_RENDER_S = 0.05  # of a template on the event loop
VALUE_CHARS = (
    40  # as long as it takes to tokenise them, a template takes for a message, or one of its variables' values
)
_EFFORT, _KWARGS = Field("reasoning_effort"), Field("chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Prompts as token ids. `media`: media items, if there is one prompt. `output_parser`: parser of the answers, None for plain
    text. `ignored`: request fields that the model's template does not use. `continues`: the answer continues the prompt's last
    text. `stop_ids`: additional token ids that end an answer."""

    prompts: Sequence[list[int]]
    media: tuple[MediaItem, ...] = ()
    output_parser: OutputParser | None = None
    ignored: tuple[Field, ...] = ()
    continues: bool = True
    stop_ids: frozenset[int] = frozenset()


@singledispatch
async def encode_prompt(
    prompt: Prompt, request: GenerateRequest, loaded: LoadedModel, call: Call, config: ServerConfig
) -> EncodedPrompts:
    """Encode the prompt of `request` to token ids; each kind of Prompt has its own function. Raises InvalidRequest."""
    raise NotImplementedError(type(prompt).__name__)


# --- texts --------------------------------------------------------------------------------------------------------


async def text_ids(
    loaded: LoadedModel,
    call: Call,
    text: str,
    *,
    add_special_tokens: bool,
    param: Field,
    fits: bool = True,
    plain: bool = False,
) -> list[int]:
    """Encode `text` to token ids. If the text is far too long for the context, only its beginning is encoded. If `fits`, it then
    raises ContextLengthExceeded, otherwise InvalidRequest. A text that is slightly too long is returned whole."""
    return await call.run_pieces(
        len(text),
        encode_pieces(loaded, text, add_special_tokens=add_special_tokens, param=param, fits=fits, plain=plain),
    )


def encode(
    loaded: LoadedModel, text: str, *, add_special_tokens: bool, param: Field, fits: bool, plain: bool = False
) -> list[int]:
    """Encode `text` to token ids on the calling thread. Arguments: see `text_ids`."""
    work = encode_pieces(loaded, text, add_special_tokens=add_special_tokens, param=param, fits=fits, plain=plain)
    return to_the_end(work)


def encode_pieces(
    loaded: LoadedModel, text: str, *, add_special_tokens: bool, param: Field, fits: bool, plain: bool = False
) -> Pieces[list[int]]:
    """Encode `text` to token ids, yielding between pieces of work. `plain`: see `Tokenizer.encode`; others: see `text_ids`."""
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
                param, f" has more than the {max_tokens} tokens that a text may have", param=param
            ) from None
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens; the first {error.num_chars} of {len(text)} characters in ",
            param,
            f" are {error.num_tokens}",
            param=param,
        ) from None


def max_tokens_of_text(max_model_len: int) -> int:
    """Return the maximum number of tokens of a text that is to be truncated or counted."""
    return max(MAX_TOKENS, 4 * max_model_len)


# --- conversations ------------------------------------------------------------------------------------------------


@encode_prompt.register
async def _encode_chat(
    chat: Chat, request: GenerateRequest, loaded: LoadedModel, call: Call, config: ServerConfig
) -> EncodedPrompts:
    """Render and encode a conversation. Raises InvalidRequest if the model has no chat template, the template rejects the
    conversation, or the model's tool calls cannot be parsed."""
    tools = tools_json(chat.shown_tools)
    if tools and loaded.chat_format.tool_parser is None:
        raise InvalidRequest(
            "the tool call format of this model is unknown, so the server does not accept ", TOOLS,
            ": start the server with --tool-parser NAME", param=TOOLS,
        )  # fmt: skip
    rendered, ignored = await _render(loaded, call, chat, tools, fits=request.truncation is None)
    output_parser = loaded.chat_format.output_parser(
        tools,
        reasoning_open=_is_reasoning_open(loaded.chat_format, rendered.text, chat),
        parallel=chat.parallel_tool_calls,
        show_reasoning=request.shown.reasoning,
    )
    return EncodedPrompts([rendered.ids], rendered.media, output_parser, ignored, chat.continue_final_message)


def check_template(loaded: LoadedModel) -> None:
    """Raise InvalidRequest if a generating model has no chat template."""
    if loaded.pooling is None and not loaded.chat_template:
        raise InvalidRequest(NO_TEMPLATE, param=MESSAGES)


async def chat_ids(loaded: LoadedModel, call: Call, chat: Chat) -> list[int]:
    """Return the token ids that a chat request with this conversation would have as prompt. Raises InvalidRequest."""
    rendered, _ = await _render(loaded, call, chat, tools_json(chat.shown_tools), fits=True)
    return rendered.ids


class _Rendered(NamedTuple):
    """Rendered conversation. `text`: the template's output, with the placeholders of each media item expanded."""

    text: str
    ids: list[int]
    media: tuple[MediaItem, ...]


async def _render(
    loaded: LoadedModel, call: Call, chat: Chat, tools: Sequence[Json], *, fits: bool
) -> tuple[_Rendered, tuple[Field, ...]]:
    template, messages, kwargs = loaded.chat_template, chat.messages, chat.template_kwargs
    _check_count(loaded, chat, fits=fits)
    for name in RESERVED_KWARGS & kwargs.keys():
        raise InvalidRequest(_KWARGS, f" may not set {name}", param=Field(f"{_KWARGS}.{name}"))
    effort, ignored = _effort(loaded.chat_format, template, chat.reasoning_effort, with_tools=bool(tools))
    given = {"documents": Field("documents")} if chat.documents else {}
    given |= {name: Field(f"{_KWARGS}.{clip(name)}") for name in kwargs}
    unread = (field for name, field in given.items() if not template.reads(name, with_tools=bool(tools)))
    ignored = (*ignored, *unread)

    allowed = loaded.allow_special_tokens if chat.allow_special_tokens is None else chat.allow_special_tokens
    shield = None if allowed else Shield(loaded.tokenizer.control)

    _check_results(loaded, messages)
    parts = chat.media
    media = await loaded.media.read(parts, chat.processor_kwargs, call.tenant) if parts else None

    def render(limit_s: float) -> Pieces[_Rendered]:
        seen = messages_json(messages)
        if loaded.chat_format.prompted and (tools or any(each.role == "tool" or each.tool_calls for each in messages)):
            seen = prompted.with_tools(seen, tools)
        text, escaped = template.render_shielded(
            shield,
            seen,
            limit_s,
            tools=None if loaded.chat_format.prompted else tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            documents=chat.documents,
            continue_final=chat.continue_final_message,
            **{**effort, **kwargs},
        )
        ordered: list[ReadMedia] = []
        if media is not None:
            text, escaped, ordered = _with_media(loaded.tokenizer.control, text, escaped, media)
        if len(text) > PIECE_CHARS:
            yield
        ids = yield from encode_pieces(
            loaded,
            text if escaped is None else escaped,
            add_special_tokens=chat.add_special_tokens,
            param=MESSAGES,
            fits=fits,
            plain=escaped is not None,
        )
        return _Rendered(text, ids, ()) if media is None else _Rendered(text, *media.placed(ids, ordered))

    try:
        rendered = await _within_bounds(template, call, _cost(messages, tools, chat.documents, kwargs), render)
    except (PromptError, PlaceholderError) as error:
        raise InvalidRequest(clip(error), param=MESSAGES) from None
    return rendered, ignored


def _with_media(
    control: ControlTokens, text: str, escaped: str | None, media: PromptMedia
) -> tuple[str, str | None, list[ReadMedia]]:
    """Replace the media marks in a rendered prompt by the placeholders of `media`. `escaped`: see
    `ChatTemplate.render_shielded`. Return both texts, and the media in prompt order. Raises PlaceholderError."""
    for modality, token in media.tokens.items():
        text = text.replace(MEDIA_MARKS[modality], token)
        if escaped is not None:
            escaped = escaped.replace(MEDIA_MARKS[modality], control.with_aliases(token))
    if escaped is not None:
        escaped, ordered = media.written(escaped, control.with_aliases)
        return text, escaped, ordered
    text, ordered = media.written(text)
    return text, None, ordered


def _check_results(loaded: LoadedModel, messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest if a tool result has an image but this model's prompts contain tool results as text."""
    if not loaded.chat_format.prompted:
        return
    for message in messages:
        for part in message.content if message.role == "tool" and isinstance(message.content, list) else ():
            if isinstance(part, MediaPart):
                raise InvalidRequest(
                    f"{part.where}: this model's chat template does not support {part.kind} in tool results",
                    param=part.where,
                )


async def _within_bounds(template: ChatTemplate, call: Call, cost: int, work: Callable[[float], Pieces[T]]) -> T:
    """Return the result of `work(seconds)`. Run it on the event loop if `cost` is small, otherwise on a thread. A template that
    was slow once is always rendered on a thread."""
    if cost <= SHORT_CHARS and not template.is_slow:
        try:
            return await call.run_pieces(cost, work(SHORT_RENDER_S))
        except EndlessTemplate:
            template.is_slow = True
    return await call.run_pieces(max(cost, SHORT_CHARS + 1), work(MAX_RENDER_S))


def _check_count(loaded: LoadedModel, chat: Chat, *, fits: bool) -> None:
    """Raise ContextLengthExceeded for more messages than the context has tokens, or InvalidRequest for too many template_kwargs."""
    if len(chat.template_kwargs) > MAX_KWARGS:
        raise InvalidRequest(_KWARGS, f" has more than {MAX_KWARGS} names", param=_KWARGS)
    limit = loaded.engine.model.max_model_len
    if len(chat.messages) > (limit if fits else max_tokens_of_text(limit)):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens; ",
            MESSAGES,
            f" has {len(chat.messages)}",
            param=MESSAGES,
        )


def _cost(*given: Any) -> int:
    """Estimate the cost of rendering and tokenising `given`, as a number of characters. Counting stops above LONG_CHARS."""
    cost, todo = 0, [*given]
    while todo and cost <= LONG_CHARS:
        value = todo.pop()
        inside: Iterable[Any] = ()
        if isinstance(value, str):
            cost += len(value)
        elif isinstance(value, ChatMessage):
            inside = (value.content, value.reasoning, *(call.arguments for call in value.tool_calls))
        elif isinstance(value, Mapping):
            inside = value.values()
        elif isinstance(value, Sequence):
            inside = value
        num_before = len(todo)
        todo += islice(inside, LONG_CHARS // VALUE_CHARS)
        cost += VALUE_CHARS * (len(todo) - num_before)
    return cost


def _effort(
    chat_format: ChatFormat, template: ChatTemplate, effort: str | None, *, with_tools: bool
) -> tuple[Mapping[str, Any], tuple[Field, ...]]:
    """Return the template variables that set reasoning_effort, and the request fields that the template does not use."""
    if effort is None or not template:
        return {}, ()
    words = chat_format.tool_parser.efforts if chat_format.tool_parser is not None else None
    if words is not None and effort not in words:
        raise InvalidRequest(
            _EFFORT, f" {effort!r} is not supported by this model; it supports {', '.join(words)}", param=_EFFORT
        )
    read: dict[str, Any] = template.switches(effort != "none", with_tools=with_tools)
    if template.reads(_EFFORT, with_tools=with_tools):
        read[_EFFORT] = words[effort] if words else effort
    return read, () if read else (_EFFORT,)


def _is_reasoning_open(chat_format: ChatFormat, text: str, chat: Chat) -> bool:
    tags = chat_format.tags
    if tags is None:
        return False
    if not chat.continue_final_message:
        return tags.opened_by(text)
    content = chat.messages[-1].content or ""
    texts = [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
    return tags.opened_in("".join(texts))


# --- as templates read it -----------------------------------------------------------------------------------------


def tools_json(tools: Sequence[ToolFunction]) -> list[Json]:
    """Convert tools to the JSON that chat templates and tool parsers expect, without the server's own fields."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def messages_json(messages: Sequence[ChatMessage]) -> list[Json]:
    """Convert messages to JSON for a chat template, without empty fields. Tool results get their function's name."""
    names: dict[str, str] = {}  # of the calls so far, by id
    return [_message_json(message, names) for message in messages]


def _message_json(message: ChatMessage, names: dict[str, str]) -> Json:
    calls = [_call_json(call) for call in message.tool_calls]
    names |= {call.id: call.name for call in message.tool_calls}
    content: Any = message.content
    if isinstance(content, list):
        content = [
            {"type": part.modality} if isinstance(part, MediaPart) else {"type": "text", "text": part}
            for part in content
        ]
    seen: Json = {
        "role": message.role,
        "content": content,
        "name": message.name or names.get(message.tool_call_id or ""),
        "reasoning": message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
    return {key: value for key, value in seen.items() if value is not None}


def _call_json(call: PastToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
