"""The Host header: whose name a request may carry, so that a page of another site cannot pass as ours by DNS rebinding."""

from __future__ import annotations

import pytest

from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

CHAT = "/v1/chat/completions"


async def status_of(server, *hosts: str, path: str = "/version", version: str = "1.1") -> int:
    client = await server.raw()
    client.send(
        f"GET {path} HTTP/{version}\r\n".encode() + b"".join(f"Host: {h}\r\n".encode() for h in hosts) + b"\r\n"
    )
    status: int = (await client.answer())[0]
    client.leave()
    return status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LocalHost.:8000", 200),
        ("chat.localhost:3000", 200),
        ("127.0.0.1", 200),
        ("192.168.1.4:80", 200),  # nobody can rebind an address
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("evil.example:8404", 403),
        ("localhost.evil.example", 403),
        ("evillocalhost", 403),
        ("127.0.0.1.evil.example", 403),
        ("[evil.example]", 403),
        ("localhost:8000@evil.example", 403),
        ("", 403),
    ],
)
async def test_a_server_on_loopback_answers_to_localhost_and_to_addresses(serve, host, status):
    assert await status_of(await serve(), host) == status


async def test_the_refusal_names_the_host_and_the_option_and_reaches_the_log(serve, caplog):
    caplog.set_level("INFO", "oneloop.access")
    server = await serve()
    response = await server.http.post(CHAT, json={}, headers={"host": "evil.example"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (403, "host_not_allowed")
    assert "evil.example" in error["message"]
    assert "--allowed-host" in error["message"]
    assert f'"POST {CHAT}" 403' in caplog.text


async def test_keys_do_not_come_first(serve):
    server = await serve(api_key=("secret",))
    assert await status_of(server, "evil.example") == 403
    assert await status_of(server, "localhost") == 401


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
async def test_an_http_1_1_request_has_one_host(serve, hosts):
    assert await status_of(await serve(), *hosts) == 400


async def test_an_http_1_0_request_need_not_have_one(serve):
    server = await serve()
    assert await status_of(server, version="1.0") == 200
    assert await status_of(server, "evil.example", version="1.0") == 403
    assert await status_of(server, "localhost", "localhost", version="1.0") == 400


async def test_the_host_of_the_target_counts_where_it_names_one(serve):
    server = await serve()
    assert await status_of(server, "localhost", path="http://evil.example/version") == 403
    assert await status_of(server, "evil.example", path="http://localhost:8000/version") == 200
    assert await status_of(server, "evil.example", path="http://[::1]:8000/version") == 200
    assert await status_of(server, "localhost", "localhost", path="http://localhost/version") == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [("api.example.com", 200), ("a.example.org", 200), ("a.b.example.org:80", 200), ("localhost", 200), ("127.0.0.1", 200),
     ("example.com", 403), ("example.org", 403), ("xexample.org", 403)],
)  # fmt: skip
async def test_names_are_allowed_by_option(serve, host, status):
    assert await status_of(await serve(allowed_host=("api.example.com", "*.example.org")), host) == status


async def test_a_server_that_others_reach_takes_any_name_unless_some_are_given(serve):
    assert await status_of(await serve(host="0.0.0.0"), "any.example") == 200
    assert await status_of(await serve(host="0.0.0.0", allowed_host=("mine.example",)), "any.example") == 403
    assert await status_of(await serve(allowed_host=("*",)), "any.example") == 200


@pytest.mark.parametrize("host", ["https://a.example", "a.example:80", "a.*.example", "Example.com", "a/b"])
def test_what_is_no_name_is_refused_at_the_start(host):
    with pytest.raises(ConfigError, match="--allowed-host"):
        ServerConfig(allowed_host=(host,))
