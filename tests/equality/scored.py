"""Log-probabilities of a run of our engine, and the comparison with transformers' own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from runtime.api import FinishReason, Request, TokenLogprobs
from runtime.config import EngineConfig
from runtime.engine import Engine
from tests.equality.greedy import engine_parts


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    num_cached: int = 0


async def generate(decoder, config: EngineConfig, requests: list[Request], rounds: int = 1) -> list[Answer]:
    """The last of `rounds` runs of the same requests."""
    parts = await engine_parts(decoder, config)
    engine = Engine(parts.scheduler, parts.runner, parts.model, steps_in_flight=config.steps_in_flight)
    try:
        for _ in range(rounds):
            answers = [Answer() for _ in requests]
            async with engine.submit(requests) as stream:
                async for outputs in stream:
                    for output in outputs:
                        answer = answers[output.index]
                        if output.prompt_logprobs is not None:
                            assert (answer.prompt, answer.ids) == (None, [])
                            answer.prompt = output.prompt_logprobs
                        answer.ids.extend(output.token_ids)
                        answer.logprobs.extend(output.logprobs or ())
                        answer.finish, answer.num_cached = output.finish, output.num_cached_tokens
    finally:
        await engine.close()
    return answers


def check(exact: torch.Tensor, ids: list[int], found: list[TokenLogprobs], count: int) -> None:
    """exact [n, V]: transformers' log-probabilities where `ids` stand."""
    for line, token_id, entry in zip(exact, ids, found, strict=True):
        assert entry.logprob == pytest.approx(float(line[token_id]), abs=1e-4)
        assert entry.rank == int((line > line[token_id]).sum()) + 1
        best = line.topk(count)
        assert [other for other, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@torch.inference_mode()
def exact_logprobs(theirs, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(theirs(torch.tensor([ids])).logits[0].float(), dim=-1)
