"""UniqueKeys: no object has a key twice, however the tokens are cut; everything else goes on as the grammar has it."""

from __future__ import annotations

import json

import pytest

from server.generate.structured.compiler import Grammars
from server.generate.structured.grammar import JsonSchema
from tests.server import smollm2
from tests.server.structured.reading import TOKENIZER, accepted, has, reads
from tests.server.tiny import EOS, tiny_tokenizer

OPEN = JsonSchema({"type": "object"})


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a":1,"b":{"a":2}}',
        '{"a":[{"a":1},{"a":2}],"ab":"a"}',
        '{"a":"\\"a\\":","":1}',
        '{"a\\"b":1,"a":"x,\\"a\\":"}',
    ],
)
async def test_keys_that_differ_or_are_of_other_objects_are_taken(text):
    assert await accepted(OPEN, text) == {text}


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"":1,"":2}',
        '{"b":{"a":1,"a":2}}',
        '{"b":[{}],"a":1,"b":2}',
        '{"a\\"b":1,"a\\"b":2}',
        '[{"a":1,"a":2}]',
    ],
)
async def test_no_key_comes_twice(text):
    assert not await accepted(JsonSchema(True), text)


@pytest.mark.parametrize("first", ['{"a":1', '{"id":"x"', '{"id":{}', '{"x":{"id":[1]'])
async def test_tokens_that_hold_a_whole_key_are_looked_into(first):
    """Of a real vocabulary, whose tokens go over the ends of values and keys."""
    tokenizer = smollm2.ours()
    matcher = (await Grammars(tokenizer, tokenizer.eos_token_ids).factory(OPEN))()
    for token_id in tokenizer.encode(first, add_special_tokens=False):
        assert has(matcher.allowed(), token_id)
        matcher.accept(token_id)
    mask = matcher.allowed()
    for token_id in range(tokenizer.vocab_size):
        if has(mask, token_id):
            written = first + tokenizer.token_bytes(token_id).decode(errors="replace")
            assert written.count('"id"') <= 1 or first.startswith('{"x"'), written
            assert written.count('"a"') <= 1, written


async def test_where_only_a_used_key_is_left_the_grammar_has_its_way():
    schema = {
        "type": "object",
        "propertyNames": {"enum": ["a"]},
        "minProperties": 2,
        "additionalProperties": {"type": "null"},
    }
    try:
        make = await Grammars(TOKENIZER, frozenset({EOS})).factory(JsonSchema(schema))
    except ValueError:
        pattern = {"type": "object", "patternProperties": {"^a$": {"type": "null"}}, "additionalProperties": False}
        make = await Grammars(TOKENIZER, frozenset({EOS})).factory(JsonSchema({**pattern, "minProperties": 2}))
    assert reads(make(), TOKENIZER.encode('{"a":null,"a":null}'))


async def test_a_token_of_several_keys_is_not_drawn_twice():
    tokenizer = tiny_tokenizer()
    make = await Grammars(tokenizer, frozenset({EOS})).factory(OPEN)
    matcher = make()
    for token_id in tokenizer.encode('{"key":1,"ke'):
        matcher.accept(token_id)
    (y, quote) = tokenizer.encode("y"), tokenizer.encode('"')
    matcher.accept(y[0])
    assert not has(matcher.allowed(), quote[0])
    matcher.accept(y[0])
    assert has(matcher.allowed(), quote[0])
    assert json.loads('{"key":1,"keyy":2}')
