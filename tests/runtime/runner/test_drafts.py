"""Drafts in either runner: whatever is guessed, rows gain exactly the tokens that they have without guesses.

The model's logits depend on every token before, read back from where the step's tensors say that they were stored."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.api import SamplingParams
from runtime.batch import NOT_FINITE, SAMPLE, SAMPLE_MASKED, RowBinding, Sample, ScheduledBatch, ScheduledRow
from runtime.constrain.masks import mask_of, num_words
from runtime.kv.block_table import NewBlocks
from runtime.runner.runner import ModelRunner
from runtime.step import RowMasks
from tests.runtime.runner.runners import LANES, LAYOUT, VOCAB, make_runner
from tests.tiers import on_push

BLOCK, NUM_TOKENS, BLOCKS = 4, 30, 16  # blocks of a row, which are neither in order nor its own block's neighbours
PROMPTS = [(5,), (7, 8, 9, 10, 11), (3, 1, 4, 1, 5, 9), (12, 12, 4), (6, 13)]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.2, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.9, "top_k": 12, "logit_bias": {4: 2.0}, "min_tokens": 9, "stop_token_ids": frozenset({4})},
    {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.5, "allowed_token_ids": frozenset(range(3, 30))},
]


class Remembering:
    """Gives logits that are a function of the whole sequence so far, and NaN behind `poison`."""

    spec = SimpleNamespace(vocab_size=VOCAB, generates=True)
    encoder = None

    def __init__(self, poison: int | None = None) -> None:
        self._stored = [-1] * (BLOCK * BLOCKS * len(PROMPTS))
        self._poison = poison

    def forward(self, step):
        meta, slots = step.attn_metadata[0], step.slot_mapping[0].tolist()
        for token_id, slot in zip(step.input_ids.tolist(), slots, strict=True):
            if slot >= 0:
                self._stored[slot] = token_id
        starts, sequences = meta.query_start_loc.tolist(), []
        for index, seq_len in enumerate(meta.seq_lens.tolist()):
            table = meta.block_tables[index if meta.rows is None else int(meta.rows[index])].tolist()
            known = [self._stored[table[at // BLOCK] * BLOCK + at % BLOCK] for at in range(seq_len)]
            num = starts[index + 1] - starts[index]
            assert step.positions[starts[index] : starts[index + 1]].tolist() == [*range(seq_len - num, seq_len)]
            sequences += [tuple(known[: seq_len - num + 1 + each]) for each in range(num)]
        return sequences + [(0,)] * (len(slots) - len(sequences))  # padding

    def compute_logits(self, hidden, tokens=None):
        rows = [self._logits(hidden[token]) for token in (range(len(hidden)) if tokens is None else tokens.tolist())]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _logits(self, sequence: tuple[int, ...]) -> torch.Tensor:
        if self._poison is not None and sequence[-1] == self._poison:
            return torch.full((VOCAB,), torch.nan)
        return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(sequence) & (2**63 - 1)))


def prompt(row: int) -> ScheduledRow:
    ids = PROMPTS[row]
    params = SamplingParams(max_tokens=NUM_TOKENS, **PARAMS[row])
    blocks = random.Random(row).sample(range(row * BLOCKS, (row + 1) * BLOCKS), BLOCKS)
    return ScheduledRow(
        row, row, 0, len(ids), ids, new_blocks=(NewBlocks(0, 0, tuple(blocks)),), work=SAMPLE,
        binding=RowBinding(params, 100 + row, ids, ()),
    )  # fmt: skip


def behind(row: int, start: int, draft_ids: tuple[int, ...]) -> ScheduledRow:
    """Its last id is on the device."""
    return ScheduledRow(row, row, start, 1 + len(draft_ids), (), draft_ids, work=Sample(len(draft_ids)))


def batch_of(*rows: ScheduledRow) -> ScheduledBatch:
    return ScheduledBatch(rows, sum(row.num_tokens for row in rows), 0)


class Gained:
    """What rows have gained, as steps told."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = [[] for _ in PROMPTS]
        self.shown: list[list[tuple[int, ...]]] = [[] for _ in PROMPTS]

    async def take(self, step) -> None:
        result = await step.result()
        for row, ids in zip(step.batch.sampling_rows, result.tokens, strict=True):
            self.ids[row.row] += ids
        for row, entries in zip(step.batch.sampling_rows if result.logprobs else (), result.logprobs, strict=True):
            if entries is not None:
                self.shown[row.row] += [tuple(token for token, _ in entry.top) for entry in entries]


