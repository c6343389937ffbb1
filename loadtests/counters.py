"""Counters that a sweep reads from a server's `/metrics`, under oneloop's names and the equivalent names of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loadtests.address import Address
from loadtests.probe import ProbeFailed, ask

_SAMPLE = re.compile(r"^(?:oneloop|vllm):(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_NAMES: Mapping[str, str] = {
    "preemptions": "num_preemptions_total",
    "refused": "admission_rejections_total",
    "queue_s": "request_queue_time_seconds_sum",
    "e2e_s": "e2e_request_latency_seconds_sum",
}


def counters(address: Address) -> dict[str, float]:
    """Return the server's counters by name, summed over labels. Empty if it exports none of these names or cannot be reached."""
    try:
        status, body = ask(address, "/metrics")
    except ProbeFailed:
        return {}
    found: dict[str, float] = {}
    if status == 200:
        for name, value in _SAMPLE.findall(body.decode(errors="replace")):
            found[name] = found.get(name, 0.0) + float(value)
    return {ours: found[theirs] for ours, theirs in _NAMES.items() if theirs in found}


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value - before.get(name, 0.0), 6) for name, value in after.items()}
