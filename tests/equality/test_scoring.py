"""The whole server over a real engine, a tiny random model and the official client: echoed scores, beams and bad words are what
transformers finds."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import openai
import pytest
import torch
import transformers

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from server.config.server_config import ServerConfig
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from tests.equality.greedy import engine_parts
from tests.equality.scored import exact_logprobs
from tests.server.conftest import running
from tests.server.tiny import EOS, VOCAB_SIZE, chatml, loaded_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = ["The lighthouse keeper climbed the stairs", "ñandú, 灯台", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    return theirs, load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)


@pytest.fixture(params=[{}, {"max_num_batched_tokens": 16}], ids=["as it comes", "in chunks"])
async def client(pair, request) -> AsyncIterator[openai.AsyncOpenAI]:
    parts = await engine_parts(pair[1], EngineConfig(num_kv_blocks=96, max_num_seqs=8, **request.param))
    engine = Engine(parts.scheduler, parts.runner, parts.model)
    lifecycle = Lifecycle()
    lifecycle.ready(loaded_model(engine, TOKENIZER, chatml(TOKENIZER), sampling_defaults(), ("tiny",)))
    async with running(engine, TOKENIZER, lifecycle, ServerConfig()) as server, server.openai() as client:
        yield client


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echoed_scores_are_transformers_own(pair, client, as_ids, max_tokens):
    encoded = [TOKENIZER.encode(text) for text in PROMPTS]
    for _ in range(2):  # the second time every block of the prompts is in the prefix cache
        scored = await client.completions.create(
            model="tiny",
            prompt=encoded if as_ids else PROMPTS,
            echo=True,
            logprobs=1,
            max_tokens=max_tokens,
            temperature=0,
        )
        for choice, ids, text in zip(scored.choices, encoded, PROMPTS, strict=True):
            found = choice.logprobs
            assert choice.text.startswith(text)
            assert len(found.tokens) == len(ids) + max_tokens
            assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
            exact = exact_logprobs(pair[0], ids)[:-1]
            own = exact.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
            assert found.token_logprobs[1 : len(ids)] == pytest.approx(own.tolist(), abs=1e-4)
            likeliest = [max(top.values()) for top in found.top_logprobs[1 : len(ids)]]
            assert likeliest == pytest.approx(exact.amax(dim=-1).tolist(), abs=1e-4)


async def test_beams_are_transformers_own(pair, client):
    beams = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "return_token_ids": True}
    answer = await client.completions.create(model="tiny", prompt=PROMPTS, n=2, max_tokens=12, extra_body=beams)
    for number, text in enumerate(PROMPTS):
        ids = TOKENIZER.encode(text)
        found = pair[0].generate(
            torch.tensor([ids]),
            num_beams=4,
            num_return_sequences=2,
            max_new_tokens=12,
            length_penalty=0.5,
            do_sample=False,
        )
        for choice, expected in zip(answer.choices[2 * number :][:2], found[:, len(ids) :].tolist(), strict=True):
            assert choice.token_ids == expected[: len(choice.token_ids)]
            assert len(choice.token_ids) == 12 or choice.token_ids[-1] == EOS


async def test_an_answer_keeps_to_its_bad_words(pair, client):
    async def answer(bad_words: list[str]) -> list[int]:
        extra = {"bad_words": bad_words, "return_token_ids": True, "ignore_eos": True}
        got = await client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, extra_body=extra
        )
        return got.choices[0].token_ids

    free = await answer([])
    pairs = {*itertools.pairwise(free)}
    words = [TOKENIZER.decode(pair) for pair in pairs]
    bad = [word for word, pair in zip(words, pairs, strict=True) if TOKENIZER.encode(word) == list(pair)]
    assert bad
    without = await answer(bad)
    assert without != free
    assert not {tuple(TOKENIZER.encode(word)) for word in bad} & {*itertools.pairwise(without)}
