"""Acceptance: probability that the next draft token of a sequence is accepted, estimated from its recent draft tokens.

Draft tokens are compared with the sampled tokens even if no step verified them. The estimate therefore stays current, without
device work, while no drafts are verified. Recent draft tokens weigh more. A new sequence starts with the overall average."""

from __future__ import annotations

from collections.abc import Sequence as Several

_KEPT = 0.9  # weight of the past, per draft token
_KEPT_OF_ALL = 0.99  # likewise for the average
_PRIOR = 3.0  # weight of the average, in draft tokens
_FIRST = 0.5  # initial average


class Chances:
    """Average probability, over all sequences, that a draft token is accepted if all draft tokens before it were."""

    def __init__(self) -> None:
        self.average = _FIRST

    def note(self, right: bool) -> None:
        self.average = _KEPT_OF_ALL * self.average + (1 - _KEPT_OF_ALL) * right


class Acceptance:
    """Estimate of the acceptance probability of one sequence's draft tokens."""

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._right = self._num = 0.0
        self._guess: list[int] = []  # draft of the next tokens, not compared yet

    @property
    def chance(self) -> float:
        return (self._right + _PRIOR * self._chances.average) / (self._num + _PRIOR)

    def guessed(self, guess: Several[int]) -> None:
        """Store draft tokens of the next positions. They replace those stored before."""
        self._guess = [*guess]

    def gained(self, token_ids: Several[int]) -> None:
        """Compare the stored draft tokens with the sampled `token_ids`."""
        for token_id, guess in zip(token_ids, self._guess, strict=False):
            right = token_id == guess
            self._note(right)
            if not right:
                self._guess = []
                return
        self._guess = self._guess[len(token_ids) :]

    def checked(self, num_guesses: int, num_right: int) -> None:
        """Record that a step verified `num_guesses` draft tokens and accepted the first `num_right` of them."""
        for _ in range(num_right):
            self._note(True)
        if num_right < num_guesses:
            self._note(False)

    def _note(self, right: bool) -> None:
        self._right = _KEPT * self._right + right
        self._num = _KEPT * self._num + 1
        self._chances.note(right)

    def num_worth(self, price: float, most: int) -> int:
        """Return the largest number, up to `most`, of draft tokens that are all accepted with a probability of at least `price`."""
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
