"""Routes POST /api/pull and DELETE /api/delete: download and delete models. They require --enable-model-management.

A pull runs on a thread and streams its progress as JSON lines. If the client disconnects, the pull is cancelled; the next pull
resumes the download. A pulled model is loaded by the first request that uses it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.api import LoadProgress
from server.api.ollama import api_types, request_types
from server.api.ollama.api_types import OllamaError, OllamaPull, OllamaStatus
from server.api.ollama.chat import LINES
from server.api.ollama.request_types import LATEST
from server.api.route import BODY_REFUSALS, JSON, route
from server.api.service import Service
from server.http.answers import json_response
from server.http.body import read_request
from server.http.errors import InvalidRequest, ModelNotFound
from server.http.watch import ClientWatch
from server.models.library import Library
from server.models.model import LoadedModel

_ENCODER = msgspec.json.Encoder()
_STATUS = {"download": "pulling", "unpack": "unpacking", "verify": "verifying sha256 digest"}  # by the phase of a load


@route(
    "POST", "/api/pull", "ollamaPull", "Ollama",
    "Download a model and serve it; needs --enable-model-management. JSON lines unless `stream` is false",
    {JSON: OllamaStatus, LINES: OllamaPull}, request_types.OllamaManageRequest, BODY_REFUSALS, api_types.OllamaError,
)  # fmt: skip
async def pull(service: Service, http: Request) -> ASGIApp:
    loaded = service.lifecycle.require_model()
    library = _library(service)
    given = await read_request(http, request_types.MANAGE, service.config, from_any_program=True)
    pulling = Pull(library, loaded, _name_of(given))
    if given.stream is not False:
        return pulling
    async with ClientWatch(http.receive):
        await pulling.done()
    return json_response(OllamaStatus("success"))


@route(
    "DELETE", "/api/delete", "ollamaDelete", "Ollama", "Delete a model from the disk; needs --enable-model-management",
    {JSON: OllamaStatus}, request_types.OllamaManageRequest, BODY_REFUSALS, api_types.OllamaError,
)  # fmt: skip
async def delete(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    library = _library(service)
    given = await read_request(http, request_types.MANAGE, service.config, from_any_program=True)
    name = _name_of(given)
    swapped = None if loaded.swapped is None else loaded.swapped.swaps.find(name)
    if name in loaded.names or (swapped is not None and not swapped.is_untouched):
        raise InvalidRequest(f"{name} is loaded; restart the server without it to delete it", param="model")
    if swapped is not None:
        swapped.swaps.remove(swapped)
    try:
        await asyncio.to_thread(library.remove, name)
    except ValueError as error:
        raise ModelNotFound(name, tuple(each["name"] for each in library.kept())) from error
    return json_response(OllamaStatus("success"))


def _library(service: Service) -> Library:
    """Return the library of models. Raises InvalidRequest without --enable-model-management."""
    if service.library is None or not service.config.enable_model_management:
        raise InvalidRequest(
            "this server serves the models it was started with and cannot pull or delete models; "
            "restart it with --model NAME, or with --enable-model-management"
        )
    return service.library


def _name_of(given: request_types.OllamaManageRequest) -> str:
    return (given.model or given.name or "").removesuffix(LATEST)


class Pull:
    """Download of a model. As a response, it streams the download's progress."""

    def __init__(self, library: Library, loaded: LoadedModel, name: str) -> None:
        self._library, self._loaded, self._name = library, loaded, name
        self._cancel = threading.Event()
        self._news = asyncio.Event()
        self._progress: LoadProgress | None = None  # the last; those that nobody has written yet are left out

    async def done(self) -> None:
        """Wait until the model is downloaded and registered. Cancelling the call cancels the download. Raises InvalidRequest."""
        loop = asyncio.get_running_loop()

        def report(progress: LoadProgress) -> None:
            loop.call_soon_threadsafe(self._note, progress)

        try:
            await asyncio.to_thread(self._library.pull, self._name, None, report, self._cancel)
        except ValueError as error:
            raise InvalidRequest(str(error), param="model") from error
        finally:
            self._cancel.set()
        if self._loaded.add is not None and not self._loaded.knows(self._name):
            self._loaded.add(self._name)

    def _note(self, progress: LoadProgress) -> None:
        self._progress = progress
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def line(value: OllamaPull | OllamaStatus | OllamaError, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": _ENCODER.encode(value) + b"\n", "more_body": more})

        async with ClientWatch(receive), asyncio.TaskGroup() as tasks:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", LINES.encode())]})
            await line(OllamaStatus("pulling manifest"))
            writing = tasks.create_task(self._write(line))
            try:
                await self.done()
            except InvalidRequest as error:
                last: OllamaStatus | OllamaError = OllamaError(error.message)
            else:
                last = OllamaStatus("success")
            finally:
                writing.cancel()
            await line(last, more=False)

    async def _write(self, line: Callable[[OllamaPull], Awaitable[None]]) -> None:
        digest = f"sha256:{hashlib.sha256(self._name.encode()).hexdigest()}"
        while True:
            await self._news.wait()
            self._news.clear()
            progress = self._progress
            if progress is not None and progress.total:
                status = _STATUS.get(progress.phase, progress.phase)
                await line(OllamaPull(status, digest, progress.total, progress.done))
