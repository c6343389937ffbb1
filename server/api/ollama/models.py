"""Ollama's routes about models: /api/tags, /api/ps, /api/show and /api/version. Routes that create models are rejected."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api.ollama import api_types, request_types
from server.api.ollama.api_types import OllamaListedModel, OllamaModelDetails, OllamaRunningModel, OllamaShow
from server.api.ollama.request_types import LATEST
from server.api.route import BODY_REFUSALS, JSON, Route, route
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.http.answers import json_response
from server.http.body import read_request
from server.http.call import Call, call_of
from server.http.errors import InvalidRequest
from server.http.wire_fields import AdvisedFields, RepeatFields
from server.models import lookup
from server.models.model import LoadedModel
from server.models.swaps import SwappedModel

# Ollama's, whose API this is; clients look at it to know what they may ask for.
VERSION = "0.13.0"
NEVER = "2318-01-01T00:00:00Z"  # when a model that stays is unloaded, as Ollama says it
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TOO_FAR = 1.5  # times fewer bits a weight than its type has: it is stored in another


def full_name(name: str) -> str:
    """Return the model name `name` with the tag ":latest" if it has no tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


async def named(call: Call, loaded: LoadedModel, given: str, *, to_chat: bool = False) -> LoadedModel:
    """Find the model `given`, with or without the tag ":latest". See `lookup.named`."""
    name = given if loaded.knows(given) else given.removesuffix(LATEST)
    return await lookup.named(call, loaded, name, to_chat=to_chat)


def listed(loaded: LoadedModel, name: str) -> OllamaListedModel:
    model, called = loaded.engine.model, full_name(name)
    digest = hashlib.sha256(f"{loaded.fingerprint} {model.weights_bytes}".encode()).hexdigest()
    return OllamaListedModel(called, called, _time(loaded.created), model.weights_bytes, digest, details(loaded))


def unloaded(model: SwappedModel[Any]) -> OllamaListedModel:
    """Return the list entry of a served model that has never been loaded."""
    called, digest = full_name(model.name), hashlib.sha256(model.name.encode()).hexdigest()
    unknown = OllamaModelDetails(
        parent_model="", format="", family="", families=[], parameter_size="", quantization_level=""
    )
    return OllamaListedModel(called, called, _time(model.created), 0, digest, unknown)


def running(loaded: LoadedModel, name: str) -> OllamaRunningModel:
    model, known = loaded.engine.model, listed(loaded, name)
    size = model.weights_bytes + model.kv_cache_bytes
    size_vram = 0 if model.device.startswith("cpu") else size
    return OllamaRunningModel(
        known.name, known.model, size, known.digest, known.details, NEVER, size_vram, model.max_model_len
    )


def shown(loaded: LoadedModel, config: ServerConfig) -> OllamaShow:
    model, family = loaded.engine.model, _family(loaded)
    source = config.model if loaded.swapped is None else loaded.name
    fields = (info for info in msgspec.structs.fields(RepeatFields) if info.name in AdvisedFields.__struct_fields__)
    parameters = {info.encode_name: getattr(loaded.defaults, info.name) for info in fields}
    return OllamaShow(
        modelfile=f"# served by oneloop; there is no Modelfile\nFROM {source}\n",
        parameters="\n".join(f"{name:<30} {value:g}" for name, value in parameters.items()),
        template=loaded.chat_template.source,
        details=details(loaded),
        model_info={
            "general.architecture": family,
            "general.basename": loaded.name,
            "general.parameter_count": model.num_parameters,
            f"{family}.context_length": model.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
        },
        capabilities=capabilities(loaded),
        modified_at=_time(loaded.created),
    )


_MODALITIES = {"image": "vision", "audio": "audio"}


def capabilities(loaded: LoadedModel) -> list[str]:
    if loaded.pooling is not None:
        return ["embedding"] if "embed" in loaded.pooling.tasks else []
    found, chats = ["completion"], loaded.chat_format
    if loaded.chat_template and chats.tool_parser is not None:
        found.append("tools")
    if loaded.infill is not None:
        found.append("insert")
    found += [name for modality, name in _MODALITIES.items() if modality in loaded.media.modalities]
    if chats.tags is not None or (chats.tool_parser is not None and chats.tool_parser.reasons):
        found.append("thinking")
    return found


def details(loaded: LoadedModel) -> OllamaModelDetails:
    model, family = loaded.engine.model, _family(loaded)
    bits = 8 * model.weights_bytes / max(1, model.num_parameters)
    level = loaded.gguf_quantization
    if level is None:
        level = _LEVELS.get(model.dtype, model.dtype) if bits * _TOO_FAR > _BITS.get(model.dtype, 0) else "unknown"
    return OllamaModelDetails(
        parent_model="",
        format="safetensors" if loaded.gguf_quantization is None else "gguf",
        family=family,
        families=[family],
        parameter_size=_count(model.num_parameters),
        quantization_level=level,
    )


def _family(loaded: LoadedModel) -> str:
    architecture = loaded.engine.model.architecture
    return architecture.partition("For")[0].lower() or "unknown"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def _time(since_epoch_s: int) -> str:
    return datetime.fromtimestamp(since_epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- routes -------------------------------------------------------------------------------------------------------


@route(
    "GET", "/api/tags", "ollamaTags", "Ollama", "The names this server has", {JSON: api_types.OllamaModels}, None, (503,),
    api_types.OllamaError,
)  # fmt: skip
async def tags(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    known = [listed(each, name) for each in loaded.all for name in each.names]
    known += [unloaded(each) for each in loaded.others if each.loaded is None]
    return json_response(api_types.OllamaModels(known))


@route(
    "GET", "/api/ps", "ollamaPs", "Ollama", "The models that are loaded", {JSON: api_types.OllamaRunningModels},
    error=api_types.OllamaError,
)  # fmt: skip
async def ps(service: Service, http: Request) -> Response:
    """List the loaded models. The list is empty while the server loads its first model."""
    loaded = service.lifecycle.loaded
    resident = () if loaded is None else loaded.resident
    return json_response(api_types.OllamaRunningModels([running(each, each.name) for each in resident]))


@route(
    "POST", "/api/show", "ollamaShow", "Ollama", "What there is to know of the model", {JSON: api_types.OllamaShow},
    request_types.OllamaShowRequest, BODY_REFUSALS, api_types.OllamaError,
)  # fmt: skip
async def show(service: Service, http: Request) -> Response:
    loaded = service.lifecycle.require_model()
    given = await read_request(http, request_types.SHOW, service.config, from_any_program=True)
    loaded = await named(call_of(http), loaded, given.model or given.name or "")
    return json_response(shown(loaded, service.config))


@route(
    "GET", "/api/version", "ollamaVersion", "Ollama", "The Ollama whose API this is", {JSON: api_types.OllamaVersion},
    error=api_types.OllamaError,
)  # fmt: skip
async def version(service: Service, http: Request) -> Response:
    return json_response(api_types.OllamaVersion(VERSION))


async def _manage(service: Service, http: Request) -> Response:
    raise InvalidRequest(
        "this server serves the models it was started with and cannot push, create or copy models; "
        "restart it with --model NAME"
    )


PUSH, CREATE, COPY = (
    Route(
        _manage, "POST", f"/api/{name}", f"ollama{name.title()}", "Ollama",
        "Refused: this server has the models it was started with",
        {JSON: api_types.OllamaStatus}, request_types.OllamaManageRequest, (400,),
        api_types.OllamaError,
    )
    for name in ("push", "create", "copy")
)  # fmt: skip
