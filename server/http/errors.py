"""Errors of the server: HTTP status, type, code and OpenAI body.

Every error is an ApiError. InvalidRequest (400) is a client error whose `param` names the field. The body is OpenAI's {"error":
{"message", "type", "param", "code"}}; `code` may be null. Other APIs provide an ErrorShape (see
`server/api/anthropic/errors.py`). `middleware.py` converts engine errors. Standard library only."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

RETRY_WHEN_ABORTED_S = 10
RETRY_WHEN_LOST_S = 1  # the others are there
MAX_ECHO = 200  # characters of a client's own input that an answer repeats


def clip(value: object) -> str:
    """Return `value` as text, cut to the length at which responses quote a client's input."""
    text = str(value)
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "…"


class Field(str):
    """Path of a request field in the server's own names, such as "tools" or "chat_template_kwargs.x". A message contains the
    Field itself, so that each API can replace it by the API's own name (`FieldNames`)."""

    __slots__ = ()


class ApiError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, *message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        """Create the error. `message`: pieces of text, with a Field for each field name. `param`: path of the field, as a Field
        or plain text. `retry_after_s`: value of the Retry-After header."""
        super().__init__("".join(message))
        self._pieces = message
        self.message = "".join(message)
        self.param = param
        self.retry_after_s = retry_after_s

    def rename(self, name_of: Callable[[Field], str]) -> None:
        """Replace each Field in message and `param` by `name_of(field)`."""
        self._pieces = tuple(name_of(piece) if isinstance(piece, Field) else piece for piece in self._pieces)
        self.message = "".join(self._pieces)
        if isinstance(self.param, Field):
            self.param = name_of(self.param)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=True, separators=(",", ":")).encode("ascii")

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class ClientLeft(Exception):
    """Error: the client has disconnected."""


class ErrorShape(Protocol):
    """Error format of an API whose errors differ from OpenAI's."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        """Return the JSON body of an error response."""
        ...

    def headers(self, request_id: str) -> Sequence[tuple[bytes, bytes]]:
        """Return headers for every response of the API's routes."""
        ...


class InvalidRequest(ApiError):
    status, type = 400, "invalid_request_error"


class UnknownParameter(InvalidRequest):
    code = "unknown_parameter"

    def __init__(self, name: str, *, param: str, hint: str = "") -> None:
        """Create the error. `name`: the unknown field. `param`: its path. `hint`: text to append."""
        self.name = name
        self.is_nested = param != name
        super().__init__(f"Unrecognized request argument supplied: {clip(name)}{hint}", param=clip(param))


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"

    def __init__(self, name: str, *, param: str | None = None, instead: str | None = None) -> None:
        advice = "leave it out" if instead is None else f"use {instead} instead"
        super().__init__(f"{name} is not supported by this server; {advice}", param=param or name)


class TaskNotSupported(InvalidRequest):
    """Error: the model does not support the requested task. `param` is `model`."""

    code = "task_not_supported"

    def __init__(self, architecture: str, task: str, tasks: Sequence[str], *, hint: str = "") -> None:
        super().__init__(
            f"This model ({architecture}) does not support the task {task}; it supports {', '.join(tasks)}{hint}",
            param="model",
        )


class TextOnly(InvalidRequest):
    """Error: the prompt contains media of a kind that the model does not accept."""

    code = "unsupported_parameter"

    def __init__(self, name: str, kind: str, *, param: str, takes: Sequence[str] = ()) -> None:
        """Create the error. `name`: the model's name. `kind`: kind of the media. `takes`: kinds of media that the model accepts."""
        read = f"text and {', '.join(takes)}" if takes else "text"
        super().__init__(f"{name} has type {kind!r}; the model accepts {read} only", param=param)


class InvalidMedia(InvalidRequest):
    """Error: the media in field `where` cannot be read. `message`: the reason why."""

    code = "invalid_media"

    def __init__(self, message: str, where: str) -> None:
        super().__init__(f"{where} cannot be read: {message}", param=where)


