"""Command `python -m loadtests speech`: seconds of audio that a speech model transcribes per second, for N files at once.

oneloop (`LLM.transcribe`) and the systems of --beside transcribe the same audio on the same device alternately in one process.
With --tokens, --model is a folder with a shape: weights are random, every 30 s window has that number of tokens, and audio is
generated. Otherwise the model is real, and --audio names WAV files (16 kHz, mono, 16 bits). Options after `--` go to the engine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadtests.results import add_to_file, new_record
from loadtests.steps import records_of

SUMMARY = "seconds of audio transcribed per second, at oneloop and other systems in turns"
SYSTEMS = ("transformers", "faster-whisper", "whisper.cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="whisper-tiny.en", metavar="NAME", help="model or, with --tokens, folder of a config.json")
    add("--tokens", type=int, metavar="N", help="use random weights, and N tokens per window")
    add("--files", type=int, nargs="+", default=[1, 4], metavar="N", help="concurrent files (default: 1 4)")
    add("--seconds", type=float, default=30.0, metavar="S", help="length of generated audio (default: 30)")
    add(
        "--audio",
        type=Path,
        nargs="+",
        default=[],
        metavar="WAV",
        help="files to transcribe instead of generated audio",
    )
    add(
        "--beside",
        nargs="*",
        default=[],
        choices=SYSTEMS,
        metavar="SYSTEM",
        help=f"other systems to measure: {', '.join(SYSTEMS)}",
    )
    add("--ggml", type=Path, metavar="FILE", help="the model in whisper.cpp's format")
    add("--compute-type", default="int8", metavar="TYPE", help="number format of faster-whisper (default: int8)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="device of all systems (default: cpu)")
    add("--threads", type=int, default=2, metavar="N", help="threads of each system on a CPU (default: 2)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds, of which the best counts (default: 3)")
    add("--output-json", type=Path, metavar="JSONL", help="file to which the result is appended")
    add(
        "engine_options",
        nargs="*",
        metavar="-- OPTION",
        help="after --: options of the engine, such as --quantization int8",
    )


def main(args: argparse.Namespace) -> int:
    """Run the benchmark. Return 0 if every system was measured with every number of files, 2 for contradictory arguments."""
    refusal = refused(args)
    if refusal is not None:
        print(f"loadtests speech: {refusal}", file=sys.stderr)
        return 2
    wanted = {name: value for name, value in vars(args).items() if name not in ("main", "command", "output_json")}
    command = [sys.executable, "-m", f"{__package__}.engine.speech", json.dumps(wanted, default=str)]
    taken: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for record in records_of(process.stdout):
                taken.append(record)
                print(shown(record), file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()
            raise
    speeds = [record for record in taken if record["figure"] == "speech"]
    figures = {f"{record['system']}.{record['files']}": record["audio_s_per_s"] for record in speeds}
    device = next((record["device_name"] for record in taken if "device_name" in record), args.device)
    result = new_record("speech", Path(args.model).name, device, figures) | {"details": taken}
    print(table(args, figures))
    if args.output_json is not None:
        add_to_file(args.output_json, result)
    print("\n" + json.dumps(result), flush=True)
    is_complete = len(speeds) == len(args.files) * (1 + len(args.beside))
    return 0 if is_complete and process.returncode == 0 else 1


def refused(args: argparse.Namespace) -> str | None:
    """Return an error message if these arguments cannot be measured, or None."""
    if min(*args.files, args.rounds, args.threads) < 1 or args.seconds <= 0:
        return "files, rounds, threads and seconds must be positive"
    if args.tokens is None and not args.audio:
        return "a real model transcribes real speech: add --audio WAV, or --tokens N to measure its shape"
    if args.tokens is not None and not (Path(args.model) / "config.json").is_file():
        return f"{args.model} has no config.json, which is a shape with --tokens"
    if args.tokens is not None and set(args.beside) - {"transformers"}:
        return "only transformers transcribes with random weights (--tokens)"
    if "whisper.cpp" in args.beside and args.ggml is None:
        return "whisper.cpp reads its own format: add --ggml FILE"
    return None


def shown(record: dict[str, Any]) -> str:
    """Return the progress line for a record."""
    facts = {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
    return f"  {record['figure']}: " + ", ".join(f"{key} {facts[key]}" for key in facts if key != "figure")


def table(args: argparse.Namespace, figures: dict[str, float]) -> str:
    """Return a table with the seconds of audio per second of each system, and the ratio of oneloop to it."""
    lines = ["files  " + "  ".join(f"{name:>24}" for name in ("oneloop", *args.beside))]
    for files in args.files:
        ours = figures.get(f"oneloop.{files}")
        cells = []
        for system in ("oneloop", *args.beside):
            speed = figures.get(f"{system}.{files}")
            ratio = f" ({ours / speed:.2f}x)" if ours and speed and system != "oneloop" else ""
            cells.append(f"{'-' if speed is None else f'{speed:,.1f}'}{ratio}")
        lines.append(f"{files:>5}  " + "  ".join(f"{cell:>24}" for cell in cells))
    return "\n".join(["seconds of audio per second (oneloop in relation to each)", *lines])
