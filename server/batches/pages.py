"""Pages of a list, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from server.http.errors import InvalidRequest, clip
from server.http.schema import Json


class Listed(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def body(self) -> Json: ...


L = TypeVar("L", bound=Listed)


def page(found: Sequence[L], *, after: str | None, limit: int) -> Json:
    """The `limit` that follow `after`. Raises InvalidRequest where that is none of them."""
    start = 0
    if after is not None:
        places = [place for place, each in enumerate(found) if each.id == after]
        if not places:
            raise InvalidRequest(f"after: there is no {clip(after)!r} in the list", param="after")
        start = places[0] + 1
    data = found[start : start + limit]
    return {
        "object": "list",
        "data": [each.body for each in data],
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
        "has_more": start + limit < len(found),
    }
