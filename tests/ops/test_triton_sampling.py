"""Triton's sampler draws the reference's ids: on the CPU by Triton's interpreter, on a GPU for real."""

from __future__ import annotations

import pytest
import torch

from ops.sampling import reference, triton_sample
from ops.sampling import tables as t
from tests.ops.places import DEVICES, interpreted_in_16_bits, interpreted_once, places
from tests.ops.sampling_case import RowParams, fill

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

PLACES = places(0, 0, 0)
PARAMS = [
    RowParams(temperature=0.0),
    RowParams(),
    RowParams(temperature=0.3, seed=-5),
    RowParams(top_k=1),
    RowParams(top_k=7, temperature=2.0, seed=2**40),
    RowParams(top_k=10_000, seed=3),
    RowParams(top_p=0.9),
    RowParams(top_p=1e-6),
    RowParams(top_p=0.9999, temperature=5.0),
    RowParams(min_p=0.05),
    RowParams(min_p=1.0),
    RowParams(min_p=0.01, top_p=0.7),
    RowParams(top_k=20, top_p=0.95, temperature=0.6),
    RowParams(top_k=300, top_p=0.5, min_p=0.001, temperature=3.0),
    RowParams(temperature=0.0, presence=1.0, frequency=0.5, repetition=1.3, prompt=(0, 0), outputs=(0,)),
    RowParams(frequency=2.0, repetition=0.7, outputs=(0, 0), top_p=0.8),
    RowParams(temperature=0.0, bias={0: -100.0}),
    RowParams(bias={0: 3.0}, top_k=3, bans=(0,), free_from=101),
    RowParams(temperature=0.0, bans=(0,), free_from=100),
    RowParams(temperature=0.0, allowed=(0,)),
    RowParams(top_k=3, bias={0: 1.0}, allowed=(0,)),
]


def sample(run, scores, params_by_row, rows=None, position=100):
    """Ids, last ids and counts."""
    (lines, vocab_size), device = scores.shape, scores.device
    rows = torch.arange(lines, dtype=torch.int32) if rows is None else torch.tensor(rows, dtype=torch.int32)
    positions = torch.arange(lines) % 2 + position - 1
    tables = fill(params_by_row, vocab_size, device)
    last_ids = torch.full((len(params_by_row),), 5, device=device)
    ids = run(scores.clone(), rows.to(device), positions.to(device), last_ids, tables)
    ids = torch.where(rows < 0, -7, ids.cpu())  # anything is fine there
    return ids.tolist(), last_ids.tolist(), tables.counts.cpu()


def assert_same(scores, params_by_row, **how):
    """The ids of the reference on the CPU and of Triton where `scores` lies, for the same tables."""
    wanted = sample(reference.sample, scores.cpu(), params_by_row, **how)
    got = sample(triton_sample.sample, scores, params_by_row, **how)
    assert got[0] == wanted[0]
    assert got[1] == wanted[1]
    assert torch.equal(got[2], wanted[2])
    return got[0]


def random(lines, vocab_size, dtype, device, seed=0, scale=3.0):
    values = torch.randn(lines, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(device, dtype)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("vocab_size", [1, 50, 4099, 1024])
def test_ids_are_the_references(vocab_size, device, dtype, tolerance):
    assert_same(random(len(PARAMS), vocab_size, dtype, device, vocab_size), PARAMS)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_in_16_bits(PLACES))
def test_ids_are_the_references_in_16_bits(device, dtype, tolerance):
    assert_same(random(len(PARAMS), 1100, dtype, device, 1), PARAMS)


@pytest.mark.nightly
@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
def test_a_flat_line_whose_candidates_fit_no_register(device, dtype, tolerance):
    params_by_row = [
        RowParams(top_p=0.9),
        RowParams(top_p=0.9, frequency=1.0, outputs=(3,)),
        RowParams(min_p=0.9, top_p=0.5, seed=1),
        RowParams(top_k=9000),
        RowParams(top_k=9990, top_p=0.99, temperature=1.7),
    ]
    assert_same(random(len(params_by_row), 10_003, dtype, device, 1, scale=0.01), params_by_row)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lines", "scale"), [(1, 3.0), (40, 0.01), (300, 2.0)])
def test_ids_are_the_references_at_full_size(lines, scale, dtype):
    params_by_row = [PARAMS[line % len(PARAMS)] for line in range(lines)]
    assert_same(random(lines, 151_936, dtype, "cuda", 1, scale), params_by_row)


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_lines_over_many_tiles_and_any_order_of_rows(device):
    rows = [12, -1, 17]
    assert_same(random(len(rows), 70_000, torch.float16, device), PARAMS, rows=rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [3, 1200])
