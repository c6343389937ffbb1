"""Conversion of OpenAI's wire types to GenerateRequest and Chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from server.api.openai import conversation_types, request_types
from server.api.openai.conversation_types import AnyMediaPart, media_part
from server.api.openai.request_types import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from server.generate.beams import BeamParams
from server.generate.custom_tools import arguments_of, custom_function
from server.generate.request import (
    Chat,
    ChatMessage,
    Embeds,
    GenerateRequest,
    Infill,
    OnlyFunction,
    OutputConstraint,
    PastToolCall,
    Prompt,
    Shown,
    Texts,
    ToolChoice,
    ToolFunction,
    Truncation,
    json_object,
    json_schema,
    one_constraint,
    regex,
    structural_tag,
)
from server.http.errors import InvalidRequest, clip
from server.media.part import Base64, MediaPart

DEFAULT_MAX_TOKENS = 16  # of a text completion, as OpenAI's


def of_chat(request: ChatRequest) -> GenerateRequest:
    """Convert a chat request. Raises InvalidRequest if tools and tool choice contradict each other."""
    chat = chat_of(request)
    # The newer name wins; two different values have been refused.
    newer = request.max_completion_tokens
    return GenerateRequest(
        prompt=chat,
        max_tokens=_max_tokens(request) if newer is None else newer,
        thinking_token_budget=request.thinking_token_budget,
        prediction=None if request.prediction is None else request.prediction.text,
        **_shared(request, reasoning=request.include_reasoning is not False),
    )


def of_completion(request: CompletionRequest) -> GenerateRequest:
    """Convert a completion request. Raises InvalidRequest if prompts mix texts and token ids."""
    return GenerateRequest(
        prompt=_prompt(request),
        max_tokens=_max_tokens(request),
        default_max_tokens=DEFAULT_MAX_TOKENS if request.n_predict is None else None,
        **_shared(request),
    )


def _prompt(request: CompletionRequest) -> Prompt:
    if request.prompt_embeds is not None:
        part = MediaPart("image", Base64(request.prompt_embeds), "prompt_embeds", "prompt_embeds", is_embeds=True)
        return Embeds(part)
    if request.suffix:
        if request.allow_special_tokens is not None:
            raise InvalidRequest("allow_special_tokens is not supported with a suffix", param="allow_special_tokens")
        return Infill(request.prompts, request.suffix)
    return Texts(request.prompts, request.add_special_tokens is not False, request.allow_special_tokens is not False)


def chat_of(request: ChatRequest | TokenizeRequest) -> Chat:
    """Convert the conversation of `request` to a Chat. Raises InvalidRequest if its fields contradict each other."""
    tools, choice = _chosen(request.tools or [], request.tool_choice)
    return Chat(
        messages=_messages(request.messages or []),
        tools=list(map(_function, tools)),
        tool_choice=choice,
        parallel_tool_calls=not isinstance(request, ChatRequest) or request.parallel_tool_calls is not False,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=request.chat_template_kwargs or {},
        processor_kwargs=request.mm_processor_kwargs,
        documents=request.documents,
        reasoning_effort=request.reasoning_effort,
        add_special_tokens=bool(request.add_special_tokens),
        allow_special_tokens=request.allow_special_tokens,
    )


# --- what both routes have ----------------------------------------------------------------------------------------


def _shared(request: GenerationRequest, *, reasoning: bool = True) -> dict[str, Any]:
    return {
        "sampling": request,
        "shown": Shown(
            stop=request.stop_strings,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            reasoning=reasoning,
            token_ids=bool(request.return_token_ids),
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            echo=request.echoes,
        ),
        "n": request.n or 1,
        "best_of": request.best_of,
        "beams": _beams(request) if request.use_beam_search else None,
        "constraint": _constraint(request),
        "truncation": None
        if request.truncate_prompt_tokens is None
        else Truncation(request.truncate_prompt_tokens, request.truncation_side or "left"),
        "stream": bool(request.stream),
        **request.terms,
    }


def _beams(request: GenerationRequest) -> BeamParams:
    num_best = request.n or 1
    length_penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return BeamParams(request.best_of or num_best, num_best, length_penalty, request.early_stopping or False)


def _max_tokens(request: GenerationRequest) -> int | None:
    if request.max_tokens is None and request.n_predict is not None and request.n_predict >= 0:
        return request.n_predict
    return request.max_tokens


def _constraint(request: GenerationRequest) -> OutputConstraint | None:
    """Return the output constraint of `request`, or None. Raises InvalidRequest if two fields define different constraints."""
    found: list[OutputConstraint] = []
    match request.response_format:
        case request_types.ObjectFormat(schema=None, value=None):
            found.append(json_object("response_format"))
        case request_types.ObjectFormat() as asked:
            given = {"schema": asked.schema, "value": asked.value}
            found += (json_schema(each, f"response_format.{name}") for name, each in given.items() if each is not None)
        case request_types.JsonFormat(value=schema):
            found.append(json_schema(schema, "response_format.value"))
        case request_types.RegexFormat(value=pattern):
            found.append(regex(pattern, "response_format.value"))
        case request_types.JsonSchemaFormat(json_schema=named):
            found.append(json_schema(named.schema, "response_format.json_schema.schema"))
        case request_types.StructuralTagFormat() as tag:
            found.append(structural_tag(_tag_of(tag), "response_format"))
    others = request.constraints
    return one_constraint(found, others) if found or others else None


def _tag_of(structured: request_types.StructuralTagFormat) -> Mapping[str, Any]:
    """Return the structural tag as JSON, in its older or newer form."""
    if structured.structures is None:
        return {"format": structured.format}
    return {"structures": structured.structures, "triggers": structured.triggers}


# --- conversations ------------------------------------------------------------------------------------------------


def _function(tool: conversation_types.Tool | conversation_types.CustomTool) -> ToolFunction:
    if isinstance(tool, conversation_types.CustomTool):
        return custom_function(tool.name, tool.custom.description, tool.grammar)
    spec = tool.function
    return ToolFunction(spec.name, spec.description, spec.parameters, bool(spec.strict))


def _chosen(
    tools: Sequence[conversation_types.Tool | conversation_types.CustomTool],
    choice: conversation_types.ToolChoice | None,
) -> tuple[Sequence[conversation_types.Tool | conversation_types.CustomTool], ToolChoice | None]:
    """Return the tools that `choice` allows, and the GenerateRequest's tool choice. Raises InvalidRequest for an unknown tool."""
    match choice:
        case conversation_types.NamedTool() | conversation_types.NamedCustomTool():
            return tools, OnlyFunction(_named(tools, choice).name if tools else choice.name)
        case conversation_types.AllowedTools(allowed_tools=allowed):
            names = {_named(tools, each).name for each in allowed.tools}
            return [tool for tool in tools if tool.name in names], allowed.mode
    return tools, choice


