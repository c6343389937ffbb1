"""The built-in model, real weights, decoded token for token as transformers does in float32, however the engine cuts the work."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
import transformers

from runtime.api import Request, SamplingParams
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.models.load import load_model
from runtime.weights.fetch import DEFAULT_MODEL, resolve
from server.config import ServerConfig
from server.lifecycle import Lifecycle, Served
from server.prompt import ChatTemplate
from server.sampling import SamplingDefaults
from tests.equality.greedy import compare, engine_parts, run, transformers_greedy
from tests.equality.prompts import CHAT, CODE, LONG, PLAIN, UNICODE
from tests.equality.scored import check, exact_logprobs, generate
from tests.server.conftest import running
from tests.server.smollm2 import ours

MAX_TOKENS = 24
SCORED = 400  # tokens, whose logits are computed in three slices


@pytest.fixture(scope="module")
def model():
    files = resolve(DEFAULT_MODEL, None, lambda progress: None)
    where = {"pretrained_model_name_or_path": str(files.path.parent), "gguf_file": files.path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in CHAT
    ]
    texts = [*chats, *CODE, *UNICODE, *PLAIN, *LONG]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    assert len(prompts) >= 24
    assert min(len(prompt) for prompt in prompts[-len(LONG) :]) > 3000
    references = [transformers_greedy(theirs, prompt, MAX_TOKENS) for prompt in prompts]
    exact = exact_logprobs(theirs, prompts[-1][:SCORED])[:-1]
    del theirs
    ours = load_model(files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None)
    return ours, prompts, references, exact


@pytest.mark.parametrize(
    ("budget", "together", "rounds"),
    [(8192, False, 1), (8192, True, 1), (512, True, 2), (16, True, 1)],
    ids=["one by one, unlimited", "together, unlimited", "together, 512, again with prefix hits", "together, 16"],
)
def test_greedy_equals_transformers(model, budget, together, rounds):
    decoder, prompts, references, _ = model
    config = EngineConfig(max_num_batched_tokens=budget, num_kv_blocks=1024)
    outcome = run(decoder, config, prompts, MAX_TOKENS, together=together, rounds=rounds)
    print(f"{compare(outcome, references)} of {len(prompts)} left at a tie; {outcome.num_cached_tokens} tokens cached")
    assert rounds == 1 or outcome.num_cached_tokens > 9000


def test_greedy_equals_transformers_without_prefix_cache_and_with_too_few_blocks(model):
    decoder, prompts, references, _ = model
    longest = max(len(prompt) for prompt in prompts) + MAX_TOKENS
    config = EngineConfig(
        max_num_batched_tokens=512,
        num_kv_blocks=-(-longest // 16) + 1,
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    outcome = run(decoder, config, prompts, MAX_TOKENS, together=True)
    print(f"{compare(outcome, references)} of {len(prompts)} left at a tie; {outcome.num_preemptions} preemptions")
    assert outcome.num_preemptions > 0
    assert outcome.num_cached_tokens == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 512}, {"enforce_eager": True}])
def test_greedy_equals_transformers_on_cuda(model, options):
    _, prompts, references, _ = model
    files = resolve(DEFAULT_MODEL, None, lambda progress: None)
    decoder = load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, device="cuda"
    )
    config = EngineConfig(device="cuda", dtype="float32", num_kv_blocks=1024, **options)
    outcome = run(decoder, config, prompts, MAX_TOKENS, together=True)
    print(f"{compare(outcome, references)} of {len(prompts)} left at a tie")


@pytest.mark.parametrize("budget", [8192, 64])
def test_a_prompt_is_scored_as_transformers_does(model, budget):
    decoder, prompts, _, exact = model
    prompt = prompts[-1][:SCORED]
    request = Request("r", prompt, SamplingParams(0, prompt_logprobs=1))
    config = EngineConfig(max_num_batched_tokens=budget, num_kv_blocks=64, max_num_seqs=16)
    (answer,) = asyncio.run(generate(decoder, config, [request]))
    check(exact, prompt[1:], answer.prompt or [], 1)


async def test_an_echo_over_http_is_scored_as_transformers_does(model):
    decoder, prompts, _, exact = model
    ids = prompts[-1][:SCORED]
    parts = await engine_parts(decoder, EngineConfig(num_kv_blocks=64, max_num_seqs=16))
    engine = Engine(parts.scheduler, parts.runner, parts.model)
    lifecycle = Lifecycle()
    template = ChatTemplate(ours().chat_template, ours().named_tokens)
    lifecycle.ready(Served(engine, ours(), template, SamplingDefaults(), ("smollm2",)))
    async with running(engine, ours(), lifecycle, ServerConfig()) as server, server.openai() as client:
        scored = await client.completions.create(model="smollm2", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    (choice,) = scored.choices
    found = choice.logprobs
    own = exact.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert [max(top.values()) for top in found.top_logprobs[1:]] == pytest.approx(exact.amax(1).tolist(), abs=1e-4)
    starts, text = found.text_offset, choice.text
    assert [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])] == found.tokens
