"""Log-probabilities of answers and of prompts are transformers' own, to 1e-4 in float32, however the engine cuts the work."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
import transformers

from runtime.api import FinishReason, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.sample import prompt_logprobs
from runtime.weights.fetch import resolve
from tests.equality.greedy import engine_parts
from tests.equality.scored import check, exact_logprobs, generate

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


OPTIONS = {
    "as it comes": {},
    "in chunks": {"max_num_batched_tokens": 16},
    "with preemption": {"num_kv_blocks": 14, "max_model_len": 120},
    "in step": {"steps_in_flight": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_they_equal_transformers(pair, options):
    theirs, ours = pair
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 7, 40, 90)]
    all_params = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {},
    ]
    requests = [
        Request(str(i), prompt, SamplingParams(MAX_TOKENS, logprobs=None if i == 3 else COUNT, **sampling))
        for i, (prompt, sampling) in enumerate(zip(prompts, all_params, strict=True))
    ]
    config = EngineConfig(**{"num_kv_blocks": 64, **options})
    answers = asyncio.run(generate(ours, config, requests))
    assert answers[3].logprobs == []
    for prompt, answer in zip(prompts[:3], answers[:3], strict=True):
        assert len(answer.ids) == MAX_TOKENS
        exact = exact_logprobs(theirs, prompt + answer.ids)
        check(exact[len(prompt) - 1 : -1], answer.ids, answer.logprobs, COUNT)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("slice_tokens", [1, 7, 10_000])
def test_those_of_prompts_equal_transformers_and_disturb_nobody(pair, monkeypatch, options, slice_tokens):
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 4 * VOCAB * slice_tokens)
    theirs, ours = pair
    rng = random.Random(5)
    stem = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [[rng.randrange(VOCAB)], stem, [*stem, 3, 4], stem[:33], [rng.randrange(VOCAB) for _ in range(90)]]
    counts = [COUNT, COUNT, None, 0, 1]
    lengths = [MAX_TOKENS, 0, MAX_TOKENS, MAX_TOKENS, 1]
    plain = [Request(str(i), prompt, SamplingParams(MAX_TOKENS, temperature=0.0)) for i, prompt in enumerate(prompts)]
    scored = [
        Request(str(i), prompt, SamplingParams(length, temperature=0.0, prompt_logprobs=count))
        for i, (prompt, length, count) in enumerate(zip(prompts, lengths, counts, strict=True))
    ]
    config = EngineConfig(**{"num_kv_blocks": 64, **options})
    usual = asyncio.run(generate(ours, config, plain))
    answers = asyncio.run(generate(ours, config, scored, rounds=2))
    for prompt, count, length, answer, other in zip(prompts, counts, lengths, answers, usual, strict=True):
        assert answer.ids == other.ids[:length]
        assert answer.finish is FinishReason.LENGTH
        if count is None:
            assert answer.prompt is None
        else:
            exact = exact_logprobs(theirs, prompt)[:-1]
            check(exact, prompt[1:], answer.prompt or [], count)


def test_tokens_may_be_asked_for_by_id(pair):
    theirs, ours = pair
    wanted = (5, 96, 0)
    params = [
        SamplingParams(MAX_TOKENS, temperature=0.0, logprobs=0, logprob_token_ids=wanted),
        SamplingParams(MAX_TOKENS, temperature=0.0, logprobs=COUNT),
        SamplingParams(MAX_TOKENS, temperature=0.0, logprobs=1, logprob_token_ids=(7,)),
    ]
    prompt = [4, 8, 15]
    requests = [Request(str(i), prompt, sampling) for i, sampling in enumerate(params)]
    by_id, usual, single = asyncio.run(generate(ours, EngineConfig(num_kv_blocks=64), requests))
    exact = exact_logprobs(theirs, prompt + usual.ids)[2:-1]
    check(exact, usual.ids, usual.logprobs, COUNT)
    for line, entry, one in zip(exact, by_id.logprobs, single.logprobs, strict=True):
        assert [token_id for token_id, _ in entry.top] == list(wanted)
        assert [logprob for _, logprob in entry.top] == pytest.approx(line[list(wanted)].tolist(), abs=1e-4)
        assert [token_id for token_id, _ in one.top] == [7]
    assert [entry.rank for entry in by_id.logprobs] == [1] * MAX_TOKENS


class Spoiled:
    """A model whose tenth token of a step, if it does not sample, has no usable logits."""

    def __init__(self, model) -> None:
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def traced(self, kv_caches):
        return Spoiled(self._model.traced(kv_caches))

    def compute_logits(self, hidden, tokens=None):
        logits = self._model.compute_logits(hidden, tokens)
        if tokens is not None:  # None: every token samples, so none of them is of a prompt before its last
            logits[(tokens == 9).nonzero()] = torch.nan
        return logits


async def test_a_prompt_whose_logits_are_no_numbers_ends_alone(pair):
    _, ours = pair
    parts = await engine_parts(Spoiled(ours), EngineConfig(num_kv_blocks=64))
    engine = Engine(parts.scheduler, parts.runner, parts.model)
    sampling = SamplingParams(3, temperature=0.0, prompt_logprobs=0)
    found: dict[int, list[FinishReason | None]] = {0: [], 1: []}
    async with engine.submit([Request("a", [7] * 20, sampling), Request("b", [8] * 20, sampling)]) as stream:
        async for outputs in stream:
            for output in outputs:
                found[output.index].append(output.finish)
                assert output.index or "not finite" in (output.error or "")
    await engine.close()
    assert (found[0][-1], found[1][-1]) == (FinishReason.ERROR, FinishReason.LENGTH)
