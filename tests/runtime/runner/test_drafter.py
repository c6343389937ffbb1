"""A draft model in either runner: what it guesses on the device changes no token, and is right where it is the model itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.batch import ON_DEVICE, Sample, ScheduledRow
from runtime.models.draft_head import DraftHead
from runtime.models.pair import ModelPair
from runtime.runner.device_inputs import DeviceInputs
from runtime.runner.lookup_drafter import LookupDrafter
from runtime.speculate.config import LookupLengths
from tests.kinds import full
from tests.runtime.runner.runners import CPU, LANES, LAYOUT, VOCAB, make_runner
from tests.runtime.runner.test_drafts import NUM_TOKENS, PARAMS, PROMPTS, Gained, Remembering, batch_of, behind, prompt
from tests.tiers import on_push

MOST = 3  # guesses behind a step
PENALIZED = {row for row, params in enumerate(PARAMS) if {"frequency_penalty", "repetition_penalty"} & params.keys()}


class Described(Remembering):
    """One that says of itself what a pair asks; its layers are those of the tests' layout."""

    spec = SimpleNamespace(
        vocab_size=VOCAB, generates=True, architecture="Remembering", memory_kinds=lambda: (full(1, 8),)
    )

    def traced(self, kv_caches):
        return self


class Otherwise(Described):
    """Of every third token it thinks otherwise than the model."""

    def _logits(self, sequence):
        logits = super()._logits(sequence)
        return logits.roll(1) if len(sequence) % 3 == 0 else logits


class OfTheModel(DraftHead):
    """A head that thinks as the model does: it stores what stands behind each token, and reads the first of all tokens, which is
    behind none, out of the model's hidden states; what it hands on names that one and the text so far."""

    spec = Described.spec
    dtype, hidden_size = "float32", 2

    def __init__(self) -> None:
        self._model, self._texts = Described(), []

    def keep(self, hidden):
        return hidden

    def read(self, hidden):
        return torch.tensor([[float(sequence[0]), 0.0] for sequence in hidden])

    def forward(self, step):
        behind = self._model.forward(step)
        texts = [(int(state[0]), *ids) for state, ids in zip(step.hidden_states, behind, strict=True)]
        self._texts += texts
        first = len(self._texts) - len(texts)
        return torch.tensor([[float(text[0]), float(first + nth)] for nth, text in enumerate(texts)])

    def compute_logits(self, hidden):
        return torch.stack([self._model._logits(self._texts[int(number)]) for number in hidden[:, 1]])


@pytest.fixture(params=LANES)
def lane(request) -> str:
    return request.param


async def generated(runner, *, proposed: int) -> tuple[Gained, list[int], list[int]]:
    """What rows gain in steps that are launched before the last one has told anything, each with the guesses of the one before; of
    each row how many guesses were checked, and were right."""
    gained, num_checked, num_right = Gained(), [0] * len(PROMPTS), [0] * len(PROMPTS)
    rows = [*range(len(PROMPTS))]
    last = runner.launch(batch_of(*(prompt(row)._replace(num_proposed=proposed) for row in rows)))
    most = [1 for _ in rows]  # gained, if every guess is right
    while min(map(len, gained.ids)) < NUM_TOKENS:
        chosen = [row for row in rows if most[row] + 1 + proposed <= NUM_TOKENS + 2 * MOST]
        step = None
        if chosen:
            step = runner.launch(
                batch_of(
                    *(
                        behind(row, len(PROMPTS[row]) + most[row] - 1, (ON_DEVICE,) * proposed)._replace(
                            num_proposed=proposed
                        )
                        for row in chosen
                    )
                )
            )
            for row in chosen:
                most[row] += 1 + proposed
        before = [len(ids) for ids in gained.ids]
        if last is not None:
            await gained.take(last)
            for row in last.batch.rows:
                num = len(gained.ids[row.row]) - before[row.row]
                num_checked[row.row] += len(row.draft_ids)
                num_right[row.row] += num - 1
        if step is None:
            most = [len(ids) for ids in gained.ids]
        last = step
    if last is not None:
        await last.result()
    await runner.close()
    return gained, num_checked, num_right


