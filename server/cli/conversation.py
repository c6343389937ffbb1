"""ChatSession: the messages and request fields of a conversation at a terminal. Independent of the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.cli.attachments import Part

Content = str | Sequence[Part]  # of a question: text, or parts by OpenAI's names, the last of which is the text


@dataclass(slots=True)
class ChatSession:
    """State of a conversation. `attached`: files that are sent with the next question."""

    messages: list[Mapping[str, Any]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    attached: list[Part] = field(default_factory=list)

    @property
    def system(self) -> str:
        return str(self.messages[0]["content"]) if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        """Set the system prompt to `text`. An empty `text` removes it."""
        said = self.messages[1:] if self.system else self.messages
        self.messages = [{"role": "system", "content": text}, *said] if text else said

    def question(self, text: str) -> Content:
        """Return the content of a question: `text` and the attached files, which are then detached."""
        parts, self.attached = self.attached, []
        return [*parts, {"type": "text", "text": text}] if parts else text

    def forget(self) -> None:
        """Remove all messages except the system prompt."""
        self.messages = self.messages[:1] if self.system else []
        self.attached = []

    def take_back(self) -> Content | None:
        """Remove the last question and its answer. Return the question, or None if nothing has been asked."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                content: Content = message["content"]
                return content
        return None

    def load(self, text: str) -> None:
        """Replace the messages by those of a saved conversation, in JSON. Raises ValueError for other text."""
        given = json.loads(text)
        messages = given.get("messages") if isinstance(given, dict) else given
        if not isinstance(messages, list) or not all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and (isinstance(message.get("content"), str) or _are_parts(message.get("content")))
            for message in messages
        ):
            raise ValueError("it is not a list of messages with role and content")
        self.messages = messages


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
