"""Prompts and requests of the engine benchmark, and timed submits whose outputs are read to the end."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.api import PoolingParams, Request, SamplingParams

if TYPE_CHECKING:
    from runtime.engine import Engine

Prompts = Sequence[Sequence[int]]
POOLED_TOGETHER, POOL_LANES = 32, 8  # as server/api/pooling/run.py has them


class MeasureError(Exception):
    """Error: a figure cannot be measured with these options, or a request failed."""


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
    """Run all prompts in one submit. Return its timing. `lengths`: output tokens of each prompt, or of all. Raises MeasureError."""
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
        raise MeasureError(f"only {num_tokens} of {sum(wanted)} tokens were generated")
    return Timing(first_s, total_s, num_tokens, together)


@dataclass(frozen=True, slots=True)
class Steady:
    """Phase in which all requests decode together. It begins when the last request has started and ends when the first one ends."""

    seconds: float
    num_tokens: int
    num_steps: int


async def decode_together(engine: Engine, prompts: Prompts, num_tokens: int) -> Steady:
    """Decode all prompts in one submit, and time the phase in which all decode. The unit is a step, which may yield several
    tokens. Raises MeasureError if some requests ended before all had begun, or the phase contains no step."""
    began_s: float | None = None
    steady: Steady | None = None
    begun, tokens, first_step = set[int](), 0, 0
    async with engine.submit(requests_of(prompts, [num_tokens] * len(prompts))) as stream:
        async for outputs in stream:
            if steady is not None:
                continue
            now_s = time.perf_counter()
            if began_s is not None:
                tokens += sum(len(output.token_ids) for output in outputs)
            if error := next((output.error for output in outputs if output.error is not None), None):
                raise MeasureError(error)
            begun.update(output.index for output in outputs)
            if any(output.finish is not None for output in outputs):
                if began_s is None:
                    break
                steady = Steady(now_s - began_s, tokens, _num_steps(engine) - first_step)
            elif began_s is None and len(begun) == len(prompts):
                began_s, first_step = now_s, _num_steps(engine)
    if steady is None or not steady.num_steps:
        raise MeasureError(f"{len(prompts)} requests of {num_tokens} tokens did not decode together")
    return steady


def _num_steps(engine: Engine) -> int:
    return engine.activity(after_step=sys.maxsize, after_request=sys.maxsize, num_cells=1).num_steps


async def pool(engine: Engine, prompts: Prompts) -> float:
    """Compute a vector for each prompt. Return the seconds until the last one. As in the server, a long request is submitted in
    spans, some of them while others are computed. Raises MeasureError."""
    spans = iter([prompts[first : first + POOLED_TOGETHER] for first in range(0, len(prompts), POOLED_TOGETHER)])

    async def lane() -> None:
        for span in spans:
            await _pool(engine, span)

    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(POOL_LANES):
                lanes.create_task(lane())
                await asyncio.sleep(0)  # a server's have been encoded before, one behind the other
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return time.perf_counter() - started_s


async def _pool(engine: Engine, prompts: Prompts) -> None:
    params = PoolingParams(pooling=engine.model.pooler.pooling, use_activation=True)
    requests = [Request(f"measure-{index}", prompt, params) for index, prompt in enumerate(prompts)]
    num_vectors = 0
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            for output in outputs:
                if output.error is not None:
                    raise MeasureError(output.error)
                num_vectors += output.pooled is not None
    if num_vectors != len(prompts):
        raise MeasureError(f"only {num_vectors} of {len(prompts)} vectors were computed")


@dataclass(slots=True)
class Prompter:
    """Source of random prompts, drawn from a seed. No two prompts are equal."""

    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def draw(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        ids = range(min(100, self.vocab_size - 1), self.vocab_size)
        return [self.rng.choices(ids, k=num_tokens) for _ in range(num_prompts)]


def throughput_workload(num_requests: int, least: int, most: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts as token ids, and their output lengths, drawn as the package defines. `least`, `most`: bounds of all
    lengths."""
    rng = random.Random(0)
    last_id = min(10_000, vocab_size - 1)
    prompts = [[rng.randint(0, last_id) for _ in range(rng.randint(least, most))] for _ in range(num_requests)]
    return prompts, [rng.randint(least, most) for _ in range(num_requests)]
