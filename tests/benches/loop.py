"""What the loop costs a streamed token, from scheduling to the socket's write: `python -m tests.benches.loop [--streams 512]`.

The real engine over steps that compute nothing (`tests.paced_runner`), the real application and HTTP protocol, and transports that
drop what is written: so neither device nor kernel, and no other process. CPU time of the thread, which is the whole loop, in
microseconds a token: of all, and of the stages of a step, medians over steps. `--tree FOLDER`: another checkout, in turns with this
one, which is how changes are compared; ratios within one run are the figure."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import uvloop

from server.api.service import Service
from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from server.process.serve import http_server
from tests.paced_runner import paced_engine
from tests.server.tiny import VOCAB_SIZE, chatml, loaded_model, tiny_tokenizer

STAGES = {"schedule": "_scheduler.schedule", "launch": "loop.runner.launch", "settle": "loop.settle"}


class Dropped(asyncio.Transport):
    """A connection whose client reads all at once. `done` is set by the end of the answer; `num_writes` of all connections."""

    num_writes = 0

    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.Event()
        self.last = b""

    def write(self, data: bytes) -> None:
        Dropped.num_writes += 1
        self.last = data
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            sys.exit(f"the server refused: {data!r}")
        if data.endswith(b"0\r\n\r\n"):
            self.done.set()

    def is_closing(self) -> bool:
        return self.done.is_set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 80) if name in ("peername", "sockname") else default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...


def request(num_tokens: int, *, chat: bool) -> bytes:
    body: dict[str, Any] = {"stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    path = "chat/completions" if chat else "completions"
    body |= {"messages": [{"role": "user", "content": "Tell me."}]} if chat else {"prompt": [7] * 40}
    payload = json.dumps(body).encode()
    return b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(), len(payload), payload,
    )  # fmt: skip


def timed(owner: Any, name: str, taken: list[float]) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def calls(*args: Any) -> Any:
        began = time.thread_time()
        result = call(*args)
        taken.append(time.thread_time() - began)
        return result

    setattr(owner, name, calls)


async def measure(streams: int, tokens: int, *, chat: bool) -> dict[str, float]:
    config: ServerConfig = parse(["--max-connections-per-address", str(2 * streams)], os.environ)
    tokenizer, lifecycle = tiny_tokenizer(), Lifecycle()
    engine = paced_engine(range(40, VOCAB_SIZE - 40), VOCAB_SIZE, streams, 0.0)
    taken: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for stage, path in STAGES.items():
        owner, _, name = path.rpartition(".")
        timed(attrgetter(owner)(engine), name, taken[stage])
    lifecycle.ready(loaded_model(engine, tokenizer, chatml(tokenizer), sampling_defaults(), config.served_names))
    server = http_server(Service(config, lifecycle))
    server.config.load()
    gc.freeze()
    gc.set_threshold(25_000)

    async def stream(num_tokens: int) -> None:
        transport = Dropped()
        protocol: Any = server.config.http_protocol_class(
            config=server.config, server_state=server.server_state, app_state={}
        )
        protocol.connection_made(transport)
        protocol.data_received(request(num_tokens, chat=chat))
        await transport.done.wait()
        protocol.connection_lost(None)
        assert b"DONE" in transport.last

    async def cpu_us(num_tokens: int) -> float:
        began = time.thread_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(stream(num_tokens))
        return (time.thread_time() - began) / streams * 1e6

    short = tokens // 4
    await cpu_us(short)
    requests_us = [await cpu_us(short)]
    for each in taken.values():
        each.clear()
    Dropped.num_writes = 0
    requests_us.append(await cpu_us(tokens))
    writes = Dropped.num_writes / streams / tokens
    await engine.close()
    a_token = (requests_us[1] - requests_us[0]) / (tokens - short)
    stages = {stage: statistics.median(each) / streams * 1e6 for stage, each in taken.items()}
    return {"all": a_token, **stages, "writes": writes, "a request": requests_us[0] - a_token * short}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--tree", type=Path, action="append", default=[])
    args = parser.parse_args()
    if not args.rounds:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(measure(args.streams, args.tokens, chat=args.chat))))
        return
    trees, found = [Path.cwd(), *args.tree], {}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}  # and compiled modules
    for turn in range(args.rounds):
        for tree in trees if turn % 2 else trees[::-1]:
            module = (
                "tests.benches.loop" if (tree / "tests/benches/loop.py").exists() else "tests.bench_loop"
            )  # older trees
            command = [sys.executable, "-m", module, "--rounds", "0", "--streams", str(args.streams)]
            command += ["--tokens", str(args.tokens), *(["--chat"] if args.chat else [])]
            text = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
            found.setdefault(tree, []).append(json.loads(re.findall(r"{.*}", text)[-1]))
    for tree, rows in found.items():
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(tree, "  ".join(f"{name} {value:.2f}" for name, value in medians.items()))


if __name__ == "__main__":
    main()
