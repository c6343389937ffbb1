"""The scanners under the tool parsers: markers stand where they first are, JSON and literals are what parsers say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.json_stream import JsonScanner, whole_json
from server.text.markers import FedText, Markers
from server.text.tools.literals import python_to_json

few_letters = st.text(alphabet="abc", max_size=16)
markers_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).filter(
    lambda markers: not any(a != b and b.startswith(a) for a in markers for b in markers)
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read_until(feeds: list[str], markers: Markers) -> tuple[str, str]:
    source, pieces = FedText(), list[str]()
    reading = source.until(markers, pieces.append)
    try:
        for feed in feeds:
            source.feed(feed)
            next(reading)
        source.closed = True
        next(reading)
    except StopIteration as end:
        return "".join(pieces), end.value
    raise AssertionError("the text ended and the reading did not")


@given(text=few_letters, strings=markers_lists, size=st.integers(1, 5))
def test_the_marker_that_begins_first_is_found_in_any_cuts(text, strings, size):
    places = [(text.find(string), string) for string in strings if string in text]
    at, marker = min(places, default=(len(text), ""))
    feeds = [text[start : start + size] for start in range(0, len(text), size)]
    assert read_until(feeds, Markers(*strings)) == (text[:at], marker)


def test_markers_that_begin_one_another_are_refused():
    with pytest.raises(ValueError, match="begins another"):
        Markers("<a>", "<a>b")


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_valid_json_passes_unchanged(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert whole_json(text) == text


@given(text=st.text(alphabet='{}[]:,"\\ntrue1.e-0u ', max_size=14))
def test_what_a_parser_refuses_is_refused(text):
    try:
        parsed = json.loads(text)
    except ValueError:
        assert whole_json(text) is None
    else:
        assert json.loads(whole_json(text) or "") == parsed


@given(value=values)
def test_a_scanner_passes_everything_on_as_it_comes(value):
    text = json.dumps([value])
    pieces: list[str] = []
    scanner = JsonScanner(pieces.append)
    for end in range(1, len(text) + 1):
        scanner.scan(text[:end], end - 1)
        assert "".join(pieces) == text[:end]
    assert scanner.done
    assert "".join(pieces) == text


@given(value=values)
def test_what_python_writes_becomes_the_same_in_json(value):
    assert json.loads(python_to_json(repr(value)) or "") == value


@pytest.mark.parametrize(
    "written", ["f(1)", "a", "1 + 1", "[1, 2", "{1: 2}", "'a' 'b'", "", "[,]", "nan", "f'a'", "'\\x4'"]
)
def test_what_is_no_literal_is_refused(written):
    assert python_to_json(written) is None
