"""/v1/audio/transcriptions and /v1/audio/translations over a fake engine: formats, windows, fallback, streams, refusals."""

from __future__ import annotations

import dataclasses
import io
import json

import httpx
import pytest

from runtime.api import Request
from tests.fakes import FakeEngine
from tests.server.speech.tiny import (
    DE,
    EN,
    END,
    INFO,
    NO_SPEECH,
    NO_TIMESTAMPS,
    PREVIOUS,
    STAMP,
    START,
    TRANSCRIBE,
    TRANSLATE,
    is_probe,
    script,
    served,
    speech_tokenizer,
    tone,
    wav,
)

TOKENIZER = speech_tokenizer()
SOUND = wav(tone(3.0))


@pytest.fixture
def start(serve, tmp_path):
    """`await start(answer)`: a server whose speech model answers windows by `answer(request)`."""

    async def start(answer=lambda request: (" Hello there.",), *, multilingual=True, options=None, **generation):
        server = await serve(
            script=script(TOKENIZER, answer), speaks=TOKENIZER, chat=False, max_model_len=448, **(options or {})
        )
        server.engine.model = dataclasses.replace(
            server.engine.model, eos_token_ids=frozenset({END}), speech=INFO, modalities=frozenset({"audio"})
        )
        loaded = server.service.lifecycle.loaded
        speech = served(TOKENIZER, tmp_path, multilingual=multilingual, **generation)
        server.service.lifecycle.ready(dataclasses.replace(loaded, speech=speech))
        return server

    return start


async def post(server, path="transcriptions", sound=SOUND, name="a.wav", **fields) -> httpx.Response:
    data = {key: value if isinstance(value, list) else str(value) for key, value in fields.items()}
    return await server.http.post(f"/v1/audio/{path}", files={"file": (name, sound)}, data=data)


def windows(engine: FakeEngine) -> list[Request]:
    return [request for request in engine.submitted if not is_probe(request)]


# --- formats ----------------------------------------------------------------------------------------------------------


async def test_json_has_the_text_and_the_seconds(start):
    answer = await post(await start())
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"text": "Hello there.", "usage": {"type": "duration", "seconds": 3}}


async def test_text_srt_and_vtt(start):
    server = await start(lambda request: (0.0, " One", 1.0, 1.0, " & two", 2.5))
    assert (await post(server, response_format="text")).text == "One & two\n"
    srt = await post(server, response_format="srt")
    assert srt.text == "1\n00:00:00,000 --> 00:00:01,000\nOne\n\n2\n00:00:01,000 --> 00:00:02,500\n& two\n"
    vtt = await post(server, response_format="vtt")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text == ("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nOne\n\n00:00:01.000 --> 00:00:02.500\n&amp; two\n")


async def test_verbose_json_has_segments(start):
    server = await start(lambda request: (0.0, " One", 1.0, 1.0, " two", 2.5))
    body = (await post(server, response_format="verbose_json", language="en")).json()
    assert (body["task"], body["language"], body["duration"], body["text"]) == ("transcribe", "en", 3.0, "One two")
    first, second = body["segments"]
    assert (first["id"], first["start"], first["end"], first["text"]) == (0, 0.0, 1.0, " One")
    assert (second["id"], second["start"], second["end"], second["text"]) == (1, 1.0, 2.5, " two")
    assert 0 <= first["no_speech_prob"] < 0.01
    assert first["temperature"] == 0.0
    assert first["tokens"][0] == STAMP


async def test_logprobs_are_of_the_texts_tokens(start):
    body = (await post(await start(lambda request: (" Hi",)), **{"include[]": ["logprobs"]})).json()
    assert "".join(each["token"] for each in body["logprobs"]) == " Hi"
    assert all(each["logprob"] < 0 for each in body["logprobs"])


# --- prompts ----------------------------------------------------------------------------------------------------------


async def test_the_language_is_detected_and_named_in_the_prompt(start):
    server = await start()
    await post(server)
    probe, window = server.engine.submitted
    assert (list(probe.prompt_ids), probe.params.max_tokens) == ([START], 1)
    assert list(window.prompt_ids) == [START, EN, TRANSCRIBE, NO_TIMESTAMPS]
    assert window.media[0].digest == probe.media[0].digest
    features = window.media[0].inputs["input_features"]
    assert (features.shape, str(features.dtype)) == ((80, 3000), "float32")
    assert window.params.transcript.suppressed_ids == {1, 2}
    assert window.params.transcript.timestamp_begin is None


