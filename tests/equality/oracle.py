"""Oracle: a proposer that knows what will be said, and says it up to a slip of the tongue now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence as Several

from runtime.sequence import Sequence


class Oracle:
    """`share`: how likely a guess is right by knowledge; the others are so by chance. `longest`: of its guesses."""

    def __init__(
        self,
        prompts: Several[Several[int]],
        answers: Several[Several[int]],
        vocab_size: int,
        *,
        share=0.8,
        longest=5,
        seed=7,
    ) -> None:
        self._answers = {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        self._vocab_size = vocab_size
        self._share = share
        self._longest = longest
        self._chance = random.Random(seed)
        self.num_guesses = self.num_right = 0

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        start = sequence.num_output_tokens
        num = min(most, self._chance.randrange(self._longest + 1))
        right = self._answers[tuple(sequence.prompt_ids)][start : start + num]
        guess = [
            token if self._chance.random() < self._share else self._chance.randrange(self._vocab_size)
            for token in right
        ]
        self.num_guesses += len(guess)
        self.num_right += sum(a == b for a, b in zip(guess, right, strict=True))
        return guess

    def finished(self, sequence: Sequence) -> None:
        pass
