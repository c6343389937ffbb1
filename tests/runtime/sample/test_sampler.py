"""The sampler as a runner uses it: rows bound to requests, lines of logits in, ids out. On a CPU and, marked gpu, on CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ops.sampling.tables import Masks
from runtime.api import SamplingParams
from runtime.batch import NOT_FINITE, RowBinding
from runtime.constrain.masks import mask_of, num_words
from runtime.sample.logit_bias import MAX_BIASES, LogitBias
from runtime.sample.min_tokens import MAX_STOP_TOKEN_IDS, MinTokens
from runtime.sample.sampler import Sampler
from runtime.sample.stage import Record

V = 50
EOS = 3
ROWS = 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param)


class Rows:
    """A sampler and the runner's table of last ids."""

    def __init__(self, device: torch.device, eos: frozenset[int] = frozenset({EOS})) -> None:
        self.sampler = Sampler(V, eos, ROWS, device)
        self.last_ids = torch.full((ROWS,), 7, device=device)

    def bind(self, row: int, prompt=(1, 2), output=(), seed=0, masked=False, **params) -> None:
        params.setdefault("max_tokens", 99)
        self.sampler.bind(row, RowBinding(SamplingParams(**params), seed, tuple(prompt), tuple(output), masked=masked))

    def sample(
        self, scores: torch.Tensor, rows: list[int], positions: list[int], masks: Masks | None = None
    ) -> list[int]:
        device = self.last_ids.device
        row_ids = torch.tensor(rows, dtype=torch.int32, device=device)
        places = torch.tensor(positions, device=device)
        drawn = self.sampler.sample(scores.to(device, copy=True), row_ids, places, self.last_ids, masks=masks)
        return drawn.tolist()


def logits(seed=0, lines=1, scale=2.0) -> torch.Tensor:
    return torch.randn(lines, V, generator=torch.Generator().manual_seed(seed)) * scale


PARAMS = [
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.9},
    {"top_k": 10, "min_p": 0.01},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_draws_the_same_alone_in_any_batch_and_in_any_order(device, params):
    together, alone = Rows(device), Rows(device)
    scores = logits(2, lines=3)
    for row in range(3):
        together.bind(row, seed=row, **params)
    alone.bind(7, seed=1, **params)
    for position in range(2, 22):
        order = [(position + shift) % 3 for shift in range(3)]
        batch = together.sample(scores[order], order, [position] * 3)
        assert alone.sample(scores[1:2], [7], [position]) == [batch[order.index(1)]]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_taken_up_again_after_preemption_goes_on_as_if_nothing_had_happened(device, params):
    settled, preempted = Rows(device), Rows(device)
    for rows in (settled, preempted):
        rows.bind(0, seed=5, **params)
    ids: list[int] = []
    for position in range(2, 22):
        scores = logits(position)
        if position == 12:
            preempted.bind(0, temperature=0.0)  # somebody else meanwhile
            preempted.sample(scores, [0], [4])
            preempted.bind(4, output=ids, seed=5, **params)
        ids += settled.sample(scores, [0], [position])
        assert preempted.sample(scores, [0 if position < 12 else 4], [position]) == ids[-1:]
    assert len(set(ids)) > 5


def test_different_seeds_and_positions_draw_differently(device):
    rows = Rows(device)
    for row in range(4):
        rows.bind(row, seed=row)
    scores = torch.zeros(4, V)
    steps = [rows.sample(scores, [0, 1, 2, 3], [position] * 4) for position in range(2, 12)]
    assert len({tuple(line) for line in zip(*steps, strict=True)}) == 4
    assert len({tuple(step) for step in steps}) == 10


def test_temperature_zero_takes_the_largest_logit_even_beside_a_random_row(device):
    rows = Rows(device)
    rows.bind(0, temperature=0.0)
    rows.bind(1, temperature=1.0)
    rows.bind(2, temperature=1.0, top_k=1)
    scores = logits(3, lines=3)
    ids = rows.sample(scores, [0, 1, 2], [5, 5, 5])
    assert ids[0] == scores[0].argmax()
    assert ids[2] == scores[2].argmax()


def test_the_first_of_one_is_the_first_of_equals_as_for_temperature_zero(device):
    rows = Rows(device)
    rows.bind(0, temperature=1.0, top_k=1)
    scores = torch.zeros(1, V)
    scores[0, 20:30] = 3.0
    assert [rows.sample(scores, [0], [position])[0] for position in range(2, 8)] == [20] * 6


