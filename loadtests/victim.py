"""Command `python -m loadtests victim`: the latency of one stream during expensive requests, and memory afterwards.

For each attack of `hostile.py`, a stream is opened and the attack is sent. The gaps between the stream's events are recorded until
the attack has been answered (or its clients have disconnected), and for a few more events. Tokens of a longer text take longer, so
a gap is compared with the median at the same position of an undisturbed stream. Targets: the longest gap at most three times as
long, memory within 10 %. The memory of a KV cache grows when its blocks are first used, so prompts fill it first.

If the server is on loopback, attacks come from another loopback address, because a server without keys distinguishes clients by
address. The attacker's threads have low priority, to simulate another machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests.address import Address
from loadtests.clock import WallClock
from loadtests.compare import ServerFailed, wait_until_healthy
from loadtests.exchange import Recording, exchange, post_request
from loadtests.hostile import ATTACKS, COMPLETIONS, Attack
from loadtests.processes import CannotStart, ServerProcess, resident_mib, stop_signals_as_interrupt
from loadtests.servers import Server

SUMMARY = "a stream's longest gap beside requests that cost much, and the memory after each"
EVENTS_BEFORE, EVENTS_AFTER = 30, 10
ATTACKER = "127.0.0.2"
OURS = (sys.executable, "-m", "oneloop", "--port")
TARGET = 3.0  # times what is usual that a stream should wait at most
NEAR = 25  # gaps on either side, of which the median is what is usual
MEMORY_TARGET = 1.1  # times what the server took before, that it should take afterwards
FILLING_PROMPTS, FILLING_TOKENS, FILLED_MIB, MOST_FILLINGS = 8, 1000, 16.0, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--base-url",
        type=Address.parse,
        metavar="URL",
        help="URL of a server on this machine (default: start our own)",
    )
    add("--pid", type=int, metavar="PID", help="process id of that server, to report its memory")
    names = ", ".join(ATTACKS)
    add(
        "--attack",
        nargs="+",
        choices=[*ATTACKS],
        default=[*ATTACKS],
        metavar="NAME",
        help=f"attacks to run, of {names}",
    )
    add("--max-tokens", type=int, default=4000, metavar="N", help="output tokens of a stream")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="time limit for the answers to an attack")
    add("server_options", nargs="*", metavar="OPTION", help="after --: options of the started server")


def gaps_ms(times_s: Sequence[float], since_s: float = float("-inf")) -> dict[int, float]:
    """Return the gaps in ms between successive events that ended after `since_s`, by position, without the first two events."""
    return {
        place: 1000 * (later - earlier)
        for place, (earlier, later) in enumerate(pairwise(times_s[2:]))
        if later >= since_s
    }


class Usual:
    """Gaps of an undisturbed stream in ms. For each position, the median of the gaps around it."""

    def __init__(self, gaps: Sequence[float]) -> None:
        places = range(len(gaps))
        self.by_place = [statistics.median(gaps[max(0, place - NEAR) : place + NEAR + 1]) for place in places]

    def ratios(self, gaps: Mapping[int, float]) -> list[float]:
        """Return the ratio of each gap to the usual gap at its position. Positions beyond the last use the last."""
        last = len(self.by_place) - 1
        return [gap / self.by_place[min(place, last)] for place, gap in gaps.items()]


def send_all(address: Address, requests: Sequence[bytes], leaves_after_s: float | None, timeout_s: float) -> list[str]:
    """Send the requests, and return a status or an error for each. Blocks; runs on a separate thread."""
    _give_way()
    open_ones: list[socket.socket] = []
    source = (ATTACKER, 0) if _is_loopback(address.host) else None
    try:
        for request in requests:
            connection = socket.create_connection((address.host, address.port), timeout_s, source)
            open_ones.append(connection)
            with contextlib.suppress(OSError):  # the answer may be there all the same
                connection.sendall(request)
        if leaves_after_s is not None:
            time.sleep(leaves_after_s)
            return ["left"] * len(requests)
        return [*map(_status, open_ones)]
    finally:
        for connection in open_ones:
            connection.close()


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere priorities are a process'
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _is_loopback(host: str) -> bool:
    try:
        return sys.platform == "linux" and ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _status(connection: socket.socket) -> str:
    try:
        head = connection.recv(65536)
        while connection.recv(1 << 20):
            pass
    except OSError as error:
        return type(error).__name__
    return head.split(b" ", 2)[1].decode(errors="replace") if head.count(b" ") > 1 else "no answer"


def stream_request(address: Address, max_tokens: int) -> bytes:
    fields = {
        "prompt": "Count: one, two, three,", "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    return post_request(address, COMPLETIONS, json.dumps(fields).encode())


class Streams:
    """Consecutive streams of `max_tokens` tokens each. The next one starts until `close` is called or a stream fails."""

    def __init__(self, address: Address, max_tokens: int, timeout_s: float, clock: WallClock) -> None:
        self.recordings: list[Recording] = []
        self._request = stream_request(address, max_tokens)
        self._address, self._timeout_s, self._clock = address, timeout_s, clock
        self._task = asyncio.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        while True:
            recording = Recording(self._clock.now())
            self.recordings.append(recording)
            await exchange(self._address, self._request, self._timeout_s, self._clock, recording)
            if recording.failure is not None or len(recording.times) <= EVENTS_BEFORE:
                return

    @property
    def broke(self) -> bool:
        return self._task.done()

    async def flow(self, num_events: int) -> None:
        """Wait for `num_events` more events, or until a stream fails."""
        wanted = self._num_events + num_events
        while self._num_events < wanted and not self.broke:  # noqa: ASYNC110 (the recording of a load tells nobody)
            await asyncio.sleep(0.01)

    @property
    def _num_events(self) -> int:
        return sum(len(recording.times) for recording in self.recordings)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def alone(address: Address, *, max_tokens: int, timeout_s: float) -> list[float]:
    """Return the gaps of a complete stream without an attack, in ms. Raises ServerFailed."""
    clock = WallClock()
    recording = Recording(clock.now())
    await exchange(address, stream_request(address, max_tokens), timeout_s, clock, recording)
    gaps = [*gaps_ms(recording.times).values()]
    if not gaps or recording.failure is not None:
        raise ServerFailed(f"an undisturbed stream: {recording.failure or 'no events'}")
    return gaps


async def beside(
    address: Address, attack: Attack, usual: Usual, *, max_tokens: int, timeout_s: float
) -> dict[str, Any]:
    """Run one attack, and return its effect on a stream."""
    clock = WallClock()
    streams = Streams(address, max_tokens, timeout_s, clock)
    bodies = [post_request(address, attack.path, body) for body in await asyncio.to_thread(lambda: [*attack.bodies()])]
    await streams.flow(EVENTS_BEFORE)
    began_s = clock.now()
    answers = await asyncio.to_thread(send_all, address, bodies, attack.leaves_after_s, timeout_s)
    ended_s = clock.now()
    await streams.flow(EVENTS_AFTER)
    outlasted = not streams.broke
    await streams.close()
    during = [gaps_ms(recording.times, since_s=began_s) for recording in streams.recordings]
    ratios = [ratio for gaps in during for ratio in usual.ratios(gaps)]
    gaps = [gap for each in during for gap in each.values()]
    return {
        "answers": {answer: answers.count(answer) for answer in sorted({*answers})}, "attack_s": round(ended_s - began_s, 2),
        "median_ms": round(statistics.median(gaps or [float("nan")]), 1), "longest_ms": round(max(gaps, default=float("nan")), 1),
        "median_ratio": round(statistics.median(ratios or [float("nan")]), 2),
        "ratio": round(max(ratios, default=float("nan")), 2),
        "gaps": len(gaps), "over_target": sum(ratio > TARGET for ratio in ratios), "outlasted": outlasted,
    }  # fmt: skip


def filling(number: int) -> bytes:
    """Return a request with prompts that no earlier request contained."""
    rng = random.Random(number)
    prompts = [rng.choices(range(100, 1000), k=FILLING_TOKENS) for _ in range(FILLING_PROMPTS)]
    return json.dumps({"prompt": prompts, "max_tokens": 1, "temperature": 0}).encode()


async def fill_cache(address: Address, resident: Callable[[], float], *, timeout_s: float) -> int:
    """Send prompts until the server's memory (`resident`, in MiB) stops growing, to write every KV block. Return their number."""
    before = resident()
    for number in range(MOST_FILLINGS):
        await exchange(address, post_request(address, COMPLETIONS, filling(number)), timeout_s, WallClock())
        after = resident()
        if after < before + FILLED_MIB:
            return number + 1
        before = after
    return MOST_FILLINGS


