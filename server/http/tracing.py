"""OpenTelemetry traces: one span per request, with child spans queue, prefill and decode.

When a request ends, the event loop puts it into a queue. A thread creates and sends its spans. The HTTP headers `traceparent`
and `tracestate` name the parent. The packages are an optional dependency."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from queue import Full, Queue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from runtime.api import Finished, FinishReason, PoolingParams, Request, RequestRecord
from server.config import __version__
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

logger = logging.getLogger("oneloop.tracing")

MAX_WAITING = 10_000  # requests whose spans are not made yet
CLOSE_LIMIT_S = 2.0
_PATH = "/v1/traces"  # of a collector, where the option names none
# vLLM's names, of what no convention has
_LATENCIES = {
    "gen_ai.latency.time_in_queue": ("arrival_s", "first_scheduled_s"),
    "gen_ai.latency.time_to_first_token": ("arrival_s", "first_token_s"),
    "gen_ai.latency.time_in_model_prefill": ("first_scheduled_s", "first_token_s"),
    "gen_ai.latency.time_in_model_decode": ("first_token_s", "last_token_s"),
    "gen_ai.latency.e2e": ("arrival_s", "finished_s"),
}
_PHASES = (
    ("queue", "arrival_s", "first_scheduled_s"), ("prefill", "first_scheduled_s", "first_token_s"),
    ("decode", "first_token_s", "last_token_s"),
)  # fmt: skip


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the headers that name the parent trace, decoded as text."""
    names = (b"traceparent", b"tracestate")
    return [(name.decode(), value.decode("latin-1")) for name, value in headers if name in names]


class Tracing:
    """Thread that creates and sends spans of finished requests. `processor`: receives the finished spans."""

    def __init__(self, processor: SpanProcessor, service_name: str = "oneloop") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("oneloop", __version__)
        self._context_of = TraceContextTextMapPropagator().extract
        self._server, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._jobs: Queue[tuple[str, Request, RequestRecord, int] | None] = Queue(MAX_WAITING)
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="oneloop-traces", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: ServerConfig) -> Tracing:
        """Create a Tracing that sends to `config.otlp_traces_endpoint` by OTLP over HTTP. Raises ConfigError without its
        packages."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-traces-endpoint: {error}; pip install 'oneloop[otel]'") from None
        endpoint = config.otlp_traces_endpoint or ""
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + _PATH
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def finished(self, model: str, finished: Finished) -> None:
        """Enqueue the spans of a finished request. Called on the event loop."""
        try:
            self._jobs.put_nowait((model, finished.request, finished.record, time.time_ns() - time.monotonic_ns()))
        except Full:
            self._num_lost += 1
            if self._num_lost == 1:
                logger.warning("span exporter is falling behind; spans are dropped")

    def close(self) -> None:
        """Send queued spans and stop, within CLOSE_LIMIT_S. Blocks."""
        self._jobs.put(None)
        self._thread.join(CLOSE_LIMIT_S)
        self._provider.force_flush(int(CLOSE_LIMIT_S * 1000))
        self._provider.shutdown()
        if self._num_lost:
            logger.warning("%d requests have no trace", self._num_lost)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._trace(*job)
            except Exception:
                logger.exception("a request could not be traced")

    def _trace(self, model: str, request: Request, record: RequestRecord, epoch_ns: int) -> None:
        from opentelemetry.trace import set_span_in_context

        def at(moment_s: float | None) -> int:
            assert moment_s is not None
            return int(moment_s * 1e9) + epoch_ns

        ended_s = record.finished_s
        whole = self._tracer.start_span(
            "llm_request",
            self._context_of(dict(request.trace_headers)),
            kind=self._server,
            attributes=_attributes(model, request, record),
            start_time=at(record.arrival_s),
        )
        inside = set_span_in_context(whole)
        for name, begin, end in _PHASES:
            begun_s, done_s = getattr(record, begin), getattr(record, end)
            if begun_s is None or (done_s is None and name == "decode"):
                continue
            part = self._tracer.start_span(name, inside, start_time=at(begun_s))
            part.end(at(ended_s if done_s is None else done_s))
        for event in record.events:
            if event.kind in ("preempted", "resumed", "deferred"):
                whole.add_event(event.kind, timestamp=at(event.at_s))
        if record.finish in (FinishReason.ERROR, FinishReason.TIMEOUT):
            whole.set_status(self._failed)
        whole.end(at(ended_s))


def _attributes(model: str, request: Request, record: RequestRecord) -> Mapping[str, Any]:
    """Return the span attributes of a request, by OpenTelemetry's conventions for generative models."""
    found: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.parent_id or record.id,
        "gen_ai.response.id": record.id,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
    }
    if record.finish is not None:
        found["gen_ai.response.finish_reasons"] = [record.finish.value]
    params = request.params
    if isinstance(params, PoolingParams):
        found["gen_ai.operation.name"] = "embeddings"
    else:
        found |= {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        if params.top_k:
            found["gen_ai.request.top_k"] = float(params.top_k)
    for name, (begin, end) in _LATENCIES.items():
        begun_s, done_s = getattr(record, begin), getattr(record, end)
        if begun_s is not None and done_s is not None:
            found[name] = done_s - begun_s
    return found
