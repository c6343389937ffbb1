"""asgi: the server's application for any ASGI server, alone or mounted into another application.

The ASGI server handles address, TLS, connections and signals. The engine runs on the ASGI server's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config.option import Option, options_by_name
from server.config.parse import from_keywords
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.llm.async_llm import AsyncLLM
from server.process.app import create_app

# Options of the process and of its connections, which belong to whoever runs the application.
_OF_PROCESS = frozenset({
    "host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "max_connections",
    "max_connections_per_address", "timeout_head", "timeout_body", "timeout_keep_alive", "timeout_write", "dry_run", "log_level",
    "log_format", "otlp_traces_endpoint", "config", "distributed_executor_backend",
})  # fmt: skip
ANY_HOST = "0.0.0.0"


def asgi(model: str | os.PathLike[str] | None = None, **options: Any) -> Application:
    """Return an application with the routes and pages of `oneloop serve`. `model`, `options`: its options, with underscores,
    except those of the process and its connections. Raises ValueError for an unknown or unsupported option."""
    path = None if model is None else os.fspath(model)
    try:
        # Whoever runs it may let anybody in, so operators' routes need --admin-api-key, as on a public address.
        return Application(replace(from_keywords({**options, "model": path}, _options()), host=ANY_HOST))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _options() -> dict[str, Option]:
    return {name: option for name, option in options_by_name().items() if name not in _OF_PROCESS}


class Application:
    """ASGI application with a model, which is loaded when the application starts. `llm`: AsyncLLM with the same engine.

    If it is mounted into another application, that application must run its lifespan: `Starlette(…, lifespan=app.lifespan)`, or
    `async with app.lifespan():` in your own lifespan. If it is not mounted, the ASGI server runs the lifespan."""

    def __init__(self, config: ServerConfig) -> None:
        self.llm = AsyncLLM.of(config)
        self._config = config
        self._app: ASGIApp | None = None
        self._starter = Router(lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Load the model; on exit, wait for requests up to `drain_timeout` seconds, then close. `app`: the outer application,
        unused. Raises LoadError."""
        async with self.llm:
            core = await self.llm.core()
            self._app = create_app(core.service)
            try:
                yield
            finally:
                core.lifecycle.drain()
                await core.loaded.engines.drain(self._config.drain_timeout)
                self._app = None
        self.llm = AsyncLLM.of(self._config)  # for another start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._starter(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif self._app is None:
            raise RuntimeError("the model is not loaded: pass lifespan=app.lifespan to the outer application")
        else:
            # Below a prefix as without one; links in its pages are relative.
            path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
            await self._app({**scope, "path": path, "root_path": ""}, receive, send)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # which RequestMiddleware keeps from uvicorn, but not from an outer application
