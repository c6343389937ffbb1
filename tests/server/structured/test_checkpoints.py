"""Matchers that are shown guesses and taken back say what one says that has seen nothing but what was drawn."""

from __future__ import annotations

import contextlib
import random

import pytest

from runtime.api import ConstraintError, MatcherFactory, TokenMatcher
from server.generate.bad_words import forbid
from server.generate.structured.after_reasoning import after_reasoning
from server.generate.structured.budget import ReasoningMarkers, thinking_budget
from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import JsonSchema, Regex
from tests.fakes import fake_model
from tests.server.structured.reading import TOKENIZER, has
from tests.server.tiny import EOS, VOCAB_SIZE

THINK = (("<think>", "</think>"),)
CHANNELS = (("<|channel|>analysis<|message|>", "<|end|>"),)
OBJECT = '{"a":1,"b":{"a":[2,{"c":"x,\\"a\\":"}]},"cd":true}'


async def grammar(grammar) -> MatcherFactory:
    return await Grammars(TOKENIZER, frozenset({EOS})).factory(grammar)


async def gated() -> MatcherFactory:
    model = fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    make = await grammar(JsonSchema({"type": "object"}))
    return after_reasoning(make, TOKENIZER, model, opens=["<think>"], closes=["</think>"], reasoning_open=False)


async def words() -> MatcherFactory:
    return forbid(["ab", "abc", "q", "ca"], lambda text: TOKENIZER.encode(text, add_special_tokens=False), VOCAB_SIZE)


async def budget(markers: ReasoningMarkers) -> MatcherFactory:
    return thinking_budget(6, markers, TOKENIZER, VOCAB_SIZE)


MATCHERS = {
    "a grammar": (lambda: grammar(Regex("(ab?c|x+){3,9}")), "abcacxxxabcac"),
    "a schema": (lambda: grammar(JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}})), '{"a":12}'),
    "keys once": (lambda: grammar(JsonSchema({"type": "object"})), OBJECT),
    "behind reasoning": (gated, f"<think>a {{ </think>{OBJECT}"),
    "without reasoning": (gated, OBJECT),
    "bad words": (words, "abcabcaabbcc"),
    "a budget": (lambda: budget(ReasoningMarkers(THINK)), "<think>abcdefghijkl</think>abc"),
    "a budget of channels": (
        lambda: budget(ReasoningMarkers(CHANNELS, again="<|channel|>")),
        "<|channel|>analysis<|message|>abc<|end|>ab<|channel|>analysis<|message|>defg",
    ),
}


def allowed(matcher: TokenMatcher) -> list[int]:
    mask = matcher.allowed()
    return [token_id for token_id in range(VOCAB_SIZE) if has(mask, token_id)]


@pytest.mark.parametrize("name", MATCHERS)
async def test_guesses_that_are_taken_back_leave_no_trace(name):
    make_factory, text = MATCHERS[name]
    make, chance = await make_factory(), random.Random(name)
    matcher, drawn, num_guessed = make(), [], 0
    for wanted in TOKENIZER.encode(text, add_special_tokens=False):
        fresh = make()
        for token_id in drawn:
            fresh.accept(token_id)
        may_follow = allowed(fresh)
        for _ in range(2):
            take_back = matcher.checkpoint()
            guesses = [wanted] if chance.random() < 0.5 else []
            for _ in range(chance.randrange(5)):
                if choices := allowed(matcher):
                    token_id = guesses.pop() if guesses and guesses[-1] in choices else chance.choice(choices)
                    matcher.accept(token_id)
                    num_guessed += 1
            take_back()
            assert allowed(matcher) == may_follow
        if not may_follow:
            break
        drawn.append(wanted if wanted in may_follow else min(may_follow))
        matcher.accept(drawn[-1])
    assert num_guessed > len(drawn) > 6


async def test_a_grammar_that_failed_behind_a_guess_goes_on_where_it_was():
    make = await grammar(Regex("ab?c"))
    matcher, (a, b, c) = make(), TOKENIZER.encode("abc", add_special_tokens=False)
    matcher.accept(a)
    for failing in ([c, c], [a], [b, b]):
        take_back = matcher.checkpoint()
        with contextlib.suppress(ConstraintError):
            for token_id in failing:
                matcher.accept(token_id)
        take_back()
        assert allowed(matcher) == sorted([b, c])
    matcher.accept(c)
    assert allowed(matcher) == [EOS]
