"""Response types of the pooling routes, for encoding and for the OpenAPI document.

A field whose default is UNSET is omitted unless it is set; all other fields are always present. Vectors are encoded one by one,
so fields for vectors also accept encoded JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from server.api.pooling.run import PooledInput


class CachedTokens(Struct):
    cached_tokens: int


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int  # 0
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, pooled: Sequence[PooledInput]) -> PoolingUsage:
        num_tokens = sum(each.num_tokens for each in pooled)
        cached = sum(each.num_cached_tokens for each in pooled)
        return cls(num_tokens, num_tokens, 0, CachedTokens(cached))


class Listed(Struct, kw_only=True):
    """List of results, in OpenAI's format."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Any]
    usage: PoolingUsage


class Embedding(Struct, kw_only=True):
    """Embedding of one input: a list of floats, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(Listed, kw_only=True):
    data: list[Embedding]


class PooledData(Struct, kw_only=True):
    """Pooling result of one input: one vector, one vector per token, or base64 of them."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float | list[float]] | str


class PooledList(Listed, kw_only=True):
    data: list[PooledData]


class Classification(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(Listed, kw_only=True):
    data: list[Classification]


class Score(Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Listed, kw_only=True):
    data: list[Score]


class RankedDocument(Struct):
    text: str


class Ranked(Struct, kw_only=True):
    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class ApiVersion(Struct):
    version: str


class BilledUnits(Struct):
    search_units: int | UnsetType = UNSET
    input_tokens: int | UnsetType = UNSET


class CohereTokens(Struct):
    input_tokens: int


class CohereMeta(Struct):
    """Metadata of a response, in Cohere's format."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens

    @classmethod
    def of(cls, num_tokens: int, billed: BilledUnits, version: str = "2") -> CohereMeta:
        return cls(ApiVersion(version), billed, CohereTokens(num_tokens))


class Ranking(Struct):
    """Response to a reranking request. `results`: documents in descending order of relevance."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]
    meta: CohereMeta


class EmbeddingsByType(Struct, rename={"float_": "float"}):
    """Embeddings of all texts, in each requested number type."""

    float_: list[list[float]] | UnsetType = UNSET
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereEmbeddings(Struct, kw_only=True):
    """Response with embeddings: by number type, or as a list of floats for older clients that request no type."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: EmbeddingsByType | list[list[float]]
    texts: list[str] | UnsetType = UNSET
    meta: CohereMeta
