"""Drafter: what guesses a row's next tokens on the device, behind each step; a draft model, where there is one.

It computes every step's tokens as the model does, at the same positions and in blocks of the same tables, so prompts, chunks, hits
of the prefix cache and guesses that are taken back are for it what they are for the model. Then, for rows that are to have guesses,
it goes on alone: a token at a time behind the one that was sampled last, each drawn by the row's own settings and noise of (seed,
position), which makes it the likeliest to be what the model itself will draw there. Penalties are left out: they count what was
drawn, and a guess is not. The guesses stay on the device, in `Inputs.draft_ids`, and the next step takes them from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from runtime.batch import ScheduledRow
from runtime.kv.kv_cache import LayerKV
from runtime.models.forward_step import ForwardStep
from runtime.models.model import Model
from runtime.models.pair import ModelPair
from runtime.runner.step_inputs import Inputs
from runtime.sample.sampler import Sampler
from runtime.transfer import index_on


class Drafter(Protocol):
    def follow(self, step: ForwardStep) -> None:
        """Enqueue its own part of a step: nothing of the step is changed, and nothing uploaded."""
        ...

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        """Enqueue the guesses that `rows`, whose step has been sampled, are to have."""
        ...


class NoDrafter:
    """Guesses, if any, come from the host."""

    def follow(self, step: ForwardStep) -> None:
        pass

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        pass


def drafter_of(model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler) -> Drafter:
    if isinstance(model, ModelPair):
        return ModelDrafter(model.draft, model.draft_caches(kv_caches), inputs, sampler)
    return NoDrafter()


class ModelDrafter:
    """A Drafter. `kv_caches`: the draft model's own."""

    def __init__(self, model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._sampler = sampler

    def follow(self, step: ForwardStep) -> None:
        self._model.forward(replace(step, kv_caches=self._kv_caches))

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        wanting = sorted((row for row in rows if row.num_proposed), key=lambda row: -row.num_proposed)
        if not wanting:
            return
        inputs, device = self._inputs, self._inputs.last_ids.device
        index = index_on(device, [row.row for row in wanting])
        sampler = self._sampler.guessing()
        ids = inputs.last_ids[index]
        for nth in range(wanting[0].num_proposed):
            num = sum(row.num_proposed > nth for row in wanting)
            index, ids = index[:num], ids[:num]
            step = inputs.behind(index, ids, nth)
            hidden = self._model.forward(replace(step, kv_caches=self._kv_caches))
            logits = self._model.compute_logits(hidden, None)
            ids = sampler.draw(logits, index.to(torch.int32), step.positions + 1)
            inputs.draft_ids[index, nth] = ids
