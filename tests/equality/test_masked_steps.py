"""Steps that wait for masks compute and draw what other steps do, bit for bit. On a CPU and, marked gpu, on CUDA."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.constrain import mask_maker
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.models.model import Model
from runtime.weights.fetch import resolve
from tests.equality.greedy import engine_parts
from tests.fake_runner import LateMasks, Rule

Rules = Callable[[list[int]], Collection[int] | None]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 211
PROMPTS = [[5], list(range(40)), [7, 8, 9], list(range(60, 75)), [3] * 20]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.5, "seed": 4, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "seed": 5, "top_k": 20, "presence_penalty": 0.7, "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 6, "logit_bias": {9: 3.0}, "min_tokens": 5, "stop_token_ids": frozenset({9})},
]


def load(config, folder: Path, device: str) -> Model:
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    return load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device=device)


@pytest.fixture(scope="module", params=DEVICES)
def decoder(request, tmp_path_factory):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return load(config, tmp_path_factory.mktemp("llama"), request.param)


@pytest.fixture(scope="module", params=DEVICES)
def recurrent(request, tmp_path_factory):
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=96, num_hidden_layers=2, state_size=6, time_step_rank=5, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return load(config, tmp_path_factory.mktemp("mamba"), request.param)


async def generate(decoder, changes: dict[int, dict], late: Mapping[int, Rules], **options) -> list[tuple]:
    """(ids, logprobs of prompt and output, how it ended) of each prompt; `changes` by prompt. `late`: rules for some whose masks
    are all late. Prompts are cut alike in every run, not by what steps were measured to take: cut otherwise, they are rounded
    otherwise."""
    config = EngineConfig(
        device=decoder.device, num_kv_blocks=64, max_num_seqs=8, max_model_len=200, max_num_mixed_tokens=16, **options
    )
    parts = await engine_parts(decoder, config)
    engine = Engine(parts.scheduler, parts.runner, parts.model, steps_in_flight=config.steps_in_flight)
    makers = LateMasks(parts.scheduler)
    for i, rule in late.items():
        changes[i] = {**changes.get(i, {}), "matchers": (makers.rule(str(i), rule, VOCAB),)}
    requests = [
        Request(str(i), prompt, SamplingParams(24, **{**sampling, **changes.get(i, {})}))
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    found: list[tuple] = [([], [], None) for _ in requests]
    try:
        async with engine.submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    assert output.error is None
                    ids, logprobs, _ = found[output.index]
                    logprobs += (output.prompt_logprobs or []) + (output.logprobs or [])
                    found[output.index] = (ids + output.token_ids, logprobs, output.finish)
    finally:
        await engine.close()
    return found


def run(decoder, changes=None, late=None, **options) -> list[tuple]:
    with pytest.MonkeyPatch.context() as patch:
        if not late:  # none is late because the machine is busy: its row would be computed beside others than expected
            patch.setattr(mask_maker, "GRACE_S", 60.0)
        return asyncio.run(generate(decoder, {**(changes or {})}, late or {}, **options))


OPTIONS = [{}, {"steps_in_flight": 1}, {"max_num_batched_tokens": 24}, {"enforce_eager": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_matcher_that_allows_everything_changes_nothing_for_anybody(decoder, options):
    free = {"matchers": (lambda: Rule(lambda ids: None, VOCAB),)}
    plain = run(decoder, **options)
    assert run(decoder, {1: free, 3: free}, **options) == plain
    assert run(decoder, dict.fromkeys(range(5), free), **options) == plain


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_matcher_that_never_changes_is_as_good_as_allowed_token_ids(decoder, options):
    some = frozenset(range(0, VOCAB, 3)) | {2}
    ruled = {"matchers": (lambda: Rule(lambda ids: some, VOCAB),)}
    listed = {"allowed_token_ids": some}
    by_list = run(decoder, dict.fromkeys((1, 2, 3), listed), **options)
    assert run(decoder, dict.fromkeys((1, 2, 3), ruled), **options) == by_list
    plain = run(decoder, **options)
    assert (by_list[0], by_list[4]) == (plain[0], plain[4])
    assert by_list[1:4] != plain[1:4]


def test_what_may_follow_hangs_on_what_was_drawn(decoder):
    def next_up(ids):
        return {(ids[-1] + step) % VOCAB for step in (3, 4)} if ids else {50, 60}

    rule = {"matchers": (lambda: Rule(next_up, VOCAB),), "ignore_eos": True, "min_tokens": 0}
    for ids, logprobs, _ in run(decoder, dict.fromkeys(range(5), rule)):
        assert ids[0] in {50, 60}
        assert {(b - a) % VOCAB for a, b in itertools.pairwise(ids)} <= {3, 4}
        assert all(entry.rank >= 1 for entry in logprobs)


def same(found: list[tuple], expected: list[tuple]) -> bool:
    """But for rounding in logprobs: a row that waits for its mask is computed beside others than before."""
    for (ids, logprobs, finish), (other_ids, others, other_finish) in zip(found, expected, strict=True):
        assert (ids, finish) == (other_ids, other_finish)
        assert [entry.logprob for entry in logprobs] == pytest.approx([entry.logprob for entry in others], abs=1e-4)
        assert [[id for id, _ in entry.top] for entry in logprobs] == [[id for id, _ in entry.top] for entry in others]
    return True


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masks_that_come_late_change_nothing_for_anybody(decoder, options):
    some = frozenset(range(0, VOCAB, 3)) | {2}
    in_time = run(decoder, {n: {"matchers": (lambda: Rule(lambda ids: some, VOCAB),)} for n in (1, 2, 3)}, **options)
    assert same(run(decoder, late=dict.fromkeys((1, 2, 3), lambda ids: some), **options), in_time)


def test_a_state_takes_no_token_twice_though_all_masks_come_late(recurrent):
    plain = run(recurrent)
    assert same(run(recurrent, late=dict.fromkeys((0, 1, 3), lambda ids: None)), plain)
    assert same(run(recurrent, late=dict.fromkeys(range(5), lambda ids: None)), plain)
