"""HeadDrafter: makes draft tokens with extra layers that read the model's hidden states (`models/draft_head.py`).

After each step the head computes the step's tokens, at the same positions and in its own blocks of the same tables. Its inputs at
a token are the model's hidden state and the following token, which is in the step or was just sampled. For a chunk of a prompt,
the host supplies the token after the chunk. The head's output at a row's last token is the first draft token; its hidden state
there is the input of the next.

KV of rejected draft tokens is overwritten by the next step. The head's KV of the last token of a cached prefix depends on the
token that followed in an earlier sequence. This affects draft tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.batch import RowBinding, Sample, ScheduledRow
from runtime.kv.kv_cache import LayerKV
from runtime.models.draft_head import DraftHead
from runtime.runner.drafter import Drafter, Round, Wanting
from runtime.runner.step_inputs import Inputs, StepInputs
from runtime.sample.sampler import Sampler


class HeadDrafter(Drafter):
    """Drafter that uses a draft head. `kv_caches`: KV caches of the head's layers."""

    follows = True

    def __init__(self, head: DraftHead, kv_caches: Sequence[LayerKV], inputs: Inputs, sampler: Sampler) -> None:
        self._head = head
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._wanting = Wanting(inputs, sampler)
        self._first, self._further = self.rounds = Round(self._guess_first), Round(self._guess_further)
        num_rows, device = len(inputs.last_ids), inputs.last_ids.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=getattr(torch, head.dtype), device=device)

        self._last = zeros(num_rows + 1, head.hidden_size)  # of each row's last token; one unused
        self._hidden = zeros(num_rows, head.hidden_size)  # hidden states from which the next draft tokens are made
        self._known: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # prompt, output ids by row

    def bind(self, row: int, binding: RowBinding) -> None:
        self._known[row] = binding.prompt_ids, binding.output_ids

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """Store the token after each prompt chunk as the last sampled token of the chunk's row, which samples none."""
        behind = [(row.row, token) for row in rows if (token := self._behind(row)) is not None]
        if behind:
            pieces, ids = index_on(self._last.device, list(zip(*behind, strict=True)))
            self._inputs.last_ids[pieces] = ids

    def _behind(self, row: ScheduledRow) -> int | None:
        """Return the known token after the row's tokens. None if the row samples."""
        if isinstance(row.work, Sample):
            return None
        prompt, output = self._known[row.row]
        place = row.end - len(prompt)
        if place < 0:
            return prompt[row.end]
        return output[place] if place < len(output) else None

    def keep(self, hidden: Any) -> Any:
        return self._head.keep(hidden)

    def follow(self, step: StepInputs, kept: Any) -> None:
        forward, starts = step.forward, step.query_start_loc.long()
        rows, num_tokens = step.rows.long(), len(forward.positions)
        known = rows.clamp(min=0)
        # Last accepted token of each row: after it the row has computed as many tokens as its table entry.
        last = (
            starts[:-1]
            + self._inputs.num_computed[known]
            - 1
            - forward.positions[starts[:-1].clamp(max=num_tokens - 1)]
        )
        last = torch.where(rows >= 0, last, num_tokens).clamp(min=0)
        next_ids = torch.cat([forward.input_ids.roll(-1), forward.input_ids[:1]])  # the last entry is for padding rows
        next_ids[last.clamp(max=num_tokens)] = self._inputs.last_ids[known]
        # The head does not use adapters or media embeddings: it reads plain token ids at their positions.
        own = replace(forward, input_embeds=None, adapters=None, rope_positions=None, rope_table=None, deepstack=None)
        own = replace(own, input_ids=next_ids[:-1], hidden_states=self._head.read(kept), kv_caches=self._kv_caches)
        hidden = self._head.forward(own)
        owners = torch.where(rows >= 0, rows, len(self._last) - 1)
        self._last[owners] = hidden[last.clamp(max=num_tokens - 1)]

    def propose(self, rows: Sequence[ScheduledRow]) -> None:
        for nth, num_rows in enumerate(self._wanting.begin(rows)):
            (self._further if nth else self._first).enqueue(num_rows)

    def _guess_first(self, num_rows: int) -> None:
        """Make the first draft token of each row from the hidden state of its last computed token."""
        rows = self._wanting.rows(num_rows)
        hidden = self._last[rows]  # index -1, the unused entry, for rows without a draft token
        self._hidden[:num_rows] = hidden
        positions = self._inputs.num_computed[rows.clamp(min=0)].long() + 1
        self._wanting.draw(rows, self._head.compute_logits(hidden), positions)

    def _guess_further(self, num_rows: int) -> None:
        wanting = self._wanting
        rows = wanting.rows(num_rows)
        step = self._inputs.behind(rows, wanting.ids(num_rows), wanting.number - 1)
        step = replace(step, kv_caches=self._kv_caches, hidden_states=self._hidden[:num_rows])
        hidden = self._head.forward(step)
        self._hidden[:num_rows] = hidden
        wanting.draw(rows, self._head.compute_logits(hidden), step.positions + 2)
