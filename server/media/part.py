"""Media part: an image, audio or video in a request, with the source of its bytes and its field name for error messages.

Each API converts its wire types to MediaPart. The bytes are not yet fetched or decoded."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from msgspec import Struct

from server.http.errors import InvalidMedia, clip

Modality = Literal["image", "audio", "video"]
_MIME: Final = re.compile(r"data:([a-z]+)/([a-z0-9.+-]+)[;,]", re.IGNORECASE)


class Url(Struct, frozen=True):
    """URL of a file: data:, http:, https: or file:."""

    url: str


class Base64(Struct, frozen=True):
    """Bytes of a file, base64-encoded."""

    text: str


class Given(Struct, frozen=True):
    """Value from a Python program: the bytes of a file, a Pillow image, arrays, or a pair (samples, sampling rate)."""

    value: Any


class MediaPart(Struct, frozen=True):
    """Image, audio or video in a request. `where`: path of the field in the request, for errors. `kind`: name of the content
    type in the client's API, such as "image_url". `is_embeds`: the file contains encoder outputs (see `embeds.py`)."""

    modality: Modality
    source: Url | Base64 | Given
    where: str
    kind: str
    is_embeds: bool = False


def file_part(url: str, where: str, kind: str) -> MediaPart:
    """Return the media part for the file in the data URL `url`. The MIME type selects the modality. Raises InvalidMedia."""
    found = _MIME.match(url)
    if found is None:
        raise InvalidMedia("a file must be a data URL with its type, such as data:image/png;base64,…", where)
    modality = found[1].lower()
    if modality not in ("image", "audio", "video"):
        raise InvalidMedia(
            f"files of type {clip(f'{modality}/{found[2]}')} are not supported. Send an image, audio or video", where
        )
    return MediaPart(modality, Url(url), where, kind)  # type: ignore[arg-type] # one of the three
