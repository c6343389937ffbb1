"""Arguments of the commands that measure a running server: server, workloads, requests, limits.

An option that vLLM's `bench serve` also has accepts vLLM's name."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtests import arrivals, processes
from loadtests.address import Address
from loadtests.figures import Slo
from loadtests.lengths import Lengths
from loadtests.load import Limits, RequestOptions
from loadtests.probe import first_model
from loadtests.trace import read_trace
from loadtests.workloads import MAX_CONCURRENCY, Workload, find_workloads


@dataclass(frozen=True, slots=True)
class Target:
    """Server to measure: its address, request options, limits and monitored process."""

    name: str
    address: Address
    request_options: RequestOptions
    limits: Limits
    slo: Slo
    pid: int | None
    clients: int | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Target:
        """Create the target from parsed arguments. Raises AddressRefused, ProbeFailed, ValueError."""
        key = os.environ.get("OPENAI_API_KEY") if args.api_key is None else args.api_key
        address = Address.of_server(args.base_url, remote=args.remote, api_key=key or None)
        slo = Slo.parse(args.goodput)
        if args.pid is not None and processes.read_stat(args.pid) is None:
            raise ValueError(f"--pid {args.pid}: no such process")
        if args.clients is not None and args.clients < 1:
            raise ValueError("--clients must be at least 1")
        if not isinstance(args.extra_body, dict):
            raise ValueError("--extra-body is not a JSON object")
        model = args.model or first_model(address)
        options = RequestOptions(model, not args.no_ignore_eos, args.extra_body)
        limits = Limits(args.timeout, args.max_seconds)
        return cls(args.name or address.url, address, options, limits, slo, args.pid, args.clients)


def add_target(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--base-url",
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="any OpenAI-compatible server: http://, https:// or unix:PATH (default http://127.0.0.1:8000)",
    )
    server.add_argument("--remote", action="store_true", help="allow a server on another machine")
    server.add_argument(
        "--api-key", metavar="KEY", help="API key; visible in ps, so prefer $OPENAI_API_KEY (the default)"
    )
    server.add_argument("--model", help="model name in requests (default: the first of /v1/models)")
    server.add_argument("--name", help="name of the server in tables and charts (default: its URL)")
    server.add_argument("--pid", type=int, help="process id of a server on this machine, to measure CPU and memory")
    body = parser.add_argument_group("requests")
    body.add_argument("--no-ignore-eos", action="store_true", help="let answers end before the requested length")
    body.add_argument(
        "--extra-body",
        type=json.loads,
        default={},
        metavar="JSON",
        help="JSON fields to merge into each request; null removes a field",
    )
    body.add_argument("--timeout", type=float, default=300, metavar="S", help="time limit of a request (default 300)")
    body.add_argument("--max-seconds", type=float, default=540, metavar="S", help="time limit of a run (default 540)")
    body.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="client processes (default: 1 per 64 streams, at most a quarter of the cores)",
    )
    body.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="maximum latencies of a good answer, such as ttft:500 tpot:50; also itl, e2e",
    )


def add_shape(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments that change every named workload, for both open and closed loops. Return their group."""
    shape = parser.add_argument_group("changes to every named workload")
    shape.add_argument("--output-tokens", type=Lengths.parse, metavar="N", help="output tokens: N, LOW-HIGH or ~MEDIAN")
    shape.add_argument("--endpoint", choices=["chat", "completions"])
    shape.add_argument("--warmup", type=int, metavar="N", help="warm-up requests, sent one by one")
    shape.add_argument("--seed", type=int, metavar="N", help="seed of the prompts; a new one avoids prefix cache hits")
    shape.add_argument(
        "--vocab-size", type=int, default=49_152, metavar="N", help="vocabulary of random ids (default 49152)"
    )
    return shape


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `add_shape` as fields of a Workload."""
    return _given(num_output_tokens=args.output_tokens, endpoint=args.endpoint, num_warmup=args.warmup, seed=args.seed)


def add_arrivals(shape: argparse._ArgumentGroup) -> None:
    add = shape.add_argument
    when = shape.add_mutually_exclusive_group()
    when.add_argument("--rate", "--request-rate", type=float, metavar="R", help="Poisson arrivals, R requests a second")
    when.add_argument("--arrivals", type=arrivals.parse, metavar="SPEC", help=arrivals.KINDS)
    when.add_argument(
        "--trace",
        type=Path,
        metavar="JSONL",
        help="trace to replay instead of a workload: timestamp (ms), input_length, output_length, hash_ids (Mooncake's format)",
    )
    add(
        "--trace-speed",
        type=float,
        metavar="X",
        help="speed factor of the trace; 2 replays it in half the time (default 1)",
    )
    add(
        "--concurrency",
        "--max-concurrency",
        type=int,
        metavar="N",
        help="concurrent streams; in an open loop, the maximum in flight (default there: 4096)",
    )
    add("--num-requests", "--num-prompts", type=int, metavar="N")


def wanted_workloads(args: argparse.Namespace) -> list[Workload]:
    """Return the requested workloads. Raises ValueError, OSError."""
    if args.repeat < 1:
        raise ValueError("--repeat must be at least 1")
    arriving = args.arrivals if args.rate is None else arrivals.Poisson(args.rate)
    most = MAX_CONCURRENCY if arriving is not None else None
    changes = shape_of(args) | _given(
        arrivals=arriving,
        num_requests=args.num_requests,
        concurrency=most if args.concurrency is None else args.concurrency,
    )
    if args.trace is None and args.trace_speed is not None:
        raise ValueError("--trace-speed needs --trace")
    found = [_replayed(args)] if args.trace is not None else find_workloads(args.workload or ["cpu"], args.vocab_size)
    changed = [replace(workload, **changes) for workload in found]
    return [workload.repeated(index) for workload in changed for index in range(args.repeat)]


def _replayed(args: argparse.Namespace) -> Workload:
    if args.workload or args.output_tokens is not None:
        raise ValueError("--trace sets requests and answer lengths: leave out --workload and --output-tokens")
    prompt = read_trace(args.trace, args.vocab_size, args.num_requests)
    if args.num_requests is not None and args.num_requests > len(prompt.recorded):
        raise ValueError(f"--num-requests {args.num_requests}: the trace has {len(prompt.recorded)}")
    lengths = [each.num_output_tokens for each in prompt.recorded]
    return Workload(
        args.trace.stem, prompt, MAX_CONCURRENCY, len(prompt.recorded), Lengths(min(lengths), max(lengths)), num_warmup=1,
        arrivals=prompt.arrivals(1.0 if args.trace_speed is None else args.trace_speed), endpoint="completions",
    )  # fmt: skip


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
