"""Creation of the rows of a step, which advances the counts of their sequences."""

from __future__ import annotations

from dataclasses import replace

from runtime.batch import SAMPLE, PromptLogprobsSpan, RowBinding, Sample, ScheduledRow, Work, decode_row
from runtime.kv.sequence_blocks import SequenceBlocks
from runtime.sequence import Sequence


def plain_row(sequence: Sequence, blocks: SequenceBlocks) -> ScheduledRow | None:
    """Return a row that computes one token and samples the next, three times as fast as `row_of`. Return None if the row needs
    anything else."""
    start, num_known = sequence.num_computed_tokens, sequence.num_known_tokens
    if (
        sequence.work is not SAMPLE
        or sequence.needs_bind
        or sequence.rewound_to >= 0
        or sequence.next_prompt_logprob < sequence.num_prompt_tokens
        or not sequence.num_prompt_tokens <= start < sequence.num_slots
    ):
        return None
    assert sequence.row is not None
    end = sequence.num_computed_tokens = start + 1
    sequence.num_in_flight += 1
    cache = blocks.cache
    if cache.enabled:
        full = (end if end < num_known else num_known) // cache.block_size
        if full > sequence.num_registered_blocks:
            blocks.register(sequence, full)
    token_ids = sequence.known_ids(start, end) if start < num_known else ()
    new_blocks = blocks.take_new(sequence) if sequence.has_new_blocks else ()
    return decode_row(sequence.number, sequence.row, start, token_ids, new_blocks)


def row_of(
    sequence: Sequence, blocks: SequenceBlocks, num_tokens: int, extra_ids: tuple[int, ...] = ()
) -> ScheduledRow:
    """Return a row for the next `num_tokens` tokens of `sequence`, including draft tokens `extra_ids` at the end. Blocks for
    all tokens must be allocated."""
    assert sequence.row is not None
    assert num_tokens > 0, "a row without tokens would use up what the sequence's next row is for"
    start, num_known = sequence.num_computed_tokens, sequence.num_known_tokens
    end = start + num_tokens
    known_end = end - len(extra_ids)
    work: Work = sequence.chunk_work
    if known_end == num_known + sequence.num_in_flight:
        work = Sample(len(extra_ids), sequence.has_matchers) if extra_ids else sequence.work
    row = ScheduledRow(
        number=sequence.number,
        row=sequence.row,
        start=start,
        num_tokens=num_tokens,
        token_ids=sequence.known_ids(start, known_end) if start < num_known else (),
        draft_ids=extra_ids,
        work=work,
        binding=_binding(sequence) if sequence.needs_bind else None,
        prompt_logprobs=_prompt_logprobs(sequence, end) if sequence.scores_prompt else None,
        restart=sequence.rewound_to,
    )
    for claim in sequence.claims:
        row = claim.scheduled(row)
    if sequence.has_new_blocks:
        row = row._replace(new_blocks=blocks.take_new(sequence))
    sequence.rewound_to = -1
    sequence.needs_bind = False
    sequence.num_computed_tokens = end
    if type(work) is Sample:
        sequence.num_in_flight += work.num_ids
    cache = blocks.cache
    if cache.enabled and (full := min(end, num_known) // cache.block_size) > sequence.num_registered_blocks:
        blocks.register(sequence, full)
    return row


def _binding(sequence: Sequence) -> RowBinding:
    return RowBinding(
        replace(sequence.sampling, matchers=()) if sequence.has_matchers else sequence.sampling,
        sequence.seed,
        sequence.prompt_ids,
        tuple(sequence.output_ids),
        sequence.num_computed_tokens,
        sequence.has_matchers,
        rope_delta=sequence.rope_delta,
    )


def _prompt_logprobs(sequence: Sequence, end: int) -> PromptLogprobsSpan | None:
    """Return the prompt tokens whose log-probabilities a step up to token `end` computes, or None if none are due. They are not
    computed again after a preemption."""
    start, count = sequence.next_prompt_logprob, sequence.sampling.prompt_logprobs
    if count is None or end < start:
        return None
    sequence.next_prompt_logprob = min(end + 1, sequence.num_prompt_tokens)
    return PromptLogprobsSpan(start, sequence.known_ids(start, sequence.next_prompt_logprob), count)
