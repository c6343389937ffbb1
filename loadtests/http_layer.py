"""Cost of the HTTP layer: CPU microseconds per streamed token, compared with a bare Starlette StreamingResponse.

Both servers run as processes and serve the same 64 streams of 64 tokens, alternately, five times; medians count. Both add one token
to every stream per iteration of the event loop. Our server does all the work of a real request: validation, detokenising, stop
strings, disconnect detection and framing. Rows: completions of a prompt of ids; with stop strings; with one reader of the 64 that
does not read until the others are done; and chat, with template and tokenisation. The bare server only reads JSON and formats
chunks. The last row uses the real engine with steps that compute nothing, so it includes the scheduler.

    python loadtests/http_layer.py [--streams 64] [--tokens 64] [--rounds 5]

CPU time is the kernel's account of the server's threads (/proc, Linux). Standard library only."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DONE = b"data: [DONE]\n\n"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Round:
    cpu_us_per_token: float
    seconds: float
    chunks_per_token: float


@contextmanager
def running(module: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Context of a server process. Yield the process, and the port that it prints first."""
    process = subprocess.Popen([sys.executable, "-m", *module.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of `pid`, in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a lighthouse keeper and his cat, please."}]}
COMPLETION = {"prompt": list(range(100, 140))}


def request(tokens: int, body: dict[str, object]) -> bytes:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    payload = json.dumps({"stream": True, "max_tokens": tokens, "ignore_eos": True, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + payload


async def read_stream(port: int, ask: bytes, hold: asyncio.Event | None = None) -> int:
    """Send the request `ask`, read the response to its end, and return the number of chunks. Reading begins when `hold` is set."""
    sock = socket.socket()
    if hold is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(ask)
    if hold is not None:
        await hold.wait()
    received = await reader.read(-1)
    writer.close()
    assert received.startswith(b"HTTP/1.1 200"), received[:300]
    assert DONE in received
    return received.count(b"data: {")


async def ready(process: subprocess.Popen[str], port: int) -> None:
    """Wait until the server answers with the expected status, which is 404 for the bare server."""
    while process.poll() is None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = (await reader.read(-1)).split(maxsplit=2)[1]
        writer.close()
        if status in (b"200", b"404"):
            return
        await asyncio.sleep(0.1)


async def one_round(pid: int, port: int, streams: int, ask: bytes, tokens: int, slow: bool) -> Round:
    hold = asyncio.Event()
    slow_reader = asyncio.create_task(read_stream(port, ask, hold)) if slow else None
    before, began = cpu_ns(pid), time.perf_counter()
    chunks = await asyncio.gather(*(read_stream(port, ask) for _ in range(streams - slow)))
    seconds, used_ns = time.perf_counter() - began, cpu_ns(pid) - before
    hold.set()
    if slow_reader is not None:
        await slow_reader
    num_tokens = (streams - slow) * tokens
    return Round(used_ns / 1000 / num_tokens, seconds, sum(chunks) / num_tokens)


async def measure(streams: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    series: dict[str, list[Round]] = {}
    with (
        running("tests.benches.bare_server") as bare,
        running("tests.fake_server --no-access-log") as ours,
        running("tests.fake_server --fake engine --no-access-log") as whole,
    ):
        kinds = {
            "bare StreamingResponse": (bare, COMPLETION, False),
            "oneloop": (ours, COMPLETION, False),
            "oneloop, stop strings": (ours, {**COMPLETION, "stop": ["\nUser:", "###"]}, False),
            "oneloop, one slow reader": (ours, COMPLETION, True),
            "oneloop, chat": (ours, CHAT, False),
            "oneloop, with its engine": (whole, COMPLETION, False),
        }
        for process, port in (bare, ours, whole):
            await ready(process, port)
        for turn in range(rounds + 1):
            for name, ((process, port), body, slow) in kinds.items():
                done = await one_round(process.pid, port, streams, request(tokens, body), tokens, slow)
                if turn > 0:  # the first warms up
                    series.setdefault(name, []).append(done)
    return {
        name: {
            "cpu_us_per_token": round(statistics.median(r.cpu_us_per_token for r in found), 2),
            "seconds": round(statistics.median(r.seconds for r in found), 4),
            "chunks_per_token": round(statistics.median(r.chunks_per_token for r in found), 3),
        }
        for name, found in series.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = asyncio.run(measure(args.streams, args.tokens, args.rounds))
    print(f"{args.streams} streams of {args.tokens} tokens, medians of {args.rounds}\n")
    print(f"{'':<28}{'CPU us/token':>14}{'seconds':>10}{'chunks/token':>14}")
    for name, row in table.items():
        print(f"{name:<28}{row['cpu_us_per_token']:>14.1f}{row['seconds']:>10.3f}{row['chunks_per_token']:>14.2f}")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
