"""Guesses as a draft head makes them, noted behind each step, wherever its rounds ran."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.runner.head_drafter import HeadDrafter


class Guesses:
    """Of one sequence alone."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, list[int]]] = []  # computed tokens, ids

    def note(self, drafter: HeadDrafter, rows) -> None:
        for row in rows:
            if row.num_proposed:
                inputs = drafter._inputs
                found = inputs.draft_ids[row.row, : row.num_proposed].tolist()
                self._noted.append((int(inputs.num_computed[row.row]), found))

    def by_length(self, most: int) -> Iterator[tuple[int, list[int]]]:
        """Behind how many tokens, of which the last was sampled and not computed, up to `most`; and the guesses made there."""
        yield from ((num_computed + 1, ids) for num_computed, ids in self._noted if num_computed < most)


def noting_guesses(monkeypatch) -> Guesses:
    guesses, propose = Guesses(), HeadDrafter.propose

    def noted(self, rows) -> None:
        propose(self, rows)
        guesses.note(self, rows)

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    return guesses
