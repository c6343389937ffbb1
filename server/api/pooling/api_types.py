"""What the pooling routes answer, as the document describes it.

Answers are written as plain JSON (`answers`); a test reads what a running server says through these types."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class CachedTokens(Struct):
    cached_tokens: int


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int  # 0
    prompt_tokens_details: CachedTokens


class _Listed(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str


class Embedding(Struct):
    """`embedding`: numbers, or base64 of them as little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Listed):
    data: list[Embedding]
    usage: PoolingUsage


class PooledData(Struct):
    """`data`: one vector, one for each token, or base64 of them."""

    object: Literal["pooling"]
    index: int
    data: list[float | list[float]] | str


class PooledList(_Listed):
    data: list[PooledData]
    usage: PoolingUsage


class Classification(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(_Listed):
    data: list[Classification]
    usage: PoolingUsage


class Score(Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(_Listed):
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(Struct):
    text: str


class Ranked(Struct):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class ApiVersion(Struct):
    version: str


class BilledUnits(Struct):
    search_units: int | UnsetType = UNSET
    input_tokens: int | UnsetType = UNSET


class CohereTokens(Struct):
    input_tokens: int


class CohereMeta(Struct):
    """As Cohere's clients read it."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens


class Ranking(Struct):
    """`results`: the best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]
    meta: CohereMeta


class EmbeddingsByType(Struct, rename={"float_": "float"}):
    """Those that were asked for."""

    float_: list[list[float]] | UnsetType = UNSET
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereEmbeddings(Struct):
    """`embeddings`: by type; a list of floats for older clients that ask for no type."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: EmbeddingsByType | list[list[float]]
    meta: CohereMeta
    texts: list[str] | UnsetType = UNSET
