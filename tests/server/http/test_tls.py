"""HTTPS, with certificates made here: whole answers, streams, clients that need one, and files that are none."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import httpx
import pytest

from server.cli import health
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.process import listening
from tests.server.conftest import MESSAGES

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def make(folder, name: str, *, encrypted: bool = False):
    """A certificate that vouches for itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    secret = ["-passout", "pass:secret"] if encrypted else ["-nodes"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *secret, "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tls"), "server")


def client(server, certificate: str, own: tuple[str, str] | None = None) -> httpx.AsyncClient:
    verify = ssl.create_default_context(cafile=certificate)
    if own is not None:
        verify.load_cert_chain(*own)
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{server.port}", verify=verify, timeout=None)


async def test_whole_answers_and_streams_come_secured(serve, own):
    server = await serve(ssl_certfile=own[0], ssl_keyfile=own[1])
    async with client(server, own[0]) as https:
        body = {"messages": MESSAGES}
        answer = await https.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there"
        stream = await https.post("/v1/chat/completions", json={**body, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        large = await https.post("/v1/completions", json={"prompt": "x" * 300_000})
        assert large.status_code == 400  # too long for the model, and read to its end


async def test_an_answer_before_the_body_was_read_comes_and_the_connection_ends(serve, own):
    server = await serve(ssl_certfile=own[0], ssl_keyfile=own[1], max_body_size=1024)
    trusted = ssl.create_default_context(cafile=own[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusted)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999\r\n\r\n"
    writer.write(head.encode() + b"x" * 5000)
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_who_speaks_plain_http_gets_nothing(serve, own):
    server = await serve(ssl_certfile=own[0], ssl_keyfile=own[1])
    with pytest.raises(httpx.HTTPError):
        await server.http.get("/health")


async def test_clients_show_a_certificate_where_they_have_to(serve, own, tmp_path):
    theirs = make(tmp_path, "client")
    server = await serve(ssl_certfile=own[0], ssl_keyfile=own[1], ssl_ca_certs=theirs[0], ssl_cert_reqs=2)
    async with client(server, own[0], theirs) as https:
        assert (await https.get("/health")).status_code == 200
    async with client(server, own[0]) as https:
        with pytest.raises(httpx.HTTPError):
            await https.get("/health")
    async with client(server, own[0], make(tmp_path, "other")) as https:
        with pytest.raises(httpx.HTTPError):
            await https.get("/health")


async def test_oneloop_health_asks_a_secured_server(serve, own):
    server = await serve(ssl_certfile=own[0], ssl_keyfile=own[1])
    config = ServerConfig(port=server.port, ssl_certfile=own[0], ssl_keyfile=own[1])
    status, body = await asyncio.to_thread(health.ask, config, "/health/ready")
    assert (status, b'"ok"' in body) == (200, True)


def test_files_that_are_no_certificate_are_named(own, tmp_path):
    other, encrypted = make(tmp_path, "other"), make(tmp_path, "encrypted", encrypted=True)
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for files, words in (
        ((str(broken), None), "broken.pem"), ((own[0], other[1]), "belong together"), (encrypted, "encrypted"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            listening.tls_context(ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1]))
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        listening.tls_context(ServerConfig(ssl_certfile=own[0], ssl_keyfile=own[1], ssl_ca_certs=str(broken)))
    assert listening.tls_context(ServerConfig()) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_keyfile": "/etc/hosts"}, "--ssl-keyfile needs --ssl-certfile"), ({"ssl_certfile": "/nowhere"}, "no such file"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-certfile"),
        ({"ssl_certfile": "/etc/hosts", "ssl_cert_reqs": 1}, "needs --ssl-ca-certs"),
    ],
)  # fmt: skip
def test_options_that_say_half_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**given)
