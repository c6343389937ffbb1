"""Load goes to this machine only."""

from __future__ import annotations

import socket

import pytest

from loadtests.address import Address, AddressRefused
from loadtests.exchange import post_request


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


@pytest.mark.parametrize(
    ("url", "url_again"),
    [
        ("https://127.0.0.1", "https://127.0.0.1:443"),
        ("https://localhost:8443/v1", "https://localhost:8443"),
        ("unix:/run/oneloop.sock", "unix:/run/oneloop.sock"),
        ("unix:///run/oneloop.sock", "unix:/run/oneloop.sock"),
    ],
)
def test_a_measured_server_may_speak_tls_or_listen_at_a_unix_socket(url, url_again):
    assert Address.of_server(url).url == url_again


def test_another_machine_is_loaded_only_where_somebody_says_so(monkeypatch):
    with pytest.raises(AddressRefused, match="--remote"):
        Address.of_server("http://my-server:8000")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: [(0, 0, 0, "", ("192.0.2.1", 0))])
    address = Address.of_server("http://my-server:8000/llm/v1", remote=True)
    # Connected to by the number, looked up once; called by the name, as a proxy in between wants it.
    assert (address.host, address.authority, address.url) == (
        "192.0.2.1",
        "my-server:8000",
        "http://my-server:8000/llm",
    )


def test_a_key_goes_with_every_request_and_into_no_message():
    address = Address.of_server("http://127.0.0.1:8000", api_key="sk-secret")
    assert b"\r\nAuthorization: Bearer sk-secret\r\n" in post_request(address, "/v1/completions", b"{}")
    assert "secret" not in f"{address} {address!r} {address.url}"
    with pytest.raises(AddressRefused, match="header"):
        Address.of_server("http://127.0.0.1:8000", api_key="a\r\nX-Evil: 1")
