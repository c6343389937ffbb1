"""Sounds and videos that tests make: sine waves, and frames whose brightness tells which they are."""

from __future__ import annotations

import io
import wave

import av
import numpy as np


def sine(seconds: float = 0.5, rate: int = 16_000, pitch: float = 440.0) -> np.ndarray:
    """[N] float32."""
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """`samples` [N] or [channels, N], in 16 bits."""
    channels = np.atleast_2d(samples)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(len(channels))
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((channels.T * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def encoded(samples: np.ndarray, format: str, codec: str, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = rate
        for each in (frame, None):
            out.mux(stream.encode(each))
    return file.getvalue()


def video(
    num_frames: int, *, fps: int = 8, size: tuple[int, int] = (32, 16), format: str = "mp4", codec: str = "mpeg4"
) -> bytes:
    """Frame number n is 8 n bright."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream = out.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 10_000_000
        for number in range(num_frames):
            picture = np.full((size[1], size[0], 3), min(255, 8 * number), dtype=np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def video_with_sound(num_frames: int, samples: np.ndarray, *, fps: int = 8, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        pictures, heard = out.add_stream("mpeg4", rate=fps), out.add_stream("aac", rate=rate, layout="mono")
        pictures.width, pictures.height, pictures.pix_fmt = 32, 16, "yuv420p"
        for number in range(num_frames):
            picture = np.full((16, 32, 3), min(255, 8 * number), dtype=np.uint8)
            out.mux(pictures.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(pictures.encode(None))
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        for each in (frame, None):
            out.mux(heard.encode(each))
    return file.getvalue()
