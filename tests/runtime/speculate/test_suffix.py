"""Suffix: as many drafts as votes find likely; past answers count, within bounds, and for their owner alone."""

from __future__ import annotations

import pytest

from runtime.speculate.suffix import PastAnswers, Suffix
from tests.runtime.speculate.texts import add, sequence


def make(depth=24, max_answers=100, factor=1.0, min_probability=0.1) -> Suffix:
    return Suffix(depth, max_answers, factor, min_probability)


def test_more_tokens_in_common_give_more_drafts():
    text = [*range(10, 40)]
    assert [*make().propose(sequence([*text, 50, 12, 13]), 20)] == [14, 15]
    assert [*make().propose(sequence([*text, 50, *range(12, 20)]), 20)] == [*range(20, 28)]
    assert [*make(factor=2).propose(sequence([*text, 50, 12, 13]), 20)] == [14, 15, 16, 17]
    assert [*make(factor=2).propose(sequence([*text, 50, 12, 13]), 3)] == [14, 15, 16]
    assert [*make(depth=3, factor=2).propose(sequence([*text, 50, *range(12, 20)]), 20)] == [*range(20, 26)]
    assert [*make().propose(sequence(text), 20)] == []


def test_what_followed_most_often_is_guessed_as_far_as_it_is_likely():
    often = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 9, 8]
    assert [*make(factor=9, min_probability=0.3).propose(sequence(often, [1, 2]), 2)] == [5, 7]
    assert [*make(factor=9, min_probability=0.4).propose(sequence(often, [1, 2]), 2)] == [5]  # 2/3, then half of it
    assert [*make(factor=9, min_probability=0.7).propose(sequence(often, [1, 2]), 2)] == []


def test_places_with_more_tokens_in_common_have_more_votes():
    longer, shorter = [3, 1, 2, 5], [8, 1, 2, 7]
    assert [*make().propose(sequence([*longer, *shorter], [3, 1, 2]), 1)] == [5]
    assert [*make().propose(sequence([*longer, *shorter, 9, 1, 2, 7], [3, 1, 2]), 1)] == [7]  # two of two tokens


def test_past_answers_count_for_those_who_share_their_salt():
    proposer = make(factor=2)
    for number, salt in enumerate(("mine", "theirs")):
        past = sequence([1], [21 + number, 30, 31, 32, 33], number=number, salt=salt)
        proposer.propose(past, 4)
        proposer.finished(past)
    assert [*proposer.propose(sequence([5, 21, 30], number=3, salt="mine"), 4)] == [31, 32, 33]
    assert [*proposer.propose(sequence([5, 21, 30], number=4, salt="theirs"), 4)] == []
    assert [*proposer.propose(sequence([5, 21, 30], number=5), 4)] == []
    assert [*proposer.propose(sequence([5, 33, 21], number=6, salt="mine"), 4)] == []  # no answer goes on in the next


def test_nothing_is_kept_of_answers_where_none_are_to_be():
    proposer = make(max_answers=0)
    past = sequence([1], [21, 30, 31, 32, 33])
    proposer.propose(past, 4)
    proposer.finished(past)
    assert [*proposer.propose(sequence([5, 21, 30], number=3), 4)] == []


def test_a_prediction_is_looked_up():
    proposer, text = make(), sequence([1, 2], prediction=[7, 8, 9, 10])
    assert [*proposer.propose(add(text, 7, 8), 4)] == [9, 10]


@pytest.mark.parametrize("owners", [1, 3, 50])
def test_memory_is_bounded_whoever_asks(owners):
    past = PastAnswers(max_answers=40, max_tokens=1000)
    for number in range(300):
        past.add(str(number % owners), [number] * (number % 90 + 1))
        assert past.num_tokens <= 1000
        assert past.num_answers <= 41
    past.add("new", range(5000))
    assert past.num_tokens <= 1000
    (text, *_) = past.of("new")
    assert text.ids[-2] == 4999  # of a long one the end
    assert past.of("nobody") == ()


def test_the_latest_answers_stay():
    past = PastAnswers(max_answers=4)
    for number in range(9):
        past.add(None, [number, number])
    kept = {id for text in past.of(None) for id in text.ids}
    assert {8, 7, 6} <= kept
    assert not kept & {0, 1, 2, 3, 4}
