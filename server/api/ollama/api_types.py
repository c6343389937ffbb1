"""What the server says on Ollama's routes, as types: for the OpenAPI document, and for the test that reads answers by them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class OllamaTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob):
    top_logprobs: list[OllamaTokenLogprob]


class OllamaCalledFunction(Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Struct):
    id: str
    function: OllamaCalledFunction


class OllamaMessage(Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswer(Struct, kw_only=True):
    """Streamed, a JSON line for each piece; a whole answer and the last line have `done` true, the reason, and durations in
    nanoseconds: `load_duration` until the engine had the request, `prompt_eval_duration` until the first token."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaModelDetails(Struct):
    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True):
    name: str
    model: str
    size: int  # bytes
    digest: str
    details: OllamaModelDetails


class OllamaListedModel(OllamaModel, kw_only=True):
    modified_at: str


class OllamaRunningModel(OllamaModel, kw_only=True):
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
    capabilities: list[Literal["completion", "tools", "insert", "thinking", "embedding"]]
    modified_at: str


class OllamaVersion(Struct):
    """The version of Ollama whose API this is."""

    version: str


class OllamaEmbed(Struct):
    """Nanoseconds, and tokens of all texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    embedding: list[float]


class OllamaStatus(Struct):
    status: str


class OllamaError(Struct):
    error: str
