"""Engine metrics that are reported with a figure: GPU gaps, event-loop lag, preemptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.api import HistogramData

if TYPE_CHECKING:
    from runtime.engine import Engine

GAP, LAG = "gpu_idle_gap_seconds", "loop_lag_seconds"


def num_preemptions(engine: Engine) -> float:
    for metric in engine.metrics():
        if metric.name == "num_preemptions":
            return sum(value for value in metric.samples.values() if isinstance(value, (int, float)))
    return 0.0


def histogram(engine: Engine, name: str) -> HistogramData | None:
    for metric in engine.metrics():
        if metric.name == name:
            data = next(iter(metric.samples.values()), None)
            return data if isinstance(data, HistogramData) else None
    return None


def spread(before: HistogramData | None, after: HistogramData | None) -> dict[str, float] | None:
    """Return count, mean and bucket bounds of p50, p90 and p99, in seconds, of observations between two readings, or None."""
    if before is None or after is None:
        return None
    counts = [late - early for late, early in zip(after.counts, before.counts, strict=True)]
    total = sum(counts)
    if not total:
        return None
    found = {"count": float(total), "mean_s": (after.sum - before.sum) / total}
    for percent in (50, 90, 99):
        reached = 0
        for bound, count in zip((*after.bounds, float("inf")), counts, strict=True):
            reached += count
            if reached >= total * percent / 100:
                found[f"p{percent}_s_at_most"] = bound if bound != float("inf") else -1.0
                break
    return found


class Counted:
    """Context of a measurement. Afterwards, `found()` returns its GPU gaps and event-loop lag. Missing metrics are left out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = {name: histogram(engine, name) for name in (GAP, LAG)}

    def found(self) -> dict[str, Any]:
        spreads = {name: spread(self._before[name], histogram(self._engine, name)) for name in (GAP, LAG)}
        return {name.removesuffix("_seconds"): values for name, values in spreads.items() if values is not None}
