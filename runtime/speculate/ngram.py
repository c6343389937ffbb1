"""N-gram, or prompt lookup: what followed the last tokens where they stood before, in prompt, prediction or answer, may follow now.

The longest run of last tokens that stood somewhere counts, and of equal ones the latest; but what a client predicts goes first."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from itertools import islice

from runtime.sequence import Sequence
from runtime.speculate.gram_index import MAX_PROMPT, Allowance, GramIndex

PLACES_LOOKED_AT = 16
_BORDER = -1


class Ngram:
    """A Proposer. `longest`, `shortest`: how many last tokens are looked for."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._texts: dict[int, _Text] = {}  # by number
        self._allowance = Allowance()

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        text = self._texts.get(sequence.number)
        if text is None:
            text = self._texts[sequence.number] = _Text(sequence, {self._shortest, self._longest})
        text.catch_up(sequence)
        self._allowance.asked(sequence.number)
        self._allowance.index(text.index)
        if text.follows_prediction(sequence, self._shortest):
            return text.prediction[sequence.num_output_tokens :][:most]
        place = self._place(text)
        return text.following(place, most) if place else ()

    def finished(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.number, None)

    def _place(self, text: _Text) -> int:
        """Where the longest run of last tokens ends, 0 where there is none."""
        best, best_length = 0, 0
        for size in dict.fromkeys((self._longest, self._shortest)):
            for place in text.places(size):
                length = text.index.match_length(place, text.index.ids, self._longest)
                better = length > best_length
                if better or (length == best_length and text.is_predicted(place) and not text.is_predicted(best)):
                    best, best_length = place, length
            if best:
                break
        return best


class _Text:
    """Prompt, prediction and answer of a sequence, as far as they are known."""

    def __init__(self, sequence: Sequence, sizes: set[int]) -> None:
        self.prediction = sequence.request.prediction
        self.index = GramIndex(*sizes)
        self.index.extend(sequence.prompt_ids[-MAX_PROMPT:])
        self._predicted = range(0)  # places in the prediction
        if self.prediction:
            self.index.extend((_BORDER,))
            start = len(self.index)
            self.index.extend((*self.prediction, _BORDER))
            self._predicted = range(start, len(self.index))
        self._num_taken = 0  # of the answer

    def catch_up(self, sequence: Sequence) -> None:
        if self._num_taken < sequence.num_output_tokens:
            self.index.extend(sequence.output_ids[self._num_taken :])
            self._num_taken = sequence.num_output_tokens

    def follows_prediction(self, sequence: Sequence, shortest: int) -> bool:
        """Whether the answer, of fewer than `shortest` tokens and so not to be looked up, is the beginning of the prediction."""
        num = sequence.num_output_tokens
        return num < min(shortest, len(self.prediction)) and sequence.output_ids == [*self.prediction[:num]]

    def is_predicted(self, place: int) -> bool:
        return place in self._predicted

    def places(self, size: int) -> Iterator[int]:
        last = tuple(self.index.ids[-size:])
        return islice(self.index.places(last), PLACES_LOOKED_AT) if len(last) == size else iter(())

    def following(self, place: int, most: int) -> list[int]:
        """What stands behind `place`; where that reaches the end of the text, it goes round."""
        ids = self.index.ids
        period = len(ids) - place
        found = ids[place : place + most] if period >= most else [ids[place + i % period] for i in range(most)]
        return found[: found.index(_BORDER)] if _BORDER in found else found
