"""FakeRunner: a runner without tensors, whose steps complete when the test says so (or at once); and matchers to go with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Several
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import numpy as np

from runtime.api import ModelInfo, PoolerInfo
from runtime.batch import ON_DEVICE, ScheduledBatch, ScheduledRow
from runtime.constrain import deferred as deferred_sampling
from runtime.constrain.masks import allows, mask_of, num_words
from runtime.encode.scheduling import EncoderScheduling
from runtime.engine import Engine
from runtime.fault import Fault, host_fault
from runtime.feature import Feature
from runtime.kv.block_pool import BlockPool
from runtime.kv.prefix_cache import PrefixCache
from runtime.lora.adapters import Adapters
from runtime.lora.scheduling import AdapterScheduling
from runtime.policy.fairness import POLICIES
from runtime.policy.step_budget import StepBudget
from runtime.scheduler import Scheduler, SchedulerLimits
from runtime.sequence import Sequence
from runtime.speculate.scheduling import DraftScheduling
from runtime.speculate.speculation import Speculation
from runtime.step import ForwardOutput, MaskWords, RowMasks, Step, StepResult

NO_WORDS = np.empty((0, 0), dtype=np.int32)


class ManualGpuEvent:
    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_done(self) -> bool:
        return self._future.done()

    async def wait(self) -> None:
        await asyncio.shield(self._future)
        await asyncio.sleep(0)  # a real device lets the loop turn between two steps

    def complete(self, error: Exception | None = None) -> None:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


def count_up(row: ScheduledRow) -> int:
    """The id of a sampled token is its position: easy to expect, whatever was preempted."""
    return row.end


class FakeRunner:
    """`patient`: forward passes are never done before all masks are there, so none is late."""

    def __init__(
        self,
        sample: Callable[[ScheduledRow], int] = count_up,
        manual: bool = False,
        patient: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sample = sample
        self.manual = manual
        self.patient = patient
        self.clock = clock
        self.events: list[ManualGpuEvent] = []
        self.batches: list[ScheduledBatch] = []
        self.sampled: list[ScheduledBatch] = []  # whole steps, and both halves of others
        self.sampled_late: list[ScheduledBatch] = []
        self.tenants: dict[int, int] = {}  # by row: the number of the sequence that has it
        self.names: dict[int, str] = {}  # request ids by number; and how long their prompts are
        self.num_prompt_tokens: dict[int, int] = {}
        self.lengths: dict[int, int] = {}  # by row: tokens that the device knows
        self.launched = asyncio.Event()
        self.closed = False

    def encode(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        assert not batch.encoder_work
        return []

    def capture_next(self, *, idle: bool) -> None:
        return None

    def launch(self, batch: ScheduledBatch) -> Step:
        assert not batch.masked_rows
        self._begin(batch)
        return self._sample(self.sampled, batch, RowMasks((), NO_WORDS))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        assert batch.masked_rows
        self._begin(batch)
        return self._unsampled(self.sampled, batch)

    def _begin(self, batch: ScheduledBatch) -> None:
        assert len(self.sampled) == len(self.batches), "a step came between a forward pass and its sampling"
        self.batches.append(batch)
        for row in batch.rows:
            if row.binding is not None:
                self.tenants[row.row] = row.number
                self.num_prompt_tokens[row.number] = len(row.binding.prompt_ids)
                self.lengths[row.row] = len(row.binding.prompt_ids) + len(row.binding.output_ids)
        self.launched.set()

    def _unsampled(self, sampled: list[ScheduledBatch], batch: ScheduledBatch) -> ForwardOutput:
        done = ManualGpuEvent()
        if not self.patient:
            done.complete()
        return ForwardOutput(
            batch,
            partial(self._sample, sampled),
            partial(self._unsampled, self.sampled_late),
            lambda: done,
            launched_s=self.clock(),
        )

    def _sample(self, sampled: list[ScheduledBatch], batch: ScheduledBatch, masks: RowMasks) -> Step:
        assert list(dict.fromkeys(masks.rows)) == [row.row for row in batch.masked_rows]
        by_row: dict[int, list[MaskWords]] = {}
        for owner, mask in zip(masks.rows, masks.words, strict=True):
            by_row.setdefault(owner, []).append(mask)
        event = ManualGpuEvent()
        ids = []
        for row in batch.sampling_rows:
            assert self.tenants[row.row] == row.number, "a row was sampled for whoever had it before"
            ids.append(self.accept(row, by_row.get(row.row)))
            self.lengths[row.row] += len(ids[-1])
        vectors = [self.pool(row) for row in batch.pooling_rows]
        sampled.append(batch)
        self.events.append(event)
        if not self.manual:
            event.complete()
        return Step(batch, event, lambda: StepResult(ids, pooled=vectors), launched_s=self.clock())

    def accept(self, row: ScheduledRow, masks: Several[MaskWords] | None) -> list[int]:
        """What a row gains: drafts as long as they are what it samples, and one more; no further than its masks go, if any. Of a
        device's drafts every seventh place is wrong."""
        assert masks is None or len(masks) <= 1 + len(row.draft_ids)
        length, ids = self.lengths[row.row], []
        for guess in (*row.draft_ids, None)[: None if masks is None else len(masks)]:
            here = row._replace(start=length + len(ids) - 1, num_tokens=1)
            here = row if row.end == here.end else here
            ids.append(self.sample(here) if masks is None else self.choose(here, masks[len(ids)]))
            if ids[-1] != guess and (guess != ON_DEVICE or here.end % 7 == 0):
                break
        return ids

    def pool(self, row: ScheduledRow) -> memoryview | None:
        """A pooling row's vector: its sequence's number and how long its prompt is."""
        return memoryview(np.array([row.number, row.end], np.float32))

    def choose(self, row: ScheduledRow, mask: MaskWords) -> int:
        """What a masked row draws."""
        return first_allowed(self.sample(row), mask)

    def fault(self, error: BaseException) -> Fault:
        return host_fault(error)

    async def close(self) -> bool:
        self.closed = True
        return True


