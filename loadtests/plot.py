"""Latency distributions as a picture. The only file that needs matplotlib, and only once a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from loadtests.figures import Run

matplotlib.use("Agg")


def plot_latencies(path: Path, runs: Sequence[tuple[str, Run]]) -> None:
    """One panel each for TTFT, ITL and e2e: the share of values (y) below so many milliseconds (x)."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 3), ("TTFT", "ITL", "e2e"), strict=True):
        for name, run in runs:
            values_ms = sorted(1000 * value for value in _values(metric, run) if value > 0)
            if values_ms:
                shares = [(rank + 1) / len(values_ms) for rank in range(len(values_ms))]
                axes.step(values_ms, shares, where="post", label=name)
        axes.set(title=metric, xlabel="ms", ylabel="share of values", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)


def _values(metric: str, run: Run) -> list[float]:
    whole = [answer for answer in run.answers if answer.error is None]
    if metric == "ITL":
        return [gap for answer in whole for gap in answer.itl_s]
    return [answer.ttft_s if metric == "TTFT" else answer.e2e_s for answer in whole]
