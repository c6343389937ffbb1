"""What hypothesis makes of parts, of files and of sizes: an answer or a 4xx in the API's shape, never a 500, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import random
from typing import Any

import numpy as np
import pytest

from server.http.errors import InvalidMedia
from server.http.offload import to_the_end
from server.media.limits import MediaLimits
from server.media.sound import read_sound
from server.media.video import read_video
from tests.server.media.pictures import drawn, stored
from tests.server.media.reading import part, reader
from tests.server.media.sounds import encoded, sine, video, wav
from tests.server.media.test_over_http import REQUESTS, serve_seeing, tiny  # noqa: F401 (fixtures)

NUM_BODIES, NUM_FILES = 200, 400
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ODD = (
    None, True, 0, -1, 2**63, 0.5, "", "a", "AAAA", "=", "\0", "é", "data:", "data:,", "data:;base64,", "data:image/png,%00%ff",
    "data:image/png;base64,AAAA", "data:application/json;base64,e30=", "http://", "http://[", "http://a:99999/", "https://127.0.0.1/x",
    "file:///etc/passwd", "file://", "ftp://x", "//x", "data:image/svg+xml,<svg/>", "low", "url", "base64", "image", "input_image",
    "image_url", "input_audio", "video_url", "file", "wav", "image/png", "audio/wav", "application/pdf", [], {}, [[]], [None],
    {"url": 1}, {"url": "data:image/png;base64,AAAA"}, {"type": "image"}, "a" * 3000,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside of `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in pairs for found in ((*path, key), *places(inner, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], put: Any, how: str) -> Any:
    """A copy of `value` with `put` in the place of what is at `path`, or beside it, or without it, or with it twice."""
    made = copy.deepcopy(value)
    at = made
    for key in path[:-1]:
        at = at[key]
    if how == "drop":
        del at[path[-1]]
    elif how == "beside" and isinstance(at, dict):
        at["detail" if "detail" not in at else "zz"] = put
    elif how == "twice" and isinstance(at, list):
        at.append(at[path[-1]])
    else:
        at[path[-1]] = put
    return made


def made_up(num: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests with a picture, in which one or two values are others. The same in every run."""
    rng, found = random.Random(0), []
    for path, body in itertools.islice(itertools.cycle(REQUESTS.values()), num):
        for _ in range(rng.choice((1, 1, 2))):
            deep = [each for each in places(body) if len(each) > 1]
            if deep:
                how = rng.choice(("put", "put", "put", "drop", "beside", "twice"))
                body = changed(body, rng.choice(deep), rng.choice(ODD), how)
        found.append((path, body))
    return found


async def test_no_part_is_a_500_and_the_server_goes_on(serve_seeing):  # noqa: F811
    server, bodies = await serve_seeing(), made_up(NUM_BODIES)

    async def post(given):
        path, body = given
        return await server.post(path, {**body, "stream": False})

    answers = []
    for start in range(0, len(bodies), 50):
        answers += await asyncio.gather(*map(post, bodies[start : start + 50]))
    for (path, body), answer in zip(bodies, answers, strict=True):
        assert answer.status_code < 500, (path, body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"], (path, body)
    assert any(answer.status_code == 200 for answer in answers)
    for path, body in REQUESTS.values():
        assert (await server.post(path, {**body, "stream": False})).status_code == 200
    await server.engine.until(lambda: not server.engine.live)


def broken(data: bytes, seed: int) -> bytes:
    """Some bytes changed, put in, taken out, doubled or cut off."""
    rng, made = random.Random(seed), bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(max(1, min(len(made), rng.choice((40, 200, len(data))))))
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                made[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del made[at : at + rng.randrange(1, 30)]
            case 3:
                made[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
            case 4:
                made = made[: at + 1]
    return bytes(made)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_picture_with_other_bytes_is_read_or_refused(tiny, format):  # noqa: F811
    media = reader(tiny, max_image_pixels=1_000_000)
    data = stored(drawn(), format)
    works = [media.read([part(broken(data, seed))]) for seed in range(NUM_FILES)]
    for found in await asyncio.gather(*works, return_exceptions=True):
        assert not isinstance(found, BaseException) or isinstance(found, InvalidMedia), repr(found)


SOUNDS = {
    "wav": lambda: wav(sine()),
    "flac": lambda: encoded(sine(), "flac", "flac"),
    "ogg": lambda: encoded(sine(rate=48_000), "ogg", "libopus", rate=48_000),
    "mp3": lambda: encoded(sine(), "mp3", "mp3"),
    "mp4": lambda: encoded(sine(), "mp4", "aac"),
    "matroska": lambda: encoded(sine(rate=48_000), "matroska", "libopus", rate=48_000),
}


@pytest.mark.parametrize("format", SOUNDS)
def test_a_sound_with_other_bytes_is_read_or_refused(format):
    data = SOUNDS[format]()
    for seed in range(NUM_FILES):
        with contextlib.suppress(InvalidMedia):
            samples = to_the_end(read_sound(broken(data, seed), "where", rate=16_000, max_seconds=10))
            assert samples.dtype == np.float32
            assert len(samples) <= 10 * 16_000


@pytest.mark.parametrize("format", ["mp4", "matroska", "avi", "mpegts"])
def test_a_video_with_other_bytes_is_read_or_refused(format):
    data, limits = video(6, format=format), MediaLimits(max_pixels=100_000, max_frames=8)
    for seed in range(NUM_FILES):
        with contextlib.suppress(InvalidMedia):
            frames = to_the_end(read_video(broken(data, seed), "where", limits, {})).frames
            assert len(frames) <= 8
            assert frames.shape[1] * frames.shape[2] <= 100_000
