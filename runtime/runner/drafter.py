"""Drafter: what guesses a row's next tokens on the device, behind each step: a look-up (`lookup_drafter.py`), a draft model, or a
draft head (`head_drafter.py`).

A draft model computes every step's tokens as the model does, at the same positions and in blocks of the same tables, so prompts,
chunks, hits of the prefix cache and guesses that are taken back are for it what they are for the model. Then, for rows that are to
have guesses, it goes on alone: a token at a time behind the one that was sampled last, each drawn by the row's own settings and
noise of (seed, position), which makes it the likeliest to be what the model itself will draw there. Penalties are left out: they
count what was drawn, and a guess is not. The guesses stay on the device, in `Inputs.draft_ids`, and the next step takes them from
there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from runtime.batch import RowBinding, ScheduledRow
from runtime.kv.kv_cache import LayerKV
from runtime.models.draft_head import DraftHead
from runtime.models.model import Model
from runtime.models.pair import ModelPair
from runtime.runner.head_drafter import HeadDrafter
from runtime.runner.lookup_drafter import LookupDrafter
from runtime.runner.rounds import Round, Wanting
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.sample.sampler import Sampler
from runtime.speculate.config import Lookup


class Drafter(Protocol):
    """`rounds`: kinds of rounds that it makes guesses in, and which may be captured. `follows`: whether it has a part of its own in
    steps."""

    @property
    def rounds(self) -> Sequence[Round]: ...
    @property
    def follows(self) -> bool: ...

    def bind(self, row: int, binding: RowBinding) -> None:
        """A new sequence has taken `row`. Enqueued before the step that first has it."""
        ...

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """A step of `rows` that it follows is next, all of them bound."""
        ...

    def keep(self, hidden: Any) -> Any:
        """What it will read of the hidden states that the model has given, as before logits have been made of them. At most a copy
        is enqueued: in steps that it does not follow, too."""
        ...

    def follow(self, step: StepInputs, kept: Any) -> None:
        """Enqueue its own part of a step, which has been sampled, given what it has kept of it: nothing of the step is changed, and
        nothing uploaded."""
        ...

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        """Enqueue the guesses that `rows`, whose step has been sampled, are to have."""
        ...


class NoDrafter:
    """Guesses, if any, come from the host."""

    rounds: Sequence[Round] = ()
    follows = False

    def bind(self, row: int, binding: RowBinding) -> None:
        pass

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        pass

    def keep(self, hidden: Any) -> None:
        pass

    def follow(self, step: StepInputs, kept: Any) -> None:
        pass

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        pass


def drafter_of(
    model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler, lookup: Lookup | None
) -> Drafter:
    if lookup is not None:
        return LookupDrafter(lookup, inputs)
    if not isinstance(model, ModelPair):
        return NoDrafter()
    caches = model.draft_caches(kv_caches)
    if isinstance(model.draft, DraftHead):
        return HeadDrafter(model.draft, caches, inputs, sampler)
    return ModelDrafter(model.draft, caches, inputs, sampler)


class ModelDrafter:
    """A Drafter. `kv_caches`: the draft model's own."""

    follows = True

    def __init__(self, model: Model, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._wanting = Wanting(inputs, sampler)
        self._round = Round(self._one)
        self.rounds = (self._round,)

    def bind(self, row: int, binding: RowBinding) -> None:
        """What it knows of a row is in the row's blocks."""

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """It computes what the step does."""

    def keep(self, hidden: Any) -> None:
        """It reads tokens."""

    def follow(self, step: StepInputs, kept: None) -> None:
        # Adapters are the model's, and so is what it sees: the draft reads ids alone, each at its own position.
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
