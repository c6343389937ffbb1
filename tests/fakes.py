"""FakeEngine: an EngineClient without a model. What it says is scripted, when it says it is the test's decision."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

from runtime.api import (
    Activity,
    Adapter,
    AdapterClient,
    Busy,
    EngineError,
    EngineHealth,
    EngineStopped,
    Finished,
    FinishReason,
    HistogramData,
    KVMap,
    MediaItem,
    Metric,
    ModelInfo,
    Output,
    PoolerInfo,
    PoolingParams,
    PreparedPrompt,
    ProbeFailed,
    ProfileError,
    Request,
    RequestRecord,
    SleepError,
    SleepLevel,
    StepRecord,
    TokenLogprobs,
    cache_root,
)
from runtime.engine.token_stream import EngineTokenStream

Script = Callable[[Request], Sequence[int]]
Pooler = Callable[[Request], memoryview]


def echo_prompt(request: Request) -> Sequence[int]:
    """Says what it was told, over and over."""
    return request.prompt_ids


def fake_logprobs(token_id: int, request: Request) -> TokenLogprobs | None:
    """What the fake thinks of a token it said: the id as thousandths, and of 0, 1, 2 … that they are ever less likely."""
    count = request.params.logprobs
    if count is None:
        return None
    others = request.params.logprob_token_ids or range(count)
    return TokenLogprobs(-token_id / 1000, 3, tuple((other, -float(other)) for other in others))


def fake_prompt_logprobs(request: Request) -> list[TokenLogprobs] | None:
    count = request.params.prompt_logprobs
    if count is None:
        return None
    top = tuple((other, -float(other)) for other in range(count))
    return [TokenLogprobs(-token_id / 1000, 3, top) for token_id in request.prompt_ids[1:]]


def pool_ids(pooler: PoolerInfo) -> Pooler:
    """Numbers that tell of the prompt's ids: of each token its id and the one before it over and over, of all their means, and of
    those the first `dimensions`. Embeddings are normalised, as a model's are."""

    def pooled(request: Request) -> memoryview:
        params, ids = request.params, list(request.prompt_ids)
        embeds = params.task.endswith("embed")
        labels = len(params.label_token_ids) or len(pooler.labels)
        width = (params.dimensions or pooler.embedding_size) if embeds else labels
        rows = [
            [float((id, before)[place % 2] + place) for place in range(width)] for before, id in pairwise([1, *ids])
        ]
        if not params.task.startswith("token_"):
            rows = [[sum(column) / len(rows) for column in zip(*rows, strict=True)]]
        if params.use_activation is not False:
            lengths = [math.hypot(*row) if embeds else sum(row) for row in rows]
            rows = [[number / length for number in row] for row, length in zip(rows, lengths, strict=True)]
        numbers = memoryview(array("f", [number for row in rows for number in row]))
        if not params.task.startswith("token_"):
            return numbers
        return numbers.cast("B").cast("f", (len(rows), width))

    return pooled


def fake_model(**changes) -> ModelInfo:
    facts = {
        "architecture": "FakeForCausalLM", "max_model_len": 4096, "vocab_size": 49152, "eos_token_ids": frozenset({2}),
        "dtype": "float32", "device": "cpu", "num_parameters": 135_000_000, "weights_bytes": 540_000_000,
        "num_kv_blocks": 1024, "kv_block_size": 16, "kv_cache_bytes": 1 << 30, "max_num_seqs": 64,
        "max_concurrency": 4.0, "prefix_caching": True, "pooler": PoolerInfo(embedding_size=4),
    }  # fmt: skip
    return ModelInfo(**{**facts, **changes})


# What a step does to a request: token id, why it ends with it, and the stop token id that ended it.
_Event = tuple[int | None, FinishReason | None, int | None]


@dataclass(eq=False)
class _Live:
    request: Request
    stream: EngineTokenStream
    index: int
    events: Iterator[_Event]
    begun: bool = False


