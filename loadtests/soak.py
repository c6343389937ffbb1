"""Soak test: run our server under mixed requests for some minutes, then check its state.

The server has few KV blocks, so that sequences preempt each other. Requests of `soak_requests.py`, drawn from a seed, are sent
on several connections at once, and /proc is monitored. Checks: every response is correct, every sequence is counted, and every
block is free; tasks, descriptors and memory are as before; the server exits on a signal."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests import processes
from loadtests.address import Address
from loadtests.answers import BadAnswer, HttpResponse
from loadtests.compare import ServerFailed, wait_until_healthy
from loadtests.exchange import post_request
from loadtests.probe import ProbeFailed, ask
from loadtests.processes import CannotStart, ServerProcess
from loadtests.servers import Server
from loadtests.soak_requests import SoakRequest, fault_of, requests

SUMMARY = "send mixed requests to our server for minutes, then check its state"
OPTIONS = ("--num-kv-blocks", "50", "--max-model-len", "768", "--max-num-seqs", "8", "--max-stored-responses", "50")
MAX_WORDS = 256
WARM_UP = 0.3  # of the time, in which memory may grow: pools, caches, stored responses
REQUEST_LIMIT_S = 300.0
IDLE_LIMIT_S = 120.0
_SAMPLE = re.compile(r"^oneloop:(\w+)(?:\{([^}]*)\})? ([0-9.e+-]+)$", re.MULTILINE)
_WATCH_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the load in minutes (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests (default 0)")
    parser.add_argument("--workers", type=int, default=12, help="concurrent requests (default 12)")
    parser.add_argument(
        "--max-growth-mib", type=float, default=32.0, help="allowed memory growth after the warm-up (default 32)"
    )
    parser.add_argument("--log", type=Path, help="file for the server's log (default: a temporary one)")
    parser.add_argument("server_options", nargs="*", help="after --: more options of the server")


@dataclass(slots=True)
class Tally:
    """Counts of the requests sent and of their results. `losses`: messages about wrong results."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    num_left: int = 0
    losses: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Seen:
    """Sample of the server process: time in seconds, memory in MiB, number of descriptors."""

    at_s: float
    resident_mib: float
    num_descriptors: int
    num_threads: int


def look(pid: int) -> Seen:
    threads = (processes.PROC / str(pid) / "task").iterdir()
    descriptors = (processes.PROC / str(pid) / "fd").iterdir()
    return Seen(time.monotonic(), processes.resident_mib(pid), sum(1 for _ in descriptors), sum(1 for _ in threads))


def metrics(address: Address) -> dict[str, float]:
    """Return every metric by name, summed over labels. Each `finished_reason` is also separate. Raises ProbeFailed."""
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(ask(address, "/metrics", timeout_s=60.0)[1].decode()):
        found[name] = found.get(name, 0.0) + float(value)
        if reason := re.search(r'finished_reason="(\w+)"', labels):
            found[f"{name}.{reason[1]}"] = float(value)
    return found


async def send(address: Address, request: SoakRequest, tally: Tally) -> None:
    tally.kinds[request.kind] += 1
    try:
        async with asyncio.timeout(REQUEST_LIMIT_S):
            status, body = await _exchange(address, request)
    except (OSError, TimeoutError, BadAnswer) as error:
        tally.losses.append(f"{request.kind}: {type(error).__name__}: {error}")
        return
    tally.statuses[status] += 1
    if body is None:
        tally.num_left += 1
    elif (fault := fault_of(request, status, body)) is not None:
        tally.losses.append(f"{request.kind}: {fault}")


