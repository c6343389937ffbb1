"""Scheduling policies: one sort key each. The smallest key runs first and is preempted last; keys are unique, so the first
in line can always make progress."""

from __future__ import annotations

from collections.abc import Callable

from runtime.sequence import Sequence

Policy = Callable[[Sequence], tuple[int, int]]


def fcfs(sequence: Sequence) -> tuple[int, int]:
    return 0, sequence.number


def priority(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.number


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}
