"""Files attached to a question. Images, audio and video become message parts with OpenAI's names, and text files become text."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Part = Mapping[str, Any]
MAX_TEXT_BYTES = 1 << 20
_FENCE = "```"


def part_of(name: str) -> Part:
    """Return the content of file `name` as a part of a message. Raises ValueError or OSError for an unusable file."""
    path = Path(name).expanduser()
    content = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or ""
    modality = kind.partition("/")[0]
    if modality in ("image", "audio", "video"):
        url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}
    if kind == "application/pdf":
        raise ValueError("PDF is not supported: convert it to text or images, for example with pdftotext")
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"{len(content):,} bytes of text exceed the maximum of {MAX_TEXT_BYTES:,}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("it is neither text in UTF-8 nor an image, audio or video file") from None
    fence = _FENCE
    while fence in text:
        fence += "`"
    return {"type": "text", "text": f"{path.name}:\n{fence}\n{text}\n{fence}"}
