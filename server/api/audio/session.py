"""Live transcription session over a WebSocket: receives audio and settings, sends events.

One task reads events, detects speech and appends its audio to items. Another task transcribes the items in order. Reading pauses
while too much audio is waiting, and writing blocks while the client does not read. The memory of a session is therefore bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from runtime.api import EngineError
from server.api.audio.realtime_types import (
    AppendAudio,
    AudioCleared,
    AudioCommitted,
    AudioInput,
    ClearAudio,
    ClientEvent,
    CommitAudio,
    ErrorEvent,
    EventError,
    EventId,
    LiveUsage,
    RealtimeAudio,
    RealtimeSession,
    ServerEvent,
    SessionCreated,
    SessionUpdate,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    TranscriptCompleted,
    TranscriptDelta,
    TranscriptFailed,
    UpdateSession,
)
from server.api.service import Service
from server.generate.speech.live import LiveTranscript
from server.generate.speech.request import TranscribeRequest
from server.generate.speech.transcribe import check_request
from server.http.body import BYTES_PER_CHAR
from server.http.call import Call
from server.http.errors import ApiError, ClientLeft, InvalidRequest, as_api_error
from server.http.middleware import refusal_of as engine_refusal
from server.http.schema import readable, refusal_of
from server.http.websocket import Code, Socket
from server.media.log_mel import Float32s
from server.media.pcm import PcmReader
from server.media.turns import Began, Ended, SpeechAudio, Turn, Turns, joined
from server.models import lookup
from server.models.model import LoadedModel

MAX_BEHIND_S: Final = 60.0  # of audio that waits to be transcribed; then no more is read
PART_S: Final = 10.0  # of a long piece of audio, decoded in one go
MIN_ITEM_S: Final = 0.1
HELD_BYTES: Final = 24 << 20  # of a session at most: a message, and audio that waits
AUDIO_BYTES_PER_CHAR: Final = 32  # of audio, to read which takes as long as to tokenise a character
MAX_ECHOED_CHARS: Final = 65_536  # of a message that could not be read; an event_id beyond them is not found
_SUBPROTOCOL = "realtime"
_EVENTS: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)


class NoAudio(InvalidRequest):
    code = "input_audio_buffer_commit_empty"

    def __init__(self) -> None:
        super().__init__(f"There is less than {MIN_ITEM_S * 1000:g} ms of audio to commit")


class _Identified(Struct):
    event_id: EventId | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """Audio of one speech, with its transcript. `is_dropped`: the transcript failed, or the client no longer needs it."""

    id: str
    call: Call
    transcript: LiveTranscript
    is_dropped: bool = False


class LiveSession:
    """Response that accepts the WebSocket `socket`, and serves it until the client or the server closes it."""

    def __init__(self, service: Service, call: Call, loaded: LoadedModel, socket: Socket) -> None:
        """Create the session. Raises TaskNotSupported or MediaNotInstalled."""
        self._service = service
        self._call = call
        self._served = self._loaded = loaded
        self._speech = loaded.require_speech()
        self._socket = socket
        self._input = AudioInput()
        self._num_events = self._num_items = self._num_samples = 0
        self._item: _Item | None = None  # that is spoken now
        self._last_id: str | None = None  # of the last one that was committed
        self._items: deque[_Item] = deque()  # to be transcribed, in order
        self._news = asyncio.Event()  # for the task that transcribes
        self._room = asyncio.Event()  # for the one that reads
        self._leaving = asyncio.Event()
        self._listen()

    def _listen(self) -> None:
        """Create a decoder and a voice activity detector with the session's current options."""
        wanted, rate = self._input, self._rate
        self._pcm = PcmReader(wanted.format.type, wanted.format.hertz, rate)
        found = wanted.turn_detection
        self._turns = None
        if found is not None:
            silence_ms, prefix_ms = found.silence_duration_ms, found.prefix_padding_ms
            self._turns = Turns(rate, found.threshold, silence_ms, prefix_ms, self._num_samples)

    @property
    def _rate(self) -> int:
        return self._speech.format.info.sample_rate

    # --- the connection -----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._speech.holding(HELD_BYTES), self._service.sockets.having(self._leaving.set):
            subprotocol = _SUBPROTOCOL if _SUBPROTOCOL in self._socket.subprotocols else None
            await self._socket.accept(send, subprotocol)
            try:
                await self._serve()
            except ClientLeft:
                pass
            except Exception as error:
                as_api_error(error, self._call.id)  # logs it
                await self._socket.close(Code.INTERNAL_ERROR, f"The session failed: {self._call.id}")
            finally:
                for item in self._items:
                    item.call.end()

    async def _serve(self) -> None:
        """Run the tasks of the session until it ends. Raises ClientLeft."""
        await self._send(SessionCreated(self._event_id(), self._session()))
        reading = asyncio.create_task(self._read())
        transcribing = asyncio.create_task(self._transcribe())
        leaving = asyncio.create_task(self._leaving.wait())
        tasks = (reading, transcribing, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            if transcribing.done():
                transcribing.result()
            reading.cancel()
            await asyncio.wait({reading})
            if self._item is not None:
                await self._commit()
            self._news.set()
            await transcribing
            await self._socket.close(Code.GOING_AWAY, "The server is shutting down")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, event: ServerEvent) -> None:
        await self._socket.send(msgspec.json.encode(event).decode())

    def _event_id(self) -> str:
        self._num_events += 1
        return f"event_{self._call.id}_{self._num_events}"

    def _session(self) -> RealtimeSession:
        return RealtimeSession(id=f"sess_{self._call.id}", audio=RealtimeAudio(self._input))

    # --- what comes in ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read and handle events until the client disconnects. Raises ClientLeft."""
        while True:
            message = await self._socket.receive()
            event: ClientEvent | None = None
            try:
                event = await self._call.run(len(message) // BYTES_PER_CHAR, partial(_event_of, message))
                await self._take(event)
            except ApiError as error:
                event_id = _event_id_of(message) if event is None else event.event_id
                await self._send(ErrorEvent(self._event_id(), _details(error, event_id)))
            del message, event

    async def _take(self, event: ClientEvent) -> None:
        """Handle one event of the client. Raises ApiError."""
        match event:
            case AppendAudio():
                await self._append(event.audio)
            case CommitAudio():
                await self._end_turn()
            case ClearAudio():
                if self._item is not None:
                    self._item.is_dropped, self._item = True, None
                    self._news.set()
                self._listen()
                await self._send(AudioCleared(self._event_id()))
            case UpdateSession():
                await self._update(event.session)

    async def _update(self, given: SessionUpdate) -> None:
        wanted = given.applied_to(self._input)
        before = self._input
        is_new_input = (wanted.format, wanted.turn_detection) != (before.format, before.turn_detection)
        if is_new_input and self._item is not None:
            raise InvalidRequest(
                "Format and turn detection cannot change during a turn: commit or clear its audio first",
                param="session.audio.input",
            )
        loaded = self._served
        if wanted.transcription.model is not None:
            loaded = await lookup.transcribed_by(self._call, loaded, wanted.transcription.model)
        check_request(loaded, _request(wanted))
        if loaded.require_speech().format.info.sample_rate != self._rate:
            raise InvalidRequest("This model has another sample rate: open another session", param="session.model")
        self._loaded, self._input = loaded, wanted
        if is_new_input:
            self._listen()
        await self._send(SessionUpdated(self._event_id(), self._session()))

    async def _append(self, audio: bytes) -> None:
        size = int(PART_S * self._input.format.hertz) * self._pcm.sample_bytes
        for start in range(0, len(audio), size):
            part, pcm = audio[start : start + size], self._pcm
            await self._detect(len(part), partial(pcm.feed, part))
            while self._behind_s > MAX_BEHIND_S:
                self._room.clear()
                await self._room.wait()

    @property
    def _behind_s(self) -> float:
        waiting = sum(each.transcript.unsettled_samples for each in self._items if not each.is_dropped)
        return waiting / self._rate

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _detect(self, num_bytes: int, read: Callable[[], Float32s]) -> None:
        """Detect speech in the samples that `read` decodes on a thread from `num_bytes` bytes. Raises TooManyRequests."""
        turns = self._turns

        def work() -> tuple[int, list[Turn]]:
            samples = read()
            found = [SpeechAudio(samples)] if turns is None else turns.feed(samples)
            return len(samples), list(joined(found))

        num_samples, found = await self._speech.workers.run(num_bytes // AUDIO_BYTES_PER_CHAR, work, self._call.caller)
        self._num_samples += num_samples
        for turn in found:
            await self._follow(turn)

    async def _follow(self, turn: Turn) -> None:
        match turn:
            case Began():
                item = self._begin()
                await self._send(SpeechStarted(self._event_id(), item.id, self._milliseconds(turn.at)))
            case SpeechAudio():
                item = self._item or self._begin()
                if not item.is_dropped and len(turn.samples):
                    item.transcript.append(turn.samples)
                    self._news.set()
            case Ended() if self._item is not None:
                await self._send(SpeechStopped(self._event_id(), self._item.id, self._milliseconds(turn.at)))
                await self._commit()

    def _milliseconds(self, num_samples: int) -> int:
        return num_samples * 1000 // self._rate

    async def _end_turn(self) -> None:
        """End the current speech at the client's request. Raises NoAudio if the speech is too short."""
        await self._detect(0, self._pcm.flush)
        if self._item is None or self._item.transcript.num_samples < MIN_ITEM_S * self._rate:
            raise NoAudio
        for turn in () if self._turns is None else self._turns.end():
            if isinstance(turn, SpeechAudio):
                await self._follow(turn)
        await self._commit()

    def _begin(self) -> _Item:
        self._num_items += 1
        call = self._call.next(f"{self._call.id}-{self._num_items}")
        transcript = LiveTranscript(
            self._service.config, call, self._loaded, _request(self._input), id=f"transcr-{call.id}"
        )
        item = self._item = _Item(f"item_{call.id}", call, transcript)
        self._items.append(item)
        return item

    async def _commit(self) -> None:
        """End the current item, so that its transcript can be completed."""
        item, self._item = self._item, None
        assert item is not None, "somebody speaks"
        item.transcript.end()
        self._news.set()
        previous, self._last_id = self._last_id, item.id
        await self._send(AudioCommitted(self._event_id(), item.id, previous))

    # --- transcripts --------------------------------------------------------------------------------------------------

    async def _transcribe(self) -> None:
        """Transcribe items in order, until the session ends and no item is left. Raises ClientLeft."""
        while True:
            self._news.clear()
            while self._items and (self._items[0].is_dropped or self._items[0].transcript.is_due):
                await self._step(self._items[0])
                self._room.set()
            if self._leaving.is_set() and not self._items:
                return
            await self._news.wait()

    async def _step(self, item: _Item) -> None:
        """Transcribe the available audio of `item`, and send the new text. Raises ClientLeft."""
        try:
            added = "" if item.is_dropped else await item.transcript.step()
        except (ApiError, EngineError) as error:
            item.is_dropped = True
            refusal = engine_refusal(error) if isinstance(error, EngineError) else error
            await self._send(TranscriptFailed(self._event_id(), item.id, _details(refusal, None)))
            added = ""
        if item.is_dropped or item.transcript.is_done:
            self._items.popleft()
            item.call.end()
        if item.is_dropped:
            return
        if added:
            await self._send(TranscriptDelta(self._event_id(), item.id, added))
        if item.transcript.is_done:
            seconds = item.transcript.num_samples / self._rate
            self._service.speech_stats.observe_live(seconds)
            usage = LiveUsage("duration", seconds)
            await self._send(TranscriptCompleted(self._event_id(), item.id, item.transcript.text, usage))


def _event_of(message: str | bytes) -> ClientEvent:
    """Decode an event of the client. Raises InvalidRequest."""
    if isinstance(message, bytes):
        raise InvalidRequest("Events are JSON in text messages; this message is binary")
    try:
        return readable(_EVENTS.decode, message.encode())
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None


def _event_id_of(message: str | bytes) -> str | None:
    """Return the `event_id` of an invalid event, or None if it cannot be decoded."""
    try:
        return msgspec.json.decode(message[:MAX_ECHOED_CHARS], type=_Identified).event_id
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _request(wanted: AudioInput) -> TranscribeRequest:
    language = wanted.transcription.language
    return TranscribeRequest(language=language.lower() if language else None, prompt=wanted.transcription.prompt)


def _details(error: ApiError, event_id: str | None) -> EventError:
    param = None if error.param is None else str(error.param)  # a Field has no JSON
    return EventError(error.type, error.code, error.message, param, event_id)
