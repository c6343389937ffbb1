"""Gram index: earlier occurrences of short token runs in a growing text.

An occurrence of an n-gram is stored as the number of tokens up to its end, where its continuation begins. The index maps an
n-gram to its last occurrence, and each occurrence links to the previous one, as in an LZ compressor's window. A token costs
one entry per n-gram size, regardless of the text's length, and a search costs one step per occurrence visited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from runtime.sequence import Sequence

BORDER = -1  # between texts; no gram with it is looked up
PLACES_A_STEP = 1024  # that are indexed in a step, of all texts together: about a millisecond
PLACES_LOOKED_AT = 16  # of a gram
MAX_PROMPT = 32_768  # last tokens of a prompt that are indexed, at some 300 bytes each


class GramIndex:
    """Index of a text's n-grams. `sizes`: lengths of the n-grams. `ids`: the text."""

    def __init__(self, *sizes: int) -> None:
        self.ids: list[int] = []
        self._num_indexed = 0  # places up to this one are indexed
        self._latest: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._earlier: dict[int, list[int]] = {size: [0] for size in sizes}  # by place; 0: none

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Iterable[int]) -> None:
        self.ids += ids

    def index(self, most: int) -> int:
        """Index up to `most` more places that something follows, in order. Return how many these were."""
        first = self._num_indexed + 1
        end = min(len(self.ids), first + most)  # the last place is that of the tokens to look up
        if first >= end:
            return 0
        ids = self.ids
        for size, latest in self._latest.items():
            earlier = self._earlier[size]
            for place in range(first, end):
                if place < size:
                    earlier.append(0)
                    continue
                gram = tuple(ids[place - size : place])
                earlier.append(latest.get(gram, 0))
                latest[gram] = place
        self._num_indexed = end - 1
        return end - first

    def places(self, last: tuple[int, ...]) -> Iterator[int]:
        """Return where `last`, which is as long as one of the sizes, has stood, the latest place first."""
        earlier = self._earlier[len(last)]
        place = self._latest[len(last)].get(last, 0)
        while place:
            yield place
            place = earlier[place]

    def places_of_end(self, text: GramIndex, size: int) -> Iterator[int]:
        """Return the latest places of the last `size` tokens of `text`."""
        last = tuple(text.ids[-size:])
        return islice(self.places(last), PLACES_LOOKED_AT) if len(last) == size else iter(())

    def match_length(self, place: int, text: list[int], most: int) -> int:
        """Return how many tokens before `place` equal those at the end of `text`, up to `most`."""
        ids, length, num = self.ids, 0, len(text)
        most = min(most, place, num)
        while length < most and ids[place - 1 - length] == text[num - 1 - length]:
            length += 1
        return length


class GrowingTexts:
    """Prediction, prompt and answer of each sequence that asks for guesses, indexed piece by piece."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes
        self._texts: dict[int, GramIndex] = {}  # by number
        self._num_taken: dict[int, int] = {}  # tokens of the answer, by number
        self._left = PLACES_A_STEP  # that may be indexed in this step
        self._asked: set[int] = set()  # numbers; a step begins when one is asked again

    def caught_up(self, sequence: Sequence) -> GramIndex:
        """Return the sequence's text with all that is known by now."""
        number = sequence.number
        if number in self._asked:
            self._asked.clear()
            self._left = PLACES_A_STEP
        self._asked.add(number)
        text = self._texts.get(number)
        if text is None:
            text = self._texts[number] = GramIndex(*self._sizes)
            if sequence.request.prediction:
                text.extend((*sequence.request.prediction, BORDER))
            text.extend(sequence.prompt_ids[-MAX_PROMPT:])
            self._num_taken[number] = 0
        if self._num_taken[number] < sequence.num_output_tokens:
            text.extend(sequence.output_ids[self._num_taken[number] :])
            self._num_taken[number] = sequence.num_output_tokens
        self.index(text)
        return text

    def index(self, text: GramIndex) -> None:
        """Index more of a text, as far as the step allows."""
        self._left -= text.index(self._left)

    def finished(self, sequence: Sequence) -> bool:
        """Forget the sequence. Return whether it asked for guesses."""
        self._num_taken.pop(sequence.number, None)
        return self._texts.pop(sequence.number, None) is not None
