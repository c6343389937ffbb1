"""Keys: what they open, what a refusal says, and that they are never shown."""

from __future__ import annotations

import asyncio
import hmac
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from server.api.routes import ROUTES
from server.api.service import Service
from server.config.parse import parse
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.http import auth
from server.http.auth import InvalidApiKey, Keys, MissingApiKey, RequireKey, is_loopback, is_open
from server.models.lifecycle import Lifecycle
from server.process.app import create_app
from tests.server.conftest import MESSAGES

ROOT = Path(__file__).parents[2]
USER, OTHER, ADMIN = "sk-user-1", "sk-user-2", "sk-admin"
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- what a key opens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [(route.method, route.path) for route in ROUTES if not is_open(route.path)],
)
async def test_every_route_but_health_and_pages_needs_a_key(serve, method, path):
    server = await serve(api_key=(USER,))
    response = await server.http.request(method, path.replace("{model_id:path}", "tiny"))
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="oneloop"'
    error = response.json()["error"]
    if isinstance(error, dict):  # not Ollama's, which is a sentence
        assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")


@pytest.mark.parametrize(
    "path", ["/nowhere", "/health/", "//health", "/Health", "/health%2f..", "/v1/../health", "/%2e/health"]
)
async def test_what_is_no_route_is_closed_as_well(serve, path):
    server = await serve(api_key=(USER,))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health/generate"])
async def test_health_is_open(serve, path):
    server = await serve(api_key=(USER,), admin_api_key=ADMIN)
    assert (await server.http.get(path)).status_code == 200
    assert (await server.http.head(path)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        bearer(USER), bearer(OTHER), {"authorization": f"bearer  {USER}"}, {"x-api-key": OTHER},
        {"x-api-key": USER, "authorization": "Bearer stale"}, {"x-api-key": "stale", "authorization": f"Bearer {USER}"},
        {"x-api-key": USER, "authorization": "Basic eDp5"},
    ],
)  # fmt: skip
async def test_any_key_opens_in_either_header(serve, headers):
    server = await serve(api_key=(USER, OTHER))
    assert (await server.chat()).status_code == 401
    response = await server.post(CHAT, {"messages": MESSAGES}, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("headers", "missing"),
    [
        ({}, True), ({"authorization": ""}, True), ({"authorization": "Bearer"}, True),
        ({"authorization": USER}, True), ({"authorization": f"Basic {USER}"}, True), ({"x-api-key": ""}, True),
        (bearer(USER[:-1]), False), (bearer(USER + "x"), False), (bearer(USER.upper()), False),
        ({"x-api-key": f"Bearer {USER}"}, False), ({"x-api-key": "x" * 10_000}, False),
        ({"authorization": "Bearer \u00e9".encode()}, False),
    ],
)  # fmt: skip
async def test_a_missing_key_and_a_wrong_one_differ_in_the_error(serve, headers, missing):
    server = await serve(api_key=(USER, OTHER))
    response = await server.http.get("/v1/models", headers=headers)
    error = response.json()["error"]
    assert response.status_code == 401
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert error["message"] == (MissingApiKey if missing else InvalidApiKey).text
    assert ("invalid_token" in response.headers["www-authenticate"]) != missing


async def test_a_key_in_the_query_opens_nothing(serve):
    server = await serve(api_key=(USER,))
    assert (await server.http.get(f"/v1/models?api_key={USER}&key={USER}")).status_code == 401


async def test_without_keys_everything_is_open(serve):
    server = await serve()
    assert (await server.http.get("/v1/models", headers=bearer("whatever"))).status_code == 200
    assert (await server.http.get("/metrics")).status_code == 200


