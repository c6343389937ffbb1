"""The server with a FakeEngine, as a process: `python -m tests.fake_server` prints its port first.

For load tests of the HTTP layer alone (with SmolLM2's real tokenizer), and for tests of what signals do to a process:
`--fake paused` never gives a token, `--fake loads-forever` starts a child and hangs in a thread. Takes the server's options."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import uvloop

from runtime.weights.fetch import resolve
from server.__main__ import listen
from server.config import ServerConfig, parse
from server.loaded.defaults import SamplingDefaults
from server.loaded.lifecycle import Report
from server.loaded.model import LoadedModel
from server.loaded.prompt import ChatTemplate
from server.loaded.tokenizer import Tokenizer
from server.process import Process
from tests.fakes import FakeEngine
from tests.server.tiny import loaded_model, tiny_tokenizer

TEXT = (
    "The lighthouse keeper climbed the spiral stairs, his cat behind him; it was raining, and the lamp wouldn't light. "
)


def serves(tokenizer: Tokenizer, config: ServerConfig, *, paused: bool = False) -> LoadedModel:
    ids = tokenizer.encode(TEXT)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)
    engine = FakeEngine(lambda request: ids, paused=paused)
    return loaded_model(engine, tokenizer, template, SamplingDefaults(), config.served_names)


async def load(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    files = await asyncio.to_thread(resolve, config.model, None, report, cancel=cancel)
    assert files.gguf is not None
    return serves(Tokenizer.from_gguf(files.gguf.metadata), config)


async def load_paused(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    return serves(tiny_tokenizer(), config, paused=True)


async def load_forever(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    child = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 (the hanging is the point)
    print("child", child.pid, flush=True)
    await asyncio.to_thread(threading.Event().wait)
    raise AssertionError("nobody sets that event")


LOADS = {"paused": load_paused, "loads-forever": load_forever}


def main() -> int:
    arguments = sys.argv[1:]
    chosen = LOADS[arguments[1]] if arguments[:1] == ["--fake"] else load
    config = parse(["--port", "0", *(arguments[2:] if chosen is not load else arguments)], os.environ)
    sock = listen(config.host, config.port)
    print(sock.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Process(config, sock, chosen, time.monotonic()).run())


if __name__ == "__main__":
    sys.exit(main())
