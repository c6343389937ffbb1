"""Synthetic acceptance: guesses are right as often as they are asked to be, whatever the model says; without guesses it says it."""

from __future__ import annotations

import random

import pytest
import torch

from ops.sampling.tables import Drafts
from runtime.sample.synthetic import SyntheticAcceptance
from tests.runtime.runner.runners import LANES, VOCAB, make_runner
from tests.runtime.runner.test_drafts import PROMPTS, Remembering, batch_of, behind, prompt

ROWS, STEPS = (0, 1), 8  # one that takes the largest logit, one that draws
RNG = random.Random(1)


async def gained(runner, num_drafts: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """What was guessed of a row in a step, and what it gained."""
    found = []
    await runner.launch(batch_of(*map(prompt, ROWS))).result()
    ends = [len(PROMPTS[row]) for row in ROWS]
    for _ in range(STEPS):
        guesses = [tuple(RNG.randrange(VOCAB) for _ in range(num_drafts)) for _ in ROWS]
        rows = [behind(row, end, guess) for row, end, guess in zip(ROWS, ends, guesses, strict=True)]
        tokens = (await runner.launch(batch_of(*rows)).result()).tokens
        ends = [end + len(ids) for end, ids in zip(ends, tokens, strict=True)]
        found += zip(guesses, tokens, strict=True)
    await runner.close()
    return found


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("chance", [0, 1])
async def test_a_row_gains_all_that_was_guessed_of_it_or_nothing(lane, chance, monkeypatch):
    runner = make_runner(lane, Remembering(), monkeypatch, max_model_len=64, rows=8, synthetic=chance)
    for guess, ids in await gained(runner, 3):
        assert len(ids) == 1 + 3 * chance
        assert tuple(ids[:-1]) == guess[: 3 * chance]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_guesses_are_right_by_chance(dtype):
    synthetic, num, right = SyntheticAcceptance(0.7, torch.device("cpu")), 3000, 0
    behind_which = torch.tensor([-1, 4, 5, -1, 6])
    for position in range(num):
        model_s = torch.randn(5, VOCAB).to(dtype)
        logits = model_s.clone()
        synthetic.decide(logits, position + torch.tensor([0, 1, 2, 9, 10]), Drafts(behind_which, torch.zeros(2)))
        assert torch.equal(logits[[2, 4]], model_s[[2, 4]])  # behind which nothing is guessed
        for row, guess in ((0, 4), (1, 5), (3, 6)):
            is_right = int(logits[row].argmax()) == guess
            assert is_right or logits[row, guess] == -torch.inf
            right += is_right
    # Five standard deviations of as many throws.
    assert abs(right / (3 * num) - 0.7) <= 5 * (0.7 * 0.3 / (3 * num)) ** 0.5


@pytest.mark.parametrize("lane", LANES)
async def test_what_nobody_guesses_is_the_model_s(lane, monkeypatch):
    runners = [
        make_runner(lane, Remembering(), monkeypatch, max_model_len=64, rows=8, synthetic=synthetic)
        for synthetic in (None, 0.7)
    ]
    plain, synthetic = [await gained(runner, 0) for runner in runners]
    assert plain == synthetic
