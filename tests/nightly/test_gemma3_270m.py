"""Gemma 3 270M, real weights of six quantised types: it answers sensibly, token for token as transformers does."""

from __future__ import annotations

import pytest

from runtime.config import EngineConfig
from runtime.models.load import load_model
from runtime.weights.fetch import resolve
from server.models.tokenizer import Tokenizer
from tests.equality import gemma3_270m
from tests.equality.greedy import compare, references, run

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


@pytest.mark.timeout(900)  # a download of 240 MB, and a minute of two cores
def test_it_knows_what_it_was_taught_and_says_so_as_transformers_does():
    """One test, since a worker that takes another would need all of it again."""
    files = resolve(str(gemma3_270m.file()), None, lambda progress: None)
    tokenizer = Tokenizer.from_gguf(files.gguf.metadata)
    prompts = [tokenizer.encode(text) for text in (*TEXTS, LONG)]
    assert len(prompts[-1]) > 600
    ours = load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, max_model_len=2048
    )
    one_by_one = run(ours, EngineConfig(max_num_batched_tokens=512, **ROOM), prompts, MAX_TOKENS, together=False)
    expected = references(gemma3_270m.theirs(), prompts, MAX_TOKENS, one_by_one.token_ids)
    compare(one_by_one, expected)

    in_pieces = EngineConfig(max_num_batched_tokens=16, **ROOM)
    outcome = run(ours, in_pieces, prompts, MAX_TOKENS, together=True, rounds=2)
    print(f"{compare(outcome, expected)} of {len(prompts)} left at a tie; {outcome.num_cached_tokens} tokens cached")
    assert outcome.num_cached_tokens > 0

    for (text, answer), reference in zip(TEXTS.items(), expected, strict=False):
        assert tokenizer.decode(reference.token_ids).startswith(answer), text