def row(name: str, result: Mapping[str, Any]) -> str:
    answers = ", ".join(f"{count} × {answer}" for answer, count in result["answers"].items())
    memory = ""
    if "rss_after_mib" in result:
        memory = f"{result['rss_before_mib']:.0f} → {result['rss_after_mib']:.0f}"
        memory += "" if result["memory_kept"] else " (over a tenth more)"
    ended = "" if result["outlasted"] else " (a stream broke)"
    cells = (
        name,
        answers + ended,
        result["attack_s"],
        result["median_ms"],
        result["longest_ms"],
        result["median_ratio"],
        result["ratio"],
        f"{result['over_target']} of {result['gaps']}",
        memory,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def attacked(args: argparse.Namespace, address: Address, pid: int | None) -> dict[str, dict[str, Any]]:
    """Run all attacks against the server at `address`, and print each result. Return the effect of each on a stream."""
    results: dict[str, dict[str, Any]] = {}
    if pid is not None:
        num = asyncio.run(fill_cache(address, partial(resident_mib, pid), timeout_s=args.timeout))
        filled = f"{num} requests of {FILLING_PROMPTS} prompts filled the KV cache: {resident_mib(pid):.0f} MiB"
        print(f"{filled}\n", flush=True)
    gaps = asyncio.run(alone(address, max_tokens=args.max_tokens, timeout_s=args.timeout))
    usual = Usual(gaps)
    ratios = usual.ratios(dict(enumerate(gaps)))
    over = f"{sum(ratio > TARGET for ratio in ratios)} of {len(gaps)} are over {TARGET:g}"
    print(
        f"a stream of {args.max_tokens} tokens alone: {usual.by_place[0]:.1f} ms a gap at its begin, {usual.by_place[-1]:.1f} at "
        f"its end; its longest is {max(ratios):.1f} times what is usual there, {over}\n"
    )
    print(
        "| attack | answers | took s | median gap ms | longest gap ms | median ratio | longest ratio | gaps over 3 | RSS MiB |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---|"
    )
    for name in args.attack:
        before = None if pid is None else resident_mib(pid)
        result = asyncio.run(beside(address, ATTACKS[name], usual, max_tokens=args.max_tokens, timeout_s=args.timeout))
        if pid is not None and before is not None:
            time.sleep(2)  # connections close, and what was freed goes back
            after = resident_mib(pid)
            result |= {"rss_before_mib": round(before, 1), "rss_after_mib": round(after, 1)}
            result["memory_kept"] = after <= MEMORY_TARGET * before
        results[name] = result
        print(row(name, result), flush=True)
    return results


def of_ours(args: argparse.Namespace, log: Path) -> dict[str, dict[str, Any]]:
    """Start our server, run all attacks, and return the effect of each. Raises ServerFailed, CannotStart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*OURS, str(port), *args.server_options]
    server = Server("oneloop", port=port, command=command)
    with ServerProcess(command, log) as process:
        wait_until_healthy(server, process)
        return attacked(args, server.address, process.pid)


def main(args: argparse.Namespace) -> int:
    """Run the attacks. Return 0 if no stream failed, 2 if no server could be started or the server does not stream."""
    with stop_signals_as_interrupt(), tempfile.TemporaryDirectory(prefix="oneloop-victim-") as folder:
        try:
            if args.base_url is not None:
                results = attacked(args, args.base_url, args.pid)
            else:
                results = of_ours(args, Path(folder) / "server.log")
        except (ServerFailed, CannotStart) as error:
            print(f"loadtests victim: {error}", file=sys.stderr)
            return 2
    print("\n" + json.dumps(results))
    return 0 if all(result["outlasted"] for result in results.values()) else 1
