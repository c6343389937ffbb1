"""Command `python -m loadtests results`: generate RESULTS.md from the records of `steps` and `gpu`.

A record is one JSON object: command, model, date, machine, command line, and `figures` by the keys of `targets.ROWS`. If several
records have the same figure of a model, the last record counts. The section "Notes" is written by hand and kept."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtests.pictures import CannotDraw, check_pictures, draw_traffic
from loadtests.targets import HTTP, MARKS, MODELS, PEER, ROWS, Row
from loadtests.traffic import LEGEND
from loadtests.traffic import table as traffic_table

SUMMARY = "write RESULTS.md from the records of steps and gpu"
RECORDS, RESULTS = Path(__file__).with_name("results.jsonl"), Path(__file__).with_name("RESULTS.md")
PICTURE = Path(__file__).with_name("traffic.png")
NOTES = "\n## Notes\n"
Record = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("records", type=Path, nargs="*", default=[RECORDS], metavar="JSONL", help="default: loadtests/results.jsonl")
    add("--out", type=Path, default=RESULTS, metavar="MD", help="default: loadtests/RESULTS.md")
    add("--plot", type=Path, metavar="FILE", help="chart of the traffic, .svg or .png; needs matplotlib")


def new_record(command: str, model: str, device: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """Return a record with date, machine and command line of this process."""
    return {
        "command": command,
        "model": model,
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "machine": device or platform.processor() or platform.machine(),
        "command_line": shlex.join(["python", "-m", "loadtests", *sys.argv[1:]]),
        "figures": {key: round(value, 4) for key, value in figures.items()},
    }  # fmt: skip


def add_to_file(path: Path, record: Record) -> None:
    with path.open("a") as out:
        out.write(json.dumps(record) + "\n")


# --- tables -------------------------------------------------------------------------------------------------------


def _ratio(row: Row, model: str, figure: float) -> str:
    """Return as text how many times better `figure` is than vLLM's."""
    vllm = row.vllm.get(model)
    return f"{figure / vllm if row.more_is_better else vllm / figure:.2f}x" if vllm and figure else "-"


def _cells(row: Row, model: str, figure: float) -> list[str]:
    """Return the cells of a text table: title, our figure, vLLM's figure, our ratio to vLLM, target, and whether it is met."""
    target = row.target.get(model)
    goal = "-" if target is None else f"{'>=' if row.more_is_better else '<='} {target:,g}"
    verdict = {None: "-", True: "met", False: "missed"}[row.met(model, figure)]
    return [row.title, row.shown(figure), row.shown(row.vllm.get(model)), _ratio(row, model, figure), goal, verdict]


def page_cells(row: Row, model: str, figure: float | None) -> list[str]:
    """Return the cells of a row in RESULTS.md: title, our figure, vLLM's with our ratio, target with a mark. Empty if unknown."""
    vllm, target = row.vllm.get(model), row.target.get(model)
    ratio = "" if vllm is None or not figure else f" ({_ratio(row, model, figure)})"
    return [
        row.title,
        "not measured" if figure is None else row.shown(figure),
        "" if vllm is None else row.shown(vllm) + ratio,
        "" if target is None else f"{target:,g}" + ("" if figure is None else MARKS[row.met(model, figure)]),
    ]


HEADER = ["figure", "oneloop", "vLLM", "better by", "target", ""]
PAGE_HEADER = ["oneloop", "vLLM", "target"]


def figures_table(model: str, figures: Mapping[str, float]) -> str:
    """Return aligned text: the measured rows of `targets.py`, then all other figures."""
    known = {row.key: row for row in ROWS}
    others = [Row(key, key, "", 3) for key in figures if key not in known]
    rows = [row for row in ROWS if row.key in figures] + others
    grid = [HEADER, *(_cells(row, model, figures[row.key]) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    widths[0] = -widths[0]  # to the left
    lines = (
        "  ".join(f"{cell:{'<' if w < 0 else '>'}{abs(w)}}" for cell, w in zip(line, widths, strict=True))
        for line in grid
    )
    return "\n".join(line.rstrip() for line in lines)


def latest(records: Iterable[Record], model: str) -> tuple[dict[str, float], list[Record]]:
    """Return the latest figures of `model`, and the records that contain them, oldest first."""
    source: dict[str, Record] = {}
    for record in records:
        if record["model"] == model:
            source |= dict.fromkeys(record["figures"], record)
    used: list[Record] = []
    for record in source.values():
        if record not in used:
            used.append(record)
    used.sort(key=lambda record: record["date"])
    return {key: record["figures"][key] for key, record in source.items()}, used


def notes_of(page: str) -> str:
    """Return the hand-written notes at the end of a page's text."""
    return page.partition(NOTES)[2].strip() or "None yet."


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * len(header[1:])], *rows]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else '' for cell in line)}|" for line in lines)


def _source(record: Record) -> str:
    """Return date, machine and command of a record. Options that only name the record's files are left out."""
    command = re.sub(r" (--output-json|--tokenizer) \S+", "", record["command_line"]).removeprefix(
        "python -m loadtests "
    )
    return f"{record['date'][:10]}, {record['machine']}: `{command}`"


def results_page(records: Sequence[Record], notes: str) -> str:
    """Return the text of RESULTS.md."""
    parts = [
        "# Results on the GPU",
        "For those who compare servers, or look for what is still slow. "
        "Made by `python -m loadtests results` from `results.jsonl`; only the notes are written by hand.",
        f"Peer: {PEER} (steps in process: 2026-11-22), alone on one NVIDIA H200. bf16, dummy weights. In parentheses: how many "
        "times better oneloop is. Targets are minimums of tok/s and maximums of everything else; ✓ met, ✗ missed. A command "
        "follows `python -m loadtests`.",
        LEGEND,
    ]
    for model in MODELS:
        figures, used = latest(records, model)
        parts.append(f"## {model}")
        parts.append("  \n".join(map(_source, used)) or "Not measured yet.")
        for group in dict.fromkeys(row.group for row in ROWS if row.group != HTTP):
            rows = [row for row in ROWS if row.group == group and (model in row.target or model in row.vllm)]
            parts.append(
                _markdown([group, *PAGE_HEADER], [page_cells(row, model, figures.get(row.key)) for row in rows])
            )
        if traffic := traffic_table(model, figures):
            parts.append(_markdown(traffic[0], traffic[1:]))
    if PICTURE.exists():
        parts.append(
            f'<img src="{PICTURE.name}" width="100%" alt="Traffic: throughput and times, p50 and p99, of both models">'
        )
    return "\n\n".join([*parts, NOTES.strip(), notes]) + "\n"


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Read records from files. Raises OSError, or ValueError that names the file."""
    records: list[Record] = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                record = json.loads(line)
                _ = record["model"], record["date"], record["machine"], record["command_line"], dict(record["figures"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not a record of steps or gpu ({error!r})") from None
            records.append(record)
    return records


def main(args: argparse.Namespace) -> int:
    try:
        records = read_records(args.records)
        if args.plot is not None:
            check_pictures([args.plot])
            draw_traffic(args.plot, {model: latest(records, model)[0] for model in MODELS})
        notes = notes_of(args.out.read_text() if args.out.exists() else "")
        args.out.write_text(results_page(records, notes))
    except (CannotDraw, OSError, ValueError) as error:
        print(f"loadtests results: {error}", file=sys.stderr)
        return 2
    summary = {"command": "results", "file": str(args.out), "records": len(records)}
    summary |= {"figures": {model: latest(records, model)[0] for model in MODELS}}
    print(json.dumps(summary), flush=True)
    return 0
