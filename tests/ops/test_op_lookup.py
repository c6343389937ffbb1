"""Look-up: what it finds is what a search by hand finds. The reference, and Triton's kernel by its interpreter or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from ops.lookup import reference, triton_lookup
from tests.ops.places import DEVICES

RUNS = [
    pytest.param(reference.look_up, "cpu", id="reference"),
    *(
        pytest.param(triton_lookup.look_up, place.values[0], id=f"triton-{place.values[0]}", marks=place.marks)
        for place in DEVICES
    ),
]


def by_hand(text: list[int], num: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                return [text[place + nth % (len(text) - place)] for nth in range(num)]
    return [text[-1]] * num


@pytest.mark.parametrize(("look_up", "device"), RUNS)
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 5), (3, 3), (1, 9)])
def test_the_latest_place_with_most_in_common_counts(look_up, device, shortest, longest):
    rng = random.Random(longest)
    texts = [[rng.randrange(2 + row % 5) for _ in range(rng.choice([1, 2, 3, 10, 100, 1500]))] for row in range(24)]
    history = torch.randint(0, 5, (24, 1600), dtype=torch.int32)  # what lies behind a text is nobody's
    for row, text in enumerate(texts):
        history[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    rows = rng.sample(range(24), 17)
    lengths = torch.tensor([len(texts[row]) for row in rows], device=device)
    found = look_up(
        history.to(device), torch.tensor(rows, device=device), lengths, 6, shortest=shortest, longest=longest
    )
    assert found.tolist() == [by_hand(texts[row], 6, shortest, longest) for row in rows]
