"""Which texts a grammar takes, and which grammars are refused before they cost anything."""

from __future__ import annotations

import json

import pytest

from server.generate.structured import compiler
from server.generate.structured import grammar as limits
from server.generate.structured.grammar import (
    ANY_OBJECT,
    Alternatives,
    GrammarError,
    JsonSchema,
    Literals,
    Regex,
    Rules,
)
from tests.server import smollm2
from tests.server.structured.reading import TOKENIZER, accepted

ONE = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (ANY_OBJECT, ["{}", '{"a":1}', '{"a": [1, 2], "b":null}'], ["[]", "1", " {}", "{} ", "{ }", '{"a" :1}', '{"a":1\n}']),
        (JsonSchema(True), ["1", '"x"', "null", "[]"], ["x", ""]),
        (JsonSchema(json.dumps(ONE)), ['{"a":1}', '{"a": 1}', "{}"], ['{"a":"x"}', '{"a":1,"b":[]}', '{"a":  1}']),
        (JsonSchema(ONE, "any", closed=False), ['{"a":1}', '{ "a" : 1 ,\n\n "b": []}'], ['{"a":"x"}', " {}"]),
        (JsonSchema(True, "any"), ["{" + " " * 40 + "}"], ["{" + " " * 41 + "}"]),
        (JsonSchema(ONE, "none", closed=False), ['{"a":1}', '{"a":1,"b":2}'], ['{"a": 1}']),
        (JsonSchema(ONE, pattern="[ ]"), ['{"a": 1}', '{ "a":1 }'], ['{"a":  1}', '{"a":\n1}']),
        (JsonSchema({**ONE, "x-guidance": {"key_separator": "="}}), ['{"a"=1}'], ['{"a":1}']),
        (Alternatives(("yes", "nö", "a\nb", 'q"\\', "😀")), ["yes", "nö", "a\nb", 'q"\\', "😀"], ["y", "no", "yesnö"]),
        (Regex(r"\d{3}-é+/x"), ["123-éé/x"], ["123", "123-é/xx"]),
        (Regex("^(a|b)$"), ["a", "b"], ["ab", "^a$"]),
        (Rules('start: "a" b\nb: "c" | "d"\n'), ["ac", "ad"], ["a", "acd"]),
        (Rules('root ::= "a" [0-9]+ ("x" | "y")*\n'), ["a1", "a12xy"], ["a", "a1z"]),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_a_grammar_takes_what_it_says_and_nothing_else(grammar, taken, refused):
    assert await accepted(grammar, *taken, *refused) == set(taken)


def nested(levels: int, schema: dict) -> dict:
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (JsonSchema(False), "nothing satisfies"),
        (JsonSchema('{"type":'), "the schema is not JSON"),
        (JsonSchema("[" * 100_000), "the schema is not JSON"),
        (JsonSchema("[1]"), "must be a JSON object, true or false"),
        (JsonSchema({"not": {"type": "string"}}), "not"),
        (JsonSchema({"if": {}, "then": {}}), "if"),
        (JsonSchema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (JsonSchema({"type": "colour"}), "colour"),
        (JsonSchema({"$ref": "https://example.org/schema"}), "does not fetch"),
        (JsonSchema({"type": "string", "pattern": "(?=a)"}), "look-ahead"),
        (JsonSchema({"type": "string", "format": "colour"}), "colour"),
        (JsonSchema(nested(limits.MAX_DEPTH, {})), "deeper than 64"),
        (JsonSchema({"properties": {str(i): {} for i in range(limits.MAX_PROPERTIES + 1)}}), "5001 properties"),
        (JsonSchema({"enum": ["x" * limits.MAX_CHARS]}), "characters; at most 131072"),
        (JsonSchema(" " * limits.MAX_CHARS + "{}"), "characters; at most 131072"),
        (JsonSchema({"pattern": "a?" * limits.MAX_RULE_CHARS}), "patterns have 32768 characters"),
        (JsonSchema({"patternProperties": {"a?" * limits.MAX_RULE_CHARS: {}}}), "patterns have 32768 characters"),
        (JsonSchema({"type": "integer", "multipleOf": 1_000_003}), "multipleOf 1000003"),
        (JsonSchema({"type": "number", "multipleOf": 99999.9}), "multipleOf 99999.9"),
        (Regex("("), "unclosed group"),
        (Regex("(?=a)b"), "look-ahead"),
        (Regex(r"(a+)\1"), "backreferences"),
        (Regex("a" * (limits.MAX_RULE_CHARS + 1)), "the regular expression has 16385 characters"),
        (Alternatives(("x" * limits.MAX_CHARS,)), "the choices"),
        (Rules("%%%"), "cannot be read"),
        (Rules("start: missing"), "missing"),
        (Rules('root ::= "a" missing'), "missing"),
        (Rules("x" * (limits.MAX_RULE_CHARS + 1)), "the grammar has 16385 characters"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_in_words(grammar, words):
    with pytest.raises(GrammarError, match=words) as raised:
        await accepted(grammar)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("multiple", [7, 100, 10_000, 250_000, 0.25, 0.001, 1e-10])
async def test_usual_multiples_are_taken(multiple):
    assert await accepted(JsonSchema({"type": "number", "multipleOf": multiple}), "0", "x") == {"0"}


async def test_rules_whose_every_mask_would_take_long_are_refused(monkeypatch):
    """What they take to compile depends on the machine; what their first mask takes of its thread is many times the limit."""
    monkeypatch.setattr(compiler, "MAX_FIRST_MASK_S", 0.05)
    rules = Rules("start: " + "start? " * 2000 + '"a"')
    with pytest.raises(GrammarError, match="too ambiguous"):
        await accepted(rules, tokenizer=smollm2.ours())


async def test_a_schema_as_deep_as_allowed_is_taken():
    levels = limits.MAX_DEPTH - 1
    text = "[" * levels + "1" + "]" * levels
    assert await accepted(JsonSchema(nested(levels, {"type": "integer"})), text) == {text}


def test_a_literal_means_the_special_tokens_it_spells():
    assert Literals(TOKENIZER)("<|im_start|>a<|im_end|>\n") == '<[0]> "a" <[1]> "\\n"'
    assert Literals(TOKENIZER)("plain") == '"plain"'
    assert Literals(TOKENIZER)("") == '""'


async def test_special_tokens_in_rules_are_drawn_as_such():
    rules = Rules(f"start: {Literals(TOKENIZER)('<|im_start|>a')}")
    assert await accepted(rules, "<|im_start|>a", "a") == {"<|im_start|>a"}
