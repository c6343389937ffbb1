"""StageRunners: the runners of all stages of a model as one.

A step is launched on each, at once: to all but the last it is a chunk of every row, of which nothing is wanted. Only the last one
samples; which of its draws a stage has to know before a step, the rows of that step say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from runtime.api import SamplingParams
from runtime.batch import RowBinding, ScheduledBatch, ScheduledRow
from runtime.fault import Fault
from runtime.parallel.runners import EveryEvent, blame
from runtime.parallel.stages import Draws, Line, Passage, TakesTurns, Turn
from runtime.step import ForwardOutput, GpuEvent, RowMasks, Runner, Step

L = TypeVar("L")

_NOTHING = SamplingParams(max_tokens=1, temperature=0.0)


class _Drawn(NamedTuple):
    """What sampling number `number` draws, by line."""

    number: int
    draws: tuple[Draws, ...]


class StageRunners:
    def __init__(
        self, runners: Sequence[Runner], stages: Sequence[Sequence[TakesTurns]], lines: Sequence[Line], depth: int,
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        """`stages`: by stage, those of each of `lines`. `depth`: steps that are under way at most. `end`: has whoever waits for
        a stage fail, which will compute nothing any more."""
        self._runners, self._stages, self._lines = runners, stages, lines
        self._depth = depth
        self._end = end
        self._num_draws = 0
        self._unknown: deque[_Drawn] = deque()  # to the stages before the last
        self._last_draws: dict[int, int] = {}  # by row: the number of the sampling that its next step goes on from

    def encode(self, batch: ScheduledBatch) -> Sequence[asyncio.Future[None]]:
        return self._runners[0].encode(batch)

    def launch(self, batch: ScheduledBatch) -> Step:
        passages, early = self._launched_early(batch)
        draws = self._draws(batch)
        return self._behind(early, self._on_last(passages, draws, lambda last: last.launch(batch)))

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        passages, early = self._launched_early(batch)
        return self._output(early, self._on_last(passages, (), lambda last: last.launch_forward(batch)))

    def capture_next(self, *, idle: bool) -> None:
        return None

    def fault(self, error: BaseException) -> Fault:
        return self._runners[-1].fault(error)

    async def close(self) -> bool:
        self._end()
        return all(await asyncio.gather(*(runner.close() for runner in self._runners)))

    # --- the stages before the last -------------------------------------------------------------------------------

    def _launched_early(self, batch: ScheduledBatch) -> tuple[tuple[Passage, ...], list[GpuEvent]]:
        chunks, known = without_samples(batch), self._to_know(batch)
        passages = tuple(line.passage(batch.num_tokens) for line in self._lines)
        events = []
        for number in range(len(self._runners) - 1):
            for place, stage in enumerate(self._stages[number]):
                drawn = tuple(each.draws[place] for each in known if number in each.draws[place].takers)
                stage.next = Turn(passages[place], drawn)
            events.append(self._launched(number, lambda runner: runner.launch(chunks)).done)
        return passages, events

    def _to_know(self, batch: ScheduledBatch) -> list[_Drawn]:
        """The draws that the rows of a step go on from, and all before them; and those that are old enough to be there anyway."""
        upto = max((self._last_draws.get(row.row, 0) for row in batch.rows), default=0)
        upto, known = max(upto, self._num_draws - self._depth), []
        while self._unknown and self._unknown[0].number <= upto:
            known.append(self._unknown.popleft())
        return known

    # --- the last -------------------------------------------------------------------------------------------------

    def _on_last(self, passages: tuple[Passage, ...], draws: tuple[Draws, ...], launch: Callable[[Runner], L]) -> L:
        for place, stage in enumerate(self._stages[-1]):
            passage = passages[place] if passages else None
            stage.next = Turn(passage, draws=draws[place] if draws else None)
        return self._launched(-1, launch)

    def _draws(self, batch: ScheduledBatch) -> tuple[Draws, ...]:
        """Those of a step, or of the rest of one: they are under way from here on."""
        drawn = [row.row for row in batch.rows if row.samples or row.draft_ids]
        if not drawn:
            return ()
        rows = tuple(row.row for row in batch.rows if row.draft_ids)
        takers = range(len(self._runners) - 1) if rows else (0,)
        draws = tuple(line.draws(rows, takers) for line in self._lines)
        self._num_draws += 1
        self._unknown.append(_Drawn(self._num_draws, draws))
        self._last_draws.update(dict.fromkeys(drawn, self._num_draws))
        return draws

    def _output(self, early: Sequence[GpuEvent], output: ForwardOutput) -> ForwardOutput:
        def sample(some: ScheduledBatch, masks: RowMasks) -> Step:
            draws = self._draws(some)
            return self._behind(early, self._on_last((), draws, lambda last: output.sample(some, masks)))

        def snapshot_logits(some: ScheduledBatch) -> ForwardOutput:
            return self._output(early, self._on_last((), (), lambda last: output.snapshot_logits(some)))

        return replace(output, sample=sample, snapshot_logits=snapshot_logits)

    def _behind(self, early: Sequence[GpuEvent], step: Step) -> Step:
        return replace(step, done=EveryEvent([*early, step.done], "stage"))

    def _launched(self, number: int, launch: Callable[[Runner], L]) -> L:
        try:
            return launch(self._runners[number])
        except BaseException as error:
            self._end()  # other stages would wait for this one
            blame(error, "stage", number % len(self._runners), len(self._runners))
            raise
        finally:
            for stage in self._stages[number]:
                stage.next = Turn()


def without_samples(batch: ScheduledBatch) -> ScheduledBatch:
    """The step as it is for stages of which nothing is wanted but hidden states."""
    return replace(batch, rows=tuple(map(_as_chunk, batch.rows)), decodes_only=False)


def _as_chunk(row: ScheduledRow) -> ScheduledRow:
    if row.draft_ids and not row.guessed_on_device and len(row.token_ids) + len(row.draft_ids) == row.num_tokens:
        row = row._replace(token_ids=(*row.token_ids, *row.draft_ids), draft_ids=())
    binding = row.binding
    if binding is not None:  # nobody samples here, so nothing is to be counted
        binding = RowBinding(_NOTHING, 0, (), (), binding.num_computed, False, binding.adapter_slot, binding.rope_delta)
    return row._replace(work=None, prompt_logprobs=None, binding=binding, num_proposed=0)
