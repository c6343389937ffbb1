"""Synthetic acceptance: guesses are right by chance and not by truth, so that the speed of drafts can be measured with weights
that mean nothing.

Before anything is drawn, a guess that is to be right gets the largest logit there is at its place, and another one none. So
everything behind it (filters, draws, counts, what a row gains) is as it always is, in any kernel and in a captured graph. Which
guesses these are hangs on their place in text and step; answers are nonsense."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ops.sampling.tables import Drafts
from runtime.speculate.config import SpeculativeConfig

_NUM_DRAWS, _SEED = 8191, 20_260


class SyntheticAcceptance:
    """Accept each draft with probability `chance` if all drafts before it were accepted. For measurements."""

    @classmethod
    def of(cls, config: SpeculativeConfig | None, device: torch.device) -> Self | None:
        """Return the synthetic acceptance of `config`, or None if drafts are checked by the model."""
        chance = None if config is None else config.synthetic_acceptance
        return None if chance is None else cls(chance, device)

    def __init__(self, chance: float, device: torch.device) -> None:
        draws = torch.rand(_NUM_DRAWS, generator=torch.Generator().manual_seed(_SEED))
        self._is_right = (draws < chance).to(device)

    def decide(self, logits: Tensor, positions: Tensor, drafts: Drafts) -> None:
        """logits [L, V], changed in place; positions [L] int64: where what each draws will stand."""
        guesses = drafts.ids[1:, None]  # what stands behind each logits row, if it is the same row's
        index = guesses.clamp(min=0)
        places = (31 * positions[:-1, None] + torch.arange(len(index), device=logits.device)[:, None]) % _NUM_DRAWS
        decided = torch.where(self._is_right[places], torch.finfo(logits.dtype).max / 4, -torch.inf).to(logits.dtype)
        kept = logits[:-1].gather(1, index)
        logits[:-1].scatter_(1, index, torch.where(guesses >= 0, decided, kept))
