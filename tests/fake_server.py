"""The server with a FakeEngine and SmolLM2's real tokenizer, as a process: `python -m tests.fake_server` prints its port.

For load tests of the HTTP layer alone, and for tests of what signals do to a process. Takes the server's options."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import uvloop

from server.__main__ import listen
from server.config import ServerConfig, parse
from server.lifecycle import Served
from server.process import Process, Report
from server.prompt import ChatTemplate
from server.sampling import SamplingDefaults
from server.tokenizer import Tokenizer
from tests.fakes import FakeEngine

TEXT = (
    "The lighthouse keeper climbed the spiral stairs, his cat behind him; it was raining, and the lamp wouldn't light. "
)


async def load(config: ServerConfig, report: Report, cancel: threading.Event) -> Served:
    tokenizer = Tokenizer.from_folder("/opt/peers/smollm2-fp32")
    ids = tokenizer.encode(TEXT)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens)
    return Served(FakeEngine(lambda request: ids), tokenizer, template, SamplingDefaults(), config.served_names)


def main() -> int:
    config = parse(["--port", "0", *sys.argv[1:]], os.environ)
    sock = listen(config.host, config.port)
    print(sock.getsockname()[1], flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Process(config, sock, load, time.monotonic()).run())


if __name__ == "__main__":
    sys.exit(main())
