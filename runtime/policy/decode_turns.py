"""Decode turns: selects which sequences decode in a step that is too short for all of them. Pure functions, no clock.

A request with many rows must not delay others, so rows are shared by caller, then by request, then by row. In every step each
caller decodes as many rows as the caller with the fewest rows. The requests of a caller share its rows in the same way.
Remaining rows are shared evenly; among the rows of a request, those that decoded longest ago come first. If all requests have
one row, all of them decode in every step."""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Several
from typing import NamedTuple

from runtime.sequence import Sequence

RequestKey = tuple[bytes | None, int]  # a caller, and a request (its group)


class Turns(NamedTuple):
    """Selection of decodes for a step.

    `order`: all sequences that could decode, selected ones first. `num_always`: number of leading sequences in `order` that
    decode in every step. `narrowest`: sequences of the requests with the fewest rows. `wide`: (caller, group) of requests with
    further sequences in `order`."""

    order: Several[Sequence]
    num_always: int
    narrowest: Several[Sequence]
    wide: frozenset[RequestKey]


class DecodeTurns:
    """Rotation of decodes: stores for each sequence the number of the last step in which it decoded."""

    def __init__(self) -> None:
        self._num_turns = 0

    def record(self, sequences: Iterable[Sequence]) -> None:
        """Record that `sequences` decode in the step that is being scheduled. Other sequences do not."""
        self._num_turns += 1
        for sequence in sequences:
            sequence.last_turn = self._num_turns

    def shared(self, decodes: Several[Sequence]) -> Turns:
        """Return `decodes` in the order in which the next step should select them."""
        requests: dict[bytes | None, dict[int, list[Sequence]]] = {}  # rows by caller and group
        for sequence in decodes:
            requests.setdefault(sequence.request.caller, {}).setdefault(sequence.group, []).append(sequence)
        widths = {caller: min(map(len, groups.values())) for caller, groups in requests.items()}
        shares = {caller: widths[caller] * len(groups) for caller, groups in requests.items()}
        share = min(shares.values(), default=0)
        if all(sum(map(len, groups.values())) == share for groups in requests.values()):
            return Turns(decodes, len(decodes), decodes, frozenset())
        places: list[tuple[int, int, Sequence]] = []  # place among the caller's rows, last turn, row
        for groups in requests.values():
            ranks = [
                (rank, sequence.last_turn, sequence.number, sequence)
                for rows in groups.values()
                for rank, sequence in enumerate(sorted(rows, key=lambda one: one.last_turn))
            ]
            places += [
                (place, last, one) for place, (_, last, _, one) in enumerate(sorted(ranks, key=lambda rank: rank[:3]))
            ]
        places.sort(key=lambda place: place[:2])
        order = [one for _, _, one in places]
        num_always = sum(place < share for place, _, _ in places)
        narrowest = [
            sequence
            for caller, groups in requests.items()
            if shares[caller] == share
            for rows in groups.values()
            if len(rows) == widths[caller]
            for sequence in rows
        ]
        return Turns(order, num_always, narrowest, frozenset(request_key(one) for one in order[num_always:]))


def request_key(sequence: Sequence) -> RequestKey:
    return sequence.request.caller, sequence.group


def num_requests(requests: Set[RequestKey], narrowest: Iterable[Sequence]) -> int:
    """Return the number of `requests` that share steps with `narrowest`. If all belong to one other caller, return 1."""
    callers = {caller for caller, _ in requests}
    if len(callers) == 1 and any(one.request.caller not in callers for one in narrowest):
        return 1
    return len(requests)
