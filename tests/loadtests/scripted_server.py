"""A server in the test's own loop that says scripted bytes at scripted moments of a ManualClock. No time passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence

from loadtests.address import Address

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"

# (seconds that pass before, bytes sent); a reader sees each as one piece.
Script = Sequence[tuple[float, bytes]]


class ManualClock:
    """Time moves only where a test, or a sleep, moves it."""

    def __init__(self) -> None:
        self.moment_s = 0.0
        self.slept_until_s: list[float] = []
        self._read = asyncio.Event()

    def now(self) -> float:
        self._read.set()
        return self.moment_s

    async def sleep_until(self, moment_s: float) -> None:
        self.slept_until_s.append(moment_s)
        self.moment_s = max(self.moment_s, moment_s)

    def pass_s(self, seconds: float) -> None:
        self.moment_s += seconds
        self._read.clear()

    async def was_read(self) -> None:
        await self._read.wait()


def event(content: str | None = None, **fields: object) -> bytes:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


def answer(
    ttft_s: float, gaps_s: Sequence[float], num_tokens: int | None = None, num_prompt: int = 7
) -> list[tuple[float, bytes]]:
    """A whole answer: head at once, content after `ttft_s` and after each gap, usage if `num_tokens` is given, [DONE]."""
    script = [(0.0, HEAD), *((delay_s, event("x")) for delay_s in (ttft_s, *gaps_s))]
    if num_tokens is not None:
        script.append((0.0, event(usage={"prompt_tokens": num_prompt, "completion_tokens": num_tokens})))
    return [*script, (0.0, DONE)]


class ScriptedServer:
    """Plays the scripts to successive requests, closes after each. `max_open` is the most requests it had at a time."""

    def __init__(self, scripts: Iterable[Script], clock: ManualClock | None = None, wait_for_open: int = 1) -> None:
        self._scripts, self._clock = iter(scripts), clock
        self._all_here = asyncio.Event()
        self._wait_for_open = wait_for_open
        self.bodies: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.num_open = self.max_open = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Address]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.paths.append(head.split()[1].decode())
        script = next(self._scripts)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        if self.num_open >= self._wait_for_open:
            self._all_here.set()
        await self._all_here.wait()
        for delay_s, data in script:
            if self._clock is not None:
                self._clock.pass_s(delay_s)
            writer.write(data)
            await writer.drain()
            if self._clock is not None:
                await self._clock.was_read()
        self.num_open -= 1
        writer.close()
