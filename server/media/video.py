"""Video decoder: converts a file to arrays of frames, sampled evenly over the whole video, with their times.

Size and length are checked in the header; the size of each sampled frame is checked again. All frames are decoded, since later
frames depend on earlier ones. Frames that are not sampled are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from server.http.errors import InvalidMedia
from server.http.offload import Pieces
from server.media.images import check_size
from server.media.limits import MediaLimits
from server.media.sound import check_codec, check_seconds, opened, too_long

NUM_FRAMES: Final = 32  # of a video that are shown, where nobody says otherwise: vLLM's number
MAX_FRAMES_A_SECOND: Final = 240
PIECE_FRAMES: Final = 8
GIVEN_FPS: Final = 2.0  # of frames that say nothing of when they are seen

Frames = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Video(NamedTuple):
    """Sampled frames of a video. `frames`: uint8 [T, H, W, 3]. `indices`: the frames' indices in the video. `num_frames` and
    `fps`: frame count and rate of the whole video. `wanted_fps`: the requested sampling rate in frames/s, or None."""

    frames: Frames
    indices: list[int]
    fps: float
    num_frames: int
    wanted_fps: float | None = None

    @property
    def shown_fps(self) -> float:
        """Sampled frames per second of video."""
        return self.wanted_fps or len(self.indices) * self.fps / self.num_frames

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the video, as transformers' processors expect them."""
        height, width = self.frames.shape[1:3]
        return {
            "total_num_frames": self.num_frames, "fps": self.fps, "duration": self.num_frames / self.fps,
            "frames_indices": self.indices, "height": height, "width": width,
        }  # fmt: skip


def read_video(data: bytes, where: str, limits: MediaLimits, io_kwargs: Mapping[str, Any]) -> Pieces[Video]:
    """Sample frames of a video file. `io_kwargs`: `num_frames` to sample, or `fps`, the sampling rate. Raises InvalidMedia."""
    num_frames, fps = yield from _measured(data, where, limits.max_pixels, limits.max_seconds)
    wanted = chosen(num_frames, fps, limits.max_frames, io_kwargs)
    found: list[Frames] = []
    indices = [*wanted]
    with opened(data, where) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if wanted and index == wanted[0]:
                wanted.pop(0)
                check_size((frame.width, frame.height), limits.max_pixels, where)
                found.append(np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8))
            if not wanted:
                break
            if index % PIECE_FRAMES == PIECE_FRAMES - 1:
                yield
    if not found or len({frame.shape for frame in found}) > 1:
        raise InvalidMedia("its frames are of different sizes" if found else "it contains no frames", where)
    wanted_fps = io_kwargs.get("fps")
    if wanted_fps is not None and len(indices) != _at_rate(num_frames, fps, wanted_fps):
        wanted_fps = None
    return Video(np.stack(found), indices[: len(found)], fps, num_frames, wanted_fps)


def _measured(data: bytes, where: str, max_pixels: int, max_seconds: float) -> Pieces[tuple[int, float]]:
    with opened(data, where) as container:
        if not container.streams.video:
            raise InvalidMedia("it contains no frames", where)
        stream = container.streams.video[0]
        check_codec(stream, where)
        check_size((stream.width, stream.height), max_pixels, where)
        seconds = None if container.duration is None else container.duration / 1_000_000
        check_seconds(seconds, max_seconds, where)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        if not 0 < fps <= MAX_FRAMES_A_SECOND:
            raise InvalidMedia(f"its frame rate {fps:g} is invalid", where)
        num_frames = 0
        for packet in container.demux(stream):
            num_frames += packet.size > 0
            if num_frames > max_seconds * fps + 1:
                raise too_long(max_seconds, where)
            if num_frames % 4096 == 4095:
                yield
    if not num_frames:
        raise InvalidMedia("it contains no frames", where)
    return num_frames, fps


def chosen(num_frames: int, fps: float, max_frames: int, io_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the indices of the frames to sample: evenly spaced from the first frame to the last."""
    wanted = io_kwargs.get("num_frames", NUM_FRAMES)
    if "fps" in io_kwargs:
        at_rate = _at_rate(num_frames, fps, io_kwargs["fps"])
        wanted = min(at_rate, io_kwargs.get("num_frames", at_rate))
    count = max(1, min(wanted, max_frames, num_frames))
    return [int(index) for index in np.linspace(0, num_frames - 1, count).round()]


def _at_rate(num_frames: int, fps: float, wanted_fps: float) -> int:
    return max(1, round(num_frames / fps * wanted_fps))


def given_frames(frames: Any, where: str, *, max_frames: int) -> Video:
    """Convert a Python program's frames, a uint8 array [T, H, W, 3], to a Video. All frames are used. Raises InvalidMedia."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not len(frames):
        raise InvalidMedia(f"an array of {frames.dtype} {list(frames.shape)} is no video: uint8 [T, H, W, 3] is", where)
    if len(frames) > max_frames:
        raise InvalidMedia(f"it has {len(frames)} frames; at most {max_frames} are shown", where)
    return Video(frames, [*range(len(frames))], GIVEN_FPS, len(frames))
