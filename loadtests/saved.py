"""Data saved with a run, from which charts can be drawn later: distributions as quantiles, and the run over time. The size does
not depend on the number of requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from loadtests.answers import Answer
from loadtests.figures import Run, latencies_s, percentile

NUM_QUANTILES = 101
NUM_BINS = 120
Record = Mapping[str, Any]


def shape_of_run(run: Run) -> dict[str, Any]:
    """Return the data to save. `cdf`: quantiles 0, 1, … 100 % by metric, in milliseconds. `timeline`: see `timeline`."""
    whole = [answer for answer in run.answers if answer.error is None]
    quantiles = {
        name: [round(1000 * (percentile(values, percent) or 0.0), 3) for percent in range(NUM_QUANTILES)]
        for name, values in latencies_s(whole).items()
        if values
    }
    return {"cdf": quantiles, "timeline": timeline(whole)}


def timeline(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return NUM_BINS bins of `bin_s` seconds from the first request to the last byte. Each has events with content per second,
    and requests in flight at its end."""
    if not answers:
        return {"bin_s": 0.0, "events_per_s": [], "in_flight": []}
    begun_s = min(answer.sent_s for answer in answers)
    bin_s = (max(answer.ended_s for answer in answers) - begun_s) / NUM_BINS or 1.0
    events, changes = [0] * NUM_BINS, [0] * NUM_BINS

    def bin_of(moment_s: float) -> int:
        return min(NUM_BINS - 1, math.floor((moment_s - begun_s) / bin_s))

    for answer in answers:
        for moment_s in answer.content_s:
            events[bin_of(moment_s)] += 1
        changes[bin_of(answer.sent_s)] += 1
        changes[bin_of(answer.ended_s)] -= 1
    return {
        "bin_s": round(bin_s, 6),
        "events_per_s": [round(num / bin_s, 2) for num in events],
        "in_flight": list(accumulate(changes)),
    }


def append_records(path: Path, records: Iterable[Record]) -> None:
    with path.open("a") as out:
        for record in records:
            out.write(json.dumps(record) + "\n")


class NotSaved(ValueError):
    """Error: the file contains other data than the runs that `--out` saves."""


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read saved runs. Raises NotSaved, OSError."""
    found: list[dict[str, Any]] = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                _ = record["server"], record["workload"], record["cdf"], record["timeline"]
            except (ValueError, TypeError, KeyError):
                raise NotSaved(
                    f"{path}, line {number}: not a run saved by `bench serve --out` or `sweep --out`"
                ) from None
            found.append(record)
    if not found:
        raise NotSaved("no runs in these files")
    return found
