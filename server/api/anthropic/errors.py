"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}.

HTTP statuses are the same as in the other APIs. The message names the invalid field, because the format has no key for it."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.json import encode

from server.api.anthropic.api_types import AnthropicError, AnthropicErrorDetails, ErrorCode
from server.http.errors import ApiError, ContextLengthExceeded, InvalidRequest, clip

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ThreadNotFound(InvalidRequest):
    """Error for any thread id, because the server stores no threads. Clients then send the whole conversation again."""

    status, code = 404, "thread_not_found"

    def __init__(self, previous_message_id: str) -> None:
        super().__init__(
            f"No thread ends with {clip(previous_message_id)!r}: this server stores no threads; send all messages",
            param="thread",
        )


def error_body(error: ApiError, request_id: str) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {message}"  # the words by which clients know that they have to shorten it
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    details = ErrorCode(error.code) if isinstance(error, ThreadNotFound) else UNSET
    return encode(AnthropicError(AnthropicErrorDetails(kind, message, details), request_id))


class AnthropicErrors:
    """Error format of Anthropic's routes. Responses contain the request's id in the header `request-id`."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error, request_id)

    def headers(self, request_id: str) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"request-id", request_id.encode("latin-1")),)
