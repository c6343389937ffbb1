"""Rounds: a guess more for each row that wants one, all on the device. What a round reads and writes lies at fixed addresses, so
that it can be captured and replayed; nothing of it hangs on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.batch import ScheduledRow
from runtime.runner.step_inputs import Inputs
from runtime.sample.sampler import Sampler


class ProposalGraphs(Protocol):
    def replay(self, num_rows: int) -> bool:
        """Enqueue a round as it was captured for so many rows, or more; False where it was not."""
        ...


class NoProposalGraphs:
    def replay(self, num_rows: int) -> bool:
        return False


class Round:
    """A kind of round. `compute`: enqueues one for the first so many that want guesses; `graphs`: where it was captured."""

    def __init__(self, compute: Callable[[int], None]) -> None:
        self.compute = compute
        self.graphs: ProposalGraphs = NoProposalGraphs()

    def enqueue(self, num_rows: int) -> None:
        if not self.graphs.replay(num_rows):
            self.compute(num_rows)


class Wanting:
    """The rows that want guesses behind a step, those first that want most. `number` [1]: of the round, as long as it lasts."""

    def __init__(self, inputs: Inputs, sampler: Sampler) -> None:
        self._inputs = inputs
        self._sampler = sampler
        max_num_seqs, device = len(inputs.last_ids), inputs.last_ids.device
        self._rows = torch.zeros((2, max_num_seqs), dtype=torch.int64, device=device)  # and how many guesses each wants
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, rows: Sequence[ScheduledRow]) -> list[int]:
        """How many of `rows`, whose step has been sampled, want a guess in each round."""
        wanting = sorted((row for row in rows if row.num_proposed), key=lambda row: -row.num_proposed)
        if not wanting:
            return []
        counts = [row.num_proposed for row in wanting]
        self._rows[1].zero_()
        self._rows[:, : len(wanting)] = index_on(self._rows.device, [[row.row for row in wanting], counts])
        self._ids[: len(wanting)] = self._inputs.last_ids[self._rows[0, : len(wanting)]]
        self.number.zero_()
        return [sum(count > nth for count in counts) for nth in range(counts[0])]

    def ids(self, num_rows: int) -> Tensor:
        """What the first `num_rows` were last guessed, or sampled, [num_rows] int64."""
        return self._ids[:num_rows]

    def rows(self, num_rows: int) -> Tensor:
        """The first `num_rows`, [num_rows] int64, -1 for those that want no guess in this round."""
        rows, counts = self._rows[:, :num_rows]
        return torch.where(self.number < counts, rows, -1)

    def draw(self, rows: Tensor, logits: Tensor, positions: Tensor) -> None:
        """A guess for each of `rows`, of logits [num_rows, V], which will stand at positions [num_rows] int64, by the row's own
        settings and noise; and the round is over."""
        ids = self._sampler.guessing().draw(logits, rows.to(torch.int32), positions)
        self._ids[: len(rows)] = ids
        self._inputs.put_drafts(rows, self.number, ids)
        self.number += 1
