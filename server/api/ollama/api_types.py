"""Response types of Ollama's routes, for encoding and for the OpenAPI document.

A field whose default is UNSET is omitted unless it is set; all other fields are always present."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from server.generate.logprobs import SampledToken


class OllamaCalledFunction(Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Struct):
    id: str
    function: OllamaCalledFunction


class OllamaMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """Answer of /api/chat (with `message`) or /api/generate (with `response` and `thinking`). A stream has one JSON line per piece.

    A whole answer, and the last line of a stream, have `done` true, the reason, and durations in ns. `load_duration` is the time
    until the engine received the request, `prompt_eval_duration` the time from then until the first token."""

    model: str
    created_at: str
    message: OllamaMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[SampledToken] | UnsetType = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaModelDetails(Struct):
    parent_model: str
    format: Literal["gguf", "safetensors", ""]  # "": of a model that has never been loaded
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListedModel(Struct):
    """Model in a list of models. `size`: in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaModelDetails


class OllamaRunningModel(Struct):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaModels(Struct):
    models: list[OllamaListedModel]


class OllamaRunningModels(Struct):
    models: list[OllamaRunningModel]


class OllamaShow(Struct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]  # of completion, tools, insert, vision, audio, thinking, embedding
    modified_at: str


class OllamaVersion(Struct):
    """Ollama version whose API this server implements."""

    version: str


class OllamaEmbed(Struct):
    """Embeddings of all texts of a request. Durations are in ns. `prompt_eval_count`: number of prompt tokens."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    embedding: list[float]


class OllamaStatus(Struct):
    status: str


class OllamaPull(Struct):
    """Progress of a model's download, in bytes."""

    status: str
    digest: str
    total: int
    completed: int


class OllamaError(Struct):
    error: str
