"""N-gram: the longest run of last tokens counts, the latest of equal ones; what a client predicts goes first."""

from __future__ import annotations

from runtime.speculate import gram_index
from runtime.speculate.ngram import Ngram
from tests.runtime.speculate.texts import add, sequence


def test_it_says_what_followed_last_time():
    assert [*Ngram(2, 2).propose(sequence([1, 2, 3, 4, 1, 2, 5, 6], [1, 2]), 3)] == [5, 6, 1]
    assert [*Ngram(2, 2).propose(sequence([1, 2, 3], [4]), 3)] == []


def test_more_tokens_in_common_beat_a_later_place():
    text = [7, 1, 2, 3, 8, 1, 2, 4, 7], [1, 2]
    assert [*Ngram(2, 3).propose(sequence(*text), 1)] == [3]
    assert [*Ngram(2, 2).propose(sequence(*text), 1)] == [4]
    assert [*Ngram(3, 3).propose(sequence(*text), 1)] == [3]
    assert [*Ngram(4, 4).propose(sequence(*text), 1)] == []


def test_the_longest_of_many_places_counts_even_beyond_those_looked_at():
    many = [number for other in range(100, 140) for number in (other, 1, 2, 3)]
    assert [*Ngram(2, 4).propose(sequence([5, 6, 1, 2, 9, *many, 5, 6], [1, 2]), 1)] == [9]


def test_a_text_that_repeats_itself_goes_round():
    assert [*Ngram(2, 2).propose(sequence([1, 2, 3, 1, 2, 3, 1]), 8)] == [2, 3, 1, 2, 3, 1, 2, 3]


def test_it_learns_as_the_answer_grows_and_forgets_when_it_ends():
    proposer, text = Ngram(2, 2), sequence([1, 2, 3])
    assert [*proposer.propose(text, 2)] == []
    assert [*proposer.propose(add(text, 9, 1, 2), 2)] == [3, 9]
    assert [*proposer.propose(add(text, 7, 1, 2), 2)] == [7, 1]
    assert [*proposer.propose(sequence([5, 1, 2], number=2), 2)] == []
    proposer.finished(text)
    assert not [*proposer.propose(sequence([1, 2]), 2)]


def test_a_long_prompt_is_taken_in_over_several_steps(monkeypatch):
    monkeypatch.setattr(gram_index, "PLACES_A_STEP", 40)
    proposer, text = Ngram(2, 2), sequence([*range(100), 80, 81])
    assert [[*proposer.propose(text, 1)] for _ in range(3)] == [[], [], [82]]


def test_prompts_that_start_together_share_what_is_taken_in_during_a_step(monkeypatch):
    monkeypatch.setattr(gram_index, "PLACES_A_STEP", 60)
    proposer, texts = Ngram(2, 2), [sequence([*range(50), 40, 41], number=number) for number in range(3)]
    steps = [[[*proposer.propose(text, 1)] for text in texts] for _ in range(3)]
    assert steps == [[[42], [], []], [[42], [42], []], [[42], [42], [42]]]


def test_of_a_prompt_beyond_all_measure_the_end_is_kept(monkeypatch):
    monkeypatch.setattr(gram_index, "MAX_PROMPT", 20)
    assert [*Ngram(2, 2).propose(sequence([*range(100), 50, 51]), 1)] == []
    assert [*Ngram(2, 2).propose(sequence([*range(100), 90, 91]), 1)] == [92]


def test_a_prediction_begins_the_answer_and_goes_before_what_stands_elsewhere():
    text = sequence([1, 2, 3, 8, 8], prediction=[1, 2, 4, 5])
    proposer = Ngram(2, 2)
    assert [*proposer.propose(text, 3)] == [1, 2, 4]
    assert [*proposer.propose(add(text, 1), 3)] == [2, 4, 5]
    assert [*proposer.propose(add(text, 2), 3)] == [4, 5]  # the prompt has 3 here
    assert [*Ngram(2, 2).propose(sequence([7], [2, 3], prediction=[1, 2, 3]), 3)] == []  # nothing follows in it
    assert [*Ngram(2, 2).propose(sequence([7], [6], prediction=[1, 2, 3]), 3)] == []  # its first token is another
    other = add(text, 6, 7)  # it goes on otherwise than predicted
    assert [*proposer.propose(other, 3)] == []
    assert [*proposer.propose(add(other, 4, 5), 3)] == []
    assert [*proposer.propose(add(other, 1, 2), 1)] == [4]
