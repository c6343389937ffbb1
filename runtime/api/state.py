"""State of an engine: its health, its metrics, and its recent activity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NamedTuple

from runtime.api.outputs import FinishReason
from runtime.api.requests import Request


class SleepLevel(IntEnum):
    """Memory that a sleeping engine has freed: KV cache and weights. HOST keeps the weights' files in the page cache,
    DROPPED does not."""

    AWAKE = 0
    HOST = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Health of an engine. `ok`: steps settle in about their usual time. `reason`: the problem, for users. `hopeless`: the
    engine will not recover. `failing`: steps keep failing, and only a settled one shows recovery (`EngineClient.probe`).
    `sleep_level`: a sleeping engine wakes with the next request."""

    ok: bool
    reason: str | None
    num_running: int
    num_waiting: int
    hopeless: bool = False
    failing: bool = False
    sleep_level: SleepLevel = SleepLevel.AWAKE

    @classmethod
    def of_all(cls, found: Sequence[EngineHealth]) -> EngineHealth:
        """Return the combined health of several engines: the worst state, the sum of requests, and asleep only if all are."""
        worst = min(found, key=lambda each: (each.ok, not each.hopeless))
        return replace(
            worst,
            num_running=sum(each.num_running for each in found),
            num_waiting=sum(each.num_waiting for each in found),
            failing=any(each.failing for each in found),
            sleep_level=min(each.sleep_level for each in found),
        )


@dataclass(frozen=True, slots=True)
class HistogramData:
    """Histogram with ascending upper `bounds`; `counts` are not cumulative and have one more entry, the +Inf bucket."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family, without the prefix and without `_total`, but with the unit suffix. `samples` maps label pairs to
    values."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"]
    samples: Mapping[tuple[tuple[str, str], ...], float | HistogramData]


class StepRecord(NamedTuple):
    """Record of a settled step.

    `number`: counted from 1. `num_prompt_tokens`: tokens of prompt chunks. `num_decodes`: rows that only decode.
    `was_captured`: replayed as a graph. `idle_s`: idle time of the device before it, None if unknown."""

    number: int
    launched_s: float
    settled_s: float
    num_prompt_tokens: int
    num_decodes: int
    num_preempted: int
    was_captured: bool
    idle_s: float | None


class RequestEvent(NamedTuple):
    """Event of a request. `kind`: "chunk" (a prompt chunk was launched), "preempted", "resumed" or "deferred" (its mask was
    late)."""

    kind: str
    at_s: float
    num_tokens: int


class RequestRecord(NamedTuple):
    """Timeline of a sequence, with times of the monotonic clock. `number`: counts ended and delivered requests from 1; 0 for
    others. `delivered_s`: when its reader had consumed all output. `held_s`: total time that its outputs waited while the
    reader was busy (detokenising, writing to its socket); the same for requests submitted together."""

    number: int
    id: str
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish: FinishReason | None
    events: tuple[RequestEvent, ...]
    delivered_s: float | None = None
    held_s: float = 0.0


class Finished(NamedTuple):
    """A request that has ended, with its record and all generated token ids."""

    request: Request
    record: RequestRecord
    output_ids: Sequence[int]


class KVMap(NamedTuple):
    """Usage of the KV blocks in the order of their ids. `cells`: three bytes for each `blocks_per_cell` blocks: the shares,
    in 255ths, of blocks used by one sequence, shared by several, and free but cached."""

    num_blocks: int
    blocks_per_cell: int
    num_reserved: int  # free blocks that are reserved for running sequences
    cells: bytes


class Activity(NamedTuple):
    """Recent work of an engine. `num_steps`, `num_requests`: numbers of the latest. `live`: requests that have not ended, or
    whose readers are behind."""

    now_s: float
    num_steps: int
    num_requests: int
    steps: Sequence[StepRecord]
    requests: Sequence[RequestRecord]
    live: Sequence[RequestRecord]
    kv: KVMap


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of start-up: a phase such as "download", "weights", "warmup"; `done` of `total` in `unit` ("B", "tensors")."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""
