"""What Ollama's API says of models (GET /api/tags, /api/ps, /api/version, POST /api/show), and what it does with them, refused."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.api.ollama import api_types, request_types
from server.api.ollama.models import VERSION, listed, named, running, shown, unloaded
from server.api.route import BODY_REFUSALS, JSON, Operation, Route, route
from server.api.service import Service
from server.http.body import json_response, read_request
from server.http.errors import InvalidRequest


@route(
    "GET",
    "/api/tags",
    Operation(
        "ollamaTags", "Ollama", "The names this server has", {JSON: api_types.OllamaModels}, None, (503,), api_types.OllamaError
    ),
)  # fmt: skip
async def tags(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    known = [listed(each, name) for each in loaded.all for name in each.names]
    return json_response({"models": [*known, *(unloaded(each) for each in loaded.others if each.loaded is None)]})


@route(
    "GET",
    "/api/ps",
    Operation(
        "ollamaPs", "Ollama", "The models that are loaded", {JSON: api_types.OllamaRunningModels}, error=api_types.OllamaError
    ),
)  # fmt: skip
async def ps(service: Service, http: Request) -> Response:
    """What there is runs; while it loads there is nothing."""
    loaded = service.lifecycle.loaded
    return json_response({"models": [] if loaded is None else [running(each, each.name) for each in loaded.resident]})


@route(
    "POST",
    "/api/show",
    Operation(
        "ollamaShow", "Ollama", "What there is to know of the model", {JSON: api_types.OllamaShow}, request_types.OllamaShowRequest,
        BODY_REFUSALS, api_types.OllamaError,
    ),
)  # fmt: skip
async def show(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.SHOW, service.config, service.offload, from_any_program=True)
    loaded = await named(loaded, given.model or given.name or "")
    return json_response(shown(loaded, service.config))


@route(
    "GET",
    "/api/version",
    Operation(
        "ollamaVersion", "Ollama", "The Ollama whose API this is", {JSON: api_types.OllamaVersion}, error=api_types.OllamaError
    ),
)  # fmt: skip
async def version(service: Service, http: Request) -> Response:
    return json_response({"version": VERSION})


async def _manage(service: Service, http: Request) -> Response:
    raise InvalidRequest(
        "this server serves the models it was started with and cannot pull, create, copy or delete models; "
        "restart it with --model NAME"
    )


def _managing(method: str, name: str) -> Route:
    operation = Operation(
        f"ollama{name.title()}", "Ollama", "Refused: this server has the models it was started with",
        {JSON: api_types.OllamaStatus}, request_types.OllamaManageRequest if method == "POST" else None, (400,),
        api_types.OllamaError,
    )  # fmt: skip
    return Route(method, f"/api/{name}", _manage, operation)


PULL, PUSH, CREATE, COPY = (_managing("POST", name) for name in ("pull", "push", "create", "copy"))
DELETE = _managing("DELETE", "delete")
