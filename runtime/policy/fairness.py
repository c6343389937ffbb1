"""Scheduling policies: the order in which requests run.

`order` is a sort key that never changes: running sequences are served by ascending key, and preempted from the other end. Keys are
unique, so the first sequence can always progress. The choice of the next waiting sequence and of the next prompt chunk may also
depend on how many tokens each caller has used.

`Fair` is a virtual token counter ("Fairness in Serving Large Language Models", Sheng et al., OSDI 2024): tokens of each caller
are counted, and the caller with the lowest count is next. A newly waiting caller starts at the current minimum, so idle callers
accumulate no credit. While no request waits, nothing is counted. There are two differences to the paper. Prompt tokens are
counted chunk by chunk, so a long prompt delays others by one step at most. Tokens are not counted again after a preemption."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Protocol

from runtime.sequence import Sequence

MAX_COUNTERS = 4096  # callers; beyond, idle callers are forgotten
OUTPUT_COST = 2.0  # of a generated token, in prompt tokens: as in the paper


class Policy(Protocol):
    """Order of requests. The scheduler calls it with lists that are sorted by `order`."""

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """Return the sort key of `sequence`. Sequences with smaller keys are served first and preempted last."""
        ...

    def waits(self, sequence: Sequence) -> None:
        """Record that `sequence`, which has arrived or was preempted, will be added to the waiting list."""
        ...

    def starts(self, sequence: Sequence) -> None:
        """Record that the waiting `sequence` starts to run."""
        ...

    def ends(self, sequence: Sequence) -> None:
        """Record that the running or waiting `sequence` ends."""
        ...

    def computes(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that a step computes `num_tokens` tokens of the sequence's prompt."""
        ...

    def next_waiting(self, waiting: Several[Sequence]) -> int:
        """Return the index of the sequence in `waiting` that starts next. `waiting` is not empty."""
        ...

    def next_prompt(self, prompts: Several[Sequence]) -> int:
        """Return the index of the sequence in `prompts` whose prompt continues first. `prompts` contains running sequences
        whose prompts are partly computed, at least one."""
        ...

    def overtakes(self, waiting: Sequence, prompt: Sequence) -> bool:
        """Return True if `waiting` should start before the prompt of the running sequence `prompt` continues."""
        ...


class FirstCome:
    """Policy that serves sequences in order of arrival."""

    def order(self, sequence: Sequence) -> tuple[int, int]:
        return 0, sequence.number

    def waits(self, sequence: Sequence) -> None:
        pass

    def starts(self, sequence: Sequence) -> None:
        pass

    def ends(self, sequence: Sequence) -> None:
        pass

    def computes(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def next_waiting(self, waiting: Several[Sequence]) -> int:
        return 0

    def next_prompt(self, prompts: Several[Sequence]) -> int:
        return 0

    def overtakes(self, waiting: Sequence, prompt: Sequence) -> bool:
        return False


class Priority(FirstCome):
    """Policy that serves sequences by ascending priority value, then in order of arrival."""

    def order(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.request.priority, sequence.number


class Fair(FirstCome):
    """Policy that gives callers equal shares of tokens, and serves each caller's requests in order of arrival."""

    def __init__(self) -> None:
        self._counters: dict[bytes | None, float] = {}  # by caller; empty while no sequence waits
        self._waiting: dict[bytes | None, list[int]] = {}  # by caller: sorted sequence numbers, never an empty list
        self._started: dict[int, Sequence] = {}  # running sequences by number
        self._counted: dict[int, int] = {}  # by number: counted output tokens of running sequences

    def waits(self, sequence: Sequence) -> None:
        self._stop(sequence)
        caller = sequence.request.caller
        if not self._waiting:
            self._counters.clear()
            self._counted.update((number, one.num_output_tokens) for number, one in self._started.items())
        elif caller not in self._waiting:
            self._count_outputs()
            least = min(self._counters.get(other, 0.0) for other in self._waiting)
            self._counters[caller] = max(self._counters.get(caller, 0.0), least)
        insort(self._waiting.setdefault(caller, []), sequence.number)
        if len(self._counters) > MAX_COUNTERS:
            there = self._waiting.keys() | {one.request.caller for one in self._started.values()}
            self._counters = {caller: count for caller, count in self._counters.items() if caller in there}

    def starts(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        self._started[sequence.number] = sequence
        self._counted[sequence.number] = sequence.num_output_tokens

    def ends(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self._leave_queue(sequence)

    def computes(self, sequence: Sequence, num_tokens: int) -> None:
        if self._waiting and not sequence.is_resumed:
            caller = sequence.request.caller
            self._counters[caller] = self._counters.get(caller, 0.0) + num_tokens

    def next_waiting(self, waiting: Several[Sequence]) -> int:
        if len(self._waiting) == 1:
            return 0
        self._count_outputs()
        counters = self._counters
        number = min((counters.get(caller, 0.0), numbers[0]) for caller, numbers in self._waiting.items())[1]
        return bisect_left(waiting, number, key=lambda sequence: sequence.number)

    def next_prompt(self, prompts: Several[Sequence]) -> int:
        if len(prompts) == 1 or not self._waiting:
            return 0
        counters = self._counters
        return min(range(len(prompts)), key=lambda i: (counters.get(prompts[i].request.caller, 0.0), prompts[i].number))

    def overtakes(self, waiting: Sequence, prompt: Sequence) -> bool:
        counters = self._counters
        return counters.get(waiting.request.caller, 0.0) < counters.get(prompt.request.caller, 0.0)

    def _count_outputs(self) -> None:
        for sequence in self._started.values():
            self._count_output(sequence)

    def _count_output(self, sequence: Sequence) -> None:
        gained = sequence.num_output_tokens - self._counted[sequence.number]
        if gained:
            caller = sequence.request.caller
            self._counters[caller] = self._counters.get(caller, 0.0) + OUTPUT_COST * gained
            self._counted[sequence.number] += gained

    def _stop(self, sequence: Sequence) -> None:
        if self._started.pop(sequence.number, None) is not None:
            if self._waiting:
                self._count_output(sequence)
            del self._counted[sequence.number]

    def _leave_queue(self, sequence: Sequence) -> None:
        numbers = self._waiting.get(sequence.request.caller)
        if numbers is None:
            return
        index = bisect_left(numbers, sequence.number)
        if index < len(numbers) and numbers[index] == sequence.number:
            del numbers[index]
            if not numbers:
                del self._waiting[sequence.request.caller]


POLICIES: dict[str, Callable[[], Policy]] = {"fair": Fair, "fcfs": FirstCome, "priority": Priority}
