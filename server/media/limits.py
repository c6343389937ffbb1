"""Limits of a request's media, and parsers of media options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from server.media.part import Modality

UNBOUNDED_GB: Final = 16_384.0  # of --max-media-memory-gb, where one program asks for all, and some of it at a time
MODALITIES: Final[Sequence[Modality]] = ("image", "audio", "video")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of the media in one prompt. `max_items`: maximum number of items, by modality. `max_bytes`: maximum file size.
    `max_pixels`: maximum size of an image or frame. `max_seconds`: maximum length of audio or video. `max_frames`: maximum
    number of frames that the model receives from one video."""

    max_items: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(MODALITIES, 16))
    max_bytes: int = 64 * 1024**2
    max_pixels: int = 64_000_000
    max_seconds: float = 600.0
    max_frames: int = 128


def read_counts(text: str) -> dict[str, int]:
    """Parse --limit-mm-per-prompt: a JSON object of item limits in vLLM's format, '{"image": 4, "video": 0}'. Raises ValueError."""
    found = read_object(text)
    for name, count in found.items():
        if name not in MODALITIES:
            raise ValueError(f"{name!r} is not one of {', '.join(MODALITIES)}")
        if type(count) is not int or count < 0:
            raise ValueError(f"{name}: {count!r} is not a count")
    return found


def read_io_kwargs(text: str) -> Mapping[str, Mapping[str, Any]]:
    """Parse --media-io-kwargs: decoder options in vLLM's format, '{"video": {"num_frames": 40}}'. Raises ValueError."""
    found = read_object(text)
    for name, options in found.items():
        known = IO_KWARGS.get(name)
        if known is None:
            raise ValueError(f"{name!r} is not one of {', '.join(IO_KWARGS)}")
        if not isinstance(options, dict):
            raise ValueError(f"{name}: it is not an object")
        for key, value in options.items():
            if key not in known:
                raise ValueError(f"{name}.{key} is not one of {', '.join(known) or 'none'}")
            known[key](f"{name}.{key}", value)
    return found


def check_processor_kwargs(given: Mapping[str, Any]) -> None:
    """Raise ValueError if a request's processor options contain an option or value that could exceed the operator's limits."""
    for name, value in given.items():
        check = PROCESSOR_KWARGS.get(name)
        if check is None:
            raise ValueError(
                f"{name} is not one of {', '.join(PROCESSOR_KWARGS)}; the operator can set others with --mm-processor-kwargs"
            )
        check(name, value)


def read_object(text: str) -> dict[str, Any]:
    """Parse the JSON object in `text` to a dict. Raises ValueError if `text` is invalid or not an object."""
    try:
        found = json.loads(text)
    except ValueError:
        raise ValueError(f"{text!r} is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return found


def _colour(name: str, value: Any) -> None:
    if not (
        isinstance(value, Sequence) and len(value) == 3 and all(type(one) is int and 0 <= one < 256 for one in value)
    ):
        raise ValueError(f"{name}: {value!r} is not three numbers from 0 to 255")


def _frames(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: {value!r} is not a count of at least 1")


def _rate(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1000:
        raise ValueError(f"{name}: {value!r} is not a number of frames a second")


def _switch(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise ValueError(f"{name}: {value!r} is not true or false")


def _up_to(most: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name}: {value!r} is not a count from 1 to {most}")

    return check


USE_SOUND: Final = "use_audio_in_video"  # vLLM's and transformers' name: a video is heard, too
MAX_KWARGS_PIXELS: Final = 1 << 24  # a small picture may be made so large: 200 MB of numbers
MAX_KWARGS_TILES: Final = 64
# By name, what refuses a value of a request: pixels of pictures that know several sizes, tiles of those that are cut.
PROCESSOR_KWARGS: Final = MappingProxyType({
    **dict.fromkeys(("min_pixels", "max_pixels"), _up_to(MAX_KWARGS_PIXELS)),
    **dict.fromkeys(("min_patches", "max_patches", "max_image_tiles", "pan_and_scan_max_num_crops"), _up_to(MAX_KWARGS_TILES)),
    **dict.fromkeys(("do_pan_and_scan", "do_image_splitting", "crop_to_patches", USE_SOUND), _switch),
})  # fmt: skip
# By modality and name, what refuses a value: vLLM's names.
IO_KWARGS: Final = MappingProxyType({
    "image": {"rgba_background_color": _colour}, "audio": {}, "video": {"num_frames": _frames, "fps": _rate},
})  # fmt: skip
