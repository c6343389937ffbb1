"""What the server says on the routes of files and batches, as types: for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from server.batches.request_types import ExpiresAfter
from server.batches.store import Status


class FileUpload(Struct):
    """A form: `file` is the content, with its name; in a form the last one is `expires_after[anchor]` and
    `expires_after[seconds]`."""

    file: str
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileBody(Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: int | None


class FileList(Struct):
    object: Literal["list"]
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorBody(Struct):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Struct):
    object: Literal["list"]
    data: list[BatchErrorBody]


class RequestCounts(Struct):
    total: int
    completed: int
    failed: int


class CachedTokens(Struct):
    cached_tokens: int


class ReasoningTokens(Struct):
    reasoning_tokens: int


class BatchUsage(Struct):
    """Of the answers so far, all together."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchBody(Struct):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(Struct):
    object: Literal["list"]
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
