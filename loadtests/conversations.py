"""Conversations: each turn's request holds the turns before it, with what was really answered to them, as chat clients send it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """`fields` are those of every request; `users[i]` is said in turn i, `num_output_tokens[i]` the length its answer may have."""

    fields: Mapping[str, Any]
    users: Sequence[str]
    num_output_tokens: Sequence[int]

    @property
    def num_turns(self) -> int:
        return len(self.users)

    def body(self, answers: Sequence[str]) -> bytes:
        """The JSON body of the turn behind `answers`. One without text is left out: some templates take no empty message."""
        turn = len(answers)
        messages = []
        for user, answer in zip(self.users, answers, strict=False):
            messages.append({"role": "user", "content": user})
            if answer:
                messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.users[turn]})
        given = {"max_tokens": self.num_output_tokens[turn], **self.fields, "messages": messages}
        return json.dumps({name: value for name, value in given.items() if value is not None}).encode()
