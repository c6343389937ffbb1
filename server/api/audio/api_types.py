"""Wire types of /v1/audio: answers and events, as OpenAI has them."""

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
    """Seconds of audio, begun ones counted."""

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
    """Transcript of `response_format` json and verbose_json. `logprobs`: with `include` logprobs. Of verbose_json alone: `task`;
    `language`, a code; `duration` in seconds; `segments`."""

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
    """Event of text that was added."""

    delta: str


class TextDone(Struct, tag="transcript.text.done"):
    """Event of the whole text, the last one."""

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
