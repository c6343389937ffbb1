"""What an answer of /api/chat and /api/generate looks like, and what it says of itself: Ollama's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from orjson import Fragment

from runtime.api import FinishReason
from server.generate.generation import Choice, Generation
from server.generate.logprobs import Style, Writer, chat_writer
from server.generate.timings import Timings
from server.generate.transcript import Call, Transcript
from server.http.schema import Json

NS = 1_000_000_000
LOAD, UNLOAD = "load", "unload"


class Shape(Protocol):
    """The place of text, reasoning and calls in an object."""

    def piece(self, text: str, *, thinking: str = "", calls: Sequence[Call] = ()) -> Json: ...


class ChatShape:
    def __init__(self) -> None:
        self._num_calls = 0

    def piece(self, text: str, *, thinking: str = "", calls: Sequence[Call] = ()) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(map(self._call, calls))
        return {"message": message}

    def _call(self, call: Call) -> Json:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        # Checked as it was written, so it need not be read again.
        return {"id": call.id, "function": {"index": number, "name": call.name, "arguments": Fragment(call.arguments)}}


class GenerateShape:
    def piece(self, text: str, *, thinking: str = "", calls: Sequence[Call] = ()) -> Json:
        assert not calls, "there are no tools"
        return {"response": text, "thinking": thinking} if thinking else {"response": text}


def head(model: str) -> Json:
    """How every object begins. `model`: as the client calls it."""
    return {"model": model, "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}


def done_reason(choice: Choice) -> str:
    return "length" if choice.finish_reason == FinishReason.LENGTH else "stop"


def ending(generation: Generation, timings: Timings) -> Json:
    """What the last object says more than the others; durations in nanoseconds."""
    return {
        "done": True,
        "done_reason": done_reason(generation.choices[0]),
        "total_duration": _ns(timings.total_s),
        "load_duration": _ns(timings.preparing_s),
        "prompt_eval_count": generation.num_prompt_tokens,
        "prompt_eval_duration": _ns(timings.prompt_s),
        "eval_count": generation.num_completion_tokens,
        "eval_duration": _ns(timings.answer_s),
    }


def _ns(seconds: float) -> int:
    """Never 0, by which clients divide."""
    return max(1, round(seconds * NS))


def whole(model: str, shape: Shape, generation: Generation, transcript: Transcript, timings: Timings) -> Json:
    """The answer to a request that does not stream."""
    piece = shape.piece(transcript.text, thinking=transcript.reasoning, calls=transcript.calls)
    write = logprobs_writer(generation)
    logprobs = {} if write is None else {"logprobs": write(generation.choices[0].take_logprobs())["content"]}
    return {**head(model), **piece, **logprobs, **ending(generation, timings)}


def logprobs_writer(generation: Generation) -> Writer | None:
    """None where the client does not want any."""
    return None if generation.options.logprobs is None else chat_writer(generation.tokenizer, Style())


def nothing(model: str, shape: Shape, reason: str) -> Json:
    """The answer to a request that asks for nothing but the model to be there."""
    return {**head(model), **shape.piece(""), "done": True, "done_reason": reason}
