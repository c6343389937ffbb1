"""Errors as Ollama's clients read them: {"error": "what is wrong"}. The statuses are those of every route."""

from __future__ import annotations

from orjson import dumps

from server.http.errors import ApiError


def error_body(error: ApiError) -> bytes:
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    return dumps({"error": message})


class OllamaErrors:
    """The ErrorShape of Ollama's routes."""

    def body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)

    def headers(self, request_id: str) -> tuple[tuple[bytes, bytes], ...]:
        return ()
