"""Recording of step results: adds sampled ids to their sequences, and corrects counts that assumed all drafts accepted."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

from runtime.api import FinishReason
from runtime.batch import NOT_FINITE, SAMPLE, Sample, ScheduledBatch
from runtime.scheduling.sequences import Sequences
from runtime.sequence import Sequence, SequenceStatus


class Settled(NamedTuple):
    """Result of a step for one sequence: new token ids or pooled values, and the finish reason if the sequence ended. `place`:
    index of its row among the step's sampling or pooling rows."""

    sequence: Sequence
    token_ids: list[int]
    finish: FinishReason | None
    place: int
    pooled: memoryview | None = None


_made = tuple.__new__  # creates a named tuple in a third of the constructor's time


def settle(
    sequences: Sequences,
    batch: ScheduledBatch,
    tokens: Several[list[int]],
    pooled: Several[memoryview | None],
) -> list[Settled]:
    """Add the results of the sampling and pooling rows of `batch`, in row order, to their sequences. Finish sequences that end
    and drop tokens after their end. If a row has no token, its last token is computed again. Return one entry per sequence."""
    sampling, find, settled = batch.sampling_rows, sequences.find, []
    for place, (row, token_ids) in enumerate(zip(sampling, tokens, strict=True)):
        sequence, work = find(row.number), row.work
        if sequence is None:
            continue  # it ended while this step ran, so its tokens are surplus
        if work is SAMPLE and len(token_ids) == 1 and not sequence.learns:  # the usual case
            token_id, num_known = token_ids[0], sequence.num_known_tokens + 1
            if token_id not in sequence.ending_ids and num_known < sequence.max_tokens_total:
                sequence.num_in_flight -= 1
                sequence.num_known_tokens = num_known
                sequence.output_ids.append(token_id)
                settled.append(_made(Settled, (sequence, token_ids, None, place, None)))
                continue
        assert type(work) is Sample
        num_extra = work.num_drafts
        sequence.num_in_flight -= 1 + num_extra
        for claim in sequence.claims:
            claim.settled(num_extra, token_ids)
        if (missing := 1 + num_extra - len(token_ids)) < 0:
            raise ValueError(f"a row gained {len(token_ids)} tokens where {1 + num_extra} were reserved for it")
        if missing:
            roll_back(sequence, missing)
            if not token_ids:
                continue
        finish, num_before = None, sequence.num_known_tokens
        for token_id in token_ids:
            if token_id in sequence.ending_ids or sequence.num_known_tokens + 1 >= sequence.max_tokens_total:
                finish = _end_with(sequences, sequence, token_id)
                token_ids = token_ids[: sequence.num_known_tokens - num_before]
                break
            sequence.output_ids.append(token_id)
            sequence.num_known_tokens += 1
        settled.append(Settled(sequence, token_ids, finish, place))
    for place, (row, vector) in enumerate(zip(batch.pooling_rows, pooled, strict=True)):
        if (sequence := find(row.number)) is not None:
            finish = FinishReason.ERROR if vector is None else FinishReason.STOP
            sequences.finish(sequence, finish)
            settled.append(Settled(sequence, [], finish, place, vector))
    return settled


def roll_back(sequence: Sequence, num_tokens: int) -> None:
    """Reduce the computed tokens of `sequence` by `num_tokens`, the number of rejected draft tokens. Has no effect on a
    preempted sequence."""
    if not any([claim.rewinds() for claim in sequence.claims]) and sequence.row is not None:  # noqa: C419 - each is called
        sequence.num_computed_tokens -= num_tokens


def _end_with(sequences: Sequences, sequence: Sequence, token_id: int) -> FinishReason:
    """Finish the sequence with its last token `token_id`, and return the reason. The token is not appended if its logits were
    not finite or max_tokens is 0."""
    if token_id == NOT_FINITE:
        finish = FinishReason.ERROR
    elif not sequence.sampling.max_tokens:
        finish = FinishReason.LENGTH
    else:
        finish = FinishReason.STOP if token_id in sequence.ending_ids else FinishReason.LENGTH
        sequence.output_ids.append(token_id)
        sequence.num_known_tokens += 1
    sequences.finish(sequence, finish)
    return finish


def forget(sequences: Sequences, batch: ScheduledBatch) -> None:
    """Undo the counts of `batch`, which did not run, and preempt its sequences."""
    for row in batch.rows:
        sequence = sequences.find(row.number)
        if sequence is None:
            continue
        if type(row.work) is Sample:
            sequence.num_in_flight -= row.work.num_ids
        if row.prompt_logprobs is not None:
            sequence.next_prompt_logprob = min(sequence.next_prompt_logprob, row.prompt_logprobs.start)
        if sequence.status is SequenceStatus.RUNNING:
            sequences.preempt(sequence)
