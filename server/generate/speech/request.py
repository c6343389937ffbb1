"""Transcription request and its result, in a neutral form for all APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from runtime.api import TokenLogprobs
from server.http.wire_fields import Sampling
from server.models.speech import Task

FALLBACK: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures, tried in order (Radford et al. 2022, 4.5)


class Thresholds(Struct, frozen=True):
    """Thresholds for decoding a window again at the next temperature (`compression_ratio`, `logprob`), or for treating it as
    silent (`no_speech`). Defaults are those of the Whisper paper."""

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


class TranscribeRequest(Struct, frozen=True, kw_only=True):
    """Transcription request of any API.

    `language`: language code, None to detect it. `prompt`: text before the audio, whose style and names the model follows.
    `temperatures`: tried in order until a window passes the thresholds. `timestamps`: segments have times. `in_order`: each
    window begins where the previous window's last segment ends; otherwise audio is split at pauses and decoded in parallel.
    `after_text`: each window continues the previous text (requires `in_order`). `measures_speech`: segments have
    `no_speech_prob`. `max_tokens`: maximum number of tokens per window."""

    task: Task = "transcribe"
    language: str | None = None
    prompt: str | None = None
    temperatures: tuple[float, ...] = FALLBACK
    thresholds: Thresholds = msgspec.field(default_factory=Thresholds)
    timestamps: bool = False
    in_order: bool = False
    after_text: bool = False
    measures_speech: bool = False
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    max_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None


class Segment(Struct, kw_only=True):
    """Segment of a transcript, with OpenAI's fields. `seek`: first frame of its window. `start`, `end`: seconds. `temperature`,
    `avg_logprob`, `compression_ratio` and `no_speech_prob` are values of its window; `no_speech_prob` is None if not measured."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class Spoken(Struct):
    """Transcript of audio of `duration_s` seconds. `language`: language code, None if a model of one language was given none.
    `tokens`: token ids of the text, with their log-probabilities."""

    duration_s: float
    language: str | None
    segments: list[Segment]
    tokens: Sequence[tuple[int, TokenLogprobs]]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()
