"""Content parts of a chat that are no text: OpenAI's, and those of vLLM beside them (audio_url, video_url)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from server.http.errors import InvalidRequest, UnsupportedParameter
from server.media.part import Base64, MediaPart, Modality, Url, file_part


class ImageUrl(Struct, kw_only=True, forbid_unknown_fields=True):
    """`detail`: how closely OpenAI's models look; how closely this one does, its processor decides."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str
    cache_control: Any = None


class InputImagePart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"):
    """A picture as the Responses API spells it."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(Struct, kw_only=True, forbid_unknown_fields=True):
    """`format`: what it is; the file says so itself."""

    data: str
    format: str | None = None


class InputAudioPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"):
    input_audio: InputAudio
    cache_control: Any = None


class MediaUrl(Struct, kw_only=True, forbid_unknown_fields=True):
    url: str


class AudioPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl | str
    cache_control: Any = None


class VideoPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="video_url"):
    video_url: MediaUrl | str
    cache_control: Any = None


class File(Struct, kw_only=True, forbid_unknown_fields=True):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="file"):
    file: File
    cache_control: Any = None


class ImageEmbedsPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="image_embeds"):
    """Base64 of a safetensors file."""

    image_embeds: str


class AudioEmbedsPart(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="audio_embeds"):
    audio_embeds: str


AnyMediaPart = (
    ImagePart | InputImagePart | InputAudioPart | AudioPart | VideoPart | FilePart | ImageEmbedsPart | AudioEmbedsPart
)


def media_part(part: AnyMediaPart, where: str) -> MediaPart:
    """`where`: the part's own path. Raises InvalidRequest for what is no picture, sound or video, or is not there."""
    match part:
        case ImagePart(image_url=given):
            return _of_url("image", given, f"{where}.image_url", "image_url")
        case AudioPart(audio_url=given):
            return _of_url("audio", given, f"{where}.audio_url", "audio_url")
        case VideoPart(video_url=given):
            return _of_url("video", given, f"{where}.video_url", "video_url")
        case InputAudioPart(input_audio=given):
            return MediaPart("audio", Base64(given.data), f"{where}.input_audio.data", "input_audio")
        case ImageEmbedsPart(image_embeds=text):
            return MediaPart("image", Base64(text), f"{where}.image_embeds", "image_embeds", is_embeds=True)
        case AudioEmbedsPart(audio_embeds=text):
            return MediaPart("audio", Base64(text), f"{where}.audio_embeds", "audio_embeds", is_embeds=True)
        case InputImagePart():
            return input_image(part.image_url, part.file_id, where)
        case FilePart(file=given):
            return input_file(given.file_data, given.file_id, f"{where}.file", "file")


def input_image(url: str | None, file_id: str | None, where: str) -> MediaPart:
    """The picture that a part of the Responses API names. Raises InvalidRequest."""
    if file_id is not None:
        raise UnsupportedParameter(f"{where}.file_id", instead="image_url")
    if url is None:
        raise InvalidRequest(f"Missing required parameter: {where}.image_url", param=f"{where}.image_url")
    return MediaPart("image", Url(url), f"{where}.image_url", "input_image")


def input_file(data: str | None, file_id: str | None, where: str, kind: str) -> MediaPart:
    """A file that is sent along. Raises InvalidRequest."""
    if file_id is not None:
        raise UnsupportedParameter(f"{where}.file_id", instead="file_data")
    if data is None:
        raise InvalidRequest(f"Missing required parameter: {where}.file_data", param=f"{where}.file_data")
    return file_part(data, f"{where}.file_data", kind)


def _of_url(modality: Modality, given: ImageUrl | MediaUrl | str, where: str, kind: str) -> MediaPart:
    if isinstance(given, str):
        return MediaPart(modality, Url(given), where, kind)
    return MediaPart(modality, Url(given.url), f"{where}.url", kind)
