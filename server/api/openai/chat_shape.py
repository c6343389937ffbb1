"""ChatShape: the JSON of one choice of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Collection

from server.api.openai.request_types import ChatRequest, CustomTool
from server.generate.custom_tools import InputReader, input_of
from server.generate.logprobs import Style, Writer, chat_writer
from server.generate.transcript import Call, Transcript
from server.http.schema import Json
from server.models.tokenizer import Tokenizer
from server.text.events import CutOff, Event, Malformed, Reasoning, Text, ToolArguments, ToolCall


class ChatShape:
    """Reasoning goes under both names clients look for. A call that turns out broken while it streams comes again, whole, as
    content: the client has got it in part, and its finish_reason asks for no call. One that the token limit cut off stays a call,
    its arguments as far as they go: as OpenAI has it, finish_reason says that they are not whole.

    `custom_tools`: names of those whose calls pass a text. With some it is for one answer: it reads their calls as they come."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def __init__(self, custom_tools: Collection[str] = ()) -> None:
        self._custom_tools = custom_tools
        self._readers: dict[int, dict[int, InputReader]] = {}  # by choice and call

    def opening(self, index: int) -> Json:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, event: Event, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": self._delta(index, event), "logprobs": logprobs, "finish_reason": None}

    def last(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json:
        delta: Json = {"content": text} if text else {}
        if rest := self._rest(index):
            delta["tool_calls"] = rest
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def whole(
        self,
        index: int,
        transcript: Transcript,
        finish_reason: str | None,
        stop_reason: str | int | None,
        logprobs: Json | None,
    ) -> Json:
        return {
            "index": index,
            "message": self._message(transcript),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> Writer:
        return chat_writer(tokenizer, style)

    # --- deltas ---------------------------------------------------------------------------------------------------

    def _delta(self, choice: int, event: Event) -> Json:
        match event:
            case CutOff():
                return {}
            case Text(text):
                return {"content": text}
            case Malformed(index, text):
                self._readers.get(choice, {}).pop(index, None)
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case ToolCall():
                return {"tool_calls": [*self._rest(choice), self._begun(choice, event)]}
            case ToolArguments(index, text):
                reader = self._readers.get(choice, {}).get(index)
                if reader is None:
                    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
                read = reader.feed(text)
                return {"tool_calls": [_input_delta(index, read)]} if read else {}

    def _begun(self, choice: int, call: ToolCall) -> Json:
        if call.name not in self._custom_tools:
            function = {"name": call.name, "arguments": ""}
            return {"index": call.index, "id": call.id, "type": "function", "function": function}
        self._readers.setdefault(choice, {})[call.index] = InputReader()
        return {"index": call.index, "id": call.id, "type": "custom", "custom": {"name": call.name, "input": ""}}

    def _rest(self, choice: int) -> list[Json]:
        """What calls that have ended pass beyond what was let out."""
        readers = self._readers.pop(choice, {})
        return [_input_delta(index, rest) for index, reader in readers.items() if (rest := reader.end())]

    # --- messages -------------------------------------------------------------------------------------------------

    def _message(self, transcript: Transcript) -> Json:
        """Content is null where there is something else and no text."""
        text, reasoning, calls = transcript.text, transcript.reasoning, transcript.calls
        if transcript.cut_off is not None:
            call, written = transcript.cut_off
            text, calls = text.removesuffix(written).rstrip(), [*calls, call]
        message: Json = {"role": "assistant", "content": text or (None if calls or reasoning else ""), "refusal": None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = list(map(self._call, calls))
        return message

    def _call(self, call: Call) -> Json:
        if call.name in self._custom_tools:
            custom = {"name": call.name, "input": input_of(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _input_delta(index: int, text: str) -> Json:
    return {"index": index, "custom": {"input": text}}


SHAPE = ChatShape()


def shape_of(given: ChatRequest) -> ChatShape:
    """The shape of the answer to `given`."""
    custom = frozenset(tool.name for tool in given.tools or () if isinstance(tool, CustomTool))
    return ChatShape(custom) if custom else SHAPE
