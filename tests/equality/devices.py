"""What an engine on several devices generates, beside transformers: whatever it does with prompts meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.config import EngineConfig
from runtime.models.implementation import describe
from runtime.start import SharedDevice
from runtime.start.build import EngineParts
from runtime.start.ranks import build_parts
from runtime.start.stages import build_over_processes
from runtime.weights.fetch import resolve
from tests.equality.greedy import compare, references, run
from tests.equality.test_families import FAMILIES, MAX_TOKENS, VOCAB, drawn
from tests.runtime.parallel.elsewhere import elsewhere

NATIVE = [name for name, family in FAMILIES.items() if family.model_impl == "native"]
WAYS = {
    "in chunks, twice": ({"max_num_batched_tokens": 24}, {"together": True, "rounds": 2}),
    "with drafts and preemption": (
        {"max_num_batched_tokens": 80, "speculative_method": "ngram"},
        {"together": True, "preempting": True, "planned": True},
    ),
}


def check(name: str, folder: Path, device: str, *, ways: Iterable[str] = WAYS, **options: Any) -> None:
    """`name`: of a family; `ways`: of `WAYS`; `options`: of the engine, how many devices there are."""
    family = FAMILIES[name]
    theirs = drawn(family)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = None  # answers are all of a length
    theirs.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    kinds = describe(files.config, family.model_impl).memory_kinds()
    keeps_whole = any(kind.no_prefix_reason is not None for kind in kinds)  # of sequences: no prefix is a hit

    async def parts(model: None, config: EngineConfig) -> EngineParts:
        of_several = replace(config, **options)
        if of_several.stages_apart:
            return await build_over_processes(
                of_several, files, lambda progress: None, SharedDevice(), elsewhere(files)
            )
        return await build_parts(of_several, files, lambda progress: None, None, SharedDevice())

    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in family.lengths if length < 50]
    prompts.append(prompts[-1][:-1])
    expected = []
    for limits, how in (WAYS[way] for way in ways):
        config = EngineConfig(
            device=device, dtype="float32", max_num_seqs=16, num_kv_blocks=64, max_model_len=64, **limits
        )
        outcome = run(None, config, prompts, MAX_TOKENS, parts_of=parts, **how)
        expected = expected or references(theirs, prompts, MAX_TOKENS, outcome.token_ids)
        compare(outcome, expected)
        assert (outcome.num_preemptions > 0) == ("preempting" in how)
        assert ("rounds" in how and not keeps_whole) <= (outcome.num_cached_tokens > 0)
