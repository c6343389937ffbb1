"""Drafter: makes drafts on the device after each step, in rounds of one draft token per participating row.

Drafts stay on the device, in `Inputs.draft_ids`, and the next step reads them there. All buffers of a round have fixed
addresses, so rounds can be captured and replayed; no round depends on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.batch import RowBinding, ScheduledRow
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.sample.sampler import Sampler


class Drafter:
    """Makes no drafts: the base of those that do, and the drafter where drafts, if any, come from the host.

    `rounds`: kinds of rounds, which may be captured. `follows`: whether it has a part of its own in steps."""

    rounds: Sequence[Round] = ()
    follows = False

    def bind(self, row: int, binding: RowBinding) -> None:
        """Note that a new sequence has taken `row`. Called before the first step with it is enqueued."""

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """Prepare for a step of `rows`, all of them bound, that it follows."""

    def keep(self, hidden: Any) -> Any:
        """Return what it will read of the model's hidden states, as before logits are computed of them. Enqueues a copy at most,
        in steps that it does not follow, too."""
        return None

    def follow(self, step: StepInputs, kept: Any) -> None:
        """Enqueue its own part of a step, which has been sampled, given what it kept. It changes nothing of the step, and uploads
        nothing."""

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        """Enqueue the drafts of `rows`, whose step has been sampled."""


class ProposalGraphs(Protocol):
    def replay(self, num_rows: int) -> bool:
        """Enqueue a round that was captured for `num_rows` or more. Return False if none was."""
        ...


class NoProposalGraphs:
    def replay(self, num_rows: int) -> bool:
        return False


class Round:
    """A kind of round. `compute`: enqueues one for the first rows that want drafts; `graphs`: captured ones."""

    def __init__(self, compute: Callable[[int], None]) -> None:
        self.compute = compute
        self.graphs: ProposalGraphs = NoProposalGraphs()

    def enqueue(self, num_rows: int) -> None:
        if not self.graphs.replay(num_rows):
            self.compute(num_rows)


class Wanting:
    """Rows that get drafts after a step, most drafts first. `number` [1]: index of the current round."""

    def __init__(self, inputs: Inputs, sampler: Sampler) -> None:
        self._inputs = inputs
        self._sampler = sampler
        max_num_seqs, device = len(inputs.last_ids), inputs.last_ids.device
        self._rows = torch.zeros((2, max_num_seqs), dtype=torch.int64, device=device)  # and how many guesses each wants
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, rows: Sequence[ScheduledRow]) -> list[int]:
        """Return the number of `rows` that get a draft token in each round. Their step has been sampled."""
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
        """Return the last draft or sampled ids of the first `num_rows`, [num_rows] int64."""
        return self._ids[:num_rows]

    def rows(self, num_rows: int) -> Tensor:
        """Return the first `num_rows`, [num_rows] int64, -1 for rows that want no draft token in this round."""
        rows, counts = self._rows[:, :num_rows]
        return torch.where(self.number < counts, rows, -1)

    def draw(self, rows: Tensor, logits: Tensor, positions: Tensor) -> None:
        """Draw a draft token for each of `rows` from logits [num_rows, V], at positions [num_rows] int64, by the row's own
        settings and noise. This ends the round."""
        ids = self._sampler.guessing().draw(logits, rows.to(torch.int32), positions)
        self._ids[: len(rows)] = ids
        self._inputs.put_drafts(rows, self.number, ids)
        self.number += 1
