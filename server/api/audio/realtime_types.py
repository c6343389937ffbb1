"""Wire types of /v1/realtime: session configuration, client events and server events, in OpenAI's format for transcription."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from server.http.errors import InvalidRequest, UnsupportedParameter
from server.http.schema import Name
from server.media.pcm import Encoding

MAX_PROMPT_CHARS = 65_536
Milliseconds = Annotated[int, Meta(ge=0, le=10_000)]
EventId = Annotated[str, Meta(max_length=512)]


# --- the session ------------------------------------------------------------------------------------------------------


class AudioFormat(Struct, forbid_unknown_fields=True):
    """Audio format: `audio/pcm` (16 bits, little-endian), or G.711 at 8 kHz. `rate`: sampling rate in Hz."""

    type: Encoding = "audio/pcm"
    rate: Annotated[int, Meta(ge=8000, le=48_000)] | None = None

    @property
    def hertz(self) -> int:
        return self.rate or (24_000 if self.type == "audio/pcm" else 8000)


class TranscriptionConfig(Struct, forbid_unknown_fields=True):
    """Options of transcription. `language`: ISO 639-1 code, detected by default. `prompt`: sample of the style and names."""

    model: Name | None = None
    language: Annotated[str, Meta(max_length=16)] | None = None
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)] | None = None


class TurnDetection(Struct, forbid_unknown_fields=True):
    """Voice activity detection by energy. `threshold`: 0 to 1. Speech ends after `silence_duration_ms` of silence, and begins
    `prefix_padding_ms` before its first loud sample. The other fields concern spoken answers and have no effect."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool | None = None
    interrupt_response: bool | None = None
    idle_timeout_ms: None = None


class AudioInput(Struct, forbid_unknown_fields=True):
    """Audio input of a session. If `turn_detection` is null, the client marks the end of speech with commit events."""

    format: AudioFormat = msgspec.field(default_factory=AudioFormat)
    noise_reduction: None = None
    transcription: TranscriptionConfig = msgspec.field(default_factory=TranscriptionConfig)
    turn_detection: TurnDetection | None = msgspec.field(default_factory=TurnDetection)


class AudioInputUpdate(Struct, forbid_unknown_fields=True):
    format: AudioFormat | UnsetType = UNSET
    noise_reduction: UnsetType | None = UNSET
    transcription: TranscriptionConfig | UnsetType | None = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET


class AudioUpdate(Struct, forbid_unknown_fields=True):
    input: AudioInputUpdate = msgspec.field(default_factory=AudioInputUpdate)


class SessionUpdate(Struct, forbid_unknown_fields=True):
    """Changes to a session. Fields set in `audio.input` replace the session's."""

    type: Literal["transcription"] = "transcription"
    audio: AudioUpdate = msgspec.field(default_factory=AudioUpdate)
    include: list[str] | None = None

    def applied_to(self, before: AudioInput) -> AudioInput:
        """Return the audio input `before` with these changes. Raises InvalidRequest."""
        if self.include:
            raise UnsupportedParameter("session.include", param="session.include")
        given = self.audio.input
        made = AudioInput(
            format=before.format if given.format is UNSET else given.format,
            transcription=before.transcription
            if given.transcription is UNSET
            else given.transcription or TranscriptionConfig(),
            turn_detection=before.turn_detection if given.turn_detection is UNSET else given.turn_detection,
        )
        if made.format.type != "audio/pcm" and made.format.hertz != 8000:
            raise InvalidRequest(
                f"session.audio.input.format.rate of {made.format.type} is 8000, not {made.format.hertz}",
                param="session.audio.input.format.rate",
            )
        return made


class RealtimeAudio(Struct):
    input: AudioInput


class RealtimeSession(Struct, kw_only=True):
    """Current configuration of a session, as sent to the client."""

    id: str
    object: Literal["realtime.transcription_session"] = "realtime.transcription_session"
    type: Literal["transcription"] = "transcription"
    audio: RealtimeAudio


# --- what clients send ------------------------------------------------------------------------------------------------


class UpdateSession(Struct, tag="session.update"):
    session: SessionUpdate
    event_id: EventId | None = None


class AppendAudio(Struct, tag="input_audio_buffer.append"):
    """Client event: appends audio, in base64."""

    audio: bytes
    event_id: EventId | None = None


class CommitAudio(Struct, tag="input_audio_buffer.commit"):
    """Client event: ends the current speech, which is then transcribed to its end."""

    event_id: EventId | None = None


class ClearAudio(Struct, tag="input_audio_buffer.clear"):
    """Client event: discards the audio that was not committed."""

    event_id: EventId | None = None


ClientEvent = UpdateSession | AppendAudio | CommitAudio | ClearAudio


# --- what the server sends --------------------------------------------------------------------------------------------


class SessionCreated(Struct, tag="session.created"):
    event_id: str
    session: RealtimeSession


class SessionUpdated(Struct, tag="session.updated"):
    event_id: str
    session: RealtimeSession


class SpeechStarted(Struct, tag="input_audio_buffer.speech_started"):
    event_id: str
    item_id: str
    audio_start_ms: int


class SpeechStopped(Struct, tag="input_audio_buffer.speech_stopped"):
    event_id: str
    item_id: str
    audio_end_ms: int


class AudioCommitted(Struct, tag="input_audio_buffer.committed"):
    event_id: str
    item_id: str
    previous_item_id: str | None


class AudioCleared(Struct, tag="input_audio_buffer.cleared"):
    event_id: str


class TranscriptDelta(Struct, tag="conversation.item.input_audio_transcription.delta"):
    """Server event: new final text of an item. All deltas of an item concatenate to its transcript."""

    event_id: str
    item_id: str
    delta: str
    content_index: int = 0


class LiveUsage(Struct):
    type: Literal["duration"]
    seconds: float


class TranscriptCompleted(Struct, tag="conversation.item.input_audio_transcription.completed"):
    event_id: str
    item_id: str
    transcript: str
    usage: LiveUsage
    content_index: int = 0


class EventError(Struct):
    """Error of a session. `event_id`: id of the client's event that caused the error, or null."""

    type: str
    code: str | None
    message: str
    param: str | None
    event_id: str | None = None


class TranscriptFailed(Struct, tag="conversation.item.input_audio_transcription.failed"):
    event_id: str
    item_id: str
    error: EventError
    content_index: int = 0


class ErrorEvent(Struct, tag="error"):
    event_id: str
    error: EventError


ServerEvent = (
    SessionCreated | SessionUpdated | SpeechStarted | SpeechStopped | AudioCommitted | AudioCleared | TranscriptDelta
    | TranscriptCompleted | TranscriptFailed | ErrorEvent
)  # fmt: skip
