"""Proposer: guesses how a sequence goes on, so that one step can check several tokens. Asked by a Speculation."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

from runtime.sequence import Sequence


class Proposer(Protocol):
    """Its calls come from the event loop, so each must be quick: what it has to learn of a long text it learns in pieces."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        """Up to `most` ids that may follow what is known of `sequence`, the next one first; none where it has no idea. Asked up to
        once a step for each decoding sequence, perhaps twice in a row for the same; it must not change what it is given."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """`sequence` has ended, whether it was ever asked for or not: nothing needs to be kept of it."""
        ...
