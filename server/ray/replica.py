"""Replica: the whole server (model, engine, routes, keys) in a process without its own port.

It does what `process/serve.py` does, in a process that Ray Serve starts, checks and ends. Independent of Ray."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import uuid
from contextlib import aclosing
from functools import partial

from starlette.types import ASGIApp

from server.api.service import Service
from server.config.server_config import ServerConfig
from server.http.offload import MAX_WAITING, Offload
from server.models.lifecycle import Lifecycle, Load
from server.process.app import create_app
from server.process.ending import EXIT_CANNOT_SERVE, leave_at_once
from server.process.serve import DEATH_LIMIT_S, tracing_of, without_collections
from server.ray.channel import Lines, ReplyTo
from server.ray.exchange import ACCEPTED, Exchange, Forwarded, ReplicaAnswer, ResponseHead

logger = logging.getLogger("oneloop.ray")


class Unhealthy(Exception):
    """Error: the replica must be replaced. The message gives the reason."""


class Replica:
    """Server without a port. `load`: loading function, as for `Process`. `name`: name of the replica in joined metrics."""

    def __init__(self, config: ServerConfig, load: Load, name: str | None = None) -> None:
        """Create the replica. Call it on the running event loop. Raises ConfigError."""
        self.name = name or uuid.uuid4().hex[:8]
        self._config = config
        self._load = load
        self._lifecycle = Lifecycle()
        self._service = Service(config, self._lifecycle, Offload(max_waiting=max(MAX_WAITING, config.max_queue)))
        self._tasks: set[asyncio.Task[None]] = set()  # of requests
        self._lines = Lines()
        self._death: asyncio.Task[None] | None = None
        self._app: ASGIApp | None = None
        self._tracing = tracing_of(config)

    async def start(self) -> None:
        """Load the model. Return when the replica accepts requests. Raises LoadError."""
        self._app = create_app(self._service)
        with without_collections():
            loaded = await self._load(self._config, self._lifecycle.report, threading.Event())
        if self._tracing is not None:
            for engine in loaded.engines:
                engine.when_finished(partial(self._tracing.finished, loaded.name))
        self._lifecycle.ready(loaded)
        self._death = asyncio.create_task(self._end_with_engine(), name="death")
        logger.info("replica %s serves %s (process %d)", self.name, loaded.name, os.getpid())

    async def _end_with_engine(self) -> None:
        """End the process when its engine fails, so that Serve replaces the replica."""
        reason = await self._lifecycle.death()
        logger.critical("%s; the replica must be replaced", reason)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DEATH_LIMIT_S)  # let waiting clients read the error
        leave_at_once(EXIT_CANNOT_SERVE, reason)

    async def check_health(self) -> None:
        """Raise Unhealthy if the replica must be replaced, by the criteria of /health."""
        if self._lifecycle.steps_fail():
            for each in self._lifecycle.require_model().resident[:1]:
                self._service.token_probe.begin(each.engine)  # only a step that settles can tell that it is over
        _, body = self._lifecycle.health()
        if body["status"] == "failed":
            raise Unhealthy(str(body.get("reason")))

    def _begin(self, request: Forwarded) -> Exchange:
        assert self._app is not None, "started"
        exchange = Exchange(self._app, request)
        self._tasks.add(exchange.when_over(self._tasks.discard))
        return exchange

    async def deliver(self, request: Forwarded, reply_to: ReplyTo) -> None:
        """Send the answer to `request` to `reply_to`, frame by frame. Return after the last frame. Cancelling this call ends the
        request. Raises OSError."""
        line = await self._lines.to(reply_to)
        line.send(reply_to.number, ACCEPTED)
        async with aclosing(self._begin(request).pieces()) as pieces:
            async for piece in pieces:
                line.send(reply_to.number, piece)
        line.end(reply_to.number)

    async def answer_whole(self, request: Forwarded) -> ReplicaAnswer:
        head, body = ResponseHead(500, []), b""
        async with aclosing(self._begin(request).pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, ResponseHead):
                    head = piece
                else:
                    body += piece
        return ReplicaAnswer(self.name, head.status, head.headers, body)

    async def stop(self) -> None:
        """Wait for requests in flight, up to the drain timeout, then end the engine."""
        if self._death is not None:
            self._death.cancel()
        loaded = self._lifecycle.loaded
        self._lifecycle.drain()
        if loaded is not None:
            await loaded.engines.drain(self._config.drain_timeout)
            await loaded.engines.close()
        self._service.offload.close()
        self._lines.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        gc.unfreeze()
