"""Pooling in `LLM`: converts prompts to embeddings, classes and scores, with vLLM's names of parameters and outputs.

Parameters are those of the pooling routes: the same wire types validate them, and the same code computes the results."""

from __future__ import annotations

import inspect
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from runtime.api import EngineError, PoolingTask
from server.api.pooling import request_types
from server.api.pooling.compare import Comparison
from server.api.pooling.prepare import of_embeddings, of_rerank, of_score
from server.api.pooling.request import PoolRequest, PoolText
from server.api.pooling.run import PooledInput, pooled
from server.api.pooling.vectors import as_array
from server.api.service import Service
from server.config.option import did_you_mean
from server.generate.generation import EngineFailed
from server.http.call import Call
from server.http.errors import ApiError, Field
from server.llm.prompts import Prompt, as_value_error, decoded, plain, several
from server.models.model import LoadedModel
from server.models.pooling import ServedPooling

if TYPE_CHECKING:
    from server.api.pooling.vectors import Floats

POOLING_FIELDS = (
    "task", "dimensions", "use_activation", "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "prompt_name",
    "priority", "cache_salt",
)  # fmt: skip
COMPARING_FIELDS = (
    "use_activation", "truncate_prompt_tokens", "truncation_side", "max_tokens_per_query", "max_tokens_per_doc", "priority",
    "instruction",
)  # fmt: skip


# --- asked --------------------------------------------------------------------------------------------------------


class PoolingParams:
    """Parameters of pooling: the fields of /pooling and of /score, with the same names and limits. Raises ValueError."""

    __slots__ = ("fields",)
    _NAMES = tuple(dict.fromkeys(POOLING_FIELDS + COMPARING_FIELDS))
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _NAMES]
    )

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in self._NAMES:
                raise ValueError(f"PoolingParams has no field {name!r}{did_you_mean(name, self._NAMES)}")
        self.fields: Mapping[str, Any] = {name: value for name, value in fields.items() if value is not None}
        comparing = {name: value for name, value in self.fields.items() if name in COMPARING_FIELDS}
        decoded(request_types.SCORE, {"text_1": "", "text_2": "", **comparing})
        decoded(request_types.POOLING, {"input": "", **_of(self.fields, POOLING_FIELDS)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingParams) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.fields.items())))

    def __repr__(self) -> str:
        return f"PoolingParams({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


def _of(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in names}


PLAIN = PoolingParams()  # of whoever says nothing, checked once


def _checked(params: PoolingParams, names: Sequence[str], method: str) -> dict[str, Any]:
    """Return the fields of `params`. Raises ValueError for a field that is not in `names`. `method`: name of the caller in the
    error."""
    for name in params.fields:
        if name not in names:
            raise ValueError(f"{method} does not use {name}")
    return dict(params.fields)


_NO_FIELDS = decoded(request_types.POOLING, {"input": ""})

Ask = Callable[[ServedPooling], Sequence[PoolRequest]]


def ask_to_pool(
    prompts: Prompt | Sequence[Prompt],
    params: PoolingParams | Sequence[PoolingParams] | None,
    task: PoolingTask | None,
) -> tuple[int, Ask]:
    """Return the number of prompts, and a function that creates the requests for a model. Adjacent prompts with equal parameters
    share a request. Raises ValueError for invalid arguments. The returned function raises ValueError too."""
    given = [plain(prompt) for prompt in several(prompts)]
    if any(prompt.media or prompt.embeds is not None for prompt in given):
        raise ValueError("multi_modal_data and prompt_embeds are not supported for pooling")
    each = list(params) if isinstance(params, Sequence) else [params or PLAIN] * len(given)
    if len(each) != len(given):
        raise ValueError(f"pooling_params: {len(each)} for {len(given)} prompts; give one for all or one for each")
    fields = [
        _checked(one, POOLING_FIELDS, "this task")
        | ({} if prompt.cache_salt is None else {"cache_salt": prompt.cache_salt})
        for one, prompt in zip(each, given, strict=True)
    ]
    texts = [
        PoolText(prompt.given if isinstance(prompt.given, str) else prompt.given[0], Field(f"prompts[{number}]"))
        for number, prompt in enumerate(given)
    ]

    def ask(served: ServedPooling) -> list[PoolRequest]:
        found: list[PoolRequest] = []
        for alike, group in groupby(zip(fields, texts, strict=True), key=lambda pair: pair[0]):
            wanted = decoded(request_types.POOLING, {"input": "", **alike}) if alike else _NO_FIELDS
            if task is not None and wanted.task not in (None, task):
                raise ValueError(f"task {wanted.task!r} contradicts {task!r}, the requested task")
            request = of_embeddings(wanted, served, task or wanted.task or served.task)
            found.append(replace(request, inputs=[text for _, text in group], field="prompts"))
        return found

    return len(given), ask


Compare = Callable[[ServedPooling], Comparison]


def ask_to_score(
    data_1: str | Sequence[str], data_2: str | Sequence[str], params: PoolingParams | None
) -> tuple[int, Compare]:
    """Return the number of scores, and a function that creates the requests for a model. Both raise ValueError."""
    fields = _checked(params or PLAIN, COMPARING_FIELDS, "score")
    first, second = (one if isinstance(one, str) else list(one) for one in (data_1, data_2))
    given = decoded(request_types.SCORE, {"data_1": first, "data_2": second, **fields})
    return 1 if isinstance(second, str) else len(second), lambda served: of_score(given, served)


def ask_to_rerank(query: str, documents: Sequence[str], params: PoolingParams | None) -> Compare:
    """Return a function that creates the requests for a model. Both raise ValueError."""
    fields = _checked(params or PLAIN, COMPARING_FIELDS, "rerank")
    given = decoded(request_types.RERANK, {"query": query, "documents": list(documents), **fields})
    return lambda served: of_rerank(given, served)


# --- answered -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Result of pooling one prompt. `data`: float32 array, whose shape depends on the task."""

    data: Floats


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class _RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(_RequestOutput):
    outputs: PoolingOutput


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput(_RequestOutput):
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput(_RequestOutput):
    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Result of scoring one pair of texts. `prompt_token_ids`: token ids of a cross-encoder's prompt, or of both texts in
    sequence."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class RerankOutput:
    index: int
    document: str
    relevance_score: float


# --- computed -----------------------------------------------------------------------------------------------------


class Pooler:
    """Pooling of an LLM's prompts, on the event loop of the LLM. The size of the results is not limited."""

    def __init__(self, service: Service, loaded: LoadedModel) -> None:
        self._service = service
        self._loaded = loaded

    async def pooled(self, ask: Ask, name: str, note: Callable[[PooledInput], object]) -> list[PooledInput]:
        """Pool all prompts, and return the results in order. `name`: name of the caller's method, for ids. `note`: called with
        each result. Raises ValueError if a prompt does not fit the model, RuntimeError if the engine fails or is closed."""
        try:
            requests = ask(self._loaded.require_pooling(name))
            return [result for request in requests for result in await self._run(request, note)]
        except ApiError as error:
            raise as_value_error(error) from None
        except EngineFailed as error:
            raise RuntimeError(f"the engine failed on a prompt: {error}") from None
        except EngineError as error:
            raise RuntimeError(f"the engine does not accept requests: {error}") from None

    async def compared(
        self, compare: Compare, note: Callable[[PooledInput], object]
    ) -> tuple[list[float], list[tuple[PooledInput, ...]]]:
        """Return the score of each pair, and the pooled inputs from which it was computed. `note`: called with each pooled
        input. Raises the errors of `pooled`."""
        made: list[Comparison] = []

        def ask(served: ServedPooling) -> list[PoolRequest]:
            made.append(compare(served))
            return [made[0].request]

        results = await self.pooled(ask, "score", note)
        (comparison,) = made
        return await comparison.scores(self._call(), results), comparison.sides(results)

    def _call(self) -> Call:
        return Call(offload=self._service.offload)

    async def _run(self, request: PoolRequest, note: Callable[[PooledInput], object]) -> list[PooledInput]:
        return await pooled(
            self._service.config, self._call(), self._loaded, request, id=uuid.uuid4().hex,
            note=note, max_numbers=sys.maxsize, with_ids=True,
        )  # fmt: skip


def pooling_output(result: PooledInput) -> PoolingRequestOutput:
    return PoolingRequestOutput(*_facts(result), outputs=PoolingOutput(as_array(result.numbers)))


def embedding_output(result: PooledInput) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(*_facts(result), outputs=EmbeddingOutput(as_array(result.numbers).tolist()))


def classification_output(result: PooledInput) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(*_facts(result), outputs=ClassificationOutput(as_array(result.numbers).tolist()))


def scoring_output(score: float, sides: Sequence[PooledInput]) -> ScoringRequestOutput:
    ids = [id for side in sides for id in side.prompt_ids]
    cached = sum(side.num_cached_tokens for side in sides)
    return ScoringRequestOutput(sides[-1].id, ids, cached, True, ScoringOutput(score))


def _facts(result: PooledInput) -> tuple[str, list[int], int, bool]:
    return result.id, list(result.prompt_ids), result.num_cached_tokens, True
