"""GET /v1/models and /v1/models/{id}: the names this server answers to."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.errors import ModelNotFound
from server.frames import Json, json_response
from server.lifecycle import Served
from server.service import Service


def card(served: Served, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "oneloop",
        "root": served.name,
        "parent": None,
        "max_model_len": served.engine.model.max_model_len,
    }


async def list_all(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    return json_response({"object": "list", "data": [card(served, name) for name in served.names]})


async def retrieve(service: Service, http: Request) -> Response:
    served = service.lifecycle.served()
    name = http.path_params["model_id"]
    if name not in served.names:
        raise ModelNotFound(name, served.names)
    return json_response(card(served, name))
