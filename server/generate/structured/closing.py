"""Closing of JSON schemas: forbids properties that an object's schema does not list, unless the schema allows them explicitly.

Without closing, a model may add properties until the token limit. Any value that matches the closed schema also matches the
original. A satisfiable schema stays satisfiable: objects that another schema extends (allOf, a reference next to properties)
stay open, and required properties are listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from server.text.tools.schemas import referred

# Schemas that speak of the same value as the schema they stand in: alternatives, and all others.
_ALTERNATIVES = ("anyOf", "oneOf")
_TOGETHER = ("not", "if", "then", "else")
# Of a value's parts: one schema, a list of them, or one for each name.
_PARTS = (
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "propertyNames",
    "prefixItems",
)
_NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
_SAYS_WHAT_ELSE = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_OF_OBJECTS = _SAYS_WHAT_ELSE | {"properties", "required", "minProperties", "maxProperties", "propertyNames"}
_COMBINING = frozenset((*_ALTERNATIVES, *_TOGETHER, "allOf", "$ref", "$dynamicRef", "dependentSchemas"))


def closed(schema: Any) -> Any:
    """Return a copy of `schema` in which objects accept only listed properties, unless the schema allows others explicitly."""
    if not isinstance(schema, dict):
        return schema
    found = dict(_schemas(schema))
    return _rebuilt(schema, {id(node) for node, together in found.values() if not together and _may_close(node)})


def may_repeat(schema: Any) -> bool:
    """Return True if `schema` accepts an object with unlisted property names. A name could then occur twice."""
    if not isinstance(schema, dict):
        return schema is not False
    return any(map(_is_open, (node for _, (node, _) in _schemas(schema))))


def _is_open(node: Any) -> bool:
    if not isinstance(node, dict):
        return node is not False
    if node.keys() & {"const", "enum"} or (
        node.get("additionalProperties") is False and "patternProperties" not in node
    ):
        return False
    types = node.get("type")
    if types is None:
        return not node.keys() & {"anyOf", "oneOf", "allOf", "$ref"} or bool(node.keys() & _OF_OBJECTS)
    return "object" in types if isinstance(types, list) else types == "object"


def _may_close(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    listed = node.get("properties")
    if not isinstance(listed, dict) or node.keys() & (_SAYS_WHAT_ELSE | _COMBINING):
        return False
    least, required = node.get("minProperties", 0), node.get("required", [])
    if not isinstance(least, int) or not isinstance(required, list):
        return False
    return least <= len({*listed, *(name for name in required if isinstance(name, str))})


def _rebuilt(node: Any, closable: set[int]) -> Any:
    if isinstance(node, list):
        return [_rebuilt(part, closable) for part in node]
    if not isinstance(node, dict):
        return node
    made = {
        name: part if name in ("const", "enum", "default", "examples") else _rebuilt(part, closable)
        for name, part in node.items()
    }
    if id(node) in closable:
        unlisted = [name for name in node.get("required", ()) if isinstance(name, str)]
        made["properties"] = {
            **made["properties"],
            **{name: True for name in unlisted if name not in made["properties"]},
        }
        made["additionalProperties"] = False
    return made


# --- which schemas there are --------------------------------------------------------------------------------------


def _schemas(root: dict[str, Any]) -> Iterator[tuple[int, tuple[Any, bool]]]:
    """Yield (id, (schema, together)) for every schema in `root`. `together`: another schema applies to the same value."""
    found: dict[int, tuple[Any, bool]] = {}
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        node, together = todo.pop()
        known = found.get(id(node))
        if known is not None and (known[1] or not together):
            continue
        found[id(node)] = node, together
        if isinstance(node, dict):
            todo += _inside(node, root, together)
    yield from found.items()


def _inside(node: dict[str, Any], root: dict[str, Any], together: bool) -> Iterator[tuple[Any, bool]]:
    several = node.get("allOf")
    branches = several if isinstance(several, list) else []
    speakers = len(branches) + len(node.keys() & (_COMBINING - {"allOf"})) + bool(node.keys() & _OF_OBJECTS)
    together = together or speakers > 1
    for branch in (*branches, *_listed(node.get(name) for name in _ALTERNATIVES)):
        yield branch, together
    for name in _TOGETHER:
        if name in node:
            yield node[name], True
    for dependent in _values(node.get("dependentSchemas")):
        yield dependent, True
    if isinstance(reference := node.get("$ref"), str) and (target := referred(reference, root)) is not None:
        yield target, together
    for part in _listed(node.get(name) for name in _PARTS):
        yield part, False
    for name in _NAMED_PARTS:
        for part in _values(node.get(name)):
            yield part, False


def _listed(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from value
        elif isinstance(value, dict | bool):
            yield value


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []
