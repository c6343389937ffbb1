"""Guesses of a proposer never change what an engine gives, whatever they are worth. On a CPU and, marked gpu, on CUDA."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.models.model import Model
from runtime.speculate.config import DEVICE_METHODS, METHODS, SpeculativeConfig
from runtime.speculate.methods import speculation_of
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation
from runtime.weights.fetch import resolve
from tests.equality.greedy import TIE, engine_parts
from tests.equality.oracle import Oracle
from tests.fake_runner import Rule
from tests.features import exchange
from tests.tiers import on_push

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB, NUM_TOKENS = 211, 40
PROMPTS = [(5,), tuple(range(40)), (7, 8, 9), tuple(range(60, 75)), (11, 12), tuple(range(80, 99))]
PARAMS = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 1.5, "seed": 4, "top_p": 0.9, "logprobs": 3},
    {
        "temperature": 1.0,
        "seed": 6,
        "logit_bias": {9: 3.0},
        "min_tokens": 5,
        "stop_token_ids": frozenset({9}),
        "logprobs": 2,
    },
    {"temperature": 0.0, "matchers": (lambda: Rule(unlike_the_last, VOCAB),), "logprobs": 2},
    {"temperature": 1.2, "seed": 8, "matchers": (lambda: Rule(unlike_the_last, VOCAB),), "presence_penalty": 0.5},
]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    monkeypatch.setattr("runtime.constrain.mask_maker.LIMIT_S", 60.0)


def unlike_the_last(ids: list[int]) -> set[int]:
    return {token for token in range(VOCAB) if (token + len(ids)) % 4 and (not ids or token != ids[-1])}


@pytest.fixture(scope="module", params=DEVICES)
def decoder(request, tmp_path_factory) -> Model:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    return load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device=request.param
    )


async def generate(
    decoder: Model, proposer: Oracle | Speculation | Literal["planned"] | None, **options
) -> tuple[list[tuple[list[int], list]], int]:
    """Of each prompt ids, and the tokens shown beside them; and how many guesses steps have checked. "planned": as options say."""
    config = EngineConfig(
        device=decoder.device, dtype="float32", max_num_seqs=8, max_model_len=200,
        **{"max_num_mixed_tokens": 16, "num_kv_blocks": 64} | options,
    )  # fmt: skip
    parts = await engine_parts(decoder, config)
    if proposer != "planned":
        speculation = Speculation(proposer, 6) if isinstance(proposer, Oracle) else proposer
        exchange(parts.scheduler, DraftScheduling, None if speculation is None else DraftScheduling(speculation))
    num_drafted, schedule = 0, parts.scheduler.schedule

    def counted():
        nonlocal num_drafted
        batch = schedule()
        num_drafted += sum(len(row.draft_ids) for row in batch.rows) if batch is not None else 0
        return batch

    parts.scheduler.schedule = counted
    engine = Engine(parts.scheduler, parts.runner, parts.model, steps_in_flight=config.steps_in_flight)
    requests = [
        Request(str(i), list(prompt), SamplingParams(NUM_TOKENS, ignore_eos=True, **sampling))
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    found: list[tuple[list[int], list]] = [([], []) for _ in requests]
    try:
        async with engine.submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    assert output.error is None
                    ids, shown = found[output.index]
                    ids += output.token_ids
                    shown += [each.top for each in output.logprobs or ()]
    finally:
        await engine.close()
    assert parts.scheduler.blocks.pool.num_free == parts.scheduler.blocks.pool.num_blocks
    return found, num_drafted


def assert_alike(guessed: list[tuple[list[int], list]], plain: list[tuple[list[int], list]]) -> None:
    """The same ids; and beside them the same likeliest tokens, but for such as are as likely: a GPU adds otherwise in a step of
    several tokens a row."""
    for (ids, shown), (expected_ids, expected) in zip(guessed, plain, strict=True):
        assert ids == expected_ids
        for top, expected_top in zip(shown, expected, strict=True):
            for (token, logprob), (expected_token, expected_logprob) in zip(top, expected_top, strict=True):
                assert token == expected_token or abs(logprob - expected_logprob) < TIE


CAPTURED = {
    "speculative_method": "ngram_cpu",
    "max_num_batched_tokens": 72,
}  # CUDA captures steps with drafts; n-grams are not asked


@pytest.mark.parametrize("options", [{}, {"steps_in_flight": 1}, {"max_num_batched_tokens": 24}, CAPTURED], ids=str)
def test_guesses_change_no_token(decoder, options):
    plain, none = asyncio.run(generate(decoder, None, **options))
    oracle = Oracle(PROMPTS, [ids for ids, _ in plain], VOCAB)
    guessed, num_drafted = asyncio.run(generate(decoder, oracle, **options))
    assert_alike(guessed, plain)
    assert none == 0
    assert num_drafted > 40
    assert 0 < oracle.num_right < oracle.num_guesses


@pytest.mark.parametrize("method", [method for method in METHODS if method not in DEVICE_METHODS])
@pytest.mark.parametrize("adaptive", on_push([True, False], False))
def test_neither_does_what_stood_before_in_prompt_or_answer(decoder, method, adaptive):
    """Past answers too: the second time suffixes know them all."""
    plain, _ = asyncio.run(generate(decoder, None))
    speculation = speculation_of(SpeculativeConfig.of({"method": method, "adaptive": adaptive}), 0.1)
    for _ in range(2):
        guessed, num_drafted = asyncio.run(generate(decoder, speculation))
        assert_alike(guessed, plain)
    if method == "suffix" and not adaptive:
        assert num_drafted > 80
        assert speculation.num_accepted_tokens > 40
