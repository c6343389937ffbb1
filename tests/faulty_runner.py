"""FaultyRunner: a FakeRunner whose steps fail as they are told to, and which knows whom that may cost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence as Several
from enum import Enum

from runtime.batch import NOT_FINITE, EncoderWork, ScheduledBatch, ScheduledRow
from runtime.fault import Fault, RowFailed, host_fault
from runtime.step import ForwardOutput, MaskWords, Step
from tests.fake_runner import FakeRunner


class Fail(Enum):
    """How a launch fails, or the step behind it. NUMBERS: what its first row samples is no number."""

    LAUNCH = "launch"
    MEMORY = "memory"
    BIND = "bind"
    NUMBERS = "numbers"
    LOST = "lost"


class Lost(Exception):
    """The device is."""


class FaultyRunner(FakeRunner):
    """`next`: how the next launches fail, None for those that do not. `blamed`: sequences that may end with an error for it."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.next: deque[Fail | None] = deque()
        self.blamed: set[int] = set()
        self.num_faults = 0
        self.encoding: list[tuple[EncoderWork, asyncio.Future[None]]] = []  # what its encoders are asked, in order
        self.outputs: set[bytes] = set()  # of encoders, that the device has
        self._not_finite: int | None = None  # the sequence whose numbers are none, in the step being launched

    def launch(self, batch: ScheduledBatch) -> Step:
        self._maybe_fail(batch)
        return super().launch(batch)

    def launch_forward(self, batch: ScheduledBatch) -> ForwardOutput:
        self._maybe_fail(batch)
        return super().launch_forward(batch)

    def encode(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        self.outputs.difference_update(batch.encoder_drops)
        begun = [(work, asyncio.get_running_loop().create_future()) for work in batch.encoder_work]
        self.encoding += begun
        return [future for _, future in begun]

    def complete_encoder(self, *, fails: bool = False) -> bool:
        """What the encoders have been at for longest ends well, or costs the sequence that it is for; False where there is none."""
        left = [(work, future) for work, future in self.encoding if not future.done()]
        for work, future in left[:1]:
            if fails:
                self.num_faults += 1
                self.blamed.add(work.number)
                future.set_exception(RowFailed(work.number))
            else:
                self.outputs.add(work.key)
                future.set_result(None)
        return bool(left)

    def _begin(self, batch: ScheduledBatch) -> None:
        for row in batch.rows:
            for span in row.media.spans if row.media is not None else ():
                assert span.key in self.outputs, "a step reads what no encoder has computed"
        del self.batches[len(self.sampled) :]  # a forward pass that was given up, since a step before it failed
        super()._begin(batch)

    def fail_step(self, error: Exception) -> bool:
        """The oldest step that runs ends with `error`; False where none runs."""
        for event, batch in zip(self.events, self.sampled, strict=True):
            if not event.is_done():
                self._blame(batch)
                event.complete(error)
                return True
        return False

    def complete_step(self) -> bool:
        """The oldest step that runs ends well; False where none runs."""
        for event in self.events:
            if not event.is_done():
                event.complete()
                return True
        return False

    def fault(self, error: BaseException) -> Fault:
        return Fault.LOST if isinstance(error, Lost) else host_fault(error)

    def accept(self, row: ScheduledRow, masks: Several[MaskWords] | None) -> list[int]:
        return [NOT_FINITE] if row.number == self._not_finite else super().accept(row, masks)

    def _maybe_fail(self, batch: ScheduledBatch) -> None:
        self._not_finite = None
        how = self.next.popleft() if self.next else None
        if how is None or not batch.rows:
            return
        self.num_faults += 1
        if how is Fail.BIND:
            bound = next((row for row in batch.rows if row.binding is not None), None)
            if bound is not None:
                self.blamed.add(bound.number)
                raise RowFailed(bound.number)
        elif how is Fail.NUMBERS:
            self._not_finite = batch.rows[0].number
            self.blamed.add(batch.rows[0].number)
        elif how is Fail.MEMORY:
            self.blamed.add(max(batch.rows, key=lambda row: row.num_tokens).number)
            raise MemoryError
        else:
            self._blame(batch)
            raise Lost if how is Fail.LOST else RuntimeError

    def _blame(self, batch: ScheduledBatch) -> None:
        self.num_faults += 1
        self.blamed |= {row.number for row in batch.rows}
