"""Client processes that share one workload, so that the client does not limit the measured throughput.

Each process sends a share of the streams (or arrivals) and of the requests, records answers as `load.py` does, and parses them
after the run. All processes start sending together when all are ready. Times are from the system-wide monotonic clock, so
figures equal those of one client. One process handles about 100,000 events a second."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from loadtests.address import Address
from loadtests.answers import Answer, Endpoint, read_answer
from loadtests.clock import WallClock
from loadtests.figures import Run
from loadtests.load import Limits, Load, RequestOptions, Script, measure, scripts_of
from loadtests.workloads import Workload

STREAMS_EACH = 64


def num_clients(concurrency: int, requested: int | None = None) -> int:
    """Return the number of client processes: `requested`, else one per 64 streams, at most a quarter of the cores."""
    wanted = requested or min(concurrency // STREAMS_EACH, len(os.sched_getaffinity(0)) // 4)
    return max(1, min(wanted, concurrency))


@dataclass(frozen=True, slots=True)
class Part:
    """Share of a load that one client process sends."""

    address: Address
    scripts: Sequence[Script]
    endpoint: Endpoint
    concurrency: int
    arrivals_s: Sequence[float] | None
    limits: Limits


@dataclass(frozen=True, slots=True)
class Outcome:
    answers: list[Answer]
    begun_s: float
    ended_s: float
    cpu_s: float
    cut_off: bool
    lateness_s: list[float]


def parts_of(
    address: Address, workload: Workload, request_options: RequestOptions, limits: Limits, num_parts: int
) -> list[Part]:
    """Split a load into parts for client processes. Requests and arrivals are assigned round-robin, streams evenly."""
    scripts = scripts_of(address, workload, request_options)
    arrivals_s = None if workload.arrivals is None else workload.arrivals_s()
    return [
        Part(
            address,
            scripts[index::num_parts],
            workload.endpoint,
            len(range(index, workload.concurrency, num_parts)),
            None if arrivals_s is None else arrivals_s[index::num_parts],
            limits,
        )
        for index in range(num_parts)
    ]


def measure_with_clients(
    address: Address,
    workload: Workload,
    request_options: RequestOptions,
    limits: Limits,
    clients: int,
    server_cpu_s: Callable[[], float] | None = None,
) -> Run:
    """Run `load.measure` in `clients` processes. With one client, it runs in this process."""
    if clients == 1:
        return asyncio.run(measure(address, workload, request_options, limits, server_cpu_s=server_cpu_s))
    if warmup := workload.warmup():
        asyncio.run(Load(address, limits, WallClock()).run(scripts_of(address, warmup, request_options), 1))
    server_before_s = None
    crew = [_Client(part) for part in parts_of(address, workload, request_options, limits, clients)]
    try:
        for client in crew:
            client.wait_ready()
        server_before_s = server_cpu_s and server_cpu_s()
        for client in crew:
            client.go()
        outcomes = [client.outcome() for client in crew]
    finally:
        for client in crew:
            client.end()
    wall_s = max(o.ended_s for o in outcomes) - min(o.begun_s for o in outcomes)
    return Run(
        answers=[answer for outcome in outcomes for answer in outcome.answers],
        num_requested=workload.num_requests,
        num_output_tokens=None if workload.ends_by_itself else workload.output_lengths(),
        wall_s=wall_s,
        cut_off=any(outcome.cut_off for outcome in outcomes),
        client_cpu_s=sum(outcome.cpu_s for outcome in outcomes),
        busiest_client_cpu_s=max(outcome.cpu_s for outcome in outcomes),
        num_clients=clients,
        server_cpu_s=None if server_cpu_s is None or server_before_s is None else server_cpu_s() - server_before_s,
        lateness_s=[late for outcome in outcomes for late in outcome.lateness_s],
    )


class _Client:
    """Client process and the pipe to it. Always call `end`, which ends the process."""

    def __init__(self, part: Part) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(theirs, part), daemon=True)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._pipe.recv()

    def go(self) -> None:
        self._pipe.send("go")

    def outcome(self) -> Outcome:
        found = self._pipe.recv()
        assert isinstance(found, Outcome)
        return found

    def end(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _work(pipe: Connection, part: Part) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    load, clock = Load(part.address, part.limits, WallClock()), WallClock()
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    pipe.recv()
    cpu_before_s, begun_s = time.process_time(), clock.now()
    asyncio.run(load.run(part.scripts, part.concurrency, part.arrivals_s))
    ended_s, cpu_s = clock.now(), time.process_time() - cpu_before_s
    answers = [read_answer(recording, part.endpoint) for recording in load.recordings]
    pipe.send(Outcome(answers, begun_s, ended_s, cpu_s, load.cut_off, load.lateness_s))
