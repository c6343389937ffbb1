"""LookupDrafter: n-grams on the device. What followed a row's last tokens where they stood before, in prompt or answer, is guessed
to follow now; the host learns nothing of it before it is checked, so steps with guesses stay one ahead.

It keeps each row's text: what its binding brings, of a long prompt the last tokens, and behind each step what the row has gained,
which are the guesses that were right and the id sampled last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import ops
from runtime.batch import RowBinding, Sample, ScheduledRow
from runtime.runner.rounds import Round
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.speculate.config import Lookup
from runtime.speculate.gram_index import MAX_PROMPT
from runtime.transfer import index_on, upload


class LookupDrafter:
    """A Drafter."""

    rounds: Sequence[Round] = ()

    def __init__(self, lookup: Lookup, inputs: Inputs) -> None:
        self._lookup = lookup
        self._inputs = inputs
        (num_rows, self._num), device = inputs.draft_ids.shape, inputs.draft_ids.device
        width = lookup.max_model_len + self._num + 1  # wrong guesses are written behind the text
        self._history = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._guesses = torch.arange(self._num, device=device)

    def bind(self, row: int, binding: RowBinding) -> None:
        prompt, output = binding.prompt_ids, binding.output_ids
        first = max(0, len(prompt) - MAX_PROMPT)
        ids = np.array([*prompt[first:], *output], np.int32)
        self._history[row, :first].fill_(-1)  # it held somebody else's text
        upload(self._history[row, first : first + len(ids)], ids)
        self._lengths[row].fill_(first + len(ids))

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """Their text is known by their binding."""

    def read(self, hidden: Any) -> None:
        """It reads tokens."""

    def follow(self, step: StepInputs, read: None) -> None:
        """What a step computes is known by its binding, or was sampled."""

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        sampled = [row for row in rows if isinstance(row.work, Sample) and not row.masked]
        if not sampled:
            return
        inputs, history = self._inputs, self._history
        index = index_on(history.device, [row.row for row in sampled])
        lengths = inputs.num_computed[index].long() + 1
        gained_from = self._lengths[index]
        history[index[:, None], gained_from[:, None] + self._guesses] = inputs.draft_ids[index].int()
        history[index, lengths - 1] = inputs.last_ids[index].int()
        self._lengths[index] = lengths
        if any(row.num_proposed for row in sampled):
            inputs.draft_ids[index] = ops.look_up(
                history, index, lengths, self._num, shortest=self._lookup.shortest, longest=self._lookup.longest
            )
