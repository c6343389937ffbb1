"""CUDA runner: puts its collaborators in order (tables, inputs, graph or model and sampler, outputs) and nothing else.

Everything is enqueued from the event loop, on one stream, behind what was enqueued before; nothing here waits. Knows neither
which model nor which feature it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

import torch

import ops
from runtime.api import TokenLogprobs
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.constrain.masks import RowMasks
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Model
from runtime.runner.cuda_event import CudaEvent, EventWaiter
from runtime.runner.device_inputs import DeviceInputs, StepShape, spans_of
from runtime.runner.graph_pool import GraphPool, Sampled
from runtime.runner.step_inputs import StepInputs
from runtime.sample.logprobs import LogprobWishes, index_on
from runtime.sample.prompt_logprobs import PromptLogprobs
from runtime.sample.sampler import Sampler
from runtime.step import ForwardOutput, Step, StepResult


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step up to its logits, a line for each of `rows` and perhaps more. `positions` [L]: where each line's token will stand.
    `started` None: nothing but its draws is left."""

    rows: tuple[ScheduledRow, ...]
    sampled: Sampled
    positions: torch.Tensor
    started: torch.cuda.Event | None


class CudaRunner:
    def __init__(
        self, model: Model, cache: KVCache, sampler: Sampler, inputs: DeviceInputs, graphs: GraphPool,
        *, max_num_seqs: int, steps_in_flight: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._inputs = inputs
        self._graphs = graphs
        self._waiter = EventWaiter()
        self._logprobs = LogprobWishes()
        # One more than can be under way: the ids of the oldest have been read when its turn comes again.
        self._outputs = cycle(
            [
                torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=inputs.last_ids.is_cuda)
                for _ in range(steps_in_flight + 1)
            ]
        )
        self._last_end: torch.cuda.Event | None = None

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Step:
        begun = self._begin(batch)
        return self._finish(batch, begun, begun.sampled.ids)

    @torch.inference_mode()
    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        """The same work, graph or not, which draws for the rows that need no mask."""
        return self._undrawn(batch, self._begin(batch))

    def _begin(self, batch: ScheduledBatch) -> _Begun:
        started = _recorded()
        # Longest contexts first: attention gives each line to blocks in this order, and a long one that came last would run alone.
        rows = tuple(sorted(batch.rows, key=lambda row: -row.end))
        sampled = self._enqueue(rows, batch.num_tokens)
        return _Begun(rows, sampled, self._inputs.sample_positions[: len(sampled.ids)], started)

    def _undrawn(self, batch: ScheduledBatch, begun: _Begun) -> ForwardOutput:
        def done() -> CudaEvent:
            return self._waiter.after(_recorded(blocking=True))  # late, but nothing was enqueued since

        return ForwardOutput(
            batch,
            lambda part, masks: self._draw(part, begun, masks),
            lambda part: self._keep(part, begun),
            done,
        )

    @torch.inference_mode()
    def _keep(self, batch: ScheduledBatch, begun: _Begun) -> ForwardOutput:
        lines = [line for line, row in enumerate(batch.sampled_by(begun.rows)) if row.samples]
        index = index_on(begun.positions.device, lines)
        ids, logits, positions = (t[index] for t in (begun.sampled.ids, begun.sampled.logits, begun.positions))
        rows = tuple(begun.rows[line] for line in lines)
        return self._undrawn(batch, _Begun(rows, Sampled(ids, logits), positions, None))

    @torch.inference_mode()
    def _draw(self, batch: ScheduledBatch, begun: _Begun, masks: RowMasks) -> Step:
        """Masked lines were none of the sampler's so far: counts and last ids learn of their tokens here and only here."""
        logits, ids = begun.sampled.logits, begun.sampled.ids
        begun = replace(begun, rows=batch.sampled_by(begun.rows))
        masked = set(masks.rows)
        late = [row.row if row.row in masked else -1 for row in begun.rows]
        late += [-1] * (len(ids) - len(late))
        late_rows = torch.tensor(late, dtype=torch.int32)
        if ids.is_cuda:
            late_rows = late_rows.pin_memory().to(ids.device, non_blocking=True)
        self._sampler.restrict(masks)
        # As many lines as before, of which the sampler skips most: their kernels are compiled and their memory is planned for.
        drawn = self._sampler.sample(logits, late_rows, begun.positions, self._inputs.last_ids)
        return self._finish(batch, begun, torch.where(late_rows >= 0, drawn, ids))

    def _finish(self, batch: ScheduledBatch, begun: _Begun, ids: torch.Tensor) -> Step:
        """`ids` [L] of `begun`, of which `batch` wants those of its rows that sample."""
        rows, started = begun.rows, begun.started
        output = next(self._outputs)[: len(rows)]
        output.copy_(ids[: len(rows)], non_blocking=True)
        logprobs = self._logprobs.compute(begun.sampled.logits, ids, rows)
        on_host = None if logprobs is None else logprobs.to_host()
        scores = None if begun.sampled.scores is None else begun.sampled.scores.to_host()
        ended = _recorded(blocking=True)
        previous, self._last_end = self._last_end, ended

        def read() -> StepResult:
            sampling = batch.sampling_rows
            by_row = dict(zip((row.row for row in rows), output.tolist(), strict=True))
            ids = [[by_row[row.row]] for row in sampling]
            if on_host is None:
                return StepResult(ids)
            told = {rows[line].row: [entry] for line, entry in on_host.by_line().items()}
            return StepResult(ids, [told.get(row.row) for row in sampling])

        def read_scores() -> list[list[TokenLogprobs] | None]:
            assert scores is not None
            by_row = {rows[line].row: entries for line, entries in scores.by_row().items()}
            return [by_row[row.row] for row in batch.prompt_logprobs_rows]

        def idle_before_s() -> float | None:
            return None if previous is None or started is None else previous.elapsed_time(started) / 1e3

        return Step(
            batch,
            self._waiter.after(ended),
            read,
            None if scores is None else read_scores,
            idle_before_s,
        )

    def _enqueue(self, rows: tuple[ScheduledRow, ...], num_tokens: int, *, eager: bool = False) -> Sampled:
        """One line for each of `rows`, and perhaps more."""
        for row in rows:
            if row.binding is not None:
                self._sampler.bind(row.row, row.binding)
                self._logprobs.bind(row.row, row.binding)
        # A new row may share blocks that its neighbours fill in this very step, so it must be stored before it is read.
        uniform = all(row.num_tokens == 1 and row.binding is None for row in rows)
        least = ops.min_planned_prefill(self._inputs.last_ids.device)
        planned = eager or any(
            row.prompt_logprobs is not None or (row.start == 0 and row.num_tokens >= least) for row in rows
        )
        shape = None if planned else self._graphs.find(num_tokens, len(rows), uniform=uniform)
        if shape is not None:
            self._inputs.fill(rows, shape)
            return self._graphs.replay(shape)
        shape = StepShape(num_tokens, len(rows), uniform)
        self._inputs.fill(rows, shape)
        return self.compute(self._inputs.view(shape, spans_of(rows)), rows)

    def compute(self, inputs: StepInputs, rows: tuple[ScheduledRow, ...] = ()) -> Sampled:
        """Enqueue one step without a graph, and what `rows` ask about their prompts."""
        hidden = self._model.forward(inputs.forward(self._cache.layers))
        scores = PromptLogprobs.compute(
            rows,
            self._model.spec.vocab_size,
            inputs.ids.device,
            lambda tokens: self._model.compute_logits(hidden, tokens),
        )
        logits = self._model.compute_logits(hidden, inputs.logit_tokens)
        ids = self._sampler.sample(logits, inputs.sample_rows, inputs.sample_positions, self._inputs.last_ids)
        return Sampled(ids, logits, scores)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> None:
        """One step without a graph, start to end, waited for: for warm-up."""
        self._enqueue(batch.rows, batch.num_tokens, eager=True)
        torch.cuda.synchronize()

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        self._waiter.close()


def _recorded(*, blocking: bool = False) -> torch.cuda.Event:
    """What was enqueued so far."""
    event = torch.cuda.Event(enable_timing=True, blocking=blocking)
    event.record()
    return event
