"""Beam search over the engine finds what transformers' generate finds, score by score."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest
import torch
import transformers

from runtime.api import FinishReason, Output, Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from server.generate.beams import BeamParams, BeamSearch
from tests.equality.greedy import engine_parts
from tests.equality.scored import exact_logprobs
from tests.tiers import on_push

VOCAB, EOS = 61, 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.25, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.inference_mode():  # make the end as likely as it is in real texts
        usual = theirs.model(torch.randint(VOCAB, (8, 20))).last_hidden_state.mean(dim=(0, 1))
        theirs.lm_head.weight[EOS] += 3.5 * usual / usual.dot(usual)
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    return theirs, load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)


async def search(decoder, prompts, params: SamplingParams, beams: BeamParams, **options) -> list[Output]:
    """By index."""
    parts = await engine_parts(decoder, EngineConfig(**{"num_kv_blocks": 128, **options}))
    object.__setattr__(parts.model, "eos_token_ids", frozenset({EOS}))
    engine = Engine(parts.scheduler, parts.runner, parts.model, steps_in_flight=1)
    found: dict[int, Output] = {}
    try:
        requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
        async with BeamSearch(engine, requests, beams) as stream:
            async for outputs in stream:
                for output in outputs:
                    assert output.index not in found
                    found[output.index] = output
    finally:
        await engine.close()
    return [found[index] for index in sorted(found)]


def transformers_beams(model, prompt: Sequence[int], max_tokens: int, beams: BeamParams, **options):
    """Ids without padding, and scores."""
    found = model.generate(
        torch.tensor([prompt]), num_beams=beams.width, num_return_sequences=beams.num_best, max_new_tokens=max_tokens,
        length_penalty=beams.length_penalty, early_stopping=beams.early_stopping, do_sample=False,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    answers = []
    for ids in found.sequences[:, len(prompt) :].tolist():
        ends = [place for place, token_id in enumerate(ids) if token_id == EOS]
        answers.append(ids[: ends[0] + 1] if ends else ids)
    return answers, found.sequences_scores.tolist()


def prompts(num: int = 4) -> list[list[int]]:
    rng = random.Random(num)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(num)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", on_push([-1.0, 0.0, 1.0, 2.5], 2.5))
def test_answers_and_scores_are_transformers_own(pair, length_penalty, early_stopping):
    theirs, ours = pair
    given = prompts()
    num_ended = 0
    for width, max_tokens in itertools.product((1, 3, 6), (1, 14)):
        beams = BeamParams(width, (width + 1) // 2, length_penalty, early_stopping)
        found = asyncio.run(search(ours, given, SamplingParams(max_tokens, logprobs=0), beams))
        for number, prompt in enumerate(given):
            answers = found[number * beams.num_best :][: beams.num_best]
            if width > 1:  # with one beam transformers does not search
                expected, scores = transformers_beams(theirs, prompt, max_tokens, beams)
                assert [answer.token_ids for answer in answers] == expected
                for answer, score in zip(answers, scores, strict=True):
                    total = sum(token.logprob for token in answer.logprobs)
                    assert total / len(answer.token_ids) ** length_penalty == pytest.approx(score, rel=1e-5, abs=1e-4)
            for answer in answers:
                ended = answer.token_ids[-1] == EOS
                assert answer.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
                num_ended += ended
    assert num_ended > 0


def test_an_answers_log_probabilities_are_the_models_own(pair):
    theirs, ours = pair
    (prompt,) = prompts(1)
    params = SamplingParams(9, logprobs=3, prompt_logprobs=0)
    first, second = asyncio.run(search(ours, [prompt], params, BeamParams(4, 2)))
    for answer in (first, second):
        exact = exact_logprobs(theirs, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        for line, token_id, entry in zip(exact, answer.token_ids, answer.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(line[token_id]), abs=1e-4)
            assert entry.rank == int((line > line[token_id]).sum()) + 1
            assert [other for other, _ in entry.top] == line.topk(3).indices.tolist()
    assert len(first.prompt_logprobs) == len(prompt) - 1
    assert second.prompt_logprobs is None


def test_a_shortest_length_is_kept_as_transformers_keeps_it(pair):
    theirs, ours = pair
    beams = BeamParams(5, 5, length_penalty=-2.0)
    for prompt in prompts(6):
        found = asyncio.run(search(ours, [prompt], SamplingParams(12, min_tokens=6), beams))
        expected, _ = transformers_beams(theirs, prompt, 12, beams, min_new_tokens=6)
        assert [answer.token_ids for answer in found] == expected


def test_without_an_end_all_answers_have_the_greatest_length_and_stop_ids_are_ends(pair):
    _, ours = pair
    given = prompts(3)
    found = asyncio.run(search(ours, given, SamplingParams(10, ignore_eos=True), BeamParams(4, 4)))
    assert [len(answer.token_ids) for answer in found] == [10] * 12
    stop = found[0].token_ids[3]
    params = SamplingParams(10, ignore_eos=True, stop_token_ids=frozenset({stop}))
    found = asyncio.run(search(ours, given[:1], params, BeamParams(4, 4, length_penalty=-3.0)))
    assert {answer.stop_token_id for answer in found} <= {stop, None}
    assert found[0].stop_token_id == stop == found[0].token_ids[-1]


def test_nothing_depends_on_the_cache_or_on_how_the_engine_cuts_the_work(pair):
    _, ours = pair
    given = prompts(5)
    run = lambda **options: asyncio.run(search(ours, given, SamplingParams(20), BeamParams(4, 2), **options))  # noqa: E731
    usual = [answer.token_ids for answer in run()]
    for options in (
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 9, "max_num_seqs": 8},
        {"num_kv_blocks": 12, "max_model_len": 80},
    ):
        assert [answer.token_ids for answer in run(**options)] == usual
