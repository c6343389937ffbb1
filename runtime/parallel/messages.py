"""Messages between the process whose loop is in charge of a model and those that compute its other stages.

Plain data (`plain_data.py`), on a connection to each of them (`connection.py`). Steps go out as they are launched, and each one's
end comes back."""

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
    """How a process becomes that of stage `stage`: where the first one listens, and the secret of the model."""

    stage: int
    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class ModelName:
    """Where each host finds the model's files: what `--model` and `--revision` say."""

    model: str
    revision: str | None


# --- at the start -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """`links`: where other stages connect to this one. `place`: its host and process, for people."""

    stage: int
    links: tuple[str, int]
    place: str


@dataclass(frozen=True, slots=True)
class Build:
    """`links`: of all stages."""

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
    """`kind`: the name of the error's class, of those that starting raises; else it is a bug, and `text` its traceback."""

    kind: str
    text: str


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """`number`: by which its end is told. `of`: the forward pass whose logits it samples or keeps, if there is one. Without `of`: a
    step, whole, or up to its logits where they are `to_sample`. With `of` and no `masks`: a snapshot of the logits."""

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
    """Nobody will sample the logits of `of` any more."""

    of: int


@dataclass(frozen=True, slots=True)
class Close: ...


@dataclass(frozen=True, slots=True)
class Done:
    """`result` of the last stage, None of others; pooled vectors as arrays."""

    number: int
    result: StepResult | None = None
    idle_before_s: float | None = None
    was_captured: bool = False


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What a step that is done tells of prompts."""

    number: int
    entries: list[list[TokenLogprobs] | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """What a launch or a step raised. `row`: of a RowFailed; `is_apart`: another stage or rank failed, and this one with it."""

    number: int
    fault: Fault
    text: str
    notes: tuple[str, ...]
    row: int | None = None
    is_apart: bool = False


def with_arrays(result: StepResult) -> StepResult:
    """With vectors that can be sent."""
    return StepResult(
        result.tokens,
        result.logprobs,
        cast("Any", [None if each is None else np.asarray(each) for each in result.pooled]),
    )


def with_views(result: StepResult) -> StepResult:
    return StepResult(
        result.tokens, result.logprobs, [None if each is None else memoryview(each) for each in result.pooled]
    )
