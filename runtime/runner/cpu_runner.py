"""CPU runner: puts its collaborators in order (tables, inputs, model, sampler) and nothing else.

Knows neither which model nor which feature it runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.kv.kv_cache import KVCache
from runtime.masks import RowMasks
from runtime.models.model import Model
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.step_inputs import StepInputs
from runtime.runner.worker import Worker
from runtime.sample.logprobs import LogprobWishes
from runtime.sample.prompt_logprobs import PromptLogprobs
from runtime.sample.sampler import Sampler
from runtime.step import ForwardPass, Step


class _Computed(NamedTuple):
    """`logits`: a line for each sampling row."""

    inputs: StepInputs
    logits: Tensor
    scores: PromptLogprobs | None


class _Drawn(NamedTuple):
    """Of each sampling row its id and what was asked about it; of each scoring row what was asked about its prompt."""

    ids: list[int]
    logprobs: list[TokenLogprobs | None]
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

    def launch_forward(self, batch: ScheduledBatch) -> ForwardPass:
        computed: Future[_Computed] = Future()

        def forward() -> None:
            try:
                computed.set_result(self._forward(batch))
            except Exception as error:
                computed.set_exception(error)  # for the draw to raise

        self._worker.submit(forward)
        return ForwardPass(
            batch, lambda masks: self._submit(batch, lambda: self._draw(batch, computed.result(), masks))
        )

    def _submit(self, batch: ScheduledBatch, run: Callable[[], _Drawn]) -> Step:
        drawn: list[_Drawn] = []
        done = self._worker.submit(lambda: drawn.append(run()))
        read_scores = (lambda: drawn[0].prompt_logprobs) if batch.scoring_rows else None
        return Step(batch, done, lambda: drawn[0].ids, lambda: drawn[0].logprobs, read_scores)

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
        hidden = self._model.hidden(inputs.ids, inputs.positions, self._cache.layers, inputs.slots, inputs.metas)
        scores = PromptLogprobs.compute(
            batch.rows,
            self._model.spec.vocab_size,
            inputs.ids.device,
            lambda tokens: self._model.logits(hidden, tokens),
        )
        return _Computed(inputs, self._model.logits(hidden, inputs.logit_tokens), scores)

    @torch.inference_mode()
    def _draw(self, batch: ScheduledBatch, computed: _Computed, masks: RowMasks | None = None) -> _Drawn:
        inputs, logits, scores = computed
        if masks is not None:
            self._sampler.restrict(masks)
        ids = self._sampler.sample(logits, inputs.sample_rows, inputs.sample_positions, self._inputs.last_ids)
        sampled: list[int] = ids.tolist()
        logprobs = self._logprobs.compute(logits, ids, batch.sampling_rows)
        by_line = {} if logprobs is None else logprobs.by_line()
        return _Drawn(
            sampled,
            [by_line.get(line) for line in range(len(sampled))] if by_line else [],
            [] if scores is None else [*scores.by_row().values()],
        )
