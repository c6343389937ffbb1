"""Acceptance: the probability that the next draft token of a sequence is accepted, estimated from its last draft tokens.

Draft tokens are compared with the sampled tokens even if no step verified them, so the estimate stays current without device
work while nothing is drafted. Recent ones have more weight. A new sequence starts with the average of all sequences."""

from __future__ import annotations

from collections.abc import Sequence as Several

_KEPT = 0.9  # weight of the past, per draft token
_KEPT_OF_ALL = 0.99  # likewise for the average
_PRIOR = 3.0  # weight of the average, in draft tokens
_FIRST = 0.5  # initial average


class Chances:
    """Average acceptance probability, over all sequences, of a draft token whose predecessors were accepted."""

    def __init__(self) -> None:
        self.average = _FIRST

    def note(self, right: bool) -> None:
        self.average = _KEPT_OF_ALL * self.average + (1 - _KEPT_OF_ALL) * right


class Acceptance:
    """Acceptance probability of the draft tokens of one sequence."""

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._right = self._num = 0.0
        self._guess: list[int] = []  # draft of the next tokens, not compared yet

    @property
    def chance(self) -> float:
        return (self._right + _PRIOR * self._chances.average) / (self._num + _PRIOR)

    def guessed(self, guess: Several[int]) -> None:
        """Store a draft of the next tokens, replacing any earlier one."""
        self._guess = [*guess]

    def gained(self, token_ids: Several[int]) -> None:
        """Compare the stored draft with the sampled `token_ids`."""
        for token_id, guess in zip(token_ids, self._guess, strict=False):
            right = token_id == guess
            self._note(right)
            if not right:
                self._guess = []
                return
        self._guess = self._guess[len(token_ids) :]

    def checked(self, num_guesses: int, num_right: int) -> None:
        """Record that the first `num_right` of `num_guesses` draft tokens were accepted."""
        for _ in range(num_right):
            self._note(True)
        if num_right < num_guesses:
            self._note(False)

    def _note(self, right: bool) -> None:
        self._right = _KEPT * self._right + right
        self._num = _KEPT * self._num + 1
        self._chances.note(right)

    def num_worth(self, price: float, most: int) -> int:
        """Return how many draft tokens, at most `most`, are all accepted with a probability of at least `price`."""
        chance, num, all_right = self.chance, 0, 1.0
        while num < most:
            all_right *= chance
            if all_right < price:
                break
            num += 1
        return num

    def expected(self, num: int) -> float:
        """Return the expected number of accepted tokens out of `num` draft tokens."""
        chance = self.chance
        return num if chance >= 1 else chance * (1 - chance**num) / (1 - chance)
