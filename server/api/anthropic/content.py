"""What an answer says of itself: content blocks, why it stopped, what it cost. Anthropic's JSON, whole."""

from __future__ import annotations

from orjson import Fragment

from runtime.api import FinishReason
from server.api.anthropic.history import tool_use_id
from server.generate.generation import TOOL_CALLS, Choice, Generation
from server.generate.transcript import Call, Part, Transcript
from server.http.schema import Json
from server.text.events import Reasoning, Text

# Clients give a block of thinking back with its signature, and drop one that has none. Nothing is sealed by it.
SIGNATURE = "unsigned"


def blocks(transcript: Transcript, *, shows_thinking: bool) -> list[Json]:
    return [block for part in transcript.parts if (block := _block(part, shows_thinking)) is not None]


def _block(part: Part, shows_thinking: bool) -> Json | None:
    match part:
        case Text(text):
            return {"type": "text", "text": text} if text else None
        case Reasoning(text):
            return {"type": "thinking", "thinking": text if shows_thinking else "", "signature": SIGNATURE}
        case Call(id, name, arguments):
            # Checked as it was written, so it need not be read again.
            return {"type": "tool_use", "id": tool_use_id(id), "name": name, "input": Fragment(arguments)}


def stop(choice: Choice, *, context_was_short: bool) -> Json:
    """`context_was_short`: the context left less room than max_tokens."""
    if choice.finish_reason == FinishReason.LENGTH:
        return _stop("model_context_window_exceeded" if context_was_short else "max_tokens")
    if choice.finish_reason == TOOL_CALLS:
        return _stop("tool_use")
    if isinstance(choice.stop_reason, str):
        return _stop("stop_sequence", choice.stop_reason)
    return _stop("end_turn")


def _stop(reason: str | None, sequence: str | None = None) -> Json:
    return {"stop_reason": reason, "stop_sequence": sequence}


NOT_STOPPED = _stop(None)


def usage(generation: Generation) -> Json:
    """Tokens of the prompt are either read from the cache or computed; those that go into it cost nothing more."""
    cached = generation.num_cached_tokens
    used: Json = {
        "input_tokens": generation.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generation.num_completion_tokens,
    }
    if generation.reasons:
        used["output_tokens_details"] = {"thinking_tokens": generation.num_reasoning_tokens}
    return used


def message(id: str, model: str, content: list[Json], stopped: Json, used: Json) -> Json:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **stopped,
        "usage": {**used, "service_tier": "standard"},
    }
