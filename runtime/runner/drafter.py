"""Drafter: makes draft tokens on the device after each step, in rounds of one draft token per participating row.

Draft tokens stay on the device, in `Inputs.draft_ids`, and the next step reads them there. All buffers of a round have fixed
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
    """Drafter that makes no draft tokens: the base class, and the drafter if they come from the host or are disabled.

    `rounds`: kinds of rounds, which may be captured. `follows`: whether its own layers compute every step."""

    rounds: Sequence[Round] = ()
    follows = False

    def bind(self, row: int, binding: RowBinding) -> None:
        """Called when a new sequence gets `row`, before its first step is enqueued."""

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """Prepare to follow a step of `rows`, all of which are bound."""

    def keep(self, hidden: Any) -> Any:
        """Return the parts of `hidden`, the model's hidden states, that `follow` needs. At most enqueues a copy. Called
        before logits are computed, also in steps that the drafter does not follow."""
        return None

    def follow(self, step: StepInputs, kept: Any) -> None:
        """Enqueue the drafter's own computation of a step, after sampling, with the result of `keep`. Must not change the
        step or upload."""

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        """Enqueue the rounds that make draft tokens for `rows`, after their step has been sampled."""


class ProposalGraphs(Protocol):
    def replay(self, num_rows: int) -> bool:
        """Enqueue a round that was captured for `num_rows` or more. Return False if none was."""
        ...


class NoProposalGraphs:
    def replay(self, num_rows: int) -> bool:
        return False


class Round:
    """One kind of draft round. `compute`: enqueues a round for the first rows of `Wanting`. `graphs`: captured rounds."""

    def __init__(self, compute: Callable[[int], None]) -> None:
        self.compute = compute
        self.graphs: ProposalGraphs = NoProposalGraphs()

    def enqueue(self, num_rows: int) -> None:
        if not self.graphs.replay(num_rows):
            self.compute(num_rows)


class Wanting:
    """Rows that get draft tokens after a step, those with most draft tokens first. `number` [1]: index of the current round."""

    def __init__(self, inputs: Inputs, sampler: Sampler) -> None:
        self._inputs = inputs
        self._sampler = sampler
        max_num_seqs, device = len(inputs.last_ids), inputs.last_ids.device
        self._rows = torch.zeros((2, max_num_seqs), dtype=torch.int64, device=device)  # rows, and counts
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
        """Return the last draft or sampled ids of the first `num_rows` rows, [num_rows] int64."""
        return self._ids[:num_rows]

    def rows(self, num_rows: int) -> Tensor:
        """Return the first `num_rows` rows, [num_rows] int64, with -1 for rows without a draft token in this round."""
        rows, counts = self._rows[:, :num_rows]
        return torch.where(self.number < counts, rows, -1)

    def draw(self, rows: Tensor, logits: Tensor, positions: Tensor) -> None:
        """Sample a draft token for each of `rows` from logits [num_rows, V], at positions [num_rows] int64, with the row's
        parameters and noise. This ends the round."""
        ids = self._sampler.guessing().draw(logits, rows.to(torch.int32), positions)
        self._ids[: len(rows)] = ids
        self._inputs.put_drafts(rows, self.number, ids)
        self.number += 1
