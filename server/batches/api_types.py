"""Wire types of /v1/files and /v1/batches: bodies, forms, queries and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from server.batches.lines import Url
from server.http.errors import InvalidRequest, clip
from server.http.schema import Name, Wire, refusal_of

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


_HOUR_S = 3600
MIN_EXPIRY_S, MAX_EXPIRY_S = _HOUR_S, 30 * 24 * _HOUR_S


class ExpiresAfter(Struct, kw_only=True, forbid_unknown_fields=True):
    """Expiry of a file: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class CreateBatch(Struct, kw_only=True):
    """Body of a request that creates a batch. `completion_window`: hours or days, such as `7d`; OpenAI accepts only 24h."""

    input_file_id: Name
    endpoint: Url
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,2}[hd]$")]
    output_expires_after: ExpiresAfter | None = None
    metadata: Metadata | None = None

    @property
    def window_s(self) -> int:
        return int(self.completion_window[:-1]) * (_HOUR_S if self.completion_window[-1] == "h" else 24 * _HOUR_S)

    def check(self) -> None:
        if self.window_s > MAX_EXPIRY_S:
            raise InvalidRequest("completion_window exceeds the maximum of 30 days", param="completion_window")


class ListQuery(Struct, kw_only=True):
    """Query parameters of a list. `after`: id of the last object of the previous page."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Name | None = None


class ListFilesQuery(Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    after: Name | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Name | None = None


BATCH: Wire[CreateBatch] = Wire(CreateBatch, {})


def expires_after(fields: Mapping[str, str]) -> ExpiresAfter | None:
    """Return the expiry that a form's fields `expires_after[…]` set, or None without them. Raises InvalidRequest."""
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


class FileUpload(Struct):
    """Form of a file upload. `file`: content with its name. `expires_after`: two form fields, `expires_after[anchor]` and
    `expires_after[seconds]`."""

    file: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileBody(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None


class DeletedFile(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Struct):
    total: int
    completed: int
    failed: int


class CachedTokens(Struct):
    cached_tokens: int


class ReasoningTokens(Struct):
    reasoning_tokens: int


class BatchUsage(Struct):
    """Token usage of all answers of a batch so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class BatchBody(Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class Page(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page, kw_only=True):
    data: list[FileBody]


class BatchList(Page, kw_only=True):
    data: list[BatchBody]


class _Listed(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def body(self) -> Struct: ...


P = TypeVar("P", bound=Page)


def page(kind: type[P], found: Sequence[_Listed], *, after: str | None, limit: int) -> P:
    """Return a page of `found`: at most `limit` objects that follow the object with id `after`. Raises InvalidRequest for an
    unknown `after`."""
    start = 0
    if after is not None:
        places = [place for place, each in enumerate(found) if each.id == after]
        if not places:
            raise InvalidRequest(f"after: {clip(after)!r} is not the id of an object in this list", param="after")
        start = places[0] + 1
    data = found[start : start + limit]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return kind(data=[each.body for each in data], first_id=first, last_id=last, has_more=start + limit < len(found))
