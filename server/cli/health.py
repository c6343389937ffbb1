"""Command `oneloop health`: checks the server that a start with the same options would create, for probes without curl.

It finds the server by options, environment and file. Only the standard library is imported, so that frequent probes are cheap."""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from server.config.command_line import CommandParser, add_options
from server.config.option import options_by_name
from server.config.parse import config_of
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

if TYPE_CHECKING:
    import ssl

PATHS: Final = {"live": "/health/live", "ready": "/health/ready", "generate": "/health/generate"}
USAGE = (
    "usage: oneloop health [live|ready|generate] [options of the server]\n\nlive: the process can still serve; ready (default): "
    "requests are accepted; generate: the engine generates a token.\nExit code: 0 if the check passes, 1 if it fails, 2 for "
    "invalid options.\n"
)
LIMIT_S = 30.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a server listens everywhere, it does so here


def main(argv: Sequence[str]) -> int:
    """Check the server. Return the exit code: 0 if the check passes, 1 if it fails, 2 for invalid options."""
    if {"-h", "--help"} & {*argv}:
        print(USAGE, end="")
        return 0
    parser = CommandParser(
        prog="oneloop health", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("kinds", nargs="*")
    add_options(parser, options_by_name())
    try:
        given = parser.read(argv)
        kind, *others = given.pop("kinds", ["ready"])
        if kind not in PATHS or others:
            raise ConfigError(f"health: give one of {', '.join(PATHS)}")
        config = config_of(given, os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    try:
        status, body = ask(config, PATHS[kind])
    except (OSError, http.client.HTTPException) as error:
        print(f"oneloop: no server responds: {error}", file=sys.stderr)
        return 1
    print(body.decode(errors="replace"))
    return 0 if status == 200 else 1


def ask(config: ServerConfig, path: str, key: str | None = None, limit_s: float = LIMIT_S) -> tuple[int, bytes]:
    """Request `path` from the server with options `config`. Return status and body. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("localhost", timeout=limit_s)
    if config.uds is not None:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(limit_s)
        connection.sock.connect(config.uds)
    else:
        host = _ANY.get(config.host, config.host)
        connection.sock = socket.create_connection((host, config.listen_port), limit_s)
    if config.ssl_certfile is not None:
        connection.sock = _secured(config).wrap_socket(connection.sock)
    try:
        connection.request("GET", path, headers={} if key is None else {"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _secured(config: ServerConfig) -> ssl.SSLContext:
    """Return a TLS context that accepts any host name, since the server is local. The client sends the server's certificate."""
    import ssl

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if config.ssl_cert_reqs and config.ssl_certfile is not None:
        made.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    return made
