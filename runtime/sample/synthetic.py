"""Synthetic acceptance: accepts draft tokens at random, to measure the speed of speculative decoding with random weights.

Before sampling, an accepted draft token gets the largest possible logit at its position, and a rejected one -inf. Filters, sampling
and counts then run as usual, in any kernel and in captured graphs. The choice depends only on positions in text and step. The
generated text is meaningless."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ops.sampling.tables import Drafts
from runtime.speculate.config import SpeculativeConfig

_NUM_DRAWS, _SEED = 8191, 20_260


class SyntheticAcceptance:
    """Random acceptance of draft tokens, for measurements. A draft token is accepted with probability `chance` if all before it
    were."""

    @classmethod
    def of(cls, config: SpeculativeConfig | None, device: torch.device) -> Self | None:
        """Return the synthetic acceptance of `config`, or None if the model verifies draft tokens."""
        chance = None if config is None else config.synthetic_acceptance
        return None if chance is None else cls(chance, device)

    def __init__(self, chance: float, device: torch.device) -> None:
        draws = torch.rand(_NUM_DRAWS, generator=torch.Generator().manual_seed(_SEED))
        self._is_right = (draws < chance).to(device)

    def decide(self, logits: Tensor, positions: Tensor, drafts: Drafts) -> None:
        """Change logits [L, V] in place to accept or reject draft tokens. positions [L] int64: of the sampled tokens."""
        guesses = drafts.ids[1:, None]  # draft token after each logits row of the same row
        index = guesses.clamp(min=0)
        places = (31 * positions[:-1, None] + torch.arange(len(index), device=logits.device)[:, None]) % _NUM_DRAWS
        decided = torch.where(self._is_right[places], torch.finfo(logits.dtype).max / 4, -torch.inf).to(logits.dtype)
        kept = logits[:-1].gather(1, index)
        logits[:-1].scatter_(1, index, torch.where(guesses >= 0, decided, kept))
