"""Requests to a server outside measured runs: its model, its health, one completion, its event-loop lag."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from loadtests.address import Address, tls_context

_LAG_BUCKET = re.compile(r'^oneloop:loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\}\s+([0-9.eE+]+)', re.MULTILINE)
Buckets = Mapping[float, float]


class ProbeFailed(Exception):
    pass


def ask(
    address: Address, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 10.0
) -> tuple[int, bytes]:
    """Send a GET, or a POST of JSON if `body` is given. Return status and body. Raises ProbeFailed if there is no answer."""
    connection = _connection(address, timeout_s)
    try:
        payload = None if body is None else json.dumps(body)
        headers = {
            "Connection": "close",
            "Content-Type": "application/json",
            "Host": address.authority,
            **address.headers,
        }
        connection.request("GET" if body is None else "POST", address.path + path, payload, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ProbeFailed(f"{address.url}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _connection(address: Address, timeout_s: float) -> http.client.HTTPConnection:
    if address.uds is not None:
        return _UnixConnection(address.uds, timeout_s)
    if address.tls:
        return http.client.HTTPSConnection(address.name, address.port, timeout=timeout_s, context=tls_context())
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def is_healthy(address: Address, path: str) -> bool:
    try:
        return ask(address, path, timeout_s=5.0)[0] == 200
    except ProbeFailed:
        return False


def first_model(address: Address) -> str:
    """Return the first model id in /v1/models. Raises ProbeFailed."""
    status, body = ask(address, "/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ProbeFailed(f"{address.url}/v1/models (HTTP {status}) lists no model; name it with --model") from None


def complete_once(address: Address, model: str, timeout_s: float) -> None:
    """Generate one token through the chat endpoint. Raises ProbeFailed."""
    body = {"model": model, "max_tokens": 1, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
    status, answer = ask(address, "/v1/chat/completions", body, timeout_s)
    if status != 200:
        raise ProbeFailed(f"first completion: HTTP {status}: {answer[:200].decode(errors='replace')}")


def loop_lag_buckets(address: Address) -> Buckets:
    """Return oneloop's event-loop lag as cumulative counts by upper bound in seconds. Empty for other servers."""
    try:
        status, body = ask(address, "/metrics")
    except ProbeFailed:
        return {}
    found = _LAG_BUCKET.findall(body.decode(errors="replace")) if status == 200 else []
    return {float(bound): float(count) for bound, count in found}


def bucket_percentile(before: Buckets, after: Buckets, percent: float) -> float | None:
    """Return the upper bound of the bucket that contains a percentile of observations between two readings, or None."""
    grown = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(grown.values(), default=0.0)
    return next((bound for bound, count in grown.items() if total and count >= total * percent / 100), None)