async def generated(
    runner: ModelRunner, guess: Callable[[int, int], tuple[int, ...]], *, ahead: bool = False
) -> Gained:
    """`guess`: of a row, behind so many tokens gained. `ahead`: each step is launched before the last one has told anything, so
    what the batch says of starts is the most that they can be."""
    gained = Gained()
    rows = [*range(len(PROMPTS))]
    last = runner.launch(batch_of(*map(prompt, rows)))
    if not ahead:
        await gained.take(last)
    most = [1 for _ in rows]  # gained, if every guess is right
    while min(map(len, gained.ids)) < NUM_TOKENS:
        if not ahead:
            most = [len(gained.ids[row]) for row in rows]
        chosen = [row for row in rows if most[row] < NUM_TOKENS]
        if not chosen:  # some guess was wrong
            await gained.take(last)
            most = [len(gained.ids[row]) for row in rows]
            last = None
            continue
        guesses = {row: guess(row, most[row])[: NUM_TOKENS - most[row] - 1] for row in chosen}
        step = runner.launch(
            batch_of(*(behind(row, len(PROMPTS[row]) + most[row] - 1, guesses[row]) for row in chosen))
        )
        for row in chosen:
            most[row] += 1 + len(guesses[row])
        if ahead and last is not None:
            await gained.take(last)
        if not ahead:
            await gained.take(step)
        last = step
    if ahead and last is not None:
        await gained.take(last)
    return gained


@pytest.fixture(params=LANES)
def make(request, monkeypatch):
    return lambda model=None: make_runner(
        request.param, model or Remembering(), monkeypatch, max_model_len=64, rows=len(PROMPTS)
    )


@pytest.mark.parametrize("quality", on_push(["right", "wrong", "mixed"], "mixed"))
async def test_any_guesses_leave_the_tokens_as_they_are(make, quality):
    runner = make()
    plain = await generated(runner, lambda row, num: ())
    await runner.close()
    assert all(len(ids) == NUM_TOKENS for ids in plain.ids)

    def right(row: int, num: int) -> tuple[int, ...]:
        return tuple(plain.ids[row][num : num + 4])

    def wrong(row: int, num: int) -> tuple[int, ...]:
        return tuple((token + 1) % VOCAB for token in right(row, num))

    def mixed(row: int, num: int) -> tuple[int, ...]:
        chance = random.Random(100 * row + num)
        good, bad = chance.randrange(4), chance.randrange(3)
        return (*right(row, num)[:good], *(chance.randrange(VOCAB) for _ in range(bad)))

    for ahead in (False, True):
        runner = make()
        guessed = await generated(runner, {"right": right, "wrong": wrong, "mixed": mixed}[quality], ahead=ahead)
        await runner.close()
        assert [ids[:NUM_TOKENS] for ids in guessed.ids] == plain.ids
        assert guessed.shown[1][:NUM_TOKENS] == plain.shown[1]
        assert guessed.shown[3][:NUM_TOKENS] == plain.shown[3]
        assert [guessed.shown[row] for row in (0, 2, 4)] == [[], [], []]


