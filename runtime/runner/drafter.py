"""Drafter: makes draft tokens on the device after each step. Each round makes one draft token for every participating row.

Draft tokens stay on the device, in `Inputs.draft_ids`, and the next step reads them there. All buffers of a round have fixed
addresses, so rounds can be captured and replayed. No round waits for the host."""

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
    """Drafter that makes no draft tokens: base class, also used if draft tokens come from the host or are disabled.

    `rounds`: kinds of rounds, which may be captured. `follows`: True if the drafter computes every step's tokens too."""

    rounds: Sequence[Round] = ()
    follows = False

    def bind(self, row: int, binding: RowBinding) -> None:
        """Store what drafting needs of the new sequence in `row`. Called before its first step is enqueued."""

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """Prepare `follow` for a step of `rows`. Called before the forward pass, after `bind` of new sequences."""

    def keep(self, hidden: Any) -> Any:
        """Return what `follow` needs of the model's hidden states `hidden`. May enqueue a copy, but no other work. Called
        before logits are computed, also in steps that the drafter does not follow."""
        return None

    def follow(self, step: StepInputs, kept: Any) -> None:
        """Enqueue the drafter's own computation of a step, after its sampling. `kept`: result of `keep`. Must not change the
        step's inputs or upload data."""

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        """Enqueue the rounds that make draft tokens for `rows`. Called after sampling of their step has been enqueued."""


class ProposalGraphs(Protocol):
    def replay(self, num_rows: int) -> bool:
        """Enqueue a captured round for `num_rows` or more rows. Return False if there is none."""
        ...


class NoProposalGraphs:
    def replay(self, num_rows: int) -> bool:
        return False


class Round:
    """One kind of draft round. `compute(n)`: enqueues a round for the first n rows of `Wanting`. `graphs`: its captured graphs."""

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
        """Start the rounds for `rows`, whose step has been sampled. Return the number of participating rows of each round."""
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
        """Return the latest token id of the first `num_rows` rows, [num_rows] int64: the last draft token or sampled token."""
        return self._ids[:num_rows]

    def rows(self, num_rows: int) -> Tensor:
        """Return the first `num_rows` rows, [num_rows] int64; -1 for rows that get no draft token in this round."""
        rows, counts = self._rows[:, :num_rows]
        return torch.where(self.number < counts, rows, -1)

    def draw(self, rows: Tensor, logits: Tensor, positions: Tensor) -> None:
        """Sample a draft token for each of `rows` from `logits` [num_rows, V], with the row's parameters and noise. `positions`
        [num_rows] int64. Store the tokens and end the round."""
        ids = self._sampler.guessing().draw(logits, rows.to(torch.int32), positions)
        self._ids[: len(rows)] = ids
        self._inputs.put_drafts(rows, self.number, ids)
        self.number += 1
