"""Result tables: of a `serve` run, and of a comparison in markdown for the README. This module only converts data to text.

The records of a comparison are the lines of its JSONL file: {"kind": "start" | "run" | "failure", "server", "round", …}. Figures
are medians over rounds. Marks in cells show errors, shorter runs and answers of different length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the comparison: a figure of the runs of `workload`. If `workload` is None, it is a figure of the starts."""

    title: str
    key: str
    workload: str | None = None
    digits: int = 1
    more_is_better: bool = False


def speed_rows(records: Iterable[Record]) -> list[Row]:
    names = dict.fromkeys(record["workload"] for record in records if record["kind"] == "run")
    return [Row(name, "out_tok_per_s", name, more_is_better=True) for name in names]


def cost_rows(records: Sequence[Record]) -> list[Row]:
    names = dict.fromkeys(record["workload"] for record in records if record["kind"] == "run")
    latencies = [
        Row(f"{metric.upper()} p50 at {name}, ms", f"{metric}_ms_p50", name)
        for name in names
        for metric in ("ttft", "tpot")
    ]
    starts = [
        Row("start to healthy, s", "start_to_healthy_s", digits=2),
        Row("start to first completion, s", "start_to_first_completion_s", digits=2),
        Row("resident memory, idle, MiB", "idle_rss_mib", digits=0),
        Row("CPU while idle, % of a core", "idle_cpu_percent"),
    ]
    return latencies + [row for row in starts if any(record.get(row.key) is not None for record in records)]


def values_of(records: Iterable[Record], server: str, row: Row) -> list[float]:
    return [
        record[row.key]
        for record in records
        if record["server"] == server and record.get("workload") == row.workload and record.get(row.key) is not None
    ]


def comparison_table(records: Sequence[Record], ours: str) -> str:
    """Return a markdown table. Rows are workloads, then latencies and costs. Columns are servers, with `ours` first."""
    servers = _servers(records, ours)
    parts = [
        _markdown("output tokens per second", speed_rows(records), records, servers),
        _markdown("the rest (less is better)", cost_rows(records), records, servers),
        f"Medians of {_num_rounds(records)} round(s). In brackets: how many times better {ours} is than that server.",
        *_notes(records, servers),
    ]
    return "\n\n".join(part for part in parts if part)


def _servers(records: Iterable[Record], ours: str) -> list[str]:
    found = dict.fromkeys(record["server"] for record in records)
    return [ours] * (ours in found) + [name for name in found if name != ours]


def _num_rounds(records: Iterable[Record]) -> int:
    return len({record["round"] for record in records})


def _markdown(corner: str, rows: Sequence[Row], records: Sequence[Record], servers: Sequence[str]) -> str:
    if not rows:
        return ""
    lines = [f"| {corner} | {' | '.join(servers)} |", "|---|" + "---:|" * len(servers)]
    for row in rows:
        ours = values_of(records, servers[0], row)
        cells = [_cell(records, server, row, ours if server != servers[0] else []) for server in servers]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(records: Sequence[Record], server: str, row: Row, ours: Sequence[float]) -> str:
    values = values_of(records, server, row)
    if not values:
        return "-"
    median = statistics.median(values)
    text = f"{median:.{row.digits}f}"
    if ours and (mine := statistics.median(ours)) and median:
        text += f" ({mine / median if row.more_is_better else median / mine:.2f}x)"
    return text + _marks([record for record in _runs(records, server) if record["workload"] == row.workload])


def _runs(records: Iterable[Record], server: str) -> list[Record]:
    return [record for record in records if record["kind"] == "run" and record["server"] == server]


def _marks(runs: Iterable[Record]) -> str:
    runs = list(runs)
    marks = (
        ("†", any(run["share"] != 1 for run in runs)),
        ("‡", any(run["other_length"] for run in runs)),
        ("!", any(run["errors"] for run in runs)),
    )
    return "".join(mark for mark, applies in marks if applies)


def _notes(records: Sequence[Record], servers: Sequence[str]) -> list[str]:
    used = "".join(_marks(_runs(records, server)) for server in servers)
    notes = [
        text
        for mark, text in (
            ("†", "† a share of the requests only: not strictly comparable."),
            ("‡", "‡ some answers were shorter or longer than requested: not strictly comparable."),
        )
        if mark in used
    ]
    failed = {server: sum(run["errors"] for run in _runs(records, server)) for server in servers}
    notes += [f"! {server}: {errors} request(s) failed." for server, errors in failed.items() if errors]
    notes += [f"! {record['server']}: {record['error']}" for record in records if record["kind"] == "failure"]
    return ["  \n".join(notes)] if notes else []


