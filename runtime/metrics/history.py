"""History: records of the latest steps and requests, for the dashboard.

A step is stored as one tuple in a ring buffer. A request is stored as one record in another ring buffer, once its output has
been read. Results for the dashboard are built when they are requested, so the cost is small otherwise. The number of entries,
and of events per entry, is limited; token ids are not stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from runtime.api import Activity, KVMap, RequestEvent, RequestRecord, StepRecord
from runtime.batch import ScheduledBatch
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.step import Step

NUM_STEPS = 2048
NUM_REQUESTS = 512
NUM_LIVE = 256  # maximum number of open requests in a view
MAX_EVENTS = 128  # per request; later ones are dropped


class History:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, int, ScheduledCounts, bool, float | None]] = deque(maxlen=NUM_STEPS)
        self._requests: deque[RequestRecord] = deque(maxlen=NUM_REQUESTS)
        self._undelivered: dict[int, RequestRecord] = {}  # ended sequences that are still being read, by number
        self.num_steps = 0
        self._num_requests = 0

    # --- events ---------------------------------------------------------------------------------------------------

    def settled(self, step: Step, now: float) -> None:
        self.num_steps += 1
        batch = step.batch
        self._steps.append(
            (step.launched_s, now, batch.num_preempted, counts(batch), step.was_captured(), step.idle_before_s())
        )

    def note(self, sequence: Sequence, kind: str, at_s: float, num_tokens: int = 0) -> None:
        if len(sequence.events) < MAX_EVENTS:
            sequence.events.append((kind, at_s, num_tokens))

    def finished(self, sequence: Sequence, now: float) -> RequestRecord:
        record = self._undelivered[sequence.number] = _record(sequence, now)
        return record

    def delivered(self, sequence: Sequence, now: float, held_s: float) -> None:
        """Record that the reader of an ended sequence has read all its output. `held_s`: see `RequestRecord`."""
        record = self._undelivered.pop(sequence.number, None)
        if record is not None:  # probes have no record
            self._num_requests += 1
            self._requests.append(record._replace(number=self._num_requests, delivered_s=now, held_s=held_s))

    # --- views ----------------------------------------------------------------------------------------------------

    def activity(
        self,
        scheduler: Scheduler,
        live: Iterable[Sequence],
        now: float,
        after_step: int,
        after_request: int,
        num_cells: int,
    ) -> Activity:
        requests = [record for record in self._requests if record.number > after_request]
        lives = [
            *islice(self._undelivered.values(), NUM_LIVE),
            *(_record(each, None) for each in islice(live, NUM_LIVE)),
        ]
        steps, kv = self.steps(after_step), _kv_map(scheduler, num_cells)
        return Activity(now, self.num_steps, self._num_requests, steps, requests, lives, kv)

    def steps(self, after: int) -> list[StepRecord]:
        """Return the stored records of steps with numbers above `after`. Old records are no longer stored."""
        first = self.num_steps - len(self._steps)
        return [
            StepRecord(number, launched_s, settled_s, counted[0], counted[1], num_preempted, captured, idle_s)
            for number, (launched_s, settled_s, num_preempted, counted, captured, idle_s) in enumerate(
                self._steps, first + 1
            )
            if number > after
        ]


ScheduledCounts = tuple[int, int]  # prompt tokens, and rows that decode


def counts(batch: ScheduledBatch) -> ScheduledCounts:
    num_rows = len(batch.rows)
    if batch.num_tokens == num_rows:
        return 0, num_rows
    chunks = [row.num_tokens for row in batch.rows if row.num_tokens > 1 + len(row.draft_ids)]
    return sum(chunks), num_rows - len(chunks)


def _record(sequence: Sequence, finished_s: float | None) -> RequestRecord:
    return RequestRecord(
        0, sequence.request.id, sequence.request.arrival_s, sequence.first_scheduled_s, sequence.first_token_s,
        sequence.last_token_s, finished_s, sequence.num_prompt_tokens, sequence.num_cached_tokens,
        sequence.num_output_tokens, sequence.finish, tuple([RequestEvent(*event) for event in sequence.events]),
    )  # fmt: skip


def _kv_map(scheduler: Scheduler, num_cells: int) -> KVMap:
    pool = scheduler.blocks.pool
    per_cell = max(1, -(-pool.num_blocks // num_cells))
    return KVMap(pool.num_blocks, per_cell, pool.num_reserved, pool.states(per_cell))
