"""What stands behind the question mark of a path, as a type: its fields with their limits, like a body's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from server.config.server_config import ServerConfig
from server.http.noted import note_ignored
from server.http.schema import refusal_of

Q = TypeVar("Q", bound=Struct)


def read_query(http: Request, kind: type[Q], config: ServerConfig, *, lists: Collection[str] = ()) -> Q:
    """Names nobody knows are noted as ignored, or refused by a server that is strict. Of what is there twice the last counts, but
    for `lists`.

    Raises InvalidRequest."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for key in dict.fromkeys(http.query_params):
        name, values = key.removesuffix("[]"), http.query_params.getlist(key)
        if name not in known:
            unknown.append(key)
        else:
            given[name] = values if name in lists else values[-1]
    note_ignored(http, unknown, config)
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
