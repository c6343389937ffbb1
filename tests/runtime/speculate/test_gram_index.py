"""Gram index: it finds every earlier place, latest first, however the text came and however slowly it is taken in."""

from __future__ import annotations

import random

import pytest

from runtime.speculate.gram_index import GramIndex


def places_in(text: list[int], last: list[int]) -> list[int]:
    size = len(last)
    return [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == last]


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_search_finds(seed):
    rng = random.Random(seed)
    index, text = GramIndex(1, 2, 4), []
    for _ in range(60):
        more = [rng.randrange(4) for _ in range(rng.randrange(6))]
        text += more
        index.extend(more)
        index.index(1000)
        for size in (1, 2, 4):
            if len(text) >= size:
                assert [*index.places(tuple(text[-size:]))] == places_in(text, text[-size:])


def test_a_long_text_is_taken_in_piece_by_piece():
    index = GramIndex(2)
    index.extend([*range(100), 50, 51])
    index.index(30)
    assert [*index.places((50, 51))] == []
    for _ in range(3):
        index.index(30)
    assert [*index.places((50, 51))] == [52]


def test_match_length_counts_back_from_both_ends():
    index = GramIndex(2)
    index.extend([1, 2, 3, 4, 9, 2, 3, 4])
    assert index.match_length(4, index.ids, 10) == 3
    assert index.match_length(4, index.ids, 2) == 2
    assert index.match_length(4, [7, 4], 10) == 1
    assert index.match_length(3, [1, 2, 3], 10) == 3  # no further than the text's beginning


def test_a_match_ends_at_the_beginning_of_either_text_and_does_not_go_round():
    index = GramIndex(2)
    index.extend([1, 2, 5, 9])
    assert index.match_length(2, [9, 1, 2], 10) == 2
    assert index.match_length(4, [5, 9], 10) == 2
    assert index.match_length(3, [2, 5], 10) == 2
