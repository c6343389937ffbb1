"""Features of scheduling: what draft tokens, adapters, media and pipeline stages add to a step, behind one interface.

The scheduler handles sequences, blocks, tokens and a budget. Everything else that affects a step is a `Feature`, called at
fixed points of every step. A feature makes a `Claim` on a sequence when the sequence arrives. Most sequences have no claim
and cost one truth test. Every method has a default that changes nothing. No torch, no clock."""

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
    """A feature's hooks for one sequence, called from its arrival to its end."""

    __slots__ = ()
    learns = False  # whether `settled` must be called for rows without draft tokens

    # --- while it waits -------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Return whether the sequence may take a row now."""
        return True

    def reuses(self, match: Match) -> int:
        """Return how many cached entries of `match` the sequence may reuse, at most `match.num_entries`."""
        return match.num_entries

    def started(self) -> None:
        """Called when the sequence gets a row in the step that is being scheduled."""

    # --- while it runs --------------------------------------------------------------------------------------------

    def reach(self, num_tokens: int, room: int) -> int:
        """Return how many of the sequence's next `num_tokens` the step may compute; 0 for none. If a span must not be split,
        return more than `num_tokens`, but at most `room`."""
        return num_tokens

    def extra_ids(self, num_tokens: int) -> tuple[int, ...]:
        """Return draft tokens to compute after the sequence's next `num_tokens`. Blocks for them are available."""
        return ()

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        """Return `row`, which will be part of the step, with the feature's additions. The sequence's counts are those before
        the step, and the row gets its new blocks afterwards."""
        return row

    def registered(self, first_entry: int) -> None:
        """Called when the sequence's KV entries from `first_entry` on were offered to the prefix cache."""

    def settled(self, num_extra: int, token_ids: Several[int]) -> None:
        """Called when a step with `num_extra` draft tokens has yielded `token_ids`, before they are added to the sequence."""

    def rewinds(self) -> bool:
        """Reset the sequence to where its next step must begin after rejected draft tokens. Return False if this feature
        does not do it."""
        return False

    # --- its ends -------------------------------------------------------------------------------------------------

    def suspended(self) -> None:
        """Called when the sequence loses its row and blocks, because it ended or was preempted."""

    def finished(self) -> None:
        """Called when the sequence ends, whether it is running or waiting."""


class Scheduling(Protocol):
    """The scheduler's attributes that features may use."""

    limits: SchedulerLimits
    blocks: SequenceBlocks
    policy: Policy
    sequences: Sequences
    waiting: list[Sequence]
    running: list[Sequence]


class Door(Protocol):
    """The engine's methods that features may use for work in parallel with steps."""

    @property
    def runner(self) -> Runner: ...

    def wake(self) -> None:
        """Make the engine's loop check for work."""
        ...

    def end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        """End sequence `number`, if it has not ended. Its stream receives `reason` and `error`."""
        ...

    def lose(self, error: BaseException) -> None:
        """Report that the device failed and cannot compute further steps."""
        ...

    def observe(self, observe: Callable[..., Any], *args: Any) -> Any:
        """Call a function that only counts or reports. An exception in it is logged and ends no request."""
        ...


class Feature:
    """The host part of a scheduling feature. It receives and returns plain data only."""

    looks_ahead = False  # whether it uses the next tokens that matchers force

    def connect(self, scheduler: Scheduling) -> None:
        """Store the scheduler that calls this feature from now on."""

    def check(self, request: Request) -> None:
        """Raise ValueError, with a message for users, if no step could ever serve `request`."""

    def claim(self, sequence: Sequence) -> Claim | None:
        """Return the claim on `sequence`, which has just arrived, or None if the feature does not apply to it."""
        return None

    # --- a step, in the order of the calls ------------------------------------------------------------------------

    def begin(self) -> None:
        """Called at the start of scheduling a step."""

    def share(self, wanted: list[int]) -> None:
        """Set entries of `wanted`, the number of tokens that each running sequence could compute, to 0 to exclude them from
        this step."""

    def extend(self, wanted: list[int], plan: StepPlan) -> bool:
        """Choose draft tokens (`Claim.extra_ids`) within `plan.extra_room`, and change `wanted` as `share` does. Return
        False if no step should be launched before those in flight have settled."""
        return True

    @property
    def is_busy(self) -> bool:
        """True if sequences with a claim of this feature are more than plain decodes in this step."""
        return False

    def admits(self) -> None:
        """Prepare for sequences that may start in this step. Called before `Claim.may_start`."""

    def decided(self, rows: Several[ScheduledRow]) -> None:
        """Called with all rows of the step after scheduling."""

    @property
    def has_work(self) -> bool:
        """True if the step must be launched even without rows."""
        return False

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return `batch`, which will be launched, with the feature's additions."""
        return batch

    def relaxes(self) -> bool:
        """Lift, for the next step only, the restriction by `share` that excluded all sequences. Return False if there was
        none."""
        return False

    # --- afterwards -----------------------------------------------------------------------------------------------

    def launches(self, batch: ScheduledBatch, door: Door) -> None:
        """Start work in parallel with the step of `batch`, which is launched next. `door` reports its completion."""

    @property
    def slows_steps(self) -> bool:
        """True while parallel work makes steps slower, so that their times are not typical."""
        return False

    def record_step(self, batch: ScheduledBatch, step_s: float) -> None:
        """Record the time of a step: `step_s` seconds from the end of the previous step, or from its launch, to its own end."""

    def settled(self, batch: ScheduledBatch) -> None:
        """Called when `batch` has run and the device has done its work."""

    def forget(self, batch: ScheduledBatch) -> None:
        """Called when `batch` did not run."""

    def clear(self) -> None:
        """Discard the state of the device, since the model was unloaded. No sequence is running."""

    def close(self) -> None:
        """Cancel work that runs in parallel with steps. Returns without waiting for it."""

    def metrics(self) -> list[Metric]:
        return []

    def progress(self) -> str:
        """Return this feature's part of the throughput log line since the last call, or ""."""
        return ""
