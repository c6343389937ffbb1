"""StepInputs: what the model and the sampler read in one step, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ops
from runtime.kv.kv_cache import LayerKV
from runtime.models.forward_step import ForwardStep


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens; S lines whose logits are wanted.

    ids, positions [T] int64. For each block table of the layout `slots`, int64: of each token [T] where it is stored, -1 for
    nowhere, or, in a table of states, of each line [L], -1 for padding. And `metas`: spans and tables for attention.
    logit_tokens [S] int64: each such line's last token, None where every token is one. sample_rows [S] int32: the row whose
    next token the line gives, -1 for none; sample_positions [S] int64: where that token will stand."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    logit_tokens: torch.Tensor | None
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    metas: tuple[ops.AttentionMeta, ...]

    def forward(self, kv_caches: Sequence[LayerKV]) -> ForwardStep:
        """What the model reads of it."""
        return ForwardStep(self.ids, self.positions, self.slots, self.metas, kv_caches)
