"""The built-in model, real weights, decoded token for token as transformers does in float32, however the engine cuts the work."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.models.model import Model
from server.config.server_config import ServerConfig
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from server.models.prompt import ChatTemplate
from tests.equality.greedy import Outcome, Reference, compare, engine_parts, run, transformers_greedy
from tests.equality.prompts import CHAT, CODE, LONG, PLAIN, UNICODE
from tests.equality.scored import check, exact_logprobs, generate
from tests.runtime.weights import smollm2
from tests.server.conftest import running
from tests.server.smollm2 import ours as tokenizer
from tests.server.tiny import loaded_model

MAX_TOKENS = 24
SCORED = 400  # tokens, whose logits are computed in three slices
# The long prompts reach over a chunk of 256, into a third one and into a seventh.
CUT = {-3: 300, -2: 550, -1: 1700}


@dataclass
class Case:
    """`expected`: what transformers generates, by prompt, once somebody asked."""

    theirs: transformers.PreTrainedModel
    ours: Model
    prompts: list[list[int]]
    expected: dict[int, Reference] = field(default_factory=dict)

    @cached_property
    def exact(self) -> torch.Tensor:
        """Log-probabilities of what follows the tokens of a prompt [SCORED - 1, V]."""
        return exact_logprobs(self.theirs, self.prompts[-2][:SCORED])[:-1]

    def run(self, model: Model, config: EngineConfig, numbers: Sequence[int], **how: Any) -> Outcome:
        """Of the prompts of these numbers, which end as transformers' do."""
        outcome = run(model, config, [self.prompts[number] for number in numbers], MAX_TOKENS, **how)
        for number, draft in zip(numbers, outcome.token_ids, strict=True):
            if number not in self.expected:
                self.expected[number] = transformers_greedy(self.theirs, self.prompts[number], MAX_TOKENS, draft)
        ties = compare(outcome, [self.expected[number] for number in numbers])
        print(f"{ties} of {len(numbers)} left at a tie; {outcome.num_cached_tokens} tokens cached")
        return outcome


@pytest.fixture(scope="module")
def case() -> Case:
    chat = ChatTemplate(tokenizer().chat_template, tokenizer().named_tokens)
    chats = [chat.render([{"role": "user", "content": text}]) for text in CHAT]
    prompts = [tokenizer().encode(text) for text in (*chats, *CODE, *UNICODE, *PLAIN, *LONG)]
    for number, length in CUT.items():
        prompts[number] = prompts[number][:length]
    return Case(smollm2.theirs(), load(), prompts)


def load(**options: Any) -> Model:
    return load_model(
        smollm2.files(), dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, **options
    )


ALL = range(len(CHAT + CODE + UNICODE + PLAIN + LONG))
ALL_BUT_THE_LONGEST, SOME = ALL[:-1], ALL[2:-1:5]


@pytest.mark.parametrize(
    ("numbers", "budget", "together", "rounds"),
    [
        pytest.param(SOME, 8192, False, 1, id="one by one, unlimited"),
        pytest.param(SOME, 256, True, 2, id="some together, 256, again with prefix hits"),
        pytest.param(SOME, 16, True, 1, id="some together, 16"),
        pytest.param(ALL, 8192, True, 1, id="together, unlimited", marks=pytest.mark.nightly),
        pytest.param(ALL, 256, True, 2, id="together, 256, again with prefix hits", marks=pytest.mark.nightly),
        pytest.param(ALL_BUT_THE_LONGEST, 16, True, 1, id="together, 16", marks=pytest.mark.nightly),
    ],
)
def test_greedy_equals_transformers(case, numbers, budget, together, rounds):
    config = EngineConfig(max_num_batched_tokens=budget, num_kv_blocks=1024)
    outcome = case.run(case.ours, config, numbers, together=together, rounds=rounds)
    assert rounds == 1 or outcome.num_cached_tokens > 0.7 * sum(len(case.prompts[number]) for number in numbers)


@pytest.mark.nightly
def test_greedy_equals_transformers_without_prefix_cache_and_with_too_few_blocks(case):
    longest = max(len(case.prompts[number]) for number in ALL_BUT_THE_LONGEST) + MAX_TOKENS
    config = EngineConfig(
        max_num_batched_tokens=256,
        num_kv_blocks=-(-longest // 16) + 1,
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    # The long ones first: the short ones then fill all that is left, and grow.
    outcome = case.run(case.ours, config, ALL_BUT_THE_LONGEST[::-1], together=True)
    assert outcome.num_preemptions > 0
    assert outcome.num_cached_tokens == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 512}, {"enforce_eager": True}])
def test_greedy_equals_transformers_on_cuda(case, options):
    config = EngineConfig(device="cuda", dtype="float32", num_kv_blocks=1024, **options)
    case.run(load(device="cuda"), config, ALL, together=True)


@pytest.mark.parametrize("budget", [8192, 64])
def test_a_prompt_is_scored_as_transformers_does(case, budget):
    prompt = case.prompts[-2][:SCORED]
    request = Request("r", prompt, SamplingParams(0, prompt_logprobs=1))
    config = EngineConfig(max_num_batched_tokens=budget, num_kv_blocks=64, max_num_seqs=16)
    (answer,) = asyncio.run(generate(case.ours, config, [request]))
    check(case.exact, prompt[1:], answer.prompt or [], 1)


async def test_an_echo_over_http_is_scored_as_transformers_does(case):
    ids, exact = case.prompts[-2][:SCORED], case.exact
    parts = await engine_parts(case.ours, EngineConfig(num_kv_blocks=64, max_num_seqs=16))
    engine = Engine(parts.scheduler, parts.runner, parts.model)
    lifecycle = Lifecycle()
    template = ChatTemplate(tokenizer().chat_template, tokenizer().named_tokens)
    lifecycle.ready(loaded_model(engine, tokenizer(), template, sampling_defaults(), ("smollm2",)))
    async with running(engine, tokenizer(), lifecycle, ServerConfig()) as server, server.openai() as client:
        scored = await client.completions.create(model="smollm2", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    (choice,) = scored.choices
    found = choice.logprobs
    own = exact.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert [max(top.values()) for top in found.top_logprobs[1:]] == pytest.approx(exact.amax(1).tolist(), abs=1e-4)
    starts, text = found.text_offset, choice.text
    assert [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])] == found.tokens
