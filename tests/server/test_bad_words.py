"""Bad words: what may be drawn, and that an engine keeps to it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.generate.bad_words import forbid
from tests.server.tiny import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def forbidden(matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = matcher.allowed()
    assert len(mask) == -(-vocab_size // 32) * 4
    return {token_id for token_id in range(vocab_size) if not mask[token_id // 8] >> token_id % 8 & 1}


def after(text: str, *words: str) -> str:
    """The letters that may not follow `text`."""
    matcher = forbid(words, encode, VOCAB_SIZE)()
    for token_id in encode(text):
        matcher.accept(token_id)
    return TOKENIZER.decode(sorted(forbidden(matcher)))


@pytest.mark.parametrize(
    ("text", "words", "ends"),
    [
        ("", ["a"], "a"),
        ("xyz", ["a", "b"], "ab"),
        ("", ["ab"], ""),
        ("a", ["ab"], "b"),
        ("xa", ["ab", "ac", "xad", "yae"], "bcd"),
        (" a", ["ab"], "b"),
        ("a", [" ab"], "b"),
        ("ba", ["ab"], "b"),
        ("ab", ["ab"], ""),
        ("aa", ["aaa", "aab"], "ab"),
        (" ", ["a"], "a"),
        ("", [" "], " "),
        (" ", ["  "], " "),
        ("a", ["abc"], ""),
    ],
)
def test_only_the_token_that_would_complete_a_word_is_forbidden(text, words, ends):
    assert after(text, *words) == ends


@given(st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4), st.text("ab ", max_size=30))
def test_whoever_keeps_to_it_never_writes_a_bad_word(words, wished):
    matcher = forbid(words, encode, VOCAB_SIZE)()
    drawn = ""
    for letter, token_id in zip(wished, encode(wished), strict=True):
        if token_id in forbidden(matcher):
            continue
        matcher.accept(token_id)
        drawn += letter
    assert not any((word.lstrip(" ") or word) in drawn for word in words)


def test_answers_of_one_request_share_the_encoding_and_nothing_else():
    calls = []

    def counted(text: str) -> list[int]:
        calls.append(text)
        return encode(text)

    make = forbid(["ab"], counted, VOCAB_SIZE)
    assert calls == []  # nobody has asked for a matcher
    first, second = make(), make()
    first.accept(encode("a")[0])
    assert TOKENIZER.decode(sorted(forbidden(first))) == "b"
    assert forbidden(second) == set()
    assert sorted(calls) == [" ab", "ab"]


def test_a_token_the_model_does_not_have_is_no_trouble():
    matcher = forbid(["a", "ab"], lambda text: [500 + len(text)] * len(text), 40)()
    matcher.accept(502)
    assert forbidden(matcher, 40) == set()


async def test_they_reach_the_engine_with_every_choice(serve, tokenizer):
    server = await serve("ab")
    assert (await server.chat(bad_words=["xy", "z"], n=2)).status_code == 200
    for request in server.engine.submitted:
        (make,) = request.params.matchers
        matcher = await asyncio.to_thread(make)
        assert TOKENIZER.decode(sorted(forbidden(matcher))) == "z"
    await server.complete(bad_words=[])
    assert server.engine.submitted[-1].params.matchers == ()
