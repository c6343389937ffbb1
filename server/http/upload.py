"""Upload: a multipart form with one file, written to a temporary file within a size limit."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from server.config.server_config import ServerConfig
from server.http.call import call_of
from server.http.errors import BodyTooLarge, InvalidRequest, MediaNotInstalled, OriginNotAllowed, WrongContentType, clip

FORM = "multipart/form-data"
CHARSETS = (
    "utf-8",
    "us-ascii",
    "iso-8859-1",
)  # of names and values of fields; Python's other codecs may raise anything
MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
FORM_EXTRA_BYTES = 64 * 1024  # of a form around its file


@dataclass(frozen=True, slots=True)
class FormUpload:
    """Uploaded file and the other fields of a form. `values`: all values of each field name, in order."""

    filename: str
    num_bytes: int
    content: BinaryIO
    values: Mapping[str, Sequence[str]]

    @property
    def fields(self) -> Mapping[str, str]:
        """Return the last value of each field name."""
        return {name: found[-1] for name, found in self.values.items()}


def check_origin(http: Request, config: ServerConfig) -> None:
    """Check the Origin header of a form upload. Browsers send forms without a CORS preflight, so any page could post a form to a
    local server. Raises OriginNotAllowed."""
    origin = http.headers.get("origin")
    if origin is None or origin in config.cors_origin or "*" in config.cors_origin:
        return
    if origin.partition("://")[2] != http.headers.get("host"):
        raise OriginNotAllowed(origin)


@contextlib.asynccontextmanager
async def read_upload(http: Request, config: ServerConfig, limit_bytes: int) -> AsyncIterator[FormUpload]:
    """Yield the upload. Its file is deleted at the end of the `async with` block. Raises ApiError; for a file above
    `limit_bytes`, as soon as the limit is exceeded."""
    check_origin(http, config)
    given = http.headers.get("content-type")
    if (given or "").partition(";")[0].strip().lower() != FORM:
        raise WrongContentType(given, FORM)
    try:
        from python_multipart.multipart import parse_options_header  # what the form's parser reads this header with
    except ImportError:
        raise MediaNotInstalled("python-multipart is not installed: pip install 'oneloop[media]'", "file") from None

    charset = parse_options_header(given)[1].get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in CHARSETS:
        raise InvalidRequest(f"the form's charset {clip(charset)!r} is not supported: use one of {', '.join(CHARSETS)}")
    announced = http.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes + FORM_EXTRA_BYTES:
        raise BodyTooLarge(limit_bytes)
    parser = MultiPartParser(
        http.headers,
        _bounded(http, limit_bytes),
        max_files=1,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("the form has no file", param="file")
        num_bytes = file.size or 0
        if num_bytes > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        values: dict[str, list[str]] = {}
        for name, value in form.multi_items():
            if isinstance(value, str):
                values.setdefault(name, []).append(value)
        yield FormUpload(file.filename or "upload", num_bytes, file.file, values)
    finally:
        await form.close()


async def _bounded(http: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of the body, without keeping them in memory. Raises BodyTooLarge above `limit_bytes`."""
    incoming = call_of(http).body
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > limit_bytes + FORM_EXTRA_BYTES:
            raise BodyTooLarge(limit_bytes)
        if incoming is not None:
            incoming.release()
        yield chunk
    if incoming is not None:
        incoming.check()