async def test_the_openai_client_with_and_without_its_key(serve):
    server = await serve(api_key=(USER,))
    async with server.openai(USER) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello there"
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "Hello there"
    async with server.openai("wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert refused.value.code == "invalid_api_key"


async def test_a_refusal_does_not_wait_for_the_body(serve):
    server = await serve(api_key=(USER,))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n".encode()
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()
    assert not server.engine.submitted


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches/1"])
async def test_anthropics_route_refuses_in_anthropics_shape(serve, path):
    server = await serve(api_key=(USER,))
    for headers, text in (({}, MissingApiKey.text), ({"x-api-key": "no"}, InvalidApiKey.text)):
        response = await server.post(path, {}, headers=headers)
        assert response.status_code == 401
        id = response.headers["request-id"]
        error = {"type": "authentication_error", "message": text}
        assert response.json() == {"type": "error", "error": error, "request_id": id}
    assert "code" in (await server.post("/v1/messagesque", {})).json()["error"]


async def test_refusals_are_counted_under_their_route(serve):
    server = await serve(api_key=(USER,))
    await server.chat()
    await server.http.get("/secret-path")
    text = (await server.http.get("/metrics", headers=bearer(USER))).text
    assert 'method="POST",model_name="tiny",route="/v1/chat/completions",status="401"} 1.0' in text
    assert 'method="GET",model_name="tiny",route="unknown",status="401"} 1.0' in text


# --- the administrator's ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user_keys", "key", "models", "metrics"),
    [
        ((USER,), None, 401, 401), ((USER,), USER, 200, 403), ((USER,), ADMIN, 200, 200), ((USER,), "wrong", 401, 401),
        ((), None, 200, 401), ((), ADMIN, 200, 200), ((), "wrong", 200, 401),
    ],
)  # fmt: skip
async def test_the_administrators_key_opens_everything_and_metrics_nobody_elses(serve, user_keys, key, models, metrics):
    server = await serve(api_key=user_keys, admin_api_key=ADMIN)
    headers = bearer(key) if key else {}
    for path in ("/v1/models", "/version"):
        assert (await server.http.get(path, headers=headers)).status_code == models
    response = await server.http.get("/metrics", headers=headers)
    assert response.status_code == metrics
    if metrics == 403:
        assert response.json()["error"]["code"] == "insufficient_permissions"


async def test_a_user_reads_metrics_where_there_is_no_administrator(serve):
    server = await serve(api_key=(USER,))
    assert (await server.http.get("/metrics", headers=bearer(USER))).status_code == 200


# --- time ---------------------------------------------------------------------------------------------------------


def test_every_key_is_compared_whichever_is_right(monkeypatch):
    compared, compare_digest = [], hmac.compare_digest

    def counting(one, other):
        compared.append((one, other))
        return compare_digest(one, other)

    keys = Keys(["first", "second", "third"], "admin")
    monkeypatch.setattr(auth.hmac, "compare_digest", counting)
    guard = RequireKey(None, keys)
    for given in (b"first", b"third", b"admin", b"nothing", b"f" * 5000):
        compared.clear()
        try:
            guard._check({"path": "/v1/models", "headers": [(b"x-api-key", given)]})
        except InvalidApiKey:
            assert given in (b"nothing", b"f" * 5000)
        assert len(compared) == 4
        assert {len(side) for pair in compared for side in pair} == {32}  # digests, whatever the keys' lengths


# --- secrecy ------------------------------------------------------------------------------------------------------


async def test_no_key_reaches_log_or_answer(serve, caplog):
    caplog.set_level("DEBUG")
    server = await serve(api_key=(USER,), admin_api_key=ADMIN, log_requests=True)
    said = []
    for key in (USER, ADMIN, "sk-wrong"):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            response = await server.http.get(path, headers=bearer(key))
            said.append(response.text + str(response.headers))
        said.append((await server.post(CHAT, {"messages": MESSAGES}, headers={"x-api-key": key})).text)
    oneloop = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("oneloop"))
    for key in (USER, ADMIN, "sk-wrong"):
        assert key not in "".join(said)
        assert key not in oneloop
        assert key not in repr(server.service.config)


