"""Media in prompts of `LLM`: Pillow images, arrays, bytes, paths and URLs.

In messages, media are parts as in the HTTP API, or {"type": "image", "image": …} ("audio", "video"; also vLLM's "image_pil"). A
prompt has vLLM's `multi_modal_data`: by modality, one item or a list. Paths are read as files. Embeddings are arrays or tensors
under "image_embeds" or "audio_embeds". In `multi_modal_data`, a tensor can replace an image, as in vLLM."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from msgspec.structs import replace

from server.config.option import did_you_mean
from server.generate.request import ChatMessage
from server.media.embeds import stored
from server.media.limits import MODALITIES
from server.media.part import Given, MediaPart, Modality, Url

_KINDS: Final[Mapping[str, Modality]] = {"image": "image", "image_pil": "image", "audio": "audio", "video": "video"}
_EMBEDS: Final = ("image_embeds", "audio_embeds")
_SCHEMES: Final = ("data:", "http:", "https:")
_SHOWN: Final = "data:,"  # stands in the wire's form of a message for what it has no words for


def beside_prompt(data: Mapping[str, Any]) -> list[MediaPart]:
    """Return the media parts for `data`, the `multi_modal_data` of a prompt. Raises ValueError."""
    found: list[MediaPart] = []
    for name, value in data.items():
        if name not in MODALITIES:
            raise ValueError(f"multi_modal_data has no key {name!r}{did_you_mean(name, MODALITIES)}")
        modality = cast("Modality", name)
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            where = f"multi_modal_data.{name}" + (f"[{number}]" if isinstance(value, list) else "")
            if (embeds := _embeds(one, f"{name}_embeds")) is not None:
                source = Given(stored(embeds, where))
                found.append(MediaPart(modality, source, where, f"{name}_embeds", is_embeds=True))
                continue
            found.append(MediaPart(modality, source_of(one, where), where, name))
    return found


def prompt_embeds(value: Any) -> str:
    """Return embeddings in the form of /v1/completions: a file as base64 text. Raises ValueError."""
    return _base64(stored({"prompt_embeds": value}, "prompt_embeds"))


def _embeds(value: Any, name: str) -> Mapping[str, Any] | None:
    """Return arrays by name if `value` contains precomputed encoder outputs, else None. `name`: name for a bare tensor."""
    if isinstance(value, Mapping) and name in value:
        return cast("Mapping[str, Any]", value)
    is_tensor = hasattr(value, "is_floating_point") and value.is_floating_point() and value.ndim in (2, 3)
    return {name: value} if is_tensor and value.shape[-3:-2] in ((), (1,)) else None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def source_of(value: Any, where: str) -> Url | Given:
    """Return the source of a media value: its URL, or its content. A file is read. Raises ValueError if it cannot be read.
    `where`: name of the value in errors."""
    if isinstance(value, str) and value.startswith(_SCHEMES):
        return Url(value)
    if not isinstance(value, str | os.PathLike):
        return Given(value)
    try:
        return Given(Path(str(value).removeprefix("file://")).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {value} cannot be read: {error}") from None


class Objects:
    """Store of Python media objects while the wire decoder reads the messages. The decoder accepts JSON only."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Modality, Url | Given, str]] = {}

    def taken(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Store the media objects of `messages`. Return the messages with JSON placeholders for the objects. Raises ValueError."""
        return [self._message(message, f"messages[{number}]") for number, message in enumerate(messages)]

    def put_back(self, messages: Sequence[ChatMessage]) -> None:
        """Replace the placeholders in the decoded `messages` by the stored objects."""
        for message in messages:
            if isinstance(message.content, list):
                message.content = [
                    self._part_back(part) if isinstance(part, MediaPart) else part for part in message.content
                ]

    def _message(self, message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        parts = [self._part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        return {**message, "content": parts}

    def _part(self, part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _EMBEDS and not isinstance(part.get(kind), str):
            arrays = {name: value for name, value in part.items() if name != "type"}
            return {"type": kind, kind: _base64(stored(arrays, where))}
        if not isinstance(kind, str) or kind not in _KINDS or kind not in part:
            return part
        if unknown := [name for name in part if name not in ("type", kind)]:
            raise ValueError(f"{where} has no key {unknown[0]!r}; allowed: type and {kind}")
        self._sources[f"{where}.image_url.url"] = (_KINDS[kind], source_of(part[kind], where), f"{where}.{kind}")
        return {"type": "image_url", "image_url": {"url": _SHOWN}}

    def _part_back(self, part: MediaPart) -> MediaPart:
        if part.where not in self._sources:
            return part
        modality, source, where = self._sources[part.where]
        return replace(part, modality=modality, source=source, where=where, kind=modality)
