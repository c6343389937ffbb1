"""Audio decoder: converts a file to mono samples at the processor's rate, with FFmpeg's libraries (PyAV).

The file's first bytes select the demuxer. Demuxers that open further files or hosts, such as playlists, are never used. The
declared duration is checked first; decoding also stops at the limit, since the declared duration may be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from server.http.errors import InvalidMedia, MediaNotInstalled, clip
from server.http.offload import Pieces

if TYPE_CHECKING:
    from av import AudioFrame
    from av.container import InputContainer

Samples = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
MAX_RATE: Final = 768_000  # samples a second: what says more is nothing that anybody heard
PIECE_S: Final = 5.0  # of sound, decoded in one go

# First bytes, from where, and the demuxer that reads such a file.
_SIGNATURES: Final[tuple[tuple[bytes, int, str], ...]] = (
    (b"WAVE", 8, "wav"), (b"fLaC", 0, "flac"), (b"OggS", 0, "ogg"), (b"ID3", 0, "mp3"), (b"ftyp", 4, "mov"),
    (b"\x1aE\xdf\xa3", 0, "matroska"), (b"AVI ", 8, "avi"), (b"#!AMR", 0, "amr"),
)  # fmt: skip


def demuxer_of(data: bytes) -> str | None:
    """Return the name of FFmpeg's demuxer for the signature at the start of `data`, or None if the signature is unknown."""
    for signature, start, name in _SIGNATURES:
        if data[start : start + len(signature)] == signature:
            return name
    if len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:  # a frame of MPEG audio; AAC has layer 0
        return "aac" if data[1] & 0x06 == 0 else "mp3"
    return "mpegts" if data[:1] == b"\x47" and data[188:189] == b"\x47" else None


@contextmanager
def opened(data: bytes, where: str) -> Iterator[InputContainer]:
    """Open an audio or video file as a PyAV container. FFmpeg errors are converted to InvalidMedia. Raises MediaNotInstalled."""
    try:
        import av
    except ImportError:
        raise MediaNotInstalled("PyAV is not installed: pip install 'oneloop[media]'", where) from None
    demuxer = demuxer_of(data)
    if demuxer is None:
        raise InvalidMedia("it is not readable audio or video. Supported: WAV, FLAC, Ogg, MP3, MP4, WebM", where)
    try:
        with av.open(BytesIO(data), "r", format=demuxer, metadata_errors="replace") as container:
            yield container
    except (av.FFmpegError, EOFError, ValueError) as error:  # the last of frames that change on the way
        raise InvalidMedia(f"the file is broken: {clip(getattr(error, 'strerror', None) or error)}", where) from None


def read_sound(data: bytes, where: str, *, rate: int, max_seconds: float) -> Pieces[Samples]:
    """Decode an audio file to mono samples, float32 [N] from -1 to 1, at `rate` Hz. Raises InvalidMedia for the field `where`."""
    with opened(data, where) as container:
        if not container.streams.audio:
            raise InvalidMedia("it contains no audio", where)
        stream = container.streams.audio[0]
        check_codec(stream, where)
        check_seconds(_seconds(container, stream), max_seconds, where)
        if not 0 < (stream.rate or 0) <= MAX_RATE:
            raise InvalidMedia(f"its sample rate {stream.rate} is invalid", where)
        import av

        resampler = av.AudioResampler(
            format="flt", rate=rate
        )  # channels stay, and are mixed here: FFmpeg makes two louder
        pieces: list[Samples] = []
        num_samples, num_in_piece = 0, 0
        for frame in container.decode(stream):
            frame.pts = None  # gaps and jumps of a broken clock are no silence
            new = [_mixed(one) for one in resampler.resample(frame)]
            pieces += new
            num_samples += sum(map(len, new))
            if num_samples > max_seconds * rate:
                raise too_long(max_seconds, where)
            if num_samples > num_in_piece + PIECE_S * rate:
                num_in_piece = num_samples
                yield
        pieces += [_mixed(one) for one in resampler.resample(None)]
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not len(samples):
        raise InvalidMedia("it contains no audio", where)
    return samples


def has_sound(data: bytes, where: str) -> bool:
    """Return True if the file has an audio stream. Raises InvalidMedia for the field `where`."""
    with opened(data, where) as container:
        return bool(container.streams.audio)


def given_samples(value: Any, where: str, *, rate: int, max_seconds: float) -> Samples:
    """Convert a program's audio, an array [N] or [channels, N] or a pair (array, sampling rate), to float32 [N] at `rate` Hz.
    Raises InvalidMedia for the field `where`."""
    array, given_rate = value if isinstance(value, tuple) else (value, rate)
    samples = np.asarray(array)
    if samples.ndim == 2:
        samples = samples.mean(axis=0 if samples.shape[0] < samples.shape[1] else 1)
    if samples.ndim != 1 or not len(samples) or samples.dtype.kind != "f" or not 0 < given_rate <= MAX_RATE:
        raise InvalidMedia(
            f"an array of {samples.dtype} {list(samples.shape)} is not audio: expected numbers from -1 to 1, [N] or [channels, N]",
            where,
        )
    check_seconds(len(samples) / given_rate, max_seconds, where)
    if int(given_rate) == rate:
        return np.ascontiguousarray(samples, dtype=np.float32)
    try:
        import av
    except ImportError:
        raise MediaNotInstalled("PyAV is not installed: pip install 'oneloop[media]'", where) from None
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(samples[None], dtype=np.float32), format="flt", layout="mono"
    )
    frame.sample_rate = int(given_rate)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    return np.concatenate([one.to_ndarray()[0] for each in (frame, None) for one in resampler.resample(each)])


def _mixed(frame: AudioFrame) -> Samples:
    samples = frame.to_ndarray().reshape(-1, frame.layout.nb_channels)
    return np.asarray(samples.mean(axis=1), dtype=np.float32)


def check_codec(stream: Any, where: str) -> None:
    """Raise InvalidMedia for the field `where` if no decoder exists for `stream`. Most attributes of such a stream are unusable."""
    if stream.codec_context is None:
        raise InvalidMedia("its codec is not supported", where)


def check_seconds(seconds: float | None, max_seconds: float, where: str) -> None:
    """Raise InvalidMedia for the field `where` if `seconds` exceeds `max_seconds`. None, an unknown duration, is accepted."""
    if seconds is not None and seconds > max_seconds:
        raise too_long(max_seconds, where)


def too_long(max_seconds: float, where: str) -> InvalidMedia:
    return InvalidMedia(f"it is longer than {max_seconds:g} s", where)


def _seconds(container: InputContainer, stream: Any) -> float | None:
    if container.duration is not None:
        return container.duration / 1_000_000
    return None if stream.duration is None else float(stream.duration * stream.time_base)