async def test_steps_with_guesses_are_replayed_where_they_are_not_too_long(monkeypatch):
    """Of two rows with 3 tokens each; of one with 2, but not beside a prompt; nor of more than 96 tokens."""
    runner = make_runner("replayed", Remembering(), monkeypatch, max_model_len=64, rows=len(PROMPTS))
    replayed = runner._graphs._pool.replayed
    await runner.launch(batch_of(prompt(0), prompt(1))).result()
    starts = [len(PROMPTS[row]) for row in (0, 1)]
    await runner.launch(batch_of(*(behind(row, start, (1, 2)) for row, start in enumerate(starts)))).result()
    await runner.launch(batch_of(behind(0, starts[0] + 1, (3,)), prompt(2))).result()
    await runner.launch(batch_of(behind(0, starts[0] + 2, (3,)))).result()
    starts = [starts[0] + 3, starts[1] + 2, len(PROMPTS[2])]
    await runner.launch(batch_of(*(behind(row, start, (3,) * 32) for row, start in enumerate(starts)))).result()
    assert [(shape.num_tokens, shape.num_rows, shape.drafts) for shape in replayed[1:]] == [(6, 5, True), (2, 2, True)]
    await runner.close()


async def test_right_guesses_are_gained_in_one_step(make):
    runner = make()
    plain = await generated(runner, lambda row, num: ())
    steps = 0

    def counted(row: int, num: int) -> tuple[int, ...]:
        nonlocal steps
        steps += row == 0
        return tuple(plain.ids[row][num : num + 4])

    again = make()
    await generated(again, counted)
    assert steps == -(-(NUM_TOKENS - 1) // 5)
    await runner.close()
    await again.close()


async def test_unusable_logits_end_what_a_row_gains(make):
    ids = PROMPTS[0]
    runner = make()
    first = runner.launch(batch_of(prompt(0)))
    await first.result()
    second = runner.launch(batch_of(behind(0, len(ids), ())))
    ((following,),) = (await second.result()).tokens
    await runner.close()
    runner = make(Remembering(poison=following))
    await runner.launch(batch_of(prompt(0))).result()
    step = runner.launch(batch_of(behind(0, len(ids), (following, 1, 2))))
    assert (await step.result()).tokens == [[following, NOT_FINITE]]
    await runner.close()


def allowed_behind(ids: list[int]) -> set[int]:
    """What a matcher of these tests lets follow: some tokens, never the last one again, and nothing behind NUM_TOKENS."""
    if len(ids) == NUM_TOKENS:
        return set()
    return {token for token in range(VOCAB) if (token + len(ids)) % 3 and token != (ids[-1] if ids else None)}


def masks_for(row: int, ids: list[int], guesses: tuple[int, ...]) -> RowMasks:
    """As the mask maker gives them: as far as guesses may be drawn."""
    words = [mask_of(allowed_behind(ids), num_words(VOCAB))]
    for num, guess in enumerate(guesses):
        if guess not in allowed_behind([*ids, *guesses[:num]]) or not allowed_behind([*ids, *guesses[: num + 1]]):
            break
        words.append(mask_of(allowed_behind([*ids, *guesses[: num + 1]]), num_words(VOCAB)))
    return RowMasks((row,) * len(words), np.stack(words))


async def generated_masked(
    runner: ModelRunner, guess: Callable[[int], tuple[int, ...]], *, late: Callable[[int], bool] = lambda num: False
) -> list[list[int]]:
    """What row 3, which is masked, and row 1, which is not, gain in steps of both; row 1's guesses are none. `late`: whether the
    masks come after another step of row 1, behind so many tokens of row 3."""
    ids: dict[int, list[int]] = {3: [], 1: []}
    first = prompt(3)
    assert first.binding is not None
    masked = first._replace(work=SAMPLE_MASKED, binding=replace(first.binding, masked=True))
    batch, other = batch_of(masked, prompt(1)), prompt(1)

    async def take(step) -> None:
        for row, found in zip(step.batch.sampling_rows, (await step.result()).tokens, strict=True):
            ids[row.row] += found

    while True:
        (row, *_) = batch.rows
        output = runner.launch_forward(batch)
        if late(len(ids[3])):
            rest, sampling = batch.split({3})
            snapshot = output.snapshot_logits(sampling)
            await take(output.sample(rest, RowMasks((), np.empty((0, num_words(VOCAB)), np.int32))))
            other = behind(1, len(PROMPTS[1]) + len(ids[1]) - 1, ())
            await take(runner.launch(batch_of(other)))
            num = len(row.draft_ids)
            plain = row._replace(num_tokens=row.num_tokens - num, draft_ids=(), work=SAMPLE_MASKED)
            await take(snapshot.sample(batch_of(plain), masks_for(3, ids[3], ())))
        else:
            await take(output.sample(batch, masks_for(3, ids[3], row.draft_ids)))
        if len(ids[3]) >= NUM_TOKENS:
            return [ids[3], ids[1]]
        guesses = guess(len(ids[3]))
        masked = behind(3, len(PROMPTS[3]) + len(ids[3]) - 1, guesses)
        other = behind(1, len(PROMPTS[1]) + len(ids[1]) - 1, ())
        batch = batch_of(masked._replace(work=Sample(len(guesses), masked=True)), other)


async def test_guesses_of_masked_rows_leave_the_tokens_as_they_are(make):
    runner = make()
    masked, free = await generated_masked(runner, lambda num: ())
    await runner.close()
    assert len(masked) == NUM_TOKENS
    assert all(token in allowed_behind(masked[:num]) for num, token in enumerate(masked))
    steps = {}
    for share in (0.0, 0.7, 1.0):
        for late in (lambda num: False, lambda num: num % 3 == 1):
            chance, num_steps = random.Random(int(10 * share)), 0

            def guess(num: int, share=share, chance=chance) -> tuple[int, ...]:
                nonlocal num_steps
                num_steps += 1
                right = masked[num : num + 5]
                return tuple(token if chance.random() < share else chance.randrange(VOCAB) for token in right)

            runner = make()
            found, other = await generated_masked(runner, guess, late=late)
            await runner.close()
            assert found == masked
            num_same = min(len(other), len(free))
            assert other[:num_same] == free[:num_same]
            steps[share, late(1)] = num_steps
    assert steps[1.0, False] == -(-(NUM_TOKENS - 1) // 6) < steps[0.7, False] < steps[0.0, False]
    assert steps[1.0, False] < steps[1.0, True] < NUM_TOKENS


async def test_a_row_may_begin_again_where_a_step_with_guesses_began(make):
    """As one of a model whose layers keep states does."""
    runner = make()
    plain = await generated(runner, lambda row, num: ())
    await runner.close()
    runner, ids, start = make(), plain.ids[0], len(PROMPTS[0])
    await runner.launch(batch_of(prompt(0))).result()
    wrong = tuple((token + 1) % VOCAB for token in ids[1:4])
    assert (await runner.launch(batch_of(behind(0, start, wrong))).result()).tokens == [[ids[1]]]
    again = ScheduledRow(0, 0, start, 4, (ids[0], ids[1]), (ids[2], wrong[0]), work=Sample(2), restart=start)
    assert (await runner.launch(batch_of(again)).result()).tokens == [ids[2:4]]
    assert (await runner.launch(batch_of(behind(0, start + 3, ()))).result()).tokens == [ids[4:5]]
    await runner.close()


async def test_a_row_says_how_many_guesses_it_has(make):
    await _refused(make(), prompt(0), behind(0, 1, (3,))._replace(work=SAMPLE), "1 drafts among 2 tokens")


async def _refused(runner: ModelRunner, first: ScheduledRow, second: ScheduledRow, named: str) -> None:
    await runner.launch(batch_of(first)).result()
    with pytest.raises(ValueError, match=named):
        await runner.launch(batch_of(second)).result()
    await runner.close()


def test_the_layout_of_these_tests_has_blocks_as_small_as_they_say():
    assert LAYOUT.kernel_block_size == BLOCK
