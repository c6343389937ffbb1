"""N-gram drafts (prompt lookup): the tokens that followed an earlier occurrence of the text's last tokens. The text consists of
the client's prediction, the prompt and the output.

The longest match is used. Among equally long matches, those in the prediction come first, then the latest."""

from __future__ import annotations

from collections.abc import Sequence as Several

from runtime.sequence import Sequence
from runtime.speculate.gram_index import BORDER, GramIndex, GrowingTexts


class Ngram:
    """Proposer that looks up the text's last n tokens, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._texts = GrowingTexts(*{shortest, longest})

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        text = self._texts.caught_up(sequence)
        prediction, num = sequence.request.prediction, sequence.num_output_tokens
        if num < min(self._shortest, len(prediction)) and sequence.output_ids == [*prediction[:num]]:
            return prediction[num:][:most]  # too few tokens to look up
        place = self._place(text, len(prediction))
        return _following(text.ids, place, most) if place else ()

    def finished(self, sequence: Sequence) -> None:
        self._texts.finished(sequence)

    def _place(self, text: GramIndex, num_predicted: int) -> int:
        """Return the position after the longest match of the last tokens; 0 for none. `num_predicted`: length of the prediction."""
        best, best_length = 0, 0
        for size in dict.fromkeys((self._longest, self._shortest)):
            for place in text.places_of_end(text, size):
                length = text.match_length(place, text.ids, self._longest)
                is_first = place < num_predicted <= best
                if length > best_length or (length == best_length and is_first):
                    best, best_length = place, length
            if best:
                break
        return best


def _following(ids: list[int], place: int, most: int) -> list[int]:
    """Return the `most` tokens of `ids` from position `place` on. If the text ends before, repeat these tokens."""
    period = len(ids) - place
    found = ids[place : place + most] if period >= most else [ids[place + i % period] for i in range(most)]
    return found[: found.index(BORDER)] if BORDER in found else found
