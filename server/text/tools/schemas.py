"""Tool schemas: parameters of a tool's JSON schema, with references resolved.

Clients may send any object: invalid parts are ignored here, and rejected elsewhere if they matter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAX_STEPS = 32  # from reference to reference
_MAX_PARTS = 256  # limit of anyOf and oneOf parts in total


def as_schema(found: object) -> Schema:
    """Return `found` if it is a mapping, else {}: `true` is a valid schema without constraints."""
    return found if isinstance(found, Mapping) else {}


def properties_of(schema: Schema) -> Schema:
    """Return the properties of an arguments schema, by name."""
    try:
        return as_schema(dereferenced(schema, schema).get("properties"))
    except ValueError:
        return {}


def dereferenced(schema: Schema, root: Schema) -> Schema:
    """Return `schema` without a reference or single-part allOf at its top; unchanged if a reference cannot be resolved.

    `root`: the schema that references are relative to. Raises ValueError for a circular reference."""
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
    """Return the schema that "#/$defs/name" refers to in `root`; None if it does not exist or is outside `root`."""
    found: Any = root
    head, *path = reference.split("/")
    for part in path:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if head == "#" and isinstance(found, Mapping) else None


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types a schema allows; empty if it states none or is too complex."""
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
    """Return the types that a schema names, or else its alternative schemas."""
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
    """Return the JSON type name of a Python value."""
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "null"
