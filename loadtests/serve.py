"""Command `oneloop bench serve`: run workloads against one running server. Prints a table, remarks and JSON; saves charts and
records."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from loadtests import processes
from loadtests.address import Address, AddressRefused
from loadtests.arguments import Target, add_arrivals, add_shape, add_target, wanted_workloads
from loadtests.clients import measure_with_clients, num_clients
from loadtests.figures import Run, Slo, summarise
from loadtests.load import Limits, RequestOptions
from loadtests.pictures import CannotDraw, check_pictures, draw
from loadtests.probe import ProbeFailed, bucket_percentile, loop_lag_buckets
from loadtests.report import serve_remarks, serve_table
from loadtests.saved import append_records, shape_of_run
from loadtests.workloads import Workload

SUMMARY = "measure one running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workload",
        nargs="+",
        default=[],
        metavar="NAME",
        help="cpu, gpu, c16, c32_512_128, burst, chat, turns, rag, agents, structured, embeddings, … (default cpu)",
    )
    add("--repeat", type=int, default=1, metavar="N", help="runs of each workload, each with different prompts")
    add("--out", type=Path, metavar="JSONL", help="file to which runs are appended, for `plot`")
    add("--plot", type=Path, nargs="+", default=[], metavar="FILE", help="chart, .svg or .png; needs matplotlib")
    add_target(parser)
    add_arrivals(add_shape(parser))


def begin(
    command: str, args: argparse.Namespace, read: Callable[[argparse.Namespace], Iterable[Workload]]
) -> tuple[Iterable[Workload], Target] | None:
    """Return the workloads that `read` finds in `args`, and the server. None if `command` cannot begin; the reason is printed."""
    try:
        workloads = read(args)
        check_pictures(args.plot)
        if args.out:
            args.out.touch()
        return workloads, Target.of(args)
    except (AddressRefused, ProbeFailed, CannotDraw, ValueError, OSError) as error:
        print(f"bench {command}: {error}", file=sys.stderr)
        return None


def main(args: argparse.Namespace) -> int:
    """Run the workloads. Return 0 if every answer of every run was complete, 2 if nothing could begin."""
    begun = begin("serve", args, wanted_workloads)
    if begun is None:
        return 2
    workloads, target = begun
    model = target.request_options.model
    print(f"{target.address.url}, model {model}")
    records = []
    for workload in workloads:
        print(f"  {workload.name}: {workload.describe()}", file=sys.stderr)
        run, record = run_workload(
            target.address, workload, target.request_options, target.limits, target.slo, target.pid, target.clients
        )
        records.append(record)
        if args.out or args.plot:
            kept = {"kind": "run", "server": target.name, **record, **shape_of_run(run)}
            records[-1] = kept
            if args.out:
                append_records(args.out, [kept])
    print("\n".join([serve_table(records), *serve_remarks(records)]))
    for path in args.plot:
        draw(path, records)
    shown = [{name: value for name, value in each.items() if name not in ("cdf", "timeline")} for each in records]
    print(json.dumps({"command": "serve", "base_url": target.address.url, "model": model, "runs": shown}), flush=True)
    return 1 if any(record["errors"] for record in records) else 0


def run_workload(
    address: Address, workload: Workload, request_options: RequestOptions, limits: Limits, slo: Slo | None = None,
    pid: int | None = None, clients: int | None = None,
) -> tuple[Run, dict[str, Any]]:  # fmt: skip
    """Run a workload. Return the run and its flat record. `pid`: the server's first process, if known. `clients`: number of
    client processes; None chooses by streams and cores."""
    lag_before = loop_lag_buckets(address)
    server_cpu = None if pid is None else lambda: processes.cpu_s(pid)
    crew = num_clients(workload.concurrency, clients)
    run = measure_with_clients(address, workload, request_options, limits, crew, server_cpu)
    lag_s = bucket_percentile(lag_before, loop_lag_buckets(address), 99)
    record: dict[str, Any] = {
        "workload": workload.name,
        "concurrency": workload.concurrency,
        "rate_per_s": workload.arrivals and workload.arrivals.rate_per_s,
        **summarise(run, slo),
    }
    if lag_s is not None:
        record["loop_lag_ms_p99"] = lag_s * 1000
    if pid is not None:
        record |= {
            "rss_mib": round(processes.resident_mib(pid), 1),
            "peak_rss_mib": round(processes.peak_resident_mib(pid), 1),
        }
    return run, record
