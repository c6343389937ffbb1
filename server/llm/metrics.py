"""Metrics of the engine for Python programs, in classes with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from runtime import api
from server.http.metrics import PREFIX


@dataclass(frozen=True, slots=True)
class Metric:
    """Value of a metric at one moment. `name`: as in /metrics, but without the suffix `_total` of counters."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Metric that consists of several numbers. It exists for compatibility with vLLM: the engine has no such metric."""

    values: list[float]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Distribution of values. `buckets`: number of values up to each upper bound. The last bound is "+Inf"."""

    count: int
    sum: float
    buckets: Mapping[str, int]


def read_metrics(found: Iterable[api.Metric]) -> list[Metric]:
    """Return a Metric for each sample of the engine's metrics."""
    return [_metric(family, dict(labels), value) for family in found for labels, value in family.samples.items()]


def _metric(family: api.Metric, labels: Mapping[str, str], value: float | api.HistogramData) -> Metric:
    name = f"{PREFIX}{family.name}"
    if isinstance(value, api.HistogramData):
        bounds = [*map(str, value.bounds), "+Inf"]
        counts = list(accumulate(value.counts))
        return Histogram(name, labels, counts[-1], value.sum, dict(zip(bounds, counts, strict=True)))
    return Counter(name, labels, value) if family.kind == "counter" else Gauge(name, labels, value)
