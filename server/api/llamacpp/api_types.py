"""Response types of llama.cpp's routes, for encoding and for the OpenAPI document.

A field whose default is UNSET is omitted unless it is set; all other fields are always present."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from server.generate.generation import Generation
from server.generate.timings import Timings


class LlamaToken(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaProbability(LlamaToken):
    top_logprobs: list[LlamaToken]


class LlamaTimings(Struct):
    """Timings in ms, with rates in tokens per second. The prompt has `cache_n` + `prompt_n` tokens."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float

    @classmethod
    def of(cls, generation: Generation, index: int, timings: Timings) -> LlamaTimings:
        """Return the timings of choice `index`. `prompt_n` counts the prompt tokens that were not in the prefix cache."""
        choice = generation.choices[index]
        cached = choice.num_cached_tokens
        computed = len(generation.requests[index].prompt_ids) - cached
        return cls(cached, *_rates(computed, timings.prompt_s), *_rates(choice.num_tokens, timings.answer_s))


def _rates(num_tokens: int, seconds: float) -> tuple[int, float, float, float]:
    milliseconds = max(seconds * 1000, 0.001)  # by which clients divide
    return num_tokens, milliseconds, milliseconds / max(1, num_tokens), num_tokens / milliseconds * 1000


class LlamaCompletion(Struct, kw_only=True):
    """Whole answer, or one piece of a stream. Pieces with `stop` false have fewer fields. If a request has several prompts or
    `n_cmpl`, the response is a list of these objects."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str | UnsetType = UNSET
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: LlamaTimings | UnsetType = UNSET
    completion_probabilities: list[LlamaProbability] | UnsetType = UNSET


class LlamaModalities(Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class LlamaProps(Struct, kw_only=True):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: LlamaModalities = LlamaModalities()
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class LlamaSlot(Struct, kw_only=True):
    id: int
    n_ctx: int
    speculative: bool = False
    is_processing: bool


class LlamaEmbedding(Struct):
    """Embedding of one prompt: one vector, or one vector per token if the model is served with that task."""

    index: int
    embedding: list[list[float]]
