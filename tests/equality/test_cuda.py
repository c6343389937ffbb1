"""The CUDA engine decodes tiny random models as transformers does: by graphs and without, ahead of the device and in step."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from runtime.config import EngineConfig, WeightPolicy
from runtime.models import implementation
from runtime.models.load import load_model
from runtime.models.through_transformers.model import TransformersModel
from runtime.weights.fetch import resolve
from tests.equality.greedy import Outcome, compare, run, transformers_greedy

pytestmark = pytest.mark.gpu

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama, heads of 16": lambda: transformers.LlamaConfig(**COMMON),
    "llama, biased, heads of 64": lambda: transformers.LlamaConfig(**COMMON, head_dim=64, attention_bias=True),
    "qwen3, heads of 128": lambda: transformers.Qwen3Config(**COMMON, head_dim=128),
    "qwen3, heads of 96": lambda: transformers.Qwen3Config(**COMMON, head_dim=96, tie_word_embeddings=True),
    "llama, heads of 256": lambda: transformers.LlamaConfig(**COMMON, head_dim=256),
}
MAX_TOKENS = 24
# Half precision against float32: by how much its rounding moves these models' logits, which are some 10 apart.
HALF_TIES = {"bfloat16": 0.6, "float16": 0.1}
CACHE_TIE = 1.2  # as measured by the references on a CPU: heads of 256 leave the text at margins up to 0.6


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    theirs = transformers.AutoModelForCausalLM.from_config(MODELS[request.param](), dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    rng = random.Random(3)
    stem = [rng.randrange(VOCAB) for _ in range(70)]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 120, 300, 1100)]
    prompts += [[*stem, rng.randrange(VOCAB)], stem[:40], stem[:64], stem]
    return folder, prompts, [transformers_greedy(theirs, prompt, MAX_TOKENS) for prompt in prompts]


def load(folder, dtype: str):
    files = resolve(str(folder), None, lambda progress: None)
    return load_model(
        files, dtype=dtype, load_format="auto", seed=0, progress=lambda progress: None, device="cuda"
    )  # fmt: skip


def decode(decoder, prompts, *, together=True, rounds=1, **options) -> Outcome:
    config = EngineConfig(
        **{"device": "cuda", "dtype": decoder.dtype, "num_kv_blocks": 512, "max_num_seqs": 24, **options}
    )
    return run(decoder, config, prompts, MAX_TOKENS, together=together, rounds=rounds)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"together": False},
        {"enforce_eager": True},
        {"steps_in_flight": 1},
        {"steps_in_flight": 1, "enforce_eager": True},
        {"max_num_batched_tokens": 40},
        {"max_num_batched_tokens": 256, "rounds": 2},
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: ", ".join(f"{key} {value}" for key, value in options.items()) or "as it comes",
)
def test_float32_equals_transformers(case, options):
    folder, prompts, references = case
    outcome = decode(load(folder, "float32"), prompts, **options)
    print(f"{compare(outcome, references)} of {len(prompts)} left at a tie")


def test_float32_equals_transformers_when_blocks_run_out(case):
    folder, prompts, references = case
    outcome = decode(load(folder, "float32"), prompts, num_kv_blocks=76, max_model_len=1200)
    print(f"{compare(outcome, references)} of {len(prompts)} left at a tie; {outcome.num_preemptions} preemptions")
    assert outcome.num_preemptions > 0


@pytest.mark.parametrize("dtype", HALF_TIES)
@pytest.mark.parametrize("options", [{}, {"together": False}, {"enforce_eager": True}, {"max_num_batched_tokens": 40}])
def test_half_precision_stays_close(case, dtype, options):
    folder, prompts, references = case
    outcome = decode(load(folder, dtype), prompts, **options)
    ties = compare(outcome, references, HALF_TIES[dtype])
    assert ties < len(prompts)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_caches_of_eight_bits_stay_close_however_the_work_is_cut(case, kv_cache_dtype):
    """What is cached is the same numbers, but where rounding to them is a tie for the kernels of different steps."""
    folder, prompts, references = case
    decoder = load(folder, "float32")
    alone = decode(decoder, prompts, kv_cache_dtype=kv_cache_dtype, together=False, enforce_eager=True).token_ids
    others = [r.margins[0] for ids, r in zip(alone, references, strict=True) if ids[0] != r.token_ids[0]]
    assert len(others) <= 0.5 * len(prompts)
    assert max(others, default=0) < CACHE_TIE
    for options in ({}, {"max_num_batched_tokens": 256, "rounds": 2}):
        cut = decode(decoder, prompts, kv_cache_dtype=kv_cache_dtype, **options)
        same = [ids == others for ids, others in zip(cut.token_ids, alone, strict=True)]
        assert sum(same) >= 0.6 * len(prompts), options
    assert cut.num_cached_tokens > 100


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8_per_token_head"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_computes_what_its_kernels_do_without_it(case, dtype, kv_cache_dtype):
    """Four lines fill a captured shape, so both run the very same kernels, but for the first step's padding."""
    folder, prompts, _ = case
    decoder, four = load(folder, dtype), [prompts[3]] * 4
    captured = decode(decoder, four, kv_cache_dtype=kv_cache_dtype)
    eager = decode(decoder, four, kv_cache_dtype=kv_cache_dtype, enforce_eager=True)
    assert captured.token_ids == eager.token_ids


def load_foreign(folder):
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, "transformers")
    return implementation.load(
        spec, files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None,
        max_model_len=spec.max_model_len, device="cuda", weights=WeightPolicy("float32"),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["ArceeConfig", "ApertusConfig", "BioGptConfig"])
def foreign(request, tmp_path_factory):
    """A model that has no description of ours, a few prompts, and what transformers answers."""
    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(6)
    config = getattr(transformers, request.param)(**{**COMMON, "head_dim": 16, "pad_token_id": 0})
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 17, 90, 300)]
    return folder, prompts, [transformers_greedy(theirs, prompt, MAX_TOKENS) for prompt in prompts]


def test_modules_of_transformers_are_captured(foreign, caplog):
    folder, prompts, references = foreign
    with caplog.at_level("INFO", "oneloop.start"):
        outcome = decode(load_foreign(folder), prompts)
    compare(outcome, references)
    assert "captured " in caplog.text
    assert "refuses" not in caplog.text


def test_modules_that_look_at_what_they_compute_run_without_graphs(foreign, caplog, monkeypatch):
    folder, prompts, references = foreign
    original = TransformersModel.forward

    def forward(self, step):
        int(step.input_ids.max())
        return original(self, step)

    monkeypatch.setattr(TransformersModel, "forward", forward)
    with caplog.at_level("INFO", "oneloop.start"):
        outcome = decode(load_foreign(folder), prompts)
    compare(outcome, references)
    assert "CUDA graphs are disabled: a module cannot be captured" in caplog.text
