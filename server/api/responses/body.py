"""The Response object: what every version of one response repeats, and what its stage adds.

JSON whose pieces may be rendered already (orjson.Fragment): log-probabilities are written once, however often they are shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from orjson import Fragment, dumps

from server.api.openai.api_types import Usage, media_tokens
from server.api.responses.request_types import ResponsesRequest
from server.api.responses.tools import Tool, Tools
from server.generate.generation import Generation
from server.http.schema import Json

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Head:
    """`repeated`: fields of the request, as every version of the response says it. `tools`: by the functions that the model calls.
    `seals_reasoning`: the client wants it back as what only this server reads."""

    id: str
    repeated: Json
    created_at: int = field(default_factory=lambda: int(time.time()))
    tools: Mapping[str, Tool] = field(default_factory=dict)
    seals_reasoning: bool = False

    @classmethod
    def of(
        cls, id: str, wire: ResponsesRequest, tools: Tools, generation: Generation, *, model: str, stored: bool
    ) -> Head:
        repeated = _repeated(wire, tools, generation, model=model, stored=stored)
        return cls(id, repeated, tools=tools.by_function, seals_reasoning=wire.wants_sealed_reasoning)

    def body(
        self,
        status: Status,
        output: list[Json],
        *,
        usage: Json | None = None,
        error: Json | None = None,
        incomplete: str | None = None,
        completed_at: int | None = None,
    ) -> Json:
        """`incomplete`: the reason why it is. Times are seconds since the epoch."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": completed_at,
            "status": status,
            "error": error,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "output": output,
            "usage": usage,
            **self.repeated,
        }


def _repeated(wire: ResponsesRequest, tools: Tools, generation: Generation, *, model: str, stored: bool) -> Json:
    params = generation.requests[0].sampling
    choice = wire.tool_choice or "auto"
    reasoning, text = wire.reasoning, wire.text
    format = {"type": "text"} if text is None or text.format is None else msgspec.to_builtins(text.format)
    return {
        "model": model,
        "background": bool(wire.background),
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": wire.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": params.temperature,
        "text": {"format": format, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else msgspec.to_builtins(choice),
        "tools": tools.echoed,
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": wire.truncation or "disabled",
        "user": wire.user,
    }


def usage(generation: Generation) -> Json:
    used = Usage.of(generation)
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": generation.num_cached_tokens,
            "cache_write_tokens": 0,
            **media_tokens(generation),
        },
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
        "total_tokens": used.total_tokens,
    }


def rendered(pieces: list[bytes]) -> Fragment | list[Json]:
    """A list of what was rendered before."""
    return Fragment(b"[" + b",".join(pieces) + b"]") if pieces else []


def render(body: Any) -> bytes:
    return dumps(body)
