"""Messages between the process that schedules a model and those that compute its other stages.

Plain data, on a connection to each of these processes (`connection.py`). A step is sent when it is launched, and its end is sent
back."""

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
    """Answer of a process that joined. `links`: where other stages connect. `place`: its host and process, for people."""

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
    """A stage that has computed its first steps. `plan` and `model`: as the last one has them, which are the engine's; bytes: of
    all its devices."""

    plan: EnginePlan
    model: ModelInfo
    weights_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Answer of a process that failed. `kind`: the class name of a start's error; otherwise `text` is a traceback."""

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
    """Tell, as the end of `number`, when the logits of `of` are there."""

    number: int
    of: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Message that the logits of `of` are no longer needed."""

    of: int


@dataclass(frozen=True, slots=True)
class Close: ...


@dataclass(frozen=True, slots=True)
class Done:
    """End of a step. `result` is the last stage's, None from others; pooled vectors are arrays."""

    number: int
    result: StepResult | None = None
    idle_before_s: float | None = None
    was_captured: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Prompt log-probabilities of a step that is done."""

    number: int
    entries: list[list[TokenLogprobs] | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """Error of a launch or a step. `row`: of a RowFailed. `is_apart`: the cause is another stage or rank."""

    number: int
    fault: Fault
    text: str
    notes: tuple[str, ...]
    row: int | None = None
    is_apart: bool = False


def with_arrays(result: StepResult) -> StepResult:
    """Return `result` with vectors as arrays, which can be sent."""
    return StepResult(
        result.tokens,
        result.logprobs,
        cast("Any", [None if each is None else np.asarray(each) for each in result.pooled]),
    )


def with_views(result: StepResult) -> StepResult:
    return StepResult(
        result.tokens, result.logprobs, [None if each is None else memoryview(each) for each in result.pooled]
    )
