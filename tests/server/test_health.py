"""/health/live, /health/ready and /health/generate: what each of them tells an orchestrator, and what asking costs."""

from __future__ import annotations

import asyncio

import pytest

from runtime.api import LoadProgress
from server.models.lifecycle import TokenProbe


async def ask(server, path: str) -> tuple[int, str]:
    response = await server.http.get(path)
    return response.status_code, response.json()["status"]


async def all_of(server) -> dict[str, tuple[int, str]]:
    return {path: await ask(server, f"/health{path}") for path in ("", "/ready", "/live", "/generate")}


async def test_while_it_loads_it_lives_and_is_not_ready(serve):
    server = await serve(loaded=False)
    server.service.lifecycle.report(LoadProgress("download", 5, 20, "B"))
    loading = (503, "loading")
    assert await all_of(server) == {"": loading, "/ready": loading, "/live": (200, "loading"), "/generate": loading}


async def test_a_server_that_serves_is_all_of_it(serve):
    server = await serve()
    assert set((await all_of(server)).values()) == {(200, "ok")}
    assert server.engine.num_probes == 1


async def test_a_drain_is_no_reason_to_kill_it(serve):
    server = await serve()
    server.service.lifecycle.drain()
    gone = (503, "draining")
    assert await all_of(server) == {"": gone, "/ready": gone, "/live": (200, "draining"), "/generate": gone}


async def test_a_step_that_takes_too_long_takes_it_out_of_service_and_without_hope_out_of_life(serve):
    server = await serve()
    server.engine.unhealthy = "a step has been running for 6 s"
    failed = (503, "failed")
    assert await all_of(server) == {"": failed, "/ready": failed, "/live": (200, "ok"), "/generate": failed}
    assert server.engine.num_probes == 0, "there is nothing to find out"
    server.engine.hopeless = True
    assert set((await all_of(server)).values()) == {failed}


async def test_a_model_that_could_not_be_loaded_is_no_life(serve):
    server = await serve(loaded=False)
    server.service.lifecycle.fail("no such file")
    assert set((await all_of(server)).values()) == {(503, "failed")}


async def test_generate_says_why_there_was_no_token(serve):
    server = await serve()
    server.engine.unhealthy = "numbers that are none"
    server.engine.health = lambda: type(server.engine).health(_healthy(server.engine))
    response = await server.http.get("/health/generate")
    assert response.status_code == 503
    assert response.json()["reason"] == "numbers that are none"


def _healthy(engine):
    """The engine as it thinks of itself."""
    twin = object.__new__(type(engine))
    twin.__dict__.update(engine.__dict__, unhealthy=None)
    return twin


async def test_any_number_of_probes_at_once_cost_one_token(serve):
    server = await serve()
    server.engine.answers_probes.clear()
    asking = [asyncio.create_task(ask(server, "/health/generate")) for _ in range(20)]
    while server.service.http_stats.in_flight < len(asking):  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0)
    server.engine.answers_probes.set()
    assert set(await asyncio.gather(*asking)) == {(200, "ok")}
    assert server.engine.num_probes == 1


async def test_who_gives_up_a_probe_takes_it_from_nobody_else(serve):
    server = await serve()
    probe, engine = server.service.token_probe, server.engine
    engine.answers_probes.clear()
    impatient, patient = (asyncio.create_task(probe.failure(engine)) for _ in range(2))
    while not engine.num_probes:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait({impatient})
    engine.answers_probes.set()
    assert await patient is None
    assert engine.num_probes == 1


async def test_an_answer_is_good_for_a_while(serve):
    now = [100.0]
    probe, engine = TokenProbe(reuse_s=1.0, clock=lambda: now[0]), (await serve()).engine
    for moment, expected in ((100.0, 1), (100.9, 1), (101.0, 2), (101.5, 2), (200.0, 3)):
        now[0] = moment
        assert await probe.failure(engine) is None
        assert engine.num_probes == expected


async def test_a_token_that_does_not_come_is_not_waited_for_without_end(serve):
    engine = (await serve()).engine
    engine.answers_probes.clear()
    assert await TokenProbe(limit_s=0).failure(engine) == "no token within 0 s"


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
async def test_where_steps_kept_failing_to_be_asked_is_to_try_again(serve, path):
    server = await serve()
    server.engine.unhealthy, server.engine.failing = "the last 3 steps failed", True
    assert await ask(server, path) == (503, "failed")
    await server.service.token_probe.begin(server.engine)
    assert server.engine.num_probes == 1
    server.engine.unhealthy, server.engine.failing = None, False
    assert await ask(server, path) == (200, "ok")


async def test_generate_ends_a_row_of_failures_by_itself(serve):
    server = await serve()
    engine = server.engine
    engine.unhealthy, engine.failing = "the last 3 steps failed", True

    async def settles() -> None:
        engine.unhealthy, engine.failing = None, False

    engine.probe = settles
    assert await ask(server, "/health/generate") == (200, "ok")
