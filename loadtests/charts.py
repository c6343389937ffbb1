"""Charts of saved runs. This is the only file that needs matplotlib (`pip install 'oneloop[bench]'`).

Colours distinguish servers. Line styles distinguish workloads or percentiles. Every panel therefore compares the servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loadtests.knee import knee_of
from loadtests.saved import Record
from loadtests.targets import PEER, VLLM
from loadtests.traffic import METRICS, TRAFFIC, Figures, Metric, of_workload

_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#525252")
_STYLES = ("-", "--", ":", "-.")
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # 200, where a logarithm has 2·10²
_FEW = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
_SOME = FuncFormatter(
    lambda value, _: f"{value:g}" if f"{value:g}"[0] in "2357" else ""
)  # on an axis of about one decade
PERCENTILES = ("p50", "p99")  # of the latencies of a sweep
_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2e": "whole request",
}
_STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "svg.hashsalt": "oneloop",  # the same records, the same file
}


def draw_runs(path: Path, records: Sequence[Record]) -> None:
    """Draw five panels: three latency distributions, the run over time, and throughput against latency."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        panels = figure.subplots(2, 3)
        for axes, metric in zip(panels[0], ("ttft", "itl", "e2e"), strict=True):
            _each(axes, records, lambda axes, record, name=metric, **line: _distribution(axes, record, name, **line))
            axes.set(title=_TITLES[metric], xlabel="ms", ylabel="share of values", ylim=(0, 1))
            axes.set_xlim(left=0)
        _each(panels[1, 0], records, _over_time("events_per_s"))
        panels[1, 0].set(title="over time", xlabel="s", ylabel="tokens per second")
        _each(panels[1, 1], records, _over_time("in_flight"))
        panels[1, 1].set(title="over time", xlabel="s", ylabel="requests in flight")
        _each(panels[1, 2], records, _point)
        panels[1, 2].set(title="throughput against latency", xlabel="output tokens per second", ylabel="TTFT p50, ms")
        panels[1, 2].margins(0.1)
        for axes in panels[1]:
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        _legend(figure, panels[0, 0])
        _save(figure, path)


def draw_levels(path: Path, levels: Sequence[Record]) -> None:
    """Draw throughput by load, and latency by throughput (p50 solid, p99 dashed). The knee of each server has a mark."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        panels = figure.subplots(1, 3)
        for number, (name, found) in enumerate(_by_server(levels).items()):
            _draw_server(panels, name, found, _COLOURS[number % len(_COLOURS)])
        by_rate = bool(levels[0]["rate_per_s"])
        load, first, later = panels
        load.set(title="throughput by load (ring: the knee)", ylabel="output tokens per second")
        load.set(xlabel="requests per second" if by_rate else "streams (log scale)")
        for axes, metric in ((first, "ttft"), (later, "tpot")):
            axes.set(title=f"{metric.upper()} by throughput", xlabel="output tokens per second", ylabel="ms")
            for style, percent in zip(_STYLES, PERCENTILES, strict=False):
                axes.plot([], [], style, color=_COLOURS[-1], label=percent)
            axes.legend()
            axes.set_xlim(left=0)
            if all((each[f"{metric}_ms_p50"] or 0) > 0 for each in levels):  # no logarithm of what took no time
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(_PLAIN)
                axes.yaxis.set_minor_formatter(_SOME)
                axes.set_ylabel("ms (log scale)")
        load.set_ylim(bottom=0)
        if not by_rate:  # which are doubled
            load.set_xscale("log", base=2)
            load.xaxis.set_major_formatter(_PLAIN)
        _legend(figure, load)
        _save(figure, path)


def draw_traffic(path: Path, figures: Mapping[str, Figures]) -> None:
    """Draw a row of panels per model with one line per workload. A dot is p50 and a ring is p99, for oneloop and vLLM."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(14, 1.2 + 2.9 * len(figures)), layout="constrained")
        panels = figure.subplots(len(figures), len(METRICS), squeeze=False)
        for line, (model, found) in zip(panels, figures.items(), strict=True):
            measured = [each for each in TRAFFIC if of_workload(found, each)]
            for axes, metric in zip(line, METRICS, strict=True):
                _draw_metric(axes, metric, measured, {"oneloop": found, PEER: _prefixed(VLLM.get(model, {}))})
                axes.set(title=f"{model}: {metric.title}", ylim=(len(measured) - 0.5, -0.5))
                axes.set_yticks(range(len(measured)), [TRAFFIC[each] if axes is line[0] else "" for each in measured])
        _legend(figure, panels[0, 1])
        _save(figure, path)


