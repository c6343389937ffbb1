"""The gate: reasoning is free, and the answer behind it is held to its form."""

from __future__ import annotations

import pytest

from server.generate.structured.after_reasoning import after_reasoning
from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import Alternatives, Regex
from tests.fakes import fake_model
from tests.server.structured.reading import TOKENIZER, has, reads
from tests.server.tiny import EOS

MODEL = fake_model(vocab_size=TOKENIZER.vocab_size, eos_token_ids=frozenset({EOS}))
THINK = {"opens": ("<think>",), "closes": ("</think>",)}


async def gate(
    grammar=Alternatives(("yes", "no")), *, reasoning_open=False, opens=THINK["opens"], closes=THINK["closes"]
):
    make = await Grammars(TOKENIZER, frozenset({EOS})).factory(grammar)
    return after_reasoning(make, TOKENIZER, MODEL, opens=opens, closes=closes, reasoning_open=reasoning_open)


def takes(make, text: str) -> bool:
    return reads(make(), TOKENIZER.encode(text))


async def test_reasoning_that_the_prompt_began_may_be_anything_until_its_end():
    make = await gate(reasoning_open=True)
    assert takes(make, "hm, <think> < </thin </think>yes")
    assert takes(make, "</think>no")
    assert not takes(make, "hm</think>maybe")
    assert not takes(make, "hm</think> yes")
    assert not takes(make, "hm</think></think>yes")
    assert not takes(make, "</think>")


@pytest.mark.parametrize(
    ("reasoning_open", "written"), [(True, ""), (True, "hm <th"), (False, "<think>"), (False, "<think>yes")]
)
async def test_nothing_ends_in_the_midst_of_reasoning(reasoning_open, written):
    matcher = (await gate(reasoning_open=reasoning_open))()
    for token_id in TOKENIZER.encode(written):
        matcher.accept(token_id)
    assert [token_id for token_id in range(MODEL.vocab_size) if not has(matcher.allowed(), token_id)] == [EOS]


async def test_a_model_that_opens_a_block_itself_may_reason_and_one_that_does_not_is_answering():
    make = await gate()
    assert takes(make, "<think>yes or no?</think>yes")
    assert takes(make, "yes")
    assert not takes(make, "hm")
    assert not takes(make, "<thought>")
    assert not takes(make, "<think>hm</think>hm")
    assert not takes(make, "yes<think>hm</think>yes")


async def test_of_several_markers_each_one_counts():
    make = await gate(opens=("<think>", "<thought>", "Hm:"), closes=("</think>", "So:"))
    assert takes(make, "<thought>a So:yes")
    assert takes(make, "Hm: a</think>no")
    assert not takes(make, "<th>")


async def test_a_special_token_opens_the_block_even_where_the_form_would_take_it():
    start, end = "<|im_start|>", "<|im_end|>"
    rules = Regex("(?s:.)*!")
    make = await gate(rules, opens=(start,), closes=(end,))
    assert takes(make, f"{start}no exclamation{end}yes!")
    assert not takes(make, f"{start}no exclamation{end}yes")
    assert takes(make, "yes!")


async def test_words_that_may_begin_either_are_what_they_become():
    make = await gate(
        Alternatives(("Here", "There")), opens=("Here is my thought process:",), closes=("Here is my response:",)
    )
    assert takes(make, "Here")
    assert takes(make, "There")
    assert takes(make, "Here is my thought process: Here is my response:There")
    assert not takes(make, "Here is my")
    assert not takes(make, "Here is my thought process: Here is my response:Where")
    tags = await gate(Alternatives(("<tool>",)))
    assert takes(tags, "<tool>")
    assert takes(tags, "<think>hm</think><tool>")
    assert not takes(tags, "<thool>")


@pytest.mark.parametrize("reasoning_open", [True, False])
async def test_the_first_token_of_an_opening_is_allowed_only_where_the_model_may_still_open_it(reasoning_open):
    matcher = (await gate(reasoning_open=reasoning_open))()
    opening = TOKENIZER.encode("<")[0]
    assert has(matcher.allowed(), opening)
    if reasoning_open:
        for token_id in TOKENIZER.encode("</think>"):
            matcher.accept(token_id)
    else:
        matcher.accept(TOKENIZER.encode("y")[0])
    assert not has(matcher.allowed(), opening)
