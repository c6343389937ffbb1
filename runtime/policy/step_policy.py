"""Step policy: selects the sequences that decode in a step, and its number of prompt tokens. Pure functions, no clock.

If not all sequences can decode in a step (`StepBudget.has_turns`), they alternate as in `decode_turns.py`. In steps with
decodes, `StepBudget` limits prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, NamedTuple

from runtime.policy.decode_turns import DecodeTurns, Turns, num_requests, request_key
from runtime.policy.step_budget import Decodes, EngineLoad, StepBudget
from runtime.policy.step_cost import SCORED_COST

if TYPE_CHECKING:
    from runtime.sequence import Sequence

_TILE = 64  # tokens
_TILES = (
    (4096, 512),
    (2048, 256),
    (1024, 128),
    (0, _TILE),
)  # token counts of steps, and the multiple to which they are reduced, as for captured graphs


class Queues(NamedTuple):
    """State of the queues when a step is scheduled. `wanted`: number of tokens that each of `running` could compute.
    `num_could_start`: number of free rows. `hit_share`: expected fraction of waiting tokens in the prefix cache."""

    running: Several[Sequence]
    wanted: list[int]
    waiting: Several[Sequence]
    num_could_start: int
    hit_share: float


class StepPlan(NamedTuple):
    """Limits of a step, in tokens. `budget`: all tokens. `extra_room`: draft tokens. `scored_cost`: budget used by each prompt
    token with logprobs."""

    num_decodes: int
    budget: int
    extra_room: int
    scored_cost: int


def _whole_tiles(num_decodes: int, num_prompt_tokens: int) -> int:
    """Return the token count of a step. Unless the step is small, it is rounded down so that the last matrix tile is full."""
    total = num_decodes + num_prompt_tokens
    return (
        total if num_prompt_tokens < 2 * _TILE else total - total % next(tile for size, tile in _TILES if total >= size)
    )


def _is_answering(sequence: Sequence) -> bool:
    """Return True if the sequence has begun to generate and is not complete, even while it waits for a mask or step results."""
    return bool(sequence.output_ids or sequence.num_in_flight) and sequence.num_tokens < sequence.max_tokens_total


class StepPolicy:
    """Planner of steps. `budget`: limits prompt tokens in steps with decodes. `max_num_tokens`: maximum tokens of any step."""

    def __init__(self, budget: StepBudget, max_num_tokens: int) -> None:
        self.budget = budget
        self._max_num_tokens = max_num_tokens
        self._turns = DecodeTurns()

    def plan(self, queues: Queues) -> StepPlan:
        """Return the limits of the next step. Set entries of `queues.wanted` to 0 for decodes that must not be in it."""
        wanted = queues.wanted
        turns, alone = self._take_turns(queues) if self.budget.has_turns else (None, False)
        num_decodes, num_again, num_prompts = wanted.count(1), 0, 0
        if num_decodes + wanted.count(0) < len(wanted):
            for sequence, num_wanted in zip(queues.running, wanted, strict=True):
                if num_wanted > 1 and sequence.rewound_to >= 0:
                    num_decodes += 1
                    num_again += num_wanted - 1
                elif num_wanted > 1:
                    num_prompts += 1
        budget = self._max_num_tokens
        if not (queues.waiting or num_prompts):
            return StepPlan(num_decodes, budget, budget - num_decodes - num_again, 1)
        scored_cost = 1
        if num_decodes or any(map(_is_answering, queues.running)):
            mixed = 0 if alone else self.budget.prompt_tokens(self._load(queues, turns))
            if mixed is not None:
                budget = min(budget, _whole_tiles(num_decodes, mixed))
                scored_cost = max(1, min(SCORED_COST, mixed))
        return StepPlan(
            num_decodes, budget, (budget - num_decodes - num_again) // 2, scored_cost
        )  # prompts also progress

    def _take_turns(self, queues: Queues) -> tuple[Turns, bool]:
        """Select the decodes of a step and set the `queues.wanted` entries of others to 0. Return the selection, and True if
        only the narrowest ones decode, without prompts."""
        running, wanted, budget = queues.running, queues.wanted, self.budget
        turns = self._turns.shared(
            [
                sequence
                for sequence, num_wanted in zip(running, wanted, strict=True)
                if num_wanted == 1 and sequence.rewound_to < 0 and _is_answering(sequence)
            ]
        )
        others = turns.wide or queues.waiting or any(num_wanted > 1 for num_wanted in wanted)
        alone = bool(turns.narrowest and others) and budget.is_for_narrowest()
        decoding = turns.order
        if alone:
            decoding = turns.narrowest
        elif turns.wide:
            decoding = turns.order[: max(turns.num_always, budget.num_decodes(self._load(queues, turns)))]
        if len(decoding) < len(turns.order):
            self._turns.record(decoding)
            resting = {sequence.number for sequence in turns.order} - {sequence.number for sequence in decoding}
            for index, sequence in enumerate(running):
                if sequence.number in resting:
                    wanted[index] = 0
        return turns, alone

    def _load(self, queues: Queues, turns: Turns | None) -> EngineLoad:
        num_decodes = num_context = num_waiting = depth = 0
        requests = set(turns.wide) if turns is not None else set()
        for sequence, wanted in zip(queues.running, queues.wanted, strict=True):
            if wanted == 1:
                num_decodes += 1
                num_context += sequence.num_computed_tokens
            elif wanted:
                num_waiting += wanted
                depth = depth or sequence.num_computed_tokens
                requests.add(request_key(sequence))
        could_start = queues.waiting[: queues.num_could_start]
        num_waiting += int(sum([sequence.num_known_tokens for sequence in could_start]) * (1 - queues.hit_share))
        load = EngineLoad(num_decodes, num_context, num_waiting, depth)
        if turns is None:
            return load
        requests.update([request_key(sequence) for sequence in could_start])
        context = sum([sequence.num_computed_tokens for sequence in turns.narrowest])
        return load._replace(
            num_requests=num_requests(requests, turns.narrowest), narrowest=Decodes(len(turns.narrowest), context)
        )
