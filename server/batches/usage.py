"""Usage: the tokens of a batch's answers, added up; as OpenAI has it in the batch object, whichever API answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from server.http.schema import Json


@dataclass(frozen=True, slots=True)
class Usage:
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input's
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output's

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Usage:
        """What the body of an answer says: a chat's or completion's words, or those of a response."""
        usage = body.get("usage") or {}
        prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        completion = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        return cls(
            usage.get("prompt_tokens", usage.get("input_tokens", 0)),
            prompt.get("cached_tokens", 0),
            usage.get("completion_tokens", usage.get("output_tokens", 0)),
            completion.get("reasoning_tokens", 0),
        )

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def body(self) -> Json:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }
