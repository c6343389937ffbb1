"""The life of the server process: the port opens, the model loads behind it, requests are served, signals end it in order.

First signal: new requests get 503, what is in flight finishes (up to the drain timeout) while the socket still answers,
then the HTTP server closes and so does the engine: exit 0. Second signal, or the first one while loading: at once. uvicorn
owns sockets and protocol only; its ten wake-ups a second and its signal handling are switched off, so an idle process
sleeps. What loading means is the caller's business."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from runtime.api import LoadProgress
from server import terminal
from server.app import create_app
from server.config import ServerConfig
from server.http.protocol import HttpProtocol
from server.loaded.lifecycle import Lifecycle, Load, LoadError
from server.service import Service

logger = logging.getLogger("oneloop.process")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLOSE_LIMIT_S = 2  # for responses that are complete but not yet read, when the drain timeout is used up
CANCEL_LIMIT_S = 0.5  # for a download to notice that it is not wanted any more, and to tidy up


class HttpServer(uvicorn.Server):
    """uvicorn without a clock: it sleeps until `stop`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, limit_s: float) -> None:
        """Close idle connections and the socket; answers on their way have `limit_s` to leave."""
        self.config.timeout_graceful_shutdown = max(1, round(limit_s))
        self.should_exit = True
        self._stopping.set()


def http_server(service: Service) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            create_app(service),
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,  # ours, and only when there is an answer
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=60,
        )
    )


class Process:
    def __init__(self, config: ServerConfig, sock: socket.socket, load: Load, started_s: float) -> None:
        self._config = config
        self._sock = sock
        self._load = load
        self._started_s = started_s
        self._lifecycle = Lifecycle()
        self._service = Service(config, self._lifecycle)
        self._cancel = threading.Event()
        self._display = terminal.StartupDisplay(sys.stderr)

    async def run(self) -> int:
        """The exit code. Installs signal handlers on the running loop."""
        stopping = self._handle_signals()
        server = http_server(self._service)
        serving = asyncio.create_task(server.serve(sockets=[self._sock]), name="http")
        loading = asyncio.create_task(self._load_model(), name="load")
        stopped = asyncio.create_task(stopping.wait(), name="signal")
        try:
            await asyncio.wait({loading, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                self._cancel.set()
                await asyncio.wait({loading}, timeout=CANCEL_LIMIT_S)
                # A download has tidied up now; a thread in the middle of torch cannot be interrupted, and has nothing to.
                leave_at_once(0, "stopped while loading")
            if not loading.result():
                return 1
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
            return await self._drain(server, serving)
        finally:
            server.stop(0)
            await asyncio.wait({serving})
            stopped.cancel()
            self._service.offload.close()
            gc.unfreeze()

    # --- loading --------------------------------------------------------------------------------------------------

    async def _load_model(self) -> bool:
        """Whether there is something to serve now."""
        try:
            with _without_collections():
                served = await self._load(self._config, self._report, self._cancel)
        except LoadError as error:
            return self._failed(str(error))
        except Exception as error:
            logger.exception("loading failed")
            return self._failed(f"{type(error).__name__}: {error}")
        seconds = self._display.finish()
        self._lifecycle.ready(served)
        url = terminal.url_of(self._sock.getsockname())
        print(terminal.summary(served, self._config, url, seconds, time.monotonic() - self._started_s), flush=True)
        return True

    def _report(self, progress: LoadProgress) -> None:
        self._lifecycle.report(progress)
        self._display.report(progress)

    def _failed(self, reason: str) -> bool:
        self._display.finish()
        if self._cancel.is_set():
            return False
        self._lifecycle.fail(reason)
        print(f"oneloop: {reason}", file=sys.stderr, flush=True)
        return False

    # --- ending ---------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> asyncio.Event:
        """Set by the first signal; the second one ends the process."""
        stopping = asyncio.Event()

        def handle(number: int) -> None:
            if stopping.is_set():
                leave_at_once(128 + number, "stopped by a second signal")
            stopping.set()

        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, handle, number)
        return stopping

    async def _drain(self, server: HttpServer, serving: asyncio.Task[None]) -> int:
        served = self._lifecycle.loaded
        assert served is not None, "loading has succeeded"
        limit_s = self._config.drain_timeout
        began_s = time.monotonic()
        self._lifecycle.drain()
        in_flight = served.engine.health()
        logger.info(
            "shutting down: %d requests running, %d waiting, at most %g s for them (Ctrl-C again ends at once)",
            in_flight.num_running,
            in_flight.num_waiting,
            limit_s,
        )
        aborted = await served.engine.drain(limit_s)
        if aborted:
            logger.warning("%d requests were aborted at the drain timeout", aborted)
        left_s = limit_s - (time.monotonic() - began_s)
        server.stop(max(CLOSE_LIMIT_S, left_s))
        await asyncio.wait({serving})
        await served.engine.close()
        logger.info("shut down after %.1f s", time.monotonic() - began_s)
        return 0


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """What is loaded stays. To go through hundreds of thousands of objects of torch again and again would be a tenth of the start,
    and once more whenever every stream waits for it."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_at_once(code: int, why: str) -> None:
    """End the process now, whatever its threads are doing, and its children with it."""
    for child in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    print(f"oneloop: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _children() -> list[int]:
    """Ids of this process' direct children (Linux; elsewhere they get the terminal's signal themselves)."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found