def test_a_top_k_of_any_size_is_no_more_than_the_vocabulary(device):
    rows = Rows(device)
    rows.bind(0, temperature=1.0, top_k=2**40, seed=1)
    rows.bind(1, temperature=1.0, seed=1)
    scores = logits(3).repeat(2, 1)
    ids = [rows.sample(scores, [0, 1], [position] * 2) for position in range(2, 12)]
    assert all(first == second for first, second in ids)


def test_what_a_row_sampled_is_its_next_input(device):
    rows = Rows(device)
    rows.bind(2, temperature=0.0)
    rows.bind(5, temperature=0.0)
    scores = logits(4, lines=3)
    scores[2, 0] = torch.nan
    ids = rows.sample(scores, [2, -1, 5], [3, 0, 3])
    assert ids[2] == NOT_FINITE
    assert rows.last_ids.tolist() == [7, 7, ids[0], 7, 7, 0, 7, 7]


def test_penalties_follow_their_formulas_and_count_what_is_sampled(device):
    """The penalised line is what a greedy row sees: shift each token to the top in turn, and see when it falls below."""
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "temperature": 0.0}
    scores = logits(4)
    wanted = scores[0].double()
    for token in (1, 2, 4):
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    wanted[4] -= 0.5 + 2 * 0.25
    rival = 9  # in neither prompt nor output
    for token in (0, 1, 2, 4):
        for lift in (-1e-3, 1e-3):
            rows = Rows(device)
            rows.bind(0, prompt=(1, 2, 2), output=(4, 4), **params)
            others = torch.full((1, V), -100.0)
            others[0, token] = scores[0, token]
            others[0, rival] = wanted[token] + lift
            assert rows.sample(others, [0], [5]) == [rival if lift > 0 else token]


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.0}, {"frequency_penalty": 0.5}, {"repetition_penalty": 2.0}], ids=str
)
def test_each_penalty_holds_alone(device, penalty):
    """Token 4 was drawn twice: its logit falls from 2 to 1, by any of them."""
    rows = Rows(device)
    rows.bind(0, output=(4, 4), temperature=0.0, **penalty)
    for rival, drawn in ((0.9, 4), (1.1, 9)):
        scores = torch.full((1, V), -100.0)
        scores[0, 4], scores[0, 9] = 2.0, rival
        rows.bind(0, output=(4, 4), temperature=0.0, **penalty)
        assert rows.sample(scores, [0], [5]) == [drawn]


def test_a_token_of_a_long_output_is_counted_up_to_the_largest_count_and_not_taken_for_one_of_the_prompt(device):
    """More than 15 bits hold: one more would set the bit that says "in the prompt"."""
    rows = Rows(device)
    rows.bind(0, output=(4,) * 40_000, temperature=0.0, frequency_penalty=2.0**-15)
    for rival, drawn in ((-1.1, 4), (-0.9, 9)):
        scores = torch.full((1, V), -100.0)
        scores[0, 4], scores[0, 9] = 0.0, rival
        assert rows.sample(scores, [0], [5]) == [drawn]


def test_each_token_sampled_is_penalised_once_more(device):
    rows = Rows(device)
    rows.bind(0, frequency_penalty=1.0, temperature=0.0)
    scores = torch.full((1, V), -100.0)
    scores[0, 10], scores[0, 11] = 5.0, 2.5
    ids = [rows.sample(scores, [0], [position])[0] for position in range(2, 8)]
    assert ids == [10, 10, 10, 11, 10, 11]  # 5, 4, 3; 2 < 2.5; 2 > 1.5; 1 < 1.5


def test_logit_bias_adds_and_a_new_tenant_of_the_row_is_free_of_it(device):
    rows = Rows(device)
    rows.bind(0, temperature=0.0, logit_bias={9: 100.0, 8: -100.0})
    scores = logits(5)
    assert rows.sample(scores, [0], [2]) == [9]
    rows.bind(0, temperature=0.0)
    assert rows.sample(scores, [0], [2]) == [int(scores.argmax())]


