"""What is for who runs the server: the prefix cache, aborts, drain, the log's level; and who may."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from server.api.operations import profile
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.http.auth import OPERATOR_PATHS, Keys, RequireKey
from server.http.errors import AdminOnly
from server.models.lifecycle import Lifecycle
from server.process.app import create_app
from tests.server.conftest import MESSAGES
from tests.server.test_auth import ADMIN, USER, bearer


@pytest.fixture
def _keep_level():
    root = logging.getLogger()
    before, uvicorns = root.level, logging.getLogger("uvicorn.error").level
    yield
    root.setLevel(before)
    logging.getLogger("uvicorn.error").setLevel(uvicorns)


async def test_the_prefix_cache_is_forgotten(serve):
    server = await serve()
    assert (await server.post("/reset_prefix_cache")).json() == {"success": True}
    assert server.engine.num_resets == 1


async def test_a_request_is_aborted_by_any_name_it_has(serve):
    server = await serve(paused=True)
    for name in ("mine", "chatcmpl-mine", "chatcmpl-mine-0"):
        answer = asyncio.create_task(
            server.post("/v1/chat/completions", {"messages": MESSAGES}, headers={"x-request-id": "mine"})
        )
        stays = asyncio.create_task(server.chat())
        await server.engine.until(lambda: len(server.engine.live) == 2)
        assert (await server.post("/abort_requests", {"request_ids": [name, "nobody"]})).json() == {"aborted": 1}
        ended = await answer
        assert (ended.status_code, ended.headers["retry-after"]) == (503, "10")
        assert [each.parent_id for each in server.engine.live] != ["mine"]
        assert (await server.post("/abort_requests", {"abort_all": True})).json() == {"aborted": 1}
        assert (await stays).status_code == 503


async def test_an_aborted_stream_says_so(serve):
    server = await serve(paused=True)
    stream = await server.open_stream("/v1/chat/completions", messages=MESSAGES, stream=True)
    await stream.head()
    await server.engine.until(lambda: bool(server.engine.live))
    await server.post("/abort_requests", {"abort_all": True})
    assert b'"finish_reason":"abort"' in b"".join(await stream.chunks())
    stream.leave()


async def test_an_id_that_a_body_brings_aborts_as_well(serve):
    server = await serve(paused=True)
    answer = asyncio.create_task(server.chat(request_id="of-the-body"))
    await server.engine.until(lambda: bool(server.engine.live))
    assert (await server.post("/abort_requests", {"request_ids": ["of-the-body"]})).json() == {"aborted": 1}
    assert (await answer).status_code == 503


@pytest.mark.parametrize(
    "body", [{}, {"abort_all": False}, {"abort_all": True, "request_ids": []}, {"request_ids": [5]}]
)
async def test_an_abort_that_says_not_what_is_refused(serve, body):
    response = await (await serve()).post("/abort_requests", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("request_ids")


async def test_a_drain_is_what_the_process_waits_for(serve):
    server = await serve(paused=True)
    answer = asyncio.create_task(server.chat())
    await server.engine.until(lambda: bool(server.engine.live))
    assert not server.service.lifecycle.stopping.is_set()
    assert (await server.post("/drain")).json() == {"status": "draining", "running": 1, "waiting": 0}
    assert server.service.lifecycle.stopping.is_set()
    server.engine.step(20)
    assert (await answer).status_code == 200


@pytest.mark.usefixtures("_keep_level")
async def test_the_log_says_more_or_less_from_now_on(serve):
    server = await serve()
    for level in ("debug", "error"):
        assert (await server.post("/log_level", {"level": level})).json() == {"level": level}
        assert (await server.http.get("/log_level")).json() == {"level": level}
        assert logging.getLogger("oneloop.http").isEnabledFor(logging.DEBUG) == (level == "debug")
        assert not logging.getLogger("uvicorn.error").isEnabledFor(logging.INFO)
    refused = await server.post("/log_level", {"level": "loud"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")


# --- sleep --------------------------------------------------------------------------------------------------------


async def test_it_sleeps_and_wakes_by_vllms_names_and_health_says_so(serve):
    server = await serve()
    assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    for query, level in (("", 1), ("?level=2", 2)):
        assert (await server.http.post(f"/sleep{query}")).json() == {"is_sleeping": True}
        assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        health = await server.http.get("/health")
        assert (health.status_code, health.json()) == (
            200, {"status": "ok", "running": 0, "waiting": 0, "sleep_level": level}
        )  # fmt: skip
    assert (await server.http.get("/health/generate")).status_code == 200
    assert not server.engine.num_probes  # nobody wakes it by looking
    assert (await server.http.post("/wake_up")).json() == {"is_sleeping": False}
    assert "sleep_level" not in (await server.http.get("/health")).json()


@pytest.mark.parametrize(("mode", "status"), [("abort", 503), ("wait", 200)])
async def test_what_is_in_flight_is_aborted_or_waited_for(serve, mode, status):
    server = await serve(paused=True)
    answer = asyncio.create_task(server.chat())
    await server.engine.until(lambda: bool(server.engine.live))
    asleep = asyncio.create_task(server.http.post(f"/sleep?mode={mode}"))
    if mode == "wait":
        server.engine.step(20)
    assert (await answer).status_code == status
    assert (await asleep).json() == {"is_sleeping": True}


@pytest.mark.parametrize(("query", "param"), [("level=0", "level"), ("level=3", "level"), ("mode=keep", "mode")])
async def test_other_kinds_of_sleep_are_refused_by_name(serve, query, param):
    response = await (await serve()).http.post(f"/sleep?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_who_cannot_be_woken_says_why(serve):
    server = await serve()
    await server.http.post("/sleep")
    server.engine.unhealthy = "the engine cannot wake: no such file"
    response = await server.http.post("/wake_up")
    assert (response.status_code, response.json()["error"]["message"]) == (503, server.engine.unhealthy)


# --- profiles -----------------------------------------------------------------------------------------------------


async def test_a_profile_is_begun_and_ended_and_its_file_named(serve, tmp_path):
    server = await serve(profile_dir=str(tmp_path))
    asked = {"max_iterations": 20, "delay_iterations": 3, "profile_prefix": "mine"}
    path = (await server.post("/start_profile", asked)).json()["path"]
    assert server.engine.profile == (tmp_path / path.rpartition("/")[2], 3, 20)
    assert path.startswith(str(tmp_path / "mine-"))
    assert path.endswith(".trace.json.gz")
    assert (await server.post("/start_profile", {})).status_code == 409
    assert (await server.post("/stop_profile")).json() == {"path": path}
    assert [str(file) for file in tmp_path.iterdir()] == [path]
    assert (await server.post("/stop_profile")).status_code == 409


async def test_a_profile_needs_no_body_and_no_folder_of_its_own(serve):
    profile._temporary_folder.cache_clear()  # another test's profiles may be in it
    server = await serve()
    path = Path((await server.http.post("/start_profile")).json()["path"])
    assert server.engine.profile == (path, 0, None)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.rmdir()
    profile._temporary_folder.cache_clear()


@pytest.mark.parametrize("prefix", ["../up", "a b", "", "/etc/x"])
async def test_a_profiles_name_leads_nowhere_else(serve, prefix):
    response = await (await serve()).post("/start_profile", {"profile_prefix": prefix})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "profile_prefix")


# --- who may ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(OPERATOR_PATHS))
@pytest.mark.parametrize(
    ("users", "admin", "key", "status"),
    [
        ((), None, None, None), ((USER,), None, USER, 403), ((USER,), None, None, 401), ((USER,), ADMIN, USER, 403),
        ((USER,), ADMIN, ADMIN, None), ((), ADMIN, None, 401), ((), ADMIN, ADMIN, None),
    ],
)  # fmt: skip
async def test_only_the_administrator_operates_where_there_are_keys(serve, path, users, admin, key, status):
    server = await serve(api_key=users, admin_api_key=admin)
    response = await server.post(path, {"max_iterations": 0}, headers=bearer(key) if key else {})
    assert response.status_code == (status or response.status_code)
    assert ("key" in response.text and response.status_code in (401, 403)) == (status is not None)
    if status == 403 and admin is None:
        assert "--admin-api-key" in response.text


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_nobody_operates_an_open_server_that_others_reach(host, is_open):
    scope = {"path": "/drain", "headers": []}
    guard = RequireKey(None, Keys(), is_private=host == "127.0.0.1")
    if is_open:
        guard._check(scope)
    else:
        with pytest.raises(AdminOnly, match="--admin-api-key"):
            guard._check(scope)
    create_app(Service(ServerConfig(host=host), Lifecycle()))


async def test_an_open_server_that_others_reach_serves_but_is_not_operated(serve):
    server = await serve(host="0.0.0.0")
    assert (await server.chat()).status_code == 200
    assert (await server.http.get("/metrics")).status_code == 200
    assert (await server.post("/drain")).status_code == 403


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/drain"])
async def test_a_page_of_somebody_elses_operates_nothing(serve, path):
    server = await serve()
    headers = {"origin": "https://elsewhere.example"}
    assert (await server.http.post(path, headers=headers)).status_code == 415
    assert not server.engine.num_resets
    assert not server.service.lifecycle.stopping.is_set()
