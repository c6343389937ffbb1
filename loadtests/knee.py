"""Knee of a server's load: the best level of a sweep, and server options that would improve it.

The knee is the level with the highest generalised power (Kleinrock 1979), which is throughput squared divided by latency. Above
it, twice the streams increase throughput by less than 26 %. With goodput, it is the level with the highest goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Level = Mapping[str, Any]

ENOUGH_GAIN = 1.05  # a level that brings less than 5 % more is no better
WORTH_WAITING = 1.2  # times the throughput of the knee, for which somebody may want the latency behind it
SEEN_GAP_MS = 50  # between tokens, below which nobody who reads along sees one
GOOD_SHARE = 0.9  # of requests within the objectives, below which more load serves nobody


def knee_of(levels: Sequence[Level]) -> Level | None:
    """Return the knee of `levels`, or None if no level had answers."""
    answered = [level for level in levels if level["ok"] and level["e2e_ms_mean"]]
    if not answered:
        return None
    if all("goodput_req_per_s" in level for level in answered):
        return max(answered, key=lambda level: level["goodput_req_per_s"])
    return max(answered, key=lambda level: _throughput(level) ** 2 / level["e2e_ms_mean"])


def is_saturated(levels: Sequence[Level]) -> str | None:
    """Return a reason to stop the sweep after `levels`, or None if it should continue."""
    last = levels[-1]
    if last["errors"]:
        return f"{last['errors']} of {last['requests']} requests failed"
    if last.get("good_share") is not None and last["good_share"] < GOOD_SHARE:
        return f"only {last['good_share']:.0%} of the requests met the objectives"
    if last["rate_per_s"] and last["req_per_s"] < 0.8 * last["rate_per_s"]:
        return f"{last['req_per_s']:.1f} of {last['rate_per_s']:g} requests a second were answered"
    if not last["rate_per_s"] and len(levels) > 2:
        best = max(levels[:-2], key=_throughput)
        gain = max(map(_throughput, levels[-2:])) / (_throughput(best) or 1.0)
        if gain < ENOUGH_GAIN:  # of two levels, so that one slow moment of a busy machine ends nothing
            return (
                f"up to {last['concurrency']} streams brought {gain:.2f} times the throughput of {best['concurrency']}"
            )
    return None


def _throughput(level: Level) -> float:
    """Return output tokens per second; for embeddings, input tokens per second."""
    return float(level["out_tok_per_s"] or level["in_tok_per_s"])


def suggestions(levels: Sequence[Level]) -> list[str]:
    """Return suggestions of server options, each with its reason, from the levels and the server's counters (`counters.py`)."""
    knee = knee_of(levels)
    if knee is None:
        return []
    found = []
    top, best = levels[-1], max((level for level in levels if level["ok"]), key=_throughput)
    if top is not knee and top["ok"] and ("slo_ms" in knee or _ratio(best, knee, "throughput") < WORTH_WAITING):
        found.append(
            f"--max-num-seqs {max(1, round(knee['in_flight_mean']))}: about this many sequences run at the knee; more would delay "
            f"each other (throughput at most {_ratio(best, knee, 'throughput'):.2f} times, latency up to "
            f"{_ratio(top, knee, 'e2e_ms_mean'):.1f} times)"
        )
    counted = {name: sum(level.get("counted", {}).get(name) or 0 for level in levels) for name in _COUNTERS}
    if counted["preemptions"]:
        found.append(
            f"a larger --kv-cache-memory, or --kv-cache-dtype int8_per_token_head on a CPU: {counted['preemptions']:.0f} "
            "preemptions, so the KV cache was full"
        )
    if counted["refused"]:
        found.append(f"--max-queue: {counted['refused']:.0f} requests got 429, as the queue was full")
    waited_s, served_s = counted["queue_s"], counted["e2e_s"]
    if served_s and waited_s > 0.25 * served_s and not counted["preemptions"] and top is knee:
        found.append(
            f"a larger --max-num-seqs: requests spent {waited_s / served_s:.0%} of their time in the queue, and throughput still "
            "rose"
        )
    if (knee["itl_ms_p99"] or 0) > max(SEEN_GAP_MS, 4 * (knee["itl_ms_p50"] or 0)):
        found.append(
            f"--max-itl {max(1, round(2 * knee['itl_ms_p50']))}: the gaps between tokens are {knee['itl_ms_p50']:.0f} ms at p50, "
            f"{knee['itl_ms_p99']:.0f} at p99; prompts take less of each step then, and their TTFT grows"
        )
    if (knee.get("loop_lag_ms_p99") or 0) > 20:
        found.append(
            f"--stream-interval 4, if this machine has cores to spare: the event loop was late by up to "
            f"{knee['loop_lag_ms_p99']:g} ms (p99), and fewer, larger events cost it less"
        )
    return found


_COUNTERS = ("preemptions", "refused", "queue_s", "e2e_s")


def _ratio(one: Level, other: Level, key: str) -> float:
    if key == "throughput":
        return _throughput(one) / (_throughput(other) or 1.0)
    return float(one[key] or 0.0) / (other[key] or 1.0)
