"""Routes POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: load and unload adapters at run time.

`server/http/auth.py` checks permissions, and `server/models/adapters.py` checks the adapter's folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from runtime.api import AdapterClient, AdapterRefused
from server.api.route import BODY_REFUSALS, JSON, route
from server.api.service import Service
from server.http.answers import json_response
from server.http.body import read_request
from server.http.errors import AdaptersOff, InvalidRequest, ModelNotFound, clip
from server.http.schema import Wire
from server.models.adapters import MAX_NAME, folder_below
from server.models.model import LoadedModel

LoraName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class LoadLoraAdapter(Struct, kw_only=True):
    """Body of a request to load an adapter. `lora_path`: PEFT folder below --lora-dir. `load_inplace`: replace the adapter with
    this name; running requests continue with the old adapter."""

    lora_name: LoraName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None

    def check(self) -> None:
        """Do nothing, because the field types check all values."""


class UnloadLoraAdapter(Struct, kw_only=True):
    lora_name: LoraName

    def check(self) -> None:
        """Do nothing, because the field types check all values."""


class LoraLoaded(Struct):
    success: bool
    id: str
    rank: int
    num_parameters: int


class LoraUnloaded(Struct):
    success: bool
    id: str


LOAD, UNLOAD = Wire(LoadLoraAdapter, {}), Wire(UnloadLoraAdapter, {})


def adapters_of(loaded: LoadedModel) -> AdapterClient:
    """Return the engine's interface to load and unload adapters. Raises AdaptersOff without --enable-lora."""
    if loaded.engine.adapters is None:
        raise AdaptersOff
    return loaded.engine.adapters


@route(
    "POST", "/v1/load_lora_adapter", "loadLoraAdapter", "Operate", "Serve a LoRA adapter under a name of its own",
    {JSON: LoraLoaded}, LoadLoraAdapter, (*BODY_REFUSALS, 403),
)  # fmt: skip
async def load(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    adapters = adapters_of(loaded)
    given = await read_request(http, LOAD, service.config)
    name, root = given.lora_name, service.config.lora_dir
    if root is None:
        raise InvalidRequest(
            "adapters are loaded from one folder only: start the server with --lora-dir FOLDER", param="lora_path"
        )
    if name in loaded.names:
        raise InvalidRequest(f"{clip(name)!r} is a name of the model; choose another name", param="lora_name")
    if adapters.find(name) is not None and not given.load_inplace:
        raise InvalidRequest(
            f"adapter {clip(name)!r} is already loaded; set load_inplace to true to replace it", param="lora_name"
        )
    try:
        folder = await asyncio.to_thread(folder_below, Path(root), given.lora_path)
        adapter = await adapters.load(name, str(folder))
    except (ValueError, AdapterRefused) as error:
        raise InvalidRequest(str(error), param="lora_path") from None
    return json_response(LoraLoaded(True, name, adapter.max_rank, adapter.num_parameters))


@route(
    "POST", "/v1/unload_lora_adapter", "unloadLoraAdapter", "Operate",
    "Take an adapter's name away; answers once no request has it any more", {JSON: LoraUnloaded}, UnloadLoraAdapter,
    (*BODY_REFUSALS, 403, 404),
)  # fmt: skip
async def unload(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    adapters = adapters_of(loaded)
    given = await read_request(http, UNLOAD, service.config)
    if not await adapters.unload(given.lora_name):
        raise ModelNotFound(given.lora_name, tuple(each.name for each in adapters.all()))
    return json_response(LoraUnloaded(True, given.lora_name))
