"""Commands `oneloop ps` and `oneloop stop`: list and stop the servers of this user on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from server.cli.library import ago
from server.config.command_line import CommandParser
from server.config.server_options import ConfigError
from server.process.running import RunningServer, end, running

KEY_VARIABLES = ("ONELOOP_ADMIN_API_KEY", "ONELOOP_API_KEY", "OPENAI_API_KEY")  # in this order
ASK_LIMIT_S = 2.0
DRAIN_LIMIT_S = 60.0  # twice the default of --drain-timeout


def ps(argv: Sequence[str]) -> int:
    """List the running servers. Return the exit code. Raises ConfigError."""
    parser = CommandParser(
        prog="oneloop ps", usage="oneloop ps [--json]", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="List the servers of this user on this machine, and the models that they have loaded.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.read(argv).get("json", False)
    servers = [(server, loaded(server.url, os.environ)) for server in running()]
    if as_json:
        print(json.dumps([{**asdict(server), "loaded": names} for server, names in servers]))
        return 0
    if not servers:
        print("no server runs here: oneloop serve MODEL starts one", file=sys.stderr)
        return 0
    for server, names in servers:
        state = "does not answer" if names is None else f"loaded: {', '.join(names)}" if names else "nothing loaded"
        print(
            f"{server.url}  pid {server.pid}  {', '.join(server.models)}  {state}  {ago(time.time() - server.started)}"
        )
    return 0


def loaded(url: str, environment: Mapping[str, str]) -> list[str] | None:
    """Return the names of the models that the server at `url` has loaded; None if it does not respond or rejects the key."""
    import httpx

    key = next((environment[name] for name in KEY_VARIABLES if environment.get(name)), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    path, base = url.removeprefix("unix:"), url
    transport = httpx.HTTPTransport(uds=path) if url.startswith("unix:") else httpx.HTTPTransport(verify=False)
    if url.startswith("unix:"):
        base = "http://localhost"
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError), httpx.Client(
        transport=transport, timeout=ASK_LIMIT_S, headers=headers, trust_env=False
    ) as client:  # fmt: skip
        return [model["name"].removesuffix(":latest") for model in client.get(f"{base}/api/ps").json()["models"]]
    return None


def stop(argv: Sequence[str]) -> int:
    """Stop servers gracefully, as Ctrl-C does. Return the exit code. Raises ConfigError."""
    parser = CommandParser(
        prog="oneloop stop", usage="oneloop stop MODEL|PORT|PID|URL… | --all", allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Stop a server of this user on this machine. Running requests finish first.",
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="MODEL|PORT|PID|URL")
    parser.add_argument("--all", action="store_true", help="stop all servers")
    given = parser.read(argv)
    servers = chosen(running(), given.get("names", ()), everyone=given.get("all", False))
    code = 0
    for server in servers:
        print(f"stopping {server.url}: running requests finish first", flush=True)
        if not end(server, DRAIN_LIMIT_S):
            print(f"oneloop: {server.url} still runs after {DRAIN_LIMIT_S:g} s: kill {server.pid}", file=sys.stderr)
            code = 1
    return code


def chosen(servers: Sequence[RunningServer], names: Sequence[str], *, everyone: bool) -> Sequence[RunningServer]:
    """Return the servers that `names` select, by model, port or process id. Raises ConfigError for an unknown or ambiguous name.
    `everyone`: select all."""
    if not servers:
        raise ConfigError("stop: no server of this user runs here")
    if everyone:
        return servers
    if not names:  # the only one may be another program's, of the same user
        raise ConfigError(f"stop: name a server, or use --all; running: {_listed(servers)}")
    found = []
    for name in names:
        same = [server for server in servers if name in _names(server)]
        if len(same) != 1:
            what = "several servers have" if same else "no server has"
            raise ConfigError(f"stop: {what} the name {name}; running: {_listed(same or servers)}")
        found += same
    return found


def _names(server: RunningServer) -> tuple[str, ...]:
    return (*server.models, str(server.pid), server.url, server.url.rpartition(":")[2])


def _listed(servers: Sequence[RunningServer]) -> str:
    return ", ".join(f"{server.url} ({', '.join(server.models)})" for server in servers)
