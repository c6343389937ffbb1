"""ChatShape: the JSON of one choice of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from server.generate.logprobs import Style, Writer, chat_writer
from server.generate.transcript import Call, Transcript
from server.loaded.tokenizer import Tokenizer
from server.schema import Json
from server.text.events import CutOff, Event, Malformed, Reasoning, Text, ToolArguments, ToolCall


class ChatShape:
    """Reasoning goes under both names clients look for. A call that turns out broken while it streams comes again, whole, as
    content: the client has got it in part, and its finish_reason asks for no call. One that the token limit cut off stays a call,
    its arguments as far as they go: as OpenAI has it, finish_reason says that they are not whole."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def opening(self, index: int) -> Json:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, event: Event, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": _delta(event), "logprobs": logprobs, "finish_reason": None}

    def last(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json:
        return {
            "index": index,
            "delta": {"content": text} if text else {},
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
            "message": _message(transcript),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> Writer:
        return chat_writer(tokenizer, style)


SHAPE = ChatShape()


def _delta(event: Event) -> Json:
    match event:
        case CutOff():
            return {}
        case Text(text) | Malformed(_, text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case ToolCall(index, name, id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(transcript: Transcript) -> Json:
    """Content is null where there is something else and no text."""
    text, reasoning, calls = transcript.text, transcript.reasoning, transcript.calls
    if transcript.cut_off is not None:
        call, written = transcript.cut_off
        text, calls = text.removesuffix(written).rstrip(), [*calls, call]
    message: Json = {"role": "assistant", "content": text or (None if calls or reasoning else ""), "refusal": None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = list(map(_call, calls))
    return message


def _call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
