"""Anything: a guess for whoever wants one, where it is chance that says which are right (`SyntheticAcceptance`)."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.sequence import Sequence


class Anything:
    """A Proposer."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        """The prompt's last token, over and over."""
        return [sequence.prompt_ids[-1]] * most

    def finished(self, sequence: Sequence) -> None:
        """It keeps nothing."""
