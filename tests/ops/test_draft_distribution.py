"""The distribution of what rows with guesses gain is that of drawing one by one, which is computed here without the op.

A chain: the next token's logits hang on the last token, and, with penalties, on all before. Rows with seeds of their own gain three
tokens each from steps with up to two guesses, 9,000 draws a setting; their triples are held against the product of the
distributions along the chain, chi-square. Seeds are fixed, so a p-value is what it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ops.sampling import reference
from ops.sampling.tables import Drafts, Masks
from tests.ops.sampling_case import RowParams, fill
from tests.ops.test_op_sampling import assert_follows, distribution
from tests.tiers import on_push

V, LENGTH, ROWS, BEGIN = 6, 3, 3_000, 0
CHAIN = 1.2 * torch.randn(V, V, generator=torch.Generator().manual_seed(8))  # by the last token
SETTINGS = [
    RowParams(),
    RowParams(temperature=0.5),
    RowParams(temperature=1.7, top_k=3),
    RowParams(top_p=0.8),
    RowParams(min_p=0.2, temperature=1.3),
    RowParams(top_k=5, top_p=0.9, min_p=0.05, temperature=1.5),
    RowParams(presence=0.7, frequency=0.5, repetition=1.3, prompt=(2,)),
    RowParams(frequency=-0.6, bias={1: 1.0, 4: -0.5}, bans=(5,), free_from=11, top_p=0.95),
    RowParams(allowed=(*range(V),), top_k=4, presence=0.5),  # under the grammar below
]


def may_follow(token: int) -> list[int]:
    """A grammar, with a mask for each last token."""
    return [other for other in range(V) if other not in (token, (token + 1) % V)]


def adjusted(params: RowParams, drawn: tuple[int, ...], position: int) -> torch.Tensor:
    """Logits behind `drawn`, by the definitions of penalties, bias and bans."""
    scores = CHAIN[drawn[-1] if drawn else BEGIN].clone()
    for token in range(V):
        count = drawn.count(token)
        if count or token in params.prompt:
            scores[token] *= params.repetition if scores[token] < 0 else 1 / params.repetition
        scores[token] -= count * params.frequency + (count > 0) * params.presence
        scores[token] += params.bias.get(token, 0.0)
        if params.allowed is not None and token not in may_follow(drawn[-1] if drawn else BEGIN):
            scores[token] = -torch.inf
        if token in params.bans and position < params.free_from:
            scores[token] = -torch.inf
    return scores


def triples(params: RowParams, first_position: int) -> np.ndarray:
    """[V ** LENGTH]: how likely each is, the last token counting fastest."""
    probs = np.ones(1)
    for length in range(LENGTH):
        befores = [np.unravel_index(place, (V,) * length) for place in range(V**length)]
        follows = [
            distribution(adjusted(params, tuple(map(int, drawn)), first_position + length), params) for drawn in befores
        ]
        probs = (probs[:, None] * np.stack(follows)).reshape(-1)
    return probs


def guessed(row: int, last_id: int, num: int) -> list[int]:
    """Of three qualities: what is likeliest, what comes by a hash, what is least likely. None knows what will be drawn."""
    guesses: list[int] = []
    for place in range(num):
        scores = CHAIN[guesses[-1] if guesses else last_id]
        guesses.append((int(scores.argmax()), (row // 3 * 5 + place * 7 + last_id) % V, int(scores.argmin()))[row % 3])
    return guesses


@pytest.mark.parametrize("params", on_push(SETTINGS, SETTINGS[-1]), ids=str)
def test_tokens_gained_behind_guesses_follow_the_distribution_without(params):
    first_position = 10
    tables = fill([replace(params, seed=1_000_003 * row) for row in range(ROWS)], V)
    last_ids, num_computed = torch.full((ROWS,), BEGIN), torch.zeros(ROWS, dtype=torch.int64)
    gained: list[list[int]] = [[] for _ in range(ROWS)]
    num_guesses = num_accepted = 0
    words = torch.tensor([[sum(1 << other for other in may_follow(token))] for token in range(V)], dtype=torch.int32)
    while rows := [row for row in range(ROWS) if len(gained[row]) < LENGTH]:
        owners, positions, behind, inputs = [], [], [], []
        for row in rows:
            last_id = gained[row][-1] if gained[row] else BEGIN
            guesses = guessed(row, last_id, LENGTH - 1 - len(gained[row]))
            owners += [row] * (1 + len(guesses))
            positions += range(first_position + len(gained[row]), first_position + len(gained[row]) + 1 + len(guesses))
            behind += [-1, *guesses]
            inputs += [last_id, *guesses]
        ids = reference.sample(
            CHAIN[inputs], torch.tensor(owners, dtype=torch.int32), torch.tensor(positions), last_ids, tables,
            Drafts(torch.tensor(behind), num_computed), Masks(torch.tensor(inputs, dtype=torch.int32), words),
        ).tolist()  # fmt: skip
        num_before = sum(map(len, gained))
        for index, (row, guess) in enumerate(zip(owners, behind, strict=True)):
            if guess < 0:
                more = True
            more = more and (guess < 0 or ids[index - 1] == guess)
            if more:
                gained[row].append(ids[index])
        num_guesses += len(owners) - len(rows)
        num_accepted += sum(map(len, gained)) - num_before - len(rows)
    assert -int(num_computed.sum()) == num_guesses - num_accepted
    assert 0.1 < num_accepted / num_guesses < 0.7
    places = np.ravel_multi_index(np.array(gained).T, (V,) * LENGTH)
    assert_follows(places, triples(params, first_position))
