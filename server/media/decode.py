"""Decoder of media: converts a file's bytes, or an array or image from a Python program, to the input of a processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from server.http.errors import InvalidMedia
from server.http.offload import Pieces
from server.media import images, sound, video
from server.media.limits import MediaLimits
from server.media.part import MediaPart, Modality


class DecodedItem(NamedTuple):
    """Decoded item. `value`: a Pillow image, samples [N] or frames [T, H, W, 3]. `options`: processor options that describe
    `value`. `sound`: samples [N] of a video's audio track, or None."""

    value: Any
    options: Mapping[str, Any] = {}
    sound: Any = None


def decode(
    part: MediaPart, value: Any, limits: MediaLimits, io_kwargs: Mapping[str, Any], sampling_rate: int, *, by_time: bool = False,
    with_sound: bool = False,
) -> Pieces[DecodedItem]:  # fmt: skip
    """Decode a media part, yielding between short pieces of work. Return a DecodedItem. Raises InvalidMedia.

    `value`: the file's bytes, or an array or image. `by_time`: sample a video's frames at 2 frames/s by default, and pass this
    rate to the processor. `with_sound`: also decode the audio track of a video file, if the file has one."""
    where = part.where
    if part.modality == "image":
        return DecodedItem(_image(value, where, limits, io_kwargs))
    if part.modality == "audio":
        seconds = limits.max_seconds
        if isinstance(value, bytes):
            samples = yield from sound.read_sound(value, where, rate=sampling_rate, max_seconds=seconds)
        else:
            samples = sound.given_samples(value, where, rate=sampling_rate, max_seconds=seconds)
        return DecodedItem(samples, {"sampling_rate": sampling_rate})
    if not isinstance(value, bytes):
        found = video.given_frames(value, where, max_frames=limits.max_frames)
        images.check_size((found.frames.shape[2], found.frames.shape[1]), limits.max_pixels, where)
        return _video(found)
    if not by_time:
        return _video((yield from video.read_video(value, where, limits, io_kwargs)))
    found = yield from video.read_video(value, where, limits, io_kwargs or {"fps": video.GIVEN_FPS})
    shown = _video(found)
    options = {**shown.options, "fps": found.shown_fps}
    if not with_sound or not sound.has_sound(value, where):
        return DecodedItem(shown.value, options)
    heard = yield from sound.read_sound(value, where, rate=sampling_rate, max_seconds=limits.max_seconds)
    return DecodedItem(shown.value, options, heard)


def _video(found: video.Video) -> DecodedItem:
    return DecodedItem(found.frames, {"video_metadata": [found.metadata], "do_sample_frames": False})


def sample(modality: Modality, sampling_rate: int) -> DecodedItem:
    """Return a small synthetic image, audio or video item to test a processor. `sampling_rate`: of audio, in Hz."""
    if modality == "audio":
        times = np.arange(sampling_rate, dtype=np.float32) / sampling_rate
        return DecodedItem(np.sin(2764.6 * times), {"sampling_rate": sampling_rate})  # 440 Hz
    row = np.linspace(0, 255, 256).astype(np.uint8)
    picture = np.broadcast_to(row[None, :, None], (256, 256, 3))
    if modality == "image":
        return DecodedItem(images.of_array(picture, "sample"))
    return _video(video.given_frames(np.stack([picture] * 8), "sample", max_frames=8))


def fingerprint(value: Any, where: str) -> Iterator[bytes]:
    """Yield bytes to hash that identify `value`. Raises InvalidMedia if `value` is not a file, image or array."""
    if isinstance(value, bytes):
        yield b"file:"
        yield value
    elif isinstance(value, np.ndarray):
        yield f"array:{value.dtype}:{value.shape}:".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif hasattr(value, "tobytes") and hasattr(value, "mode"):
        yield f"picture:{value.mode}:{value.size}:{value.info.get('transparency')}:{_turned(value)}:".encode()
        yield value.tobytes()
    elif isinstance(value, tuple) and len(value) == 2:  # samples and their rate
        yield f"rate:{float(value[1])}:".encode()
        yield from fingerprint(value[0], where)
    else:
        raise InvalidMedia(f"{type(value).__name__} is not a file, image or array", where)


def _turned(picture: Any) -> Any:
    return picture.getexif().get(0x0112)  # orientation


def _image(value: Any, where: str, limits: MediaLimits, io_kwargs: Mapping[str, Any]) -> Any:
    background = io_kwargs.get("rgba_background_color", images.WHITE)
    if isinstance(value, bytes):
        return images.read_image(value, where, max_pixels=limits.max_pixels, background=background)
    if isinstance(value, np.ndarray):
        value = images.of_array(value, where)
    images.check_size(value.size, limits.max_pixels, where)
    return images.rgb(value, where, background)
