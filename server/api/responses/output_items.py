"""Output items: what an answer consists of, each with the events that tell how it grows.

The events have no numbers yet: of which item of which response they are is for `events.py` to say."""

from __future__ import annotations

from typing import Literal

from server.api.responses.body import rendered
from server.api.responses.input_items import new_id
from server.api.responses.sealed import seal
from server.generate.custom_tools import InputReader
from server.http.schema import Json

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem:
    """`logprobs`: each rendered already."""

    def __init__(self) -> None:
        self.id = new_id("msg_")
        self._pieces: list[str] = []
        self._logprobs: list[bytes] = []

    def begin(self) -> list[Json]:
        return _text_begins(self.id, self.json("in_progress"), self._part())

    def add(self, text: str, logprobs: list[bytes]) -> Json:
        self._pieces.append(text)
        self._logprobs += logprobs
        return {
            "type": "response.output_text.delta", "item_id": self.id, "content_index": 0, "delta": text,
            "logprobs": rendered(logprobs),
        }  # fmt: skip

    def end(self, status: ItemStatus) -> list[Json]:
        part = self._part()
        done = {"type": "response.output_text.done", "text": part["text"], "logprobs": part["logprobs"]}
        return _text_ends(self.id, done, part, self.json(status))

    def json(self, status: ItemStatus) -> Json:
        content = [self._part()] if self._pieces or status != "in_progress" else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self) -> Json:
        text = "".join(self._pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": rendered(self._logprobs)}


class ReasoningItem:
    """`is_sealed`: with its text once more, for clients that send no reasoning back but what they cannot read."""

    def __init__(self, *, is_sealed: bool = False) -> None:
        self.id = new_id("rs_")
        self._is_sealed = is_sealed
        self._pieces: list[str] = []

    def begin(self) -> list[Json]:
        return _text_begins(self.id, self.json("in_progress"), self._part())

    def add(self, text: str) -> Json:
        self._pieces.append(text)
        return {"type": "response.reasoning_text.delta", "item_id": self.id, "content_index": 0, "delta": text}

    def end(self, status: ItemStatus) -> list[Json]:
        part = self._part()
        done = {"type": "response.reasoning_text.done", "text": part["text"]}
        return _text_ends(self.id, done, part, self.json(status))

    def json(self, status: ItemStatus) -> Json:
        content = [self._part()] if self._pieces or status != "in_progress" else []
        made: Json = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self._is_sealed and status != "in_progress":
            made["encrypted_content"] = seal("".join(self._pieces))
        return made

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": "".join(self._pieces)}


class CallItem:
    def __init__(self, call_id: str, name: str, namespace: str | None = None) -> None:
        self.id = new_id("fc_")
        self._head = _call_head("function_call", call_id, name, namespace)
        self._pieces: list[str] = []

    def begin(self) -> list[Json]:
        return [{"type": "response.output_item.added", "item": self.json("in_progress")}]

    def add(self, text: str) -> Json | None:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", "item_id": self.id, "delta": text}

    def end(self, status: ItemStatus) -> list[Json]:
        done = {"type": "response.function_call_arguments.done", "item_id": self.id, "name": self._head["name"]}
        return [
            {**done, "arguments": "".join(self._pieces)},
            {"type": "response.output_item.done", "item": self.json(status)},
        ]

    def json(self, status: ItemStatus) -> Json:
        return {"id": self.id, **self._head, "status": status, "arguments": "".join(self._pieces)}


class CustomCallItem:
    def __init__(self, call_id: str, name: str, namespace: str | None = None) -> None:
        self.id = new_id("ctc_")
        self._head = _call_head("custom_tool_call", call_id, name, namespace)
        self._reader = InputReader()
        self._pieces: list[str] = []

    def begin(self) -> list[Json]:
        return [{"type": "response.output_item.added", "item": self.json("in_progress")}]

    def add(self, text: str) -> Json | None:
        """None where `text`, of the arguments, says nothing of the input."""
        return self._delta(self._reader.feed(text))

    def _delta(self, text: str) -> Json | None:
        if not text:
            return None
        self._pieces.append(text)
        return {"type": "response.custom_tool_call_input.delta", "item_id": self.id, "delta": text}

    def end(self, status: ItemStatus) -> list[Json]:
        last = self._delta(self._reader.end())
        done = {"type": "response.custom_tool_call_input.done", "item_id": self.id, "input": "".join(self._pieces)}
        events: list[Json] = [done, {"type": "response.output_item.done", "item": self.json(status)}]
        return events if last is None else [last, *events]

    def json(self, status: ItemStatus) -> Json:
        return {"id": self.id, **self._head, "status": status, "input": "".join(self._pieces)}


def _call_head(kind: str, call_id: str, name: str, namespace: str | None) -> Json:
    head: Json = {"type": kind, "call_id": call_id, "name": name}
    return head if namespace is None else {**head, "namespace": namespace}


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


def _text_begins(item_id: str, item: Json, part: Json) -> list[Json]:
    return [
        {"type": "response.output_item.added", "item": item},
        {"type": "response.content_part.added", "item_id": item_id, "content_index": 0, "part": part},
    ]


def _text_ends(item_id: str, done: Json, part: Json, item: Json) -> list[Json]:
    place = {"item_id": item_id, "content_index": 0}
    return [
        {**done, **place},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "item": item},
    ]
