"""Streamed text, joined, is the text of all ids decoded at once: whatever the tokenizer, the ids and the cuts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.text import native
from server.text.detokenize import Detokenizer, TokenTable
from tests.server.text.made_tokenizers import CORPUS, MADE, made

TABLES: dict[tuple[str, bool], TokenTable] = {}


@pytest.fixture(autouse=True, scope="module", params=["compiled", "python"])
def _compiled_or_not(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "module", None)
        elif native.module is None:
            pytest.skip("oneloop_text is not built")
        yield


def table(name: str) -> TokenTable:
    """One per tokenizer, so that later examples meet what earlier ones taught it."""
    key = name, native.module is None
    if key not in TABLES:
        TABLES[key] = TokenTable(made(name))
    return TABLES[key]


def stream(detokenizer: Detokenizer, feeds: list[list[int]]) -> str:
    return "".join([detokenizer.feed(ids) for ids in feeds]) + detokenizer.flush()


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(min(place, len(ids)) for place in places), len(ids)]
    return [ids[start:stop] for start, stop in itertools.pairwise(bounds)]


def past_the_end(tokenizer: Tokenizer) -> int:
    return tokenizer.get_vocab_size() + 64


cuts = st.lists(st.integers(0, 40), max_size=12)
any_ids = st.lists(st.integers(0, 10**6), max_size=40)


@pytest.mark.parametrize("name", MADE)
@given(numbers=any_ids, places=cuts, skip=st.booleans())
def test_random_ids_in_random_feeds_give_what_decode_gives(name, numbers, places, skip):
    tokenizer = made(name)
    ids = [number % past_the_end(tokenizer) for number in numbers]  # special, invalid and padded ids included
    streamed = stream(table(name).detokenizer(skip_special_tokens=skip), cut(ids, places))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", MADE)
@given(numbers=any_ids, places=cuts)
def test_special_tokens_to_be_kept_are_text_and_the_others_are_not(name, numbers, places):
    tokenizer = made(name)
    special = sorted(table(name).special_ids)
    keep = frozenset(special[:1])
    some = [special[number % len(special)] if special and number % 2 else number for number in numbers]
    ids = [number % past_the_end(tokenizer) for number in some]
    streamed = stream(table(name).detokenizer(keep_ids=keep), cut(ids, places))
    left = [id for id in ids if id in keep or id not in table(name).special_ids]
    assert streamed == tokenizer.decode(left, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["llama like", "gemma like", "strip three", "bytes before metaspace"])
@given(
    parts=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=6),  # runs of byte tokens, mostly broken
            st.text(min_size=1, max_size=3).map(lambda text: text.encode("utf-8", "replace")),  # whole characters
            st.sampled_from(["▁", "▁▁", "a", "<s>", "</s>", "<unk>", "e", "<0x4>", "  indent"]),
        ),
        max_size=10,
    ),
    places=cuts,
    skip=st.booleans(),
)
def test_runs_of_byte_tokens_give_what_decode_gives(name, parts, places, skip):
    tokenizer = made(name)
    tokens = [
        token
        for part in parts
        for token in ([f"<0x{byte:02X}>" for byte in part] if isinstance(part, bytes) else [part])
    ]
    ids = [id for token in tokens if (id := tokenizer.token_to_id(token)) is not None]
    streamed = stream(table(name).detokenizer(skip_special_tokens=skip), cut(ids, places))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.binary(max_size=24), places=cuts)
def test_any_bytes_in_byte_level_tokens_give_what_decode_gives(data, places):
    tokenizer = made("byte level")
    byte_tokens = [tokenizer.token_to_id(char) for char in byte_characters()]
    ids = [byte_tokens[byte] for byte in data]
    streamed = stream(table("byte level").detokenizer(), cut(ids, places))
    assert streamed == tokenizer.decode(ids) == data.decode("utf-8", "replace")


def byte_characters() -> list[str]:
    """GPT-2's character for each byte, counted out as its authors do."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (chr(256 + n) for n in itertools.count())
    return [chr(byte) if byte in visible else next(hidden) for byte in range(256)]


SAMPLES = ["😀é", "漢字", "👩‍👩‍👧", "e\u0301\u0323", "नम", " a\n", "  b", "", " ", "x <|end|></s> y"]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", SAMPLES)
def test_every_way_to_cut_a_short_text_gives_what_decode_gives(name, text):
    tokenizer = made(name)
    ids = tokenizer.encode(text).ids[:10]
    whole = tokenizer.decode(ids)
    for marks in itertools.product([False, True], repeat=max(0, len(ids) - 1)):
        feeds = cut(ids, [place + 1 for place, mark in enumerate(marks) if mark])
        assert stream(table(name).detokenizer(), feeds) == whole


