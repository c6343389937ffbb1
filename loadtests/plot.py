"""Command `oneloop bench plot`: draw a chart of runs saved by `serve --out` or `sweep --out`, of any number of servers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from loadtests.pictures import CannotDraw, check_pictures, draw
from loadtests.saved import NotSaved, read_records

SUMMARY = "draw saved runs of one or several servers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("records", type=Path, nargs="+", metavar="JSONL", help="output files of serve --out or sweep --out")
    add("--out", type=Path, nargs="+", required=True, metavar="FILE", help=".svg or .png, one or several")
    add("--workload", nargs="+", default=[], metavar="NAME", help="workloads to draw (default: all in the files)")


def main(args: argparse.Namespace) -> int:
    try:
        check_pictures(args.out)
        records = read_records(args.records)
        if args.workload:
            records = [record for record in records if record["workload"] in args.workload]
            if not records:
                raise NotSaved(f"no run of {', '.join(args.workload)} in these files")
        for path in args.out:
            draw(path, records)
    except (CannotDraw, NotSaved, OSError) as error:
        print(f"bench plot: {error}", file=sys.stderr)
        return 2
    servers = list(dict.fromkeys(record["server"] for record in records))
    print(json.dumps({"command": "plot", "pictures": list(map(str, args.out)), "servers": servers}))
    return 0
