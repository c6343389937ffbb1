"""TranscribeRequest: which text of a sound a client wants, in the core's own words; and what becomes of it."""

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
    """Limits beyond which a window is decoded again at the next temperature, or holds no speech. Defaults: of the paper."""

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


class TranscribeRequest(Struct, frozen=True, kw_only=True):
    """Request for the text of audio. `language`: a code, None to detect it. `prompt`: text before it, whose style and names
    the model follows. `temperatures`: tried in order until a window passes the thresholds. `timestamps`: segments have times.
    `in_order`: each window begins where the last segment of the one before ends; otherwise sound is cut in its pauses and the
    pieces are decoded at the same time. `after_text`: each window continues the text of those before (only `in_order`).
    `measures_speech`: segments have `no_speech_prob`. `max_tokens`: of a window."""

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
    """Segment of a transcript, as OpenAI has it. `seek`: frame at which its window begins; `start`, `end`: seconds. `temperature`,
    `avg_logprob`, `compression_ratio`, `no_speech_prob`: of its window; the last None where it was not measured."""

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
    """Text of a whole sound of `duration_s` seconds. `language`: its code, None where the model knows one language and none was
    named. `tokens`: ids of its text with their log-probabilities."""

    duration_s: float
    language: str | None
    segments: list[Segment]
    tokens: Sequence[tuple[int, TokenLogprobs]]
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()
