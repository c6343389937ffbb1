"""Parsing of recorded bytes into an Answer: HTTP framing, server-sent events, OpenAI chunks, token counts.

No I/O and no clock: times come from the recording. The three parsers receive bytes and return complete parts."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtests.exchange import Recording

Endpoint = Literal["chat", "completions", "embeddings"]
PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
_EXCERPT = 200


class BadAnswer(Exception):
    """Error: the server did not send a complete, successful answer."""


class ChunkedBody:
    """Decoder of the chunked coding of RFC 9112, section 7.1. Chunk extensions and trailers are skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        self._buffer += data
        out, at = bytearray(), 0
        while not self.ended and (line_end := self._buffer.find(b"\r\n", at)) >= 0:
            try:
                size = int(bytes(self._buffer[at:line_end]).split(b";")[0], 16)
            except ValueError:
                raise BadAnswer("broken chunked coding") from None
            start = line_end + 2
            if size == 0:
                self.ended = True
            elif len(self._buffer) < start + size + 2:
                break
            else:
                out += self._buffer[start : start + size]
                at = start + size + 2
        del self._buffer[:at]
        return bytes(out)


class HttpResponse:
    """Parser of an HTTP response: status line, headers, decoded body. `status` is 0 until the head is complete; 1xx are skipped."""

    def __init__(self) -> None:
        self.status = 0
        self._head = b""
        self._chunked: ChunkedBody | None = None

    def feed(self, data: bytes) -> bytes:
        while not self.status:
            head, separator, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head + separator
            if not separator:
                return b""
            self._read_head(head)
            self._head = b""
        return self._chunked.feed(data) if self._chunked else data

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        parts = first.split(maxsplit=2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise BadAnswer(f"not HTTP: {_excerpt(first)}")
        status = int(parts[1])
        if status < 200:
            return
        self.status = status
        headers = {
            name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(b":") for line in lines)
        }
        if headers.get(b"transfer-encoding", b"").endswith(b"chunked"):
            self._chunked = ChunkedBody()


class SseData:
    """Parser of server-sent events (WHATWG HTML, section 9.2). It yields each event's data and drops other fields."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one request. Times are in seconds: request sent, each event with content, last byte. `error` None: complete.

    Token counts come from the server's `usage`. Without `usage`, the number of events with content counts as output tokens."""

    sent_s: float
    ended_s: float
    content_s: tuple[float, ...] = ()
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    counted_by_usage: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.content_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token in seconds; None for a single token, or if all content arrived in one event."""
        if self.num_output_tokens < 2 or len(self.content_s) < 2:
            return None
        return (self.content_s[-1] - self.content_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between successive events with content; one event may carry several tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.content_s)]

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s


@dataclass(slots=True)
class _Stream:
    endpoint: Endpoint
    content_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finished: bool = False

    def take(self, at_s: float, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise BadAnswer(f"event is not JSON: {_excerpt(data)}") from None
        if not isinstance(event, dict):
            raise BadAnswer(f"event is not an object: {_excerpt(data)}")
        if event.get("error"):
            raise BadAnswer(f"error event: {_message(event)}")
        try:
            choices = event.get("choices") or ()
            if any(_has_content(choice, self.endpoint) for choice in choices):
                self.content_s.append(at_s)
                self.texts += [_text(choice, self.endpoint) for choice in choices]
            self.finished |= any(choice.get("finish_reason") for choice in choices)
            self.usage = dict(event.get("usage") or self.usage)
        except (AttributeError, TypeError, ValueError):
            raise BadAnswer(f"event of unexpected shape: {_excerpt(data)}") from None


def _has_content(choice: dict[str, Any], endpoint: Endpoint) -> bool:
    if endpoint == "completions":
        return bool(choice.get("text"))
    delta = choice.get("delta") or {}
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _text(choice: dict[str, Any], endpoint: Endpoint) -> str:
    return (choice.get("text") if endpoint == "completions" else (choice.get("delta") or {}).get("content")) or ""


def answer_text(recording: Recording, endpoint: Endpoint) -> str:
    """Return the answer's text, without reasoning and tool calls. If the answer is incomplete, return the text received."""
    stream = _Stream(endpoint)
    with contextlib.suppress(BadAnswer):
        _replay(recording, stream)
    return "".join(stream.texts)


def read_answer(recording: Recording, endpoint: Endpoint) -> Answer:
    """Parse a recording into an Answer. Never raises: an invalid response becomes an Answer with an error."""
    ended_s = recording.times[-1] if recording.times else recording.sent_s
    if endpoint == "embeddings":
        return _read_embeddings(recording, ended_s)
    stream = _Stream(endpoint)
    try:
        _replay(recording, stream)
        if recording.failure is not None:
            raise BadAnswer(recording.failure)
        if not stream.content_s:
            raise BadAnswer("no content")
        if not stream.finished:
            raise BadAnswer("stream ended before its end")
    except BadAnswer as reason:
        return Answer(recording.sent_s, ended_s, error=str(reason))
    usage = stream.usage
    return Answer(
        recording.sent_s,
        ended_s,
        tuple(stream.content_s),
        num_output_tokens=usage.get("completion_tokens", len(stream.content_s)),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        counted_by_usage="completion_tokens" in usage,
    )


def _read_embeddings(recording: Recording, ended_s: float) -> Answer:
    """Parse an embeddings response. It has no first token, so its TTFT is the latency of the request."""
    response, body = HttpResponse(), b""
    try:
        body = b"".join(map(response.feed, recording.pieces))
        _check_status(response, body, recording)
        if recording.failure is not None:
            raise BadAnswer(recording.failure)
        answer = json.loads(body)
        if not all(entry["embedding"] for entry in answer["data"]) or not answer["data"]:
            raise BadAnswer("an embedding is empty")
        usage = answer.get("usage") or {}
        num_tokens = int(usage.get("prompt_tokens", 0))
    except BadAnswer as reason:
        return Answer(recording.sent_s, ended_s, error=str(reason))
    except (LookupError, TypeError, ValueError, AttributeError):
        return Answer(recording.sent_s, ended_s, error=f"no embeddings: {_excerpt(body)}")
    return Answer(recording.sent_s, ended_s, (ended_s,), num_prompt_tokens=num_tokens, counted_by_usage=bool(usage))


def _replay(recording: Recording, stream: _Stream) -> None:
    response, events = HttpResponse(), SseData()
    refusal = b""
    for at_s, piece in zip(recording.times, recording.pieces, strict=True):
        body = response.feed(piece)
        if response.status == 200:
            for data in events.feed(body):
                stream.take(at_s, data)
        else:
            refusal += body
    _check_status(response, refusal, recording)


def _check_status(response: HttpResponse, body: bytes, recording: Recording) -> None:
    if response.status == 0:
        raise BadAnswer(recording.failure or "connection closed without an answer")
    if response.status != 200:
        raise BadAnswer(f"HTTP {response.status}: {_refusal_text(body)}")


def _refusal_text(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return _excerpt(body)


def _message(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_EXCERPT]


def _excerpt(data: bytes) -> str:
    return data[:_EXCERPT].decode(errors="replace").strip()
