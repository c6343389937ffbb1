"""Command `oneloop ray`: deploys the application on Ray Serve, and shuts it down gracefully on a signal.

If there is no cluster, the command starts one on this machine, which ends with this process."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.process.ending import EXIT_DRAINED, EXIT_NOTHING_TO_SERVE, SIGNALS
from server.process.terminal import url_of
from server.ray.options import USAGE, RayOptions

NAME = "oneloop"  # of the application
_ERROR = re.compile(r"[\w.]+(Error|Exception): \S")


def main(argv: Sequence[str], check: Callable[[ServerConfig], None] = lambda config: None) -> int:
    """Deploy and serve. Return the exit code: 0 after a drain, 1 if nothing can be served. `check`: validates the server's
    options before anything starts. Raises ConfigError, as `check` does."""
    if {"-h", "--help"} & {*argv}:
        print(USAGE, end="")
        return 0
    options, config = RayOptions.parse(argv, os.environ)
    check(config)
    if find_spec("ray") is None:
        raise ConfigError("oneloop ray needs Ray: pip install 'oneloop[ray]'")
    return run(options, config)


def run(options: RayOptions, config: ServerConfig) -> int:
    """Serve until the first signal, finish requests in flight, and return the exit code."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of replicas that look alike are of different requests
    import ray
    from ray import serve

    from server.ray.application import build

    is_ours = options.ray_address is None and "RAY_ADDRESS" not in os.environ
    try:
        ray.init(address="local" if is_ours else options.ray_address, log_to_driver=True, **_quiet(is_ours))
    except ConnectionError as error:
        print(
            f"oneloop: no Ray cluster at {options.ray_address or os.environ['RAY_ADDRESS']}: {error}", file=sys.stderr
        )
        return EXIT_NOTHING_TO_SERVE
    stopped = threading.Event()
    for number in SIGNALS:  # ray.init has set its own
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve.start(http_options=http_options(config))
        serve.run(build(options, config), name=NAME, route_prefix="/")
    except (RuntimeError, TimeoutError) as error:
        deployed = serve.status().applications.get(NAME)
        why = reasons({} if deployed is None else {name: each.message for name, each in deployed.deployments.items()})
        serve.shutdown()
        ray.shutdown()
        print(f"oneloop: the application could not be deployed: {why or error}", file=sys.stderr)
        return EXIT_NOTHING_TO_SERVE
    url = url_of((config.host, config.listen_port), secured=config.ssl_certfile is not None)
    print(f"\noneloop serves on {url}: {options.replicas} replicas on Ray Serve\n", flush=True)
    stopped.wait()
    print("oneloop: shutting down after requests in flight", file=sys.stderr, flush=True)
    serve.delete(NAME)
    if is_ours:
        serve.shutdown()
    ray.shutdown()
    return EXIT_DRAINED


def reasons(messages: Mapping[str, str]) -> str:
    """Return the last line of each traceback that Serve reports for a deployment. `messages`: Serve's message by deployment."""
    ends = []
    for name, message in messages.items():
        found = [line for line in message.splitlines() if _ERROR.match(line)]
        if found:
            ends.append(f"{name}: {found[-1].partition(': ')[2]}")
    return "; ".join(ends)


def _quiet(is_ours: bool) -> dict[str, Any]:
    return {"include_dashboard": False} if is_ours else {}


def http_options(config: ServerConfig) -> dict[str, Any]:
    """Return the HTTP options of Serve's proxies, from `config`."""
    return {
        "host": config.host,
        "port": config.listen_port,
        "keep_alive_timeout_s": max(1, round(config.timeout_keep_alive)),
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
    }
