"""The server with a FakeEngine, as a process: `python -m tests.fake_server` prints its port first.

For load tests of the HTTP layer alone (with SmolLM2's real tokenizer; `--fake engine` over the real engine, whose steps compute
nothing and take 25 us a row), and for tests of what signals do to a process:
`--fake tiny` answers, `--fake paused` never gives a token, `--fake loads-forever` starts a child and hangs in a thread; others
(`LOADS`) fail in a way of their own, some when the first request comes. Takes the server's options."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import uvloop

from runtime.weights.fetch import resolve
from server.__main__ import opened
from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Load, Report
from server.models.model import LoadedModel
from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from server.process import ending
from server.process import serve as serving
from server.process.serve import Process
from tests.fakes import FakeEngine
from tests.server.tiny import loaded_model, tiny_tokenizer

TEXT = (
    "The lighthouse keeper climbed the spiral stairs, his cat behind him; it was raining, and the lamp wouldn't light. "
)
PACED_ROW_S = 25e-6  # 40,000 tokens a second


def serves(tokenizer: Tokenizer, config: ServerConfig, *, paused: bool = False) -> LoadedModel:
    ids = tokenizer.encode(TEXT)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)
    engine = FakeEngine(lambda request: ids, paused=paused)
    return loaded_model(engine, tokenizer, template, sampling_defaults(), config.served_names)


async def load(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    files = await asyncio.to_thread(resolve, config.model, None, report, cancel=cancel)
    assert files.gguf is not None
    return serves(Tokenizer.from_gguf(files.gguf.metadata), config)


async def load_tiny(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    return serves(tiny_tokenizer(), config)


async def load_paused(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    return serves(tiny_tokenizer(), config, paused=True)


async def load_forever(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    child = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 (the hanging is the point)
    print("child", child.pid, flush=True)
    await asyncio.to_thread(threading.Event().wait)
    raise AssertionError("nobody sets that event")


def on_submit(loaded: LoadedModel, act: Callable[[], None]) -> None:
    """`act` as soon as a request has come."""
    engine = loaded.engine
    submit = engine.submit

    def acting(*args, **options):
        stream = submit(*args, **options)
        asyncio.get_running_loop().call_soon(act)
        return stream

    engine.submit = acting


def hang() -> None:
    print("hangs", flush=True)
    threading.Event().wait()


async def load_dying(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    loaded = serves(tiny_tokenizer(), config, paused=True)
    on_submit(loaded, lambda: loaded.engine.die("the device cannot compute any more: OutOfOrder"))
    return loaded


async def load_with_a_hanging_step(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    loaded = serves(tiny_tokenizer(), config, paused=True)
    loaded.engine.lets_go = False
    return loaded


async def load_with_a_hanging_thread(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    threading.Thread(target=hang).start()
    return serves(tiny_tokenizer(), config, paused=True)


async def load_with_a_hanging_loop(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    loaded = serves(tiny_tokenizer(), config, paused=True)
    on_submit(loaded, hang)
    return loaded


async def load_engine(config: ServerConfig, report: Report, cancel: threading.Event) -> LoadedModel:
    from tests.paced_runner import paced_engine  # needs torch, which the others do without

    loaded = await load(config, report, cancel)
    ids = loaded.tokenizer.encode(TEXT)
    return replace(loaded, engine=paced_engine(ids, loaded.engine.model.vocab_size, num_rows=512, row_s=PACED_ROW_S))


LOADS = {
    "engine": load_engine,
    "tiny": load_tiny,
    "paused": load_paused,
    "loads-forever": load_forever,
    "dies": load_dying,
    "hanging-step": load_with_a_hanging_step,
    "hanging-thread": load_with_a_hanging_thread,
    "hanging-loop": load_with_a_hanging_loop,
}


def main() -> int:
    arguments = sys.argv[1:]
    chosen = LOADS[arguments[1]] if arguments[:1] == ["--fake"] else load
    arguments = arguments[2:] if chosen is not load else arguments
    placed = "--uds" in arguments or "LISTEN_FDS" in os.environ
    config = parse(arguments if placed else ["--port", "0", *arguments], os.environ)
    with contextlib.ExitStack() as stack:
        config, sock = opened(config, stack)
        return serve(config, sock, chosen)


def serve(config: ServerConfig, sock: socket.socket, chosen: Load) -> int:
    if "TEST_LIMIT_S" in os.environ:  # nobody wants to wait for the real ones
        serving.END_LIMIT_S = ending.OBEY_LIMIT_S = float(os.environ["TEST_LIMIT_S"])
    name = sock.getsockname()
    print(name if config.uds else name[1], flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = Process(config, sock, chosen, time.monotonic())
        code = runner.run(server.run())
        server.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
