"""Scheduler: decides each step in plain data. No torch, no clock, no I/O.

There is no prefill phase and no decode phase: in every step each sequence catches up its computed tokens with its known
ones, within one token budget. Counts advance when a step is scheduled, so `schedule` can run ahead of the device; `settle`
brings the sampled ids back, drops those of sequences that ended meanwhile, and corrects the counts.

A row with drafts, guesses of a Proposer, is counted as if all of them were right: blocks, positions and ids in flight are
reserved for the most. Which were, the device knows first: what is scheduled behind unsettled drafts says the greatest position
that it can have, and brings no ids. When a step settles, its sequence's counts go back by what it gained less than was reserved;
blocks beyond stay with the sequence, for its next tokens. Only known tokens are offered to the prefix cache. Where there are drafts
worth while for sequences with ids in flight, the step waits for these, so that all go on together, with drafts behind known ids;
where there are none it is one step ahead as ever. Drafts that the device makes behind a step wait for nobody: a row says how many
it is to make, has blocks for them, and the next one checks them unseen. What makes them by layers of its own rests in steps where
drafts do not pay. It has no keys and values of these, so whose tokens they were has no drafts from then on, nor has who finds
their blocks in the prefix cache: `UnfollowedTokens`, which also says whom it is worth while to compute anew.

Why it cannot deadlock: running sequences are preempted from the end of the policy's order, by earlier ones; the first in line
therefore keeps its blocks, and the pool holds at least one sequence of the greatest length. Decodes are served in that order,
and before prompts, whose turns are the policy's: where one lacks a block that those of this very step have it waits, and nobody
starts meanwhile. A prompt is promised the blocks of all of it when it is admitted, and takes them as its steps come to them: as
far as others go it has them already.
Why blocks may be freed while a launched step still reads or writes them: steps execute in the order they are launched, so a
new owner's writes come after. That goes for a window's blocks too: a sequence gives up, before its next step is decided, those
that this step and all later ones do not see, wherever unsettled steps really ended."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import NamedTuple

from runtime.api import FinishReason
from runtime.batch import (
    NOT_FINITE,
    ON_DEVICE,
    SAMPLE,
    PromptLogprobsSpan,
    RowBinding,
    Sample,
    ScheduledBatch,
    ScheduledRow,
    Work,
    decode_row,
)
from runtime.block_copies import BlockCopies
from runtime.decode_turns import DecodeTurns, Turns, asking, num_asking
from runtime.encode.scheduling import EncoderScheduling
from runtime.kv.block_pool import BlockIds, BlockPool
from runtime.kv.block_table import BlockTable, NewBlocks
from runtime.kv.kinds import Nothing
from runtime.kv.prefix_cache import NO_EXTRAS, Match, PrefixCache
from runtime.lora.slots import AdapterSlots
from runtime.media import media_of_blocks
from runtime.policy import Policy
from runtime.sequence import Checkpoint, Sequence, Status
from runtime.speculate.speculation import Speculation
from runtime.speculate.unfollowed import UnfollowedTokens
from runtime.step_budget import Decodes, FixedBudget, Load, StepBudget

_TILE = 64  # tokens
_NEW_SHARE = 0.1  # of the last to start, in what is known of those that started
_TILES = (
    (4096, 512),
    (2048, 256),
    (1024, 128),
    (0, _TILE),
)  # tokens of a step, and what it is cut to: as graphs are captured


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int  # rows of the device tables
    max_num_batched_tokens: int  # budget of one step; more than max_num_seqs, so a prompt moves on beside any decodes
    eos_token_ids: frozenset[int]
    max_num_mixed_tokens: int | None = None  # of prompts in a step that decodes share: they never wait long for one
    in_one_step: bool = False  # a prompt is never cut: no longer one than a step holds may be added
    num_stages: int = 1  # of the model, each of which computes another step

    def __post_init__(self) -> None:
        if not 0 < self.max_num_seqs < self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs ({self.max_num_seqs})"
            )


def _whole_tiles(num_decodes: int, num_prompt_tokens: int) -> int:
    """Tokens of a step with so many of both, less what would only begin a further tile of a device's matrix units."""
    total = num_decodes + num_prompt_tokens
    return (
        total if num_prompt_tokens < 2 * _TILE else total - total % next(tile for size, tile in _TILES if total >= size)
    )


def _is_answering(sequence: Sequence) -> bool:
    """Whether it has begun to answer and goes on, even if it waits for a mask or for ids at the moment."""
    return bool(sequence.output_ids or sequence.num_in_flight) and sequence.num_tokens < sequence.max_tokens_total


def _num_reserved(work: Work) -> int:
    """Ids that a row brings at most."""
    return 1 + work.num_drafts if type(work) is Sample else 0


class Settled(NamedTuple):
    """What a step brought a sequence: the sampled tokens that count, none where the model failed to give one or none was wanted,
    or what was pooled; and how it ended, if it did. `place`: which of the step's sampling or pooling rows it was."""

    sequence: Sequence
    token_ids: list[int]
    finish: FinishReason | None
    place: int
    pooled: memoryview | None = None


_made = tuple.__new__  # of a named tuple: in a third of the time that its class takes


