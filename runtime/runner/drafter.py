"""Drafter: what guesses a row's next tokens on the device, behind each step: a look-up (`lookup_drafter.py`), or a draft model.

A draft model computes every step's tokens as the model does, at the same positions and in blocks of the same tables, so prompts,
chunks, hits of the prefix cache and guesses that are taken back are for it what they are for the model. Then, for rows that are to
have guesses, it goes on alone: a token at a time behind the one that was sampled last, each drawn by the row's own settings and
noise of (seed, position), which makes it the likeliest to be what the model itself will draw there. Penalties are left out: they
count what was drawn, and a guess is not. The guesses stay on the device, in `Inputs.draft_ids`, and the next step takes them from
there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from runtime.batch import RowBinding, ScheduledRow
from runtime.kv.kv_cache import LayerKV
from runtime.models.forward_step import ForwardStep
from runtime.models.model import Model
from runtime.models.pair import ModelPair
from runtime.runner.lookup_drafter import LookupDrafter
from runtime.runner.step_inputs import Inputs
from runtime.sample.sampler import Sampler
from runtime.speculate.config import Lookup
from runtime.transfer import index_on


class Drafter(Protocol):
    def bind(self, row: int, binding: RowBinding) -> None:
        """A new sequence has taken `row`. Enqueued before the step that first has it."""
        ...

    def follow(self, step: ForwardStep) -> None:
        """Enqueue its own part of a step: nothing of the step is changed, and nothing uploaded."""
        ...

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        """Enqueue the guesses that `rows`, whose step has been sampled, are to have."""
        ...


class NoDrafter:
    """Guesses, if any, come from the host."""

    def bind(self, row: int, binding: RowBinding) -> None:
        pass

    def follow(self, step: ForwardStep) -> None:
        pass

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        pass


def drafter_of(
    model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler, lookup: Lookup | None
) -> Drafter:
    if lookup is not None:
        return LookupDrafter(lookup, inputs)
    if isinstance(model, ModelPair):
        return ModelDrafter(model.draft, model.draft_caches(kv_caches), inputs, sampler)
    return NoDrafter()


class ProposalGraphs(Protocol):
    def replay(self, num_rows: int) -> bool:
        """Enqueue `ModelDrafter.one` as it was captured for so many rows, or more; False where it was not."""
        ...


class NoProposalGraphs:
    def replay(self, num_rows: int) -> bool:
        return False


class ModelDrafter:
    """A Drafter. `kv_caches`: the draft model's own. What a round of guesses reads lies at fixed addresses, so that one can be
    captured: `graphs`, where there are some."""

    def __init__(self, model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._sampler = sampler
        self.graphs: ProposalGraphs = NoProposalGraphs()
        max_num_seqs, device = len(inputs.last_ids), inputs.last_ids.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._wanting = zeros(2, max_num_seqs)  # rows, and how many guesses each wants
        self._ids = zeros(max_num_seqs)  # what each was last guessed, or sampled
        self._round = zeros(1)

    def bind(self, row: int, binding: RowBinding) -> None:
        """What it knows of a row is in the row's blocks."""

    def follow(self, step: ForwardStep) -> None:
        # Adapters are the model's, and so is what it sees: the draft reads ids alone, each at its own position.
        own = replace(step, input_embeds=None, rope_positions=None, deepstack=None)
        self._model.forward(replace(own, kv_caches=self._kv_caches, adapters=None))

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        wanting = sorted((row for row in rows if row.num_proposed), key=lambda row: -row.num_proposed)
        if not wanting:
            return
        counts = [row.num_proposed for row in wanting]
        self._wanting[1].zero_()
        self._wanting[:, : len(wanting)] = index_on(self._ids.device, [[row.row for row in wanting], counts])
        self._ids[: len(wanting)] = self._inputs.last_ids[self._wanting[0, : len(wanting)]]
        self._round.zero_()
        for nth in range(counts[0]):
            num_rows = sum(count > nth for count in counts)
            if not self.graphs.replay(num_rows):
                self.one(num_rows)

    def one(self, num_rows: int) -> None:
        """A round: one guess more for those of the first `num_rows` rows that want so many. Nothing of it hangs on the host."""
        rows, counts = self._wanting[:, :num_rows]
        rows = torch.where(self._round < counts, rows, -1)
        step = self._inputs.behind(rows, self._ids[:num_rows], self._round)
        hidden = self._model.forward(replace(step, kv_caches=self._kv_caches))
        logits = self._model.compute_logits(hidden, None)
        ids = self._sampler.guessing().draw(logits, rows.to(torch.int32), step.positions + 1)
        self._ids[:num_rows] = ids
        self._inputs.put_drafts(rows, self._round, ids)
        self._round += 1
