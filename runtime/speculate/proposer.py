"""Proposer: guesses the next tokens of a sequence, so that one step can check several tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

from runtime.sequence import Sequence


class Proposer(Protocol):
    """Called on the event loop, so each call is quick: a long text is learned in pieces."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        """Return up to `most` ids that may follow what is known of `sequence`; none without a guess. Called about once a step for
        each decoding sequence. It must not change the sequence."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """Forget `sequence`, which has ended, whether a guess was asked for it or not."""
        ...


class Anything:
    """Proposer for synthetic acceptance, which decides by chance: the prompt's last token, over and over."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        return [sequence.prompt_ids[-1]] * most

    def finished(self, sequence: Sequence) -> None:
        pass
