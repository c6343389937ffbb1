"""Proposer: guesses how a sequence goes on, so that one step can check several tokens. Asked by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    def propose(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
        """Ids that may follow, the next one first; none where it has no idea. Called on the event loop, up to once a step for each
        decoding sequence: it must be quick, and it must not change or keep what it is given."""
        ...
