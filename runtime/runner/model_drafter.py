"""ModelDrafter: makes draft tokens by running a separate draft model after each step.

In every step, the draft model computes the same tokens as the model, at the same positions, in its own blocks of the same
tables. Prompts, chunks, prefix cache hits and rejected draft tokens therefore need no special case. It then generates draft
tokens one at a time. They are sampled with the row's parameters and noise of (seed, position), so they are likely to equal the
model's samples. Penalties are omitted, because they count sampled tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtime.batch import ScheduledRow
from runtime.kv.kv_cache import LayerKV
from runtime.models.draft_head import DraftHead
from runtime.models.model import Model
from runtime.models.pair import ModelPair
from runtime.runner.drafter import Drafter, Round, Wanting
from runtime.runner.head_drafter import HeadDrafter
from runtime.runner.lookup_drafter import LookupDrafter
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.sample.sampler import Sampler
from runtime.speculate.config import LookupLengths


def drafter_of(
    model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler, lookup: LookupLengths | None
) -> Drafter:
    """Return the drafter of `model`. It makes no draft tokens without `lookup`, a draft model or a draft head."""
    if lookup is not None:
        return LookupDrafter(lookup, inputs)
    if not isinstance(model, ModelPair):
        return Drafter()
    caches = model.draft_caches(kv_caches)
    if isinstance(model.draft, DraftHead):
        return HeadDrafter(model.draft, caches, inputs, sampler)
    return ModelDrafter(model.draft, caches, inputs, sampler)


class ModelDrafter(Drafter):
    """Drafter that uses a draft model. `kv_caches`: KV caches of the draft model's layers."""

    follows = True

    def __init__(self, model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._wanting = Wanting(inputs, sampler)
        self._round = Round(self._one)
        self.rounds = (self._round,)

    def follow(self, step: StepInputs, kept: None) -> None:
        # The draft model does not use adapters or media embeddings: it reads plain token ids at their positions.
        own = replace(step.forward, input_embeds=None, rope_positions=None, deepstack=None, blocks=())
        self._model.forward(replace(own, kv_caches=self._kv_caches, adapters=None))

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        for num_rows in self._wanting.begin(rows):
            self._round.enqueue(num_rows)

    def _one(self, num_rows: int) -> None:
        wanting = self._wanting
        rows = wanting.rows(num_rows)
        step = self._inputs.behind(rows, wanting.ids(num_rows), wanting.number)
        hidden = self._model.forward(replace(step, kv_caches=self._kv_caches))
        wanting.draw(rows, self._model.compute_logits(hidden, None), step.positions + 1)
