"""Command `python -m loadtests results`: generate RESULTS.md from the records of `steps` and `gpu`.

A record is one JSON object: command, model, date, machine, command line, and `figures` by the keys of `targets.ROWS`. If
several records have the same figure of a model, the last one counts. "Notes" are written by hand and kept."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtests.pictures import CannotDraw, check_pictures, draw_traffic
from loadtests.targets import MODELS, PEER, ROWS, Row
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
    add("--plot", type=Path, metavar="FILE", help="traffic as one picture, .svg or .png; needs matplotlib")


def new_record(command: str, model: str, device: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """Return the common fields of a record: date, machine, command line."""
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


def _cells(row: Row, model: str, figure: float | None) -> list[str]:
    """Return title, our figure, vLLM's, our ratio to vLLM, target, and whether it is met."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.{row.digits}f}"

    vllm, target = row.vllm.get(model), row.target.get(model)
    goal = "-" if target is None else f"{'>=' if row.more_is_better else '<='} {target:,g}"
    if figure is None:
        return [row.title, "not measured", shown(vllm), "-", goal, "-"]
    ratio = "-"
    if vllm and figure:
        ratio = f"{figure / vllm if row.more_is_better else vllm / figure:.2f}x"
    verdict = {None: "-", True: "met", False: "missed"}[row.met(model, figure)]
    return [row.title, shown(figure), shown(vllm), ratio, goal, verdict]


HEADER = ["figure", "oneloop", "vLLM", "better by", "target", ""]


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
    """Return the latest figures of a model and their records, oldest first."""
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
    """Return the hand-written notes at the end of a page."""
    return page.partition(NOTES)[2].strip() or "None yet."


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results_page(records: Sequence[Record], notes: str) -> str:
    """Return the text of RESULTS.md."""
    parts = [
        "# Results on the GPU",
        "Made by `python -m loadtests results` from `results.jsonl`; only the notes are written by hand. "
        f"Peer: {PEER} (steps in process: 2026-11-22), alone on one NVIDIA H200 (`targets.py`). bf16, dummy weights; "
        "definitions in `loadtests/engine/`, `figures.py` and `workloads.py`.",
    ]
    for model in MODELS:
        figures, used = latest(records, model)
        parts.append(f"## {model}")
        sources = (f"{record['date']}, {record['machine']}: `{record['command_line']}`" for record in used)
        parts.append("  \n".join(sources) or "Not measured yet.")
        for group in dict.fromkeys(row.group for row in ROWS):
            rows = [row for row in ROWS if row.group == group and (model in row.target or model in row.vllm)]
            cells = [_cells(row, model, figures.get(row.key)) for row in rows]
            lines = [[group, *HEADER[1:]], ["---", *["---:"] * len(HEADER[1:])], *cells]
            parts.append(_markdown(lines))
        if traffic := traffic_table(model, figures):
            header, *rows = traffic
            parts.append(_markdown([header, ["---", *["---:"] * len(header[1:])], *rows]))
    if PICTURE.exists():
        parts.append(
            f'<img src="{PICTURE.name}" width="100%" alt="Traffic: throughput and times, p50 and p99, of both models">'
        )
    return "\n\n".join([*parts, NOTES.strip(), notes]) + "\n"


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Read records from files. Raises OSError, or ValueError naming the file."""
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
