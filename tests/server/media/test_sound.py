"""Sounds and videos of files: what a model hears and sees of them, and what hostile files get."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from server.http.errors import InvalidMedia
from server.http.offload import to_the_end
from server.media.limits import MediaLimits
from server.media.sound import demuxer_of, given_samples, read_sound
from server.media.video import NUM_FRAMES, chosen, given_frames, read_video
from tests.server.media.pictures import drawn, stored
from tests.server.media.sounds import encoded, sine, video, wav

RATE = 16_000
LIMITS = MediaLimits(max_pixels=10_000, max_seconds=10.0, max_frames=64)


def heard(data: bytes, max_seconds: float = 10.0) -> np.ndarray:
    return to_the_end(read_sound(data, "where", rate=RATE, max_seconds=max_seconds))


def seen(data: bytes, limits: MediaLimits = LIMITS, **io_kwargs):
    return to_the_end(read_video(data, "where", limits, io_kwargs))


def pitch(samples: np.ndarray) -> float:
    return float(np.argmax(np.abs(np.fft.rfft(samples))) * RATE / len(samples))


def test_a_wav_of_the_right_rate_is_its_own_numbers():
    samples = sine()
    assert np.allclose(heard(wav(samples)), np.round(samples * 32767) / 32768, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_rates_are_the_same_sound(rate):
    found = heard(wav(sine(0.5, rate), rate))
    assert found.dtype == np.float32
    assert abs(len(found) - RATE // 2) <= 2
    assert abs(pitch(found) - 440) <= 2 * RATE / len(found)


def test_channels_become_one():
    left, right = sine(), sine(pitch=880.0)
    assert np.allclose(heard(wav(np.stack([left, right]))), (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize(("format", "codec"), [
    ("flac", "flac"), ("ogg", "libopus"), ("mp3", "libmp3lame"), ("mp4", "aac"), ("matroska", "pcm_s16le"),
    ("webm", "libopus"), ("adts", "aac"),
])  # fmt: skip
def test_formats_that_people_send(format, codec):
    rate = 48_000 if codec == "libopus" else RATE
    samples = sine(1.0, rate)
    data = encoded(samples, format, codec, rate)
    found = heard(data)
    assert abs(len(found) - RATE) < 0.2 * RATE  # encoders begin and end with some silence
    assert abs(pitch(found) - 440) <= 2 * RATE / len(found)


def long_wav(seconds: int) -> bytes:
    """A head that says so much, and nothing behind it."""
    size = seconds * RATE * 2
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVE", b"fmt ", 16, 1, 1, RATE, RATE * 2, 2, 16, b"data", size
    )
    return head + bytes(RATE)


HOSTILE = {
    "text": (b"hello, I am a sound", "not readable audio or video"),
    "nothing much": (b"\0", "not readable audio or video"),
    "a playlist, which opens other files": (
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        "not readable audio or video",
    ),
    "a script of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "not readable audio or video"),
    "a session description": (b"v=0\nc=IN IP4 10.0.0.1\nm=audio 5004 RTP/AVP 0\n", "not readable audio or video"),
    "a picture": (stored(drawn()), "not readable audio or video"),
    "a head alone": (wav(sine())[:20], "broken"),
    "a WAV of nothing": (wav(np.zeros(0)), "no audio|not readable"),
    "zeros behind a mark": (b"OggS" + bytes(500), "broken|no audio|not readable"),
    "an MP4 cut off": (video(8)[:200], "broken|no audio|not readable"),
    "pictures alone": (video(8), "no audio"),
    "too long": (wav(sine(11.0)), "longer than 10 s"),
    "odd sample rate": (wav(sine(), 10_000_000), "sample rate|longer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_reason(name):
    data, reason = HOSTILE[name]
    with pytest.raises(InvalidMedia, match=reason) as caught:
        heard(data)
    assert caught.value.param == "where"


def test_what_is_too_long_by_its_head_is_not_decoded():
    work = read_sound(wav(sine(11.0)), "where", rate=RATE, max_seconds=10.0)
    with pytest.raises(InvalidMedia, match="longer"):
        next(work)  # before the first piece


def test_a_head_that_says_too_little_ends_at_the_limit():
    """Raw frames of MPEG audio have no length: what is there is counted."""
    data = encoded(sine(12.0), "mp3", "libmp3lame")
    with pytest.raises(InvalidMedia, match="longer than 1 s"):
        heard(data[data.index(data[data.index(b"\xff", 100) :][:3], len(data) // 2) :], max_seconds=1.0)


def test_long_work_has_places_where_it_can_be_left():
    work = read_sound(wav(sine(9.0)), "where", rate=RATE, max_seconds=10.0)
    assert sum(1 for _ in work) > 0


@pytest.mark.parametrize(("data", "name"), [
    (wav(sine()), "wav"), (b"\xff\xfb\x90\x00", "mp3"), (b"\xff\xf1\x50\x80", "aac"), (b"\0\0\0\x20ftypisom", "mov"), (b"", None),
    (b"GIF89a", None),
])  # fmt: skip
def test_files_by_their_first_bytes(data, name):
    assert demuxer_of(data) == name


def test_samples_of_programs():
    samples = sine()
    assert np.array_equal(given_samples(samples, "x", rate=RATE, max_seconds=1), samples)
    assert np.allclose(given_samples(np.stack([samples, samples]), "x", rate=RATE, max_seconds=1), samples)
    other = given_samples((sine(0.5, 48_000), 48_000), "x", rate=RATE, max_seconds=1)
    assert abs(pitch(other) - 440) <= 2 * RATE / len(other)
    for wrong in (np.zeros(0, np.float32), np.zeros(5, np.int16), np.zeros((2, 3, 4), np.float32), (samples, 0)):
        with pytest.raises(InvalidMedia, match="is not audio"):
            given_samples(wrong, "x", rate=RATE, max_seconds=1)
    with pytest.raises(InvalidMedia, match="longer"):
        given_samples(samples, "x", rate=RATE, max_seconds=0.1)


# --- videos -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4"), ("mpegts", "mpeg2video")]
)
def test_videos_are_some_of_their_frames(format, codec):
    found = seen(video(20, fps=25 if codec == "mpeg2video" else 8, format=format, codec=codec), num_frames=5)
    assert found.frames.shape == (5, 16, 32, 3)
    assert found.indices == [0, 5, 10, 14, 19]
    assert np.abs(found.frames.mean(axis=(1, 2, 3)) - 8 * np.array(found.indices)).max() < 6  # of 255: it is compressed
    assert found.metadata["total_num_frames"] == 20


def test_as_many_frames_as_there_are_or_may_be():
    assert len(seen(video(6)).frames) == 6
    assert len(seen(video(30), MediaLimits(max_pixels=10_000, max_seconds=10, max_frames=4)).frames) == 4


@pytest.mark.parametrize(("num_frames", "fps", "io_kwargs", "count"), [
    (100, 10, {}, NUM_FRAMES), (100, 10, {"num_frames": 7}, 7), (100, 10, {"fps": 1}, 10),
    (100, 10, {"fps": 5, "num_frames": 9}, 9),
    (3, 10, {}, 3), (1, 10, {"fps": 0.1}, 1), (10_000, 10, {"num_frames": 10_000}, 64),
])  # fmt: skip
def test_which_frames(num_frames, fps, io_kwargs, count):
    found = chosen(num_frames, fps, 64, io_kwargs)
    assert len(found) == count
    assert found == sorted(set(found))
    assert 0 <= found[0] <= found[-1] < num_frames


@pytest.mark.parametrize(("data", "reason"), [
    (wav(sine()), "no frames"), (video(8)[:300], "broken|not a readable image|no frames"), (b"text", "not readable audio or video"),
    (video(20, fps=1), "longer than 10 s"), (video(2, size=(200, 100)), "200 x 100 pixels"),
])  # fmt: skip
def test_videos_that_are_none(data, reason):
    with pytest.raises(InvalidMedia, match=reason):
        seen(data)


def test_frames_of_programs():
    frames = np.zeros((3, 4, 5, 3), np.uint8)
    assert given_frames(frames, "x", max_frames=3).indices == [0, 1, 2]
    with pytest.raises(InvalidMedia, match="at most 2"):
        given_frames(frames, "x", max_frames=2)
    with pytest.raises(InvalidMedia, match="is no video"):
        given_frames(frames[..., 0], "x", max_frames=9)
