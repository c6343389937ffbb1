"""Sending of a workload in a closed or open loop, with a time limit. The run owns the task of every request."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtests.address import Address
from loadtests.answers import PATHS, answer_text, read_answer
from loadtests.clock import Clock, WallClock
from loadtests.conversations import Dialogue
from loadtests.exchange import Recording, exchange, post_request
from loadtests.figures import Run
from loadtests.workloads import Workload

Script = bytes | Dialogue  # a request; or requests that hang on the answers before them


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of requests to one server: name of the model at that server, and additional request fields."""

    model: str
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    request_s: float = 300.0
    run_s: float = 540.0


class Load:
    """Single run of a load against one address. It cannot be run again."""

    def __init__(self, address: Address, limits: Limits, clock: Clock) -> None:
        self._address, self._limits, self._clock = address, limits, clock
        self.recordings: list[Recording] = []
        self.lateness_s: list[float] = []
        self.cut_off = False

    async def run(self, scripts: Sequence[Script], concurrency: int, arrivals_s: Sequence[float] | None = None) -> None:
        """Run a closed loop of `concurrency` streams. With `arrivals_s`, run an open loop with at most `concurrency` in flight.

        Returns when every request has ended or the time limit of the run has passed. Unfinished requests are then dropped."""
        try:
            async with asyncio.timeout(self._limits.run_s):
                if arrivals_s is None:
                    await self._closed_loop(scripts, concurrency)
                else:
                    await self._open_loop(scripts, arrivals_s, concurrency)
        except TimeoutError:
            self.cut_off = True

    async def _closed_loop(self, scripts: Sequence[Script], concurrency: int) -> None:
        todo = iter(scripts)

        async def stream() -> None:
            for script in todo:
                await self._send(script)

        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(scripts))):
                streams.create_task(stream())

    async def _open_loop(self, scripts: Sequence[Script], arrivals_s: Sequence[float], max_in_flight: int) -> None:
        start_s = self._clock.now()
        room = asyncio.Semaphore(max_in_flight)

        async def send(script: Script) -> None:
            try:
                await self._send(script)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for script, arrival_s in zip(scripts, arrivals_s, strict=True):
                await self._clock.sleep_until(start_s + arrival_s)
                await room.acquire()
                self.lateness_s.append(max(0.0, self._clock.now() - start_s - arrival_s))
                group.create_task(send(script))

    async def _send(self, script: Script) -> None:
        if isinstance(script, bytes):
            await self._exchange(script)
            return
        answers: list[str] = []
        for _ in range(script.num_turns):
            request = post_request(self._address, PATHS["chat"], script.body(answers))
            answers.append(answer_text(await self._exchange(request), "chat"))

    async def _exchange(self, request: bytes) -> Recording:
        recording = await exchange(self._address, request, self._limits.request_s, self._clock)
        self.recordings.append(recording)
        return recording


async def measure(
    address: Address,
    workload: Workload,
    request_options: RequestOptions,
    limits: Limits | None = None,
    clock: Clock | None = None,
    server_cpu_s: Callable[[], float] | None = None,
) -> Run:
    """Warm up, run the workload, and parse the answers. `server_cpu_s`: returns the CPU seconds that the server has used so far."""
    limits, clock = limits or Limits(), clock or WallClock()
    if warmup := workload.warmup():
        # Its failures are not counted: whatever is wrong shows again in the run itself.
        await Load(address, limits, clock).run(scripts_of(address, warmup, request_options), warmup.concurrency)
    scripts = scripts_of(address, workload, request_options)
    arrivals_s = None if workload.arrivals is None else workload.arrivals_s()
    load = Load(address, limits, clock)
    gc.collect()
    server_before, client_before, start_s = server_cpu_s and server_cpu_s(), time.process_time(), clock.now()
    await load.run(scripts, workload.concurrency, arrivals_s)
    wall_s, client_cpu_s = clock.now() - start_s, time.process_time() - client_before
    return Run(
        answers=[read_answer(recording, workload.endpoint) for recording in load.recordings],
        num_requested=workload.num_requests,
        num_output_tokens=None if workload.ends_by_itself else workload.output_lengths(),
        wall_s=wall_s,
        cut_off=load.cut_off,
        client_cpu_s=client_cpu_s,
        busiest_client_cpu_s=client_cpu_s,
        server_cpu_s=None if server_cpu_s is None or server_before is None else server_cpu_s() - server_before,
        lateness_s=load.lateness_s,
    )


def scripts_of(address: Address, workload: Workload, request_options: RequestOptions) -> list[Script]:
    """Return the bytes of each HTTP request of the workload, or its dialogues."""
    path = PATHS[workload.endpoint]
    bodies = workload.bodies(request_options.model, request_options.ignore_eos, request_options.extra_body)
    return [post_request(address, path, body) if isinstance(body, bytes) else body for body in bodies]
