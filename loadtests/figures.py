"""Figures of one run: throughput, latency percentiles, goodput, errors. They are computed from Answers and returned as JSON values.

Definitions. TTFT: from sending the request (including connecting) to the first event with content. TPOT: (last content - first
content) / (output tokens - 1), one value per request. ITL: gap between successive events with content, over all requests. e2e:
from sending the request to the last byte. Percentiles interpolate linearly. Incomplete answers are errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.answers import Answer

METRICS = ("ttft", "tpot", "itl", "e2e")
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, interpolated between the two nearest ranks; None if `values` is empty."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective: maximum latencies in ms of an answer that counts as good. For itl, the longest gap counts."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, terms: Iterable[str]) -> Slo:
        """Parse terms such as `["ttft:500", "tpot:50"]`. Raises ValueError."""
        limits: dict[str, float] = {}
        for term in terms:
            name, _, value = term.partition(":")
            name = {"e2el": "e2e"}.get(name, name)  # vLLM's word for it
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in METRICS or not limit > 0:
                raise ValueError(f"{term!r} is not METRIC:MILLISECONDS with a metric of {', '.join(METRICS)}")
            limits[name] = limit
        return cls(limits)

    def met_by(self, answer: Answer) -> bool:
        worst = {
            "ttft": answer.ttft_s,
            "tpot": answer.tpot_s,
            "itl": max(answer.itl_s, default=None),
            "e2e": answer.e2e_s,
        }
        return all((worst[name] or 0.0) * 1000 <= limit for name, limit in self.limits_ms.items())


@dataclass(frozen=True, slots=True)
class Run:
    """Result of a load: the answers to `num_requested` requests within `wall_s` seconds, and their cost. None means not measured.

    `client_cpu_s` is the CPU time of all client processes, `busiest_client_cpu_s` that of the busiest process."""

    answers: Sequence[Answer]
    num_requested: int
    num_output_tokens: Sequence[int] | None  # asked for, in any order; None: answers end where they do
    wall_s: float
    cut_off: bool = False
    client_cpu_s: float | None = None
    busiest_client_cpu_s: float | None = None
    num_clients: int = 1
    server_cpu_s: float | None = None
    lateness_s: Sequence[float] = ()


def summarise(run: Run, slo: Slo | None = None) -> dict[str, Any]:
    """Return the figures of `run` as one flat JSON object: `<metric>_ms_{mean,p50,p90,p99}`, and rates per second of wall time."""
    whole = [answer for answer in run.answers if answer.error is None]
    wall_s = run.wall_s or math.inf
    num_output = sum(answer.num_output_tokens for answer in whole)
    errors = Counter(answer.error for answer in run.answers if answer.error is not None)
    if num_missing := run.num_requested - len(run.answers):
        errors["not finished when the time for the run was over"] += num_missing
    figures: dict[str, Any] = {
        "requests": run.num_requested,
        "ok": len(whole),
        "errors": run.num_requested - len(whole),
        "error_counts": dict(errors.most_common(5)),
        "cut_off": run.cut_off,
        "wall_s": round(run.wall_s, 4),
        "req_per_s": round(len(whole) / wall_s, 4),
        "out_tok_per_s": round(num_output / wall_s, 3),
        "out_tokens": num_output,
        "in_tok_per_s": round(sum(answer.num_prompt_tokens for answer in whole) / wall_s, 3),
        "in_tokens": sum(answer.num_prompt_tokens for answer in whole),
        "cached_in_tokens": sum(answer.num_cached_tokens for answer in whole),
        "other_length": _num_of_other_length(whole, run.num_output_tokens),
        "tokens_from": "usage" if all(answer.counted_by_usage for answer in whole) else "events",
        "tokens_per_event": _ratio(num_output, sum(len(answer.content_s) for answer in whole)),
    }
    figures |= _latencies(whole) | _costs(run, num_output)
    if slo is not None and slo.limits_ms:
        num_good = sum(map(slo.met_by, whole))
        figures |= {"goodput_req_per_s": round(num_good / wall_s, 4), "good_share": _ratio(num_good, run.num_requested)}
        figures["slo_ms"] = dict(slo.limits_ms)
    return figures


def _num_of_other_length(whole: Sequence[Answer], asked: Sequence[int] | None) -> int:
    if asked is None:
        return 0
    return (Counter(answer.num_output_tokens for answer in whole) - Counter(asked)).total()


def latencies_s(whole: Sequence[Answer]) -> dict[str, list[float]]:
    """Return all values of each latency metric in seconds. `whole`: complete answers."""
    return {
        "ttft": [answer.ttft_s for answer in whole],
        "tpot": [answer.tpot_s for answer in whole if answer.tpot_s is not None],
        "itl": [gap for answer in whole for gap in answer.itl_s],
        "e2e": [answer.e2e_s for answer in whole],
    }


def _latencies(whole: Sequence[Answer]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, values in latencies_s(whole).items():
        figures[f"{name}_ms_mean"] = _ms(sum(values) / len(values) if values else None)
        figures |= {f"{name}_ms_p{percent}": _ms(percentile(values, percent)) for percent in PERCENTILES}
    return figures


def _costs(run: Run, num_output: int) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    if run.client_cpu_s is not None:
        figures |= {
            "client_cpu_s": round(run.client_cpu_s, 3),
            "client_cpu_share": _ratio(run.busiest_client_cpu_s or run.client_cpu_s, run.wall_s),
            "client_cpu_us_per_token": _ratio(run.client_cpu_s * 1e6, num_output),
            "client_processes": run.num_clients,
        }
    if run.server_cpu_s is not None:
        figures["server_cpu_s"] = round(run.server_cpu_s, 3)
        figures["server_cpu_us_per_token"] = _ratio(run.server_cpu_s * 1e6, num_output)
    if run.lateness_s:
        figures["send_late_ms_p99"] = _ms(percentile(run.lateness_s, 99))
    return figures


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None
