"""Structural tags: which texts their formats take."""

from __future__ import annotations

import json

import pytest

from server.generate.structured.grammar import GrammarError
from server.generate.structured.tags import StructuralTag
from tests.server.structured.reading import accepted

JSON = {
    "type": "json_schema",
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CONST_B = {"type": "const_string", "value": "b"}
ANY = {"type": "any_text"}


def tag(name: str, content=JSON) -> dict:
    return {"type": "tag", "begin": f"<function={name}>", "content": content, "end": "</function>"}


def call(name: str, body='{"a": 1}') -> str:
    return f"<function={name}>{body}</function>"


CALLS = {"type": "triggered_tags", "triggers": ["<function="], "tags": [tag("f"), tag("g")]}
NEVER = ["<function=h>", f"<function=f>{{}}{call('f')}", "a <function=f>x", call("f")[:-1]]


def sequence(*elements: dict) -> dict:
    return {"type": "sequence", "elements": list(elements)}


@pytest.mark.parametrize(
    ("format", "taken", "refused"),
    [
        (CALLS, ["", "< <func", call("f"), f"a {call('f')} b {call('g')} c", f"<fun{call('g')}"], NEVER),
        ({**CALLS, "at_least_one": True}, [call("f"), f"a {call('f')}{call('f')} b"], ["", "text", *NEVER]),
        ({**CALLS, "stop_after_first": True}, ["", "text", call("f"), f"a {call('g')}"], [f"{call('f')} b", call("f") * 2]),
        ({**CALLS, "at_least_one": True, "stop_after_first": True}, [call("f"), f"a {call('g')}"], ["", "text", f"{call('f')} b"]),
        ({**CALLS, "excludes": ["secret"]}, ["sec", f"a {call('f')} b"], ["a secret", f"{call('f')}secret"]),
        ({"type": "triggered_tags", "triggers": ["<f", "<|im_start|>"], "tags": [tag("f"), {**tag("g"), "begin": "<|im_start|>g"}]},
         [call("f"), 'a <|im_start|>g{"a":1}</function> b'], ["<|im_start|>f"]),
        (sequence(tag("f"), CONST_B), [f"{call('f')}b"], [call("f"), f"{call('f')}bb"]),
        (sequence({"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}, JSON),
         ['<think>a < b</think>{"a":1}', '<think></think>{"a":1}'],
         ['{"a":1}', '<think>a</think>', '<think></think>b</think>{"a":1}']),
        ({"type": "tag", "begin": "<|im_start|>", "content": ANY, "end": ["<|im_end|>", "stop"]},
         ["<|im_start|>a<|im_end|>", "<|im_start|>a stop"], ["<|im_start|>a", "<|im_start|>stop a<|im_end|>"]),
        (sequence(ANY, {"type": "const_string", "value": "<|im_end|>b"}), ["abc<|im_end|>b", "<|im_end|>b"], ["abc", "b"]),
        ({"type": "or", "elements": [CONST_B, {"type": "regex", "pattern": "c/+"}]}, ["b", "c//"], ["c", "bc/"]),
        ({"type": "optional", "content": CONST_B}, ["", "b"], ["bb"]),
        ({"type": "star", "content": CONST_B}, ["", "bbb"], ["a"]),
        ({"type": "plus", "content": CONST_B}, ["b", "bbb"], [""]),
        ({"type": "repeat", "min": 2, "max": 3, "content": CONST_B}, ["bb", "bbb"], ["b", "bbbb"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": CONST_B}, ["bb", "bbbbb"], ["b"]),
        ({"type": "grammar", "grammar": 'root ::= "a" "b"+'}, ["ab", "abb"], ["a"]),
        ({"type": "tags_with_separator", "tags": [tag("f"), tag("g")], "separator": ", "},
         ["", call("f"), f"{call('f')}, {call('g')}"], [call("f") * 2, f"{call('f')}, "]),
        ({"type": "tags_with_separator", "tags": [tag("f")], "separator": ", ", "at_least_one": True, "stop_after_first": True},
         [call("f")], ["", f"{call('f')}, {call('f')}"]),
        ({"type": "any_text", "excludes": ["foo", "bar"]}, ["", "fo ba"], ["a foo"]),
        ({"type": "const_string", "value": ""}, [""], ["a"]),
        ({"type": "tag", "begin": "", "content": ANY, "end": ""}, ["", "abc"], []),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_a_format_takes_what_it_says_and_nothing_else(format, taken, refused):
    assert await accepted(StructuralTag({"format": format}), *taken, *refused) == set(taken)
    assert await accepted(StructuralTag(json.dumps({"format": format})), *taken, *refused) == set(taken)


async def test_structures_and_triggers_are_the_older_way_to_say_it():
    structures = [{"begin": "<function=f>", "schema": JSON["json_schema"], "end": "</function>"}]
    tag = StructuralTag({"structures": structures, "triggers": ["<function="]})
    taken = {"text", f"a {call('f')} b {call('f')}"}
    assert await accepted(tag, *taken, *NEVER, call("g")) == taken


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, "format is not an object"),
        ("nope", "the structural tag is not JSON"),
        ("true", "must be an object"),
        ({"format": {"type": "qwen_xml_parameter"}}, "format: type 'qwen_xml_parameter' is not supported; there are const_string"),
        ({"format": {}}, "format.type is not a string"),
        ({"format": sequence(ANY, CONST_B)}, r"format.elements\[0\]: only a special token can end any_text"),
        ({"format": sequence(CONST_B, {"type": "regex"})}, r"format.elements\[1\].pattern is not a string"),
        ({"format": {"type": "or", "elements": []}}, "format.elements is not a list of formats"),
        ({"format": {"type": "regex", "pattern": "("}}, "unclosed"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": CONST_B}}, "min <= max"),
        ({"format": {**JSON, "style": "xml"}}, "style 'xml' is not supported"),
        ({"format": tag("f", {"type": "json_schema", "json_schema": {"multipleOf": 12345678}})}, "format.content: multipleOf"),
        ({"format": tag("f", {"type": "json_schema", "json_schema": False})}, "format.content: .* nothing satisfies"),
        ({"format": {**CALLS, "triggers": ["<tool"]}}, "starts with none of the triggers"),
        ({"format": {**CALLS, "triggers": [1]}}, "format.triggers is not a list of strings"),
        ({"format": {"type": "tag", "begin": "x", "content": ANY, "end": "x<|im_end|>"}}, "mixes text with special tokens"),
        ({"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["<f"]}, r"structures\[0\].end is not a string"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_by_its_place(tag, words):
    with pytest.raises(GrammarError, match=words):
        await accepted(StructuralTag(tag))


async def test_formats_inside_each_other_have_a_limit():
    format = CONST_B
    for _ in range(64):
        format = {"type": "star", "content": format}
    with pytest.raises(GrammarError, match="deeper than 64"):
        await accepted(StructuralTag({"format": format}))
