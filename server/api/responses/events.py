"""Events of a response in progress, and the response's body at any moment.

The order is OpenAI's: created (or queued, in the background) and in_progress; then for each item added, its parts and deltas,
and done; then completed, incomplete or failed. Items are in the order of generation. The deltas of an item concatenate to its
text, and `sequence_number` has no gaps. An unfinished call is sent as incomplete, followed by its text as a message. Independent
of HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from msgspec import structs
from msgspec.json import encode

from runtime.api import FinishReason, Output
from server.api.frames import named_event
from server.api.responses import api_types
from server.api.responses.api_types import EventOfItem, ItemStatus, OutputItem, Response, ResponseEvent, Status
from server.api.responses.output_items import CallItem, CustomCallItem, MessageItem, OpenItem, ReasoningItem
from server.api.responses.tools import Tool
from server.generate.generation import Generation
from server.generate.logprobs import chat_writer
from server.http.errors import Aborted, ApiError, InvalidRequest
from server.http.sse import Frames
from server.text.events import Event, Malformed, Reasoning, Text, ToolArguments, ToolCallStart

logger = logging.getLogger("oneloop.http")

_FINAL_EVENTS: Mapping[str, type[api_types.EventOfResponse]] = {
    "completed": api_types.ResponseCompleted, "incomplete": api_types.ResponseIncomplete, "failed": api_types.ResponseFailed,
    "cancelled": api_types.ResponseIncomplete,  # clients know no event of its own; the status says it
}  # fmt: skip


NewItem = TypeVar("NewItem", bound=OpenItem)


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """Data of a response that is about to start. `response`: without output. `tools`: the request's tools, by function name.
    `seals_reasoning`: reasoning is also sent as `encrypted_content`."""

    response: Response
    tools: Mapping[str, Tool] = field(default_factory=dict)
    seals_reasoning: bool = False


class ResponseEvents:
    def __init__(self, head: ResponseStart, generation: Generation, *, in_background: bool) -> None:
        self.status: Status = "queued" if in_background else "in_progress"
        self._head = head
        self._generation = generation
        self._choice = generation.choices[0]
        self._write = None
        if generation.options.logprobs is not None:
            self._write = chat_writer(generation.tokenizer, generation.style(0))
        self._pending: list[bytes] = []  # log-probabilities of tokens that no event has shown yet
        self._done: list[OutputItem] = []
        self._item: OpenItem | None = None  # which is being written
        self._error: api_types.ResponseError | None = None
        self._completed_at: int | None = None
        self._num_events = 0
        self._untaken: list[ResponseEvent] = []  # and not yet taken

    @property
    def id(self) -> str:
        return self._head.response.id

    @property
    def body(self) -> Response:
        """Current state of the response. The item in progress is marked as incomplete."""
        is_over = self.status in _FINAL_EVENTS
        return structs.replace(
            self._head.response,
            status=self.status,
            output=[*self._done, *([] if self._item is None else [self._item.item("in_progress")])],
            usage=api_types.ResponseUsage.of(self._generation) if is_over and self.status != "failed" else None,
            error=self._error,
            incomplete_details=api_types.IncompleteDetails() if self.status == "incomplete" else None,
            completed_at=self._completed_at,
        )

    # --- what happens, as events ----------------------------------------------------------------------------------

    def begin(self) -> list[ResponseEvent]:
        self._add_of_response(api_types.ResponseCreated)
        is_queued = self.status == "queued"
        self._add_of_response(api_types.ResponseQueued if is_queued else api_types.ResponseInProgress)
        return self._taken()

    def feed(self, output: Output) -> list[ResponseEvent]:
        """Return the events for the engine's output `output`. Raises EngineFailed."""
        if self.status == "queued":
            self.status = "in_progress"
            self._add_of_response(api_types.ResponseInProgress)
        if self._write is None:
            for event in self._choice.events(output):
                self._hear(event)
            return self._taken()
        for piece in _by_token(output):
            self._hear_with_logprobs(piece)
            if self._choice.finish_reason is not None:
                break
        return self._taken()

    def end(self) -> list[ResponseEvent]:
        """Return the events after the last output, up to completed or incomplete."""
        if self._choice.finish_reason == FinishReason.ABORT:
            return self.fail(Aborted())
        is_cut = self._choice.finish_reason == FinishReason.LENGTH
        if self._item is None and not self._done:
            self._open(MessageItem())  # an answer without a word is one, too
        # A call that was cut off has said so itself.
        is_half = is_cut and not isinstance(self._item, CallItem)
        self._close("incomplete" if is_half else "completed")
        return self._over("incomplete" if is_cut else "completed")

    def fail(self, error: Exception) -> list[ResponseEvent]:
        """Return the events that report the failure `error`. Only the message of an ApiError is sent to the client."""
        self._error = api_types.ResponseError("server_error", "The server had an error while it made the response")
        if isinstance(error, ApiError):
            self._error.message = error.message
            if isinstance(error, InvalidRequest):
                self._error.code = "invalid_prompt"  # of OpenAI's words the one for what a client can mend
        else:
            logger.error("%s failed", self.id, exc_info=error)
        self._close("incomplete")
        return self._over("failed")

    def cancel(self) -> list[ResponseEvent]:
        self._close("incomplete")
        return self._over("cancelled")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _hear_with_logprobs(self, output: Output) -> None:
        assert self._write is not None, "they are wanted"
        num_reasoning = self._choice.num_reasoning_tokens
        events = self._choice.events(output)
        self._pending += map(encode, self._write(self._choice.take_logprobs()).content)
        if self._choice.num_reasoning_tokens > num_reasoning:
            self._pending.clear()
        for event in events:
            self._hear(event)
            if not isinstance(event, Text) or event.text:
                self._pending.clear()

    def _hear(self, event: Event) -> None:
        match event:
            case Text(text):
                self._add_text(text)
            case Reasoning(text):
                if not isinstance(self._item, ReasoningItem):
                    self._item = self._open(ReasoningItem(is_sealed=self._head.seals_reasoning))
                self._add(self._item.add(text))
            case ToolCallStart(_, name, id):
                self._open_call(id or "", name)
            case ToolArguments(_, text):
                assert isinstance(self._item, CallItem), "a call is whole before the next one begins"
                if (delta := self._item.add(text)) is not None:
                    self._add(delta)
            case Malformed(_, text):
                self._close("incomplete")
                self._add_text(text)

    def _open_call(self, id: str, function: str) -> None:
        tool = self._head.tools.get(function)
        if tool is None:
            self._open(CallItem(id, function))
        else:
            kind = CustomCallItem if tool.is_custom else CallItem
            self._open(kind(id, tool.name, tool.namespace))

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if not isinstance(self._item, MessageItem):
            self._item = self._open(MessageItem())
        self._add(self._item.add(text, self._pending))

    def _open(self, item: NewItem) -> NewItem:
        self._close("completed")
        self._item = item
        for event in item.begin():
            self._add(event)
        return item

    def _close(self, status: ItemStatus) -> None:
        item = self._item
        if item is not None:
            for event in item.end(status):
                self._add(event)
            self._done.append(item.item(status))
            self._item = None

    def _add(self, event: EventOfItem) -> None:
        """Append an event about the item in progress."""
        event.output_index = len(self._done)
        self._number(event)

    def _add_of_response(self, kind: type[api_types.EventOfResponse]) -> None:
        self._number(kind(self.body))

    def _number(self, event: ResponseEvent) -> None:
        event.sequence_number = self._num_events
        self._num_events += 1
        self._untaken.append(event)

    def _taken(self) -> list[ResponseEvent]:
        taken, self._untaken = self._untaken, []
        return taken

    def _over(self, status: Status) -> list[ResponseEvent]:
        self.status = status
        if status == "completed":
            self._completed_at = int(time.time())
        self._add_of_response(_FINAL_EVENTS[status])
        return self._taken()


def _by_token(output: Output) -> Iterator[Output]:
    """Split `output` into one Output per token, so that each text has its token's log-probabilities."""
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


class EventFrames(Frames[Sequence[Output]]):
    """Converter of one streamed response to events. `finished`: called after the last event unless the client disconnects."""

    def __init__(self, response_events: ResponseEvents, finished: Callable[[], object]) -> None:
        self._response_events = response_events
        self._finished = finished

    def begin(self) -> bytes:
        return b"".join(map(named_event, self._response_events.begin()))

    def feed(self, outputs: Sequence[Output]) -> bytes:
        return b"".join(named_event(event) for output in outputs for event in self._response_events.feed(output))

    def end(self) -> bytes:
        last = b"".join(map(named_event, self._response_events.end()))
        self._finished()
        return last

    def fail(self, error: Exception) -> bytes:
        last = b"".join(map(named_event, self._response_events.fail(error)))
        self._finished()
        return last
