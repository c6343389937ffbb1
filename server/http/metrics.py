"""/metrics: metrics of engine and HTTP in Prometheus' text format, with the prefix `oneloop:`.

The engine's values are read at each scrape. Every sample has labels `model_name` and `engine`, as dashboards expect."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from runtime import api

PREFIX = "oneloop:"
Samples = Mapping[tuple[tuple[str, str], ...], float | api.HistogramData]
Families = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

# Few, since there are as many series a route: what requests wait for, the engine's histograms tell by itself.
_SECONDS = (0.01, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})  # clients may invent others


class HttpStats:
    """Counts of requests by route pattern, method and status. Each has few values, so clients cannot create time series."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._durations: dict[str, tuple[list[int], list[float]]] = {}
        self.in_flight = 0
        self.sources: list[Callable[[], Iterable[api.Metric]]] = []  # of what else there is to count

    def observe(self, route: str, method: str, status: int, duration_s: float) -> None:
        self._requests[route, method if method in _METHODS else "other", status] += 1
        counts, total = self._durations.setdefault(route, ([0] * (len(_SECONDS) + 1), [0.0]))
        counts[bisect_left(_SECONDS, duration_s)] += 1
        total[0] += duration_s

    def metrics(self) -> list[api.Metric]:
        requests: Samples = {
            (("route", route), ("method", method), ("status", str(status))): float(num)
            for (route, method, status), num in self._requests.items()
        }
        durations: Samples = {
            (("route", route),): api.HistogramData(_SECONDS, tuple(counts), total[0])
            for route, (counts, total) in self._durations.items()
        }
        return [
            api.Metric("http_requests", "HTTP requests answered, by route, method and status.", "counter", requests),
            api.Metric("http_request_duration_seconds", "HTTP request to its last byte.", "histogram", durations),
            api.Metric(
                "http_requests_in_flight", "HTTP requests being answered.", "gauge", {(): float(self.in_flight)}
            ),
            *(metric for source in self.sources for metric in source()),
        ]


def family(metric: api.Metric, others: Mapping[str, api.Metric], model_name: str) -> Metric:
    """Return `metric` as a metric family of prometheus_client, with the samples of all models. `model_name`: model of `metric`.
    `others`: the same metric of further models, by model name. Label `engine` is 0 if the samples do not have it."""
    names = [name for name in dict(next(iter(metric.samples), ())) if name != "engine"] + ["model_name", "engine"]
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    made: Families = kinds[metric.kind](PREFIX + metric.name, metric.help, labels=names)
    every = [
        (name, *sample) for name, each in {model_name: metric, **others}.items() for sample in each.samples.items()
    ]
    for name, labels, value in every:
        known = {"engine": "0", **dict(labels), "model_name": name}
        values = [known[label] for label in names]
        if isinstance(value, api.HistogramData):
            assert isinstance(made, HistogramMetricFamily)
            made.add_metric(values, buckets=_buckets(value), sum_value=value.sum)
        else:
            assert not isinstance(made, HistogramMetricFamily)
            made.add_metric(values, value)
    return made


def _buckets(data: api.HistogramData) -> list[tuple[str, float]]:
    """Return (upper bound, cumulative count) of each bucket of `data`, as Prometheus needs them."""
    return list(zip([*map(str, data.bounds), "+Inf"], accumulate(map(float, data.counts)), strict=True))


class MetricSource(Collector):
    """Collector of one scrape. `metrics`: of the process and model `model_name`. `others`: metrics of further models, by name."""

    def __init__(
        self, metrics: Sequence[api.Metric], model_name: str, others: Mapping[str, Iterable[api.Metric]]
    ) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._others = {model: {each.name: each for each in metrics} for model, metrics in others.items()}

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            same = {model: found for model, own in self._others.items() if (found := own.get(metric.name)) is not None}
            yield family(metric, same, self._model_name)


def registry(
    metrics: Iterable[api.Metric], model_name: str, others: Mapping[str, Iterable[api.Metric]] | None = None
) -> CollectorRegistry:
    """Return a registry of all metrics. `metrics`: metrics of the process and of model `model_name`. `others`: metrics of
    further models, by name."""
    made = CollectorRegistry(auto_describe=False)
    made.register(MetricSource(list(metrics), model_name, others or {}))
    ProcessCollector(registry=made)
    return made


def exposition(numbers: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics page and its content type: OpenMetrics if header `accept` allows it, else the text format.

    Names are never escaped. A colon is legal in every format. Without UTF-8 names, however, prometheus_client replaces a colon
    by an underscore in OpenMetrics, which Prometheus 2 accepts."""
    encode: Callable[..., bytes] = generate_latest
    content_type = CONTENT_TYPE_PLAIN_0_0_4
    if choose_encoder(accept)[1].startswith("application/openmetrics-text"):
        encode, content_type = openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
    return encode(numbers, escaping=openmetrics.ALLOWUTF8), content_type
