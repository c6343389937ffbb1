"""Which replica a request goes to: names of prompts' beginnings, where they went last, and the choice."""

from __future__ import annotations

import pytest
from orjson import dumps

from server.ray.prefixes import CHUNK_BYTES, MAX_CHUNKS, Homes, choose, prefixes_of

LONG = "You are a helpful assistant who knows the harbour. " * 30


def chat(*texts: str, **fields: object) -> bytes:
    return dumps({**fields, "messages": [{"role": "user", "content": text} for text in texts]})


def common(first: tuple[bytes, ...], second: tuple[bytes, ...]) -> int:
    """How many names of the beginning are the same; behind the first other one none may be."""
    num = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    assert not set(first[num:]) & set(second[num:])
    return num


def test_the_next_turn_of_a_chat_begins_as_the_one_before():
    first, second = prefixes_of(chat(LONG, "Hi")), prefixes_of(chat(LONG, "Hi", "Hello!", LONG))
    assert common(first, second) == len(first) == len(chat(LONG, "Hi")) // CHUNK_BYTES
    assert len(second) > len(first)


def test_fields_around_the_prompt_change_nothing():
    assert prefixes_of(chat(LONG, temperature=0.5, stream=True)) == prefixes_of(chat(LONG, seed=1))


@pytest.mark.parametrize(
    "other",
    [prefixes_of(chat(LONG, model="b")), prefixes_of(chat(LONG, model="a"), b"key"), prefixes_of(chat("x" + LONG, model="a"))],
    ids=["model", "owner", "text"],
)  # fmt: skip
def test_who_shares_no_blocks_shares_no_name(other):
    assert not common(prefixes_of(chat(LONG, model="a")), other)


@pytest.mark.parametrize("name", ["prompt", "input", "system", "query", "input_prefix"])
def test_every_api_has_its_prompt_found(name):
    assert prefixes_of(dumps({"n": 1, name: LONG})) == prefixes_of(dumps({"n": 2, name: LONG}))
    assert prefixes_of(dumps({name: LONG}))


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff{", chat("short"), dumps({"other": LONG})])
def test_what_has_no_long_prompt_has_no_name(body):
    assert prefixes_of(body) == ()


def test_names_of_a_very_long_prompt_have_a_bound():
    assert len(prefixes_of(chat("x" * 10_000_000))) == MAX_CHUNKS


def test_the_home_is_where_the_longest_beginning_went():
    homes = Homes()
    short, long = prefixes_of(chat(LONG)), prefixes_of(chat(LONG, LONG))
    homes.note(short, "a")
    assert homes.find(long, {"a": 0, "b": 0}) == "a"
    homes.note(long, "b")
    assert homes.find(long, {"a": 0, "b": 0}) == "b"
    assert homes.find(long, {"a": 0}) is None  # all of it went to one that is gone


def test_the_least_recent_homes_are_forgotten():
    homes = Homes(limit=2)
    homes.note([b"1", b"2"], "a")
    homes.note([b"1"], "a")
    homes.note([b"3"], "b")
    assert [homes.find([name], {"a": 0, "b": 0}) for name in (b"1", b"2", b"3")] == ["a", None, "b"]


def last_two(names):
    return [*names][-2:]


@pytest.mark.parametrize(
    ("home", "ongoing", "ranks"),
    [
        (None, {"a": 9, "b": 0, "c": 5}, [["b", "c"]]),
        ("a", {"a": 4, "b": 0, "c": 5}, [["a"], ["b", "c"]]),
        ("b", {"a": 9, "b": 4, "c": 5}, [["b"], ["c"]]),
        ("a", {"a": 5, "b": 0, "c": 5}, [["b", "c"]]),  # busier than the spare allows
        ("gone", {"a": 0, "b": 0}, [["a", "b"]]),
        ("a", {"a": 3}, [["a"]]),
        (None, {"a": 3}, [["a"]]),
        (None, {}, []),
    ],
    ids=str,
)
def test_the_home_comes_first_unless_it_is_busier_than_others(home, ongoing, ranks):
    assert choose(home, ongoing, 4, last_two) == ranks
