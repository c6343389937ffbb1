"""Proposer: drafts the next tokens of a sequence, so that one step can verify several tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

from runtime.sequence import Sequence


class Proposer(Protocol):
    """Interface of host drafters. Called on the event loop, so calls are short: long texts are indexed in pieces."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        """Return up to `most` draft tokens that may follow the known tokens of `sequence`, or none. Called about once a step
        for each decoding sequence. It must not change the sequence."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """Remove the state of `sequence`, which has ended. There may be none."""
        ...


class Anything:
    """Proposer for synthetic acceptance, where content is irrelevant: repeats the prompt's last token."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        return [sequence.prompt_ids[-1]] * most

    def finished(self, sequence: Sequence) -> None:
        pass
