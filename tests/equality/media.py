"""Prompts with pictures and sounds: greedy decoding of them, ours and transformers', on ids and a processor's tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from runtime.api import MediaItem, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.encode.scheduling import EncoderScheduling
from runtime.engine import Engine
from runtime.models.model import Model
from runtime.scheduler import Scheduler
from tests.equality.greedy import THREADS, Outcome, Reference, engine_parts, make_engine, preempt_often
from tests.features import feature_of


@dataclass(frozen=True)
class Medium:
    """A picture, sound or video as its processor would give it: tensors, and the ids that stand for it in a prompt, of which
    `placeholder` takes outputs."""

    inputs: Mapping[str, np.ndarray]
    ids: tuple[int, ...]
    placeholder: int
    modality: str = "image"

    @property
    def digest(self) -> bytes:
        parts = sorted((name, each.tobytes()) for name, each in self.inputs.items())
        return sha256(repr(parts).encode()).digest()


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    media: tuple[MediaItem, ...]

    @classmethod
    def of(cls, *parts: Sequence[int] | Medium) -> Prompt:
        ids: list[int] = []
        media = []
        for part in parts:
            if isinstance(part, Medium):
                places = [len(ids) + index for index, each in enumerate(part.ids) if each == part.placeholder]
                media.append(MediaItem(part.modality, part.digest, np.array(places, np.int32), part.inputs))
                ids += part.ids
            else:
                ids += part
        return cls(ids, tuple(media))


Joined = Callable[[Sequence[MediaItem]], Mapping[str, torch.Tensor]]


def side_by_side(media: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """A batch of items for transformers, whose tensors stand one behind another."""
    names = dict.fromkeys(name for item in media for name in item.inputs)
    return {
        name: torch.from_numpy(np.concatenate([item.inputs[name] for item in media if name in item.inputs]))
        for name in names
    }


@torch.inference_mode()
def transformers_greedy(
    model, prompt: Prompt, max_tokens: int, joined: Joined = side_by_side, never: Sequence[int] = (), **rest
) -> Reference:
    """A pass over all of it for each token: no cache of theirs is believed. `never`: ids that may not be drawn, since transformers
    would look for what they stand for."""
    torch.set_num_threads(THREADS)
    ids, margins = list(prompt.ids), []
    inputs = joined(prompt.media) if prompt.media else {}
    for _ in range(max_tokens):
        tokens = torch.tensor([ids])
        more = {name: make(tokens) for name, make in rest.items()}
        logits = model(input_ids=tokens, use_cache=False, **inputs, **more).logits[0, -1].float()
        logits[[*never]] = -torch.inf
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return Reference(prompt.ids, ids[len(prompt.ids) :], margins)


@dataclass(frozen=True)
class Seen:
    """What a run generated, and how often encoders ran, and were spared it."""

    outcome: Outcome
    num_encoded: int
    num_kept: int


async def _run(
    model: Model, config: EngineConfig, prompts: Sequence[Prompt], params: SamplingParams, together: bool, rounds: int, preempting:
    bool ) -> Seen:  # fmt: skip
    parts = await engine_parts(model, config)
    scheduler = parts.scheduler
    encoded = _count_encoder_work(scheduler)
    if preempting:
        preempt_often(scheduler)
    engine = make_engine(parts, config)
    groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
    try:
        for _ in range(rounds):
            ids: list[list[int]] = []
            cached = 0
            for group in groups:
                found, from_cache = await generate(engine, group, params)
                ids += found
                cached += from_cache
    finally:
        await engine.close()
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks
    encoding = feature_of(scheduler, EncoderScheduling)
    assert not encoding.cache._holders
    outcome = Outcome(ids, cached, scheduler.sequences.num_preemptions, 0, 0)
    return Seen(outcome, len(encoded), encoding.stats.num_hits)


def _count_encoder_work(scheduler: Scheduler) -> list[bytes]:
    encoded: list[bytes] = []
    schedule = scheduler.schedule

    def counted():
        batch = schedule()
        if batch is not None:
            encoded.extend(work.key for work in batch.encoder_work)
        return batch

    scheduler.schedule = counted
    return encoded


async def generate(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[list[list[int]], int]:
    ids: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    requests = [Request(str(i), each.ids, params, media=each.media) for i, each in enumerate(prompts)]
    async with engine.submit(requests) as stream:
        async for outputs in stream:
            for output in outputs:
                assert output.error is None
                ids[output.index].extend(output.token_ids)
                cached[output.index] = output.num_cached_tokens
    return ids, sum(cached)


def run(
    model: Model, config: EngineConfig, prompts: Sequence[Prompt], params: SamplingParams, *, together: bool = True, rounds: int =
    1, preempting: bool = False,
) -> Seen:  # fmt: skip
    return asyncio.run(_run(model, config, prompts, params, together, rounds, preempting))
