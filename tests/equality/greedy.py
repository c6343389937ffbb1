"""Greedy decoding, ours and transformers', on token ids; and the comparison that allows for exact ties only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

import ops
from runtime.api import Request, SamplingParams
from runtime.batch import ScheduledBatch
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.engine.admission import AdmissionLimits
from runtime.models.model import Model
from runtime.platform.platform import choose_platform
from runtime.runner.worker import Worker
from runtime.scheduler import Scheduler
from runtime.speculate.config import MAX_DRAFTS
from runtime.speculate.proposer import Proposer
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation
from runtime.start.build import EngineParts, assemble
from tests.features import exchange, feature_of, has_feature

THREADS = torch.get_num_threads()  # all cores, or one in a worker that shares them
TIE = 1e-4  # transformers' own two best logits are closer than this: rounding decides, in either engine


@dataclass(frozen=True)
class Reference:
    """What transformers generates for one prompt, and by how much each token beat the second best."""

    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]


@torch.inference_mode()
def transformers_greedy(model, prompt_ids: Sequence[int], max_tokens: int, draft: Sequence[int] = ()) -> Reference:
    """`draft`: what it may turn out to generate. One pass over all of it is then as good as a pass for each token of it."""
    torch.set_num_threads(THREADS)
    ids, margins = [], []
    while len(ids) < max_tokens:
        guess = [*draft[len(ids) : max_tokens - 1]] if ids == [*draft[: len(ids)]] else []
        tokens = torch.tensor([[*prompt_ids, *ids, *guess]])
        best = model(tokens, use_cache=False, logits_to_keep=1 + len(guess)).logits[0].float().topk(2)
        for (token_id, _), (first, second), guessed in zip(
            best.indices.tolist(), best.values.tolist(), [*guess, None], strict=True
        ):
            ids.append(token_id)
            margins.append(first - second)
            if token_id != guessed:
                break
    return Reference(list(prompt_ids), ids, margins)


def references(
    model, prompts: Sequence[Sequence[int]], max_tokens: int, drafts: Sequence[Sequence[int]]
) -> list[Reference]:
    return [
        transformers_greedy(model, prompt, max_tokens, draft) for prompt, draft in zip(prompts, drafts, strict=True)
    ]


@dataclass(frozen=True)
class Outcome:
    token_ids: list[list[int]]  # by prompt
    num_cached_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int


async def our_greedy(
    model: Model, config: EngineConfig, prompts: Sequence[Sequence[int]], max_tokens: int, *, together: bool,
    rounds: int = 1, preempting: bool = False, proposer: Proposer | None = None, planned: bool = False,
    parts_of: Callable[[Model, EngineConfig], Awaitable[EngineParts]] | None = None,
) -> Outcome:  # fmt: skip
    """The last of `rounds` runs of the same prompts over one engine: later ones find the earlier ones' blocks. `preempting`: the
    last in line starts over again and again, as if there were not blocks enough. All guesses of `proposer` are checked; `planned`:
    they are those that `config` asks for. `parts_of`: what makes an engine's parts, in place of `engine_parts`."""
    config = by_tokens(config)
    parts = await (parts_of or engine_parts)(model, config)
    if not planned:
        drafts = None if proposer is None else DraftScheduling(Speculation(proposer, MAX_DRAFTS))
        exchange(parts.scheduler, DraftScheduling, drafts)
    drafting = has_feature(parts.scheduler, DraftScheduling)
    speculation = feature_of(parts.scheduler, DraftScheduling).speculation if drafting else None
    if preempting:
        preempt_often(parts.scheduler)
    engine = make_engine(parts, config)
    params = SamplingParams(max_tokens, temperature=0.0)
    groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
    try:
        for _ in range(rounds):
            ids: list[list[int]] = []
            cached = 0
            for group in groups:
                group_ids, group_cached = await _generate(engine, group, params)
                ids += group_ids
                cached += group_cached
    finally:
        await engine.close()
    assert parts.scheduler.blocks.pool.num_free == parts.scheduler.blocks.pool.num_blocks
    drafted = (0, 0) if speculation is None else (speculation.num_draft_tokens, speculation.num_accepted_tokens)
    return Outcome(ids, cached, parts.scheduler.sequences.num_preemptions, *drafted)


def make_engine(parts: EngineParts, config: EngineConfig) -> Engine:
    return Engine(
        parts.scheduler,
        parts.runner,
        parts.model,
        admission=AdmissionLimits(10_000),
        steps_in_flight=parts.plan.steps_in_flight,
    )


def preempt_often(scheduler: Scheduler) -> None:
    schedule, calls = scheduler.schedule, count(1)

    def preempt_first() -> ScheduledBatch | None:
        if next(calls) % 4 == 0 and scheduler.running:
            scheduler.sequences.preempt(scheduler.running[-1])
        return schedule()

    scheduler.schedule = preempt_first


def by_tokens(config: EngineConfig) -> EngineConfig:
    """Steps hold what options say and no measured time does: in the small steps of a machine that was slow for a moment sequences
    that are preempted again and again might never get through their prompts, and drafts fall behind the model and are given up."""
    if config.max_num_mixed_tokens is not None:
        return config
    return replace(config, max_num_mixed_tokens=config.max_num_batched_tokens or 512)


async def engine_parts(model: Model, config: EngineConfig) -> EngineParts:
    """On the device that the model is on, with steps `by_tokens`."""
    config = by_tokens(config)
    platform, worker = choose_platform(model.device), Worker()
    ops.set_num_threads(THREADS)
    plan = platform.plan(config, model.spec, None)
    runner, plan = await worker.run(
        lambda: platform.build_runner(config, plan, model, frozenset(), worker, lambda progress: None)
    )
    return assemble(plan, model, frozenset(), runner)


async def _generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[list[int]], int]:
    ids: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    async with engine.submit([Request(str(i), list(p), params) for i, p in enumerate(prompts)]) as stream:
        async for outputs in stream:
            for output in outputs:
                assert output.error is None
                ids[output.index].extend(output.token_ids)
                cached[output.index] = output.num_cached_tokens
    return ids, sum(cached)


def run(*args, **kwargs) -> Outcome:
    return asyncio.run(our_greedy(*args, **kwargs))


def compare(outcome: Outcome, references: Sequence[Reference], tie: float = TIE) -> int:
    """Raise on the first token that differs without a tie; how many prompts left transformers' text at a tie."""
    ties = 0
    for number, (ours, reference) in enumerate(zip(outcome.token_ids, references, strict=True)):
        assert len(ours) == len(reference.token_ids)
        for position, (a, b) in enumerate(zip(ours, reference.token_ids, strict=True)):
            if a != b:
                margin = reference.margins[position]
                assert margin < tie, f"prompt {number}, output {position}: {a} instead of {b}, margin {margin}"
                ties += 1
                break
    return ties
