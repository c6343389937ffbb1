"""CPU runner: puts its collaborators in order (tables, inputs, model, sampler) and nothing else.

Knows neither which model nor which feature it runs."""

from __future__ import annotations

import torch

from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch
from runtime.kv.kv_cache import KVCache
from runtime.models.decoder import Decoder
from runtime.runner.input_buffers import InputBuffers
from runtime.runner.worker import Worker
from runtime.sample.logprobs import LogprobWishes
from runtime.sample.sampler import Sampler
from runtime.step import Step


class CpuRunner:
    def __init__(
        self, decoder: Decoder, cache: KVCache, sampler: Sampler, inputs: InputBuffers, worker: Worker
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._inputs = inputs
        self._worker = worker
        self._logprobs = LogprobWishes()

    def launch(self, batch: ScheduledBatch) -> Step:
        sampled_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []

        def run() -> None:
            ids, found = self.run(batch)
            sampled_ids.extend(ids)
            logprobs.extend(found)

        return Step(batch, self._worker.submit(run), lambda: sampled_ids, lambda: logprobs)

    async def close(self) -> None:
        await self._worker.close()

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One step, start to end, on the calling thread: sampled ids, one per sampling row, and what was asked about them."""
        for row in batch.rows:
            if row.binding is not None:
                self._sampler.bind(row.row, row.binding)
                self._logprobs.bind(row.row, row.binding)
        inputs = self._inputs.fill(batch)
        logits = self._decoder.forward(
            inputs.ids, inputs.positions, self._cache.layers, inputs.slots, inputs.meta, inputs.logit_tokens
        )
        ids = self._sampler.sample(logits, inputs.sample_rows, inputs.sample_positions, self._inputs.last_ids)
        sampled: list[int] = ids.tolist()
        found = self._logprobs.compute(logits, ids, batch.sampling_rows)
        if found is None:
            return sampled, []
        by_line = found.by_line()
        return sampled, [by_line.get(line) for line in range(len(sampled))]
