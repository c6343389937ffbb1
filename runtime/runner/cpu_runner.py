"""CPU runner: puts its collaborators in order (tables, inputs, model, sampler) and nothing else.

Knows neither which model nor which feature it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.constrain.masks import RowMasks
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Model
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.worker import Worker
from runtime.sample.logprobs import LogprobWishes
from runtime.sample.prompt_logprobs import PromptLogprobs
from runtime.sample.sampler import Sampler
from runtime.step import ForwardOutput, Step, StepResult


class _Computed(NamedTuple):
    """`logits` [S, V], a line for each of `rows`; their `row_ids` [S] int32, and `positions` [S] where tokens will stand."""

    rows: tuple[ScheduledRow, ...]
    logits: Tensor
    row_ids: Tensor
    positions: Tensor
    scores: PromptLogprobs | None = None

    def copied(self, batch: ScheduledBatch) -> _Computed:
        """The lines that `batch` draws."""
        lines = [line for line, row in enumerate(batch.sampled_by(self.rows)) if row.samples]
        rows = tuple(self.rows[line] for line in lines)
        return _Computed(rows, self.logits[lines], self.row_ids[lines], self.positions[lines])


class _Drawn(NamedTuple):
    """What came of a step, and what was asked about prompts."""

    result: StepResult
    prompt_logprobs: list[list[TokenLogprobs] | None]


class CpuRunner:
    def __init__(self, model: Model, cache: KVCache, sampler: Sampler, inputs: InputBuffers, worker: Worker) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._inputs = inputs
        self._worker = worker
        self._logprobs = LogprobWishes()

    def launch(self, batch: ScheduledBatch) -> Step:
        return self._submit(batch, lambda: self.run(batch))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        return self._undrawn(batch, lambda: self._forward(batch))

    def _undrawn(self, batch: ScheduledBatch, compute: Callable[[], _Computed]) -> ForwardOutput:
        computed: Future[_Computed] = Future()

        def run() -> None:
            try:
                computed.set_result(compute())
            except Exception as error:
                computed.set_exception(error)  # for the draw to raise

        done = self._worker.submit(run)
        return ForwardOutput(
            batch,
            lambda part, masks: self._submit(part, lambda: self._draw(part, computed.result(), masks)),
            lambda part: self._undrawn(part, lambda: computed.result().copied(part)),
            lambda: done,
        )

    def _submit(self, batch: ScheduledBatch, run: Callable[[], _Drawn]) -> Step:
        drawn: list[_Drawn] = []
        done = self._worker.submit(lambda: drawn.append(run()))
        read_scores = (lambda: drawn[0].prompt_logprobs) if batch.prompt_logprobs_rows else None
        return Step(batch, done, lambda: drawn[0].result, read_scores)

    async def close(self) -> None:
        await self._worker.close()

    def run(self, batch: ScheduledBatch) -> _Drawn:
        """One step, start to end, on the calling thread."""
        return self._draw(batch, self._forward(batch))

    @torch.inference_mode()
    def _forward(self, batch: ScheduledBatch) -> _Computed:
        for row in batch.rows:
            if row.binding is not None:
                self._sampler.bind(row.row, row.binding)
                self._logprobs.bind(row.row, row.binding)
        inputs = self._inputs.fill(batch)
        hidden = self._model.forward(inputs.forward(self._cache.layers))
        scores = PromptLogprobs.compute(
            batch.rows,
            self._model.spec.vocab_size,
            inputs.ids.device,
            lambda tokens: self._model.compute_logits(hidden, tokens),
        )
        logits = self._model.compute_logits(hidden, inputs.logit_tokens)
        return _Computed(batch.sampling_rows, logits, inputs.sample_rows, inputs.sample_positions, scores)

    @torch.inference_mode()
    def _draw(self, batch: ScheduledBatch, computed: _Computed, masks: RowMasks | None = None) -> _Drawn:
        rows = batch.sampled_by(computed.rows)
        lines = [line for line, row in enumerate(rows) if row.samples]
        row_ids = computed.row_ids
        if len(lines) < len(rows):
            row_ids = torch.full_like(row_ids, -1)
            row_ids[lines] = computed.row_ids[lines]
        if masks is not None:
            self._sampler.restrict(masks)
        ids = self._sampler.sample(computed.logits, row_ids, computed.positions, self._inputs.last_ids)
        logprobs = self._logprobs.compute(computed.logits, ids, rows)
        by_line = {} if logprobs is None else logprobs.by_line()
        sampled = ids.tolist()
        return _Drawn(
            StepResult(
                [[sampled[line]] for line in lines],
                [[by_line[line]] if line in by_line else None for line in lines] if by_line else [],
            ),
            [] if computed.scores is None else [*computed.scores.by_row().values()],
        )
