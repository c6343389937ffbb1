"""Turns of pipeline stages: distributes decodes over the steps in flight. Each stage computes one of these steps at a time."""

from __future__ import annotations

from runtime.feature import Feature, Scheduling


class StageTurns(Feature):
    """Scheduling feature that distributes decodes over the steps in flight, one in each of `num_stages` stages.

    A step contains decodes whose last ids are known, or will be when the step begins. If there are none, it contains those that
    decoded longest ago, and the first stage waits for their ids."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._num_steps = 0  # number of scheduled steps
        self._is_lifted = False

    def connect(self, scheduler: Scheduling) -> None:
        self._scheduler = scheduler

    def share(self, wanted: list[int]) -> None:
        if self._is_lifted:
            self._is_lifted = False
            return
        self._num_steps += 1
        decodes = [
            (index, sequence)
            for index, (sequence, num_wanted) in enumerate(zip(self._scheduler.running, wanted, strict=True))
            if num_wanted == 1 or (num_wanted and sequence.rewound_to >= 0)
        ]
        decodes.sort(key=lambda one: one[1].last_step)
        part, last = -(-len(decodes) // self._num_stages), self._num_steps - self._num_stages
        could = [one for one in decodes if not one[1].num_in_flight or one[1].last_step <= last]
        turns = could or [one for one in decodes if one[1].num_in_flight < 2]
        has_turn = {index for index, _ in turns[:part]}
        for index, sequence in decodes:
            if index in has_turn:
                sequence.last_step = self._num_steps
            else:
                wanted[index] = 0

    def relaxes(self) -> bool:
        """Disable the limit for the next step if no sampled ids are in flight. Return True if it was disabled."""
        self._is_lifted = not any(sequence.num_in_flight for sequence in self._scheduler.running)
        return self._is_lifted