class MediaNotInstalled(InvalidRequest):
    """Error: a package that decodes media is not installed. The operator can install it."""

    code = "media_not_installed"

    def __init__(self, why: str, where: str) -> None:
        super().__init__(f"{where} cannot be read by this server: {why}", param=where)


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnreadableBody(InvalidRequest):
    code = "invalid_json"


class StorageFull(InvalidRequest):
    code = "storage_full"


class BatchOver(InvalidRequest):
    """Error: a line of a batch was not answered within the batch's completion_window."""

    code = "batch_expired"

    def __init__(self) -> None:
        super().__init__("This request could not be executed before the completion window expired")


class MalformedHttp(InvalidRequest):
    code = "invalid_http"

    def __init__(self) -> None:
        super().__init__("This is not an HTTP/1.1 request")


class BadHost(InvalidRequest):
    code = "invalid_host"

    def __init__(self, num_hosts: int) -> None:
        named = "none" if num_hosts == 0 else str(num_hosts)
        super().__init__(f"An HTTP/1.1 request has one Host header; this one has {named}")


class _Unauthorized(ApiError):
    """Error 401. It reveals nothing about the given or the configured keys."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"
    text: ClassVar[str]
    challenge: ClassVar[str] = 'Bearer realm="oneloop"'

    def __init__(self) -> None:
        super().__init__(self.text)

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": self.challenge}


class MissingApiKey(_Unauthorized):
    text = "You did not provide an API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"


class InvalidApiKey(_Unauthorized):
    text = "Incorrect API key provided"
    challenge = 'Bearer realm="oneloop", error="invalid_token"'


class AdminOnly(ApiError):
    status, type, code = 403, "invalid_request_error", "insufficient_permissions"

    def __init__(self, path: str, *, has_key: bool = True) -> None:
        """Create the error. `path`: the refused path. `has_key`: whether an administrator's key is configured."""
        hint = "" if has_key else ", and this server was started without --admin-api-key"
        super().__init__(f"{clip(path)} needs the administrator's key{hint}")


class OriginNotAllowed(ApiError):
    status, type, code = 403, "invalid_request_error", "origin_not_allowed"

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Pages of {clip(origin)} may not use this server; the operator can allow them with --cors-origin"
        )


class HostNotAllowed(ApiError):
    status, type, code = 403, "invalid_request_error", "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"{clip(host)!r} is not an allowed host of this server; the operator can add it with --allowed-host"
        )


class ModelNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "model_not_found"

    def __init__(self, model: str, names: tuple[str, ...]) -> None:
        super().__init__(
            f"The model {clip(model)!r} does not exist; this server has {', '.join(map(repr, names))}", param="model"
        )


class AdaptersOff(ApiError):
    status, type, code = 403, "invalid_request_error", "adapters_off"

    def __init__(self) -> None:
        super().__init__("Adapters are disabled: start the server with --enable-lora")


class ResponseNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "response_not_found"
    kind: ClassVar[str] = "Response"
    field: ClassVar[str | None] = None

    def __init__(self, id: str, why: str) -> None:
        super().__init__(f"{self.kind} with id '{clip(id)}' not found: {why}", param=self.field)


class PreviousResponseNotFound(ResponseNotFound):
    code, kind, field = "previous_response_not_found", "Previous response", "previous_response_id"


class TextsNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "texts_not_found"


class BatchObjectNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"No such {kind} object: {clip(id)}", param="id")


class BatchesOff(ApiError):
    status, type, code = 404, "invalid_request_error", "batches_off"

    def __init__(self) -> None:
        super().__init__("Files and batches are disabled: start the server with --batch-dir FOLDER")


class RouteNotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "unknown_url"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Invalid URL ({method} {clip(path)})")


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_supported"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"Not allowed to {method} on {clip(path)}; allowed: {allowed}")
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"allow": self.allowed}


