"""CapturedSteps: replays captured graphs of steps. It selects a graph for a step, uploads the inputs, and captures missing
graphs later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from runtime.batch import SAMPLE, Pool, Sample, ScheduledRow, columns
from runtime.platform.capture import UNCOLLECTED
from runtime.platform.graph_pool import Captured, Follow, GraphPool
from runtime.runner.device_inputs import DeviceInputs, StepShape
from runtime.runner.runner import Capturable, Computed
from runtime.runner.worker import Worker
from runtime.sample.drafts import num_drafts

log = logging.getLogger("oneloop.start")


class CapturedSteps:
    def __init__(self, inputs: DeviceInputs, pool: GraphPool, worker: Worker | None = None) -> None:
        """Create captured steps. `worker`: thread that captures graphs, at start-up and later."""
        self._inputs = inputs
        self._pool = pool
        self._worker = worker

    def capture(self, shapes: Iterable[StepShape], capturable: Capturable) -> None:
        """Capture steps of `shapes` on the calling thread."""
        with UNCOLLECTED.after_collecting(), torch.inference_mode():
            self._pool.capture(shapes, self._computing(capturable))

    def capture_next(self, capturable: Capturable, *, idle: bool) -> asyncio.Future[Any] | None:
        if self._worker is None or self._worker.is_busy:  # busy with another model, possibly for long
            return None
        shape = self._pool.next_due(idle=idle)
        return None if shape is None else self._worker.enqueue(lambda: self._capture_late(shape, capturable))

    def _capture_late(self, shape: StepShape, capturable: Capturable) -> None:
        try:
            with torch.inference_mode():
                self._pool.capture_late(shape, self._computing(capturable))
        except Exception:
            log.warning("capturing of CUDA graphs stopped; remaining steps run eagerly", exc_info=True)
        if not self._pool.has_more:
            log.info("captured %d steps in all", self._pool.num_captured)

    def _computing(self, capturable: Capturable) -> Callable[[StepShape], tuple[Captured, Follow | None]]:
        def compute(shape: StepShape) -> tuple[Captured, Follow | None]:
            sampled, hidden, follow = capturable(self._inputs.placed(shape, None))
            return Captured(sampled, hidden), follow

        return compute

    def replay(self, rows: tuple[ScheduledRow, ...], *, follows: bool) -> Computed | None:
        pooled = any(type(row.work) is Pool for row in rows)
        shape = self._inputs.shape_of(rows)
        if not serves(rows) or (pooled and shape.drafts):
            return None
        if self._pool.pools and any(type(row.work) is Sample for row in rows):
            return None
        if pooled:  # if every token has logits, the graph has no hidden states
            shape = replace(shape, uniform=False)
        found = self._pool.find(shape)
        if found is None:
            return None
        self._inputs.upload(rows, found)
        sampled, hidden = self._pool.replay(found)
        if follows:
            self._pool.replay_following(found)
        sampling = rows if len(sampled.ids) else ()  # a model without a head samples nothing
        computed = Computed.by_token(rows, sampled) if found.drafts else Computed.of(sampling, sampled)
        return computed._replace(hidden=hidden) if pooled else computed


def serves(rows: Sequence[ScheduledRow]) -> bool:
    """Return True if a graph can compute `rows`: they need only sampling and hidden states, and have neither token types nor
    media. A step with draft tokens must have no prompt chunk, because attention would read its context once per token."""
    of = columns(rows)
    num = len(rows)
    if of.prompt_logprobs.count(None) < num or of.media.count(None) < num:
        return False
    if of.num_tokens.count(1) == num == of.work.count(SAMPLE):  # the usual case
        return True
    has_guesses = has_pieces = False
    for row in rows:
        if type(row.work) is Pool and row.work.params.token_type_ids is not None:
            return False
        if row.draft_ids:
            has_guesses = True
        if row.num_tokens > 1:
            has_pieces = has_pieces or row.num_tokens > 1 + num_drafts(row)
    return not (has_guesses and has_pieces)
