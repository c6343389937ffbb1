"""Log-probabilities are transformers' own, to 1e-4 in float32, however the engine cuts the work."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams, TokenLogprobs
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from tests.equality.greedy import engine_parts

VOCAB, COUNT, MAX_TOKENS = 97, 5, 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(2)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    return theirs, ours


async def generate(
    decoder, config: EngineConfig, requests: list[Request]
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    parts = await engine_parts(decoder, config)
    engine = Engine(parts.scheduler, parts.runner, parts.model, steps_in_flight=config.steps_in_flight)
    answers: list[tuple[list[int], list[TokenLogprobs]]] = [([], []) for _ in requests]
    try:
        async with engine.submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    answers[output.index][0].extend(output.token_ids)
                    answers[output.index][1].extend(output.logprobs or ())
    finally:
        await engine.close()
    return answers


@torch.inference_mode()
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 14, "max_model_len": 120}, {"steps_in_flight": 1}],
    ids=["as it comes", "in chunks", "with preemption", "in step"],
)
def test_they_equal_transformers(pair, options):
    theirs, ours = pair
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 7, 40, 90)]
    wishes = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.0, "presence_penalty": 1.0}, {}]
    requests = [
        Request(str(i), prompt, SamplingParams(MAX_TOKENS, logprobs=None if i == 3 else COUNT, **wish))
        for i, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True))
    ]
    config = EngineConfig(**{"num_kv_blocks": 64, **options})
    answers = asyncio.run(generate(ours, config, requests))
    assert answers[3][1] == []
    for prompt, (ids, found) in zip(prompts[:3], answers[:3], strict=True):
        assert len(ids) == len(found) == MAX_TOKENS
        logits = theirs(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        exact = torch.log_softmax(logits.float(), dim=-1)
        for line, token_id, entry in zip(exact, ids, found, strict=True):
            assert entry.logprob == pytest.approx(float(line[token_id]), abs=1e-4)
            assert entry.rank == int((line > line[token_id]).sum()) + 1
            best = line.topk(COUNT)
            assert [other for other, _ in entry.top] == best.indices.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