@pytest.mark.parametrize("draft", on_push([Described, Otherwise, OfTheModel], Otherwise))
async def test_guesses_made_behind_a_step_change_no_token(lane, draft, monkeypatch):
    def make(model, max_proposed: int):
        return make_runner(lane, model, monkeypatch, max_model_len=64, rows=len(PROMPTS), max_proposed=max_proposed)

    plain, _, _ = await generated(make(Described(), 0), proposed=0)
    guessed, checked, right = await generated(make(ModelPair(Described(), draft()), MOST), proposed=MOST)
    assert [ids[:NUM_TOKENS] for ids in guessed.ids] == [ids[:NUM_TOKENS] for ids in plain.ids]
    assert guessed.shown[1][:NUM_TOKENS] == plain.shown[1][:NUM_TOKENS]
    for row in set(range(len(PROMPTS))) - PENALIZED:
        if draft is not Otherwise:
            assert checked[row] == right[row] > 0
        else:
            assert checked[row] > right[row] > 0


async def test_what_is_looked_up_behind_a_step_changes_no_token(lane, monkeypatch):
    """Of a model that says what it says in circles."""

    class Circling(Described):
        def _logits(self, sequence):
            return super()._logits((len(sequence) % 5,))

    def make(max_proposed: int, lookup: LookupLengths | None):
        return make_runner(
            lane, Circling(), monkeypatch, max_model_len=64, rows=len(PROMPTS), max_proposed=max_proposed, lookup=lookup
        )

    plain, _, _ = await generated(make(0, None), proposed=0)
    guessed, checked, right = await generated(make(MOST, LookupLengths(1, 4, 64)), proposed=MOST)
    assert [ids[:NUM_TOKENS] for ids in guessed.ids] == [ids[:NUM_TOKENS] for ids in plain.ids]
    assert checked[0] > right[0] > NUM_TOKENS // 2  # greedy: all but the first round
    texts = [[*ids, *found] for ids, found in zip(PROMPTS, guessed.ids, strict=True)]
    assert texts[0][len(PROMPTS[0]) + 5 : NUM_TOKENS] == texts[0][len(PROMPTS[0]) : NUM_TOKENS - 5]


class FromHost(TorchDispatchMode):
    """Refuses values that come from the host, as a captured graph does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default, "a value of the host in a captured graph"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_logits", [4, 12])
def test_texts_are_kept_by_what_is_on_the_device_alone(num_logits):
    inputs = DeviceInputs(8, 64, 64, LAYOUT, 2, CPU, (), MOST)
    drafter = LookupDrafter(LookupLengths(1, 4, 64), inputs)
    rows, logits_rows = torch.zeros(4, dtype=torch.int32), torch.zeros(num_logits, dtype=torch.int32)
    with FromHost():
        drafter.follow(SimpleNamespace(rows=rows, sample_rows=logits_rows), None)
    with pytest.raises(AssertionError, match="of the host"), FromHost():
        rows[rows.long()] = 1


async def test_a_row_has_as_many_guesses_as_it_is_to_have(lane, monkeypatch):
    pair = ModelPair(Described(), Described())
    runner = make_runner(lane, pair, monkeypatch, max_model_len=64, rows=len(PROMPTS), max_proposed=MOST)
    runner._inputs.draft_ids.fill_(VOCAB)
    rows = tuple(prompt(row)._replace(num_proposed=row) for row in range(MOST + 1))
    await runner.launch(batch_of(*rows)).result()
    assert [[int(id) < VOCAB for id in row] for row in runner._inputs.draft_ids[: MOST + 1]] == [
        [nth < row for nth in range(MOST)] for row in range(MOST + 1)
    ]
    await runner.close()


def test_a_row_says_whether_its_guesses_are_on_the_device():
    row = ScheduledRow(0, 0, 4, 3, (), (ON_DEVICE,) * 2, work=Sample(2))
    assert row.guessed_on_device
    assert not row._replace(draft_ids=(0, 1)).guessed_on_device
    assert not row._replace(draft_ids=()).guessed_on_device
