"""Suffix decoding: drafts the tokens that most often followed the last tokens, in this text or in past answers (Oliaro et al.,
"SuffixDecoding", arXiv 2411.04975).

The paper counts in suffix trees. Here, recent occurrences of the last tokens vote on the next token, weighted by the length of
the match. The result is the same frequencies over recent text, in a few integers per token. The share of votes is the draft's
probability, so repetitive text gets many drafts and new text none. Past answers are separated by cache salt, because the speed
of an answer could reveal answers to other clients."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Several
from typing import NamedTuple

from runtime.sequence import Sequence
from runtime.speculate.gram_index import BORDER, GramIndex, GrowingTexts

SIZES = (6, 2)  # sizes of n-grams to look up, longest first
MAX_PAST_TOKENS = 131_072  # of all past answers, about 300 bytes each


class _Place(NamedTuple):
    """Match in a text. `place`: position after the match. `length`: number of matching tokens before `place`."""

    text: GramIndex
    place: int
    length: int


class Suffix:
    """Proposer that drafts by weighted votes of matches in this text and in past answers.

    `depth`: maximum length of a match. `max_answers`: maximum number of stored past answers. `factor`: maximum draft tokens per
    matching token. `min_probability`: minimum probability that all draft tokens are accepted."""

    def __init__(self, depth: int, max_answers: int, factor: float, min_probability: float) -> None:
        self._depth = depth
        self._factor = factor
        self._min_probability = min_probability
        self._texts = GrowingTexts(*SIZES)
        self._past = PastAnswers(max_answers)

    def propose(self, sequence: Sequence, most: int) -> Several[int]:
        own = self._texts.caught_up(sequence)
        places = [*self._places(own, own)]
        for past in self._past.of(sequence.request.cache_salt):
            self._texts.index(past)
            places += self._places(past, own)
        if not places:
            return ()
        longest = max(place.length for place in places)
        voters = [place for place in places if 2 * place.length >= longest]
        return self._voted(voters, min(most, max(1, int(self._factor * longest))))

    def finished(self, sequence: Sequence) -> None:
        if self._texts.finished(sequence) and sequence.output_ids:
            self._past.add(sequence.request.cache_salt, sequence.output_ids)

    def _places(self, index: GramIndex, own: GramIndex) -> Iterator[_Place]:
        for size in SIZES:
            found = index.places_of_end(own, size)
            places = [_Place(index, place, index.match_length(place, own.ids, self._depth)) for place in found]
            if places:
                yield from places
                return

    def _voted(self, voters: list[_Place], most: int) -> list[int]:
        guess: list[int] = []
        probability = 1.0
        while len(guess) < most:
            votes: Counter[int] = Counter()
            for voter in voters:
                at = voter.place + len(guess)
                if at < len(voter.text):
                    votes[voter.text.ids[at]] += voter.length
            if not votes:
                break
            (token_id, weight) = max(votes.items(), key=lambda vote: vote[1])  # of equal weights the latest match
            probability *= weight / votes.total()
            if token_id == BORDER or probability < self._min_probability:
                break
            at = len(guess)
            voters = [
                voter for voter in voters
                if voter.place + at < len(voter.text) and voter.text.ids[voter.place + at] == token_id
            ]  # fmt: skip
            guess.append(token_id)
        return guess


class PastAnswers:
    """Latest answers of all cache salts, at most `max_answers` and `max_tokens` in total, with LRU eviction of salts."""

    def __init__(self, max_answers: int, max_tokens: int = MAX_PAST_TOKENS) -> None:
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._owners: OrderedDict[str | None, _Generations] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(owner.num_tokens for owner in self._owners.values())

    @property
    def num_answers(self) -> int:
        return sum(owner.num_answers for owner in self._owners.values())

    def of(self, salt: str | None) -> Several[GramIndex]:
        """Return the texts of past answers with the cache salt `salt`."""
        owner = self._owners.get(salt)
        if owner is None:
            return ()
        self._owners.move_to_end(salt)
        return owner.texts()

    def add(self, salt: str | None, ids: Several[int]) -> None:
        if not self._max_answers:
            return
        owner = self._owners.get(salt)
        if owner is None:
            owner = self._owners[salt] = _Generations(-(-self._max_answers // 2), self._max_tokens // 2)
        self._owners.move_to_end(salt)
        owner.add(ids)
        while len(self._owners) > 1 and (self.num_tokens > self._max_tokens or self.num_answers > self._max_answers):
            self._owners.popitem(last=False)


class _Generations:
    """Answers of one cache salt in two texts: a young text that grows, and an old text that is dropped as a whole. Each
    contains at most `max_answers` answers and `max_tokens` tokens."""

    def __init__(self, max_answers: int, max_tokens: int) -> None:
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._old = self._young = GramIndex(*SIZES)
        self._num_old = self._num_young = 0  # numbers of answers

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts()))

    @property
    def num_answers(self) -> int:
        return self._num_old + self._num_young

    def texts(self) -> list[GramIndex]:
        return [self._young] if self._old is self._young else [self._young, self._old]

    def add(self, ids: Several[int]) -> None:
        """Store the answer `ids`; of a very long answer, only its end."""
        ids = (*ids[1 - self._max_tokens :], BORDER)
        if self._num_young == self._max_answers or len(self._young) + len(ids) > self._max_tokens:
            self._old, self._num_old = self._young, self._num_young
            self._young, self._num_young = GramIndex(*SIZES), 0
        self._young.extend(ids)
        self._num_young += 1