class FakeEngine:
    """With `paused`, tokens come only when `step` is called; otherwise one per request and round of the event loop.

    A request that is to be pooled becomes what `pooler` makes of it, in one step.
    A script is repeated until max_tokens; an end-of-sequence id or stop token id in it ends the request, as the params say.
    `refuse` is raised by the next `submit`s. `ended` tells how each request ended, in order: (id, reason)."""

    def __init__(
        self,
        script: Script = echo_prompt,
        *,
        model: ModelInfo | None = None,
        paused: bool = False,
        pooler: Pooler | None = None,
    ) -> None:
        self.model = model or fake_model()
        self.pooler = pooler or pool_ids(self.model.pooler)
        self.script = script
        self.refuse: EngineError | None = None
        self.unhealthy: str | None = None
        self.num_cached_tokens = 0
        self.cached: set[bytes] = set()  # names of blocks, as `prepare` has them
        self.drafts = (0, 0)  # guessed tokens, and those that were right, of every request
        self.submitted: list[Request] = []
        self.prepared_on: list[threading.Thread] = []
        self.ended: list[tuple[str, FinishReason]] = []
        self.closed = False
        self.hopeless = self.failing = False
        self.num_probes = 0
        self.answers_probes = asyncio.Event()
        self.answers_probes.set()
        self.lets_go = True  # of everything, when it is closed
        self._died = asyncio.Event()
        self.num_resets = 0  # of the prefix cache
        self.adapters: AdapterClient | None = None
        self.steps: list[StepRecord] = []
        self.records: list[RequestRecord] = []
        self.kv_cells = b""
        self._when_finished: list[Callable[[Finished], None]] = []
        self.sleep_level = SleepLevel.AWAKE
        self.profile: tuple[Path, int, int | None] | None = None
        self._live: list[_Live] = []
        self._running = not paused
        self._task: asyncio.Task[None] | None = None
        self._watchers: list[asyncio.Future[None]] = []

    # --- EngineClient ---------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[FakeEngine, ...]:
        return (self,)

    @property
    def load(self) -> float:
        return len(self._live) / self.model.max_num_seqs + (2 if self.sleep_level else 0)

    def num_cached(self, prompt: PreparedPrompt) -> int:
        """Of what a test says it has."""
        return sum(name in self.cached for name in prompt.block_hashes)

    def prepare(
        self, prompt_ids: Sequence[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        self.prepared_on.append(threading.current_thread())
        blocks = range(0, len(prompt_ids) - 15, 16)
        names = [repr((cache_salt, *prompt_ids[: first + 16])).encode() for first in blocks]
        return PreparedPrompt(prompt_ids, cache_root(cache_salt, adapter), names, media)

    def submit(self, requests: Sequence[Request], *, continues: bool = False) -> EngineTokenStream:
        if self.refuse is not None:
            raise self.refuse
        for each in requests:
            self.model.check(each)
        assert all(each.prepared is None or each.prepared.token_ids is each.prompt_ids for each in requests)
        live: list[_Live] = []
        stream = EngineTokenStream(len(requests), lambda index, reason: self._end(live[index], reason))
        live += [
            _Live(request, stream, index, self._events(request, self._script(request)))
            for index, request in enumerate(requests)
        ]
        self.submitted += requests
        self._live += live
        self._notify()
        if self._running and self._task is None:
            self._task = asyncio.create_task(self._run())
        return stream

    def check_room(self, caller: bytes | None) -> None:
        if isinstance(self.refuse, Busy):
            raise self.refuse

    def health(self) -> EngineHealth:
        return EngineHealth(
            self.unhealthy is None, self.unhealthy, len(self._live), 0, self.hopeless, self.failing, self.sleep_level
        )

    def metrics(self) -> list[Metric]:
        done = {(("finished_reason", reason.value),): 0.0 for reason in FinishReason}
        for _, reason in self.ended:
            done[(("finished_reason", reason.value),)] += 1
        return [
            Metric("num_requests_running", "Requests that are running.", "gauge", {(): float(len(self._live))}),
            Metric("request_success", "Requests that ended, by reason.", "counter", done),
            Metric("step_time_seconds", "A step.", "histogram", {(): HistogramData((0.1, 1.0), (3, 2, 1), 4.5)}),
        ]

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        """Of `steps` and `records`, which a test fills; who is live has just come."""
        steps = [step for step in self.steps if step.number > after_step]
        records = [record for record in self.records if record.number > after_request]
        live = [
            RequestRecord(0, each.id, each.arrival_s, None, None, None, None, len(each.prompt_ids), 0, 0, None, ())
            for each in self.live
        ]
        kv = KVMap(self.model.num_kv_blocks, 1, 0, self.kv_cells or bytes(3 * self.model.num_kv_blocks))
        return Activity(time.monotonic(), len(self.steps), len(self.records), steps, records, live, kv)

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        self._when_finished.append(call)

    def abort(self, ids: Collection[str] | None = None) -> int:
        asked = [live for live in self._live if ids is None or live.request.names & {*ids}]
        for live in asked:
            self._end(live, FinishReason.ABORT)
            live.stream.put(Output(live.index, [], FinishReason.ABORT, None, self.num_cached_tokens))
        return len(asked)

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        """As a real one, it waits until nobody is live."""
        await self.until(lambda: not self._live)
        self.sleep_level = level

    async def wake_up(self) -> None:
        if self.unhealthy is not None:
            raise SleepError(self.unhealthy)
        self.sleep_level = SleepLevel.AWAKE

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        if self.profile is not None:
            raise ProfileError("a profile is being recorded already; end it first")
        self.profile = (path, delay_steps, num_steps)

    async def stop_profile(self) -> Path:
        if self.profile is None:
            raise ProfileError("no profile is being recorded")
        (path, _, _), self.profile = self.profile, None
        path.write_bytes(b"a trace")
        return path

    async def drain(self, timeout_s: float) -> int:
        self.refuse = self.refuse or EngineStopped("the server is shutting down")
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: not self._live)
        except TimeoutError:
            left = list(self._live)
            for live in left:
                self._end(live, FinishReason.ABORT)
                live.stream.put(Output(live.index, [], FinishReason.ABORT, None, self.num_cached_tokens))
            return len(left)
        return 0

    async def probe(self) -> None:
        self.num_probes += 1
        await self.answers_probes.wait()
        if self.unhealthy is not None:
            raise ProbeFailed(self.unhealthy)

    async def death(self) -> str:
        await self._died.wait()
        assert self.unhealthy is not None
        return self.unhealthy

    async def close(self, limit_s: float = 1.0) -> bool:
        await self.drain(0)
        self.closed = True
        if self._task is not None:
            self._task.cancel()
        return self.lets_go

    # --- the test's hand ------------------------------------------------------------------------------------------

    def step(self, num_tokens: int = 1) -> None:
        """Every live request gets `num_tokens`, or as many as it wants."""
        for _ in range(num_tokens):
            for live in list(self._live):
                self._give(live)

    def time_out(self, retry_after_s: float | None = None) -> None:
        """The time of every live request is over; with `retry_after_s` they have waited too long to start."""
        for live in list(self._live):
            self._end(live, FinishReason.TIMEOUT)
            live.stream.put(Output(live.index, [], FinishReason.TIMEOUT, retry_after_s=retry_after_s))

    def refuse_constraints(self, error: str) -> None:
        """What the live requests ask of their answers turns out to be impossible."""
        for live in list(self._live):
            self._end(live, FinishReason.INVALID)
            live.stream.put(Output(live.index, [], FinishReason.INVALID, error=error))

    def die(self, why: str) -> None:
        """It will never serve again."""
        self.unhealthy, self.hopeless = why, True
        self.refuse = EngineStopped(why)
        self.fail(why)
        self._died.set()

    def fail(self, error: str) -> None:
        """The engine's fault: every live request ends with an error."""
        for live in list(self._live):
            self._end(live, FinishReason.ERROR)
            live.stream.put(Output(live.index, [], FinishReason.ERROR, error=error))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`, which is looked at after every submit and every end."""
        while not condition():
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            await watcher

    @property
    def live(self) -> list[Request]:
        return [live.request for live in self._live]

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._live:
            self.step()
            await asyncio.sleep(0)
        self._task = None

    def _script(self, request: Request) -> Sequence[int]:
        return () if isinstance(request.params, PoolingParams) else self.script(request)

    def _give(self, live: _Live) -> None:
        if isinstance(live.request.params, PoolingParams):
            self._end(live, FinishReason.STOP)
            numbers = self.pooler(live.request)
            live.stream.put(Output(live.index, [], FinishReason.STOP, None, self.num_cached_tokens, pooled=numbers))
            return
        token, finish, stop_token_id = next(live.events)
        if finish is not None:
            self._end(live, finish)
        if (found := fake_prompt_logprobs(live.request)) and not live.begun:
            live.stream.hold_prompt_logprobs(live.index, found)
        live.begun = True
        logprobs = None if token is None else fake_logprobs(token, live.request)
        if finish is None and logprobs is None and token is not None and live.stream.put_ids(live.index, [token]):
            return
        output = Output(
            live.index, [] if token is None else [token], finish, stop_token_id, self.num_cached_tokens,
            logprobs=None if logprobs is None else [logprobs],
            num_draft_tokens=self.drafts[0], num_accepted_tokens=self.drafts[1],
        )  # fmt: skip
        live.stream.put(output)

    def _events(self, request: Request, script: Sequence[int]) -> Iterator[_Event]:
        params = request.params
        limit = min(params.max_tokens, self.model.max_model_len - len(request.prompt_ids))
        if not params.max_tokens:
            yield None, FinishReason.LENGTH, None
        for number, token in enumerate(cycle(script), start=1):
            enough = number > params.min_tokens
            if enough and token in params.stop_token_ids:
                yield token, FinishReason.STOP, token
            elif enough and token in self.model.eos_token_ids and not params.ignore_eos:
                yield token, FinishReason.STOP, None
            elif number >= limit:
                yield token, FinishReason.LENGTH, None
            else:
                yield token, None, None

    def _end(self, live: _Live, reason: FinishReason) -> None:
        if live in self._live:
            self._live.remove(live)
            self.ended.append((live.request.id, reason))
            for call in self._when_finished:
                call(Finished(live.request, self._record(live.request, reason), self._script(live.request)))
            self._notify()

    def _record(self, request: Request, reason: FinishReason) -> RequestRecord:
        """All that takes time took a second."""
        at = request.arrival_s
        number, num = len(self.ended), len(request.prompt_ids)
        return RequestRecord(number, request.id, at, at + 1, at + 2, at + 3, at + 3, num, 0, 5, reason, ())

    def _notify(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)
