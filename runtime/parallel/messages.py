"""Messages between the process whose loop is in charge of a model and those that compute its other stages.

Plain data, by pickle, on a connection that only who knows the model's secret may open: one to each process. Steps go out as they
are launched, and each one's end comes back."""

from __future__ import annotations

import asyncio
import hmac
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from runtime.api import ModelInfo, TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.config import EngineConfig, EnginePlan
from runtime.constrain.masks import RowMasks
from runtime.fault import Fault
from runtime.parallel.stages import Turn
from runtime.step import StepResult

_SIZE = struct.Struct("<Q")
_REDUCED: dict[type, Callable[[Any], Any]] = {MappingProxyType: lambda mapping: (dict, (dict(mapping),))}
Rows = tuple[int, ...]


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
class TurnSaid:
    """A `Turn` in words. `passage`: its number of tokens, if there is one; `drawn`: the rows of each; `draws`: rows and takers."""

    passage: int | None
    drawn: tuple[Rows, ...]
    draws: tuple[Rows, tuple[int, ...]] | None

    @classmethod
    def of(cls, turn: Turn) -> TurnSaid:
        passage, draws = turn.passage, turn.draws
        return cls(
            None if passage is None else passage.num_tokens,
            tuple(each.rows for each in turn.drawn),
            None if draws is None else (draws.rows, tuple(draws.takers)),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """`number`: by which its end is told. `of`: the forward pass whose logits it samples or keeps, if there is one. Without `of`: a
    step, whole, or up to its logits where they are `to_sample`. With `of` and no `masks`: a snapshot of the logits."""

    number: int
    batch: ScheduledBatch
    turn: TurnSaid
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


class Connection(asyncio.Protocol):
    """One end of it, on the loop. `heard`: called with each message; `lost`: once, when nothing more will come. Who has connected
    says the secret first, and only then the other one."""

    def __init__(
        self, secret: bytes, heard: Callable[[Connection, Any], None], lost: Callable[[Connection], None], *,
        connects: bool,
    ) -> None:  # fmt: skip
        self._secret, self._connects = secret, connects
        self._heard, self._lost = heard, lost
        self._unread = bytearray()
        self._is_known = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._connects:
            self._transport.write(self._secret)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        start = 0
        if not self._is_known:
            start = len(self._secret)
            if len(self._unread) < start:
                return
            if not hmac.compare_digest(bytes(self._unread[:start]), self._secret):
                self.abort()
                return
            self._is_known = True
            if not self._connects and self._transport is not None:
                self._transport.write(self._secret)
        while len(self._unread) - start >= _SIZE.size:
            end = start + _SIZE.size + _SIZE.unpack_from(self._unread, start)[0]
            if end > len(self._unread):
                break
            with memoryview(self._unread)[start + _SIZE.size : end] as frame:
                message = pickle.loads(frame)  # of a process of ours: it has said the secret
            start = end
            self._heard(self, message)
        del self._unread[:start]

    def send(self, message: object) -> None:
        assert self._transport is not None, "it is connected"
        data = BytesIO()
        data.write(bytes(_SIZE.size))
        pickler = pickle.Pickler(data, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _REDUCED
        pickler.dump(message)
        frame = data.getbuffer()
        _SIZE.pack_into(frame, 0, len(frame) - _SIZE.size)
        self._transport.write(frame)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Behind what was sent."""
        if self._transport is not None:
            self._transport.close()


def packed(result: StepResult) -> StepResult:
    """With vectors that can be sent."""
    return StepResult(
        result.tokens,
        result.logprobs,
        cast("Any", [None if each is None else np.asarray(each) for each in result.pooled]),
    )


def unpacked(result: StepResult) -> StepResult:
    return StepResult(
        result.tokens, result.logprobs, [None if each is None else memoryview(each) for each in result.pooled]
    )
