"""CORS: what a browser is told, on answers and on errors, and that streams pay nothing for it."""

from __future__ import annotations

import pytest

from server.http.metrics import HttpStats
from server.http.middleware import RequestMiddleware
from server.http.origins import CrossOrigin
from tests.server.conftest import MESSAGES

PAGE, STRANGER = "https://page.example", "https://stranger.example"
CHAT = "/v1/chat/completions"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def cors_headers(response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def test_by_default_no_page_is_let_in(serve):
    server = await serve()
    response = await server.http.get("/v1/models", headers={"origin": PAGE})
    assert response.status_code == 200
    assert not cors_headers(response)
    assert "vary" not in response.headers
    preflight = await server.http.options(CHAT, headers={"origin": PAGE, **ASKS})
    assert preflight.status_code == 405
    assert not cors_headers(preflight)


async def test_a_preflight_is_answered_without_a_key(serve):
    server = await serve(cors_origin=(PAGE, "http://localhost:3000"), api_key=("sk",))
    for origin in (PAGE, "http://localhost:3000"):
        response = await server.http.options(CHAT, headers={"origin": origin, **ASKS})
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
        assert {"GET", "POST", "DELETE"} <= set(response.headers["access-control-allow-methods"].split(", "))
        assert int(response.headers["access-control-max-age"]) > 0
        assert "access-control-allow-credentials" not in response.headers
        assert "Origin" in response.headers["vary"]
        assert response.headers["x-request-id"]
        assert response.headers["date"]


@pytest.mark.parametrize(
    "origin", [STRANGER, PAGE + ".evil.example", PAGE + ":8443", "http://page.example", "null", PAGE.upper()]
)
async def test_a_strangers_preflight_is_refused_and_says_why(serve, origin):
    server = await serve(cors_origin=(PAGE,))
    response = await server.http.options(CHAT, headers={"origin": origin, **ASKS})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert not cors_headers(response)


async def test_what_is_no_preflight_needs_its_key(serve):
    server = await serve(cors_origin=("*",), api_key=("sk",))
    for headers in ({"origin": PAGE}, {"access-control-request-method": "POST"}, {}):
        assert (await server.http.options(CHAT, headers=headers)).status_code == 401
    assert (await server.http.get("/v1/models", headers={"origin": PAGE, **ASKS})).status_code == 401


async def test_answers_and_errors_have_the_headers(serve):
    server = await serve(cors_origin=(PAGE,), api_key=("sk",))
    mine, key = {"origin": PAGE}, {"x-api-key": "sk"}
    answers = [
        await server.http.get("/v1/models", headers=mine | key),
        await server.post(CHAT, {"messages": MESSAGES}, headers=mine | key),
        await server.post(CHAT, {"messages": MESSAGES, "stream": True}, headers=mine | key),
        await server.http.get("/v1/models", headers=mine),
        await server.http.get("/nowhere", headers=mine | key),
        await server.http.get(CHAT, headers=mine | key),
        await server.post(CHAT, {"messages": []}, headers=mine | key),
    ]
    assert [response.status_code for response in answers] == [200, 200, 200, 401, 404, 405, 400]
    for response in answers:
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert response.headers["vary"] == "Origin"


async def test_an_unforeseen_error_has_them_as_well(serve, monkeypatch):
    server = await serve(cors_origin=(PAGE,))
    monkeypatch.setattr(type(server.service.lifecycle), "require_model", lambda self: 1 / 0)
    response = await server.http.get("/v1/models", headers={"origin": PAGE})
    assert response.status_code == 500
    assert response.headers["access-control-allow-origin"] == PAGE


async def test_vary_is_sent_also_without_an_origin_and_to_a_stranger(serve):
    server = await serve(cors_origin=(PAGE,))
    for headers in ({}, {"origin": STRANGER}):
        response = await server.http.get("/v1/models", headers=headers)
        assert response.headers["vary"] == "Origin"
        assert not cors_headers(response)


async def test_a_star_is_any_origin_and_the_same_answer_for_all(serve):
    server = await serve(cors_origin=("*",))
    for origin in (PAGE, STRANGER, "null"):
        response = await server.http.get("/v1/models", headers={"origin": origin})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "vary" not in response.headers
        assert (await server.http.options(CHAT, headers={"origin": origin, **ASKS})).status_code == 204


async def test_credentials_are_for_named_origins(serve):
    server = await serve(cors_origin=(PAGE,), cors_credentials=True)
    for response in (
        await server.http.get("/v1/models", headers={"origin": PAGE}),
        await server.http.options(CHAT, headers={"origin": PAGE, **ASKS}),
    ):
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["access-control-allow-origin"] == PAGE
    assert not cors_headers(await server.http.get("/v1/models", headers={"origin": STRANGER}))


async def test_odd_field_names_are_not_repeated(serve):
    server = await serve(cors_origin=("*",))
    asks = ASKS | {"access-control-request-headers": 'x-a, "quoted"'}
    response = await server.http.options(CHAT, headers={"origin": PAGE, **asks})
    assert "access-control-allow-headers" not in response.headers


async def test_preflights_are_in_log_and_statistics(serve, caplog):
    caplog.set_level("INFO", "oneloop.access")
    server = await serve(cors_origin=("*",))
    await server.http.options(CHAT, headers={"origin": PAGE, **ASKS})
    assert '"OPTIONS /v1/chat/completions" 204' in caplog.text
    assert 'route="preflight",status="204"} 1.0' in (await server.http.get("/metrics")).text


async def test_bodies_of_streams_go_past():
    """What a stream finds as its way out is the server's own `send`: no call of ours for any chunk."""
    found = {}

    async def stream(scope, receive, send):
        found["send_body"] = scope["call"].send_body
        await send({"type": "http.response.start", "status": 200, "headers": []})

    cors = CrossOrigin([PAGE], credentials=False, methods=["GET"])
    errors_layer = RequestMiddleware(cors.preflights(stream), HttpStats(), access_log=False)
    sent = []

    async def server_send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"origin", PAGE.encode())]}
    await cors.around(errors_layer)(scope, None, server_send)
    assert found["send_body"] is server_send
    assert (b"access-control-allow-origin", PAGE.encode()) in sent[0]["headers"]


async def test_a_lifespan_reaches_no_layer_of_requests():
    async def app(scope, receive, send):
        raise AssertionError("a lifespan is no request")

    await RequestMiddleware(app, HttpStats(), access_log=False)({"type": "lifespan"}, None, None)
