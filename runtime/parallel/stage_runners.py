"""StageRunners: combines the runners of all stages of a model in one runner.

A step is launched on all stages at once. Only the last stage samples; for the others, the step computes hidden states only. The
other stages receive sampled ids from the last stage. A step's rows determine which ids they receive before the step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from runtime.api import SamplingParams
from runtime.batch import RowBinding, ScheduledBatch, ScheduledRow
from runtime.fault import Fault
from runtime.parallel.runners import EveryEvent, blame
from runtime.parallel.stages import Draws, TakesTurns, Turn
from runtime.step import ForwardOutput, GpuEvent, HostPages, RowMasks, Runner, Step

L = TypeVar("L")

_NOTHING = SamplingParams(max_tokens=1, temperature=0.0)


class StageRunners:
    def __init__(
        self, runners: Sequence[Runner], stages: Sequence[Sequence[TakesTurns]], depth: int, end: Callable[[], None]
    ) -> None:
        """Create the runner. `stages`: the ranks of each stage. `depth`: maximum number of steps in flight. `end`: function
        that fails all waits for other stages, called if a stage could not launch a step."""
        self._runners, self._stages = runners, stages
        self._depth = depth
        self._end = end
        self._num_draws = 0
        self._unknown: deque[tuple[int, Draws]] = deque()  # numbers and samplings that other stages have not received
        self._last_draws: dict[int, int] = {}  # by row: number of the sampling that its next step continues

    def encode(self, batch: ScheduledBatch) -> Sequence[asyncio.Future[None]]:
        return self._runners[0].encode(batch)

    def move_blocks(self, block_ids: Sequence[int], pages: HostPages, *, to_host: bool) -> NoReturn:
        raise NotImplementedError("EnginePlan refuses tiers of the KV cache for a model in several stages")

    def launch(self, batch: ScheduledBatch) -> Step:
        early = self._launched_early(batch)
        turn = Turn(batch.num_tokens, draws=self._draws(batch))
        return self._behind(early, self._on_last(turn, lambda last: last.launch(batch)))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        early = self._launched_early(batch)
        return self._output(early, self._on_last(Turn(batch.num_tokens), lambda last: last.launch_forward(batch)))

    def capture_next(self, *, idle: bool) -> None:
        return None

    def fault(self, error: BaseException) -> Fault:
        return self._runners[-1].fault(error)

    async def close(self) -> bool:
        self._end()
        return all(await asyncio.gather(*(runner.close() for runner in self._runners)))

    # --- stages before the last -----------------------------------------------------------------------------------

    def _launched_early(self, batch: ScheduledBatch) -> list[GpuEvent]:
        chunks, known, events = without_samples(batch), self._to_know(batch), []
        for number in range(len(self._runners) - 1):
            turn = Turn(batch.num_tokens, tuple(each.rows for each in known if number in each.takers))
            events.append(self._launched(number, turn, lambda runner: runner.launch(chunks)).done)
        return events

    def _to_know(self, batch: ScheduledBatch) -> list[Draws]:
        """Return the `Draws` that a stage must receive before a step: those whose ids its rows continue, and all older ones."""
        upto = max((self._last_draws.get(row.row, 0) for row in batch.rows), default=0)
        upto, known = max(upto, self._num_draws - self._depth), []
        while self._unknown and self._unknown[0][0] <= upto:
            known.append(self._unknown.popleft()[1])
        return known

    # --- the last stage -------------------------------------------------------------------------------------------

    def _on_last(self, turn: Turn, launch: Callable[[Runner], L]) -> L:
        return self._launched(len(self._runners) - 1, turn, launch)

    def _draws(self, batch: ScheduledBatch) -> Draws | None:
        """Return the `Draws` of a step, or None if the step does not sample. Its sampled ids are in flight from now on."""
        drawn = [row.row for row in batch.rows if row.samples or row.draft_ids]
        if not drawn:
            return None
        rows = tuple(row.row for row in batch.rows if row.draft_ids)
        draws = Draws(rows, tuple(range(len(self._runners) - 1)) if rows else (0,))
        self._num_draws += 1
        self._unknown.append((self._num_draws, draws))
        self._last_draws.update(dict.fromkeys(drawn, self._num_draws))
        return draws

    def _output(self, early: Sequence[GpuEvent], output: ForwardOutput) -> ForwardOutput:
        def sample(some: ScheduledBatch, masks: RowMasks) -> Step:
            turn = Turn(draws=self._draws(some))
            return self._behind(early, self._on_last(turn, lambda last: output.sample(some, masks)))

        def snapshot_logits(some: ScheduledBatch) -> ForwardOutput:
            return self._output(early, self._on_last(Turn(), lambda last: output.snapshot_logits(some)))

        return replace(output, sample=sample, snapshot_logits=snapshot_logits)

    def _behind(self, early: Sequence[GpuEvent], step: Step) -> Step:
        return replace(step, done=EveryEvent([*early, step.done], "stage"))

    def _launched(self, number: int, turn: Turn, launch: Callable[[Runner], L]) -> L:
        for stage in self._stages[number]:
            stage.next = turn
        try:
            return launch(self._runners[number])
        except BaseException as error:
            self._end()  # other stages would wait for this one
            blame(error, "stage", number, len(self._runners))
            raise
        finally:
            for stage in self._stages[number]:
                stage.next = Turn()


def without_samples(batch: ScheduledBatch) -> ScheduledBatch:
    """Return the step of a stage that only computes hidden states."""
    return replace(batch, rows=tuple(map(_as_chunk, batch.rows)), decodes_only=False)


def _as_chunk(row: ScheduledRow) -> ScheduledRow:
    if row.draft_ids and not row.guessed_on_device and len(row.token_ids) + len(row.draft_ids) == row.num_tokens:
        row = row._replace(token_ids=(*row.token_ids, *row.draft_ids), draft_ids=())
    binding = row.binding
    if binding is not None:  # this stage samples nothing, so it needs no penalty counts
        binding = RowBinding(_NOTHING, 0, (), (), binding.num_computed, False, binding.adapter_slot, binding.rope_delta)
    return row._replace(work=None, prompt_logprobs=None, binding=binding, num_proposed=0)
