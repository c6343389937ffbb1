"""Features of scheduling: what draft tokens, adapters, media and pipeline stages add to a step, behind one interface.

The scheduler knows sequences, blocks, tokens and a budget. What else decides a step is a `Feature`, called at fixed points of
every step, and its `Claim` on a sequence, made when the sequence arrives. Most sequences have no claim and cost one truth test.
Every method has a default that changes nothing. No torch, no clock."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any, Protocol

from runtime.api import FinishReason, Metric, Request
from runtime.batch import ScheduledBatch, ScheduledRow
from runtime.kv.prefix_cache import Match

if TYPE_CHECKING:
    from runtime.kv.sequence_blocks import SequenceBlocks
    from runtime.policy.fairness import Policy
    from runtime.policy.step_policy import StepPlan
    from runtime.scheduler import SchedulerLimits
    from runtime.scheduling.sequences import Sequences
    from runtime.sequence import Sequence
    from runtime.step import Runner


class Claim:
    """A feature's concern with one sequence, from its arrival to its end."""

    __slots__ = ()
    learns = False  # whether `settled` matters for rows without ids on trial

    # --- while it waits -------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Return whether the sequence may take a row now."""
        return True

    def reuses(self, match: Match) -> int:
        """Return how many cached entries of `match` the sequence may reuse, at most `match.num_entries`."""
        return match.num_entries

    def started(self) -> None:
        """Note that the sequence takes a row in the step being decided."""

    # --- while it runs --------------------------------------------------------------------------------------------

    def reach(self, num_tokens: int, room: int) -> int:
        """Return how many of the sequence's next `num_tokens` a step may compute, 0 for none. More than `num_tokens`, up to
        `room`, where a span may not be cut."""
        return num_tokens

    def extra_ids(self, num_tokens: int) -> tuple[int, ...]:
        """Return ids to compute on trial behind the sequence's next `num_tokens`; there are blocks for them."""
        return ()

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        """Return `row`, which the step will hold, with the feature's part. The sequence's counts are those before the step, and
        the row gets its new blocks afterwards."""
        return row

    def registered(self, first_entry: int) -> None:
        """Note that the sequence's entries from `first_entry` on were offered to the prefix cache."""

    def settled(self, num_extra: int, token_ids: Several[int]) -> None:
        """Note that a step that computed `num_extra` ids on trial brought `token_ids`. They are not the sequence's yet."""

    def rewinds(self) -> bool:
        """Take the sequence back to where its next step has to begin, after ids on trial were wrong. False: it is not the
        feature's to do."""
        return False

    # --- its ends -------------------------------------------------------------------------------------------------

    def suspended(self) -> None:
        """Note that the sequence gives its row and blocks back: it ended, or starts over."""

    def finished(self) -> None:
        """Note that the sequence ended, running or waiting."""


class Scheduling(Protocol):
    """Parts of the scheduler that features may use."""

    limits: SchedulerLimits
    blocks: SequenceBlocks
    policy: Policy
    sequences: Sequences
    waiting: list[Sequence]
    running: list[Sequence]


class Door(Protocol):
    """Parts of the engine that features may use, for work beside steps."""

    @property
    def runner(self) -> Runner: ...

    def wake(self) -> None:
        """Note that there may be something to schedule."""
        ...

    def end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        """End sequence `number`, if it has not ended; its reader gets `error`."""
        ...

    def lose(self, error: BaseException) -> None:
        """The device can compute no step any more."""
        ...

    def observe(self, observe: Callable[..., Any], *args: Any) -> Any:
        """Call a function that only counts or reports; an exception in it is logged and ends nothing."""
        ...


class Feature:
    """The host half of a feature: plain data in, plain data out."""

    looks_ahead = False  # whether it uses what matchers know of a sequence's next tokens

    def connect(self, scheduler: Scheduling) -> None:
        """Note the scheduler that calls this feature from now on."""

    def check(self, request: Request) -> None:
        """Raise ValueError, with a message for people, for a request that no step could serve."""

    def claim(self, sequence: Sequence) -> Claim | None:
        """Return the claim on `sequence`, which has just arrived; None where it is none of the feature's concern."""
        return None

    # --- a step, in the order of the calls ------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""

    def share(self, wanted: list[int]) -> None:
        """Set 0 in `wanted`, the tokens that each running sequence could compute, for those that are not in this step."""

    def extend(self, wanted: list[int], plan: StepPlan) -> bool:
        """Decide about ids on trial (`Claim.extra_ids`), within `plan.extra_room`; as `share` otherwise. False: there had
        better be no step before what is in flight settles."""
        return True

    @property
    def is_busy(self) -> bool:
        """True if sequences with a claim of this feature are more than plain decodes in this step."""
        return False

    def admits(self) -> None:
        """Prepare for sequences that may start in this step, before `Claim.may_start` is asked."""

    def decided(self, rows: Several[ScheduledRow]) -> None:
        """Note the rows of the step."""

    @property
    def has_work(self) -> bool:
        """True if the step must be launched even without rows."""
        return False

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return `batch`, which will be launched, with the feature's part."""
        return batch

    def relaxes(self) -> bool:
        """Lift, for the next step only, the restriction of `share` that blocks all sequences. Return False if there was
        none."""
        return False

    # --- afterwards -----------------------------------------------------------------------------------------------

    def launches(self, batch: ScheduledBatch, door: Door) -> None:
        """Start work beside the step of `batch`, which is launched next. Its completion is reported through `door`."""

    @property
    def slows_steps(self) -> bool:
        """True while work beside steps makes them longer, so that their times are not typical."""
        return False

    def record_step(self, batch: ScheduledBatch, step_s: float) -> None:
        """Learn from a step: `step_s` seconds passed between the end of the step before it, or its launch, and its own end."""

    def settled(self, batch: ScheduledBatch) -> None:
        """Record that `batch` ran and the device has done its work."""

    def forget(self, batch: ScheduledBatch) -> None:
        """Note that `batch` did not run."""

    def clear(self) -> None:
        """Forget what the device had: the model has left it. No sequence runs."""

    def close(self) -> None:
        """End what goes on beside steps. Does not wait."""

    def metrics(self) -> list[Metric]:
        return []

    def progress(self) -> str:
        """Return this feature's part of the throughput log line since the last call, or ""."""
        return ""