class UpgradeRequired(ApiError):
    status, type, code = 426, "invalid_request_error", "upgrade_required"

    def __init__(self, path: str) -> None:
        super().__init__(f"{clip(path)} is a WebSocket: connect to it with a WebSocket client")

    def headers(self) -> dict[str, str]:
        return {"upgrade": "websocket", "connection": "upgrade"}


class Conflict(ApiError):
    status, type, code = 409, "invalid_request_error", "conflict"


class RequestTimeout(ApiError):
    status, type, code = 408, "invalid_request_error", "request_timeout"

    def __init__(self, awaited: str, span_s: float) -> None:
        super().__init__(f"Waited {span_s:g} s for {awaited}")


class BodyTooLarge(ApiError):
    # The connection stays: uvicorn throws the rest of the body away as it comes, where closing at once would reset the
    # connection under a client that is still sending, and it would never read this.
    status, type, code = 413, "invalid_request_error", "request_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes")


class TooManyValues(ApiError):
    status, type, code = 413, "invalid_request_error", "request_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body has more than {limit} JSON values (a field name counts as 16 values)")


class NameTooLong(ApiError):
    status, type, code = 413, "invalid_request_error", "request_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"A name in the request body has more than {limit_bytes} bytes")


class WrongContentType(ApiError):
    status, type, code = 415, "invalid_request_error", "unsupported_content_type"

    def __init__(self, given: str | None, wanted: str = "application/json") -> None:
        named = f"not {clip(given)!r}" if given else "and the request names none"
        super().__init__(f"The content type must be {wanted}, {named}")


class TooManyRequests(ApiError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class HeadTooLarge(ApiError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"

    def __init__(self, why: str) -> None:
        super().__init__(f"The head of the request is too large: {why}")


class InternalError(ApiError):
    code = "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The server had an error while processing the request; details are in its log under {request_id}"
        )


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Return `error` as an ApiError, for an event in a started stream. Unexpected errors are logged under `request_id`."""
    if isinstance(error, ApiError):
        return error
    logging.getLogger("oneloop.http").error("%s failed while it streamed", request_id, exc_info=error)
    return InternalError(request_id)


class Unavailable(ApiError):
    status, code = 503, "service_unavailable"


class Aborted(Unavailable):
    """Error: the server aborted the request. A stream ends with a finish_reason instead, if its API has a suitable value."""

    def __init__(self) -> None:
        super().__init__(
            "The server ended the request before its answer was complete", retry_after_s=RETRY_WHEN_ABORTED_S
        )


class ModelFailed(Unavailable):
    code = "model_load_failed"

    def __init__(self, model: str, why: str, retry_after_s: float) -> None:
        super().__init__(
            f"The model {clip(model)!r} could not be loaded: {why}",
            param="model",
            retry_after_s=math.ceil(retry_after_s),
        )

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "x-should-retry": "false"}  # not by clients that would at once


class ReplicaLost(Unavailable):
    """Error: the server process that ran the request has ended. Other processes continue."""

    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__(
            "The replica that processed the request has ended; retry the request",
            retry_after_s=RETRY_WHEN_LOST_S,
        )


class DeadlineExceeded(ApiError):
    status, type, code = 504, "timeout_error", "deadline_exceeded"

    def headers(self) -> dict[str, str]:
        return {
            "x-should-retry": "false"
        }  # which the clients of OpenAI and Anthropic read: nobody waits for it any more


class FieldNames:
    """Mapping of the server's own field paths to the paths of one API. A nested path is renamed with its parent."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = sorted(names.items(), key=lambda pair: len(pair[0]), reverse=True)  # the most exact first

    def name_of(self, field: str) -> str:
        for ours, theirs in self._names:
            if field == ours or (field.startswith(ours) and field[len(ours)] in ".["):
                return theirs + field[len(ours) :]
        return field

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Context in which the fields of raised ApiErrors are renamed to the client's field names."""
        try:
            yield
        except InvalidRequest as error:
            error.rename(self.name_of)
            raise
