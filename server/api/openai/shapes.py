"""Formats of the choices in OpenAI's responses, whole and in chunks: ChatShape and CompletionShape."""

from __future__ import annotations

from typing import Any, Protocol, cast

from msgspec import UNSET

from server.api.openai import api_types
from server.api.openai.api_types import ChatChoice, ChatChunkChoice, ChatDelta, FinishReason, TextChoice
from server.api.openai.conversation_types import CustomTool
from server.api.openai.request_types import ChatRequest
from server.generate.custom_tools import InputReader, input_of
from server.generate.generation import Choice
from server.generate.logprobs import ChatWriter, CompletionWriter, Style, chat_writer, completion_writer
from server.generate.transcript import Transcript, TranscriptCall
from server.models.tokenizer import Tokenizer
from server.text.events import CutOff, Event, Malformed, Reasoning, Text, ToolArguments, ToolCallStart


class ResponseShape(Protocol):
    id_prefix: str
    answer: type[Any]  # ChatCompletion or TextCompletion, and the same of their chunks
    chunk: type[Any]

    def opening(self, index: int) -> ChatChunkChoice | None: ...
    def delta(self, index: int, event: Event, logprobs: Any = None) -> ChatChunkChoice | TextChoice: ...
    def last(self, index: int, choice: Choice, text: str, logprobs: Any) -> ChatChunkChoice | TextChoice: ...
    def whole(self, index: int, choice: Choice, transcript: Transcript, logprobs: Any) -> ChatChoice | TextChoice: ...
    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> ChatWriter | CompletionWriter: ...


def _reason(choice: Choice) -> FinishReason:
    return cast("FinishReason", choice.finish_reason)


class CompletionShape:
    id_prefix = "cmpl-"
    answer = api_types.TextCompletion
    chunk = api_types.TextCompletionChunk

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, event: Event, logprobs: Any = None) -> TextChoice:
        assert isinstance(event, Text), "nothing else is looked for"
        return TextChoice(index, event.text, logprobs)

    def last(self, index: int, choice: Choice, text: str, logprobs: Any) -> TextChoice:
        return TextChoice(index, text, logprobs, _reason(choice), choice.stop_reason)

    def whole(self, index: int, choice: Choice, transcript: Transcript, logprobs: Any) -> TextChoice:
        return self.last(index, choice, transcript.text, logprobs)

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> CompletionWriter:
        return completion_writer(tokenizer, style)


class ChatShape:
    """Format of chat choices. Reasoning is sent under both names that clients support.

    If a streamed tool call is malformed, its whole text is sent again as content: the client has received a part of it, and
    finish_reason does not request a call. As with OpenAI, a call that the token limit cuts off remains a call with incomplete
    arguments, and finish_reason is "length". The input of custom tools is streamed as text."""

    id_prefix = "chatcmpl-"
    answer = api_types.ChatCompletion
    chunk = api_types.ChatCompletionChunk

    def __init__(self, given: ChatRequest) -> None:
        self._custom_tools = {tool.name for tool in given.tools or () if isinstance(tool, CustomTool)}
        self._readers: dict[int, dict[int, InputReader]] = {}  # by choice and call

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(role="assistant", content=""))

    def delta(self, index: int, event: Event, logprobs: Any = None) -> ChatChunkChoice:
        return ChatChunkChoice(index, self._delta(index, event), logprobs)

    def last(self, index: int, choice: Choice, text: str, logprobs: Any) -> ChatChunkChoice:
        delta = ChatDelta(content=text or UNSET, tool_calls=self._rest(index) or UNSET)
        return ChatChunkChoice(index, delta, logprobs, _reason(choice), choice.stop_reason)

    def whole(self, index: int, choice: Choice, transcript: Transcript, logprobs: Any) -> ChatChoice:
        return ChatChoice(index, self._message(transcript), logprobs, _reason(choice), choice.stop_reason)

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> ChatWriter:
        return chat_writer(tokenizer, style)

    def _delta(self, choice: int, event: Event) -> ChatDelta:
        match event:
            case CutOff():
                return ChatDelta()
            case Text(text):
                return ChatDelta(content=text)
            case Malformed(index, text):
                self._readers.get(choice, {}).pop(index, None)
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case ToolCallStart():
                return ChatDelta(tool_calls=[*self._rest(choice), self._begun(choice, event)])
            case ToolArguments(index, text):
                reader = self._readers.get(choice, {}).get(index)
                if reader is None:
                    return ChatDelta(
                        tool_calls=[api_types.ToolCall(index=index, function=api_types.Function(arguments=text))]
                    )
                read = reader.feed(text)
                return ChatDelta(tool_calls=[_input_delta(index, read)]) if read else ChatDelta()

    def _begun(self, choice: int, call: ToolCallStart) -> api_types.ToolCall:
        begun = self._call(TranscriptCall(call.id or "", call.name, ""))
        begun.index = call.index
        if begun.type == "custom":
            self._readers.setdefault(choice, {})[call.index] = InputReader()
        return begun

    def _rest(self, choice: int) -> list[api_types.ToolCall]:
        """Return deltas with the remaining input of the choice's custom tool calls, which have ended."""
        readers = self._readers.pop(choice, {})
        return [_input_delta(index, rest) for index, reader in readers.items() if (rest := reader.end())]

    def _message(self, transcript: Transcript) -> api_types.AssistantMessage:
        """Return the whole message. `content` is null if there is reasoning or a call, but no text."""
        text, reasoning, calls = transcript.text, transcript.reasoning, transcript.calls
        if transcript.cut_off is not None:
            call, written = transcript.cut_off
            text, calls = text.removesuffix(written).rstrip(), [*calls, call]
        return api_types.AssistantMessage(
            content=text or (None if calls or reasoning else ""),
            reasoning=reasoning or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=list(map(self._call, calls)) or UNSET,
        )

    def _call(self, call: TranscriptCall) -> api_types.ToolCall:
        if call.name in self._custom_tools:
            custom = api_types.Custom(call.name, input_of(call.arguments) if call.arguments else "")
            return api_types.ToolCall(id=call.id, type="custom", custom=custom)
        return api_types.ToolCall(id=call.id, type="function", function=api_types.Function(call.name, call.arguments))


def _input_delta(index: int, text: str) -> api_types.ToolCall:
    return api_types.ToolCall(index=index, custom=api_types.Custom(input=text))


COMPLETION = CompletionShape()
