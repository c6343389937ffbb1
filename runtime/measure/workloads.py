"""Workloads: prompts, requests, and one submit of them that is read to its end on the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.api import Request, SamplingParams

if TYPE_CHECKING:
    from runtime.engine import Engine

Prompts = Sequence[Sequence[int]]


class MeasureError(Exception):
    """A figure that cannot be taken with these options, or a request that failed."""


@dataclass(frozen=True, slots=True)
class Timing:
    first_s: float  # submit to the first token of any request
    total_s: float  # submit to the last token of all
    num_tokens: int
    together: bool  # none had ended before all had begun


def requests_of(prompts: Prompts, lengths: Sequence[int], temperature: float = 0.0) -> list[Request]:
    return [
        Request(f"measure-{index}", prompt, SamplingParams(length, temperature, ignore_eos=True))
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


async def generate(engine: Engine, prompts: Prompts, lengths: Sequence[int] | int, temperature: float = 0.0) -> Timing:
    """All of them in one submit, read to the end.

    Raises MeasureError."""
    wanted = [lengths] * len(prompts) if isinstance(lengths, int) else lengths
    requests = requests_of(prompts, wanted, temperature)
    first_s, num_tokens, begun, together = None, 0, set[int](), True
    started_s = time.perf_counter()
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            if first_s is None:
                first_s = time.perf_counter() - started_s
            for output in outputs:
                num_tokens += len(output.token_ids)
                begun.add(output.index)
                if output.error is not None:
                    raise MeasureError(output.error)
            together &= len(begun) == len(prompts) or all(output.finish is None for output in outputs)
    total_s = time.perf_counter() - started_s
    if first_s is None or num_tokens != sum(wanted):
        raise MeasureError(f"{num_tokens} tokens came of {sum(wanted)}")
    return Timing(first_s, total_s, num_tokens, together)


@dataclass(slots=True)
class Prompter:
    """Random prompts, never the same twice, from a seed."""

    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def draw(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        ids = range(min(100, self.vocab_size - 1), self.vocab_size)
        return [self.rng.choices(ids, k=num_tokens) for _ in range(num_prompts)]


def throughput_workload(num_requests: int, least: int, most: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths; the draws are those of the package's header."""
    rng = random.Random(0)
    last_id = min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, last_id) for _ in range(rng.randint(least, most))] for _ in range(num_requests)]
    return prompts, [rng.randint(least, most) for _ in range(num_requests)]
