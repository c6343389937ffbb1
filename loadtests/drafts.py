"""Command `python -m loadtests drafts`: measure step time and tokens per second with and without speculative decoding.

It runs `python -m loadtests.engine --steps` in one process per configuration, with random weights. Drafts are therefore accepted
at random (`synthetic_acceptance`), or come from a draft model equal to the model. Options after `--` go to each engine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.results import add_to_file, new_record
from loadtests.steps import records_of, tell

SUMMARY = "measure steps with and without draft tokens (speculative decoding)"
CHANCE = {"num_speculative_tokens": 3, "synthetic_acceptance": 0.7}
Records = Mapping[int, Mapping[str, Any]]  # by batch size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="folder with a config.json; weights are random")
    add("--batch", type=int, nargs="+", default=[1, 32, 256], metavar="B", help="batch sizes (default 1 32 256)")
    add(
        "--method",
        default="ngram",
        help="speculative method, with 3 drafts and an acceptance rate of 0.7 (default ngram)",
    )
    add(
        "--drafts-by",
        type=Path,
        metavar="FOLDER",
        help="folder with the config.json of the draft model, for methods that need one",
    )
    add(
        "--config", nargs="+", metavar="JSON",
        help="values of --speculative-config to measure (default: --method with fixed and with adaptive drafts)",
    )  # fmt: skip
    add("--output-json", type=Path, metavar="JSONL", help="file to which the result is appended")
    add(
        "engine_options",
        nargs="*",
        metavar="-- OPTION",
        help="after --: options of the engine, such as --max-num-seqs 256",
    )


def configs_of(method: str, drafts_by: Path | None) -> list[str]:
    """Return two speculative configurations of `method`: 3 draft tokens, and an adaptive number. `drafts_by`: folder of the
    draft model, if any."""
    given = {"method": method, **CHANCE} | ({} if drafts_by is None else {"model": str(drafts_by)})
    return [json.dumps(given | {"adaptive": False}), json.dumps(given)]


def measured(args: argparse.Namespace, config: str | None) -> tuple[dict[str, Any], Records, bool]:
    """Run one measurement with `config`. Return the facts of the start, the figures, and whether all figures could be measured."""
    command = [
        sys.executable,
        "-m",
        f"{__package__}.engine",
        "--model",
        str(args.model),
        "--steps",
        *map(str, args.batch),
    ]
    command += [] if config is None else ["--speculative-config", config]
    start: dict[str, Any] = {}
    found: dict[int, dict[str, Any]] = {}
    failed = False
    with subprocess.Popen([*command, *args.engine_options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for record in records_of(process.stdout):
                print(tell(record), file=sys.stderr, flush=True)
                failed |= "error" in record
                if record["figure"] == "start":
                    start = record
                elif record["figure"] == "steps" and "error" not in record:
                    found[record["batch"]] = record
        except BaseException:
            process.terminate()
            raise
    return start, found, not failed and process.returncode == 0


def table(configs: Sequence[str], plain: Records, drafted: Sequence[Records]) -> str:
    """Return aligned text with a line per batch size and configuration. It shows ratios to the figures without drafts."""
    lines = [
        f"{'batch':>6} {'ms a step':>10} {'x plain':>8} {'tokens a step':>14} {'tok/s':>10} {'x plain':>8}  guesses"
    ]
    for batch, one in plain.items():
        lines.append(
            f"{batch:>6} {one['ms']:>10.3f} {'':>8} {one['tokens_a_step']:>14.2f} {one['tok_per_s']:>10,.0f} {'':>8}  none"
        )
        for config, found in zip(configs, drafted, strict=True):
            if (two := found.get(batch)) is not None:
                ratios = two["ms"] / one["ms"], two["tok_per_s"] / one["tok_per_s"]
                lines.append(
                    f"{batch:>6} {two['ms']:>10.3f} {ratios[0]:>8.3f} {two['tokens_a_step']:>14.2f} {two['tok_per_s']:>10,.0f} "
                    f"{ratios[1]:>8.3f}  {config}"
                )
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Run the measurements. Return 0 if every figure was measured, 2 if nothing could begin."""
    if not (args.model / "config.json").is_file():
        print(f"loadtests drafts: {args.model}: no config.json there", file=sys.stderr)
        return 2
    configs = args.config or configs_of(args.method, args.drafts_by)
    runs = [measured(args, config) for config in (None, *configs)]
    (start, plain, _), drafted = runs[0], [found for _, found, _ in runs[1:]]
    figures = {f"steps_ms.plain.{batch}": record["ms"] for batch, record in plain.items()}
    for number, found in enumerate(drafted, 1):
        for batch, record in found.items():
            figures[f"steps_ms.{number}.{batch}"] = record["ms"]
            if batch in plain:
                figures[f"tok_per_s_ratio.{number}.{batch}"] = record["tok_per_s"] / plain[batch]["tok_per_s"]
    name = args.model.resolve().name
    device = " ".join(str(start[key]) for key in ("device_name", "dtype") if key in start)
    result = new_record("drafts", name, device, figures) | {"configs": configs, "details": [run[1] for run in runs]}
    print(table(configs, plain, drafted))
    if args.output_json is not None:
        add_to_file(args.output_json, result)
    print("\n" + json.dumps(result), flush=True)
    return 0 if all(complete for _, _, complete in runs) else 1
