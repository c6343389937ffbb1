"""Load goes to this machine only."""

from __future__ import annotations

import socket

import pytest

from loadtests.address import Address, AddressRefused


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:8000", "http://0.0.0.0:8000", "http://example.com", "http://localhost.example.com:80",
        "http://[2001:db8::1]:80", "http://169.254.169.254", "https://127.0.0.1:8000", "127.0.0.1:8000", "",
        "http://user@127.0.0.1", "http://127.0.0.1:99999", "http://127.0.0.1:8000/?x=1", "http://127.0.0.1.nip.io:80",
    ],
)  # fmt: skip
def test_anything_but_plain_http_on_loopback_is_refused(url):
    with pytest.raises(AddressRefused):
        Address.parse(url)


def test_a_name_that_is_not_localhost_is_never_looked_up(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: pytest.fail("looked up"))
    with pytest.raises(AddressRefused, match="not a loopback"):
        Address.parse("http://my-server:8000")


def test_localhost_that_points_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: [(0, 0, 0, "", ("192.0.2.1", 0))])
    with pytest.raises(AddressRefused, match=r"192\.0\.2\.1"):
        Address.parse("http://localhost:8000")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/v1/", Address("127.0.0.1", 8000)),
        ("http://127.1.2.3", Address("127.1.2.3", 80)),
        ("http://[::1]:8000/proxy/v1", Address("::1", 8000, "/proxy")),
    ],
)
def test_loopback_addresses_are_taken_with_or_without_v1(url, address):
    assert Address.parse(url) == address
    assert Address.parse(address.url) == address
