"""Metrics of the KV tiers, with vLLM's names. "GPU" in a name stands for any device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from runtime.api import Metric
from runtime.metrics.stats import counter, gauge

TO_HOST, FROM_HOST, TO_DISK, FROM_DISK = "GPU_to_CPU", "CPU_to_GPU", "CPU_to_disk", "disk_to_CPU"
_START_SHARE = 0.3  # weight of the last copy in a rate
_FORGIVES = 1.05  # by which each refusal raises a rate, so that a slow moment is not remembered for ever


class Rate:
    """Measured transfer rate of one direction, in bytes per second. Before the first copy, every transfer is assumed to take no
    time."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None

    def note(self, num_bytes: int, took_s: float) -> None:
        last = num_bytes / max(took_s, 1e-9)
        before = last if self._bytes_per_s is None else self._bytes_per_s
        self._bytes_per_s = before + _START_SHARE * (last - before)

    def seconds(self, num_bytes: int) -> float:
        return 0.0 if self._bytes_per_s is None else num_bytes / self._bytes_per_s

    def refused(self) -> None:
        """Raise the rate slightly. Called when a transfer was rejected as too slow, so that a low rate is measured again some
        time."""
        if self._bytes_per_s is not None:
            self._bytes_per_s *= _FORGIVES


class TierStats:
    def __init__(self) -> None:
        self.rates = {direction: Rate() for direction in (TO_HOST, FROM_HOST, TO_DISK, FROM_DISK)}
        self._bytes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._ended_s: dict[str, float] = {}  # the last copy of each direction
        self.num_queries = 0  # tokens behind those that the prefix cache has
        self.hits: Counter[str] = Counter()  # tokens that came up, by tier
        self.num_too_slow = 0  # tokens that are computed, since reading them would take longer
        self.num_lost = 0  # entries that were evicted before they could be copied down

    def moved(self, direction: str, num_bytes: int, began_s: float, ended_s: float) -> None:
        """Record a completed copy. `began_s`: when it was submitted; it started once the previous copy of that direction had
        ended."""
        took_s = ended_s - max(began_s, self._ended_s.get(direction, began_s))
        self._ended_s[direction] = ended_s
        self.rates[direction].note(num_bytes, took_s)
        self._bytes[direction] += num_bytes
        self._seconds[direction] += took_s

    def metrics(self, used_bytes: Mapping[str, int], num_fetching: int, num_disk_errors: int) -> list[Metric]:
        return [
            _by("transfer_type", "kv_offload_total_bytes", "KV bytes copied between tiers.", self._bytes),
            _by("transfer_type", "kv_offload_total_time", "Seconds of copies of KV between tiers.", self._seconds),
            counter("external_prefix_cache_queries", "Tokens looked up in KV tiers.", self.num_queries),
            _by("tier", "external_prefix_cache_hits", "Tokens that came from a KV tier.", self.hits),
            counter("kv_offload_recomputed", "Tokens in a tier that were quicker to compute.", self.num_too_slow),
            counter("kv_offload_lost", "KV entries evicted before they were copied to a tier.", self.num_lost),
            counter("kv_offload_disk_errors", "KV files that could not be read or written.", num_disk_errors),
            gauge("num_requests_kv_fetch", "Waiting requests whose KV is on its way to the device.", num_fetching),
            Metric(
                "kv_offload_used_bytes", "KV bytes in each tier.", "gauge",
                {(("tier", tier),): float(num) for tier, num in used_bytes.items()},
            ),
        ]  # fmt: skip


def _by(label: str, name: str, text: str, counts: Mapping[str, float]) -> Metric:
    return Metric(name, text, "counter", {((label, key),): float(num) for key, num in sorted(counts.items())})
