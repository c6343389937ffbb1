"""State of an engine: health, metrics and recent activity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal, NamedTuple

from runtime.api.outputs import FinishReason
from runtime.api.requests import Request


class SleepLevel(IntEnum):
    """Sleep level of an engine. A sleeping engine has freed its KV cache and weights. At HOST, the weights' files stay in the
    operating system's page cache; at DROPPED, they do not."""

    AWAKE = 0
    HOST = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Health of an engine. `ok`: steps complete in about their usual time. `reason`: the problem, for users. `hopeless`: the
    engine will not recover. `failing`: steps keep failing; call `EngineClient.probe` to test for recovery. `sleep_level`: a
    sleeping engine wakes with the next request."""

    ok: bool
    reason: str | None
    num_running: int
    num_waiting: int
    hopeless: bool = False
    failing: bool = False
    sleep_level: SleepLevel = SleepLevel.AWAKE

    @classmethod
    def of_all(cls, found: Sequence[EngineHealth]) -> EngineHealth:
        """Return the combined health: the worst state and the sums of requests. Asleep only if all engines are asleep."""
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
    """Histogram. `bounds`: ascending upper bounds. `counts`: non-cumulative counts; the last one is the +Inf bucket."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `name` includes the unit suffix, but neither the prefix nor `_total`. `samples` maps tuples of (label,
    value) pairs to the metric's value."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"]
    samples: Mapping[tuple[tuple[str, str], ...], float | HistogramData]


class StepRecord(NamedTuple):
    """Record of a completed step.

    `number`: step number, from 1. `num_prompt_tokens`: tokens of prompt chunks. `num_decodes`: number of rows that only decode.
    `was_captured`: a graph was replayed. `idle_s`: idle seconds of the device before the step, None if unknown."""

    number: int
    launched_s: float
    settled_s: float
    num_prompt_tokens: int
    num_decodes: int
    num_preempted: int
    was_captured: bool
    idle_s: float | None


class RequestEvent(NamedTuple):
    """Event of a request. `kind`: "chunk" (a prompt chunk was launched), "preempted", "resumed" or "deferred" (the token mask
    was late, so sampling was delayed)."""

    kind: str
    at_s: float
    num_tokens: int


class RequestRecord(NamedTuple):
    """Timeline of a request, in times of the monotonic clock. `number`: counts ended and delivered requests from 1; 0 for other
    requests. `delivered_s`: time when the reader had consumed all output. `held_s`: total time in which outputs waited for a
    busy reader (detokenising, writing to its socket), summed over all requests of the same `submit` call."""

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
    """Usage of the KV cache, in the order of block ids. `cells`: three bytes for each group of `blocks_per_cell` blocks. They
    are the fractions, in 255ths, of blocks used by one sequence, shared by several, and free but cached."""

    num_blocks: int
    blocks_per_cell: int
    num_reserved: int  # free blocks that are reserved for running sequences
    cells: bytes


class Activity(NamedTuple):
    """Recent work of an engine. `num_steps`, `num_requests`: numbers of the latest step and request. `live`: requests that have
    not ended, or whose output has not been read completely."""

    now_s: float
    num_steps: int
    num_requests: int
    steps: Sequence[StepRecord]
    requests: Sequence[RequestRecord]
    live: Sequence[RequestRecord]
    kv: KVMap


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of start-up in a phase such as "download", "weights", "warmup": `done` of `total` in `unit` ("B", "tensors")."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""
