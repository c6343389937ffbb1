"""Generator of the OpenAPI 3.1 document from the routes' declared types and the error classes in `errors`.

The document depends on the running server only in the API keys that it requires."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec.json import encode

from server.api.route import JSON, ErrorBody, Route
from server.config import __version__
from server.http import errors
from server.http.auth import is_open, needs_admin
from server.http.schema import MAX_TIMEOUT_S, REQUEST_ID, Json


def document(routes: Sequence[Route], *, user_key: bool, admin_key: bool) -> bytes:
    """Return the OpenAPI document of `routes`, encoded as JSON. `user_key`, `admin_key`: the server requires this key."""
    schemas, components = _schemas(routes)
    paths: dict[str, Json] = {}
    refused: set[tuple[int, Any]] = set()
    for route in routes:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        refusals = _refusals(route, path, user_key=user_key, admin_key=admin_key)
        refused |= {(status, route.error) for status in refusals}
        paths.setdefault(path, {})[route.method.lower()] = _operation(
            route, path, schemas, sorted(refusals), _security(path, user_key=user_key, admin_key=admin_key)
        )
    components_used: Json = {
        "schemas": components,
        "responses": {
            _name_of(status, kind): _refusal(status, schemas[kind], with_codes=kind is ErrorBody)
            for status, kind in sorted(refused, key=lambda each: (each[0], each[1].__name__))
        },
        "parameters": {"RequestId": _REQUEST_ID, "RequestTimeout": _REQUEST_TIMEOUT},
        "headers": _HEADERS,
    }
    if schemes := _security_schemes(user_key=user_key, admin_key=admin_key):
        components_used["securitySchemes"] = schemes
    return encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "oneloop", "version": __version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
            "servers": [{"url": "/"}],
            "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
            "paths": paths,
            "components": components_used,
        }
    )  # fmt: skip


def _schemas(operations: Sequence[Route]) -> tuple[dict[Any, Json], Json]:
    """Return a schema reference for each wire type, and the schemas by name."""
    requests = {operation.request: None for operation in operations if operation.request is not None}
    answers = {kind: None for operation in operations for kind in (*operation.answers.values(), operation.error)}
    types = [*requests, *(kind for kind in answers if kind is not None and kind is not Json and kind not in requests)]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for name in components.keys() - _named_by(references[: len(requests)], components):
        _require_what_is_written(components[name])
    return dict(zip(types, references, strict=True)), components


def _named_by(schemas: Iterable[Json], components: Mapping[str, Json]) -> set[str]:
    """Return the names of the components that `schemas` reference, directly or through other components."""
    found: set[str] = set()
    todo = list(schemas)
    while todo:
        names = set(re.findall(r'"#/components/schemas/([^"]+)"', encode(todo.pop()).decode())) - found
        found |= names
        todo += [components[name] for name in names]
    return found


def _require_what_is_written(schema: Json) -> None:
    """Mark the fields of a response schema that have a default as required, because the server always writes them."""
    written = {name for name, described in schema.get("properties", {}).items() if "default" in described}
    if written:
        required = written.union(schema.get("required", ()))
        schema["required"] = [name for name in schema["properties"] if name in required]
        for name in written:
            del schema["properties"][name]["default"]


def _operation(
    operation: Route, path: str, schemas: Mapping[Any, Json], refusals: list[int], security: list[Json] | None
) -> Json:
    made: Json = {"operationId": operation.id, "tags": [operation.tag], "summary": operation.summary}
    if security is not None:
        made["security"] = security
    names = re.findall(r"{(\w+)}", path)
    made["parameters"] = [
        *(
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": operation.parameters[name],
                "schema": {"type": "string"},
            }
            for name in names
        ),
        *_query(operation.query),
        {"$ref": "#/components/parameters/RequestId"},
        *([{"$ref": "#/components/parameters/RequestTimeout"}] if 504 in operation.refusals else []),
    ]
    if operation.request is not None:
        made["requestBody"] = {
            "required": not operation.may_be_bodiless,
            "content": {operation.request_media: {"schema": schemas[operation.request]}},
        }
    content = {media: {"schema": _schema_of(kind, schemas)} for media, kind in operation.answers.items()}
    headers = ["X-Request-Id"] if operation.request is None else ["X-Request-Id", "X-Ignored-Fields"]
    success = "101" if operation.is_socket else "200"
    description = HTTPStatus(int(success)).phrase
    responses: Json = {success: {"description": description, "headers": _references(headers), "content": content}}
    if operation.id.startswith("health"):
        responses["503"] = {**responses["200"], "description": "Requests may not enter"}
    responses |= {
        str(status): {"$ref": f"#/components/responses/{_name_of(status, operation.error)}"} for status in refusals
    }
    made["responses"] = responses
    return made


def _query(kind: Any) -> Iterator[Json]:
    if kind is not None:
        (schema,) = msgspec.json.schema(kind)["$defs"].values()
        for name, described in schema["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": described}


def _schema_of(kind: Any, schemas: Mapping[Any, Json]) -> Json:
    if kind is None:
        return {"type": "string"}
    return {"type": "object"} if kind is Json else schemas[kind]


_REQUEST_ID: Json = {
    "name": "X-Request-Id", "in": "header", "required": False, "description": "An id to use instead of a fresh one",
    "schema": {"type": "string", "pattern": f"^{REQUEST_ID}$"},
}  # fmt: skip
_REQUEST_TIMEOUT: Json = {
    "name": "X-Request-Timeout", "in": "header", "required": False,
    "description": "Seconds after which an answer that is not complete ends with 504",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}  # fmt: skip
_HEADERS: Json = {
    "X-Request-Id": {"description": "The id under which the log has this request", "schema": {"type": "string"}},
    "X-Ignored-Fields": {"description": "Fields of the request that nobody knows", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait before trying again", "schema": {"type": "integer"}},
    "WWW-Authenticate": {"description": "How to show a key", "schema": {"type": "string"}},
}
_HEADERS_OF = {401: ["WWW-Authenticate"], 429: ["Retry-After"], 503: ["Retry-After"]}


def _references(headers: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in headers}


def _name_of(status: int, error: Any) -> str:
    phrase = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
    return phrase if error is ErrorBody else error.__name__.removesuffix("Error") + phrase


def _tree(kind: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _refusal(status: int, body: Json, *, with_codes: bool) -> Json:
    codes = sorted({kind.code for kind in _tree(errors.ApiError) if kind.status == status and kind.code is not None})
    named = f" (`code`: {', '.join(codes)})" if codes and with_codes else ""
    return {
        "description": HTTPStatus(status).phrase + named,
        "headers": _references(["X-Request-Id", *_HEADERS_OF.get(status, ())]),
        "content": {JSON: {"schema": body}},
    }


# --- keys ---------------------------------------------------------------------------------------------------------


def _refusals(operation: Route, path: str, *, user_key: bool, admin_key: bool) -> set[int]:
    found = {*operation.refusals, 500}
    if needs_admin(path, user_key=user_key, admin_key=admin_key):
        found |= {401, 403} if user_key else {401}
    elif not is_open(path) and user_key:
        found.add(401)
    return found


def _security(path: str, *, user_key: bool, admin_key: bool) -> list[Json] | None:
    """Return the security requirement of an operation: the keys that it accepts, or None if the server has no keys."""
    if not (user_key or admin_key):
        return None
    if needs_admin(path, user_key=user_key, admin_key=admin_key) and admin_key:
        return [{"adminBearer": []}, {"adminHeader": []}]
    return [{"bearer": []}, {"header": []}] if user_key and not is_open(path) else []


def _security_schemes(*, user_key: bool, admin_key: bool) -> Json:
    made: Json = {}
    for exists, names, whose in (
        (user_key, ("bearer", "header"), "A key of --api-key, or the administrator's"),
        (admin_key, ("adminBearer", "adminHeader"), "The key of --admin-api-key"),
    ):
        if exists:
            made[names[0]] = {"type": "http", "scheme": "bearer", "description": whose}
            made[names[1]] = {"type": "apiKey", "in": "header", "name": "x-api-key", "description": whose}
    return made
