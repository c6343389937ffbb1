"""Table of realistic traffic: representative workloads, vLLM's figures for them, and ours.

Our figures are those of `gpu`'s records; the steps of a ladder are shares of the saturated rate. vLLM's (`targets.VLLM`)
were measured by its own client, for few workloads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from loadtests.targets import PEER, VLLM

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
    """Column of the table. `keys`: figures of a workload that share a cell."""

    title: str
    keys: tuple[str, ...]
    digits: int = 0


METRICS: tuple[Metric, ...] = (
    Metric("out tok/s", ("out_tok_per_s",)),
    Metric("TTFT, ms", ("ttft_ms_p50", "ttft_ms_p99")),
    Metric("TPOT, ms", ("tpot_ms_p50", "tpot_ms_p99"), 1),
    Metric("ITL, ms", ("itl_ms_p50", "itl_ms_p99"), 1),
    Metric("whole request, ms", ("e2e_ms_p50", "e2e_ms_p99")),
)


def of_workload(figures: Figures, workload: str) -> dict[str, float]:
    """Return the workload's figures by their short names."""
    prefix = f"{workload}."
    return {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}


def _cells(title: str, figures: Figures) -> list[str]:
    cells = [title]
    for metric in METRICS:
        shown = [f"{figures[key]:,.{metric.digits}f}" if key in figures else "-" for key in metric.keys]
        cells.append(" / ".join(shown) if set(shown) != {"-"} else "-")
    return cells


def table(model: str, figures: Figures) -> list[list[str]]:
    """Return the table of workloads with measured tails: a header, our rows, and vLLM's below each. Empty without figures."""
    rows = []
    for workload, title in TRAFFIC.items():
        ours = of_workload(figures, workload)
        if "e2e_ms_p99" not in ours:
            continue
        saturating, _, share = workload.partition("@")
        if share and (rate := figures.get(f"{saturating}.req_per_s")):
            title += f" ({rate * float(share.rstrip('%')) / 100:.1f}/s)"
        rows.append(_cells(title, ours))
        if theirs := VLLM.get(model, {}).get(workload):
            rows.append(_cells(f"— {PEER}", theirs))
    if not rows:
        return []
    headings = [metric.title + (": p50 / p99" if len(metric.keys) > 1 else "") for metric in METRICS]
    return [["traffic", *headings], *rows]
