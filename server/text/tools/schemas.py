"""Readers of a tool's JSON schema, which resolve references.

Clients may send any object as schema. Invalid parts are ignored here, and rejected elsewhere if necessary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAX_STEPS = 32  # from reference to reference
_MAX_PARTS = 256  # limit of anyOf and oneOf parts in total


def as_schema(found: object) -> Schema:
    """Return `found` if it is a mapping, otherwise {}. (`true` is also a valid schema, without constraints.)"""
    return found if isinstance(found, Mapping) else {}


def properties_of(schema: Schema) -> Schema:
    """Return the properties of an arguments schema, as a mapping from name to schema."""
    try:
        return as_schema(dereferenced(schema, schema).get("properties"))
    except ValueError:
        return {}


def dereferenced(schema: Schema, root: Schema) -> Schema:
    """Resolve a $ref, or an allOf with one entry, at the top of `schema`. If a reference cannot be resolved, return it unchanged.

    `root`: the schema that contains the references' targets. Raises ValueError for a circular reference."""
    for _ in range(_MAX_STEPS):
        parts, reference = schema.get("allOf"), schema.get("$ref")
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            schema = {**{key: value for key, value in schema.items() if key != "allOf"}, **parts[0]}
        elif isinstance(reference, str) and (found := referred(reference, root)) is not None:
            schema = {**{key: value for key, value in schema.items() if key != "$ref"}, **found}
        else:
            return schema
    raise ValueError("the schema has endless recursion")


def referred(reference: str, root: Schema) -> Schema | None:
    """Return the schema to which a reference such as "#/$defs/name" points in `root`, or None if no such schema exists."""
    found: Any = root
    head, *path = reference.split("/")
    for part in path:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if head == "#" and isinstance(found, Mapping) else None


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """Return the names of the JSON types that `schema` allows. The set is empty if no type is stated or `schema` is too complex."""
    types: set[str] = set()
    todo = [schema]
    for _ in range(_MAX_PARTS):
        if not todo:
            return frozenset(types)
        found, branches = _types(todo.pop(), root)
        if not found and not branches:
            return frozenset()
        types |= found
        todo += branches
    return frozenset()


def _types(schema: object, root: Schema) -> tuple[frozenset[str], list[Any]]:
    """Return the types that `schema` names. If it names none, return its alternative schemas as second value."""
    try:
        schema = dereferenced(as_schema(schema), root)
    except ValueError:
        return frozenset(), []
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,)), []
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str)), []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(map(type_of, values)), []
    branches = schema.get("anyOf") or schema.get("oneOf")
    return frozenset(), branches[:_MAX_PARTS] if isinstance(branches, list) else []


def type_of(value: Any) -> str:
    """Return the name of the JSON type of a Python value."""
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "null"
