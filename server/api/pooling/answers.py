"""Answers of the pooling routes, as parts of JSON bodies: what stands once, and every vector by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.pooling.run import Pooled
from server.api.pooling.vectors import Write, as_array, dumps
from server.http.schema import Json

CHARS_PER_RESULT = 10  # what stands around the numbers of one
NUMBERS_PER_CHAR = 5  # written while a character is tokenised

Parts = Iterator[tuple[bytes, int]]  # each with how many numbers it took to write


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around the results. `id`: of the answer."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def listed(self, pooled: Sequence[Pooled], items: Parts) -> Parts:
        """OpenAI's list of `items`, one for each of `pooled`."""
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        yield dumps(head)[:-1] + b',"data":[', 0
        for number, (item, count) in enumerate(items):
            yield (b"," + item if number else item), count
        yield b'],"usage":' + dumps(usage(pooled)) + b"}", 0


def usage(pooled: Sequence[Pooled]) -> Json:
    num_tokens = sum(each.num_tokens for each in pooled)
    cached = sum(each.num_cached_tokens for each in pooled)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def cost_of(pooled: Sequence[Pooled], num_kinds: int = 1) -> int:
    """What to write their numbers takes, in characters of tokenising."""
    num_numbers = num_kinds * sum(each.numbers.nbytes // 4 for each in pooled)
    return num_numbers // NUMBERS_PER_CHAR + CHARS_PER_RESULT * len(pooled)


def vectors(pooled: Sequence[Pooled], write: Write, *, kind: str, name: str) -> Parts:
    """Items of `kind` that have their numbers under `name`."""
    head = b'{"object":' + dumps(kind) + b',"index":%d,' + dumps(name) + b":%b}"
    for index, each in enumerate(pooled):
        yield head % (index, write(each.numbers)), each.numbers.nbytes // 4


def classes(pooled: Sequence[Pooled], labels: Sequence[str]) -> Parts:
    """The likeliest label of each, and what all are given."""
    for index, each in enumerate(pooled):
        best = int(as_array(each.numbers).argmax())
        item = {
            "index": index,
            "label": labels[best],
            "probs": as_array(each.numbers),
            "num_classes": len(labels),
        }
        yield dumps(item), len(labels)


def scored(scores: Sequence[float]) -> Parts:
    for index, score in enumerate(scores):
        yield dumps({"index": index, "object": "score", "score": score}), 1


def ranked(
    scores: Sequence[float], document: Callable[[int], Mapping[str, Any]] | None, top_n: int | None
) -> list[Json]:
    """The best first, those of equal score as they came; `top_n` 0 or None: all. `document`: as an answer shows it."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
    found: list[Json] = []
    for index in order:
        more = {} if document is None else {"document": document(index)}
        found.append({"index": index, **more, "relevance_score": scores[index]})
    return found
