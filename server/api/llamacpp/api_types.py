"""What the server says on llama.cpp's routes, as types: for the OpenAPI document, and for the test that reads answers by them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class LlamaToken(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaProbability(LlamaToken):
    top_logprobs: list[LlamaToken]


class LlamaTimings(Struct):
    """`cache_n` and `prompt_n` together are the prompt. Milliseconds and tokens a second."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCompletion(Struct, kw_only=True):
    """A whole answer, or of a stream a piece, whose `stop` is false and which has less, and the last. With several prompts or
    `n_cmpl` a list of them."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET
    completion_probabilities: list[LlamaProbability] | UnsetType = UNSET


class LlamaModalities(Struct):
    vision: bool
    audio: bool


class LlamaProps(Struct):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: LlamaModalities
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class LlamaSlot(Struct):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class LlamaEmbedding(Struct):
    """`embedding`: one vector, or one for each token, of a model that is served for that."""

    index: int
    embedding: list[list[float]]
