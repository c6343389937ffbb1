"""What a client of /v1/batches may send, and what stands behind the question mark of lists, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from server.http.errors import InvalidRequest
from server.http.schema import Name, Wire, refusal_of

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


_HOUR_S = 3600
MIN_EXPIRY_S, MAX_EXPIRY_S = _HOUR_S, 30 * 24 * _HOUR_S


class ExpiresAfter(Struct, kw_only=True, forbid_unknown_fields=True):
    """`seconds`: after the file was made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class CreateBatch(Struct, kw_only=True):
    """`completion_window`: hours or days, `24h` or `7d`, after which it is given up; OpenAI has 24h alone."""

    input_file_id: Name
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"
    ]
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,2}[hd]$")]
    output_expires_after: ExpiresAfter | None = None
    metadata: Metadata | None = None

    @property
    def window_s(self) -> int:
        return int(self.completion_window[:-1]) * (_HOUR_S if self.completion_window[-1] == "h" else 24 * _HOUR_S)

    def check(self) -> None:
        if self.window_s > MAX_EXPIRY_S:
            raise InvalidRequest("completion_window may be 30 days at most", param="completion_window")


class ListQuery(Struct, kw_only=True):
    """`after`: the id of the last object of the page before."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Name | None = None


class ListFilesQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    after: Name | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Name | None = None


BATCH: Wire[CreateBatch] = Wire(CreateBatch, {})


def expires_after(fields: Mapping[str, str]) -> ExpiresAfter | None:
    """What a form says in fields as `expires_after[seconds]`. Raises InvalidRequest."""
    given = {name[len(_EXPIRY) + 1 : -1]: value for name, value in fields.items() if is_expiry(name)}
    if not given:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error), where=_EXPIRY) from None


def is_expiry(field: str) -> bool:
    return field.startswith(f"{_EXPIRY}[") and field.endswith("]")


_EXPIRY = "expires_after"
