"""Command `python -m loadtests steps`: measure step times, prefill rates and start-up of the engine in one process. It shows vLLM's
figures and the targets next to them.

`python -m loadtests.engine` measures in a separate process; its lines become a table and one record. By default, every row of
`targets.py` is measured. Options after `--` go to the engine: the fields of EngineConfig, such as `-- --max-num-seqs 512`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loadtests.results import add_to_file, figures_table, new_record

SUMMARY = "measure the engine in process: steps, prefill, start-up (the GPU rows)"
ROWS = {"--batch": (1, 8, 32, 64, 128, 256), "--prefill": ("8x8192", "64x512"), "--ttft": (128,)}  # those of targets.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="folder with a config.json; weights are random")
    add("--batch", type=int, nargs="*", metavar="B", help="decode at these batch sizes; no B: those of targets.py")
    add("--prefill", nargs="*", metavar="AxT", help="A prompts of T ids")
    add("--ttft", type=int, nargs="*", metavar="T", help="first token of one prompt of T ids")
    add("--throughput", action="store_true", help="256 requests of 100-1024 tokens in and out, temperature 0.6")
    add("--profile", type=Path, metavar="DIR", help="folder for kernel tables of a decode step, as text and JSON")
    add("--profile-batch", type=int, nargs="+", default=[1, 256], metavar="B")
    add("--output-json", type=Path, metavar="JSONL", help="file to which the result is appended")
    add(
        "engine_options",
        nargs="*",
        metavar="-- OPTION",
        help="after --: options of the engine, such as --max-num-seqs 512",
    )


def command_of(args: argparse.Namespace) -> list[str]:
    """Return the command line of the measuring process."""
    wished = {"--batch": args.batch, "--prefill": args.prefill, "--ttft": args.ttft}
    everything = not args.throughput and args.profile is None and all(values is None for values in wished.values())
    command = [sys.executable, "-m", f"{__package__}.engine", "--model", str(args.model)]
    for flag, values in wished.items():
        if values is not None or everything:
            command += [flag, *map(str, values or ROWS[flag])]
    if args.throughput or everything:
        command += ["--throughput"]
    if args.profile is not None:
        command += ["--profile", str(args.profile), "--profile-batch", *map(str, args.profile_batch)]
    return [*command, *args.engine_options]


def records_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a process's output as objects. Other lines are printed."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and "figure" in record:
            yield record
        else:
            print(line.rstrip(), file=sys.stderr, flush=True)


def figures_of(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures by the keys of `targets.ROWS`. Figures that failed are left out."""
    figures: dict[str, float] = {}
    for record in records:
        if "error" in record:
            continue
        match record["figure"]:
            case "decode":
                figures[f"decode_ms.{record['batch']}"] = record["ms"]
            case "prefill":
                figures[f"prefill_tok_per_s.{record['requests']}x{record['tokens']}"] = record["tok_per_s"]
            case "ttft":
                figures[f"ttft_ms.{record['tokens']}"] = record["ms"]
            case "throughput":
                figures["throughput_tok_per_s"] = record["out_tok_per_s"]
    return figures


def tell(record: Mapping[str, Any]) -> str:
    """Return the progress line for `record`."""
    hidden = ("figure", "runs", "gpu_idle_gap", "loop_lag")
    facts = {key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()}
    text = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in hidden)
    for name, title in (("gpu_idle_gap", "GPU idle between steps"), ("loop_lag", "loop lag")):
        if spread := record.get(name):
            bound = spread["p99_s_at_most"]
            p99 = f"p99 <= {bound * 1e6:.0f}" if bound >= 0 else "p99 beyond the buckets"
            text += f"; {title} mean {spread['mean_s'] * 1e6:.0f} us, {p99} ({spread['count']:.0f})"
    return f"  {record['figure']}: {text}"


def main(args: argparse.Namespace) -> int:
    """Run the measurement. Return 0 if every figure was measured, 2 if nothing could begin."""
    if not (args.model / "config.json").is_file():
        print(f"loadtests steps: {args.model}: no config.json there", file=sys.stderr)
        return 2
    taken: list[dict[str, Any]] = []
    with subprocess.Popen(command_of(args), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for record in records_of(process.stdout):
                taken.append(record)
                print(tell(record), file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()
            raise
    by_name = {record["figure"]: record for record in taken}
    start = by_name.get("start", {})
    name = args.model.resolve().name
    device = " ".join(str(start[key]) for key in ("device_name", "dtype") if key in start)
    result = new_record("steps", name, device, figures_of(taken)) | {
        "start": start, "end": by_name.get("end", {}), "details": [r for r in taken if r["figure"] not in ("start", "end")],
    }  # fmt: skip
    for record in taken:
        if record["figure"] == "profile" and "file" in record:
            print(Path(record["file"]).read_text())
    if result["figures"]:
        print(figures_table(name, result["figures"]))
    if start:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in start["phases_s"].items())
        print(f"\nstart_engine {start['start_engine_s']:.2f} s ({phases}); device {device}", end="")
        print(f"; peak host memory {result['end'].get('peak_rss_mib', 0):.0f} MiB")
    if args.output_json is not None:
        add_to_file(args.output_json, result)
    print("\n" + json.dumps(result), flush=True)
    failed = process.returncode != 0 or any("error" in record for record in taken)
    return 1 if failed else 0