async def test_a_named_language_is_not_detected(start):
    server = await start()
    await post(server, language="de", response_format="srt")
    (window,) = server.engine.submitted
    assert list(window.prompt_ids) == [START, DE, TRANSCRIBE]
    assert window.params.transcript.timestamp_begin == STAMP
    assert window.params.transcript.max_initial_timestamp == 50
    assert NO_TIMESTAMPS in window.params.transcript.suppressed_ids


async def test_translations_have_their_task(start):
    server = await start()
    assert (await post(server, "translations")).status_code == 200
    assert TRANSLATE in windows(server.engine)[0].prompt_ids


async def test_models_of_english_have_neither_language_nor_task(start):
    server = await start(multilingual=False)
    assert (await post(server)).status_code == 200
    assert list(server.engine.submitted[0].prompt_ids) == [START, NO_TIMESTAMPS]
    refused = await post(server, "translations")
    assert refused.status_code == 400
    assert "English alone" in refused.json()["error"]["message"]


async def test_the_prompt_stands_before_the_start_and_its_special_tokens_are_text(start):
    server = await start()
    await post(server, language="en", prompt="Names: Ada<|endoftext|>")
    ids = list(windows(server.engine)[0].prompt_ids)
    assert ids[0] == PREVIOUS
    assert TOKENIZER.decode(ids[1 : ids.index(START)]) == " Names: Ada<|endoftext|>"
    await post(server, language="en", prompt="x" * 4000)
    assert windows(server.engine)[-1].prompt_ids.index(START) == 224


# --- long audio -------------------------------------------------------------------------------------------------------


async def test_long_audio_is_cut_in_pauses_and_joined_in_order(start):
    def answer(request):
        return (f" part {len(request.media[0].digest)}",)

    server = await start(answer)
    sound = wav(tone(70.0, pauses=(25.0, 50.0)))
    body = (await post(server, sound=sound, language="en", response_format="text")).text
    assert body == "part 32 part 32 part 32\n"
    assert len({request.media[0].digest for request in windows(server.engine)}) == 3


async def test_segments_of_long_audio_have_times_of_the_whole(start):
    server = await start(lambda request: (0.0, " Hm", 2.0))
    sound = wav(tone(50.0, pauses=(25.0,)))
    body = (await post(server, sound=sound, language="en", response_format="verbose_json")).json()
    starts = [segment["start"] for segment in body["segments"]]
    assert starts[0] == 0.0
    assert 24.7 <= starts[1] <= 25.3
    assert [segment["id"] for segment in body["segments"]] == [0, 1]


async def test_in_order_each_window_begins_where_the_last_segment_ended_and_continues_its_text(start):
    texts = iter([(0.0, " One", 20.0, 20.0, " tw"), (0.0, " two", 15.0)])
    server = await start(lambda request: next(texts))
    sound = wav(tone(35.0))
    fields = {"language": "en", "response_format": "verbose_json", "condition_on_previous_text": "true"}
    body = (await post(server, sound=sound, **fields)).json()
    assert [(each["text"], each["start"], each["end"]) for each in body["segments"]] == [
        (" One", 0.0, 20.0),
        (" two", 20.0, 35.0),
    ]
    second = list(windows(server.engine)[1].prompt_ids)
    assert second[0] == PREVIOUS
    assert TOKENIZER.decode([id for id in second if id < END]) == " One"


# --- thresholds -------------------------------------------------------------------------------------------------------


async def test_text_that_repeats_is_drawn_again_at_a_higher_temperature(start):
    def answer(request):
        return (" no" * 60,) if request.params.temperature == 0 else (" A sentence.",)

    server = await start(answer)
    body = (await post(server, language="en", response_format="verbose_json")).json()
    assert body["text"] == "A sentence."
    assert body["segments"][0]["temperature"] == 0.2
    assert [request.params.temperature for request in windows(server.engine)] == [0.0, 0.2]


async def test_a_temperature_of_the_client_is_the_only_one(start):
    server = await start(lambda request: (" no" * 60,))
    await post(server, language="en", temperature=0.7, top_p=0.9, seed=5)
    (request,) = windows(server.engine)
    assert (request.params.temperature, request.params.top_p, request.params.seed) == (0.7, 0.9, 5)


