"""When what makes drafts on the device rests, and what a step then takes is learned as."""

from __future__ import annotations

import pytest

from runtime.speculate.ngram import Ngram
from runtime.speculate.resting import RESTS, TRIED, Resting
from runtime.speculate.speculation import DeviceSpeculation
from runtime.speculate.verification_cost import VerificationCost


def resting() -> Resting:
    speculation = DeviceSpeculation(Ngram(2, 5), 3, VerificationCost(0.1), rests=True)
    speculation.paid = False
    return Resting(speculation)


def steps(told: Resting, num_rows: int, num_steps: int, *, pays: bool) -> list[bool]:
    """Whether each of so many steps is followed; where one is, drafts pay or not."""
    found = []
    for _ in range(num_steps):
        found.append(told.follows_size(num_rows))
        if found[-1]:
            told.note(num_rows, pays=pays)
    return found


def test_it_rests_once_drafts_have_not_paid_for_long_and_tries_again():
    told, expected = resting(), []
    for rested in (*RESTS, RESTS[-1]):  # longer and longer
        expected += [True] * TRIED + [False] * rested
    assert steps(told, 200, len(expected), pays=False) == expected


def test_where_drafts_have_paid_for_long_it_soon_tries_again():
    told = resting()
    steps(told, 200, TRIED + RESTS[0] + 1, pays=False)
    steps(told, 200, TRIED, pays=True)
    assert steps(told, 200, TRIED + RESTS[0] + 1, pays=False) == [True] * TRIED + [False] * RESTS[0] + [True]


@pytest.mark.parametrize(("every", "rests"), [(2, False), (5, True)])
def test_drafts_that_pay_now_and_then_have_to_do_so_often(every, rests):
    told = resting()
    for step in range(4 * TRIED * every):
        if told.follows_size(200):
            told.note(200, pays=step % every == 0)
    assert told.follows_size(200) is not rests


def test_it_never_rests_while_they_pay():
    told = resting()
    assert all(steps(told, 4, 3 * TRIED, pays=True))
    steps(told, 4, TRIED - 1, pays=False)
    told.note(4, pays=True)
    assert all(steps(told, 4, 3, pays=False))
    assert not told.follows_size(4)


def test_steps_of_another_size_are_another_matter():
    told = resting()
    steps(told, 200, 2 * TRIED, pays=False)
    assert not told.follows_size(255)
    assert told.follows_size(127)
    assert told.follows_size(256)


def test_before_it_rests_some_drafts_are_checked_all_the_same():
    told = resting()
    probed = []
    for _ in range(TRIED):
        probed.append(told.probes(200))
        told.note(200, pays=False)
    assert 4 <= sum(probed) <= TRIED // 4
    assert not told.probes(200)


def test_what_following_takes_is_part_of_what_drafts_cost():
    cost = VerificationCost(0.0, follow_share=0.25)
    cost.learn(200, 0, 1.25, followed=True)  # taken for one that takes 1.0 without
    for _ in range(200):
        cost.learn(200, 4, 1.5, followed=True)
    assumed = cost.of(200)
    assert assumed is not None
    assert abs(assumed.any + 4 * assumed.each - 0.5) < 0.02
    for _ in range(200):
        cost.learn(200, 0, 1.2, followed=False)  # now it is known
        cost.learn(200, 0, 9.0, followed=True)
        cost.learn(200, 4, 1.5, followed=True)
    known = cost.of(200)
    assert known is not None
    assert abs(known.any + 4 * known.each - 0.25) < 0.02
