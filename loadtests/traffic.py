"""Traffic as it comes: the workloads that stand for it, what vLLM took for them, and both as a table. Pure.

Our figures are those of `gpu`'s records; the steps of a ladder are shares of what saturated our server. vLLM's were taken on
another day (`targets.PEER`), by its own client, and of few workloads. A ladder of its own there was none: its Poisson arrivals at
40 a second stand beside the step of ours that comes to about as many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from loadtests.targets import LARGE, PEER, SMALL

Figures = Mapping[str, float]

TRAFFIC: Mapping[str, str] = {
    "c32_512_128": "32 streams, 512 in, 128 out",
    "c128_512_128": "128 streams, 512 in, 128 out",
    "c256_256_256": "256 streams, 256 in and out",
    **{f"c256_256_256@{share}%": f"Poisson, {share} % of that" for share in (50, 70, 90, 110)},
    "c256_~200_~200": "chat lengths, 256 streams",
    "m64_6_~50_~100": "64 chats of 6 turns",
    "b512_1000-4000_64-256": "burst of 512 long prompts",
}


class Metric(NamedTuple):
    """`keys`: of a workload's figures, those that stand in one cell."""

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


def _took(out_tok_per_s: float, **times: float) -> dict[str, float]:
    return {"out_tok_per_s": out_tok_per_s, **{f"{name[:-4]}_ms_{name[-3:]}": time for name, time in times.items()}}


VLLM: Mapping[str, Mapping[str, Figures]] = {
    SMALL: {
        "c32_512_128": _took(9_526, ttft_p50=113, tpot_p50=2.48),
        "c128_512_128": _took(15_710, ttft_p50=308, tpot_p50=5.8),
        "c256_256_256": _took(16_851, ttft_p50=405, tpot_p50=13.6),
    },
    LARGE: {
        "c32_512_128": _took(3_769, ttft_p50=296, ttft_p99=434, tpot_p50=6.2),
        "c128_512_128": _took(6_201, ttft_p50=862, ttft_p99=1_651, tpot_p50=13.9),
        "c256_256_256": _took(13_698, ttft_p50=1_043, ttft_p99=1_747, tpot_p50=14.7, e2e_p99=4_880),
        "c256_256_256@70%": {"ttft_ms_p50": 67, "ttft_ms_p99": 273, "tpot_ms_p50": 9.59},
    },
}


def of_workload(figures: Figures, workload: str) -> dict[str, float]:
    """Its figures by their names alone."""
    prefix = f"{workload}."
    return {key.removeprefix(prefix): value for key, value in figures.items() if key.startswith(prefix)}


def _cells(title: str, figures: Figures) -> list[str]:
    cells = [title]
    for metric in METRICS:
        shown = [f"{figures[key]:,.{metric.digits}f}" if key in figures else "-" for key in metric.keys]
        cells.append(" / ".join(shown) if set(shown) != {"-"} else "-")
    return cells


def table(model: str, figures: Figures) -> list[list[str]]:
    """Of the workloads whose tails were taken: our row, and vLLM's beneath it; a header first. Empty where there are none."""
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
            rows.append(_cells(f"— {PEER}" + (" (40/s)" if "@" in workload else ""), theirs))
    if not rows:
        return []
    headings = [metric.title + (": p50 / p99" if len(metric.keys) > 1 else "") for metric in METRICS]
    return [["traffic", *headings], *rows]
