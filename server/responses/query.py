"""What stands behind the question mark of the routes of stored responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request as HttpRequest

from server.config import ServerConfig
from server.errors import UnsupportedParameter
from server.http.body import note_ignored
from server.responses.wire import Includable
from server.schema import Name, refusal_of


class RetrieveQuery(Struct, kw_only=True):
    """`starting_after`: the sequence number of the last event that the client has."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    include: list[Includable] | None = None  # what there is, is always shown
    include_obfuscation: bool | None = None


class InputItemsQuery(Struct, kw_only=True):
    """`after`: the id of the last item of the page before."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Name | None = None
    include: list[Includable] | None = None


Q = TypeVar("Q", RetrieveQuery, InputItemsQuery)


def read_query(http: HttpRequest, kind: type[Q], config: ServerConfig) -> Q:
    """Names nobody knows are noted as ignored, or refused by a server that is strict. Raises InvalidRequest."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for key in dict.fromkeys(http.query_params):
        name, values = key.removesuffix("[]"), http.query_params.getlist(key)
        if name not in known:
            unknown.append(key)
        else:
            given[name] = values if name == "include" else values[-1]
    note_ignored(http, unknown, config)
    try:
        found = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
    if isinstance(found, RetrieveQuery) and found.include_obfuscation:
        raise UnsupportedParameter("include_obfuscation")
    return found
