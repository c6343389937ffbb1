"""A budget of thought: reasoning is free until it is spent, and then its end is written, token by token."""

from __future__ import annotations

import pytest

from server.generate.structured.budget import ReasoningMarkers, thinking_budget
from server.text.reasoning import GRANITE
from tests.server.structured.reading import TOKENIZER, has
from tests.server.tiny import VOCAB_SIZE, tiny_tokenizer

THINK = ReasoningMarkers((("<think>", "</think>"),))
BEGUN = ReasoningMarkers(THINK.pairs, reasoning_open=True)
CHANNELS = ReasoningMarkers((("<|channel|>analysis<|message|>", "<|end|>"),), again="<|channel|>")


def written(limit: int, markers: ReasoningMarkers, wants: str, tokenizer=TOKENIZER) -> str:
    """What comes of a model that wants to write `wants`, and goes on with it wherever it may."""
    matcher = thinking_budget(limit, markers, tokenizer, tokenizer.vocab_size)()
    wanted, ids = tokenizer.encode(wants, add_special_tokens=False), []
    while wanted:
        mask = matcher.allowed()
        token = wanted.pop(0) if has(mask, wanted[0]) else only(mask)
        matcher.accept(token)
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=False)


def only(mask: bytes) -> int:
    (token,) = (token for token in range(8 * len(mask)) if has(mask, token))
    return token


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
@pytest.mark.parametrize(
    ("limit", "wants", "comes"),
    [
        (3, "<think>abcdef", "<think>abc</think>def"),
        (0, "<think>abc", "<think></think>abc"),
        (3, " \n<think>abcdef", " \n<think>abc</think>def"),
        (3, "abcdef", "abcdef"),
        (3, "abc<think>defgh", "abc<think>defgh"),
        (3, "<think>ab</think>c<think>defgh", "<think>ab</think>c<think>defgh"),
    ],
)
def test_reasoning_ends_when_the_budget_is_spent_and_what_is_no_reasoning_costs_nothing(special, limit, wants, comes):
    tokenizer = tiny_tokenizer(*special)
    if not special and "</think>" in wants:  # spelled, the end is one with its last byte, and paid for until that
        limit += len("</think>") - 1
    assert written(limit, THINK, wants, tokenizer) == comes


def test_reasoning_that_the_prompt_began_counts_from_the_first_token():
    assert written(3, BEGUN, "abcdef") == "abc</think>def"
    assert written(0, BEGUN, "abc") == "</think>abc"
    assert written(8, BEGUN, "</think>abcdefghijkl") == "</think>abcdefghijkl"


def test_each_way_to_begin_has_its_own_way_to_end():
    markers = ReasoningMarkers(tuple(zip(GRANITE.opens, GRANITE.closes, strict=True)))
    assert written(2, markers, "Here is my thought process:abc") == "Here is my thought process:abHere is my response:c"
    assert written(2, markers, "<think>abc") == "<think>ab</think>c"
    assert written(2, markers, "Here is my answer") == "Here is my answer"


@pytest.mark.parametrize("special", [(), ("<|channel|>", "<|message|>", "<|end|>")])
def test_in_channels_all_thoughts_share_the_budget_and_when_it_is_spent_no_other_begins(special):
    tokenizer = tiny_tokenizer(*special)
    opening, answer = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>a<|channel|>bcdef"
    spelled = 0 if special else len("<|end|>") - 1  # then an end is one with its last byte, and paid for until that
    several = f"{opening}ab<|end|>{opening}"
    assert written(5 + spelled, CHANNELS, f"{several}cdefgh", tokenizer) == f"{several}cde<|end|>fgh"
    matcher = thinking_budget(0, CHANNELS, tokenizer, tokenizer.vocab_size)()
    for token in tokenizer.encode("<|channel|>", add_special_tokens=False):
        matcher.accept(token)
    first = tokenizer.encode("analysis", add_special_tokens=False)[0]
    assert [token for token in range(VOCAB_SIZE) if not has(matcher.allowed(), token)] == [first]
    assert written(0, CHANNELS, answer, tokenizer) == answer


def test_every_sequence_has_a_budget_of_its_own():
    make = thinking_budget(2, BEGUN, TOKENIZER, VOCAB_SIZE)
    one, other = make(), make()
    for token in TOKENIZER.encode("ab"):
        one.accept(token)
    assert one.allowed() is not None
    assert other.allowed() is None
