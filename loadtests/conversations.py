"""Multi-turn requests. Each turn contains the actual earlier answers of the server, as with real clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Dialogue(Protocol):
    """Sequence of requests, each of which contains the answers to the earlier requests."""

    @property
    def num_turns(self) -> int: ...

    def body(self, answers: Sequence[str]) -> bytes:
        """Return the JSON body of the next turn. `answers`: answers to all earlier turns."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat with several turns. `fields`: fields of all requests. `users[i]`: user message of turn i. `num_output_tokens[i]`:
    maximum length of the answer to turn i, in tokens."""

    fields: Mapping[str, Any]
    users: Sequence[str]
    num_output_tokens: Sequence[int]

    @property
    def num_turns(self) -> int:
        return len(self.users)

    def body(self, answers: Sequence[str]) -> bytes:
        """Return the JSON body of the next turn. Empty `answers` are left out, since some chat templates reject them."""
        turn = len(answers)
        messages = []
        for user, answer in zip(self.users, answers, strict=False):
            messages.append({"role": "user", "content": user})
            if answer:
                messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.users[turn]})
        return body_of({"max_tokens": self.num_output_tokens[turn], **self.fields, "messages": messages})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Scripted tool call of an agent's model, and the tool's result."""

    name: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class AgentRun:
    """Agent task with tools. Turn i is requested after the results of `calls[:i]`. The model's own text is kept in the history.
    The tool calls are scripted, so that all servers get the same requests."""

    fields: Mapping[str, Any]
    system: str
    task: str
    calls: Sequence[ToolCall]
    num_output_tokens: Sequence[int]

    @property
    def num_turns(self) -> int:
        return len(self.calls) + 1

    def body(self, answers: Sequence[str]) -> bytes:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.task},
        ]
        for number, (call, answer) in enumerate(zip(self.calls, answers, strict=False)):
            called = {"name": call.name, "arguments": json.dumps(call.arguments)}
            calls = [{"id": f"call_{number}", "type": "function", "function": called}]
            messages += [
                {"role": "assistant", "content": answer, "tool_calls": calls},
                {"role": "tool", "tool_call_id": f"call_{number}", "content": call.result},
            ]
        return body_of({"max_tokens": self.num_output_tokens[len(answers)], **self.fields, "messages": messages})


def body_of(fields: Mapping[str, Any]) -> bytes:
    """Return `fields` as JSON, without fields that are None."""
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