def test_help_shows_no_key_of_the_environment():
    ended = subprocess.run(
        [sys.executable, "-m", "server", "--help", "all"], cwd=ROOT, capture_output=True, text=True,
        env={"ONELOOP_API_KEY": USER, "ONELOOP_ADMIN_API_KEY": ADMIN},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "ONELOOP_API_KEY" in ended.stdout
    assert USER not in ended.stdout
    assert ADMIN not in ended.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--api-key", "sk-secret key"], ["--api-key", "spaces"]),
        (["--api-key", "sk-secré"], ["--api-key", "ASCII"]),
        (["--admin-api-key", "sk-secret\n"], ["--admin-api-key"]),
        (["--api-key", "sk-secret", "--admin-api-key", "sk-secret"], ["--admin-api-key", "user's"]),
        (["--api-key", "sk-1", "sk-secret"], ["not shown"]),
        (["--api-key=sk-1", "sk-secret"], ["not shown"]),
        (["--api-kye", "sk-secret"], ["did you mean --api-key"]),
        (["--api-kye=sk-secret"], ["did you mean --api-key"]),
    ],
)
def test_complaints_about_keys_do_not_show_them(argv, words):
    with pytest.raises(ConfigError) as refused:
        parse(argv, {})
    assert "secr" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "api-key: [12345678]", "api-key: {sk-secret: 1}", "api-key: [sk-secret", "api-key: [1.0e+5]", "admin-api-key: 0123",
        "api-key: *sk-secret", "api-key: !sk-secret x", "api-key:", "api-key: []", "api-key: ''", "api-key: true",
        "admin-api-key:", "api-key: 'sk-secret\nport: 1",
    ],
)  # fmt: skip
def test_keys_in_a_file_are_text_and_complaints_do_not_show_them(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        parse(["--config", str(path)], {})
    for secret in ("secret", "12345678", "1e5", "100000", "0123", "83"):
        assert secret not in str(refused.value).replace(str(tmp_path), "")


# --- where they come from -----------------------------------------------------------------------------------------


def test_keys_come_from_flags_environment_and_both_kinds_of_file(tmp_path):
    config, keys = tmp_path / "config.yaml", tmp_path / "keys"
    config.write_text(f"api-key: [{USER}, {OTHER}]\n")
    keys.write_text(f"\ufeff{USER}\r\n\n  sk-third \n")
    assert parse(["--api-key", USER, "--api-key", OTHER], {}).user_keys() == (USER, OTHER)
    assert parse([], {"ONELOOP_API_KEY": USER}).user_keys() == (USER,)
    assert parse(["--config", str(config)], {}).user_keys() == (USER, OTHER)
    assert parse(["--api-key", OTHER, "--api-key-file", str(keys)], {}).user_keys() == (OTHER, USER, "sk-third")


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "no key"), (b"\n \n", "no key"), (b"sk-1\nsk-secret two\n", "line 2"), (b"\xff\xfe", "not text")],
)
def test_a_key_file_without_proper_keys_is_refused(tmp_path, content, word):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=word) as refused:
        parse(["--api-key-file", str(path)], {})
    assert "secret" not in str(refused.value)


async def test_a_key_of_a_file_opens(serve, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{USER}\n{OTHER}\n")
    server = await serve(api_key_file=str(path))
    assert (await server.http.get("/v1/models")).status_code == 401
    assert (await server.http.get("/v1/models", headers=bearer(OTHER))).status_code == 200


# --- the warning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("myhost", False),
    ],
)  # fmt: skip
def test_an_open_server_that_others_reach_is_warned_of(host, loopback, caplog):
    assert is_loopback(host) == loopback
    create_app(Service(ServerConfig(host=host), Lifecycle()))
    assert ("no --api-key is set" in caplog.text) == (not loopback)
    caplog.clear()
    create_app(Service(ServerConfig(host=host, api_key=(USER,)), Lifecycle()))
    assert not caplog.text
    create_app(Service(ServerConfig(host=host, admin_api_key=ADMIN), Lifecycle()))
    assert ("no --api-key is set" in caplog.text) == (not loopback)