def test_ties_go_to_the_lowest_id_and_all_of_equals_pass_a_filter(vocab_size, device):
    scores = torch.zeros(len(PARAMS), vocab_size, device=device)
    scores[:, vocab_size // 2 :: 2] = 1.5
    scores[:, 0] = -0.0
    ids = assert_same(scores, PARAMS)
    assert ids[0] == vocab_size // 2


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_few_tokens_left_by_minus_infinity(device):
    scores = torch.full((len(PARAMS), 1200), -torch.inf, device=device)
    scores[:, 1199] = -5.0
    scores[:, 600] = -6.0
    assert_same(scores, PARAMS)


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_huge_and_tiny_logits(device):
    for scale in (1e38, 1e-38, 1e-45):
        # Penalties of huge logits overflow as they should, but one rounding more or less would show.
        assert_same(random(14, 1200, torch.float32, device).clamp(-3.3, 3.3) * scale, PARAMS[:14])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_unusable_logits_mark_their_line_only(bad, device):
    params_by_row = [params for params in PARAMS if params.allowed is None]  # what may not be drawn may be anything
    scores = random(len(params_by_row), 1500, torch.float32, device)
    wanted, *_ = sample(reference.sample, scores.cpu(), params_by_row)
    spoilt = scores.clone()
    spoilt[::2, 1321] = bad
    if bad < 0:
        spoilt[::2] = bad
    ids = assert_same(spoilt, params_by_row)
    assert ids[::2] == [t.NOT_FINITE] * len(ids[::2])
    assert ids[1::2] == wanted[1::2]


@pytest.mark.parametrize("device", DEVICES)
def test_bias_bans_and_penalties_reach_every_tile(device):
    bias = {0: 1.0, 1023: 2.0, 1024: -3.0, 2047: 20.0, 4095: 30.0, 4096: 40.0, 4097: 50.0, 9999: 62.0}
    params_by_row = [
        RowParams(temperature=0.0, bias=bias),
        RowParams(temperature=0.0, bias=bias, bans=(0, 4095, 9999), free_from=200),
        RowParams(temperature=0.0, bias=bias, bans=(0, 4095, 4096, 4097, 9999), free_from=200),
        RowParams(temperature=0.0, bias=bias, presence=2.0, frequency=9.0, outputs=(9999,) * 3, prompt=(9999, 4097)),
    ]
    scores = random(4, 10_000, torch.float32, device, scale=1.0)
    assert assert_same(scores, params_by_row) == [9999, 4097, 2047, 4097]


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_count_on_from_step_to_step(device):
    params_by_row = [RowParams(temperature=0.0, frequency=0.5, presence=0.1), RowParams(frequency=1.0, seed=4)]
    scores = random(2, 300, torch.float32, device)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    chains = []
    for run, where in ((reference.sample, "cpu"), (triton_sample.sample, device)):
        tables, last_ids = fill(params_by_row, 300, where), torch.zeros(2, dtype=torch.int64, device=where)
        steps = (torch.full((2,), position, device=where) for position in range(12))
        chains.append([run(scores.to(where), rows.to(where), step, last_ids, tables).tolist() for step in steps])
        assert int((tables.counts & t.MAX_COUNT).sum()) == 24
    assert chains[0] == chains[1]
    assert len({ids[1] for ids in chains[0]}) > 3


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
def test_lines_of_a_wider_matrix(device):
    wide = random(len(PARAMS), 1100, torch.float32, device)
    wide[:, 1000:] = 99.0
    wanted = sample(reference.sample, wide[:, :1000].cpu().contiguous(), PARAMS)
    tables, last_ids = fill(PARAMS, 1000, device), torch.zeros(len(PARAMS), dtype=torch.int64, device=device)
    rows = torch.arange(len(PARAMS), dtype=torch.int32, device=device)
    got = triton_sample.sample(wide[:, :1000], rows, rows.long() % 2 + 99, last_ids, tables)
    assert got.tolist() == wanted[0]


@pytest.mark.gpu
def test_a_captured_graph_serves_rows_bound_after_the_capture():
    scores = random(4, 151_936, torch.bfloat16, "cuda")
    rows = torch.arange(4, dtype=torch.int32, device="cuda")
    positions = torch.full((4,), 100, device="cuda")
    tables = fill([RowParams(temperature=0.0)] * 4, 151_936, "cuda")
    last_ids = torch.zeros(4, dtype=torch.int64, device="cuda")
    triton_sample.sample(scores, rows, positions, last_ids, tables)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = triton_sample.sample(scores, rows, positions, last_ids, tables)
    for first in range(0, len(PARAMS) - 4, 4):
        params_by_row = PARAMS[first : first + 4]
        bound = fill(params_by_row, 151_936)
        for name in ("records", "counts", "bias_ids", "bias_values", "ban_ids", "masks"):
            getattr(tables, name).copy_(getattr(bound, name))
        graph.replay()
        wanted = reference.sample(scores.cpu(), rows.cpu(), positions.cpu(), last_ids.cpu(), bound)
        assert ids.tolist() == wanted.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_wherever_their_bits_lie(temperature, device):
    allowed = (0, 31, 32, 63, 64, 95, 1000, 1098)
    params_by_row = [RowParams(temperature=temperature, allowed=allowed, seed=seed) for seed in range(8)]
    params_by_row += [RowParams(temperature=temperature, allowed=(token,)) for token in allowed]
    drawn = assert_same(random(len(params_by_row), 1099, torch.float32, device, 3), params_by_row)
    assert set(drawn[:8]) <= set(allowed)
    assert drawn[8:] == list(allowed)
