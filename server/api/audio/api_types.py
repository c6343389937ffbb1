"""Response types and events of /v1/audio, in OpenAI's format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from server.generate.speech.request import Segment, Spoken
from server.models.speech import Task
from server.models.tokenizer import Tokenizer

LOWEST = -9999.0  # of a log-probability: minus infinity has no JSON


class DurationUsage(Struct):
    """Usage as the duration of the audio in seconds, rounded up."""

    type: Literal["duration"]
    seconds: int

    @classmethod
    def of(cls, spoken: Spoken) -> DurationUsage:
        return cls("duration", math.ceil(spoken.duration_s))


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class Transcription(Struct, kw_only=True):
    """Transcript in the formats json and verbose_json. `logprobs`: set if `include` requests them. Only verbose_json has `task`,
    `language` (a code), `duration` in seconds, and `segments`."""

    task: Task | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    text: str
    segments: list[Segment] | UnsetType = UNSET
    usage: DurationUsage
    logprobs: list[TokenLogprob] | UnsetType = UNSET

    @classmethod
    def verbose(cls, task: Task, spoken: Spoken) -> Transcription:
        return cls(
            task=task, language=spoken.language or "en", duration=spoken.duration_s, text=spoken.text,
            segments=spoken.segments, usage=DurationUsage.of(spoken),
        )  # fmt: skip


class TextDelta(Struct, tag="transcript.text.delta"):
    """Event with new text of the transcript."""

    delta: str


class TextDone(Struct, tag="transcript.text.done"):
    """Last event, with the whole text of the transcript."""

    text: str
    usage: DurationUsage
    logprobs: list[TokenLogprob] | UnsetType = UNSET


TranscriptEvent = TextDelta | TextDone


def logprobs(spoken: Spoken, tokenizer: Tokenizer) -> list[TokenLogprob]:
    return list(_logprobs(spoken, tokenizer))


def _logprobs(spoken: Spoken, tokenizer: Tokenizer) -> Iterable[TokenLogprob]:
    for id, drawn in spoken.tokens:
        raw = tokenizer.token_bytes(id)
        yield TokenLogprob(raw.decode(errors="replace"), max(drawn.logprob, LOWEST), list(raw))