def first_allowed(wanted: int, mask: MaskWords) -> int:
    """`wanted`, or the next id, going round, that may be drawn."""
    if wanted < 0:
        return wanted
    size = 32 * len(mask)
    return next(token for token in (*range(wanted, size), *range(wanted)) if allows(mask, token))


class Rule:
    """A matcher that keeps what it is shown: `rule` says what may follow it, None for anything."""

    def __init__(self, rule: Callable[[list[int]], Collection[int] | None], vocab_size: int = 1000) -> None:
        self.rule = rule
        self.ids: list[int] = []
        self._num_words = num_words(vocab_size)

    def allowed(self) -> bytes | None:
        allowed = self.rule(self.ids)
        return None if allowed is None else mask_of(allowed, self._num_words).tobytes()

    def accept(self, token_id: int) -> None:
        allowed = self.rule(self.ids)
        assert allowed is None or token_id in allowed
        self.ids.append(token_id)

    def checkpoint(self) -> Callable[[], None]:
        num = len(self.ids)

        def take_back() -> None:
            del self.ids[num:]

        return take_back


_LATE: WeakSet[LateMasks] = WeakSet()
_defer = deferred_sampling.defer


def _defer_and_note(scheduler: Scheduler, sampling: ScheduledBatch) -> ScheduledBatch:
    deferred = _defer(scheduler, sampling)
    for late in _LATE:
        late.note(scheduler, sampling)
    return deferred


deferred_sampling.defer = _defer_and_note


class LateMasks:
    """Makes rules whose every mask is late: it is not made before its row is deferred. One a request, under its id."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._deferred: dict[str, threading.Event] = {}
        _LATE.add(self)

    def note(self, scheduler: Scheduler, sampling: ScheduledBatch) -> None:
        for row in sampling.rows if scheduler is self._scheduler else ():
            sequence = scheduler.sequences.find(row.number)
            # Others' masks are late as well, now and then, where the machine is busy.
            if sequence is not None and sequence.request.id in self._deferred:
                self._deferred[sequence.request.id].set()

    def rule(self, request_id: str, *rule) -> Callable[[], Rule]:
        deferred = self._deferred[request_id] = threading.Event()

        class Late(Rule):
            def allowed(self) -> bytes | None:
                assert deferred.wait(60)
                deferred.clear()
                return super().allowed()

        return lambda: Late(*rule)


class NotedScheduler(Scheduler):
    """Keeps the request ids of its sequences by number, for whoever looks at batches afterwards."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.names: dict[int, str] = {}

    def add(self, sequence: Sequence) -> None:
        self.names[sequence.number] = sequence.request.id
        super().add(sequence)


def model_info(**changes) -> ModelInfo:
    facts = {
        "architecture": "FakeForCausalLM", "max_model_len": 64, "vocab_size": 1000, "eos_token_ids": frozenset({999}),
        "dtype": "float32", "device": "cpu", "num_parameters": 1, "weights_bytes": 4, "num_kv_blocks": 64,
        "kv_block_size": 4, "kv_cache_bytes": 1, "max_num_seqs": 8,
        "max_concurrency": 4.0, "prefix_caching": True, "pooler": PoolerInfo(embedding_size=2),
    }  # fmt: skip
    return ModelInfo(**{**facts, **changes})


def make_engine(
    runner: FakeRunner,
    *,
    num_blocks=64,
    max_num_seqs=8,
    budget=32,
    policy="fcfs",
    speculation: Speculation | None = None,
    model: ModelInfo | None = None,
    adapters: Adapters | None = None,
    encoding: EncoderScheduling | None = None,
    step_budget: StepBudget | None = None,
    **options,
) -> Engine:
    """`model` says what the engine is to believe; its rows and blocks are those given here."""
    model = replace(model or model_info(), max_num_seqs=max_num_seqs, num_kv_blocks=num_blocks)
    limits = SchedulerLimits(max_num_seqs, budget, model.eos_token_ids)
    features: list[Feature] = [] if speculation is None else [DraftScheduling(speculation)]
    features += [] if adapters is None else [AdapterScheduling(adapters.slots)]
    features += [] if encoding is None else [encoding]
    scheduler = NotedScheduler(
        limits, BlockPool(num_blocks), PrefixCache(4), POLICIES[policy](), step_budget=step_budget, features=features
    )
    if isinstance(runner, FakeRunner):
        scheduler.names = runner.names
    return Engine(scheduler, runner, model, adapters=adapters, **options)
