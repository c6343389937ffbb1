"""WS /v1/realtime by openai's client and a tiny random Whisper, several sessions at once, and many mutated messages."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from server.models.lifecycle import Lifecycle
from tests.server.conftest import running
from tests.server.speech import whisper
from tests.server.speech.test_realtime import start, survives  # noqa: F401 (a fixture)
from tests.server.speech.tiny import RATE, tone

pytest.importorskip("websockets")
SESSIONS = 16


async def spoken(client, number: int) -> tuple[str, str]:
    """The deltas and the transcript of one session."""
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        audio_format = {"type": "audio/pcm", "rate": RATE}
        given = {"audio": {"input": {"format": audio_format, "transcription": {"language": "en"}}}}
        await connection.session.update(session={"type": "transcription", **given})
        silence = np.zeros(RATE, np.float32)
        samples = np.concatenate([silence, tone(2.5, hertz=300.0 + 40 * number), silence])
        for piece in np.array_split((samples * 32767).astype("<i2"), 20):
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece.tobytes()).decode())
        deltas = ""
        async for event in connection:
            assert event.type != "error", event
            if event.type == "conversation.item.input_audio_transcription.delta":
                deltas += event.delta
            if event.type == "conversation.item.input_audio_transcription.completed":
                return deltas, event.transcript
    raise AssertionError("the session ended early")


async def test_sixteen_sessions_of_openai_client_at_once(tmp_path):
    whisper.written(tmp_path)
    async with whisper.loaded(tmp_path) as (config, loaded):
        lifecycle = Lifecycle()
        lifecycle.ready(loaded)
        async with running(loaded.engine, loaded.tokenizer, lifecycle, config) as server:
            client = server.openai()
            found = await asyncio.gather(*(spoken(client, number) for number in range(SESSIONS)))
            assert all(deltas == transcript for deltas, transcript in found)
            assert any(transcript for _, transcript in found)
            assert await server.service.sockets.closed(60)
            assert loaded.speech._held_bytes == 0


@pytest.mark.parametrize("seed", range(10))
async def test_a_thousand_mutated_messages_end_no_session(start, seed):  # noqa: F811
    await survives(await start(), 100, seed=seed + 1)
