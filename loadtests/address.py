"""Target address of a load test: a loopback address, unless the user allows another.

`Address.parse` and `Address.of_server` check the address. Host names other than localhost are refused before any DNS lookup."""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_KEY = re.compile(r"[!-~]+")


class AddressRefused(ValueError):
    """Error: the base URL is malformed, or no load may be sent to its address."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server. `host`: literal IP. `name`: host name in the URL. `path`: part of the URL before `/v1`, without a
    final slash. `uds`: Unix socket that replaces host and port. `api_key` is sent with every request."""

    host: str
    port: int
    path: str = ""
    name: str = ""
    tls: bool = False
    uds: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, base_url: str) -> Address:
        """Parse a plain HTTP loopback URL: `http://127.0.0.1:8000`, with or without a final `/v1`. Raises AddressRefused."""
        address = cls.of_server(base_url)
        if address.tls or address.uds is not None:
            raise AddressRefused(f"{base_url!r}: only http://HOST:PORT is supported here")
        return address

    @classmethod
    def of_server(cls, base_url: str, *, remote: bool = False, api_key: str | None = None) -> Address:
        """Parse a server's base URL: HTTP, HTTPS, or `unix:PATH`. `remote`: allow other machines. Raises AddressRefused."""
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise AddressRefused("the API key is empty, or has characters that no header may have")
        if base_url.startswith("unix:"):
            path = base_url.removeprefix("unix:").removeprefix("//")
            if not path:
                raise AddressRefused(f"{base_url!r} has no socket path")
            return cls("localhost", 80, uds=path, api_key=api_key)
        try:
            parts = urlsplit(base_url)
            name, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise AddressRefused(f"{base_url!r} is not a URL: {error}") from None
        if parts.scheme not in _PORTS:
            raise AddressRefused(f"{base_url!r}: http://HOST:PORT, https://HOST or unix:PATH is supported")
        if parts.username is not None or parts.query or parts.fragment:
            raise AddressRefused(f"{base_url!r}: a base URL has no user, query or fragment")
        host = _any_ip(name) if remote else _loopback_ip(name)
        tls = parts.scheme == "https"
        # A certificate is for a name, and so is a proxy's choice of server; localhost is neither's.
        called = name if name not in (host, "localhost") or tls else ""
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or _PORTS[parts.scheme], path, called, tls, api_key=api_key)

    @property
    def url(self) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        name = self.name or self.host
        return f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that every request to this address has."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context that all connections share. Loading the system's certificates takes longer than many requests."""
    return ssl.create_default_context()


def _loopback_ip(name: str) -> str:
    if name == "localhost":
        return min(map(_loopback_ip, _looked_up(name)), key=lambda ip: ":" in ip)
    try:
        allowed = ipaddress.ip_address(name).is_loopback
    except ValueError:
        allowed = False
    if not allowed:
        raise AddressRefused(
            f"{name or 'no host'!r} is not a loopback address; load is sent to this machine only, or with --remote to "
            "another one"
        )
    return name


def _any_ip(name: str) -> str:
    """Return an IP address of the host `name`. Called once, so that requests do not wait for DNS. Raises AddressRefused."""
    try:
        return _looked_up(name)[0]
    except OSError as error:
        raise AddressRefused(f"{name or 'no host'!r}: {error.strerror or error}") from None


def _looked_up(name: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
