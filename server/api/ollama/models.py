"""How Ollama describes models: in lists, running, and one in full."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from server.api.ollama.request_types import LATEST
from server.config.server_config import ServerConfig
from server.http.schema import Json
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
    """Ollama's names have a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


async def named(loaded: LoadedModel, given: str, *, to_chat: bool = False) -> LoadedModel:
    """`lookup.named`, with or without the tag that says nothing."""
    name = given if loaded.knows(given) else given.removesuffix(LATEST)
    return await lookup.named(loaded, name, to_chat=to_chat)


def listed(loaded: LoadedModel, name: str) -> Json:
    model = loaded.engine.model
    return {
        "name": full_name(name),
        "model": full_name(name),
        "modified_at": _modified_at(loaded),
        "size": model.weights_bytes,
        "digest": hashlib.sha256(f"{loaded.fingerprint} {model.weights_bytes}".encode()).hexdigest(),
        "details": details(loaded),
    }


def unloaded(model: SwappedModel[Any]) -> Json:
    """Of several, one that has never been loaded."""
    details = {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {
        "name": full_name(model.name), "model": full_name(model.name), "modified_at": _time(model.created), "size": 0,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(), "details": details,
    }  # fmt: skip


def running(loaded: LoadedModel, name: str) -> Json:
    model = loaded.engine.model
    size = model.weights_bytes + model.kv_cache_bytes
    described = listed(loaded, name)
    del described["modified_at"]
    return {
        **described,
        "size": size,
        "expires_at": NEVER,
        "size_vram": 0 if model.device.startswith("cpu") else size,
        "context_length": model.max_model_len,
    }


def shown(loaded: LoadedModel, config: ServerConfig) -> Json:
    model, family = loaded.engine.model, _family(loaded)
    source = config.model if loaded.swapped is None else loaded.name
    defaults = loaded.defaults
    parameters = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    return {
        "modelfile": f"# served by oneloop; there is no Modelfile\nFROM {source}\n",
        "parameters": "\n".join(f"{name:<30} {value:g}" for name, value in parameters.items()),
        "template": loaded.chat_template.source,
        "details": details(loaded),
        "model_info": {
            "general.architecture": family,
            "general.basename": loaded.name,
            "general.parameter_count": model.num_parameters,
            f"{family}.context_length": model.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": capabilities(loaded),
        "modified_at": _modified_at(loaded),
    }


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


def details(loaded: LoadedModel) -> Json:
    model, family = loaded.engine.model, _family(loaded)
    bits = 8 * model.weights_bytes / max(1, model.num_parameters)
    level = loaded.gguf_quantization
    if level is None:
        level = _LEVELS.get(model.dtype, model.dtype) if bits * _TOO_FAR > _BITS.get(model.dtype, 0) else "unknown"
    return {
        "parent_model": "",
        "format": "safetensors" if loaded.gguf_quantization is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _count(model.num_parameters),
        "quantization_level": level,
    }


def _family(loaded: LoadedModel) -> str:
    """Qwen2ForCausalLM is qwen2, as Ollama and GGUF have it."""
    architecture = loaded.engine.model.architecture
    return architecture.partition("For")[0].lower() or "unknown"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def _modified_at(loaded: LoadedModel) -> str:
    return _time(loaded.created)


def _time(since_epoch_s: int) -> str:
    return datetime.fromtimestamp(since_epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
