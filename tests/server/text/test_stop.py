"""Stop strings cut the text where its characters first complete one, however the text arrives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.stop import StopStrings


def run(feeds: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    codec = StopStrings(stops, include=include)
    text = "".join([codec.feed(feed) for feed in feeds])
    return text + codec.flush(), codec.stopped


def expected(text: str, stops: list[str], include: bool = False, unarmed: int = 0) -> tuple[str, str | None]:
    """The definition: character by character. The first `unarmed` characters end nothing."""
    for end in range(unarmed + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(bounds)]


few_letters = st.text(alphabet="abé", max_size=14)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=few_letters, places=st.lists(st.integers(0, 14), max_size=8), stops=stop_lists, include=st.booleans())
def test_any_feeds_are_cut_where_the_whole_text_is(text, places, stops, include):
    assert run(cut(text, places), stops, include) == expected(text, stops, include)


@given(early=few_letters, late=few_letters, places=st.lists(st.integers(0, 14), max_size=5), stops=stop_lists)
def test_nothing_that_ends_while_unarmed_stops_the_text(early, late, places, stops):
    codec = StopStrings(stops)
    text = "".join([codec.feed(feed, armed=False) for feed in cut(early, places)])
    assert codec.stopped is None
    text += "".join([codec.feed(feed) for feed in cut(late, places)]) + codec.flush()
    whole, stop = expected(early + late, stops, unarmed=len(early))
    assert codec.stopped == stop
    assert text == whole


@given(text=few_letters, stops=stop_lists)
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    codec = StopStrings(stops)
    shown = codec.feed(text)
    if codec.stopped is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(
            text.endswith(stop[:size])
            for stop in stops
            for size in range(len(held) + 1, len(stop))
            if size <= len(text)
        )


def test_the_house_example():
    stop = StopStrings(["\nUser:"])
    assert stop.feed("fine.\nUs") == "fine."
    assert stop.feed("er: hi") == ""
    assert stop.stopped == "\nUser:"


def test_a_beginning_that_comes_to_nothing_is_shown_after_all():
    assert run(["fine.\nUs", "eful"], ["\nUser:"]) == ("fine.\nUseful", None)
    assert run(["fine.\nUs"], ["\nUser:"]) == ("fine.\nUs", None)


def test_the_string_that_is_complete_first_wins_and_then_the_longest():
    assert run(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")
    assert run(["xab"], ["b", "ab"]) == ("x", "ab")


def test_an_included_stop_string_is_shown_and_nothing_after_it():
    assert run(["one ST", "OP two"], ["STOP"], include=True) == ("one STOP", "STOP")


def test_nothing_is_shown_after_the_stop():
    codec = StopStrings(["."])
    assert codec.feed("a.b") == "a"
    assert codec.feed("c") == ""
    assert codec.flush() == ""


def test_without_stop_strings_text_passes_as_it_is():
    text = "anything"
    codec = StopStrings([])
    assert codec.feed(text) is text
    assert codec.flush() == ""


def test_a_string_that_resembles_itself_costs_no_more_than_its_length():
    stop = "a" * 20_000 + "b"
    codec = StopStrings([stop])
    shown = "".join(codec.feed("aaaa") for _ in range(10_000))
    assert len(shown) == 20_000
    assert codec.feed("b!") == ""
    assert codec.stopped == stop


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["", "x"])


def test_what_comes_after_a_flush_begins_anew():
    codec = StopStrings(["aab"])
    assert (codec.feed("xa"), codec.flush()) == ("x", "a")
    assert (codec.feed("ab"), codec.stopped) == ("ab", None)


@pytest.mark.parametrize("stop", ["aabaaab", "abaababaab", "aaabaaaab", "abcabcacab"])
def test_a_string_that_begins_again_within_itself_is_found_behind_any_of_its_beginnings(stop):
    """The fallbacks of fallbacks: longer strings than drawn above."""
    for first, second in itertools.product(range(len(stop)), repeat=2):
        text = stop[:first] + stop[:second] + stop + "!"
        assert run(list(text), [stop]) == expected(text, [stop])
