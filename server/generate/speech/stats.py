"""Statistics of transcription, for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from runtime.api import HistogramData, Metric
from server.generate.speech.request import Spoken

_FACTORS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class SpeechStats:
    def __init__(self) -> None:
        self._seconds = 0.0
        self._counts = [0] * (len(_FACTORS) + 1)
        self._sum = 0.0

    def observe(self, spoken: Spoken, elapsed_s: float) -> None:
        """Count a finished transcript. `elapsed_s`: processing time in seconds."""
        factor = spoken.duration_s / max(elapsed_s, 1e-9)
        self._seconds += spoken.duration_s
        self._counts[bisect_left(_FACTORS, factor)] += 1
        self._sum += factor

    def observe_live(self, seconds: float) -> None:
        """Count `seconds` of audio that was transcribed live. It does not count towards the speed factor."""
        self._seconds += seconds

    def metrics(self) -> Iterable[Metric]:
        """Return the metrics. Empty before the first transcript."""
        if self._seconds:
            yield Metric("speech_audio_seconds", "Seconds of audio transcribed.", "counter", {(): self._seconds})
        if not any(self._counts):
            return
        yield Metric(
            "speech_real_time_factor", "Seconds of audio per second of a request.", "histogram",
            {(): HistogramData(_FACTORS, tuple(self._counts), self._sum)},
        )  # fmt: skip
