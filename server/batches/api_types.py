"""What the server says on the routes of files and batches, as types: for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class FileUpload(Struct):
    """A form: `file` is the content, with its name."""

    file: str
    purpose: Literal["batch"]


class FileBody(Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: None


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


class BatchBody(Struct):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Struct):
    object: Literal["list"]
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
