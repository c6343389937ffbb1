"""Running servers of this user on this machine. Each server has a file, which its process keeps locked.

`oneloop ps` and `oneloop stop` read the files. The kernel releases a lock when the process ends. Readers remove unlocked files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger("oneloop.process")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Running server process. `url`: http://…, https://… or unix:PATH. `models`: names. `started`: seconds since the epoch."""

    pid: int
    url: str
    models: tuple[str, ...]
    started: float


def folder() -> Path:
    """Return the folder of the servers' files: below $XDG_RUNTIME_DIR, or below the cache folder if that variable is not set."""
    runtime, cache = os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(runtime):
        return Path(runtime) / "oneloop"
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "oneloop" / "run"


@contextlib.contextmanager
def announced(server: RunningServer) -> Iterator[None]:
    """Context in which `server` is listed as running. If the folder cannot be written, only a warning is logged."""
    with contextlib.ExitStack() as stack:
        try:
            folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder() / f"{server.pid}.json"
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(asdict(server)))
            file.flush()
            stack.callback(path.unlink, missing_ok=True)
        except OSError as error:
            logger.debug("oneloop ps will not list this server: %s", error)
        yield


def running() -> list[RunningServer]:
    """Return the running servers, oldest first."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                fields = json.load(file)
                found.append(RunningServer(**{**fields, "models": tuple(fields["models"])}))
            else:
                path.unlink()
    return sorted(found, key=lambda server: server.started)


def end(server: RunningServer, limit_s: float) -> bool:
    """Send SIGTERM to `server`, which then drains. Return whether its process ended within `limit_s` seconds."""
    try:
        process = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return True
    try:
        if server not in running():  # or the number may belong to another process by now
            return True
        signal.pidfd_send_signal(process, signal.SIGTERM)
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        return bool(waiting.poll(limit_s * 1000))
    finally:
        os.close(process)
