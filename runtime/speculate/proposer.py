"""Proposer: makes draft tokens of a sequence on the host, so that one step can verify several tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

from runtime.sequence import Sequence


class Proposer(Protocol):
    """Interface of drafters on the host. Called on the event loop, so calls must be short: index long texts in pieces."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        """Return up to `most` draft tokens that may follow the known tokens of `sequence`, or none. Called about once per step
        for each decoding sequence. Must not change `sequence`."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """Remove all state about `sequence`, which has ended. There may be none."""
        ...


class Anything:
    """Proposer for synthetic acceptance, where the content of drafts is irrelevant. It repeats the prompt's last token."""

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        return [sequence.prompt_ids[-1]] * most

    def finished(self, sequence: Sequence) -> None:
        pass
