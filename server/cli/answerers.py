"""Sources of answers at a terminal: an OpenAI endpoint, or a model in this process (`local_model.py`). Both stream text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

Message = Mapping[str, Any]  # role and content: text, or parts by OpenAI's names
COUNTING = ("oneloop", "vllm")  # servers that count tokens in every chunk, by `owned_by` of their models
CONNECT_LIMIT_S = 10.0  # to an endpoint; an answer may take as long as it takes


class AnswerFailed(Exception):
    """Error: the server or model could not complete an answer. The message is for the user at the terminal."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Piece of an answer: text, reasoning, and the number of its tokens (0 if unknown)."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0


class Answerer(Protocol):
    """Source of answers. `fields`: request fields with OpenAI's names (`temperature` …). Leaving the iteration cancels it."""

    @property
    def name(self) -> str: ...

    def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the answer to a conversation in pieces. Raises AnswerFailed, possibly after some pieces."""
        ...

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the continuation of `prompt` in pieces. Raises AnswerFailed, possibly after some pieces."""
        ...

    async def close(self) -> None: ...


class Endpoint:
    """Client of an OpenAI-compatible server at http://, https:// or unix:PATH. `model` None: the first model that the server
    lists. It belongs to one event loop."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if url.startswith("unix:"):
            transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix:").removeprefix("//"))
            base = "http://localhost"  # a name that every server answers to
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(None, connect=CONNECT_LIMIT_S)
        self._client = httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout, transport=transport)
        self.name = model or ""
        self._stream_options: dict[str, bool] | None = None  # None: the models have not been listed yet

    async def find_model(self) -> None:
        """Ask the server for its models: the first becomes the model unless one was named. Raises AnswerFailed if it has none."""
        if self._stream_options is not None:
            return
        self._stream_options = {"include_usage": True}
        try:
            with _reached():
                response = await self._client.get("/v1/models")
                if response.status_code != 200:
                    raise AnswerFailed(_complaint(response.content, response.status_code))
                models = [(entry["id"], entry.get("owned_by")) for entry in response.json()["data"]]
        except AnswerFailed:
            if self.name:
                return
            self._stream_options = None
            raise
        if not models:
            raise AnswerFailed("the endpoint lists no model: name one with --model")
        if models[0][1] in COUNTING:
            self._stream_options["continuous_usage_stats"] = True
        self.name = self.name or models[0][0]

    def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        return self._stream("/v1/chat/completions", {"messages": messages, **fields}, _said)

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        return self._stream(
            "/v1/completions", {"prompt": prompt, **fields}, lambda choice: AnswerPiece(choice.get("text") or "")
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def _stream(
        self, path: str, fields: Mapping[str, Any], read: Callable[[Mapping[str, Any]], AnswerPiece]
    ) -> AsyncGenerator[AnswerPiece, None]:
        await self.find_model()
        num_tokens = 0
        body = {"model": self.name, "stream": True, "stream_options": self._stream_options, **fields}
        with _reached():
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise AnswerFailed(_complaint(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    name, _, data = line.partition(":")
                    if name != "data" or data.strip() == "[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("error"):
                        raise AnswerFailed(_message(event))
                    for choice in event.get("choices") or ():
                        yield read(choice)
                    so_far = (event.get("usage") or {}).get("completion_tokens") or num_tokens
                    yield AnswerPiece(num_tokens=so_far - num_tokens)
                    num_tokens = so_far


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise AnswerFailed(f"the endpoint cannot be reached: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AnswerFailed(f"the endpoint is not an OpenAI-compatible API: {type(error).__name__}: {error}") from error


def _said(choice: Mapping[str, Any]) -> AnswerPiece:
    delta = choice.get("delta") or {}
    return AnswerPiece(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "")


def _complaint(body: bytes, status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"{_message(json.loads(body))} (HTTP {status})"
    return f"HTTP {status}"


def _message(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    return str(error.get("message", error) if isinstance(error, dict) else error)
