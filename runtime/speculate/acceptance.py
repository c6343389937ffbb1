"""Acceptance: how likely the next draft of a sequence is right, from how its last guesses did.

A guess is compared with what the sequence gains whether a step checked it or not: so what is known stays fresh, at no device's
cost, while nothing is drafted. Late guesses count more than early ones, and what goes for all sequences stands in for the few
that a new one has had."""

from __future__ import annotations

from collections.abc import Sequence as Several

_KEPT = 0.9  # of what is known, from guessed token to guessed token
_KEPT_OF_ALL = 0.99
_PRIOR = 3.0  # what goes for all counts, in guessed tokens
_FIRST = 0.5  # before anything is known


class Chances:
    """Of all sequences together: the chance of a guessed token whose predecessors were right."""

    def __init__(self) -> None:
        self.average = _FIRST

    def note(self, right: bool) -> None:
        self.average = _KEPT_OF_ALL * self.average + (1 - _KEPT_OF_ALL) * right


class Acceptance:
    """Of one sequence."""

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._right = self._num = 0.0
        self._guess: list[int] = []  # not compared yet: of the tokens that come next

    @property
    def chance(self) -> float:
        return (self._right + _PRIOR * self._chances.average) / (self._num + _PRIOR)

    def guessed(self, guess: Several[int]) -> None:
        """`guess` is what should come next; whatever was guessed before counts no more."""
        self._guess = [*guess]

    def gained(self, token_ids: Several[int]) -> None:
        for token_id, guess in zip(token_ids, self._guess, strict=False):
            right = token_id == guess
            self._note(right)
            if not right:
                self._guess = []
                return
        self._guess = self._guess[len(token_ids) :]

    def checked(self, num_guesses: int, num_right: int) -> None:
        """Of so many guesses, whatever they were, the first `num_right` were right."""
        for _ in range(num_right):
            self._note(True)
        if num_right < num_guesses:
            self._note(False)

    def _note(self, right: bool) -> None:
        self._right = _KEPT * self._right + right
        self._num = _KEPT * self._num + 1
        self._chances.note(right)

    def num_worth(self, price: float, most: int) -> int:
        """How many drafts, each of which is checked for nothing where one before it was wrong, are right with a chance of at least
        `price`."""
        chance, num, all_right = self.chance, 0, 1.0
        while num < most:
            all_right *= chance
            if all_right < price:
                break
            num += 1
        return num

    def expected(self, num: int) -> float:
        """How many of `num` drafts are right."""
        chance = self.chance
        return num if chance >= 1 else chance * (1 - chance**num) / (1 - chance)
