"""Where load may be sent: plain HTTP on a loopback address, and nowhere else.

An `Address` that exists has been checked. Names other than localhost are refused without being looked up."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit


class AddressRefused(ValueError):
    """The address is no loopback address, or not a base URL at all."""


@dataclass(frozen=True, slots=True)
class Address:
    """`host` is a literal loopback IP; `path` is what stands before `/v1`, without a final slash."""

    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, base_url: str) -> Address:
        """`http://127.0.0.1:8000`, with or without `/v1` at its end. Raises AddressRefused."""
        try:
            parts = urlsplit(base_url)
            name, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise AddressRefused(f"{base_url!r} is not a URL: {error}") from None
        if parts.scheme != "http":
            raise AddressRefused(f"{base_url!r}: only http://HOST:PORT is supported")
        if parts.username is not None or parts.query or parts.fragment:
            raise AddressRefused(f"{base_url!r}: a base URL has no user, query or fragment")
        return cls(_loopback_ip(name), port or 80, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def url(self) -> str:
        return f"http://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _loopback_ip(name: str) -> str:
    if name == "localhost":
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        return min(map(_loopback_ip, found), key=lambda ip: ":" in ip)
    try:
        allowed = ipaddress.ip_address(name).is_loopback
    except ValueError:
        allowed = False
    if not allowed:
        raise AddressRefused(f"{name or 'no host'!r} is not a loopback address; load is sent to this machine only")
    return name
