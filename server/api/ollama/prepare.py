"""Conversion of Ollama's requests to GenerateRequests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from server.api.ollama import request_types
from server.generate.request import (
    Chat,
    ChatMessage,
    Content,
    GenerateRequest,
    Infill,
    OutputConstraint,
    PastToolCall,
    Prompt,
    Shown,
    Texts,
    Thinking,
    ToolFunction,
    json_object,
    json_schema,
)
from server.http.errors import FieldNames, InvalidRequest
from server.http.wire_fields import sampling_of
from server.media.part import Base64, MediaPart
from server.models.model import LoadedModel

_SHARED_NAMES: Final = {
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "thinking_token_budget": "think",
    "chat_template_kwargs": "think",
    "repetition_penalty": "options.repeat_penalty",
}
CHAT_NAMES: Final = FieldNames(_SHARED_NAMES)
GENERATE_NAMES: Final = FieldNames({**_SHARED_NAMES, "messages": "prompt"})


class Prepared(NamedTuple):
    """Converted request. `ignored`: fields without effect. `wants_thinking`: the client requests reasoning."""

    request: GenerateRequest
    ignored: list[str]
    wants_thinking: bool


def of_chat(given: request_types.OllamaChatRequest, loaded: LoadedModel) -> Prepared:
    """Convert a chat request. Raises InvalidRequest if fields contradict each other."""
    tools = [_function(tool.function) for tool in given.tools or []]
    thinking = _thinking(given.think, loaded, with_tools=bool(tools))
    chat = Chat(
        messages=chat_messages(given.messages),
        tools=tools,
        template_kwargs=thinking.switches,
        reasoning_effort=thinking.effort,
        # As Ollama has it: the answer goes on in a last message of the assistant's.
        continue_final_message=given.messages[-1].role == "assistant" and not given.messages[-1].tool_calls,
    )
    return _prepared(given, loaded, chat, thinking, [])


def of_generate(given: request_types.OllamaGenerateRequest, loaded: LoadedModel) -> Prepared:
    """Convert a /api/generate request: as fill-in-the-middle if it has a `suffix`, else through the template unless it is `raw`."""
    prompt = given.prompt or ""
    templated = bool(loaded.chat_template) and not given.raw and not given.suffix
    if templated:
        thinking = _thinking(given.think, loaded, with_tools=False)
        system = [ChatMessage(role="system", content=given.system)] if given.system else []
        chat = Chat(
            messages=[*system, ChatMessage(role="user", content=_content(prompt, given.images, "images"))],
            template_kwargs=thinking.switches,
            reasoning_effort=thinking.effort,
        )
        return _prepared(given, loaded, chat, thinking, [])
    if given.images:
        raise InvalidRequest("images need a chat template, and this model has none", param="images")
    ignored = [name for name in ("system", "think") if getattr(given, name)]
    text = Infill([prompt], given.suffix) if given.suffix else Texts([prompt])
    return _prepared(given, loaded, text, Thinking(), ignored)


def _prepared(
    given: request_types.OllamaRequest,
    loaded: LoadedModel,
    prompt: Prompt,
    thinking: Thinking,
    ignored: list[str],
) -> Prepared:
    options = given.options or request_types.OllamaOptions()
    if given.unloads:
        ignored.append("keep_alive")
    if options.num_ctx is not None and options.num_ctx > loaded.engine.model.max_model_len:
        ignored.append("options.num_ctx")
    penalty = options.penalty(ignored, "options.repeat_last_n")
    num_predict = options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    request = GenerateRequest(
        prompt=prompt,
        sampling=sampling_of(options, repetition_penalty=penalty),
        shown=Shown(
            stop=options.stop_strings,
            reasoning=thinking.shown,
            logprobs=given.top_logprobs or 0 if given.logprobs else None,
        ),
        default_max_tokens=num_predict,  # cut to what the context holds, as Ollama does
        constraint=_constraint(given.format),
        thinking_token_budget=thinking.budget,
        stream=given.streams,
    )
    return Prepared(request, ignored, wants_thinking=bool(given.think) and given.think != "none")


def _constraint(format: request_types.Format | None) -> OutputConstraint | None:
    if format is None or format == "":
        return None
    return json_object("format") if isinstance(format, str) else json_schema(format, "format")


# --- thinking -----------------------------------------------------------------------------------------------------


def _thinking(think: request_types.Think | None, loaded: LoadedModel, *, with_tools: bool) -> Thinking:
    if think is None:
        return Thinking()
    is_on = think is not False and think != "none"
    if isinstance(think, str) and is_on:
        return Thinking(effort=think)
    return Thinking.switched(loaded.chat_template, is_on, with_tools=with_tools)


# --- conversations ------------------------------------------------------------------------------------------------


def _function(spec: request_types.DescribedFunction) -> ToolFunction:
    return ToolFunction(spec.name, spec.description, spec.parameters, bool(spec.strict))


def chat_messages(given: Sequence[request_types.GivenMessage]) -> list[ChatMessage]:
    """Convert messages. Older Ollama clients send no call ids, but chat templates need them. A tool result is therefore matched
    to a call by id or name, or else to the first call without a result."""
    open_calls: list[PastToolCall] = []
    found: list[ChatMessage] = []
    num_calls = 0
    for index, message in enumerate(given):
        calls = []
        for call in message.tool_calls or []:
            calls.append(
                PastToolCall(call.id or f"call{num_calls:05d}", call.function.name, call.function.arguments or {})
            )
            num_calls += 1
        if message.role == "assistant":
            open_calls = list(calls)
        answered = _answered(message, open_calls, index) if message.role == "tool" else None
        if answered in open_calls:
            open_calls.remove(answered)
        found.append(
            ChatMessage(
                role=message.role,
                content=_content(message.content, message.images, f"messages[{index}].images")
                if message.content or message.images or not calls
                else None,
                name=message.tool_name or message.name or (None if answered is None else answered.name),
                reasoning=message.thinking or None,
                tool_calls=calls,
                tool_call_id=message.tool_call_id or (None if answered is None else answered.id),
            )
        )
    return found


def _content(text: str | None, images: Sequence[str] | None, where: str) -> Content | None:
    """Return a message's content: the images first, then the text, as in Ollama."""
    if not images:
        return text
    parts = (MediaPart("image", Base64(data), f"{where}[{number}]", "images") for number, data in enumerate(images))
    return [*parts, *([text] if text else [])]


def _answered(
    message: request_types.GivenMessage, open_calls: Sequence[PastToolCall], index: int
) -> PastToolCall | None:
    name = message.tool_name or message.name
    for call in open_calls:
        if call.id == message.tool_call_id or (message.tool_call_id is None and name in (None, call.name)):
            return call
    if message.tool_call_id is None and name is None:
        raise InvalidRequest(
            f"messages[{index}] is a tool result without an unanswered call before it", param=f"messages[{index}]"
        )
    return None