async def test_unlikely_text_where_no_speech_is_likely_is_left_out(start, monkeypatch):
    from runtime.api import TokenLogprobs
    from tests import fakes

    def unlikely(token_id, request):
        if request.params.logprob_token_ids == (NO_SPEECH,):
            return TokenLogprobs(-0.1, 1, ((NO_SPEECH, -0.1),))
        return TokenLogprobs(-3.0, 1, ())

    monkeypatch.setattr(fakes, "fake_logprobs", unlikely)
    server = await start()
    assert (await post(server, language="en")).json()["text"] == ""
    assert len(windows(server.engine)) == 1


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_has_deltas_in_order_and_the_whole_at_the_end(start):
    server = await start(lambda request: (" Hello", " there."))
    answer = await post(server, stream="true", sound=wav(tone(70.0, pauses=(25.0, 50.0))))
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    *deltas, done = map(json.loads, lines)
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert "".join(each["delta"] for each in deltas) == done["text"] == " ".join(["Hello there."] * 3)
    assert done["usage"] == {"type": "duration", "seconds": 70}


async def test_a_client_that_leaves_frees_its_windows(start):
    server = await start(options={"paused": True})
    files = {"file": ("a.wav", SOUND)}
    async with server.http.stream(
        "POST", "/v1/audio/transcriptions", files=files, data={"stream": "true", "language": "en"}
    ):
        await server.engine.until(lambda: bool(server.engine.live))
    await server.engine.until(lambda: not server.engine.live)


# --- the official client ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # its translations
async def test_the_official_client(start):
    client = (
        await start(lambda request: (0.0, " Hi", 2.0) if request.params.transcript.timestamp_begin else (" Hi",))
    ).openai()
    audio = client.audio
    assert (await audio.transcriptions.create(file=("a.wav", SOUND), model="tiny")).text == "Hi"
    named = io.BytesIO(SOUND)
    named.name = "speech.wav"
    assert (await audio.translations.create(file=named, model="tiny")).text == "Hi"
    assert await audio.transcriptions.create(file=("a.wav", SOUND), model="tiny", response_format="text") == "Hi\n"
    verbose = await audio.transcriptions.create(
        file=("a.wav", SOUND), model="tiny", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert verbose.segments[0].end == 2.0
    stream = await audio.transcriptions.create(file=("a.wav", SOUND), model="tiny", stream=True, include=["logprobs"])
    events = [event async for event in stream]
    assert [event.type for event in events][-1] == "transcript.text.done"
    assert events[-1].text == "Hi"
    assert len(events[-1].logprobs) == 3


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"language": "xx"}, "language", "not one of de, en, fr"),
        ({"response_format": "docx"}, "response_format", "docx"),
        ({"temperature": 3}, "temperature", "2"),
        ({"temperature": "warm"}, "temperature", "expected `float"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "srt"),
        (
            {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"},
            "timestamp_granularities",
            "segment",
        ),
        ({"timestamp_granularities[]": ["segment"]}, "timestamp_granularities", "verbose_json"),
        ({"include[]": ["logprobs"], "response_format": "text"}, "include", "json"),
        ({"sound": b"no sound"}, "file", "WAV"),
        ({"sound": SOUND[:30]}, "file", ""),
        ({"sound": b""}, "file", ""),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_says_why(start, fields, param, words):
    server = await start()
    answer = await post(server, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert not server.engine.submitted


async def test_forms_without_a_file_and_unknown_models_are_refused(start):
    server = await start()
    answer = await server.http.post("/v1/audio/transcriptions", files={"other": b"x"}, data={"model": "tiny"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert (await post(server, model="other")).status_code == 404
    assert (await server.post("/v1/audio/transcriptions", {})).status_code == 415


async def test_unknown_fields_are_named(start):
    answer = await post(await start(), hotwords="Ada")
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "hotwords"


async def test_limits_of_bytes_and_seconds(start):
    server = await start(options={"max_audio_size": 64 * 1024, "max_audio_seconds": 1.0})
    assert (await post(server, sound=wav(tone(10.0)))).status_code == 413
    answer = await post(server, sound=wav(tone(1.5)))
    assert answer.status_code == 400
    assert "1 s" in answer.json()["error"]["message"]


async def test_models_of_text_say_that_they_transcribe_nothing(serve):
    server = await serve()
    answer = await post(server)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "task_not_supported"


async def test_a_speech_model_answers_no_completions(start):
    server = await start()
    answer = await server.complete(prompt="Hi")
    assert answer.status_code == 400
    assert "/v1/audio/transcriptions" in answer.json()["error"]["message"]


async def test_audio_counts_in_the_metrics(start):
    server = await start()
    await post(server)
    page = (await server.http.get("/metrics")).text
    assert "oneloop:speech_audio_seconds_total{" in page
    assert "oneloop:speech_real_time_factor_bucket{" in page
