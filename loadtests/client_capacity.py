"""Capacity of the client itself: CPU per event and per request, against a server that sends prepared bytes.

The server gives all streams one event per round, as an engine does, a round every --period-ms (7: 256 streams make 36,500
events a second). As long as the busiest client stays far below a whole core, the client is not what is measured. TTFT here
includes the wait for the next round and the cost of accepting 256 connections at once.

    python -m loadtests.client_capacity [--clients 1 2 4] [--period-ms 7] [--workload c256_256_256]"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace

from loadtests.address import Address
from loadtests.clients import measure_with_clients
from loadtests.figures import summarise
from loadtests.load import Limits, RequestOptions
from loadtests.workloads import find_workloads

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(*events: object) -> bytes:
    data = b"".join(b"data: %s\n\n" % (e if isinstance(e, bytes) else json.dumps(e).encode()) for e in events)
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENT = chunk({
    "id": "cmpl-0123456789abcdef01234567", "object": "text_completion", "created": 1_700_000_000, "model": "m",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
})  # fmt: skip


def ending(num_tokens: int) -> bytes:
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    return chunk(last, {"choices": [], "usage": {"completion_tokens": num_tokens}}, b"[DONE]") + b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One request: asked for `wanted` tokens, still owed `left` of them."""

    def __init__(self, live: set[Stream], work: asyncio.Event) -> None:
        self._live, self._work, self._received = live, work, b""
        self.left = self.wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if length is not None and len(body) == int(length[1]):
            self.left = self.wanted = json.loads(body)["max_tokens"]
            self.transport.write(HEAD)
            self._live.add(self)
            self._work.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._live.discard(self)


async def serve(period_s: float) -> None:
    live: set[Stream] = set()
    work, loop = asyncio.Event(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(live, work), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    due_s = loop.time()
    while True:
        if not live:
            work.clear()
            await work.wait()
            due_s = loop.time()
        for stream in list(live):
            stream.transport.write(EVENT)
            stream.left -= 1
            if not stream.left:
                stream.transport.write(ending(stream.wanted))
                stream.transport.close()
                live.discard(stream)
        due_s = max(due_s + period_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.client_capacity", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--period-ms", type=float, default=7.0)
    parser.add_argument("--workload", default="c256_256_256")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        asyncio.run(serve(args.period_ms / 1000))
    workload = replace(find_workloads([args.workload])[0], num_warmup=0)
    command = [sys.executable, "-m", f"{__package__}.client_capacity", "--serve", "--period-ms", str(args.period_ms)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = Address("127.0.0.1", int(server.stdout.readline()))
            for clients in args.clients:
                figures = summarise(measure_with_clients(address, workload, RequestOptions("m"), Limits(), clients))
                shown = ("ok", "errors", "out_tok_per_s", "ttft_ms_p50", "tpot_ms_p50", "client_cpu_us_per_token")
                rows.append(
                    {"clients": clients, "busiest_share": figures["client_cpu_share"]} | {k: figures[k] for k in shown}
                )
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
        finally:
            server.terminate()
    print(json.dumps({"command": "client_capacity", "workload": workload.name, "runs": rows}), flush=True)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