@pytest.mark.parametrize("name", MADE)
def test_long_texts_fed_token_by_token_give_what_decode_gives(name):
    tokenizer = made(name)
    ids = tokenizer.encode("\n".join(CORPUS * 3)).ids
    assert stream(table(name).detokenizer(), [[id] for id in ids]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", MADE)
@given(numbers=any_ids, places=cuts)
def test_a_continuation_reads_as_it_does_behind_its_prompt(name, numbers, places):
    tokenizer = made(name)
    word = next(id for word in ("dog", "do", "d", "three") if (id := tokenizer.token_to_id(word)) is not None)
    before = tokenizer.decode([word])
    ids = [number % past_the_end(tokenizer) for number in numbers]
    streamed = stream(table(name).detokenizer(continues=True), cut(ids, places))
    if name == "word suffix":  # the prompt's last word gets its space from what follows
        before = before if not tokenizer.decode(ids) else tokenizer.decode([word, ids[0]])[: len(before)]
    assert before + streamed == tokenizer.decode([word, *ids])


def test_a_completion_keeps_the_space_that_an_answer_drops():
    tokenizer = made("llama like")
    ids = tokenizer.encode("the dog").ids
    assert stream(table("llama like").detokenizer(continues=False), [ids]) == "the dog"
    assert stream(table("llama like").detokenizer(continues=True), [ids]) == " the dog"


def test_text_is_given_out_as_soon_as_its_characters_are_whole():
    tokenizer = made("byte level")
    one, two, three, four = (tokenizer.token_to_id(byte_characters()[byte]) for byte in "😀".encode())
    detokenizer = table("byte level").detokenizer()
    texts = [
        detokenizer.feed([id]) for id in (tokenizer.token_to_id("a"), one, two, three, four, tokenizer.token_to_id("b"))
    ]
    assert texts == ["a", "", "", "", "😀", "b"]


def test_a_run_of_byte_tokens_waits_for_its_end_because_one_bad_byte_spoils_it_all():
    tokenizer = made("gemma like")
    good = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    bad, letter = tokenizer.token_to_id("<0xFF>"), tokenizer.token_to_id("a")
    fine, spoilt = table("gemma like").detokenizer(), table("gemma like").detokenizer()
    assert [fine.feed(good), fine.feed([letter])] == ["", "éa"]
    assert [spoilt.feed(good), spoilt.feed([bad]), spoilt.feed([letter])] == ["", "", "\ufffd\ufffd\ufffda"]


def test_skipped_and_unknown_ids_inside_a_character_do_not_break_it():
    tokenizer = made("byte level")
    first, *rest = (tokenizer.token_to_id(byte_characters()[byte]) for byte in "漢".encode())
    ids = [first, tokenizer.token_to_id("<|end|>"), rest[0], past_the_end(tokenizer), rest[1]]
    assert stream(table("byte level").detokenizer(), [[id] for id in ids]) == "漢"


@pytest.mark.parametrize("name", MADE)
def test_ids_beyond_every_vocabulary_give_no_text(name):
    assert stream(table(name).detokenizer(), [[2**31], [10**9, 2**32 - 1]]) == ""
    assert table(name).token_bytes(2**31) == b""


def test_token_bytes_are_the_bytes_of_the_text():
    for name, text in (("byte level", "漢 <think> 😀 dog"), ("gemma like", "dog 漢 é")):
        ids = made(name).encode(text).ids
        assert b"".join(table(name).token_bytes(id) for id in ids) == text.encode()
    end = made("byte level").token_to_id("<|end|>")
    assert table("byte level").token_bytes(end) == b"<|end|>"


@pytest.mark.parametrize("name", MADE)
def test_the_bytes_of_all_tokens_are_those_of_each(name):
    size = past_the_end(made(name))
    assert table(name).all_token_bytes(size) == [table(name).token_bytes(id) for id in range(size)]


def test_a_token_outside_the_byte_alphabet_is_its_own_text():
    tokenizer = Tokenizer.from_str(made("byte level").to_str())
    added = {"<｜end｜>": "<｜end｜>", "a b": "a b", "\xa0é": "\xa0é", "Ġx": " x"}
    tokenizer.add_tokens(list(added))
    written = TokenTable(tokenizer)
    assert [written.token_bytes(tokenizer.token_to_id(token)) for token in added] == [*map(str.encode, added.values())]