def _prefixed(figures: Mapping[str, Figures]) -> dict[str, float]:
    return {f"{workload}.{key}": value for workload, found in figures.items() for key, value in found.items()}


def _draw_metric(axes: Axes, metric: Metric, workloads: Sequence[str], servers: Mapping[str, Figures]) -> None:
    for (server, figures), colour in zip(servers.items(), _COLOURS, strict=False):
        for key, fill in zip(metric.keys, ("full", "none"), strict=False):
            values = [_known(of_workload(figures, each).get(key)) for each in workloads]
            label = f"{server}, {key[-3:]}" if len(metric.keys) > 1 else server
            axes.plot(values, range(len(values)), "o", color=colour, fillstyle=fill, label=label)
    if len(metric.keys) > 1:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_PLAIN)
        axes.xaxis.set_minor_formatter(_FEW)
        axes.tick_params(axis="x", which="both", labelsize=7)
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4))


def _draw_server(panels: Sequence[Axes], name: str, levels: Sequence[Record], colour: str) -> None:
    load, first, later = panels
    speeds = [each["out_tok_per_s"] for each in levels]
    load.plot([each["load"] for each in levels], speeds, color=colour, marker="o", markersize=3, label=name)
    knee = knee_of(levels)
    ring = {"color": colour, "marker": "o", "markersize": 10, "fillstyle": "none"}
    if knee is not None:
        load.plot(knee["load"], knee["out_tok_per_s"], **ring)
    for axes, metric in ((first, "ttft"), (later, "tpot")):
        for style, percent in zip(_STYLES, PERCENTILES, strict=False):
            values = [_known(each[f"{metric}_ms_{percent}"]) for each in levels]
            axes.plot(speeds, values, style, color=colour, marker="o", markersize=3)
        if knee is not None:
            axes.plot(knee["out_tok_per_s"], _known(knee[f"{metric}_ms_p50"]), **ring)


def _by_server(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["server"], []).append(record)
    return found


def _each(axes: Axes, records: Sequence[Record], plot: Callable[..., None]) -> None:
    servers = list(dict.fromkeys(record["server"] for record in records))
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    seen: set[str] = set()
    for record in records:
        label = record["server"] if len(workloads) == 1 else f"{record['server']}: {record['workload']}"
        plot(
            axes,
            record,
            color=_COLOURS[servers.index(record["server"]) % len(_COLOURS)],
            linestyle=_STYLES[workloads.index(record["workload"]) % len(_STYLES)],
            label="_" + label if label in seen else label,  # a repeated run is no new line of the legend
        )
        seen.add(label)


def _distribution(axes: Axes, record: Record, metric: str, **line: str) -> None:
    values = record["cdf"].get(metric, ())
    axes.plot(values, [index / max(1, len(values) - 1) for index in range(len(values))], **line)


def _over_time(what: str) -> Callable[..., None]:
    def plot(axes: Axes, record: Record, **line: str) -> None:
        values, bin_s = record["timeline"][what], record["timeline"]["bin_s"]
        axes.plot([(index + 0.5) * bin_s for index in range(len(values))], values, linewidth=1, **line)

    return plot


def _point(axes: Axes, record: Record, **line: str) -> None:
    axes.plot(record["out_tok_per_s"], _known(record["ttft_ms_p50"]), marker="o", **line)


def _known(value: float | None) -> float:
    """Return `value`, or NaN if it is missing. NaN leaves a gap in the line."""
    return math.nan if value is None else value


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=80, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
