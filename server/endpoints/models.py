"""GET /v1/models and /v1/models/{id}: the names this server answers to. OpenAI's fields and Anthropic's stand side by side."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from server.errors import ModelNotFound
from server.http.body import json_response
from server.loaded.model import LoadedModel
from server.schema import Json
from server.service import Service


def card(served: LoadedModel, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "oneloop",
        "root": served.name,
        "parent": None,
        "max_model_len": served.engine.model.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(served.created, UTC),
        "lifecycle": "active",
        "max_input_tokens": served.engine.model.max_model_len,
    }


async def list_all(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    cards = [card(served, name) for name in served.names]
    ends = {"first_id": served.names[0], "last_id": served.names[-1], "has_more": False}
    return json_response({"object": "list", "data": cards, **ends})


async def retrieve(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    name = http.path_params["model_id"]
    if name not in served.names:
        raise ModelNotFound(name, served.names)
    return json_response(card(served, name))
