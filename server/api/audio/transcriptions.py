"""Routes POST /v1/audio/transcriptions and /v1/audio/translations: convert an audio file to text, as one response or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from server.api.audio import api_types
from server.api.audio.api_types import DurationUsage, TextDelta, TextDone, Transcription
from server.api.audio.request_types import TranscriptionForm, TranslationForm, read_form
from server.api.frames import event
from server.api.route import EVENTS, FORM, GENERATION_REFUSALS, JSON, route
from server.api.service import Service
from server.generate.speech.request import Spoken, TranscribeRequest
from server.generate.speech.subtitles import srt, vtt
from server.generate.speech.transcribe import NoteText, check_request, transcribe
from server.http.answers import json_response
from server.http.call import call_of, note_ignored
from server.http.errors import as_api_error
from server.http.sse import EventStream, Frames
from server.http.upload import read_upload
from server.http.watch import while_waited_for
from server.media.log_mel import Float32s
from server.media.windows import read_samples
from server.models import lookup
from server.models.model import LoadedModel
from server.models.speech import Task

ANSWERS = {JSON: Transcription, EVENTS: api_types.TranscriptEvent}
REFUSALS = (403, *GENERATION_REFUSALS)


@route(
    "POST", "/v1/audio/transcriptions", "createTranscription", "Audio",
    "Write down the speech of a file; with `stream`, as server-sent events", ANSWERS, TranscriptionForm, REFUSALS,
    request_media=FORM,
)  # fmt: skip
async def create_transcription(service: Service, http: Request) -> ASGIApp:
    return await _answer(service, http, TranscriptionForm, "transcribe")


@route(
    "POST", "/v1/audio/translations", "createTranslation", "Audio",
    "Write down the speech of a file in English; with `stream`, as server-sent events", ANSWERS, TranslationForm,
    REFUSALS, request_media=FORM,
)  # fmt: skip
async def create_translation(service: Service, http: Request) -> ASGIApp:
    return await _answer(service, http, TranslationForm, "translate")


async def _answer(service: Service, http: Request, kind: type[TranslationForm], task: Task) -> ASGIApp:
    config, call = service.config, call_of(http)
    loaded = service.lifecycle.require_model()
    async with read_upload(http, config, config.max_audio_size) as upload:
        form, unknown = read_form(kind, upload.values)
        note_ignored(http, unknown, config)
        loaded = await lookup.transcribed_by(call, loaded, form.model)
        request = form.to_request(task)
        check_request(loaded, request)
        speech = loaded.require_speech()
        samples = await read_samples(
            speech.workers, call, upload.content.read, "file", rate=speech.format.info.sample_rate,
            max_seconds=config.max_audio_seconds,
        )  # fmt: skip
    work = _Work(service, loaded, http, form, request, samples)
    if form.stream:
        return EventStream(work.events, _TextFrames(call.id), ping_interval_s=config.ping_interval)
    spoken = await while_waited_for(http.receive, work.run())
    match form.response_format:
        case "text":
            return PlainTextResponse(spoken.text + "\n")
        case "srt":
            return PlainTextResponse(srt(spoken.segments), media_type="application/x-subrip")
        case "vtt":
            return PlainTextResponse(vtt(spoken.segments), media_type="text/vtt")
        case "verbose_json":
            return json_response(Transcription.verbose(task, spoken))
    usage = DurationUsage.of(spoken)
    return json_response(Transcription(text=spoken.text, usage=usage, logprobs=work.logprobs(spoken)))


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Transcription of one uploaded file."""

    service: Service
    loaded: LoadedModel
    http: Request
    form: TranslationForm
    request: TranscribeRequest
    samples: Float32s

    async def run(self, note: NoteText | None = None) -> Spoken:
        """Transcribe the file. `note`: called with new text. Raises ApiError or EngineError."""
        call, began_s = call_of(self.http), time.monotonic()
        spoken = await transcribe(
            self.service.config, call, self.loaded, self.samples, self.request, id=f"transcr-{call.id}", note=note
        )
        self.service.speech_stats.observe(spoken, time.monotonic() - began_s)
        return spoken

    def logprobs(self, spoken: Spoken) -> list[api_types.TokenLogprob] | UnsetType:
        """Return the log-probabilities of the tokens, or UNSET if the client did not request them."""
        if not self.form.wants_logprobs:
            return UNSET
        return api_types.logprobs(spoken, self.loaded.tokenizer)

    def events(self) -> _Events:
        return _Events(self)


class _Events:
    """Source of a transcript's events: first deltas with new text, then the whole text."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._task: asyncio.Task[Spoken] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def hand_to(
        self,
        take: Callable[[TextDelta | TextDone], Callable[[], Awaitable[None]] | None],
        writer_of: Callable[[int], object] | None = None,
    ) -> None:
        task = self._task = asyncio.create_task(self._work.run(self._queue.put_nowait))
        task.add_done_callback(lambda _: self._queue.put_nowait(None))
        while (text := await self._queue.get()) is not None:
            if (rest := take(TextDelta(text))) is not None:
                await rest()
        spoken = await task
        if (rest := take(TextDone(spoken.text, DurationUsage.of(spoken), self._work.logprobs(spoken)))) is not None:
            await rest()


class _TextFrames(Frames[TextDelta | TextDone]):
    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def feed(self, item: TextDelta | TextDone) -> bytes:
        return event(item)

    def end(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return b"data: " + as_api_error(error, self._request_id).body() + b"\n\n"
