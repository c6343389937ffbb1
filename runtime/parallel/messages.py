"""Messages between the process that schedules a model and the processes of its other stages.

They are plain data, sent over one connection per process (`connection.py`). A step is sent when it is launched. The process
that computes the step sends a message when the step has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from runtime.api import ModelInfo, TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.config import EngineConfig, EnginePlan
from runtime.fault import Fault
from runtime.parallel.stages import Turn
from runtime.step import RowMasks, StepResult


@dataclass(frozen=True, slots=True)
class Join:
    """Instructions for the process of stage `stage`. `host`, `port`: address of the first process. `secret`: the model's secret."""

    stage: int
    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class ModelName:
    """Location of the model's files on each host: values of `--model` and `--revision`."""

    model: str
    revision: str | None


# --- at the start -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """Reply of a process that has joined. `links`: address at which its stage listens. `place`: its host and process, for logs."""

    stage: int
    links: tuple[str, int]
    place: str


@dataclass(frozen=True, slots=True)
class Build:
    """Command to build a stage. `source`: location of the model's files. `links`: addresses of all stages."""

    config: EngineConfig
    source: ModelName
    links: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Built:
    """Reply after a stage was built and warmed up. The engine uses `plan` and `model` of the last stage. `weights_bytes`,
    `kv_cache_bytes`: totals over the stage's devices."""

    plan: EnginePlan
    model: ModelInfo
    weights_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Reply of a process that could not build its stage. `kind`: class name of a start-up error, `text`: its message. For other
    errors `kind` is ""."""

    kind: str
    text: str


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step. `number`: returned in the message about its end. Without `of`: a whole step, or its forward pass if
    `to_sample`. With `of` and `masks`: sampling of forward pass `of`. With `of` only: a snapshot of its logits."""

    number: int
    batch: ScheduledBatch
    turn: Turn
    to_sample: bool = False
    of: int | None = None
    masks: RowMasks | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """Request to send a message with `number` when the logits of forward pass `of` are ready."""

    number: int
    of: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Request to free the logits of forward pass `of`."""

    of: int


@dataclass(frozen=True, slots=True)
class Close: ...


@dataclass(frozen=True, slots=True)
class StepDone:
    """Report that a step has ended. `result`: from the last stage, else None; pooled vectors are arrays."""

    number: int
    result: StepResult | None = None
    idle_before_s: float | None = None
    was_captured: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobsDone:
    """Prompt log-probabilities of step `number`, which has ended."""

    number: int
    entries: list[list[TokenLogprobs] | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """Error of a launch or a step. `row`: number of the sequence of a RowFailed. `is_apart`: another stage or rank caused it."""

    number: int
    fault: Fault
    text: str
    notes: tuple[str, ...]
    row: int | None = None
    is_apart: bool = False


def with_arrays(result: StepResult) -> StepResult:
    """Return `result` with pooled vectors converted to arrays, which can be sent."""
    return StepResult(
        result.tokens,
        result.logprobs,
        cast("Any", [None if each is None else np.asarray(each) for each in result.pooled]),
    )


def with_views(result: StepResult) -> StepResult:
    return StepResult(
        result.tokens, result.logprobs, [None if each is None else memoryview(each) for each in result.pooled]
    )