async def _exchange(address: Address, request: SoakRequest) -> tuple[int, bytes | None]:
    """Send a request. Return the status (0 without a response) and the whole body, or None if the client disconnects early."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    response, body, num_bytes = HttpResponse(), bytearray(), 0
    try:
        writer.write(post_request(address, request.path, request.body))
        while data := await reader.read(65536):
            num_bytes += len(data)
            if request.leaves_after is not None and num_bytes >= request.leaves_after:
                return response.status, None
            body += response.feed(data)
    finally:
        writer.transport.abort()
    return response.status, bytes(body)


async def load(address: Address, args: argparse.Namespace, model: str, tally: Tally, pid: int) -> list[Seen]:
    """Send requests until the time limit, then wait for requests in flight. Return samples of the server process."""
    ends_s = time.monotonic() + 60 * args.minutes
    source, seen = requests(args.seed, model, MAX_WORDS), [look(pid)]

    async def work(wait_s: float) -> None:
        await asyncio.sleep(wait_s)  # not all at once
        while time.monotonic() < ends_s:
            await send(address, next(source), tally)

    async def watch() -> None:
        while time.monotonic() < ends_s:
            await asyncio.sleep(_WATCH_S)
            seen.append(look(pid))

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for number in range(args.workers):
            group.create_task(work(number / args.workers))
    return seen


def until_idle(address: Address) -> dict[str, float]:
    """Wait until no request runs or a time limit is reached. Return the metrics. Raises ProbeFailed."""
    ends_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        found = metrics(address)
        busy = found["num_requests_running"] + found["num_requests_waiting"] + found["http_requests_in_flight"] - 1
        if not busy or time.monotonic() > ends_s:  # this very request is one
            return found
        time.sleep(0.5)


def slope_mib_per_minute(seen: list[Seen]) -> float:
    """Return the growth of memory after the warm-up, in MiB per minute: the slope of a line through all samples."""
    settled = seen[int(WARM_UP * len(seen)) :]
    if len(settled) < 3:
        return 0.0
    line = statistics.linear_regression([each.at_s for each in settled], [each.resident_mib for each in settled])
    return 60.0 * line.slope


def complaints(
    tally: Tally, before: tuple[Seen, Mapping[str, float]], after: tuple[Seen, Mapping[str, float]], growth_mib: float,
    args: argparse.Namespace, log: str, exit_code: int | None,
) -> Iterator[str]:  # fmt: skip
    """Yield a message for every check that failed."""
    (seen_before, _), (seen, found) = before, after
    if tally.losses:
        yield f"{len(tally.losses)} answers are wrong; the first: {tally.losses[0]}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if found[name]:
            yield f"{name} is {found[name]:g} at the end"
    ended, submitted = found["request_success_total"], found["request_params_n_sum"]
    if not ended == submitted == found["e2e_request_latency_seconds_count"]:
        yield f"{submitted:g} sequences were submitted, {ended:g} ended, {found['e2e_request_latency_seconds_count']:g} were timed"
    if found.get("request_success_total.error"):
        yield f"{found['request_success_total.error']:g} sequences ended with an error"
    if found["event_loop_tasks"] > before[1]["event_loop_tasks"]:
        yield f"{found['event_loop_tasks']:g} tasks at the end, {before[1]['event_loop_tasks']:g} before"
    if seen.num_descriptors > seen_before.num_descriptors:
        yield f"{seen.num_descriptors} descriptors at the end, {seen_before.num_descriptors} before"
    if growth_mib > args.max_growth_mib:
        yield f"memory grew by {growth_mib:.0f} MiB after the warm-up"
    if bad := [line for line in log.splitlines() if " ERROR " in line or " CRITICAL " in line or "Traceback" in line]:
        yield f"{len(bad)} errors in the log; the first: {bad[0]}"
    if exit_code != 0:
        yield f"SIGTERM ended it with {exit_code}"


def soak(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Run the soak test and return its report. Raises ServerFailed, ProbeFailed, CannotStart, OSError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "oneloop", "--port", str(port), *OPTIONS, *args.server_options]
    server, tally = Server("oneloop", port=port, command=command), Tally()
    with ServerProcess(command, log) as process:
        wait_until_healthy(server, process)
        address, pid = server.address, process.pid
        model = str(json.loads(ask(address, "/v1/models")[1])["data"][0]["id"])
        before = look(pid), metrics(address)
        seen = asyncio.run(load(address, args, model, tally, pid))
        found = until_idle(address)
        after = look(pid), found
        exit_code = process.end(signal.SIGTERM, IDLE_LIMIT_S)
    slope = slope_mib_per_minute(seen)
    growth_mib = slope * args.minutes * (1 - WARM_UP)
    return {
        "minutes": args.minutes, "seed": args.seed, "requests": tally.kinds.total(), "kinds": dict(sorted(tally.kinds.items())),
        "statuses": {str(status): num for status, num in sorted(tally.statuses.items())}, "clients_left": tally.num_left,
        "bad_bodies": tally.kinds["bad"], "losses": len(tally.losses), "lost": tally.losses[:20],
        "sequences": found["request_success_total"], "preemptions": found["num_preemptions_total"],
        "generated_tokens": found["generation_tokens_total"], "rss_mib": [round(each.resident_mib) for each in (seen[0], seen[-1])],
        "rss_slope_mib_per_minute": round(slope, 2), "descriptors": [before[0].num_descriptors, after[0].num_descriptors],
        "threads": [before[0].num_threads, after[0].num_threads],
        "tasks": [before[1]["event_loop_tasks"], found["event_loop_tasks"]], "exit_code": exit_code,
        "complaints": [*complaints(tally, before, after, growth_mib, args, log.read_text(errors="replace"), exit_code)],
    }  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the soak test. Return 0 if every check passed, 2 if nothing could begin."""
    with processes.stop_signals_as_interrupt(), tempfile.TemporaryDirectory(prefix="oneloop-soak-") as folder:
        try:
            report = soak(args, args.log or Path(folder) / "server.log")
        except (ServerFailed, ProbeFailed, CannotStart, OSError) as error:
            print(f"loadtests soak: {error}", file=sys.stderr)
            return 2
    for name, value in report.items():
        if name not in ("lost", "complaints", "kinds"):
            print(f"  {name}: {value}")
    for line in (*report["lost"], *report["complaints"]):
        print(f"  ! {line}")
    print("\n" + json.dumps(report), flush=True)
    return 1 if report["complaints"] else 0
