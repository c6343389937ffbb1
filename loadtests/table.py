"""Command `python -m loadtests table`: print the table of a comparison again from its records."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from loadtests.report import comparison_summary, comparison_table

SUMMARY = "print a comparison's table from its JSONL file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", type=Path, metavar="JSONL", help="output file of compare --out")
    parser.add_argument(
        "--ours", default="oneloop", metavar="NAME", help="server to which ratios refer (default: oneloop)"
    )


def main(args: argparse.Namespace) -> int:
    try:
        records = [json.loads(line) for line in args.records.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        print(f"loadtests table: {args.records}: {error}", file=sys.stderr)
        return 2
    if args.ours not in {record["server"] for record in records}:
        print(f"loadtests table: {args.records} has no runs of {args.ours}", file=sys.stderr)
        return 2
    print(comparison_table(records, args.ours))
    print("\n" + json.dumps(comparison_summary(records, args.ours) | {"command": "table"}), flush=True)
    return 0
