"""Fetcher: downloads http and https URLs from clients, only from hosts that the server's operator has allowed.

Each redirect is checked like the first URL: its host must be allowed and all addresses of the host public. The connection uses a
checked address, so a second DNS lookup cannot change it. No proxy, cookies, keys or decompression are used; bytes, redirects and
time are limited. Error messages reveal nothing about an address except that it is not allowed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from server.http.errors import InvalidMedia, clip

if TYPE_CHECKING:
    import httpx
import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
ANY: Final = "*"


class AllowedHosts:
    """Set of hosts that may be fetched from. `names`: host names, "*.example.com" for all hosts below a domain, "*" for all hosts.
    Private addresses and networks are allowed only if `names` lists them.

    Raises ValueError for an invalid name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for name in names:
            try:
                self._networks.append(ipaddress.ip_network(name.strip("[]"), strict=False))
            except ValueError:
                if "/" in name or ":" in name or (ANY in name.removeprefix("*.") and name != ANY):
                    raise ValueError(
                        f"{name!r} is not a host name, *.domain, *, address or network (no scheme, port or path)"
                    ) from None
                self._names.add(name.lower().rstrip("."))

    def __bool__(self) -> bool:
        """Return True if at least one host or network is allowed."""
        return bool(self._names or self._networks)

    def takes_host(self, host: str) -> bool:
        """Return True if URLs with `host`, a host name or IP address, are allowed."""
        host = host.lower().rstrip(".")
        if address := _address(host):
            return ANY in self._names or self._is_named(address)
        parents = host.split(".")
        return ANY in self._names or host in self._names or any(
            f"*.{'.'.join(parents[start:])}" in self._names for start in range(1, len(parents))
        )  # fmt: skip

    def takes_address(self, text: str) -> bool:
        """Return True if connections to the IP address `text`, to which a host name resolved, are allowed."""
        address = _address(text)
        return address is not None and (self._is_named(address) or is_public(address))

    def _is_named(self, address: Address) -> bool:
        return any(address in network for network in self._networks if network.version == address.version)


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Return True if `address` is a unicast address of the public internet. If `address` embeds an IPv4 address (NAT64, 6to4,
    Teredo), the IPv4 address is checked instead."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        packed = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if packed is not None:
            return is_public(packed)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified


MAX_REDIRECTS: Final = 3
MAX_URL_CHARS: Final = 8192
_PORTS: Final = {"http": 80, "https": 443}
_TYPES: Final = ("image/", "audio/", "video/", "application/octet-stream", "application/ogg", "binary/octet-stream")
Resolver = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of `host`, as strings, from this machine's DNS resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class Fetcher:
    """HTTP client that downloads media. `timeout_s`: time limit of one file, redirects included. `transport`, `resolver`:
    replace the network and DNS in tests."""

    def __init__(
        self,
        hosts: AllowedHosts,
        *,
        max_bytes: int,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        self._hosts = hosts
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._transport = transport
        self._resolver = resolver

    async def fetch(self, url: str, where: str) -> bytes:
        """Download the file at `url` and return its bytes. `where`: the URL's field name in the request. Raises InvalidMedia."""
        if not self._hosts:
            raise InvalidMedia(
                "fetching URLs is disabled: send the data itself, or start the server with --allowed-media-domains",
                where,
            )
        import httpx  # a tenth of a second, for the first that needs it

        try:
            async with asyncio.timeout(self._timeout_s), self._client() as client:
                return await self._follow(client, url, where)
        except TimeoutError:
            raise InvalidMedia(f"the download took more than {self._timeout_s:g} s", where) from None
        # httpx and the standard library report a malformed URL, of the request or of a redirect, as InvalidURL or a ValueError.
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise InvalidMedia(f"it could not be fetched ({type(error).__name__})", where) from None

    def _client(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            transport=self._transport, timeout=self._timeout_s, follow_redirects=False, trust_env=False
        )

    async def _follow(self, client: httpx.AsyncClient, url: str, where: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            request = await self._pinned(url, where)
            response = await client.send(request, stream=True)
            try:
                if not response.has_redirect_location:
                    return await self._body(response, where)
                url = urljoin(url, response.headers["location"])
            finally:
                await response.aclose()
        raise InvalidMedia(f"it was redirected more than {MAX_REDIRECTS} times", where)

    async def _pinned(self, url: str, where: str) -> httpx.Request:
        import httpx

        parts, port = _split(url, where)
        host = parts.hostname or ""
        if not self._hosts.takes_host(host):
            raise InvalidMedia(f"{clip(host)} is not one of the hosts that --allowed-media-domains names", where)
        try:
            addresses = await self._resolver(host, port)
        except (OSError, UnicodeError):  # the latter for a label that is empty or longer than 63 characters
            raise InvalidMedia(f"there is no host {clip(host)}", where) from None
        if not addresses or not all(map(self._hosts.takes_address, addresses)):
            raise InvalidMedia(f"{clip(host)} has no address that may be fetched from", where)
        address = addresses[0]
        literal = f"[{address}]" if ":" in address else address
        path = parts.path or "/"
        target = f"{parts.scheme}://{literal}:{port}{path}{'?' + parts.query if parts.query else ''}"
        named = f"[{host}]" if ":" in host else host
        headers = {
            "host": named if port == _PORTS[parts.scheme] else f"{named}:{port}",
            "user-agent": "oneloop",
            "accept": "image/*, audio/*, video/*",
            "accept-encoding": "identity",
        }
        # Not `client.build_request`, which adds the cookies of earlier answers: several hosts may have the same address.
        # The certificate has to be the name's, not the address's.
        return httpx.Request("GET", target, headers=headers, extensions={"sni_hostname": host})

    async def _body(self, response: httpx.Response, where: str) -> bytes:
        if response.status_code != 200:
            raise InvalidMedia(f"its host answered with status {response.status_code}", where)
        kind = response.headers.get("content-type", "application/octet-stream").lower()
        if not kind.startswith(_TYPES):
            raise InvalidMedia(f"its host declares the type {clip(kind)}, not an image, audio or video", where)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidMedia("its host sent a compressed response, which is not supported", where)
        length = response.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise too_large(self._max_bytes, where)
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._max_bytes:
                raise too_large(self._max_bytes, where)
        return bytes(body)


def too_large(max_bytes: int, where: str) -> InvalidMedia:
    return InvalidMedia(f"it has more than {max_bytes} bytes", where)


def _split(url: str, where: str) -> tuple[SplitResult, int]:
    if len(url) > MAX_URL_CHARS:
        raise InvalidMedia(f"the URL has more than {MAX_URL_CHARS} characters", where)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidMedia("it is not a URL", where) from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidMedia("a URL must begin with data:, http://, https:// or file://", where)
    if parts.username is not None or parts.password is not None:
        raise InvalidMedia("a URL with a name or a password in it is not fetched", where)
    if not url.isascii() or any(char <= " " or char in "\\\x7f" for char in url):
        raise InvalidMedia("the URL contains invalid characters", where)
    return parts, port or _PORTS[parts.scheme]
