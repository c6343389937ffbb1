"""Traces: spans with a request's times and facts, below the client's, made off the loop and only where they are asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from tests.server.conftest import MESSAGES

ROOT = Path(__file__).parents[2]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
URL = "http://localhost:4318"


@pytest.fixture
def exporter():
    return pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()


@pytest.fixture
def traced(serve, exporter):
    """`await traced()`: a server whose spans go to `exporter`, and what ends the tracing."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from server.http.tracing import Tracing

    async def start(**options):
        server = await serve(otlp_traces_endpoint=URL, **options)
        tracing = Tracing(SimpleSpanProcessor(exporter))
        server.engine.when_finished(partial(tracing.finished, "tiny"))
        return server, lambda: asyncio.to_thread(tracing.close)

    return start


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_requests_spans_tell_its_phases_below_the_clients_span(traced, exporter):
    server, done = await traced()
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}
    body = {"messages": MESSAGES, "temperature": 0.5, "max_tokens": 50}
    assert (await server.post("/v1/chat/completions", body, headers=headers)).status_code == 200
    await done()
    spans = by_name(exporter)
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    whole = spans.pop("llm_request")
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == SPAN
    for number, name in enumerate(("queue", "prefill", "decode")):
        assert spans[name].parent.span_id == whole.context.span_id
        assert round((spans[name].start_time - whole.start_time) / 1e9) == number
        assert round((spans[name].end_time - spans[name].start_time) / 1e9) == 1
    told = whole.attributes
    assert told["gen_ai.request.id"] == "mine"
    assert told["gen_ai.request.model"] == "tiny"
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.max_tokens"]) == (0.5, 50)
    assert told["gen_ai.usage.input_tokens"] == len(server.engine.submitted[0].prompt_ids)
    assert told["gen_ai.usage.output_tokens"] == 5  # as the fake engine has it
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.latency.time_to_first_token"] == pytest.approx(2.0)
    assert told["gen_ai.latency.e2e"] == pytest.approx(3.0)


async def test_a_trace_that_is_not_sampled_has_no_spans_and_one_without_a_parent_is_its_own(traced, exporter):
    server, done = await traced()
    await server.post("/v1/completions", {"prompt": "Hi"}, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    await server.complete()
    await server.post("/v1/completions", {"prompt": "Hi"}, headers={"traceparent": "nonsense"})
    await done()
    wholes = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert [span.parent for span in wholes] == [None, None]
    assert wholes[0].context.trace_id != wholes[1].context.trace_id


async def test_spans_are_made_off_the_loop(traced, exporter):
    server, done = await traced()
    threads = []
    export = exporter.export
    exporter.export = lambda spans: threads.append(threading.current_thread()) or export(spans)
    await server.complete()
    await done()
    assert threads
    assert threading.current_thread() not in threads


async def test_a_failed_request_is_an_error(traced, exporter):
    server, done = await traced(paused=True)
    await server.while_it_waits("/v1/completions", {"prompt": "Hi"}, lambda: server.engine.fail("a step failed"))
    await done()
    assert by_name(exporter)["llm_request"].status.status_code.name == "ERROR"


async def test_without_the_option_no_header_is_read(serve):
    server = await serve()
    await server.post("/v1/completions", {"prompt": "Hi"}, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert server.engine.submitted[0].trace_headers == ()


def test_without_the_option_no_package_is_imported():
    seen = "import server.process.serve, server.process.app, sys; print(any(m.startswith('opentelemetry') for m in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", seen], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


def test_packages_that_are_not_there_are_named(monkeypatch):
    from server.process.serve import tracing_of

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'oneloop\[otel\]'"):
        tracing_of(ServerConfig(otlp_traces_endpoint=URL))
    assert tracing_of(ServerConfig()) is None
    with pytest.raises(ConfigError, match="is not a URL"):
        ServerConfig(otlp_traces_endpoint="localhost:4318")
