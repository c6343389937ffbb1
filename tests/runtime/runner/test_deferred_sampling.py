"""Deferred sampling, in a runner on a worker's lane and on a device's over a model of one table: what waits is sampled as if
nothing had come between."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.api import SamplingParams
from runtime.batch import SAMPLE, SAMPLE_MASKED, PromptLogprobsSpan, RowBinding, ScheduledBatch, ScheduledRow
from runtime.constrain.masks import mask_of, num_words
from runtime.step import RowMasks
from tests.runtime.runner.runners import LANES, VOCAB, Successor, make_runner


@pytest.fixture(params=LANES)
def make(request, monkeypatch):
    return lambda: make_runner(request.param, Successor(), monkeypatch)


def batch_of(*rows: ScheduledRow) -> ScheduledBatch:
    return ScheduledBatch(rows, sum(row.num_tokens for row in rows), 0)


def prompt(row: int, *ids: int, span: PromptLogprobsSpan | None = None, **params) -> ScheduledRow:
    """That is masked in all rows but 0."""
    sampling = SamplingParams(8, temperature=0.0, **params)
    binding = RowBinding(sampling, 0, ids, (), masked=bool(row))
    return ScheduledRow(
        row, row, 0, len(ids), ids, work=SAMPLE_MASKED if row else SAMPLE, binding=binding, prompt_logprobs=span
    )


def decode(row: ScheduledRow, behind: int) -> ScheduledRow:
    """Its id is on the device."""
    start = row.end + behind
    return row._replace(start=start, num_tokens=1, token_ids=(), binding=None, prompt_logprobs=None)


def masks(allowed: dict[int, set[int]]) -> RowMasks:
    """By row."""
    words = [mask_of(ids, num_words(VOCAB)) for ids in allowed.values()]
    return RowMasks(tuple(allowed), np.array(words, dtype=np.int32).reshape(len(words), num_words(VOCAB)))


async def sampled(step) -> tuple[list[int], list[list[int] | None], list[list[float]]]:
    """Ids; of those that asked the ids shown beside them; log-probabilities of prompts."""
    result = await step.result()
    ids = [id for (id,) in result.tokens]
    shown = [None if found is None else [id for id, _ in found[0].top] for found in result.logprobs]
    return ids, shown, [[entry.rank for entry in entries] for entries in await step.prompt_logprobs()]


async def test_draws_that_were_kept_come_out_as_if_nothing_had_come_between(make):
    runner = make()
    rows = [
        prompt(0, 3, 4, logprobs=1),
        prompt(1, 10, logprobs=2),
        prompt(2, 20, 21, 22, 24, span=PromptLogprobsSpan(1, (21, 22, 24), 0)),
        prompt(3, 30, 31, 32, frequency_penalty=2.0),
    ]
    first = batch_of(*rows)
    forward = runner.launch_forward(first)
    await forward.done().wait()
    rest, draws = first.split({2, 1})
    snapshot = forward.snapshot_logits(draws)
    now = forward.sample(rest, masks({3: {33, 38}}))
    assert await sampled(now) == ([5, 33], [[5], None], [[1, 1, 2]])

    second = batch_of(decode(rows[0], 0))
    assert (await sampled(runner.launch(second)))[0] == [6]
    third = batch_of(decode(rows[0], 1), decode(rows[3], 0))
    forward = runner.launch_forward(third)
    assert (await sampled(forward.sample(third, masks({3: {33, 36}}))))[0] == [7, 36]

    assert await sampled(snapshot.sample(draws.split({1})[1], masks({1: {9, 13}}))) == ([13], [[11, 12]], [])
    assert await sampled(snapshot.sample(draws.split({2})[1], masks({2: {2, 24}}))) == ([2], [], [])
    last = batch_of(decode(rows[0], 2), decode(rows[1], 0), decode(rows[2], 0), decode(rows[3], 1))
    forward = runner.launch_forward(last)
    step = forward.sample(last, masks({row: set(range(VOCAB)) for row in (1, 2, 3)}))
    assert (await sampled(step))[0] == [8, 14, 3, 37]
    await runner.close()


async def test_a_step_whose_every_mask_is_late_draws_nothing(make):
    runner = make()
    rows = [prompt(1, 10, 11), prompt(2, 20)]
    first = batch_of(*rows)
    forward = runner.launch_forward(first)
    rest, draws = first.split({1, 2})
    snapshot = forward.snapshot_logits(draws)
    assert await sampled(forward.sample(rest, masks({}))) == ([], [], [])
    assert (await sampled(snapshot.sample(draws, masks({1: {12}, 2: {5, 39}}))))[0] == [12, 39]
    await runner.close()


async def test_what_is_sampled_has_its_logits_beside_those_of_a_prompt_that_is_scored(make, monkeypatch):
    """Reading the head's weights twice would take as long as a decode."""
    runner, sizes = make(), []
    compute_logits = Successor.compute_logits

    def noted(model, hidden, tokens=None):
        sizes.append(len(tokens))
        return compute_logits(model, hidden, tokens)

    monkeypatch.setattr(Successor, "compute_logits", noted)
    scored = prompt(0, 20, 21, 22, 24, span=PromptLogprobsSpan(1, (21, 22, 24), 0))
    ids, _, ranks = await sampled(runner.launch(batch_of(scored)))
    assert sizes == [3 + 1]
    assert ids == [25]
    assert [len(each) for each in ranks] == [3]