class _Refusal(NamedTuple):
    """A note that there was no room to admit sequence `number`; nor is there as long as all of these are the same: blocks can
    only have become fewer, and a hit that somebody came to use is a free block less and one less to take."""

    number: int
    match: Match
    num_freed: int
    num_running: int


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, policy: Policy,
        speculation: Speculation | None = None, step_budget: StepBudget | None = None, adapters: AdapterSlots | None = None,
        encoding: EncoderScheduling | None = None,
    ) -> None:  # fmt: skip
        """`speculation`: drafts, if any. `step_budget`: of prompts beside decodes; None: as the limits say. `adapters`: those that
        requests may have, if any. `encoding`: of pictures and sounds, where the model takes some."""
        self.limits = limits
        self.pool = pool
        self.cache = cache
        self.policy = policy
        self.copies = BlockCopies(pool, cache)
        self.step_budget = step_budget or FixedBudget(limits.max_num_mixed_tokens)
        self.speculation = speculation
        self._to_propose: dict[int, int] = {}  # drafts that are wanted behind this step, by number
        self._has_device_drafts = speculation is not None and speculation.on_device
        self._unfollowed = UnfollowedTokens(speculation, cache.block_size)
        self.adapters = adapters
        self.encoding = encoding
        self._whole_prompts = encoding is not None and encoding.limits.whole_prompts
        self._has_states = any(group.state for group in cache.groups)
        self._has_windows = any(group.window is not None for group in cache.groups)
        self._widths = [group.width for group in cache.groups]
        self._blocks_per_entry = sum(group.width for group in cache.groups if group.kind.grows)
        # Of an encoder's sequences, whose layers keep nothing: these stay empty, so all may have the same.
        keeps_nothing = all(isinstance(group.kind, Nothing) for group in cache.groups)
        self._empty_tables = (
            tuple(BlockTable(cache.block_size, group) for group in cache.groups) if keeps_nothing else ()
        )
        self._sequences: dict[int, Sequence] = {}  # by number: those that have not finished
        self.waiting: list[Sequence] = []  # both lists in policy order
        self.running: list[Sequence] = []
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._refusal: _Refusal | None = None  # the last
        self._turns = DecodeTurns()
        self._num_steps = 0  # of which stages have several under way
        self.num_preemptions = 0
        self.num_computed_anew = 0  # sequences, so that drafts of them could be made again
        self.num_prefix_queries = 0  # tokens looked up, and found
        self.num_prefix_hits = 0
        self._hit_share = 0.0  # of the tokens of those that started lately, found

    # --- what the engine calls ------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.number] = sequence
        params = sequence.sampling
        eos_token_ids = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        sequence.ending_ids = params.stop_token_ids | eos_token_ids | {NOT_FINITE}
        if self.adapters is not None and sequence.request.adapter is not None:
            self.adapters.waits(sequence.request.adapter.key)
        if self.encoding is not None:
            self.encoding.admit(sequence)
        self.policy.waits(sequence)
        insort(self.waiting, sequence, key=self.policy.order)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None where no sequence can advance, or all had better wait for ids in flight."""
        batch = self._next_step(self.limits.num_stages)
        if batch is None and self.limits.num_stages > 1 and not any(each.num_in_flight for each in self.running):
            return self._next_step(1)  # whose turn it was could not go on
        return batch

    def _next_step(self, num_stages: int) -> ScheduledBatch | None:
        """`num_stages`: among so many steps, of which this is one, decodes are shared out."""
        budget = self.limits.max_num_batched_tokens
        if self._has_device_drafts:
            self._begin_following()
        preemptions_before = self.num_preemptions
        rows: list[ScheduledRow] = []
        # Tokens between what is computed and what is known or in flight; none where nothing more is wanted.
        num_wanted = [
            num_tokens - sequence.num_computed_tokens
            if (num_tokens := sequence.num_known_tokens + sequence.num_in_flight) < sequence.max_tokens_total
            and sequence.checkpoint is None
            else 0
            for sequence in self.running
        ]
        if num_stages > 1:
            self._take_stage_turns(num_wanted, num_stages)
        turns, alone = self._take_turns(num_wanted) if self.step_budget.has_turns else (None, False)
        decodes, read_again = num_wanted.count(1), 0
        if self._has_states and self.speculation is not None:
            wanting = zip(self.running, num_wanted, strict=True)
            restarts = [wanted for sequence, wanted in wanting if sequence.restart >= 0 and wanted > 1]
            decodes += len(restarts)
            read_again = sum(restarts) - len(restarts)
        scored_cost, room_for_drafts = 1, budget - decodes - read_again
        if self.waiting or decodes + num_wanted.count(0) < len(num_wanted):
            if decodes or any(map(_is_answering, self.running)):
                mixed = 0 if alone else self.step_budget.prompt_tokens(self._load(num_wanted, turns))
                if mixed is not None:
                    budget = min(budget, _whole_tiles(decodes, mixed))
                    scored_cost = min(self.step_budget.scored_cost(), mixed)
            room_for_drafts = (budget - decodes - read_again) // 2  # prompts move on, too
        drafts = self._drafts(num_wanted, room_for_drafts) if self.speculation is not None and decodes else {}
        if drafts is None:
            return None
        if self._has_device_drafts:
            self._to_propose = self._proposals(num_wanted, drafts) if self._unfollowed.follows else {}
        prompts: list[Sequence] = []
        num_decodes = 0
        may_be_plain = not (drafts or self._has_device_drafts or self._has_windows or self.encoding)
        for index, wanted in enumerate(num_wanted):
            if index == len(self.running):
                break  # the rest was preempted
            if not wanted:
                continue
            sequence = self.running[index]
            if wanted == 1 and may_be_plain and (row := self._decode(sequence)) is not None:
                rows.append(row)
                num_decodes += 1
                budget -= 1
                continue
            if wanted != 1 and (sequence.restart < 0 or wanted > budget - len(self.running) + index):
                prompts.append(sequence)
                continue
            if (sequence.request.media or self._whole_prompts) and not self._is_encoded(rows, sequence):
                continue
            draft_ids = drafts.get(sequence.number, ())
            if draft_ids and not self._has_blocks(sequence, wanted + len(draft_ids)):
                draft_ids = ()
            num_tokens = wanted + len(draft_ids)
            end = sequence.num_computed_tokens + num_tokens
            if (end > sequence.num_slots or self._has_windows) and not self._grow(sequence, end, rows):
                break  # it was the last in line and preempted itself
            if draft_ids and self._has_states:
                self._keep_states(sequence)
            rows.append(self._advance(sequence, num_tokens, draft_ids))
            budget -= num_tokens
        if prompts or self.waiting:
            may_start = self.num_preemptions == preemptions_before
            if self.adapters is not None:
                self.adapters.turn(self.waiting, self.policy.order)
            self._compute_prompts(rows, prompts, budget, scored_cost, may_start=may_start)
        if self._unfollowed.follows and not self._unfollowed.is_followed:
            self._note_unfollowed(rows)
        copies = self.copies.take()
        if not rows and not copies and (self.encoding is None or not self.encoding.has_work):
            return None
        num_preempted = self.num_preemptions - preemptions_before
        loads = () if self.adapters is None else self.adapters.take_loads()
        decodes_only = num_decodes == len(rows)
        num_tokens = num_decodes if decodes_only else sum([row.num_tokens for row in rows])
        work, drops = ((), ()) if self.encoding is None else self.encoding.take()
        return ScheduledBatch(
            tuple(rows),
            num_tokens,
            num_preempted,
            copies,
            work,
            loads,
            drops,
            self._unfollowed.is_followed,
            decodes_only,
        )

    def _decode(self, sequence: Sequence) -> ScheduledRow | None:
        """`_advance` by the next token; None where there is more to it than to sample it, and to tell of new blocks."""
        start, num_known = sequence.num_computed_tokens, sequence.num_known_tokens
        if (
            sequence.work is not SAMPLE
            or sequence.needs_bind
            or sequence.restart >= 0
            or sequence.next_prompt_logprob < sequence.num_prompt_tokens
            or not sequence.num_prompt_tokens <= start < sequence.num_slots
        ):
            return None
        assert sequence.row is not None
        end = sequence.num_computed_tokens = start + 1
        sequence.num_in_flight += 1
        if self.cache.enabled:
            full = (end if end < num_known else num_known) // self.cache.block_size
            if full > sequence.num_registered_blocks:
                self._register_blocks(sequence, full)
        token_ids = sequence.known_ids(start, end) if start < num_known else ()
        new_blocks = self._take_new_blocks(sequence) if sequence.has_new_blocks else ()
        return decode_row(sequence.number, sequence.row, start, token_ids, new_blocks)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def sequence(self, number: int) -> Sequence | None:
        """None where it has finished."""
        return self._sequences.get(number)

    def settle(
        self, batch: ScheduledBatch, tokens: Several[list[int]], pooled: Several[memoryview | None] = ()
    ) -> list[Settled]:
        """Take in what each sampling and each pooling row of `batch` gained, in row order. Sequences that end here are finished;
        what they sampled behind their end is dropped. A row that gained nothing computes its last token again."""
        self.copies.release(batch.copies)
        sampling, find, settled = batch.sampling_rows, self._sequences.get, []
        for place, (row, token_ids) in enumerate(zip(sampling, tokens, strict=True)):
            sequence, work = find(row.number), row.work
            if sequence is None:
                continue  # it ended while this step ran: tokens too many were computed
            if work is SAMPLE and len(token_ids) == 1 and self.speculation is None:  # as nearly all
                token_id, num_known = token_ids[0], sequence.num_known_tokens + 1
                if token_id not in sequence.ending_ids and num_known < sequence.max_tokens_total:
                    sequence.num_in_flight -= 1
                    sequence.num_known_tokens = num_known
                    sequence.output_ids.append(token_id)
                    settled.append(_made(Settled, (sequence, token_ids, None, place, None)))
                    continue
            assert type(work) is Sample
            num_reserved = 1 + work.num_drafts
            sequence.num_in_flight -= num_reserved
            if self.speculation is not None:
                self.speculation.settled(sequence, work.num_drafts, token_ids)
            if len(token_ids) == num_reserved:
                if sequence.checkpoint is not None and work.num_drafts:  # else it is that of a step behind this one
                    self._drop_states(sequence)
            else:
                self._roll_back(sequence, num_reserved - len(token_ids))
                if not token_ids:
                    continue
            finish, num_before = None, sequence.num_known_tokens
            for token_id in token_ids:
                if token_id in sequence.ending_ids or sequence.num_known_tokens + 1 >= sequence.max_tokens_total:
                    finish = self._end_with(sequence, token_id)
                    token_ids = token_ids[: sequence.num_known_tokens - num_before]
                    break
                sequence.output_ids.append(token_id)
                sequence.num_known_tokens += 1
            settled.append(Settled(sequence, token_ids, finish, place))
        if len(sampling) < len(batch.rows):
            settled += self._settle_pooled(batch, pooled)
        return settled

    def _settle_pooled(self, batch: ScheduledBatch, pooled: Several[memoryview | None]) -> list[Settled]:
        settled = []
        for place, (row, vector) in enumerate(zip(batch.pooling_rows, pooled, strict=True)):
            sequence = self._sequences.get(row.number)
            if sequence is not None:
                finish = FinishReason.ERROR if vector is None else FinishReason.STOP
                self.finish(sequence, finish)
                settled.append(Settled(sequence, [], finish, place, vector))
        return settled

    def _end_with(self, sequence: Sequence, token_id: int) -> FinishReason:
        """It has ended with `token_id`, which is its last token; but where it failed, or wanted none, it has no further one."""
        if token_id == NOT_FINITE:
            finish = FinishReason.ERROR
        elif not sequence.sampling.max_tokens:
            finish = FinishReason.LENGTH
        else:
            finish = FinishReason.STOP if token_id in sequence.ending_ids else FinishReason.LENGTH
            sequence.output_ids.append(token_id)
            sequence.num_known_tokens += 1
        self.finish(sequence, finish)
        return finish

    def _roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """So many fewer than were reserved came. One that has been preempted meanwhile starts over anyway."""
        if num_tokens < 0:
            raise ValueError(f"a row gained {-num_tokens} tokens more than were reserved for it")
        if sequence.checkpoint is not None:
            self._restart(sequence, sequence.checkpoint)
        elif sequence.row is not None:
            sequence.num_computed_tokens -= num_tokens

    def _keep_states(self, sequence: Sequence) -> None:
        """Copy what its recurrent layers have read, before its next step reads drafts. It is in no other step until that has
        settled, so what is copied is what it goes back to."""
        kept = []
        for table in self._state_tables(sequence):
            block_ids = self.pool.allocate(len(table.ids))
            self.cache.forget(block_ids)
            for source, target in zip(table.ids, block_ids, strict=True):
                self.copies.add(source, target)
            kept.append(block_ids)
        sequence.checkpoint = Checkpoint(sequence.num_computed_tokens, tuple(kept))

    def _drop_states(self, sequence: Sequence) -> None:
        if sequence.checkpoint is not None:
            for block_ids in sequence.checkpoint.block_ids:
                self.pool.release(block_ids, self.cache)
            sequence.checkpoint = None

    def _restart(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Some drafts were wrong, and its states have read them: the copies take their place, and what was right is read again."""
        for table, block_ids in zip(self._state_tables(sequence), checkpoint.block_ids, strict=True):
            self.pool.release(table.replace(block_ids), self.cache)
        sequence.has_new_blocks = True
        sequence.num_computed_tokens = sequence.restart = checkpoint.start
        sequence.checkpoint = None

    def _state_tables(self, sequence: Sequence) -> list[BlockTable]:
        return [table for table in sequence.tables if table.group.state]

    def defer(self, sampling: ScheduledBatch) -> ScheduledBatch:
        """`sampling`, split off its step, comes later, all steps before that one having settled: until then its sequences have
        nothing to compute and are in no step. What is to be sampled then: without drafts, which are given up."""
        rows = []
        for row in sampling.rows:
            sequence, work = self._sequences.get(row.number), row.work
            if sequence is None:
                continue
            assert type(work) is Sample
            sequence.num_in_flight -= 1 + work.num_drafts
            self._roll_back(sequence, work.num_drafts)
            num_tokens = row.num_tokens - work.num_drafts
            start = sequence.num_computed_tokens - num_tokens
            rows.append(row._replace(start=start, num_tokens=num_tokens, draft_ids=(), work=sequence.work))
        return replace(sampling, rows=tuple(rows))

    def is_current(self, row: ScheduledRow) -> bool:
        """Whether a deferred row may still be sampled. Not where its sequence has ended, or has been preempted: then it is
        computed again and sampled anew."""
        sequence = self._sequences.get(row.number)
        return (
            sequence is not None
            and sequence.row == row.row
            and row.end == sequence.num_computed_tokens == sequence.num_tokens
        )

    def resume(self, sampling: ScheduledBatch) -> None:
        """`sampling`, which was deferred and is current, is under way."""
        for row in sampling.rows:
            self._sequences[row.number].num_in_flight += 1

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End it now, whatever it was doing: its row and blocks are free when this returns."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.policy.ends(sequence)
        if self.speculation is not None:
            self.speculation.finished(sequence)
        if self.adapters is not None and sequence.request.adapter is not None:
            self.adapters.ends(sequence.request.adapter.key)
        sequence.status = Status.FINISHED
        sequence.finish = reason
        self._sequences.pop(sequence.number, None)

    def forget_step(self, batches: Several[ScheduledBatch]) -> None:
        """`batches` did not run: nothing they were to write can be trusted. Survivors among their sequences start over."""
        for batch in batches:
            self.copies.release(batch.copies)
            for row in batch.rows:
                sequence = self._sequences.get(row.number)
                if sequence is None:
                    continue
                sequence.num_in_flight -= _num_reserved(row.work)
                if row.prompt_logprobs is not None:
                    sequence.next_prompt_logprob = min(sequence.next_prompt_logprob, row.prompt_logprobs.start)
                if sequence.status is Status.RUNNING:
                    self._preempt(sequence)
        for sequence in list(self.running):  # they may share blocks with the above
            self._preempt(sequence)
        self.cache.clear()
        if self.adapters is not None:
            for batch in batches:
                self.adapters.forget(batch.adapter_loads)

    def _take_stage_turns(self, num_wanted: list[int], num_stages: int) -> None:
        """Decodes share the steps that are under way, one in each stage of the model: those have their turn whose ids are there, or
        will be when this step begins; where there are none, those that rested longest, and the first stage waits for their ids. The
        others have nothing to compute in `num_wanted`."""
        self._num_steps += 1
        decodes = [
            (index, sequence)
            for index, (sequence, wanted) in enumerate(zip(self.running, num_wanted, strict=True))
            if wanted == 1 or (wanted and sequence.restart >= 0)
        ]
        decodes.sort(key=lambda one: one[1].last_step)
        part, last = -(-len(decodes) // num_stages), self._num_steps - num_stages
        could = [one for one in decodes if not one[1].num_in_flight or one[1].last_step <= last]
        turns = could or [one for one in decodes if one[1].num_in_flight < 2]
        has_turn = {index for index, _ in turns[:part]}
        for index, sequence in decodes:
            if index in has_turn:
                sequence.last_step = self._num_steps
            else:
                num_wanted[index] = 0

    def _take_turns(self, num_wanted: list[int]) -> tuple[Turns, bool]:
        """Whose turn it is to decode, where that is bounded, and whether only those decode that want least, with no prompts beside
        them. Who rests in this step has nothing to compute in `num_wanted` then."""
        turns = self._turns.shared(
            [
                sequence
                for sequence, wanted in zip(self.running, num_wanted, strict=True)
                if wanted == 1 and sequence.restart < 0 and _is_answering(sequence)
            ]
        )
        others = turns.wide or self.waiting or any(wanted > 1 for wanted in num_wanted)
        alone = bool(turns.narrowest and others) and self.step_budget.is_for_narrowest()
        decoding = turns.order
        if alone:
            decoding = turns.narrowest
        elif turns.wide:
            decoding = turns.order[: max(turns.num_always, self.step_budget.num_decodes(self._load(num_wanted, turns)))]
        if len(decoding) < len(turns.order):
            self._turns.took(decoding)
            resting = {sequence.number for sequence in turns.order} - {sequence.number for sequence in decoding}
            for index, sequence in enumerate(self.running):
                if sequence.number in resting:
                    num_wanted[index] = 0
        return turns, alone

    def _load(self, num_wanted: Several[int], turns: Turns | None) -> Load:
        """`num_wanted`: tokens that each running sequence has still to compute."""
        num_decodes = num_context = num_waiting = depth = 0
        requests = set(turns.wide) if turns is not None else set()
        for sequence, wanted in zip(self.running, num_wanted, strict=True):
            if wanted == 1:
                num_decodes += 1
                num_context += sequence.num_computed_tokens
            elif wanted:
                num_waiting += wanted
                depth = depth or sequence.num_computed_tokens
                requests.add(asking(sequence))
        could_start = self.waiting[: len(self._free_rows)]
        num_waiting += int(sum([sequence.num_known_tokens for sequence in could_start]) * (1 - self._hit_share))
        load = Load(num_decodes, num_context, num_waiting, depth)
        if turns is None:
            return load
        requests.update([asking(sequence) for sequence in could_start])
        context = sum([sequence.num_computed_tokens for sequence in turns.narrowest])
        return load._replace(
            num_asking=num_asking(requests, turns.narrowest), narrowest=Decodes(len(turns.narrowest), context)
        )

    # --- running --------------------------------------------------------------------------------------------------

    def _drafts(self, num_wanted: list[int], room: int) -> dict[int, tuple[int, ...]] | None:
        """Drafts for decodes, by number, `room` in all at most. None where who should have some has ids in flight; but where others
        have drafts of the device, it has nothing to compute in `num_wanted` then, and they go on."""
        assert self.speculation is not None
        most, could_draft = self.limits.max_num_batched_tokens, []
        for sequence, wanted in zip(self.running, num_wanted, strict=True):
            if (wanted == 1 or sequence.restart >= 0) and wanted and self._takes_drafts(sequence):
                # No step computes what lies beyond the last token; and with what may be computed anew it stays within the budget,
                # or a window could not be sure of what it shows.
                num = min(sequence.max_tokens_total - sequence.num_tokens, most - sequence.num_in_flight) - 1
                if num > 0:
                    could_draft.append((sequence, num))
        guesses = self.speculation.guesses(could_draft, len(num_wanted)) if could_draft else {}
        drafts: dict[int, tuple[int, ...]] = {}
        waiting: set[int] = set()
        for sequence, _ in could_draft:
            draft_ids = guesses.get(sequence.number, ())[: max(0, room)]
            if not draft_ids:
                continue
            if sequence.num_in_flight and draft_ids[0] != ON_DEVICE:
                if not self.speculation.on_device:
                    return None
                waiting.add(sequence.number)
                continue
            drafts[sequence.number] = draft_ids
            room -= len(draft_ids)
        if waiting:
            for index, sequence in enumerate(self.running):
                if sequence.number in waiting:
                    num_wanted[index] = 0
        return drafts

    def _takes_drafts(self, sequence: Sequence) -> bool:
        """Where masks may be late, so that drafts are given up, states had better not have read them."""
        return sequence.takes_drafts and not (self._has_states and sequence.has_matchers)

    def _proposals(self, num_wanted: Several[int], drafts: Mapping[int, Several[int]]) -> dict[int, int]:
        """How many drafts decodes, of which the step checks `drafts`, are to find behind it, by number. Those none whose drafts the
        host has to know: masks would have to wait for ids that only the device knows."""
        assert self.speculation is not None
        most, could_draft = self.limits.max_num_batched_tokens, []
        for sequence, wanted in zip(self.running, num_wanted, strict=True):
            decodes = wanted == 1 or (wanted and sequence.restart >= 0)
            may_have = sequence.takes_drafts and sequence.first_unfollowed < 0
            if decodes and may_have and not self.speculation.is_on_host(sequence):
                num_new = 1 + len(drafts.get(sequence.number, ()))
                left = sequence.max_tokens_total - sequence.num_tokens, most - sequence.num_in_flight
                if (num := min(left) - num_new - 1) > 0:
                    could_draft.append((sequence, num))
        return self.speculation.to_propose(could_draft, len(num_wanted)) if could_draft else {}

    def _begin_following(self) -> None:
        """Whether the next step is followed. If so, one who lacks what was not may be computed anew, where nobody waits."""
        self._unfollowed.begin(len(self.running))
        if not self.waiting and (sequence := self._unfollowed.to_compute_anew(self.running)) is not None:
            self._suspend(sequence)
            self.num_computed_anew += 1

    def _note_unfollowed(self, rows: Several[ScheduledRow]) -> None:
        """The step has no row for whose sake it would be followed: the others lack its tokens, too."""
        for row in rows:
            sequence = self._sequences[row.number]
            if sequence.first_unfollowed < 0:
                sequence.first_unfollowed = max(0, row.start - sequence.num_in_flight)
                self._mark_blocks(sequence, 0)

    def _mark_blocks(self, sequence: Sequence, first_entry: int) -> None:
        """Of its entries that the prefix cache knows, from this one on, those that lack some tokens."""
        for table in sequence.tables:
            first = max(first_entry, table.first_entry, sequence.first_unfollowed // self.cache.block_size)
            self._unfollowed.note(table.entry_ids(first, max(first, sequence.num_registered_blocks)))

    def _propose(self, sequence: Sequence, end: int) -> int:
        """How many drafts the device makes behind a step that ends there: as many as are wanted, if they cost nobody a block."""
        num = self._to_propose.pop(sequence.number, 0)
        if num and end + num > sequence.num_slots:
            if not self._has_blocks(sequence, end + num - sequence.num_computed_tokens):
                return 0
            self._extend(sequence, end + num)
        return num

    def _has_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether so many more cost nobody a block."""
        end = sequence.num_computed_tokens + num_tokens
        missing = sum(max(0, table.num_missing(end) - table.num_reserved) for table in sequence.tables)
        if self._has_states:
            missing += sum(len(table.ids) for table in self._state_tables(sequence))  # for a checkpoint
        return missing <= self.pool.num_free

    def _grow(self, sequence: Sequence, end: int, rows: Several[ScheduledRow]) -> bool:
        """Blocks for its tokens up to `end`, at the cost of sequences later in line that are not in this step, whose `rows` are
        those so far. False where there are too few; if it was the last in line, it has gone itself."""
        if self._has_windows:
            self._release_out_of_window(sequence)
        grows, missing = False, 0
        for table in sequence.tables:
            if end > table.num_slots:
                grows = True
                missing += max(0, table.num_missing(end) - table.num_reserved)
        if grows:
            while self.pool.num_free < missing:
                victim = self.running[-1]
                if any(row.number == victim.number for row in rows):
                    return False
                self._preempt(victim)
                if victim is sequence:
                    return False
            self._extend(sequence, end)
        return True

    def _release_out_of_window(self, sequence: Sequence) -> None:
        first = sequence.num_computed_tokens - sequence.num_in_flight  # if no unsettled step gained anything
        for table in sequence.tables:
            out_of_window = table.take_out_of_window(first)
            if out_of_window:
                self.pool.release(out_of_window, self.cache)

    def _extend(self, sequence: Sequence, end: int) -> None:
        """Blocks for its tokens up to `end`, those first that were promised to it."""
        for table in sequence.tables:
            num = table.num_missing(end)
            if num:
                num_reserved = min(num, table.num_reserved)
                table.num_reserved -= num_reserved
                block_ids = self.pool.allocate(num, num_reserved)
                self.cache.forget(block_ids)
                self._unfollowed.forget(block_ids)
                table.append(block_ids)
                sequence.has_new_blocks = True
        sequence.num_slots = min(table.num_slots for table in sequence.tables)

    def _advance(self, sequence: Sequence, num_tokens: int, draft_ids: tuple[int, ...] = ()) -> ScheduledRow:
        assert sequence.row is not None
        assert num_tokens > 0, "a row without tokens would use up what the sequence's next row is for"
        start, num_known = sequence.num_computed_tokens, sequence.num_known_tokens
        end = start + num_tokens
        known_end = end - len(draft_ids)
        work: Work = sequence.chunk_work
        if known_end == num_known + sequence.num_in_flight:
            work = Sample(len(draft_ids), sequence.has_matchers) if draft_ids else sequence.work
        num_proposed = self._propose(sequence, end) if self._to_propose and type(work) is Sample else 0
        sequence.num_proposed = num_proposed
        if self._has_device_drafts:
            self._unfollowed.advances(sequence)
        row = ScheduledRow(
            sequence.number,
            sequence.row,
            start,
            num_tokens,
            sequence.known_ids(start, known_end) if start < num_known else (),
            draft_ids,
            self._take_new_blocks(sequence) if sequence.has_new_blocks else (),
            work,
            self._binding(sequence) if sequence.needs_bind else None,
            self._prompt_logprobs(sequence, end) if sequence.next_prompt_logprob < sequence.num_prompt_tokens else None,
            num_proposed,
            sequence.restart,
            self.encoding.of_row(sequence, start, end)
            if self.encoding is not None and (sequence.request.media or self._whole_prompts)
            else None,
        )
        sequence.restart = -1
        sequence.needs_bind = False
        sequence.num_computed_tokens = end
        if type(work) is Sample:
            sequence.num_in_flight += 1 + work.num_drafts
        if self.cache.enabled:
            full = (end if end < num_known else num_known) // self.cache.block_size
            if full > sequence.num_registered_blocks:
                self._register_blocks(sequence, full)
        return row

    def _take_new_blocks(self, sequence: Sequence) -> tuple[NewBlocks, ...]:
        sequence.has_new_blocks = False
        taken = (NewBlocks(group, *table.take_unsent()) for group, table in enumerate(sequence.tables))
        return tuple(new for new in taken if new.ids)

    def _binding(self, sequence: Sequence) -> RowBinding:
        return RowBinding(
            replace(sequence.sampling, matchers=()) if sequence.has_matchers else sequence.sampling,
            sequence.seed,
            sequence.prompt_ids,
            tuple(sequence.output_ids),
            sequence.num_computed_tokens,
            sequence.has_matchers,
            sequence.adapter_slot,
            sequence.rope_delta,
        )

    def _prompt_logprobs(self, sequence: Sequence, end: int) -> PromptLogprobsSpan | None:
        """What a step that computes up to `end` tells for the first time: a sequence that is computed again tells nothing
        twice."""
        start, count = sequence.next_prompt_logprob, sequence.sampling.prompt_logprobs
        if count is None or end < start:
            return None
        sequence.next_prompt_logprob = min(end + 1, sequence.num_prompt_tokens)
        return PromptLogprobsSpan(start, sequence.known_ids(start, sequence.next_prompt_logprob), count)

    def _register_blocks(self, sequence: Sequence, num_full: int) -> None:
        """Offer the first `num_full` blocks, as far as they are new. Before they are written: whoever hits them runs in this step
        or later, and within a step every layer stores all keys before any query reads."""
        self._extend_block_hashes(sequence)
        for group, table in enumerate(sequence.tables):
            # A window that is shorter than what is in flight has given up blocks whose ids were not known yet.
            first = max(sequence.num_registered_blocks, table.first_entry)
            if first < num_full:
                self.cache.insert(sequence.block_hashes[first:num_full], group, table.entry_ids(first, num_full))
        first, sequence.num_registered_blocks = sequence.num_registered_blocks, num_full
        if sequence.first_unfollowed >= 0:
            self._mark_blocks(sequence, first)

    def _extend_block_hashes(self, sequence: Sequence) -> None:
        """The hashes of all its full blocks of known tokens."""
        block_hashes, num_tokens = sequence.block_hashes, sequence.num_known_tokens
        start = len(block_hashes) * self.cache.block_size
        if num_tokens - start >= self.cache.block_size:
            ids, media = sequence.known_ids(start, num_tokens), sequence.request.media
            block_hashes += self.cache.hash_blocks(
                ids,
                sequence.request.cache_root,
                block_hashes[-1] if block_hashes else None,
                media_of_blocks(media, self.cache.block_size)
                if media and start <= media[-1].positions[-1]
                else NO_EXTRAS,
                len(block_hashes),
            )

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting line, for lack of blocks."""
        self._suspend(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _suspend(self, sequence: Sequence) -> None:
        """Back to the waiting line, to be recomputed. Ids still in flight arrive later and are kept."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.status = Status.WAITING
        sequence.is_resumed = True
        self.policy.waits(sequence)
        insort(self.waiting, sequence, key=self.policy.order)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._free_rows.append(sequence.row)
        sequence.row = None
        self._drop_states(sequence)
        if self.adapters is not None and sequence.request.adapter is not None:
            self.adapters.stops(sequence.request.adapter.key)
            sequence.adapter_slot = -1
        if self.encoding is not None:
            self.encoding.release(sequence)
        for table in sequence.tables:
            self.pool.release(table.ids, self.cache)
            self.pool.unreserve(table.num_reserved)
        sequence.tables = ()
        sequence.num_registered_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_proposed = 0
        sequence.first_unfollowed = -1
        sequence.restart = -1

    # --- waiting --------------------------------------------------------------------------------------------------

    def _compute_prompts(
        self, rows: list[ScheduledRow], prompts: list[Sequence], budget: int, scored_cost: int, *, may_start: bool
    ) -> None:
        """Spend what decodes left of a step: on running sequences in the middle of their `prompts`, and on those that wait, in
        the policy's order. Who is next and does not fit yet is not overtaken by others that wait, so none starves."""
        policy = self.policy
        prompts = [sequence for sequence in prompts if sequence.row is not None]  # the others were preempted
        ending_cost = self.step_budget.ending_cost()
        while budget > 0:
            candidate = self._next_waiting() if may_start else None
            if prompts:
                index = policy.next_prompt(prompts)
                if candidate is None or not policy.overtakes(candidate, prompts[index]):
                    sequence = prompts.pop(index)
                    cost = scored_cost if sequence.scores_prompt else 1
                    wanted = sequence.num_tokens - sequence.num_computed_tokens
                    num_tokens = self._encoded(rows, sequence, min(wanted, budget // cost))
                    if num_tokens and self._go_on(rows, sequence, num_tokens):
                        budget -= num_tokens * cost + (ending_cost if num_tokens == wanted else 0)
                    elif num_tokens:
                        may_start = False  # there are no blocks even for those that run
                    continue
            if candidate is None:
                return
            cost = scored_cost if candidate.scores_prompt else 1
            least = cost * (candidate.num_tokens if self.limits.in_one_step else 1)
            if budget >= least and self._reserve(candidate):
                budget -= cost * self._start(rows, candidate, budget // cost)
                if candidate.num_computed_tokens == candidate.num_known_tokens:
                    budget -= ending_cost
            elif prompts:
                may_start = False
            else:
                return

    def _next_waiting(self) -> Sequence | None:
        """Who starts next, if anybody may. Not one that was preempted with an id still on the device: it settles within the next
        steps."""
        if not self.waiting or not self._free_rows:
            return None
        sequence = self.waiting[self.policy.next_waiting(self.waiting)]
        if self.adapters is not None and not self.adapters.may_start(sequence, self.policy.order):
            others = self._with_adapters(self.adapters)
            if not others:
                return None
            sequence = others[self.policy.next_prompt(others)]
        return None if sequence.num_in_flight else sequence

    def _with_adapters(self, adapters: AdapterSlots) -> list[Sequence]:
        """Those waiting whose adapters are there: they do not wait for somebody else's."""
        return [sequence for sequence in self.waiting if adapters.may_start(sequence, self.policy.order)]

    def _go_on(self, rows: list[ScheduledRow], sequence: Sequence, num_tokens: int) -> bool:
        """Compute more of a prompt. False where there is no block for it."""
        end = sequence.num_computed_tokens + num_tokens
        if (end > sequence.num_slots or self._has_windows) and not self._grow(sequence, end, rows):
            return False
        rows.append(self._advance(sequence, num_tokens))
        self.policy.computes(sequence, num_tokens)
        return True

    def _is_encoded(self, rows: Several[ScheduledRow], sequence: Sequence) -> bool:
        """Whether a step may compute its next token: the last of a prompt may be a picture's."""
        in_prompt = sequence.num_computed_tokens < sequence.num_prompt_tokens
        return not in_prompt or self._encoded(rows, sequence, 1) > 0

    def _encoded(self, rows: Several[ScheduledRow], sequence: Sequence, num_tokens: int) -> int:
        """How many of `num_tokens` of a prompt this step, which has `rows`, may compute: as far as its pictures and sounds are
        there, or are encoded before it."""
        if self.encoding is None or not (sequence.request.media or self._whole_prompts) or not num_tokens:
            return num_tokens
        room = self.limits.max_num_batched_tokens - sum([row.num_tokens for row in rows])
        return self.encoding.reach(sequence, num_tokens, room)

    def _start(self, rows: list[ScheduledRow], sequence: Sequence, most: int) -> int:
        """Start a sequence for which blocks have been reserved, with at most so many tokens; how many these are."""
        self.waiting.remove(sequence)
        self.policy.starts(sequence)
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        if self.adapters is not None and sequence.request.adapter is not None:
            sequence.adapter_slot = self.adapters.starts(sequence.request.adapter.key)
        sequence.needs_bind = True
        insort(self.running, sequence, key=self.policy.order)
        num_tokens = self._encoded(rows, sequence, min(sequence.num_tokens - sequence.num_computed_tokens, most))
        if not self._empty_tables:
            self._extend(sequence, sequence.num_computed_tokens + num_tokens)
        if not num_tokens:
            return 0  # it has its row, and goes on when what comes first can be encoded
        rows.append(self._advance(sequence, num_tokens))
        self.policy.computes(sequence, num_tokens)
        return num_tokens

    def _reserve(self, sequence: Sequence) -> bool:
        """Tables with what is cached of its known tokens, which it shares from now on, and the promise of the others; or nothing.
        Reserving the whole of it means that a prompt which starts can finish; one spare entry for each running sequence keeps it
        from being preempted at once."""
        cache, size, num_tokens = self.cache, self.cache.block_size, sequence.num_tokens
        if self._empty_tables:
            sequence.tables, sequence.num_slots = self._empty_tables, self._empty_tables[0].num_slots
            return True
        if cache.enabled:
            self._extend_block_hashes(sequence)
        match = cache.match(sequence.block_hashes, sequence.num_reusable // size)
        first_unfollowed = self._unfollowed.first_of(match.num_entries, match.ids, self._widths)
        stale: Several[BlockIds] = ()
        if first_unfollowed >= 0 and self._unfollowed.is_computed_anew(sequence, first_unfollowed):
            stale = match.ids
            match = cache.match(sequence.block_hashes, first_unfollowed // size)
            first_unfollowed = -1
        refusal = _Refusal(sequence.number, match, self.pool.num_freed, len(self.running))
        if refusal == self._refusal:
            return False
        start = match.num_entries * size
        tables = tuple(BlockTable(size, group, start) for group in cache.groups)
        for table, block_ids in zip(tables, match.ids, strict=True):
            table.append(block_ids)
            reserved_to = table.group.reserved_to(start, num_tokens, self.limits.max_num_batched_tokens)
            table.num_reserved = table.num_missing(reserved_to)
        missing = sum(table.num_reserved for table in tables)
        room = self.pool.num_free - missing - self._blocks_per_entry * len(self.running)
        if room < sum(map(len, match.ids)) and (room < 0 or room < sum(map(self.pool.num_idle, match.ids))):
            self._refusal = refusal
            return False
        self._refusal = None
        for block_ids in match.ids:
            self.pool.share(block_ids)
        self.pool.reserve(missing)
        sequence.tables = tables
        sequence.has_new_blocks = True
        sequence.num_computed_tokens = start
        sequence.num_registered_blocks = match.num_entries
        sequence.first_unfollowed = first_unfollowed
        for block_ids in stale:
            cache.forget(self._unfollowed.among(block_ids))
        self._hit_share += _NEW_SHARE * (start / num_tokens - self._hit_share)
        if cache.enabled and not sequence.request.is_probe:
            self.num_prefix_queries += num_tokens
            self.num_prefix_hits += start
        if not sequence.is_resumed:
            sequence.num_cached_tokens = start
        return True
