"""Life of the server process: opens the port, loads the model, serves requests, and shuts down on signals.

At the first signal, new requests get 503. Requests in flight finish, up to the drain timeout, while the socket still answers. Then
HTTP server and engine close, and the exit code is 0. A second signal, or the first one while loading, ends the process at once. A
repetition of one signal within a moment counts once, because `timeout` and process groups deliver it twice. The process also ends
if an engine fails. Every wait has a limit; `ending.py` has the exit codes.

uvicorn handles sockets and protocol only. Its ten wake-ups a second and its signal handling are disabled, so an idle process
sleeps. The caller provides the loading function."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import uvicorn

from runtime.api import LoadProgress
from server.api.routes import SOCKET_PATHS
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.http.clients import Clients, raise_file_limit
from server.http.offload import MAX_WAITING, Offload, limit_arenas, switch_quickly
from server.http.protocol import HttpProtocol
from server.http.websocket import Sockets
from server.models.library import Library
from server.models.lifecycle import Lifecycle, Load, LoadError
from server.models.model import LoadedModel
from server.process import terminal
from server.process.app import create_app
from server.process.ending import (
    EXIT_CANNOT_SERVE,
    EXIT_DRAINED,
    EXIT_NOTHING_TO_SERVE,
    EXIT_STUCK,
    SIGNALS,
    SignalCount,
    SignalWatch,
    leave_at_once,
    leave_within,
)
from server.process.listening import tell_manager, tls_context
from server.process.running import RunningServer, announced

if TYPE_CHECKING:
    from server.http.tracing import Tracing

logger = logging.getLogger("oneloop.process")

MAX_MESSAGE_BYTES = 16 * 1024**2  # of a WebSocket
CLOSE_LIMIT_S = 2  # for responses that are complete but not yet read, when the drain timeout is used up
DEATH_LIMIT_S = 0.5  # for the last words of an engine that has died
EXIT_LIMIT_S = 1  # for threads that work for nobody any more
END_LIMIT_S = 15  # after the drain timeout, until a hanging process is ended by force
OBJECTS_A_COLLECTION = 25_000  # a step of 512 rows has some 10,000 while it lasts
CANCEL_LIMIT_S = 0.5  # for a download to notice that it is not wanted any more, and to tidy up


class HttpServer(uvicorn.Server):
    """uvicorn server without periodic wake-ups: it sleeps until `stop` is called."""

    def __init__(self, config: uvicorn.Config, clients: Clients) -> None:
        super().__init__(config)
        self.clients = clients
        self._stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, limit_s: float) -> None:
        """Close idle connections and the socket. Responses in flight have `limit_s` seconds to finish."""
        self.config.timeout_graceful_shutdown = max(1, round(limit_s))
        self.should_exit = True
        self._stopping.set()


def http_server(service: Service, max_connections: int | None = None) -> HttpServer:
    """Create the HTTP server. `max_connections`: the system's limit, if lower than the option. Raises ConfigError for a bad
    certificate."""
    secured = tls_context(service.config)
    clients = Clients(service.config, max_connections)
    service.http_stats.sources.append(clients.metrics)
    return HttpServer(
        uvicorn.Config(
            create_app(service),
            http=cast("type[asyncio.Protocol]", partial(HttpProtocol, clients)),
            ws=cast("type[asyncio.Protocol]", Sockets(clients, SOCKET_PATHS)),
            ws_max_size=min(service.config.max_body_size, MAX_MESSAGE_BYTES),
            ws_per_message_deflate=False,  # audio in base64 saves little, and a small message could unpack to a large one
            lifespan="off",
            log_config=None,
            access_log=False,
            date_header=False,  # ours, and only when there is an answer
            server_header=False,
            proxy_headers=False,
            ssl_context_factory=None if secured is None else lambda config, default: secured,
        ),
        clients,
    )


def tracing_of(config: ServerConfig) -> Tracing | None:
    """Return the Tracing for --otlp-traces-endpoint, or None without that option. Raises ConfigError if it cannot be created."""
    if config.otlp_traces_endpoint is None:
        return None
    from server.http.tracing import Tracing  # packages that nobody else needs

    return Tracing.of(config)


class Process:
    def __init__(
        self,
        config: ServerConfig,
        sock: socket.socket,
        load: Load,
        started_s: float,
        clock: Callable[[], float] = time.monotonic,
        library: Library | None = None,
    ) -> None:
        """Create the process. `sock`: listening socket. `started_s`: start time by `time.monotonic()`. `clock`: returns seconds,
        to recognise repeated signals. `library`: see `Service`."""
        self._config = config
        self._sock = sock
        self._load = load
        self._started_s = started_s
        self._lifecycle = Lifecycle()
        offload = Offload(max_waiting=max(MAX_WAITING, config.max_queue))
        self._service = Service(config, self._lifecycle, offload, library=library)
        self._cancel = threading.Event()
        self._clock = clock
        self._is_for_people = config.log_format != "json"  # or else each line is a JSON object
        self._display = terminal.StartupDisplay(sys.stderr, started_s, None if self._is_for_people else logger.info)
        self._last_words = ""
        self._tracing = tracing_of(config)
        if self._tracing is not None:
            self._lifecycle.when_loaded(self._trace)

    async def run(self) -> int:
        """Run the server and return the exit code, even if a part of the process hangs. Call it on the main thread, for its
        signal handlers."""
        limit_arenas()
        switch_quickly()
        stopping = self._lifecycle.stopping
        self._handle_signals(stopping)
        server = http_server(self._service, self._max_connections())
        serving = asyncio.create_task(server.serve(sockets=[self._sock]), name="http")
        loading = asyncio.create_task(self._load_model(), name="load")
        stopped = asyncio.create_task(stopping.wait(), name="signal")
        try:
            watch = SignalWatch(self._config.drain_timeout + END_LIMIT_S, self._clock)
            with watch, announced(self._announcement()):
                return await self._serve(server, serving, loading, stopped)
        finally:
            await _end_http(server, serving, 0)
            stopped.cancel()
            self._service.offload.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            gc.unfreeze()

    def _announcement(self) -> RunningServer:
        url = terminal.url_of(self._sock.getsockname(), secured=self._config.ssl_certfile is not None)
        names = tuple(name for each in self._config.each_model() for name in each.served_names)
        return RunningServer(os.getpid(), url, names, time.time())

    def _max_connections(self) -> int:
        wanted = self._config.max_connections
        allowed = raise_file_limit(wanted)
        if allowed < wanted:
            logger.warning("the system's limit of open files allows %d connections, not %d", allowed, wanted)
        return allowed

    async def _serve(
        self,
        server: HttpServer,
        serving: asyncio.Task[None],
        loading: asyncio.Task[bool],
        stopped: asyncio.Task[Literal[True]],
    ) -> int:
        await asyncio.wait({loading, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            self._cancel.set()
            await asyncio.wait({loading}, timeout=CANCEL_LIMIT_S)
            # A download has tidied up now; a thread in the middle of torch cannot be interrupted, and has nothing to.
            leave_at_once(EXIT_DRAINED, "stopped while loading")
        loaded = self._lifecycle.loaded
        if not loading.result() or loaded is None:
            return EXIT_NOTHING_TO_SERVE
        death = asyncio.create_task(self._lifecycle.death(), name="death")
        try:
            await asyncio.wait({stopped, serving, death}, return_when=asyncio.FIRST_COMPLETED)
            code = EXIT_DRAINED if death.done() else await self._drain(loaded, server, serving)
            if not death.done():
                return code
            self._last_words = f"{death.result()}; restart the server"
            logger.critical("%s", self._last_words)
            server.stop(0)
            await asyncio.wait({serving}, timeout=DEATH_LIMIT_S)  # let waiting clients read the error
            serving.cancel()
            return EXIT_CANNOT_SERVE
        finally:
            death.cancel()

    def end(self, code: int) -> None:
        """End the process with `code`, without waiting for threads. Called after `run`."""
        if code in (EXIT_CANNOT_SERVE, EXIT_STUCK):
            leave_at_once(code, self._last_words)
        leave_within(EXIT_LIMIT_S, code)

    # --- loading --------------------------------------------------------------------------------------------------

    async def _load_model(self) -> bool:
        """Load the model. Return whether that succeeded."""
        try:
            with without_collections():
                loaded = await self._load(self._config, self._report, self._cancel)
        except LoadError as error:
            return self._failed(str(error))
        except Exception as error:
            logger.exception("loading failed")
            return self._failed(f"{type(error).__name__}: {error}")
        seconds = self._display.finish()
        self._lifecycle.ready(loaded)
        tell_manager("READY=1", os.environ)
        url = terminal.url_of(self._sock.getsockname(), secured=self._config.ssl_certfile is not None)
        total_s = time.monotonic() - self._started_s
        if self._is_for_people:
            print(terminal.summary(loaded, url, seconds, total_s), flush=True)
        else:
            logger.info("%s is served on %s, after %.1f s", loaded.name, url, total_s)
        return True

    def _trace(self, loaded: LoadedModel) -> None:
        assert self._tracing is not None, "it was asked for"
        loaded.engine.when_finished(partial(self._tracing.finished, loaded.name))

    def _report(self, progress: LoadProgress) -> None:
        self._lifecycle.report(progress)
        self._display.report(progress)

    def _failed(self, reason: str) -> bool:
        self._display.finish()
        if self._cancel.is_set():
            return False
        self._lifecycle.fail(reason)
        if self._is_for_people:
            print(f"oneloop: {reason}", file=sys.stderr, flush=True)
        else:
            logger.error(reason)
        return False

    # --- ending ---------------------------------------------------------------------------------------------------

    def _handle_signals(self, stopping: asyncio.Event) -> None:
        """Handle signals: the first sets `stopping`, the second ends the process."""
        signals = SignalCount(self._clock)

        def handle(number: int) -> None:
            if signals.see(number) and signals.num > 1:
                leave_at_once(128 + number, "stopped by a second signal")
            stopping.set()

        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, handle, number)

    async def _drain(self, loaded: LoadedModel, server: HttpServer, serving: asyncio.Task[None]) -> int:
        limit_s = self._config.drain_timeout
        began_s = time.monotonic()
        self._lifecycle.drain()
        tell_manager("STOPPING=1", os.environ)
        in_flight = loaded.engines.health()
        counts = (
            f"{in_flight.num_running} running and {in_flight.num_waiting} waiting requests have up to {limit_s:g} s"
        )
        if self._is_for_people:  # at any --log-level: whoever pressed Ctrl-C waits for an answer
            print(f"oneloop: shutting down: {counts}; Ctrl-C again ends at once", file=sys.stderr, flush=True)
        else:
            logger.info("shutting down: %s", counts)
        await self._service.sockets.closed(limit_s)
        aborted = await loaded.engines.drain(max(0.0, limit_s - (time.monotonic() - began_s)))
        if aborted:
            logger.warning("%d requests were aborted at the drain timeout", aborted)
        left_s = limit_s - (time.monotonic() - began_s)
        await _end_http(server, serving, max(CLOSE_LIMIT_S, left_s))
        if not await loaded.engines.close():
            self._last_words = "a step did not end in time; the process ends without waiting for it"
            logger.error("%s", self._last_words)
            return EXIT_STUCK
        logger.info("shut down after %.1f s", time.monotonic() - began_s)
        return EXIT_DRAINED


async def _end_http(server: HttpServer, serving: asyncio.Task[None], limit_s: float) -> None:
    """Stop the HTTP server. Responses in flight have `limit_s` seconds to finish, and closing has CLOSE_LIMIT_S more."""
    server.stop(limit_s)
    await asyncio.wait({serving}, timeout=limit_s + CLOSE_LIMIT_S)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Context in which garbage collection is disabled, for loading a model. At its end, all objects are frozen: collecting
    torch's objects took a tenth of the start. Later, a collection starts at OBJECTS_A_COLLECTION; with Python's default of 700,
    several started per step."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(OBJECTS_A_COLLECTION, *gc.get_threshold()[1:])
        gc.enable()
