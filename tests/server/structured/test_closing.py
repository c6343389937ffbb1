"""Closing: objects that list their properties have no others, and what was satisfiable stays so."""

from __future__ import annotations

import pytest

from server.generate.structured.closing import closed, may_repeat
from server.generate.structured.grammar import JsonSchema
from tests.server.structured.reading import accepted

ONE = {"type": "object", "properties": {"a": {"type": "integer"}}}
TWO = {"properties": {"b": {"type": "integer"}}}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (ONE, ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,"b":1}']),
        ({**ONE, "additionalProperties": True}, ['{"a":1,"b":1}'], ['{"a":"x"}']),
        ({**ONE, "additionalProperties": {"type": "null"}}, ['{"a":1,"b":null}'], ['{"a":1,"b":2}']),
        ({**ONE, "patternProperties": {"^x": {"type": "null"}}}, ['{"a":1,"xy":null}'], []),
        ({"type": "array", "items": ONE}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"properties": {"o": ONE}}, ['{"o":{"a":1}}'], ['{"o":{"b":1}}', '{"p":1}']),
        ({**ONE, "required": ["z"]}, ['{"a":1,"z":[]}'], ['{"a":1}', '{"z":1,"y":1}']),
        ({**ONE, "required": ["a"], "minProperties": 2}, ['{"a":1,"b":1}'], ['{"a":1}']),
        ({"anyOf": [ONE, TWO]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"c":1}']),
        ({"allOf": [ONE, TWO]}, ['{"a":1,"b":1}', "{}"], ['{"a":"x"}', '{"a":1,"b":"x"}']),
        ({"allOf": [ONE], "title": "one"}, ['{"a":1}'], ['{"b":1}']),
        ({**TWO, "anyOf": [ONE]}, ['{"b":1,"a":1}'], ['{"b":"x"}']),
        ({"$defs": {"one": ONE}, "$ref": "#/$defs/one", **TWO}, ['{"a":1,"b":1}'], ['{"a":"x"}']),
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, ['{"next":{"next":null}}'], ['{"next":{"b":1}}']),
        ({"const": {"properties": {}}}, ['{"properties":{}}'], ['{"additionalProperties":false}']),
    ],
    ids=str,
)  # fmt: skip
async def test_what_lists_its_properties_has_no_others(schema, taken, refused):
    found = await accepted(JsonSchema(schema), *taken, *refused)
    assert found >= set(taken[:1])
    assert not found & set(refused)


def test_the_schema_that_came_is_not_changed():
    schema = {"properties": {"o": dict(ONE)}, "required": ["z"]}
    closed(schema)
    assert schema == {"properties": {"o": ONE}, "required": ["z"]}


async def test_a_request_may_leave_objects_open_and_indent():
    assert JsonSchema(ONE, closed=False).checked().get("additionalProperties") is None
    assert JsonSchema(ONE).checked()["additionalProperties"] is False
    assert "whitespace_pattern" in JsonSchema(ONE, "any").checked()["x-guidance"]


@pytest.mark.parametrize(
    ("schema", "may"),
    [
        (True, True), (False, False), ({}, True), ({"type": "object"}, True), ({"type": ["string", "null"]}, False),
        (ONE, True), ({**ONE, "additionalProperties": False}, False), ({"items": {}}, True), ({"const": {"a": 1}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, True), ({"anyOf": [{"type": "string"}]}, False),
        ({"type": "array", "items": {"type": "integer"}}, False), ({"type": "array", "prefixItems": [True]}, True),
    ],
    ids=str,
)  # fmt: skip
def test_it_is_known_which_schemas_leave_names_open(schema, may):
    assert may_repeat(schema) is may
