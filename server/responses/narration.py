"""Narration: one response as it comes to be, event by event; whole at every moment for whoever asks for its body.

The order is OpenAI's: created (queued, if in the background), in_progress; for each item added, its parts and deltas, done; then
one of completed, incomplete, failed. Items follow each other in the order the model wrote them, the deltas of an item add up
to it, and `sequence_number` counts without gaps. A call that breaks off stays, as incomplete; all that was written of it
follows as text, so nothing is lost. Knows nothing of HTTP, streams or the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from orjson import dumps

from runtime.api import FinishReason, Output
from server.frames import Json
from server.generation import Generation
from server.logprobs import chat_writer
from server.responses.body import Head, Status, usage
from server.responses.output_items import CallItem, ItemStatus, MessageItem, OutputItem, ReasoningItem
from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCall

_FINAL_EVENTS = {
    "completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed",
    "cancelled": "response.incomplete",  # clients know no event of its own; the status says it
}  # fmt: skip


class Narration:
    def __init__(self, head: Head, generation: Generation, *, in_background: bool) -> None:
        self.status: Status = "queued" if in_background else "in_progress"
        self._head = head
        self._generation = generation
        self._choice = generation.choices[0]
        self._write = None
        if generation.options.logprobs is not None:
            self._write = chat_writer(generation.tokenizer, generation.style(0))
        self._pending: list[bytes] = []  # log-probabilities of tokens of which nothing was said yet
        self._done: list[Json] = []
        self._item: OutputItem | None = None  # which is being written
        self._error: Json | None = None
        self._completed_at: int | None = None
        self._num_events = 0

    @property
    def id(self) -> str:
        return self._head.id

    @property
    def output(self) -> list[Json]:
        """The items, the last one as far as it goes."""
        return self._done if self._item is None else [*self._done, self._item.json("in_progress")]

    @property
    def body(self) -> Json:
        """The response as it is now."""
        is_over = self.status in _FINAL_EVENTS
        return self._head.body(
            self.status,
            self.output,
            usage=usage(self._generation) if is_over and self.status != "failed" else None,
            error=self._error,
            incomplete="max_output_tokens" if self.status == "incomplete" else None,
            completed_at=self._completed_at,
        )

    # --- what happens, as events ----------------------------------------------------------------------------------

    def begin(self) -> list[Json]:
        events = [self._lifecycle("response.created")]
        if self.status == "queued":
            return [*events, self._lifecycle("response.queued")]
        return [*events, self._lifecycle("response.in_progress")]

    def feed(self, output: Output) -> list[Json]:
        """Raises EngineFailed."""
        told: list[Json] = []
        if self.status == "queued":
            self.status = "in_progress"
            told.append(self._lifecycle("response.in_progress"))
        for piece in [output] if self._write is None else _by_token(output):
            told += map(self._numbered, self._heard(piece))
            if self._choice.finish_reason is not None:
                break
        return told

    def end(self) -> list[Json]:
        """What comes after the last Output: the response is complete, or as complete as it gets."""
        if self._choice.finish_reason == FinishReason.ABORT:
            return self.fail("The server shut down before the response was complete")
        is_cut = self._choice.finish_reason == FinishReason.LENGTH
        told: list[Json] = []
        if self._item is None and not self._done:
            told += map(self._numbered, self._open(MessageItem()))  # an answer without a word is one, too
        told += map(self._numbered, self._close("incomplete" if is_cut else "completed"))
        return [*told, self._over("incomplete" if is_cut else "completed")]

    def fail(self, message: str) -> list[Json]:
        """`message`: for the client."""
        self._error = {"code": "server_error", "message": message}
        told = list(map(self._numbered, self._close("incomplete")))
        return [*told, self._over("failed")]

    def cancel(self) -> list[Json]:
        told = list(map(self._numbered, self._close("incomplete")))
        return [*told, self._over("cancelled")]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _heard(self, output: Output) -> Iterator[Json]:
        num_reasoning = self._choice.num_reasoning_tokens
        events = self._choice.events(output)
        self._note_logprobs(is_reasoning=self._choice.num_reasoning_tokens > num_reasoning)
        for event in events:
            yield from self._told(event)

    def _note_logprobs(self, *, is_reasoning: bool) -> None:
        if self._write is None:
            return
        self._pending += map(dumps, self._write(self._choice.take_logprobs())["content"])
        if is_reasoning:
            self._pending.clear()

    def _told(self, event: Event) -> Iterator[Json]:
        match event:
            case Text(text):
                yield from self._text(text)
                return
            case Reasoning(text):
                if not isinstance(self._item, ReasoningItem):
                    yield from self._open(ReasoningItem())
                assert isinstance(self._item, ReasoningItem)
                yield self._item.add(text)
            case ToolCall(_, name, id):
                yield from self._open(CallItem(id or "", name))
            case ToolArguments(_, text):
                assert isinstance(self._item, CallItem), "a call is whole before the next one begins"
                yield self._item.add(text)
            case Malformed(_, text):
                yield from self._close("incomplete")
                yield from self._text(text)
        self._pending.clear()

    def _text(self, text: str) -> Iterator[Json]:
        if not text:
            return
        if not isinstance(self._item, MessageItem):
            yield from self._open(MessageItem())
        assert isinstance(self._item, MessageItem)
        logprobs, self._pending = self._pending, []
        yield self._item.add(text, logprobs)

    def _open(self, item: OutputItem) -> Iterator[Json]:
        yield from self._close("completed")
        self._item = item
        yield from item.begin()

    def _close(self, status: ItemStatus) -> Iterator[Json]:
        item = self._item
        if item is not None:
            yield from item.end(status)
            self._done.append(item.json(status))
            self._item = None

    def _numbered(self, event: Json) -> Json:
        """An event of the item that is being written, at the moment it is told."""
        event = {**event, "output_index": len(self._done), "sequence_number": self._num_events}
        self._num_events += 1
        return event

    def _lifecycle(self, type: str) -> Json:
        event = {"type": type, "response": self.body, "sequence_number": self._num_events}
        self._num_events += 1
        return event

    def _over(self, status: Status) -> Json:
        self.status = status
        if status == "completed":
            self._completed_at = int(time.time())
        return self._lifecycle(_FINAL_EVENTS[status])


def _by_token(output: Output) -> Iterator[Output]:
    """One Output a token, so that log-probabilities stand beside the text of theirs."""
    ids, last = output.token_ids, len(output.token_ids) - 1
    if last < 1:
        yield output
        return
    for number, id in enumerate(ids):
        own = None if output.logprobs is None else output.logprobs[number : number + 1]
        if number == last:
            yield replace(output, token_ids=[id], logprobs=own)
        else:
            yield Output(output.index, [id], num_cached_tokens=output.num_cached_tokens, logprobs=own)


def frame(event: Json) -> bytes:
    """As a server-sent event."""
    name: str = event["type"]
    return b"event: " + name.encode("ascii") + b"\ndata: " + dumps(event) + b"\n\n"
