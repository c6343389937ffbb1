"""LookupDrafter: n-gram draft tokens on the device. They are the tokens that followed an earlier occurrence of the row's last
tokens, in prompt or output. The host gets draft ids only after verification, so the next step is launched without waiting.

The drafter stores each row's text: the end of the prompt, then accepted and sampled ids. A few small kernels append them in
each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import ops
from ops.transfer import index_on, upload
from runtime.batch import RowBinding, ScheduledRow
from runtime.runner.drafter import Drafter
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.speculate.config import LookupLengths
from runtime.speculate.gram_index import MAX_PROMPT


class LookupDrafter(Drafter):
    """Drafter that looks up n-grams in the row's own prompt and output."""

    follows = True

    def __init__(self, lookup: LookupLengths, inputs: Inputs) -> None:
        self._lookup = lookup
        self._inputs = inputs
        (num_rows, self._num), device = inputs.draft_ids.shape, inputs.draft_ids.device
        width = lookup.max_model_len + self._num + 1  # rejected draft tokens are written after the text
        # The last row and length are for padding.
        self._history = torch.zeros((num_rows + 1, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._guesses = torch.arange(self._num, device=device)

    def bind(self, row: int, binding: RowBinding) -> None:
        prompt, output = binding.prompt_ids, binding.output_ids
        first = max(0, len(prompt) - MAX_PROMPT)
        ids = np.array([*prompt[first:], *output], np.int32)
        self._history[row, :first].fill_(-1)  # it contained the text of another sequence
        upload(self._history[row, first : first + len(ids)], ids)
        self._lengths[row].fill_(first + len(ids))

    def follow(self, step: StepInputs, kept: None) -> None:
        """Append the tokens that rows sampled in this step. Earlier tokens were stored when the rows were bound."""
        inputs, history, nobody = self._inputs, self._history, len(self._lengths) - 1
        known = step.rows.long().clamp(min=0)
        has_sampled = torch.zeros(nobody + 1, dtype=torch.bool, device=history.device)
        # Not by indexing with True, which would be copied from the host, impossible in a captured graph.
        has_sampled.index_fill_(0, torch.where(step.sample_rows >= 0, step.sample_rows, nobody).long(), True)
        samples = (step.rows >= 0) & has_sampled[known]
        rows = torch.where(samples, known, nobody)
        gained_from = self._lengths[rows]
        history[rows[:, None], gained_from[:, None] + self._guesses] = inputs.draft_ids[known].int()
        lengths = torch.where(samples, inputs.num_computed[known].long() + 1, 1)
        history[rows, lengths - 1] = inputs.last_ids[known].int()
        self._lengths[rows] = torch.where(samples, lengths, 0)

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        wanting = [row.row for row in rows if row.num_proposed]
        if not wanting:
            return
        inputs, history = self._inputs, self._history
        index = index_on(history.device, wanting)
        inputs.draft_ids[index] = ops.look_up(
            history,
            index,
            self._lengths[index],
            self._num,
            shortest=self._lookup.shortest,
            longest=self._lookup.longest,
        )
