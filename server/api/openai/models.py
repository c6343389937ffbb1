"""Routes GET /v1/models and /v1/models/{id}: list the served model names, with OpenAI's and Anthropic's fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, get_args

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from runtime.api import Adapter
from server.api.route import JSON, route
from server.api.service import Service
from server.http.answers import json_response
from server.http.errors import ModelNotFound
from server.http.schema import Json
from server.models.model import LoadedModel
from server.models.speech import Task
from server.models.swaps import SwappedModel


class ModelStatus(Struct):
    """Status of a model, with llama.cpp's names. A "sleeping" or "unloaded" model is loaded by the next request. `failed`: the
    last attempt to load it failed."""

    value: Literal["loaded", "sleeping", "loading", "unloaded"]
    failed: bool


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: (
        int | None
    )  # of one of several that has never been loaded, as tasks and modalities: by its files; null without
    modalities: list[str] | None  # "text", and what the model reads beside it: "image", "audio", "video"
    tasks: (
        list[str] | None
    )  # "generate"; "transcribe", "translate"; or what its prompts are pooled to: "embed", "classify" …
    status: ModelStatus
    type: Literal["model"]  # from here on as Anthropic has it
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool


def card(loaded: LoadedModel, name: str, adapter: Adapter | None = None) -> Json:
    """Return the description of a model as JSON. `adapter`: the adapter that `name` selects, or None."""
    created = loaded.created if adapter is None else adapter.created
    length = loaded.engine.model.max_model_len
    return {
        **_named(name, created),
        "root": loaded.name,
        "parent": None if adapter is None else loaded.name,
        "max_model_len": length,
        "max_input_tokens": length,
        "modalities": ["text", *sorted(loaded.media.modalities)],
        "tasks": _tasks(loaded),
        "status": {"value": loaded.status, "failed": loaded.swapped is not None and loaded.swapped.failure is not None},
    }


def _tasks(loaded: LoadedModel) -> list[str]:
    if loaded.engine.model.speech is not None:
        return list(get_args(Task))
    return ["generate"] if loaded.pooling is None else list(loaded.pooling.tasks)


def card_of_unloaded(model: SwappedModel[Any]) -> Json:
    """Return the description of a model that has never been loaded, from its files."""
    known = model.outline
    length = None if known is None else known.max_model_len
    return {
        **_named(model.name, model.created),
        "root": model.name,
        "parent": None,
        "max_model_len": length,
        "max_input_tokens": length,
        "modalities": None if known is None else ["text", *known.modalities],
        "tasks": None if known is None else list(known.tasks),
        "status": {"value": model.status.value, "failed": model.failure is not None},
    }


def _named(name: str, created: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "oneloop",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
    }


@route(
    "GET", "/v1/models", "listModels", "Models", "The names this server answers to", {JSON: ModelList}, refusals=(503,)
)
async def list_all(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    adapters = () if loaded.engine.adapters is None else loaded.engine.adapters.all()
    cards = [card(each, name) for each in loaded.all for name in each.names]
    cards += [card_of_unloaded(each) for each in loaded.others if each.loaded is None]
    cards += [card(loaded, each.name, each) for each in adapters]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": cards, **ends})


@route(
    "GET", "/v1/models/{model_id:path}", "retrieveModel", "Models", "One of those names", {JSON: ModelCard},
    refusals=(404, 503), parameters={"model_id": "A name of a model, slashes included"},
)  # fmt: skip
async def retrieve(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    name = http.path_params["model_id"]
    for each in loaded.all:
        if name in each.names:
            return json_response(card(each, name))
    for other in loaded.others:
        if name == other.name:
            return json_response(card_of_unloaded(other))
    adapter = None if loaded.engine.adapters is None else loaded.engine.adapters.find(name)
    if adapter is None:
        raise ModelNotFound(name, loaded.all_names)
    return json_response(card(loaded, name, adapter))