@pytest.mark.parametrize(("ignore_eos", "banned"), [(False, {EOS, 8}), (True, {8})])
def test_nothing_that_ends_a_sequence_is_drawn_before_min_tokens(device, ignore_eos, banned):
    rows = Rows(device)
    rows.bind(0, temperature=0.0, min_tokens=2, stop_token_ids=frozenset({8}), ignore_eos=ignore_eos)
    for position, free in ((2, False), (3, False), (4, True)):
        for token in (EOS, 8, 9):
            scores = torch.zeros(1, V)
            scores[0, token] = 5.0
            allowed = free or token not in banned
            assert (rows.sample(scores, [0], [position]) == [token]) is allowed


def test_only_allowed_tokens_are_drawn_until_the_row_has_a_new_tenant(device):
    rows = Rows(device)
    allowed = {0, 31, 32, V - 1}
    rows.bind(2, temperature=2.0, allowed_token_ids=frozenset(allowed))
    drawn = {rows.sample(logits(seed), [2], [seed])[0] for seed in range(60)}
    assert drawn == allowed
    rows.bind(2, temperature=0.0)
    scores = logits(1)
    assert rows.sample(scores, [2], [1]) == [int(scores.argmax())]


def test_rows_with_matchers_draw_from_the_masks_of_the_step(device):
    rows = Rows(device)
    rows.bind(3, temperature=2.0, masked=True)
    rows.bind(5, temperature=2.0, masked=True)
    everything, some, one = range(V), {0, 31, 32, V - 1}, {33}
    drawn = set()
    for position in range(60):
        of_row = {3: some, 5: one} if position % 2 else {3: one, 5: everything}
        words = torch.from_numpy(np.stack([mask_of(ids, num_words(V)) for ids in of_row.values()])).to(device)
        which = torch.tensor([1, 0, 0], dtype=torch.int32, device=device)
        ids = rows.sample(logits(position, lines=3), [5, 3, -1], [position] * 3, Masks(which, words))
        assert ids[0] in of_row[5]
        assert ids[1] in of_row[3]
        drawn.add(ids[1])
    assert drawn == some | one


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_line_left_out_at_first_and_drawn_later_is_as_if_drawn_at_once(device, params):
    at_once, in_two = Rows(device), Rows(device)
    for rows in (at_once, in_two):
        for row in range(3):
            rows.bind(row, seed=row, **params)
    for position in range(2, 30):
        scores, places = logits(position, lines=3), [position] * 3
        ids = at_once.sample(scores, [0, 1, 2], places)
        first = in_two.sample(scores, [0, -1, 2], places)
        late = in_two.sample(scores, [-1, 1, -1], places)
        assert [first[0], late[1], first[2]] == ids
        assert at_once.last_ids.tolist() == in_two.last_ids.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_mark_their_row_only(device, bad, temperature):
    rows = Rows(device)
    rows.bind(0, temperature=temperature)
    rows.bind(1, temperature=0.0)
    scores = logits(6, lines=2)
    scores[0, 11] = bad
    assert rows.sample(scores, [0, 1], [2, 2]) == [NOT_FINITE, int(scores[1].argmax())]


def test_lists_in_the_tables_ascend_whatever_order_a_client_names_them_in():
    """Kernels find a token in them by bisection."""
    ids, values, bans = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int32)
    named = (4097, 8, 40, 1)  # neither sorted nor in the order in which a set of them is walked
    params = SamplingParams(
        1, logit_bias={token: token / 2 for token in named}, min_tokens=1, stop_token_ids=frozenset(named)
    )
    binding, record = RowBinding(params, 0, (1,), ()), Record()
    LogitBias(ids, values).bind(0, binding, record)
    MinTokens(bans, frozenset()).bind(0, binding, record)
    assert ids.tolist() == bans.tolist() == [sorted(named)]
    assert values.tolist() == [[0.5, 4.0, 20.0, 2048.5]]


def test_more_biases_or_stop_ids_than_there_is_room_for_are_an_error(device):
    rows = Rows(device)
    with pytest.raises(ValueError, match="1025 tokens in logit_bias"):
        rows.bind(0, logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))
    with pytest.raises(ValueError, match="the maximum is 1025"):
        rows.bind(0, min_tokens=1, stop_token_ids=frozenset(range(100, 102 + MAX_STOP_TOKEN_IDS)))
    rows.bind(0, min_tokens=1, stop_token_ids=frozenset(range(100, 100 + MAX_STOP_TOKEN_IDS)))


def test_the_tables_bytes_are_known():
    small, large = (Sampler(V, frozenset(), rows, torch.device("cpu")).nbytes for rows in (1, 3))
    assert large == 3 * small
    assert small >= 2 * V
