"""Dashboard: snapshots of the server's activity, one event per second for all viewers, and texts of the last requests.

A snapshot is read from the engine's metrics and history (`EngineClient.metrics`, `EngineClient.activity`). Each snapshot is made
once for all viewers. Without viewers no snapshot is made and no timer runs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import msgspec

from runtime import api
from runtime.api import Finished
from server.models.lifecycle import Lifecycle
from server.models.model import LoadedModel

NUM_CELLS = 3072  # of the map of KV blocks
PERIOD_S = 1.0
MAX_REQUESTS = 512  # with stored texts; equal to the history of the engine
MAX_TOKENS = 1_000_000  # of all texts together; the oldest go
# Histograms on the dashboard; /metrics has all.
HISTOGRAMS = frozenset(
    {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "step_time_seconds", "loop_lag_seconds", "gpu_idle_gap_seconds",
    }
)  # fmt: skip
# Prefixes of the names of metrics that are shown with their labels: adapters, and KV blocks outside the device.
LABELLED = ("lora_", "kv_offload_", "kv_tier_", "external_")


class Seen(NamedTuple):
    """Numbers of the last step and the last request of an engine that the dashboard has shown."""

    num_steps: int = 0
    num_requests: int = 0


class Watched(NamedTuple):
    """Engine shown on the dashboard. `name`: the model's name, and the engine's number if the model has several engines."""

    name: str
    loaded: LoadedModel
    engine: api.EngineClient


class Snapshots:
    """Snapshots as events: the state of each model, with steps and requests since the previous snapshot."""

    def __init__(self, lifecycle: Lifecycle, num_http: Callable[[], int], *, has_texts: bool = False) -> None:
        """Prepare snapshots of the models in `lifecycle`. `num_http`: returns the number of HTTP requests in flight.
        `has_texts`: whether prompts and answers are kept."""
        self._has_texts = has_texts
        self._lifecycle = lifecycle
        self._num_http = num_http
        self._seen: dict[str, Seen] = {}  # by name

    def first(self) -> bytes:
        """Return the event with the whole history, for a new viewer. Later events may repeat entries, which have numbers."""
        return self._event([_read(*each, Seen()) for each in self._engines()])

    def next(self) -> bytes:
        """Return the event with all activity since the last call."""
        found = [_read(*each, self._seen.get(each.name, Seen())) for each in self._engines()]
        self._seen = {each["name"]: Seen(each["num_steps"], each["num_requests"]) for each in found}
        return self._event(found)

    def skip(self) -> None:
        """Mark the activity until now as shown, so that `next` leaves it out."""
        for name, _, engine in self._engines():
            activity = engine.activity(after_step=sys.maxsize, after_request=sys.maxsize, num_cells=1)
            self._seen[name] = Seen(activity.num_steps, activity.num_requests)

    def _engines(self) -> Iterator[Watched]:
        """Yield all engines of each model. Each engine has its own steps, rows and blocks."""
        for loaded in () if self._lifecycle.loaded is None else self._lifecycle.loaded.all:
            for number, engine in enumerate(several := loaded.engine.replicas):
                name = loaded.name if len(several) == 1 else f"{loaded.name} (engine {number})"
                yield Watched(name, loaded, engine)

    def _event(self, models: list[dict[str, Any]]) -> bytes:
        loaded = self._lifecycle.loaded
        unloaded = [each for each in (loaded.others if loaded else ()) if each.loaded is None]
        snapshot = {
            "wall_s": time.time(), "status": self._lifecycle.phase.value, "http_in_flight": self._num_http(),
            "has_texts": self._has_texts, "models": models,
            "unloaded": [{"name": each.name, "status": each.status.value} for each in unloaded],
        }  # fmt: skip
        return b"data: " + msgspec.json.encode(snapshot) + b"\n\n"


def _read(name: str, loaded: LoadedModel, engine: api.EngineClient, seen: Seen) -> dict[str, Any]:
    """Return the state of `engine`, with its steps and requests since `seen`."""
    own = loaded.swapped
    activity = engine.activity(after_step=seen.num_steps, after_request=seen.num_requests, num_cells=NUM_CELLS)
    health, model, metrics = engine.health(), engine.model, engine.metrics()
    return {
        "name": name, "status": loaded.status, "reason": health.reason, "running": health.num_running,
        "waiting": health.num_waiting + (0 if own is None else len(own.waiting)), "metrics": _numbers(metrics),
        "labelled": _labelled(metrics),
        "device": model.device, "dtype": model.dtype, "max_model_len": model.max_model_len,
        "max_num_seqs": model.max_num_seqs, "kv_block_size": model.kv_block_size,
        **activity._asdict(), "kv": activity.kv._asdict(),
    }  # fmt: skip


def _numbers(metrics: Iterable[api.Metric]) -> dict[str, Any]:
    """Return the values of metrics without labels, by name."""
    found: dict[str, Any] = {}
    for metric in metrics:
        value = metric.samples.get(())
        if value is not None and (metric.kind != "histogram" or metric.name in HISTOGRAMS):
            found[metric.name] = value
    return found


def _labelled(metrics: Iterable[api.Metric]) -> dict[str, list[tuple[dict[str, str], Any]]]:
    """Return the samples of each metric in `LABELLED` that has labels, by metric name, as a list of (labels, value)."""
    shown = (each for each in metrics if each.kind != "histogram" and each.name.startswith(LABELLED))
    found = {each.name: [(dict(labels), value) for labels, value in each.samples.items() if labels] for each in shown}
    return {name: samples for name, samples in found.items() if samples}


async def _one_second() -> None:
    await asyncio.sleep(PERIOD_S)


class Feed:
    """Source of snapshots for all viewers: `with feed.watching() as watch: async for event in watch`. `tick`: waits for the
    next."""

    def __init__(self, snapshots: Snapshots, tick: Callable[[], Awaitable[None]] = _one_second) -> None:
        self._snapshots = snapshots
        self._tick = tick
        self._watchers: set[Watch] = set()
        self._ticker: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        watch = Watch(self._snapshots.first())
        self._watchers.add(watch)
        if self._ticker is None:
            self._snapshots.skip()
            self._ticker = asyncio.create_task(self._run(), name="feed")
        try:
            yield watch
        finally:
            self._watchers.discard(watch)
            if not self._watchers and self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None

    def close(self) -> None:
        """Send the last event to all viewers and end their streams."""
        for watch in self._watchers:
            watch.end()

    async def _run(self) -> None:
        while True:
            await self._tick()
            event = self._snapshots.next()
            for watch in self._watchers:
                watch.put(event)


class Watch:
    """Event queue of one viewer. It keeps only the latest events. A slow viewer misses events, and the steps in them."""

    MAX_EVENTS = 5

    def __init__(self, first: bytes) -> None:
        self._events = [first]
        self._has_ended = False
        self._news = asyncio.Event()
        self._news.set()

    def put(self, event: bytes) -> None:
        self._events.append(event)
        del self._events[: -self.MAX_EVENTS]
        self._news.set()

    def end(self) -> None:
        self._has_ended = True
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        await self._news.wait()
        if not self._events:
            raise StopAsyncIteration
        events, self._events = b"".join(self._events), []
        if not self._has_ended:
            self._news.clear()
        return events


class TokenIds(NamedTuple):
    model: LoadedModel
    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def num(self) -> int:
        return len(self.prompt) + len(self.answer)


class RecentTexts:
    """Prompts and answers of the last requests, as token ids. Created only with --log-requests."""

    def __init__(self) -> None:
        self._by_id: dict[str, TokenIds] = {}  # the oldest first
        self._num_tokens = 0

    def watch(self, loaded: LoadedModel) -> None:
        """Record each request to `loaded` that finishes from now on."""
        loaded.engine.when_finished(partial(self.note, loaded))

    def note(self, loaded: LoadedModel, finished: Finished) -> None:
        """Record prompt and answers of a `finished` request to `loaded`."""
        id = finished.request.id
        self._forget(id)
        self._by_id[id] = ids = TokenIds(loaded, finished.request.prompt_ids, finished.output_ids)
        self._num_tokens += ids.num
        while len(self._by_id) > MAX_REQUESTS or self._num_tokens > MAX_TOKENS:
            self._forget(next(iter(self._by_id)))

    def find(self, id: str) -> TokenIds | None:
        return self._by_id.get(id)

    def _forget(self, id: str) -> None:
        if (ids := self._by_id.pop(id, None)) is not None:
            self._num_tokens -= ids.num
