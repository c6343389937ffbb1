"""Messages between the process that schedules a model and the processes of its other stages.

Plain data, sent over one connection to each of these processes (`connection.py`). A step is sent when it is launched, and
its end is sent back."""

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
    """Instructions for the process of stage `stage`: the address of the first process, and the model's secret."""

    stage: int
    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class ModelName:
    """Location of the model's files on each host: `--model` and `--revision`."""

    model: str
    revision: str | None


# --- at the start -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """Reply of a process that joined. `links`: address at which its stage listens. `place`: host and process, for messages."""

    stage: int
    links: tuple[str, int]
    place: str


@dataclass(frozen=True, slots=True)
class Build:
    """Order to build a stage. `links`: addresses of all stages."""

    config: EngineConfig
    source: ModelName
    links: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Built:
    """Reply after a stage was built and warmed up. `plan` and `model`: the engine uses those of the last stage. Bytes: over
    all its devices."""

    plan: EnginePlan
    model: ModelInfo
    weights_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Reply of a process that could not build its stage. `kind`: class name of a start-up error, or else `text` is a
    traceback."""

    kind: str
    text: str


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step. `number` identifies its end. `of`: the forward pass whose logits it samples or copies. Without `of`: a
    step, whole, or up to its logits if `to_sample`. With `of` and without `masks`: a snapshot of the logits."""

    number: int
    batch: ScheduledBatch
    turn: Turn
    to_sample: bool = False
    of: int | None = None
    masks: RowMasks | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """Request to report, as the end of `number`, when the logits of `of` are ready."""

    number: int
    of: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Message that the logits of `of` are no longer needed."""

    of: int


@dataclass(frozen=True, slots=True)
class Close: ...


@dataclass(frozen=True, slots=True)
class StepDone:
    """End of a step. `result`: from the last stage only, else None; pooled vectors are arrays."""

    number: int
    result: StepResult | None = None
    idle_before_s: float | None = None
    was_captured: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobsDone:
    """Prompt log-probabilities of a finished step."""

    number: int
    entries: list[list[TokenLogprobs] | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """Error of a launch or a step. `row`: sequence number, for a RowFailed. `is_apart`: another stage or rank caused it."""

    number: int
    fault: Fault
    text: str
    notes: tuple[str, ...]
    row: int | None = None
    is_apart: bool = False


def with_arrays(result: StepResult) -> StepResult:
    """Return `result` with pooled vectors as arrays, which can be sent."""
    return StepResult(
        result.tokens,
        result.logprobs,
        cast("Any", [None if each is None else np.asarray(each) for each in result.pooled]),
    )


def with_views(result: StepResult) -> StepResult:
    return StepResult(
        result.tokens, result.logprobs, [None if each is None else memoryview(each) for each in result.pooled]
    )
