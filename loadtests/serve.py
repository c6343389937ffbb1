"""`python -m loadtests serve`: workloads against one running server; a table, remarks, a last JSON line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests import processes
from loadtests.address import Address, AddressRefused
from loadtests.clients import measure_with_clients, num_clients
from loadtests.figures import Run, Slo, summarise
from loadtests.lengths import Lengths
from loadtests.load import Limits, RequestOptions
from loadtests.probe import ProbeFailed, bucket_percentile, first_model, loop_lag_buckets
from loadtests.report import serve_remarks, serve_table
from loadtests.workloads import Workload, find_workloads

SUMMARY = "measure one running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", required=True, metavar="URL", help="http://127.0.0.1:8000; loopback only")
    add("--model", help="model name in requests (default: the first of /v1/models)")
    add("--workload", nargs="+", default=["cpu"], metavar="NAME", help="cpu, gpu, c16, c32_512_128, c32_2048+128_64, …")
    shape = parser.add_argument_group("changes to every workload named")
    shape.add_argument("--rate", type=float, metavar="R", help="open loop: Poisson arrivals, R requests a second")
    shape.add_argument(
        "--concurrency", type=int, metavar="N", help="streams; with --rate, the most in flight (default there: 4096)"
    )
    shape.add_argument("--num-requests", type=int, metavar="N")
    shape.add_argument("--output-tokens", type=Lengths.parse, metavar="N", help="or LOW-HIGH, or ~MEDIAN")
    shape.add_argument("--endpoint", choices=["chat", "completions"])
    shape.add_argument("--warmup", type=int, metavar="N", help="requests sent one by one before the clock starts")
    shape.add_argument(
        "--seed", type=int, metavar="N", help="other prompts, which no earlier run has left in a prefix cache"
    )
    shape.add_argument(
        "--vocab-size", type=int, default=49_152, metavar="N", help="for prompts of random ids (default 49152)"
    )
    body = parser.add_argument_group("requests")
    body.add_argument("--no-ignore-eos", action="store_true", help="let answers end by themselves")
    body.add_argument(
        "--extra-body", type=json.loads, default={}, metavar="JSON", help="merged into each request; null removes"
    )
    run = parser.add_argument_group("runs")
    run.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="runs of each workload, each with other prompts"
    )
    run.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="e.g. ttft:500 tpot:50; also itl, e2e"
    )
    run.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="client processes (default: 1 per 64 streams, at most a quarter of the cores)",
    )
    run.add_argument("--pid", type=int, help="the server's process here: adds its CPU per token and its memory")
    run.add_argument("--timeout", type=float, default=300, metavar="S", help="for one request (default 300)")
    run.add_argument("--max-seconds", type=float, default=540, metavar="S", help="for one run (default 540)")
    run.add_argument("--plot", type=Path, metavar="PNG", help="distributions of TTFT, ITL and e2e; needs matplotlib")


def wanted_workloads(args: argparse.Namespace) -> list[Workload]:
    """Raises ValueError."""
    changes: dict[str, Any] = {
        "rate_per_s": args.rate,
        "concurrency": args.concurrency if args.concurrency is not None or args.rate is None else 4096,
        "num_requests": args.num_requests,
        "num_output_tokens": args.output_tokens,
        "endpoint": args.endpoint,
        "num_warmup": args.warmup,
        "seed": args.seed,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if args.repeat < 1:
        raise ValueError("--repeat must be at least 1")
    changed = [replace(workload, **given) for workload in find_workloads(args.workload, args.vocab_size)]
    return [workload.repeated(index) for workload in changed for index in range(args.repeat)]


def main(args: argparse.Namespace) -> int:
    """0 when every request of every run was answered whole; 2 when it could not begin."""
    try:
        address, slo, workloads = Address.parse(args.base_url), Slo.parse(args.goodput), wanted_workloads(args)
        if args.pid is not None and processes.read_stat(args.pid) is None:
            raise ValueError(f"--pid {args.pid}: no such process")
        if args.clients is not None and args.clients < 1:
            raise ValueError("--clients must be at least 1")
        if not isinstance(args.extra_body, dict):
            raise ValueError("--extra-body is not a JSON object")
        model = args.model or first_model(address)
    except (AddressRefused, ProbeFailed, ValueError) as error:
        print(f"loadtests serve: {error}", file=sys.stderr)
        return 2
    request_options = RequestOptions(model, not args.no_ignore_eos, args.extra_body)
    limits = Limits(args.timeout, args.max_seconds)
    print(f"{address.url}, model {model}")
    runs, records = [], []
    for workload in workloads:
        print(f"  {workload.name}: {workload.describe()}", file=sys.stderr)
        run, record = run_workload(address, workload, request_options, limits, slo, args.pid, args.clients)
        runs.append((workload.name, run))
        records.append(record)
    print("\n".join([serve_table(records), *serve_remarks(records)]))
    if args.plot:
        plot(args.plot, runs)
    print(json.dumps({"command": "serve", "base_url": address.url, "model": model, "runs": records}), flush=True)
    return 1 if any(record["errors"] for record in records) else 0


def run_workload(
    address: Address, workload: Workload, request_options: RequestOptions, limits: Limits, slo: Slo | None = None,
    pid: int | None = None, clients: int | None = None,
) -> tuple[Run, dict[str, Any]]:  # fmt: skip
    """One run and its flat record. `pid`: the server's first process, where it is known. `clients`: processes that send;
    None takes as many as the streams and the cores suggest."""
    lag_before = loop_lag_buckets(address)
    server_cpu = None if pid is None else lambda: processes.cpu_s(pid)
    crew = num_clients(workload.concurrency, clients)
    run = measure_with_clients(address, workload, request_options, limits, crew, server_cpu)
    lag_s = bucket_percentile(lag_before, loop_lag_buckets(address), 99)
    record: dict[str, Any] = {
        "workload": workload.name,
        "concurrency": workload.concurrency,
        "rate_per_s": workload.rate_per_s,
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


def plot(path: Path, runs: Sequence[tuple[str, Run]]) -> None:
    try:
        from loadtests.plot import plot_latencies

        plot_latencies(path, runs)
    except ImportError as error:
        print(f"no plot: {error}; pip install matplotlib", file=sys.stderr)
