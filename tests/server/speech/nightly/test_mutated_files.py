"""Mutated files: 1,000 of them are a transcript or a 400 each, and no request is left behind."""

from __future__ import annotations

import io
import random

import av
import numpy as np
import pytest

from tests.server.speech.test_transcriptions import post, start  # noqa: F401 (a fixture)
from tests.server.speech.tiny import RATE, tone

CONTAINERS = (
    ("wav", "pcm_s16le", RATE),
    ("flac", "flac", RATE),
    ("mp3", "libmp3lame", RATE),
    ("ogg", "libopus", 48_000),
    ("webm", "libopus", 48_000),
    ("ipod", "aac", RATE),
)


def encoded(container: str, codec: str, rate: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        samples = (np.tile(tone(1.0), rate // RATE) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(("container", "codec", "rate"), CONTAINERS)
async def test_mutated_files_are_refused_or_transcribed(start, container, codec, rate):  # noqa: F811
    server, whole = await start(), encoded(container, codec, rate)
    assert (await post(server, sound=whole, language="en")).status_code == 200
    choice = random.Random(7)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(choice.randint(1, 20)):
            place = choice.randrange(min(len(data), choice.choice((64, 512, len(data)))))
            data[place] = choice.randrange(256)
        cut = choice.choice((len(data), choice.randrange(1, len(data))))
        answer = await post(server, sound=bytes(data[:cut]), language="en")
        assert answer.status_code in (200, 400), answer.text
    assert not server.engine.live
