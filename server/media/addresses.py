"""Hosts that media may be fetched from, and addresses that a host name may resolve to.

A host has to be named (`AllowedHosts`). Every address that it resolves to has to be public, or be named itself: a name alone
proves nothing, since its owner may point it at this machine or its neighbours."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
ANY: Final = "*"


class AllowedHosts:
    """Allowed hosts. `names`: host names, "*.example.com" for all below a domain, "*" for all; private addresses and networks,
    to fetch from them deliberately.

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
                        f"{name!r} is no host name, *.domain, *, address or network (no scheme, port or path)"
                    ) from None
                self._names.add(name.lower().rstrip("."))

    def __bool__(self) -> bool:
        """Return whether anything may be fetched."""
        return bool(self._names or self._networks)

    def takes_host(self, host: str) -> bool:
        """Return whether `host`, a name or address as in a URL, is allowed."""
        host = host.lower().rstrip(".")
        if address := _address(host):
            return ANY in self._names or self._is_named(address)
        parents = host.split(".")
        return ANY in self._names or host in self._names or any(
            f"*.{'.'.join(parents[start:])}" in self._names for start in range(1, len(parents))
        )  # fmt: skip

    def takes_address(self, text: str) -> bool:
        """Return whether `text`, an address that a host resolves to, is allowed."""
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
    """Return whether the address belongs to one host on the public internet, and contains no other address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        packed = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if packed is not None:
            return is_public(packed)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified
