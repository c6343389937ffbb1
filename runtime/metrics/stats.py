"""Counters and histograms in plain Python, cheap to update. `EngineClient.metrics` converts them to `Metric` objects."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from runtime.api import FinishReason, HistogramData, Metric

# Finer than usual: a small model on a GPU takes less than a millisecond per token.
INTER_TOKEN_S = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
LAG_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
IDLE_GAP_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_seqs_per_key", "max_tokens_per_minute_per_key")
POWERS_OF_TWO = tuple(float(2**i) for i in range(15))


def one_two_five(limit: int) -> tuple[float, ...]:
    """Return the histogram bounds 1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds: list[float] = []
    decade = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * decade > limit:
                return tuple(bounds)
            bounds.append(float(mantissa * decade))
        decade *= 10


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def data(self) -> HistogramData:
        return HistogramData(self._bounds, tuple(self._counts), self._sum)


class EngineStats:
    """Statistics of an engine, with vLLM's names, so that dashboards for vLLM work."""

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prompt_tokens_cached = 0
        self.admission_rejections: Counter[str] = Counter(dict.fromkeys(REJECTIONS, 0))
        self.finished: Counter[FinishReason] = Counter(dict.fromkeys(FinishReason, 0))
        self.time_to_first_token = Histogram(FIRST_TOKEN_S)
        self.inter_token_latency = Histogram(INTER_TOKEN_S)
        self.time_per_output_token = Histogram(INTER_TOKEN_S)
        self.e2e_latency = Histogram(REQUEST_S)
        self.queue_time = Histogram(REQUEST_S)
        self.inference_time = Histogram(REQUEST_S)
        self.prefill_time = Histogram(REQUEST_S)
        self.decode_time = Histogram(REQUEST_S)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_computed_tokens = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)
        self.request_n = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.request_num_preemptions = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
        self.iteration_tokens = Histogram(POWERS_OF_TWO)
        self.batch_size = Histogram(POWERS_OF_TWO)
        self.step_time = Histogram(INTER_TOKEN_S)
        self.gpu_idle_gap = Histogram(IDLE_GAP_S)
        self.loop_lag = Histogram(LAG_S)

    def metrics(self) -> list[Metric]:
        return [
            counter("prompt_tokens", "Prompt tokens of started requests.", self.prompt_tokens),
            counter("prompt_tokens_cached", "Prompt tokens served by the prefix cache.", self.prompt_tokens_cached),
            counter("generation_tokens", "Tokens generated.", self.generation_tokens),
            Metric(
                "prompt_tokens_by_source",
                "Prompt tokens, computed or found in the prefix cache.",
                "counter",
                {
                    (("source", "local_compute"),): float(self.prompt_tokens - self.prompt_tokens_cached),
                    (("source", "local_cache_hit"),): float(self.prompt_tokens_cached),
                },
            ),
            Metric(
                "admission_rejections",
                "Submissions refused, by the limit that was reached.",
                "counter",
                {(("reason", reason),): float(num) for reason, num in self.admission_rejections.items()},
            ),
            Metric(
                "request_success",
                "Requests that ended, by reason.",
                "counter",
                {(("finished_reason", reason.value),): float(num) for reason, num in self.finished.items()},
            ),
            *(
                Metric(name, text, "histogram", {(): histogram.data()})
                for name, text, histogram in (
                    ("time_to_first_token_seconds", "From arrival to first token.", self.time_to_first_token),
                    ("inter_token_latency_seconds", "Time between two tokens of a request.", self.inter_token_latency),
                    (
                        "request_time_per_output_token_seconds",
                        "Mean time per output token after the first, by request.",
                        self.time_per_output_token,
                    ),
                    ("e2e_request_latency_seconds", "Arrival to last token.", self.e2e_latency),
                    ("request_queue_time_seconds", "From arrival to first scheduled step.", self.queue_time),
                    ("request_inference_time_seconds", "From first scheduled step to last token.", self.inference_time),
                    ("request_prefill_time_seconds", "From first scheduled step to first token.", self.prefill_time),
                    ("request_decode_time_seconds", "From first token to last token.", self.decode_time),
                    ("request_prompt_tokens", "Prompt tokens by request.", self.request_prompt_tokens),
                    ("request_generation_tokens", "Generated tokens by request.", self.request_generation_tokens),
                    (
                        "request_prefill_kv_computed_tokens",
                        "Prompt tokens by request that the prefix cache did not hold.",
                        self.request_computed_tokens,
                    ),
                    ("request_params_max_tokens", "max_tokens by request.", self.request_max_tokens),
                    ("request_params_n", "Sequences submitted together.", self.request_n),
                    ("request_num_preemptions", "Preemptions by request.", self.request_num_preemptions),
                    ("iteration_tokens_total", "Tokens computed in a step.", self.iteration_tokens),
                    ("batch_size", "Sequences in a step.", self.batch_size),
                    (
                        "step_time_seconds",
                        "From the end of one step to the end of the next, while busy.",
                        self.step_time,
                    ),
                    ("gpu_idle_gap_seconds", "The GPU's pause between two steps, while busy.", self.gpu_idle_gap),
                    ("loop_lag_seconds", "How late the event loop ran a timer, while busy.", self.loop_lag),
                )
            ),
        ]


def counter(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, "counter", {(): float(value)})


def gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, text, "gauge", {(): float(value)})
