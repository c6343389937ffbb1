"""Metrics of encoders: counts of encoder work, and usage of the encoder cache."""

from __future__ import annotations

from collections import Counter

from runtime.api import Metric
from runtime.batch import EncoderWork
from runtime.encode.cache import EncoderCache
from runtime.metrics.stats import REQUEST_S, Histogram, counter, gauge


class EncoderStats:
    def __init__(self) -> None:
        self._items: Counter[str] = Counter()  # by modality
        self._tokens: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._time = Histogram(REQUEST_S)
        self.num_queries = 0  # items that chunks needed, and those already cached or being encoded
        self.num_hits = 0

    def encoded(self, work: EncoderWork, took_s: float) -> None:
        modality = work.item.modality
        self._items[modality] += 1
        self._tokens[modality] += len(work.item.positions)
        self._time.observe(took_s)

    def failed(self, work: EncoderWork) -> None:
        self._failures[work.item.modality] += 1

    def metrics(self, cache: EncoderCache) -> list[Metric]:
        return [
            _by_modality("encoder_items", "Pictures, sounds and videos that were encoded.", self._items),
            _by_modality("encoder_tokens", "Tokens that encoders have made of them.", self._tokens),
            _by_modality("encoder_failures", "Those that could not be encoded.", self._failures),
            Metric(
                "encoder_time_seconds", "From a step that wants an item encoded until it is.", "histogram",
                {(): self._time.data()},
            ),
            counter("mm_cache_queries", "Items that prompts came to.", self.num_queries),
            counter("mm_cache_hits", "Items that were encoded already, or about to be.", self.num_hits),
            gauge("encoder_cache_usage_perc", "Share of the encoder cache in use, 0 to 1.", cache.num_used / cache.capacity),
        ]  # fmt: skip


def _by_modality(name: str, text: str, counts: Counter[str]) -> Metric:
    return Metric(
        name, text, "counter", {(("modality", modality),): float(num) for modality, num in sorted(counts.items())}
    )
