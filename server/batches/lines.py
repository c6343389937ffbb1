"""Lines of a batch. They are parsed, answered like an HTTP request but without a socket, and written as records.

Each line is passed to the endpoint that it names, so answers and errors are the server's own. An invalid line fails alone. Heavy
modules are imported by the first line."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, get_args

from server.http.errors import ApiError, BodyTooLarge, InvalidRequest, RouteNotFound, clip

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from server.http.call import Call

Url = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"]
URLS: Final[tuple[str, ...]] = get_args(Url)
LINE_EXTRA_BYTES = 64 * 1024  # of a line around its body


# --- files of lines -----------------------------------------------------------------------------------------------


class RepeatedId(ValueError):
    """Error: two lines have the same custom_id."""

    def __init__(self, number: int, custom_id: str) -> None:
        super().__init__(f"line {number}: custom_id {clip(custom_id)!r} occurs twice; no line was processed")
        self.number = number


def lines_of(file: BinaryIO, limit_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, content) of every line that is not blank. The content is None if the line is longer than `limit_bytes`."""
    file.seek(0)
    number = 0
    while line := file.readline(limit_bytes + 1):
        number += 1
        content = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
        too_long = len(line) > limit_bytes
        while line and not line.endswith(b"\n"):
            line = file.readline(limit_bytes + 1)
        if too_long or content:
            yield number, None if too_long else content


def digest(custom_id: str) -> bytes:
    """Return a short digest of `custom_id`, which saves memory for millions of long ids."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def custom_id_of(line: bytes | None) -> str | None:
    """Return the custom_id in `line`, or None if it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(line or b"")
        found = content.get("custom_id") if isinstance(content, dict) else None
        return found if isinstance(found, str) else None
    return None


def count_lines(file: BinaryIO, limit_bytes: int) -> int:
    """Return the number of requests in `file`. Raises RepeatedId."""
    seen: set[bytes] = set()
    num = 0
    for number, line in lines_of(file, limit_bytes):
        num += 1
        custom_id = custom_id_of(line)
        if custom_id is None:
            continue
        if digest(custom_id) in seen:
            raise RepeatedId(number, custom_id)
        seen.add(digest(custom_id))
    return num


# --- one line -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineRequest:
    custom_id: str
    url: str
    body: bytes


def read_line(line: bytes | None, limit_bytes: int) -> LineRequest:
    """Parse `line`. Raises ApiError if it is invalid."""
    import msgspec

    if line is None:
        raise BodyTooLarge(limit_bytes)
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        unknown = fields.keys() - {"custom_id", "method", "url", "body"}
        values = {name: msgspec.json.decode(fields[name], type=str) for name in ("custom_id", "method", "url")}
        body = bytes(fields["body"])
    except KeyError as error:
        raise InvalidRequest(f"the line lacks the field {error.args[0]}", param=error.args[0]) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f'the line is not a {{"custom_id", "method", "url", "body"}} object: {clip(error)}'
        ) from None
    if unknown:
        raise InvalidRequest(f"the line has unknown fields: {clip(', '.join(sorted(unknown)))}")
    if values["method"] != "POST" or values["url"] not in URLS:
        raise RouteNotFound(clip(values["method"]), values["url"])
    with contextlib.suppress(msgspec.MsgspecError):  # what is wrong with the body is the endpoint's to say
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("stream", b"null")
        if bytes(given) not in (b"null", b"false"):
            raise InvalidRequest("stream is not supported in a batch; leave it out", param="stream")
    return LineRequest(values["custom_id"], values["url"], body)


@dataclass(slots=True)
class LineAnswer:
    """Response of an endpoint to one line. Status 0: the line was cancelled."""

    status: int = 0
    request_id: str = ""
    body: bytes = b""


async def call(
    app: ASGIApp, request: LineRequest, gone: asyncio.Event | None = None, make_call: Callable[[], Call] | None = None
) -> LineAnswer:
    """Return the response of `app` to `request`. For `app`, the client stays connected until the end, or until `gone` is set.
    `make_call`: creates the Call. Raises CancelledError if there is no response."""
    answer = LineAnswer()
    unread = [request.body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await (asyncio.Event() if gone is None else gone).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.request_id = dict(message["headers"])[b"x-request-id"].decode("latin-1")
        else:
            answer.body += message.get("body", b"")

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(request.body))]
    own: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": request.url,
        "query_string": b"",
        "headers": headers,
    }
    if make_call is not None:
        own["call"] = make_call()
    await app(own, receive, send)
    if not answer.status:
        raise asyncio.CancelledError  # which ends at the outermost layer of the application
    return answer


class LineCalls:
    """Execution of lines by endpoints. If the engine's queue is full, a line waits until another line ends."""

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        """Create the execution. `apps`: endpoints by URL."""
        self._apps = apps
        self._num_active = 0  # lines the engine may be working on
        self._one_ended = asyncio.Event()

    async def answer(
        self, request: LineRequest, gone: asyncio.Event | None = None, make_call: Callable[[], Call] | None = None
    ) -> LineAnswer:
        """Return the response to `request`. Status 429 is retried as long as another line is in flight. Arguments, errors: see
        `call`."""
        while True:
            self._num_active += 1
            try:
                answer = await call(self._apps[request.url], request, gone, make_call)
            except BaseException:
                self._num_active -= 1
                self._wake()
                raise
            self._num_active -= 1
            if answer.status != 429 or not self._num_active:
                self._wake()
                return answer
            await self._one_ended.wait()

    def _wake(self) -> None:
        self._one_ended.set()
        self._one_ended = asyncio.Event()


# --- records ------------------------------------------------------------------------------------------------------


def record_of(custom_id: str | None, answer: LineAnswer) -> bytes:
    import msgspec

    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    record = {"id": f"batch_req_{answer.request_id}", "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(record) + b"\n"


def error_record_of(custom_id: str | None, number: int, error: ApiError) -> bytes:
    """Return the output record of a line that is not a valid request. `number`: line number, for id and message."""
    complaint = {
        "code": error.code or "invalid_line",
        "message": f"line {number}: {error.message}",
        "param": error.param,
    }
    record = {"id": f"batch_req_line_{number}", "custom_id": custom_id, "response": None, "error": complaint}
    return json.dumps(record).encode() + b"\n"


BEHIND = 1000  # lower runs first; requests that say nothing have 0


def behind_others(request: LineRequest) -> LineRequest:
    """Return `request` with a low priority, unless its body already has a priority or is not an object."""
    import msgspec

    try:
        fields = msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return request
    fields.setdefault("priority", msgspec.Raw(b"%d" % BEHIND))
    return replace(request, body=msgspec.json.encode(fields))
