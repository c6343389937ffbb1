"""WS /v1/realtime over a fake engine, by the `websockets` client: events in order, deltas, hostile messages, keys, drain."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import random
from contextlib import asynccontextmanager

import numpy as np
import pytest

from server.generate.speech.live import LiveTranscript
from server.generate.speech.request import TranscribeRequest
from server.http.call import Call
from tests.server.speech.tiny import END, INFO, RATE, is_probe, says, script, served, speech_tokenizer, tone

websockets = pytest.importorskip("websockets")  # in the extra `test`

TOKENIZER = speech_tokenizer()
SILENCE = np.zeros(RATE, np.float32)
COMPLETED, DELTA = (f"conversation.item.input_audio_transcription.{kind}" for kind in ("completed", "delta"))
BY_HAND = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": None}
BY_ENERGY = {"format": {"type": "audio/pcm", "rate": RATE}}


def growing(request):
    """A text that has a word more with every second of the window, and is begun by the prefix in the prompt."""
    if is_probe(request):
        return [END]
    (media,) = request.media
    loud = (media.inputs["input_features"].max(axis=0) > 0).sum() // 100
    words = says(TOKENIZER, "".join(f" w{number}" for number in range(1, loud + 1)))
    prefix = [id for id in request.prompt_ids if id < END]
    assert words[: len(prefix)] == prefix, "the prefix is what was said before"
    return words[len(prefix) :]


@pytest.fixture
def start(serve, tmp_path):
    async def start(says=script(TOKENIZER, lambda request: (" Hello there.",)), paused=False, **options):
        server = await serve(
            script=says, speaks=TOKENIZER, chat=False, max_model_len=448, paused=paused, access_log=False, **options
        )
        server.engine.model = dataclasses.replace(
            server.engine.model, eos_token_ids=frozenset({END}), speech=INFO, modalities=frozenset({"audio"})
        )
        loaded = server.service.lifecycle.loaded
        server.service.lifecycle.ready(
            dataclasses.replace(loaded, speech=served(TOKENIZER, tmp_path, multilingual=False))
        )
        return server

    return start


class Session:
    def __init__(self, socket) -> None:
        self.socket = socket

    async def send(self, type: str, **fields) -> None:
        await self.socket.send(json.dumps({"type": type, **fields}))

    async def append(self, samples: np.ndarray) -> None:
        pcm = (samples * 32767).astype("<i2").tobytes()
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm).decode())

    async def next(self) -> dict:
        return json.loads(await self.socket.recv())

    async def until(self, kind: str) -> list[dict]:
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events

    async def update(self, **audio) -> dict:
        await self.send("session.update", session={"type": "transcription", "audio": {"input": audio}})
        return await self.next()


@asynccontextmanager
async def connected(server, path="/v1/realtime", **options):
    async with websockets.connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None, **options) as socket:
        session = Session(socket)
        assert (await session.next())["type"] == "session.created"
        yield session


def kinds(events: list[dict]) -> list[str]:
    return [event["type"].removeprefix("conversation.item.input_audio_transcription.") for event in events]


async def test_a_turn_begins_with_speech_and_ends_with_silence(start):
    async with connected(await start()) as session:
        assert (await session.update(**BY_ENERGY))["type"] == "session.updated"
        await session.append(np.concatenate([SILENCE, tone(1.5), SILENCE]))
        events = await session.until(COMPLETED)
        named = kinds(events)
        order = ("speech_started", "speech_stopped", "committed")
        places = [named.index(f"input_audio_buffer.{kind}") for kind in order]
        assert places == sorted(places)
        # 0.3 s before the first loud frame; 0.5 s behind the last one; the frames of 20 ms that lie across an edge are loud
        started, stopped = events[places[0]]["audio_start_ms"], events[places[1]]["audio_end_ms"]
        assert (started, stopped) == (700, 3000)
        assert events[-1]["transcript"] == "Hello there."
        assert events[-1]["usage"] == {"type": "duration", "seconds": 2.3}


@pytest.mark.parametrize("pieces", [1, 7])
async def test_deltas_are_the_transcript(start, pieces):
    async with connected(await start(growing)) as session:
        await session.update(**BY_HAND)
        for piece in np.array_split(tone(6.0), pieces):
            await session.append(piece)
        await session.send("input_audio_buffer.commit")
        events = await session.until(COMPLETED)
        assert events[-1]["transcript"] == "w1 w2 w3 w4 w5 w6"
        assert "".join(event["delta"] for event in events if event["type"] == DELTA) == "w1 w2 w3 w4 w5 w6"


async def test_words_are_settled_when_two_attempts_agree(start):
    server = await start(growing)
    transcript = LiveTranscript(
        server.service.config, Call(), server.service.lifecycle.loaded, TranscribeRequest(), id="x"
    )
    for settled in ("", "w1", " w2", " w3"):
        assert not transcript.is_due
        transcript.append(tone(1.0))
        assert transcript.is_due
        assert await transcript.step() == settled
    transcript.end()
    assert await transcript.step() == " w4"
    assert transcript.is_done
    assert transcript.text == "w1 w2 w3 w4"


async def test_a_full_window_is_cut_in_a_pause_and_text_goes_on(start):
    async with connected(await start()) as session:
        await session.update(**BY_HAND)
        await session.append(tone(40.0, pauses=(24.0,)))
        await session.send("input_audio_buffer.commit")
        events = await session.until(COMPLETED)
        assert events[-1]["transcript"] == "Hello there. Hello there."
        assert "".join(event["delta"] for event in events if event["type"] == DELTA) == events[-1]["transcript"]


async def test_g711_is_heard(start):
    async with connected(await start(growing)) as session:
        await session.update(format={"type": "audio/pcmu"}, turn_detection=None)
        loud = bytes((0x80, 0x00)) * 8000  # the loudest samples of both signs, 2 s of them
        await session.send("input_audio_buffer.append", audio=base64.b64encode(loud).decode())
        await session.send("input_audio_buffer.commit")
        (*_, last) = await session.until(COMPLETED)
        assert last["transcript"] == "w1 w2"
        assert last["usage"]["seconds"] == pytest.approx(2.0, abs=0.01)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\x00\x01", "binary"),
        ("{", "parse the JSON"),
        ('{"x": ' + "[" * 100_000, "nested too deeply"),
        ('{"type": "nonsense", "event_id": "mine"}', "nonsense"),
        ('{"type": "input_audio_buffer.append", "event_id": "mine", "audio": "###"}', "base64"),
        ('{"type": "input_audio_buffer.commit", "event_id": "mine"}', "less than 100 ms"),
        ('{"type": "session.update", "event_id": "mine", "session": {"type": "realtime"}}', "realtime"),
        ('{"type": "session.update", "event_id": "mine", "session": {"audio": {"input": {"x": 1}}}}', "x"),
        (
            '{"type": "session.update", "event_id": "mine", "session":'
            ' {"audio": {"input": {"transcription": {"language": "tlh"}}}}}',
            "tlh",
        ),
    ],
    ids=range(9),
)
async def test_a_bad_message_is_an_error_event_and_the_session_goes_on(start, message, said):
    async with connected(await start()) as session:
        await session.socket.send(message)
        event = await session.next()
        assert event["type"] == "error"
        assert event["error"]["type"] == "invalid_request_error"
        assert said in event["error"]["message"]
        assert event["error"]["event_id"] == ("mine" if "mine" in str(message) else None)
        assert (await session.update())["type"] == "session.updated"


async def test_format_does_not_change_during_a_turn(start):
    async with connected(await start()) as session:
        await session.update(**BY_HAND)
        await session.append(tone(0.5))
        assert "during a turn" in (await session.update(format={"type": "audio/pcm", "rate": 8000}))["error"]["message"]
        await session.send("input_audio_buffer.clear")
        assert (await session.next())["type"] == "input_audio_buffer.cleared"
        assert (await session.update(format={"type": "audio/pcm", "rate": 8000}))["type"] == "session.updated"


async def test_a_message_beyond_the_limit_closes_the_connection(start):
    async with connected(await start(max_body_size=4096)) as session:
        await session.socket.send("x" * 5000)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await session.next()
        assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 401),
        ({"additional_headers": {"Authorization": "Bearer wrong"}}, 401),
        ({"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]}, 401),
        ({"additional_headers": {"Authorization": "Bearer key"}, "origin": "https://elsewhere.example"}, 403),
    ],
)
async def test_who_may_not_enter_is_refused_with_the_status_of_other_routes(start, options, status):
    server = await start(api_key=("key",))
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connected(server, **options):
            pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["message"]
    assert refused.value.response.headers["x-request-id"]


@pytest.mark.parametrize(
    "options",
    [
        {"additional_headers": {"Authorization": "Bearer key"}},
        {"subprotocols": ["realtime", "openai-insecure-api-key.key"]},
    ],
)
async def test_a_key_opens_the_socket(start, options):
    async with connected(await start(api_key=("key",)), **options) as session:
        assert session.socket.subprotocol == ("realtime" if "subprotocols" in options else None)


async def test_an_unknown_model_is_not_found_and_plain_http_is_told_to_upgrade(start):
    server = await start()
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connected(server, "/v1/realtime?model=nobody"):
            pass
    assert refused.value.response.status_code == 404
    plain = await server.http.get("/v1/realtime")
    assert (plain.status_code, plain.json()["error"]["code"]) == (426, "upgrade_required")


async def test_another_path_answers_in_http_though_a_socket_is_offered(start):
    server = await start()
    offer = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert (await server.http.get("/version", headers=offer)).status_code == 200


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_closing_in_the_middle_aborts_the_attempt_and_frees_everything(start):
    server = await start(paused=True)
    async with connected(server) as session:
        await session.update(**BY_HAND)
        await session.append(tone(2.0))
        await server.engine.until(lambda: bool(server.engine.live))
        assert server.clients.num_connected == 1
        session.socket.transport.abort()
    await server.engine.until(lambda: not server.engine.live)
    await server.service.sockets.closed(60)
    assert server.service.lifecycle.loaded.speech._held_bytes == 0


async def test_a_drain_ends_the_turn_sends_its_text_and_closes(start):
    server = await start()
    async with connected(server) as session:
        await session.update(**BY_HAND)
        await session.append(tone(0.5))
        await session.update(**BY_HAND)  # once it is answered, the audio has been read
        server.service.lifecycle.drain()
        events = await session.until(COMPLETED)
        assert events[-1]["transcript"] == "Hello there."
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await session.next()
        assert closed.value.rcvd.code == 1001
    assert await server.service.sockets.closed(60)


async def test_metrics_count_sockets_and_seconds(start):
    server = await start()
    async with connected(server) as session:
        await session.update(**BY_HAND)
        await session.append(tone(1.5))
        await session.send("input_audio_buffer.commit")
        await session.until(COMPLETED)
        text = (await server.http.get("/metrics")).text
        assert 'oneloop:websockets_open{engine="0",model_name="tiny"} 1.0' in text
        assert 'oneloop:speech_audio_seconds_total{engine="0",model_name="tiny"} 1.5' in text


# --- mutated messages -------------------------------------------------------------------------------------------------


def mutated(chance: random.Random) -> bytes | str:
    """A message of a client, with bytes changed, cut, doubled or exchanged."""
    audio = base64.b64encode(chance.randbytes(chance.choice((0, 1, 320, 6400)))).decode()
    update = {"audio": {"input": {"turn_detection": chance.choice((None, {"type": "server_vad", "threshold": 0.1}))}}}
    data = bytearray(
        json.dumps(
            chance.choice(
                (
                    {"type": "input_audio_buffer.append", "audio": audio},
                    {"type": "input_audio_buffer.commit"},
                    {"type": "input_audio_buffer.clear"},
                    {"type": "session.update", "session": update},
                )
            )
        ).encode()
    )
    for _ in range(chance.choice((0, 0, 1, 3, 20))):
        at = chance.randrange(len(data) or 1)
        match chance.randrange(3):
            case 0:
                data[at : at + 1] = chance.randbytes(1)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at : at + 40]
    return bytes(data) if chance.random() < 0.1 else data.decode("utf-8", "replace")


async def survives(server, count: int, seed: int) -> None:
    """Send `count` mutated messages, and check that the session answers and leaves nothing behind."""
    chance = random.Random(seed)
    async with connected(server) as session:

        async def read() -> None:
            while (await session.next())["type"] != "session.updated" or not sent.is_set():
                pass

        sent = asyncio.Event()
        reading = asyncio.create_task(read())
        for _ in range(count):
            await session.socket.send(mutated(chance))
        sent.set()
        await session.send("input_audio_buffer.clear")
        await session.send("session.update", session={"type": "transcription"})
        await reading
    assert await server.service.sockets.closed(60)
    assert server.service.lifecycle.loaded.speech._held_bytes == 0


async def test_mutated_messages_end_no_session(start):
    await survives(await start(), 100, seed=0)