def _named(
    tools: Sequence[conversation_types.Tool | conversation_types.CustomTool],
    named: conversation_types.NamedTool | conversation_types.NamedCustomTool,
) -> conversation_types.Tool | conversation_types.CustomTool:
    kind = (
        conversation_types.CustomTool
        if isinstance(named, conversation_types.NamedCustomTool)
        else conversation_types.Tool
    )
    found = next((tool for tool in tools if isinstance(tool, kind) and tool.name == named.name), None)
    if found is None:
        what = "" if kind is conversation_types.Tool else "custom tool "
        raise InvalidRequest(
            f"tool_choice names {what}{clip(named.name)!r}, which is not in tools", param="tool_choice"
        )
    return found


def _messages(messages: Sequence[conversation_types.Message]) -> list[ChatMessage]:
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: conversation_types.Message, number: int) -> ChatMessage:
    """Convert a message. The role "developer" becomes "system", the older function fields become tool calls, and a refusal
    becomes the content if there is no other content."""
    calls = list(map(_call, message.tool_calls or []))
    if message.function_call is not None:
        calls.append(_function_call(_legacy_id(number), message.function_call))
    content = message.content
    if content is None and not calls:
        content = message.refusal
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return ChatMessage(
        role=_ROLES[message.role],
        content=_parts(content, f"messages[{number}].content") if isinstance(content, list) else content,
        name=message.name,
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=_legacy_id(number - 1) if message.role == "function" else message.tool_call_id,
    )


def _parts(parts: Sequence[conversation_types.AnyTextPart | AnyMediaPart], where: str) -> list[str | MediaPart]:
    return [
        media_part(part, f"{where}[{number}]") if isinstance(part, AnyMediaPart) else part.text
        for number, part in enumerate(parts)
    ]


_ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool",
}  # fmt: skip


def _call(call: conversation_types.PastCall) -> PastToolCall:
    if call.custom is not None:
        return PastToolCall(call.id, call.custom.name, arguments_of(call.custom.input))
    assert call.function is not None, "the wire type has checked that it is one or the other"
    return _function_call(call.id, call.function)


def _function_call(id: str, function: conversation_types.CalledFunction) -> PastToolCall:
    return PastToolCall(id, function.name, function.arguments)


def _legacy_id(number: int) -> str:
    """Return a call id for a function_call of message `number`, which has no id. Mistral's templates require nine characters."""
    return f"call{number:05d}"
