"""The decoder against transformers: tiny random models of every family, then SmolLM2, over a paged cache kept by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from tests.equality.greedy import transformers_greedy
from tests.runtime.models.paged import Paged

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25, "head_dim": 10,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama, biases, tied": lambda: transformers.LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, llama3 rope, one kv head": lambda: transformers.LlamaConfig(
        **COMMON | {"num_key_value_heads": 1}, rope_parameters=LLAMA3
    ),
    "llama, wide heads": lambda: transformers.LlamaConfig(**COMMON | {"head_dim": 24}),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=None),
    "mistral, window": lambda: transformers.MistralConfig(**COMMON, sliding_window=30),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen2, tied, yarn": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True, rope_parameters=YARN),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON | {"head_dim": 16}),
    "qwen3, biases, tied": lambda: transformers.Qwen3Config(**COMMON, attention_bias=True, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    theirs = transformers.AutoModelForCausalLM.from_config(MODELS[request.param](), dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(folder)
    return theirs, load(folder)


def load(folder, **options):
    files = resolve(str(folder), None, lambda progress: None)
    defaults = {"dtype": "float32", "load_format": "auto", "seed": 0, "progress": lambda progress: None}
    return load_model(files, **defaults | options)


@torch.inference_mode()
def logits_of(theirs, ids) -> torch.Tensor:
    return theirs(torch.tensor([ids])).logits[0]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_logits_of_a_whole_prompt(pair):
    theirs, ours = pair
    ids = prompt(90, 1)
    (logits,) = Paged(ours, 1, 96).step({0: ids}).values()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, logits_of(theirs, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_logits_of_a_prompt_in_chunks(pair, chunk):
    theirs, ours = pair
    ids, paged = prompt(60, 2), Paged(ours, 1, 64)
    chunks = [paged.step({0: ids[start : start + chunk]})[0] for start in range(0, len(ids), chunk)]
    torch.testing.assert_close(torch.cat(chunks), logits_of(theirs, ids), rtol=0, atol=1e-4)


def test_rows_of_different_lengths_share_a_step(pair):
    """Two prompts in chunks beside one that already decodes, as the scheduler mixes them."""
    theirs, ours = pair
    rows = {0: prompt(40, 3), 1: prompt(33, 4), 2: prompt(21, 5)}
    paged = Paged(ours, 3, 48)
    got = {row: [] for row in rows}
    for spans in (
        {1: rows[1][:20]},
        {0: rows[0][:17], 1: rows[1][20:21], 2: rows[2][:21]},
        {1: rows[1][21:22], 0: rows[0][17:39]},
        {0: rows[0][39:40], 1: rows[1][22:]},
    ):
        for row, logits in paged.step(spans).items():
            got[row].append(logits)
    for row, ids in rows.items():
        torch.testing.assert_close(torch.cat(got[row]), logits_of(theirs, ids), rtol=0, atol=1e-4)


@torch.inference_mode()
def test_embeddings_in_place_of_ids(pair):
    """A step of a chunk and a decode, whose ids say nothing."""
    theirs, ours = pair
    ids, paged = prompt(24, 8), Paged(ours, 2, 32)
    embeds = torch.randn(20, theirs.config.hidden_size, generator=torch.Generator().manual_seed(9)) * 0.3
    paged.step({1: ids[:23]})
    step = paged.next({0: [0] * 20, 1: [0]})
    given = torch.cat([embeds, ours.embed(torch.tensor(ids[23:]))])
    before = given.clone()
    logits = ours.compute_logits(ours.forward(replace(step, input_embeds=given)))
    torch.testing.assert_close(logits[:20], theirs(inputs_embeds=embeds[None]).logits[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits[20:], logits_of(theirs, ids)[23:], rtol=0, atol=1e-4)
    assert torch.equal(given, before)


@torch.inference_mode()
def test_the_final_norm_s_output_of_some_tokens(pair):
    theirs, ours = pair
    ids = prompt(30, 10)
    hidden = ours.forward(Paged(ours, 1, 32).next({0: ids}))
    expected = theirs.model(torch.tensor([ids])).last_hidden_state[0]
    tokens = torch.tensor([29, 3])
    torch.testing.assert_close(ours.final_hidden(hidden, tokens), expected[tokens], rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.compute_logits(hidden), logits_of(theirs, ids), rtol=0, atol=1e-4)  # as if unasked


def greedy(paged: Paged, ids: list[int], count: int, chunk: int) -> list[int]:
    for start in range(0, len(ids), chunk):
        logits = paged.step({0: ids[start : start + chunk]})[0]
    generated = [int(logits[-1].argmax())]
    while len(generated) < count:
        generated.append(int(paged.step({0: generated[-1:]})[0][-1].argmax()))
    return generated


@pytest.mark.parametrize("chunk", [16, 1000])
def test_greedy_tokens_are_transformers_own(pair, chunk):
    theirs, ours = pair
    ids = prompt(50, 6)
    answer = greedy(Paged(ours, 1, 80), ids, 24, chunk)
    assert answer == transformers_greedy(theirs, ids, 24, answer).token_ids


def test_it_counts_parameters_as_transformers_does(pair):
    theirs, ours = pair
    assert ours.num_parameters == theirs.num_parameters()
    assert ours.weights_bytes >= 4 * ours.num_parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(pair, tmp_path, dtype):
    theirs, ours = pair
    theirs.save_pretrained(tmp_path)
    half = load(tmp_path, dtype=dtype)
    ids = prompt(12, 7)
    (logits,) = Paged(half, 1, 16).step({0: ids}).values()
    (exact,) = Paged(ours, 1, 16).step({0: ids}).values()
    assert logits.dtype == getattr(torch, dtype)
    assert torch.nn.functional.cosine_similarity(logits.float(), exact).min() > 0.99