def comparison_summary(records: Sequence[Record], ours: str) -> dict[str, Any]:
    """Return median, minimum and maximum of every figure, by row and server. `ratio` is the ratio in the table."""
    servers = _servers(records, ours)
    rows = [*speed_rows(records), *cost_rows(records)]
    figures: dict[str, dict[str, Any]] = {}
    for row in rows:
        mine = values_of(records, servers[0], row) if servers else []
        cells = {
            server: _spread(values, mine, row) for server in servers if (values := values_of(records, server, row))
        }
        figures[f"{row.workload} {row.key}" if row.workload else row.key] = cells
    errors = {server: sum(run["errors"] for run in _runs(records, server)) for server in servers}
    failures = [
        {"server": record["server"], "error": record["error"]} for record in records if record["kind"] == "failure"
    ]
    return {"ours": ours, "rounds": _num_rounds(records), "errors": errors, "failures": failures, "figures": figures}


def _spread(values: Sequence[float], mine: Sequence[float], row: Row) -> dict[str, float]:
    median = statistics.median(values)
    spread = {"median": round(median, 3), "min": min(values), "max": max(values)}
    if mine and median and (own := statistics.median(mine)):
        spread["ratio"] = round(own / median if row.more_is_better else median / own, 3)
    return spread


_COLUMNS: Sequence[tuple[str, str]] = (
    ("workload", "{workload}"),
    ("load", "{load:g}"),
    ("ok/asked", "{ok}/{requests}"),
    ("out tok/s", "{generated_tok_per_s:.1f}"),
    ("in tok/s", "{embedded_tok_per_s:.1f}"),
    ("req/s", "{req_per_s:.2f}"),
    ("TTFT p50/p90/p99 ms", "{ttft_ms_p50:.1f} / {ttft_ms_p90:.1f} / {ttft_ms_p99:.1f}"),
    ("TPOT p50/p99 ms", "{tpot_ms_p50:.2f} / {tpot_ms_p99:.2f}"),
    ("ITL p50/p99 ms", "{itl_ms_p50:.2f} / {itl_ms_p99:.2f}"),
    ("e2e p50/p99 ms", "{e2e_ms_p50:.0f} / {e2e_ms_p99:.0f}"),
    ("cached", "{cached_share:.0%}"),
    ("good req/s", "{goodput_req_per_s:.2f} ({good_share:.0%})"),
    ("server us/tok", "{server_cpu_us_per_token:.1f}"),
    ("loop lag p99 ms", "<= {loop_lag_ms_p99:g}"),
    ("client CPU", "{client_processes} x {client_cpu_share:.0%}"),
)


def serve_table(runs: Sequence[Record]) -> str:
    """Return aligned text with one line per run. Empty columns are left out."""
    lines = [[_format(template, run) for _, template in _COLUMNS] for run in runs]
    shown = [index for index in range(len(_COLUMNS)) if any(line[index] != "-" for line in lines)]
    grid = [[_COLUMNS[index][0] for index in shown], *([line[index] for index in shown] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in grid)


def _format(template: str, run: Record) -> str:
    share = run["cached_in_tokens"] / run["in_tokens"] if run["in_tokens"] else None
    embeds = run["ok"] and run.get("out_tokens") == 0
    more = {
        "cached_share": share,
        "generated_tok_per_s": None if embeds else run["out_tok_per_s"],
        "embedded_tok_per_s": run.get("in_tok_per_s") if embeds else None,
    }
    try:
        return template.format(**run, **more)
    except (KeyError, TypeError):  # not measured in this run
        return "-"


def serve_remarks(runs: Iterable[Record]) -> list[str]:
    """Return warnings about the runs, such as failed requests or an overloaded client."""
    remarks: list[str] = []
    for run in runs:
        name = run["workload"]
        remarks += [f"{name}: {count} x {error}" for error, count in run["error_counts"].items()]
        if run["other_length"]:
            remarks.append(f"{name}: {run['other_length']} answer(s) shorter or longer than requested")
        if run["ok"] and run["tokens_from"] == "events":
            remarks.append(f"{name}: the server sent no usage; output tokens are counted as events with content")
        if (run.get("client_cpu_share") or 0) > 0.8:
            used = f"{run['client_cpu_share']:.0%} of a core"
            remarks.append(
                f"{name}: the busiest client used {used}; it may have limited the measurement (see --clients)"
            )
        if (run.get("send_late_ms_p99") or 0) > 10:
            remarks.append(f"{name}: requests were sent up to {run['send_late_ms_p99']:.0f} ms late (p99)")
    return remarks
