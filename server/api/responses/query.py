"""What stands behind the question mark of the routes of stored responses."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct
from starlette.requests import Request as HttpRequest

from server.api.responses.request_types import Includable
from server.config.server_config import ServerConfig
from server.http import query
from server.http.errors import UnsupportedParameter
from server.http.schema import Name


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
    """Raises InvalidRequest."""
    found = query.read_query(http, kind, config, lists=("include",))
    if isinstance(found, RetrieveQuery) and found.include_obfuscation:
        raise UnsupportedParameter("include_obfuscation")
    return found
