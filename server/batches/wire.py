"""What a client of /v1/batches may send, and what stands behind the question mark of lists, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from server.schema import Name, Wire

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class CreateBatch(Struct, kw_only=True):
    input_file_id: Name
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
    ]
    completion_window: Literal["24h"]  # no batch is given up, however long it takes
    metadata: Metadata | None = None

    def check(self) -> None:
        pass


class ListQuery(Struct, kw_only=True):
    """`after`: the id of the last object of the page before."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Name | None = None


class ListFilesQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    after: Name | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Name | None = None


_REFUSED: dict[str, tuple[Any, ...]] = {"output_expires_after": ()}

BATCH: Wire[CreateBatch] = Wire(CreateBatch, _REFUSED, frozenset(_REFUSED))
