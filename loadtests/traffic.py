"""Table of realistic traffic: representative workloads, with vLLM's figures and ours.

Our figures come from the records of `gpu`. The steps of a ladder are shares of the saturated rate. vLLM's figures
(`targets.VLLM`) were measured by vLLM's own client, for few workloads. The chart uses the same workload titles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from loadtests.targets import MARKS, ROWS, TARGETS, VLLM

Figures = Mapping[str, float]

TRAFFIC: Mapping[str, str] = {
    "c32_512_128": "32 streams, 512 in, 128 out",
    "c128_512_128": "128 streams, 512 in, 128 out",
    "c256_256_256": "256 streams, 256 in and out",
    **{f"c256_256_256@{share}%": f"Poisson, {share} % of that" for share in (50, 70, 90, 110)},
    "p40_256_256": "Poisson, 40/s, 256 in and out",
    "c256_~200_~200": "chat lengths, 256 streams",
    "m64_6_~50_~100": "64 chats of 6 turns",
    "b512_1000-4000_64-256": "burst of 512 long prompts",
}


class Metric(NamedTuple):
    """Column of the table. `keys`: figures of a workload that are shown in one cell."""

    title: str
    keys: tuple[str, ...]
    digits: int = 0


METRICS: tuple[Metric, ...] = (
    Metric("out tok/s", ("out_tok_per_s",)),
    Metric("TTFT, ms", ("ttft_ms_p50", "ttft_ms_p99")),
    Metric("TPOT, ms", ("tpot_ms_p50", "tpot_ms_p99"), 2),
    Metric("ITL, ms", ("itl_ms_p50", "itl_ms_p99"), 1),
    Metric("whole request, ms", ("e2e_ms_p50", "e2e_ms_p99")),
)


def of_workload(figures: Figures, workload: str) -> dict[str, float]:
    """Return the figures of `workload`, by name without the workload's prefix."""
    prefix = f"{workload}."
    return {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}


COLUMNS: tuple[Metric, ...] = (*METRICS, Metric("CPU/token, us", ("server_cpu_us_per_token",), 1))
LEGEND = (
    "Workloads: `c32_512_128` is 32 streams with 512 prompt and 128 output tokens each; `2048+128` has a shared prefix of 2,048; "
    "`~200` is log-normal; `@50%` is Poisson arrivals at 50 % of the rate above it; `p40` is 40 requests per second; `m64_6` is "
    "64 conversations of 6 turns; `b512` is 512 requests at once. Times are p50/p99."
)
_ROWS = {row.key: row for row in ROWS}


def _measured(title: str, figures: Figures) -> list[str]:
    return _cells(
        title,
        {key: f"{figures[key]:,.{column.digits}f}" for column in COLUMNS for key in column.keys if key in figures},
    )


def _targets(model: str, workload: str, ours: Figures) -> list[str]:
    """Return each target of the workload, with a mark that shows whether `ours` meets it."""
    shown = {}
    for key, target in TARGETS[model].get(workload, {}).items():
        met = _ROWS[f"{workload}.{key}"].met(model, ours[key]) if key in ours else None
        shown[key] = f"{target:,g}{MARKS[met]}"
    return _cells("target", shown)


def _cells(title: str, shown: Mapping[str, str]) -> list[str]:
    """Return a row: `title`, then the figures of each column. Unknown figures are "-". A column without figures is empty."""
    columns = [[shown.get(key, "-") for key in column.keys] for column in COLUMNS]
    return [title, *("/".join(column) if set(column) != {"-"} else "" for column in columns)]


def table(model: str, figures: Figures) -> list[list[str]]:
    """Return the table of measured workloads: a header, our rows, vLLM's row below each, and the targets. Empty without figures."""
    rows = []
    for workload in dict.fromkeys([*TRAFFIC, *TARGETS[model]]):
        ours = of_workload(figures, workload)
        if "ttft_ms_p50" not in ours:
            continue
        saturating, _, share = workload.partition("@")
        rate = figures.get(f"{saturating}.req_per_s") if share else None
        title = f"`{workload}`" + (f", {rate * float(share.rstrip('%')) / 100:.1f}/s" if rate else "")
        rows.append(_measured(title, ours))
        if theirs := VLLM.get(model, {}).get(workload):
            rows.append(_measured("vLLM", theirs))
        if any(_targets(model, workload, ours)[1:]):
            rows.append(_targets(model, workload, ours))
    if not rows:
        return []
    headings = [column.title for column in COLUMNS]
    return [["traffic", *headings], *rows]
