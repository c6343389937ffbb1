"""Guesses as a device makes them, noted where they are entered for the next step."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.runner.device_inputs import DeviceInputs
from runtime.runner.input_buffers import InputBuffers


class Guesses:
    """Of one sequence alone."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, int, int]] = []  # computed tokens, number of the round, id

    def note(self, inputs, rows, nth, ids) -> None:
        if int(rows[0]) >= 0:
            self._noted.append((int(inputs.num_computed[rows[0]]), int(nth[0]), int(ids[0])))

    def by_length(self, most: int) -> Iterator[tuple[int, list[int]]]:
        """Behind how many tokens, of which the last was sampled and not computed, up to `most`; and the guesses made there."""
        found: list[tuple[int, list[int]]] = []
        for num_computed, nth, token in self._noted:
            if not nth:
                found.append((num_computed + 1, []))
            found[-1][1].append(token)
        yield from (each for each in found if each[0] <= most)


def noting_guesses(monkeypatch) -> Guesses:
    guesses = Guesses()
    for inputs in (InputBuffers, DeviceInputs):

        def noted(self, rows, nth, ids, put=inputs.put_drafts):
            guesses.note(self, rows, nth, ids)
            put(self, rows, nth, ids)

        monkeypatch.setattr(inputs, "put_drafts", noted)
    return guesses
