"""Acceptance: how likely drafts are right, from how the last ones did."""

from __future__ import annotations

import pytest

from runtime.speculate.acceptance import Acceptance, Chances


def row(chance: float) -> Acceptance:
    """A sequence that has had no guesses yet, where `chance` of those of all others were right."""
    chances = Chances()
    chances.average = chance
    return Acceptance(chances)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_draft_counts_as_right_only_where_all_before_it_are(chance, num):
    assert row(chance).expected(num) == pytest.approx(sum(chance**place for place in range(1, num + 1)))


def test_as_many_drafts_are_worth_it_as_are_all_right_with_the_chance_that_is_their_price():
    assert [row(0.5).num_worth(price, 8) for price in (0.6, 0.5, 0.25, 0.2, 0.125)] == [0, 1, 2, 2, 3]
    assert row(0.5).num_worth(0.0, 8) == 8


def test_a_guess_is_compared_up_to_its_first_wrong_token():
    right, wrong = row(0.5), row(0.5)
    for each, gained in ((right, [[1], [2, 3]]), (wrong, [[1], [9, 3]])):
        each.guessed([1, 2, 3])
        for ids in gained:
            each.gained(ids)
    checked = row(0.5)
    checked.checked(3, 3)
    assert right.chance == checked.chance
    checked = row(0.5)
    checked.checked(3, 1)  # what stands behind a wrong token is not counted
    assert wrong.chance == checked.chance
