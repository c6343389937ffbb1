"""Scheduling features: interface through which draft tokens, adapters, media and pipeline stages change steps.

The scheduler handles sequences, blocks, tokens and a budget. Everything else that affects a step is a `Feature`, whose methods
are called at fixed points of every step. A feature that applies to a sequence attaches a `Claim` (hooks) to it. Most sequences
have no claims and cost one truth test. By default, methods change nothing. Uses neither torch nor a clock."""

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
    """Hooks of a feature for one sequence. They are called from the sequence's arrival to its end."""

    __slots__ = ()
    learns = False  # whether `settled` must be called for rows without draft tokens

    # --- while it waits -------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Return True if the waiting sequence may start now."""
        return True

    def reuses(self, match: Match) -> int:
        """Return how many cached KV entries of `match` the sequence may reuse: at most `match.num_entries`."""
        return match.num_entries

    def started(self) -> None:
        """Update the feature's state: the sequence gets a row in the step that is being scheduled."""

    # --- while it runs --------------------------------------------------------------------------------------------

    def reach(self, num_tokens: int, room: int) -> int:
        """Return how many of the sequence's next `num_tokens` tokens the step may compute, or 0. If more tokens must be
        computed together in one step, return their number, but at most `room`."""
        return num_tokens

    def extra_ids(self, num_tokens: int) -> tuple[int, ...]:
        """Return draft tokens to compute after the sequence's next `num_tokens` tokens. Blocks for them are available."""
        return ()

    def scheduled(self, row: ScheduledRow) -> ScheduledRow:
        """Return `row`, which is being added to the step, with the feature's changes. Called before the sequence's counts
        advance and before the row gets its new blocks."""
        return row

    def registered(self, first_entry: int) -> None:
        """Update the feature's state: KV entries from number `first_entry` on were offered to the prefix cache."""

    def settled(self, num_extra: int, token_ids: Several[int]) -> None:
        """Record that a step with `num_extra` draft tokens produced `token_ids`, which are not yet added to the sequence."""

    def rewinds(self) -> bool:
        """Set the sequence's counts to where its next step must begin after rejected draft tokens. Return False, without a
        change, if this feature leaves that to the scheduler."""
        return False

    # --- its ends -------------------------------------------------------------------------------------------------

    def suspended(self) -> None:
        """Release state that depends on the sequence's row and blocks. It loses them because it ended or was preempted."""

    def finished(self) -> None:
        """Release the feature's state of the sequence, which ends in the running or the waiting queue."""


class Scheduling(Protocol):
    """The scheduler's attributes that features may use."""

    limits: SchedulerLimits
    blocks: SequenceBlocks
    policy: Policy
    sequences: Sequences
    waiting: list[Sequence]
    running: list[Sequence]


class Door(Protocol):
    """The engine's methods that features may call for work that runs in parallel with steps."""

    @property
    def runner(self) -> Runner: ...

    def wake(self) -> None:
        """Make the engine's loop check for work."""
        ...

    def end(self, number: int, reason: FinishReason, error: str | None = None) -> None:
        """End sequence `number` unless it has already ended. Its stream receives `reason` and `error`."""
        ...

    def lose(self, error: BaseException) -> None:
        """Report that the device failed and cannot compute further steps."""
        ...

    def observe(self, observe: Callable[..., Any], *args: Any) -> Any:
        """Return `observe(*args)`, which only counts or reports. If it raises, log the exception and return None."""
        ...


class Feature:
    """Host part of a scheduling feature. Its methods take and return plain data."""

    looks_ahead = False  # whether it uses the next tokens that matchers force

    def connect(self, scheduler: Scheduling) -> None:
        """Store `scheduler`, which calls this feature from now on."""

    def check(self, request: Request) -> None:
        """Raise ValueError, with a message for users, if no step can ever serve `request`."""

    def claim(self, sequence: Sequence) -> Claim | None:
        """Return the hooks for `sequence`, which has just arrived, or None if the feature does not apply to it."""
        return None

    # --- a step, in the order of the calls ------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare the feature for a step. Called when scheduling of the step begins."""

    def share(self, wanted: list[int]) -> None:
        """Exclude running sequences from this step by setting their entries of `wanted` to 0. `wanted[i]`: number of tokens
        that running sequence `i` could compute."""

    def extend(self, wanted: list[int], plan: StepPlan) -> bool:
        """Choose draft tokens (`Claim.extra_ids`), at most `plan.extra_room`, and change `wanted` as `share` does. Return False
        if no step may be launched until the results of the steps in flight are on the host."""
        return True

    @property
    def is_busy(self) -> bool:
        """True if a running sequence with a claim of this feature needs more than a plain decode in this step."""
        return False

    def admits(self) -> None:
        """Prepare for the start of waiting sequences in this step. Called before `Claim.may_start`."""

    def decided(self, rows: Several[ScheduledRow]) -> None:
        """Record all `rows` of a step that has been scheduled."""

    @property
    def has_work(self) -> bool:
        """True if the step must be launched even without rows."""
        return False

    def complete(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return `batch`, which is launched next, with the feature's additions."""
        return batch

    def relaxes(self) -> bool:
        """Disable the exclusions by `share` for the next step, if they excluded all sequences. Return False if there were no
        exclusions."""
        return False

    # --- afterwards -----------------------------------------------------------------------------------------------

    def launches(self, batch: ScheduledBatch, door: Door) -> None:
        """Start work that runs in parallel with the step of `batch`, which is launched next. Report its end through `door`."""

    @property
    def slows_steps(self) -> bool:
        """True while parallel work makes steps slower. Their times are then not used as measurements."""
        return False

    def record_step(self, batch: ScheduledBatch, step_s: float) -> None:
        """Record that the step of `batch` ended `step_s` seconds after the previous step."""

    def settled(self, batch: ScheduledBatch) -> None:
        """Update the feature's state: `batch` has run on the device and its results are on the host."""

    def forget(self, batch: ScheduledBatch) -> None:
        """Undo the feature's state changes for `batch`, which did not run."""

    def clear(self) -> None:
        """Discard all state about the device's contents, because the model was unloaded. No sequence is running."""

    def close(self) -> None:
        """Cancel work that runs in parallel with steps. Returns without waiting for it."""

    def metrics(self) -> list[Metric]:
        return []

    def progress(self) -> str:
        """Return this feature's text for the throughput log line, about the time since the last call, or ""."""
        return ""
