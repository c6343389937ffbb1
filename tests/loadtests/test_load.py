"""Whole runs against a scripted server on a clock that only the script moves: every figure is known exactly."""

from __future__ import annotations

import asyncio

import pytest

from loadtests.address import Address
from loadtests.arrivals import Poisson
from loadtests.figures import summarise
from loadtests.lengths import Lengths
from loadtests.load import Limits, RequestOptions, measure
from loadtests.workloads import WordPrompt, Workload
from tests.loadtests.scripted_server import HEAD, ManualClock, ScriptedServer, answer, event


def workload(**fields: object) -> Workload:
    shape = {"concurrency": 1, "num_requests": 2, "num_output_tokens": Lengths(4, 4)} | fields
    return Workload("w", WordPrompt(3), **shape)  # type: ignore[arg-type]


async def test_figures_are_exactly_those_of_the_script():
    clock = ManualClock()
    server = ScriptedServer([answer(0.1, [0.02, 0.02, 0.05], 4), answer(0.3, [0.04, 0.04, 0.04], 4)], clock)
    async with server.running() as address:
        run = await measure(address, workload(), RequestOptions("m"), clock=clock)
    figures = summarise(run)
    expected = {
        "ok": 2, "errors": 0, "wall_s": 0.61, "out_tokens": 8, "in_tokens": 14, "tokens_from": "usage",
        "out_tok_per_s": round(8 / 0.61, 3), "ttft_ms_mean": 200.0, "ttft_ms_p50": 200.0, "ttft_ms_p99": 298.0,
        "tpot_ms_p50": 35.0, "itl_ms_p50": 40.0, "itl_ms_p99": 49.5, "e2e_ms_mean": 305.0, "other_length": 0,
    }  # fmt: skip
    assert {key: figures[key] for key in expected} == expected


async def test_tokens_that_come_several_to_an_event_are_counted_by_usage():
    server = ScriptedServer([answer(0.1, [0.1], 6), answer(0.1, [0.1])], clock := ManualClock())
    async with server.running() as address:
        figures = summarise(await measure(address, workload(), RequestOptions("m"), clock=clock))
    assert (figures["out_tokens"], figures["tokens_from"], figures["other_length"]) == (8, "events", 2)
    assert figures["tokens_per_event"] == 2


async def test_a_closed_loop_keeps_exactly_its_streams_busy():
    server = ScriptedServer([answer(0, [])] * 9, wait_for_open=3)
    async with server.running() as address:
        run = await measure(address, workload(concurrency=3, num_requests=9), RequestOptions("m"))
    assert server.max_open == 3
    assert summarise(run)["ok"] == 9


async def test_each_prompt_is_sent_once_and_warmup_before_all():
    server = ScriptedServer([answer(0, [])] * 6)
    async with server.running() as address:
        run = await measure(address, workload(num_requests=4, concurrency=2, num_warmup=2), RequestOptions("m"))
    sent = [str(body["messages"]) for body in server.bodies]
    expected = {str([{"role": "user", "content": user}]) for _, user in workload(num_requests=4).prompts()}
    assert len(run.answers) == 4
    assert set(sent[2:]) == expected
    assert not set(sent[:2]) & expected
    assert set(server.paths) == {"/v1/chat/completions"}


async def test_an_open_loop_sends_at_the_arrivals_of_its_poisson_process():
    shape = workload(num_requests=5, arrivals=Poisson(2.0), concurrency=100)
    clock = ManualClock()
    server = ScriptedServer([answer(0, [])] * 5)
    async with server.running() as address:
        run = await measure(address, shape, RequestOptions("m"), clock=clock)
    assert clock.slept_until_s == shape.arrivals_s()
    assert len(run.answers) == 5
    assert max(run.lateness_s) == 0


async def test_an_open_loop_never_has_more_in_flight_than_allowed():
    server = ScriptedServer([answer(0, [])] * 8, wait_for_open=2)
    async with server.running() as address:
        await measure(address, workload(num_requests=8, arrivals=Poisson(1e6), concurrency=2), RequestOptions("m"))
    assert server.max_open == 2


async def test_errors_of_every_kind_are_counted_and_the_run_goes_on():
    scripts = [
        [(0, b"HTTP/1.1 503 Loading\r\n\r\nloading")],
        answer(0, [], 4),
        [(0, HEAD), (0, event("x"))],
        [],
        [(0, HEAD), (0, event(error={"message": "boom"}))],
    ]
    server = ScriptedServer(scripts)
    async with server.running() as address:
        figures = summarise(await measure(address, workload(num_requests=5), RequestOptions("m")))
    assert (figures["ok"], figures["errors"], figures["out_tokens"]) == (1, 4, 4)
    assert figures["error_counts"] == {
        "HTTP 503: loading": 1,
        "stream ended before its end": 1,
        "connection closed without an answer": 1,
        "error event: boom": 1,
    }


async def test_a_port_where_nobody_listens_is_an_error_for_each_request():
    async with ScriptedServer([]).running() as address:
        pass
    figures = summarise(await measure(address, workload(), RequestOptions("m")))
    assert figures["errors"] == 2
    assert "Connect" in str(figures["error_counts"])


async def hanging_server() -> asyncio.Server:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # returns when the client drops the connection
        writer.close()

    return await asyncio.start_server(hang, "127.0.0.1", 0)


@pytest.mark.parametrize(("limits", "cut_off"), [(Limits(request_s=0.01), False), (Limits(run_s=0.01), True)])
async def test_a_server_that_never_answers_ends_the_request_or_the_run(limits, cut_off):
    async with await hanging_server() as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        run = await measure(address, workload(), RequestOptions("m"), limits)
    figures = summarise(run)
    assert (figures["cut_off"], figures["errors"], figures["ok"]) == (cut_off, 2, 0)
    assert any("no end within 0.01 s" in error or "time for the run" in error for error in figures["error_counts"])


async def test_server_cpu_is_what_it_used_between_first_and_last_request():
    readings = iter([5.0, 5.5])
    server = ScriptedServer([answer(0, [], 4)] * 3)
    async with server.running() as address:
        shape = workload(num_warmup=1)
        run = await measure(address, shape, RequestOptions("m"), server_cpu_s=lambda: next(readings))
    assert summarise(run)["server_cpu_us_per_token"] == 0.5 * 1e6 / 8
