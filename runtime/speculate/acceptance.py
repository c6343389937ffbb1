"""Acceptance: the chance that the next draft token of a sequence is right, from its last guesses.

A guess is compared with the tokens that came, whether a step checked it or not: so the chance stays known, without any work of the
device, while nothing is drafted. Recent guesses count more. A new sequence begins with the average of all sequences."""

from __future__ import annotations

from collections.abc import Sequence as Several

_KEPT = 0.9  # weight of the past, from guessed token to guessed token
_KEPT_OF_ALL = 0.99  # the same for the average
_PRIOR = 3.0  # weight of the average, in guessed tokens
_FIRST = 0.5  # the first average


class Chances:
    """Average chance, over all sequences, of a guessed token whose predecessors were right."""

    def __init__(self) -> None:
        self.average = _FIRST

    def note(self, right: bool) -> None:
        self.average = _KEPT_OF_ALL * self.average + (1 - _KEPT_OF_ALL) * right


class Acceptance:
    """Chance of the guessed tokens of one sequence."""

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._right = self._num = 0.0
        self._guess: list[int] = []  # not compared yet: of the tokens that come next

    @property
    def chance(self) -> float:
        return (self._right + _PRIOR * self._chances.average) / (self._num + _PRIOR)

    def guessed(self, guess: Several[int]) -> None:
        """Note the guess of the next tokens, instead of any earlier one."""
        self._guess = [*guess]

    def gained(self, token_ids: Several[int]) -> None:
        """Compare the guess with tokens that came."""
        for token_id, guess in zip(token_ids, self._guess, strict=False):
            right = token_id == guess
            self._note(right)
            if not right:
                self._guess = []
                return
        self._guess = self._guess[len(token_ids) :]

    def checked(self, num_guesses: int, num_right: int) -> None:
        """Note that of `num_guesses` the first `num_right` were right."""
        for _ in range(num_right):
            self._note(True)
        if num_right < num_guesses:
            self._note(False)

    def _note(self, right: bool) -> None:
        self._right = _KEPT * self._right + right
        self._num = _KEPT * self._num + 1
        self._chances.note(right)

    def num_worth(self, price: float, most: int) -> int:
        """Return how many drafts, up to `most`, are all right with a chance of at least `price`."""
        chance, num, all_right = self.chance, 0, 1.0
        while num < most:
            all_right *= chance
            if all_right < price:
                break
            num += 1
        return num

    def expected(self, num: int) -> float:
        """Return how many of `num` drafts should be right."""
        chance = self.chance
        return num if chance >= 1 else chance * (1 - chance**num) / (1 - chance)
