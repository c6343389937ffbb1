"""ModelRunner: executes a scheduled batch on the device.

It binds rows, copies blocks and fills inputs. It then replays a captured step, or runs the forward pass, prompt
log-probabilities, pooling, logits and sampling. Finally it copies results to the host. It does not depend on the model,
features or device. The platform's `Lane` executes the work and detects its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ops.sampling.tables import Drafts, Masks
from ops.transfer import index_on, to_host, upload
from runtime.api import TokenLogprobs
from runtime.batch import Pool, RowBinding, Sample, ScheduledBatch, ScheduledRow
from runtime.fault import Fault, RowFailed
from runtime.kv.kv_cache import KVCache
from runtime.models.model import Model
from runtime.parallel.stages import RowTables
from runtime.pool.pooling import PooledRows, Pooling
from runtime.runner.encoding import EncoderOutputs, Encoding
from runtime.runner.lane import Lane, Part
from runtime.runner.model_drafter import drafter_of
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.sample.drafts import accepted_ids, check_drafts, num_drafts
from runtime.sample.logprobs import LogprobsState, StepLogprobs
from runtime.sample.prompt_logprobs import PromptLogprobs
from runtime.sample.sampler import Sampler
from runtime.speculate.config import LookupLengths
from runtime.step import ForwardOutput, HostPages, RowMasks, Step, StepResult

NO_OUTPUTS: EncoderOutputs = MappingProxyType({})


_NO_IDS = torch.empty(0, dtype=torch.int64)
_BRIEF = 1024  # steps of fewer tokens are awaited by busy-waiting if nothing else is in flight


class Sampled(NamedTuple):
    """Result of sampling S logits rows. `ids` [S] int64: sampled ids. `logits` [S, V]. `positions` [S] int64: positions of the
    ids in their sequences. `drafts`: draft tokens of the step, or None."""

    ids: Tensor
    logits: Tensor
    positions: Tensor
    drafts: Drafts | None = None


class Computed(NamedTuple):
    """A step after pooling and after sampling of its unmasked rows. `logits_of`: scheduled rows that have logits, in order.
    `starts`, `stops`: range of logits rows of each scheduled row."""

    logits_of: tuple[ScheduledRow, ...]
    sampled: Sampled
    starts: Sequence[int]
    stops: Sequence[int]
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledRows | None = None
    was_captured: bool = False
    hidden: Any = None  # of a captured step with pooled rows: hidden states for pooling

    @classmethod
    def of(
        cls, rows: tuple[ScheduledRow, ...], sampled: Sampled, prompt_logprobs: PromptLogprobs | None = None,
        pooled: PooledRows | None = None,
    ) -> Computed:  # fmt: skip
        """Return the step of `rows`. Each has one row of logits, plus one for each draft token, in this order."""
        starts: Sequence[int] = range(len(rows))
        stops: Sequence[int] = range(1, len(rows) + 1)
        if sampled.drafts is not None:
            stops = list(accumulate(1 + num_drafts(row) for row in rows))
            starts = [0, *stops[:-1]]
        return cls(rows, sampled, starts, stops, prompt_logprobs, pooled)

    @classmethod
    def by_token(cls, rows: tuple[ScheduledRow, ...], sampled: Sampled) -> Computed:
        """Return the step of `rows` if every token has logits. Only the last logits rows of each scheduled row are sampled."""
        stops = list(accumulate(row.num_tokens for row in rows))
        starts = [stop - 1 - num_drafts(row) for row, stop in zip(rows, stops, strict=True)]
        return cls(rows, sampled, starts, stops)


Capturable = Callable[[StepInputs], tuple["Sampled", Any, Callable[[], None] | None]]  # `ModelRunner.capturable`


class Graphs(Protocol):
    def replay(self, rows: tuple[ScheduledRow, ...], *, follows: bool) -> Computed | None:
        """Enqueue the captured graph that fits `rows`, and the drafter's graph if `follows`. Return None if no graph fits.

        The next replay overwrites the outputs."""
        ...

    def capture_next(self, capturable: Capturable, *, idle: bool) -> asyncio.Future[Any] | None:
        """Start capturing one missing graph. See `Runner.capture_next`."""
        ...


class NoGraphs:
    def replay(self, rows: tuple[ScheduledRow, ...], *, follows: bool) -> Computed | None:
        return None

    def capture_next(self, capturable: Capturable, *, idle: bool) -> None:
        return None


class Outputs(NamedTuple):
    """Functions that return the results of a step. Call them when the step is done."""

    result: Callable[[], StepResult]
    prompt_logprobs: Callable[[], list[list[TokenLogprobs] | None]]
    was_captured: bool = False


class ModelRunner:
    def __init__(
        self, model: Model, cache: KVCache, inputs: Inputs, sampler: Sampler, lane: Lane, graphs: Graphs,
        lookup: LookupLengths | None = None, *, pools: bool = False,
    ) -> None:  # fmt: skip
        """Create a runner. `lookup`: settings of n-gram drafts on the device. `pools`: captured steps end at hidden states."""
        self._model = model
        self._cache = cache
        self._inputs = inputs
        self._sampler = sampler
        self._lane = lane
        self._graphs = graphs
        self._logprobs = LogprobsState()
        self._pooling = Pooling(model)
        self._captures_samples = model.spec.generates and not pools
        self._encoding = Encoding(model, lane, inputs.last_ids.device)
        none = torch.empty(0, dtype=torch.int64, device=inputs.last_ids.device)
        self._nothing = Sampled(none, torch.empty((0, model.spec.vocab_size), device=none.device), none)
        self.drafter = drafter_of(model, cache.layers, inputs, sampler, lookup)

    # --- what the engine calls ------------------------------------------------------------------------------------

    def encode(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        return self._encoding.start(batch)

    def move_blocks(self, block_ids: Sequence[int], pages: HostPages, *, to_host: bool) -> asyncio.Future[Any]:
        @torch.inference_mode()
        def copy() -> tuple[Tensor, ...]:
            blocks, rows, cache = torch.tensor(block_ids, dtype=torch.int64), pages(), self._cache
            blocks = blocks.to(self._inputs.last_ids.device)
            sizes = [len(run) for run in rows]
            if to_host:
                for run, read in zip(rows, torch.split(cache.read_blocks(blocks), sizes), strict=True):
                    run.copy_(read, non_blocking=True)
            else:
                staged = torch.empty(len(blocks), cache.block_bytes, dtype=torch.uint8, device=blocks.device)
                for run, part in zip(rows, torch.split(staged, sizes), strict=True):
                    part.copy_(run, non_blocking=True)
                cache.write_blocks(blocks, staged)
            return ()

        return self._lane.beside(copy, "kv-to-host" if to_host else "kv-from-host")

    def launch(self, batch: ScheduledBatch) -> Step:
        self._encoding.refuse(batch)
        outputs = self._encoding.outputs(batch)
        return self._step(batch, lambda: self.whole(batch, outputs))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        self._encoding.refuse(batch)
        outputs = self._encoding.outputs(batch)
        return self._forward_output(batch, self._lane.begin(lambda: self._first_part(batch, outputs)))

    def capture_next(self, *, idle: bool) -> asyncio.Future[Any] | None:
        return self._graphs.capture_next(self.capturable, idle=idle)

    def fault(self, error: BaseException) -> Fault:
        return self._lane.fault(error)

    async def close(self) -> bool:
        return await self._lane.close()

    @property
    def tables(self) -> RowTables:
        return RowTables(self._inputs.last_ids, self._inputs.num_computed, self._inputs.draft_ids)

    # --- what a platform calls ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> None:
        """Run one step without a graph on the calling thread, and wait for its end. Used for warm-up."""
        rows = self._bound(batch)
        self.compute(self._inputs.fill(rows), rows)
        self._lane.synchronize()

    def stop(self) -> None:
        self._lane.stop()

    def capturable(self, step: StepInputs) -> tuple[Sampled, Any, Callable[[], None] | None]:
        """Enqueue the part of a step that a graph can contain: everything except optional outputs of rows, such as logprobs.

        Return the sampled tokens, the hidden states, and a function that enqueues the drafter's part (for a separate graph) or
        None."""
        hidden = self._model.forward(step.forward)
        kept = self.drafter.keep(hidden)
        sampled = self._sampled(step, hidden) if self._captures_samples else self._nothing
        return sampled, hidden, (lambda: self.drafter.follow(step, kept)) if self.drafter.follows else None

    def compute(
        self, step: StepInputs, rows: tuple[ScheduledRow, ...], outputs: EncoderOutputs = NO_OUTPUTS, *,
        follows: bool = True,
    ) -> Computed:  # fmt: skip
        """Enqueue one step without a graph, with all optional outputs of `rows`, and the drafter's work if `follows`.
        `outputs`: encoder outputs by key."""
        step = step._replace(forward=self._encoding.embedded(step.forward, rows, outputs))
        hidden = self._model.forward(step.forward)
        kept = self.drafter.keep(hidden) if follows else None
        device = step.forward.positions.device
        samples = any(isinstance(row.work, Sample) for row in rows)
        logits: Tensor | None = None  # logits of sampled tokens

        def logits_of(tokens: Tensor) -> Tensor:
            """Return logits of prompt `tokens`. The first call also computes the logits for sampling, so that the head's
            weights are read only once."""
            nonlocal logits
            if logits is not None or not samples or step.logit_tokens is None:
                return self._model.compute_logits(hidden, tokens)
            both = self._model.compute_logits(hidden, torch.cat([tokens, step.logit_tokens]))
            logits = both[len(tokens) :]
            return both[: len(tokens)]

        prompt_logprobs = PromptLogprobs.compute(rows, self._model.spec.vocab_size, device, logits_of)
        pooled = self._pooling.compute(rows, hidden, device)
        sampled = self._sampled(step, hidden, logits) if samples else self._nothing
        if follows:
            self.drafter.follow(step, kept)
        return Computed.of(step.logits_of if samples else (), sampled, prompt_logprobs, pooled)

    def _sampled(self, step: StepInputs, hidden: Any, logits: Tensor | None = None) -> Sampled:
        """Sample the step. `logits`: logits of the step if already computed, or None."""
        if logits is None:
            logits = self._model.compute_logits(hidden, step.logit_tokens)
        ids = self._sampler.sample(logits, step.sample_rows, step.sample_positions, self._inputs.last_ids, step.drafts)
        return Sampled(ids, logits, step.sample_positions, step.drafts)

    # --- a step in one part or two --------------------------------------------------------------------------------

    def _step(self, batch: ScheduledBatch, work: Callable[[], Outputs], behind: Part | None = None) -> Step:
        launched = self._lane.finish(work, behind, brief=batch.num_tokens <= _BRIEF)
        value: Callable[[], Outputs] = launched.value
        return Step(
            batch,
            launched.done,
            lambda: value().result(),
            (lambda: value().prompt_logprobs()) if batch.prompt_logprobs_rows else None,
            launched.idle_before_s,
            lambda: value().was_captured,
        )

    def _forward_output(self, batch: ScheduledBatch, part: Part) -> ForwardOutput:
        computed: Callable[[], Computed] = part.value
        return ForwardOutput(
            batch,
            lambda some, masks: self._step(some, lambda: self._rest(some, computed(), masks), part),
            lambda some: self._forward_output(
                some, self._lane.begin(lambda: self._snapshot(some, computed()), opens=False)
            ),
            part.done,
        )

    def _bound(self, batch: ScheduledBatch) -> tuple[ScheduledRow, ...]:
        """Write new sequences to all per-row tables, load adapters and copy blocks. Return the rows in computing order."""
        rows = self._inputs.arranged(batch.rows)
        for load in batch.adapter_loads:
            assert self._model.adapters is not None
            self._model.adapters.place(*load)
        for row in rows:
            if row.binding is not None:
                self._bind(row, row.binding)
        if batch.follows:
            self.drafter.begin(rows)
        if len(rows) < batch.num_tokens:
            check_drafts(rows)
        if batch.copies:
            device = self._inputs.last_ids.device
            ends = [copy.source for copy in batch.copies], [copy.target for copy in batch.copies]
            self._cache.copy_blocks(*(index_on(device, blocks) for blocks in ends))
        return rows

    def _bind(self, row: ScheduledRow, binding: RowBinding) -> None:
        try:
            if type(row.work) is not Pool:  # pooled rows are never sampled
                self._sampler.bind(row.row, binding)
            self._logprobs.bind(row.row, binding)
            self._pooling.bind(row.row, binding)
            self.drafter.bind(row.row, binding)
        except Exception as error:
            if self.fault(error) is not Fault.STEP:
                raise
            raise RowFailed(row.number) from error

    @torch.inference_mode()
    def whole(self, batch: ScheduledBatch, outputs: EncoderOutputs = NO_OUTPUTS) -> Outputs:
        """Compute a step without masked rows on the calling thread. A batch without rows only copies blocks."""
        if not batch.rows:
            self._bound(batch)
            return Outputs(lambda: StepResult([]), list)
        return self._outputs(batch, self._computed(batch, outputs))

    @torch.inference_mode()
    def _first_part(self, batch: ScheduledBatch, outputs: EncoderOutputs) -> Computed:
        return self._computed(batch, outputs)

    @torch.inference_mode()
    def _rest(self, batch: ScheduledBatch, computed: Computed, masks: RowMasks) -> Outputs:
        return self._outputs(batch, self._sampled_masked(batch, computed, masks))

    def _computed(self, batch: ScheduledBatch, outputs: EncoderOutputs) -> Computed:
        rows = self._bound(batch)
        replayed = self._graphs.replay(rows, follows=batch.follows)
        if replayed is None:
            return self.compute(self._inputs.fill(rows), rows, outputs, follows=batch.follows)
        pooled = None
        if replayed.hidden is not None:
            pooled = self._pooling.compute(rows, replayed.hidden, replayed.sampled.positions.device)
        return replayed._replace(was_captured=True, pooled=pooled, hidden=None)

    @torch.inference_mode()
    def _snapshot(self, batch: ScheduledBatch, computed: Computed) -> Computed:
        """Return a copy of the logits of the rows in `batch`, which are sampled later, since the next step overwrites them.
        Logits at draft tokens are dropped."""
        wanted = {row.row for row in batch.rows}
        chosen = [
            (row, start) for row, start in zip(computed.logits_of, computed.starts, strict=True) if row.row in wanted
        ]
        rows = tuple(row for row, _ in chosen)
        num_computed = self._inputs.num_computed
        index = index_on(num_computed.device, [start for _, start in chosen])
        ids, logits, positions, drafts = computed.sampled
        if drafts is not None:
            lost = index_on(num_computed.device, [num_drafts(row) for row in rows], num_computed.dtype)
            num_computed[index_on(num_computed.device, [row.row for row in rows])] -= lost
        return Computed.of(rows, Sampled(ids[index], logits[index], positions[index]))

    def _sampled_masked(self, batch: ScheduledBatch, computed: Computed, masks: RowMasks) -> Computed:
        """Sample masked rows with their `masks`, and update penalty counts and last ids, which earlier sampling left unchanged."""
        rows = batch.sampled_by(computed.logits_of)
        if not masks.rows:
            return computed._replace(logits_of=rows)
        ids, logits, positions, drafts = computed.sampled
        device, num_masks = ids.device, Counter(masks.rows)
        first_masks = dict(zip(num_masks, accumulate(num_masks.values(), initial=0), strict=False))
        sample_rows, mask_rows, stops = [-1] * len(ids), [0] * len(ids), list(computed.stops)
        for place, (row, start) in enumerate(zip(rows, computed.starts, strict=True)):
            if num := num_masks[row.row]:
                stops[place] = start + num
                sample_rows[start : start + num] = [row.row] * num
                mask_rows[start : start + num] = range(first_masks[row.row], first_masks[row.row] + num)
        late_rows = index_on(device, sample_rows, torch.int32)
        words = torch.empty(masks.words.shape, dtype=torch.int32, device=device)
        upload(words, masks.words)
        # Same number of logits rows, most of them skipped: their kernels are compiled and their memory is planned.
        drawn = self._sampler.sample(
            logits, late_rows, positions, self._inputs.last_ids, drafts,
            Masks(index_on(device, mask_rows, torch.int32), words),
        )  # fmt: skip
        sampled = Sampled(torch.where(late_rows >= 0, drawn, ids), logits, positions, drafts)
        return computed._replace(logits_of=rows, sampled=sampled, stops=stops)

    # --- results --------------------------------------------------------------------------------------------------

    def _outputs(self, batch: ScheduledBatch, computed: Computed) -> Outputs:
        rows, sampled, spans = computed.logits_of, computed.sampled, (computed.starts, computed.stops)
        ids = self._lane.ids_to_host(sampled.ids[: computed.stops[-1]]) if rows else _NO_IDS
        logprobs = self._logprobs.compute(sampled.logits, sampled.ids, rows, *spans)
        logprobs = None if logprobs is None else logprobs.to_host()
        prompt_logprobs = None if computed.prompt_logprobs is None else computed.prompt_logprobs.to_host()
        pooled = None if computed.pooled is None else computed.pooled.to_host()
        guesses = None
        if sampled.drafts is not None and any(row.guessed_on_device for row in rows):
            guesses = to_host(sampled.drafts.ids)
        self.drafter.propose(batch.rows)

        def read() -> StepResult:
            return read_result(batch, rows, spans, ids, guesses, logprobs, pooled)

        def read_prompt_logprobs() -> list[list[TokenLogprobs] | None]:
            assert prompt_logprobs is not None
            by_row = prompt_logprobs.by_row()
            return [by_row[row.row] for row in batch.prompt_logprobs_rows]

        return Outputs(self._lane.reader(read), read_prompt_logprobs, computed.was_captured)


def read_result(
    batch: ScheduledBatch, rows: tuple[ScheduledRow, ...], spans: tuple[Sequence[int], Sequence[int]], ids: Tensor,
    guesses: Tensor | None, logprobs: StepLogprobs | None, pooled: PooledRows | None,
) -> StepResult:  # fmt: skip
    """Return the result of a step whose tensors have been computed. `spans`: (starts, stops) of the sampled logits rows of each
    row. `guesses`: draft ids as in `Drafts.ids` if some were only on the device, else None."""
    drawn = ids.tolist()
    if len(drawn) == len(rows):
        tokens = {row.row: [token_id] for row, token_id in zip(rows, drawn, strict=True)}
    else:
        guessed = [] if guesses is None else guesses.tolist()
        tokens = {
            row.row: accepted_ids(
                drawn[start:stop], guessed[start + 1 : stop] if row.guessed_on_device else row.draft_ids
            )
            for row, start, stop in zip(rows, *spans, strict=True)
        }
    sampling = batch.sampling_rows
    gained = [tokens[row.row] for row in sampling]
    entries: list[list[TokenLogprobs] | None] = []
    if logprobs is not None:
        by_row = logprobs.by_row()
        entries = [
            found if (found := by_row.get(row.row)) is None else found[: len(ids)]
            for row, ids in zip(sampling, gained, strict=True)
        ]
    vectors = {} if pooled is None else pooled.by_row()
    return StepResult(gained, entries, [vectors[row.row] for row in batch.pooling_rows] if vectors else ())
