"""Graph pool: which captured shape a step takes."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers

from runtime.models.decoder import Hidden
from runtime.platform import graph_pool
from runtime.platform.graph_pool import Captured, Follow, GraphPool, decode_sizes, drafted_shapes, mixed_shapes
from runtime.runner.device_inputs import StepShape
from runtime.runner.runner import Sampled


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100, 256, 300, 1024])
def test_the_ladder_of_batch_sizes_rises_to_the_largest(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 2), (8, 16), (24, 40), (256, 8192), (512, 2048), (1000, 1001)])
def test_every_mixed_step_within_the_limits_has_a_shape(seqs, tokens):
    shapes = mixed_shapes(seqs, tokens)
    assert all(shape.num_rows <= min(seqs, shape.num_tokens) for shape in shapes)
    assert max(shape.num_tokens for shape in shapes) == tokens
    assert any(shape.num_tokens == tokens and shape.num_rows == min(seqs, tokens) for shape in shapes)


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 2), (1, 100), (8, 16), (24, 4000), (256, 8192), (512, 2048)])
def test_steps_with_guesses_have_shapes_up_to_as_many_tokens_as_rows_decode_or_64_and_a_few_more(seqs, tokens):
    shapes = drafted_shapes(seqs, tokens)
    sizes = [shape.num_tokens for shape in shapes]
    assert sizes[0] == 2
    assert sizes[-1] == min(tokens, max(64, seqs) + 32)
    assert min(tokens, max(64, seqs)) in sizes
    assert all(small < large <= max(small + 2, small * 3 // 2) for small, large in pairwise(sizes))
    assert all(shape.num_rows == min(shape.num_tokens, seqs) and shape.drafts for shape in shapes)
    pool = GraphPool(seqs, tokens, drafts=True)
    assert set(shapes) <= set(pool.shapes)
    assert not any(shape.drafts for shape in GraphPool(seqs, tokens).shapes)


def test_what_was_not_captured_is_not_found():
    assert GraphPool(8, 64).find(StepShape(1, 1, True)) is None


@pytest.mark.gpu
def test_the_smallest_shape_that_fits_is_replayed_and_padding_costs_no_more_than_it_must():
    pool = GraphPool(32, 256)
    source = torch.zeros(256, dtype=torch.int64, device="cuda")
    followed = torch.zeros((), dtype=torch.int64, device="cuda")

    def compute(shape: StepShape) -> tuple[Captured, Follow]:
        ids = source[: shape.num_rows] + shape.num_tokens
        sampled = Sampled(ids, ids[:, None].repeat(1, 100_000).to(torch.bfloat16), ids)
        hidden = Hidden(None, source[: shape.num_tokens] + 1)
        return Captured(sampled, hidden), lambda: followed.copy_((hidden.residual * 2).sum())

    before = torch.cuda.memory_allocated()
    pool.capture(pool.shapes, compute)
    assert torch.cuda.memory_allocated() - before < 2 * 32 * 100_000 * 2  # their logits lie over each other
    assert pool.find(StepShape(3, 3, True)) == StepShape(4, 4, True)
    assert pool.find(StepShape(32, 32, True)) == StepShape(32, 32, True)
    assert pool.find(StepShape(20, 3, False)) == StepShape(24, 4, False)
    assert pool.find(StepShape(20, 5, False)) == StepShape(24, 24, False)
    assert pool.find(StepShape(257, 5, False)) is None
    source += 1000
    shape = pool.find(StepShape(100, 20, False))
    assert shape is not None
    sampled, hidden = pool.replay(shape)
    assert hidden.x is None
    assert hidden.residual.tolist() == [1001] * shape.num_tokens
    assert sampled.ids.tolist() == [1000 + shape.num_tokens] * shape.num_rows
    assert sampled.logits.shape == (shape.num_rows, 100_000)
    assert followed.item() == 0  # it is a graph apart
    pool.replay_following(shape)
    assert followed.item() == 2 * 1001 * shape.num_tokens
    assert sampled.ids.tolist() == [1000 + shape.num_tokens] * shape.num_rows
    assert (sampled.logits == sampled.ids[:, None].to(torch.bfloat16)).all()


def test_where_there_are_adapters_each_step_is_captured_with_and_without_any(monkeypatch):
    without, either = GraphPool(8, 32, drafts=True), GraphPool(8, 32, drafts=True, adapters=True)
    assert [shape for shape in either.shapes if not shape.adapters] == list(without.shapes)
    assert {replace(shape, adapters=False) for shape in either.shapes if shape.adapters} == set(without.shapes)
    monkeypatch.setattr(either, "_graphs", dict.fromkeys(either.shapes))
    assert either.find(StepShape(3, 3, True)) == StepShape(4, 4, True)
    assert either.find(StepShape(3, 3, True, adapters=True)) == StepShape(4, 4, True, adapters=True)
    assert either.find(StepShape(6, 2, False, drafts=True, adapters=True)).adapters


def test_where_prompts_are_pooled_alone_no_step_of_decodes_is_captured():
    shapes = list(GraphPool(8, 64, pools=True).shapes)
    assert shapes == [shape for shape in GraphPool(8, 64).shapes if not shape.uniform]
    assert GraphPool(8, 64, pools=True).find(StepShape(1, 1, True)) is None


def test_hidden_states_of_any_model_are_not_kept_by_a_graph(monkeypatch):
    """Ours are a named tuple; those of transformers' models stand by name beside others, or none."""
    monkeypatch.setattr(graph_pool, "_alias", lambda tensor: -tensor)
    rows = torch.ones(2, 3)
    stack, residual, *_ = graph_pool._aliases(Hidden(rows, 2 * rows))
    assert stack.tolist() == (-rows).tolist()
    assert residual.tolist() == (-2 * rows).tolist()
    output = transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=rows, hidden_states=(rows, None))
    found = graph_pool._aliases(output)
    assert type(found) is type(output)
    assert found.last_hidden_state.tolist() == (-rows).tolist()
    assert found.hidden_states[0].tolist() == (-rows).tolist()
    assert found.hidden_states[1] is found.past_key_values is None


@pytest.mark.gpu
def test_captures_that_come_and_go_leave_no_memory_behind():
    """As models that take turns are captured again and again: each product of matrices in a capture wants a workspace."""
    x = torch.ones((64, 4096), dtype=torch.bfloat16, device="cuda")
    w = torch.ones((4096, 4096), dtype=torch.bfloat16, device="cuda")

    def compute(shape: StepShape) -> tuple[Captured, None]:
        logits = x[: shape.num_rows] @ w
        ids = logits[:, 0].to(torch.int64)
        return Captured(Sampled(ids, logits, ids), Hidden(x[: shape.num_tokens] @ w, None)), None

    def taken() -> int:
        pool = GraphPool(8, 64)
        compute(StepShape(8, 8, True))
        pool.capture(pool.shapes, compute)
        pool.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    first = taken()
    assert [taken() for _ in range(3)] == [first] * 3


class Captures(GraphPool):
    """Notes what it would capture; `refused` cannot be."""

    refused: StepShape | None = None

    def _capture(self, shape, compute):
        if shape == self.refused:
            raise RuntimeError("not this one")
        self._graphs[shape] = None


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def serving() -> Captures:
    pool = Captures(256, 2048)
    pool.capture(pool.first, None)
    return pool


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("options", [{}, {"adapters": True, "drafts": True}, {"pools": True}])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 2), (7, 33), (256, 2048), (512, 8192)])
def test_a_server_begins_with_few_graphs_of_which_some_serves_each_step_with_less_than_twice_its_size(
    seqs, tokens, options
):
    pool, every = Captures(seqs, tokens, **options), Captures(seqs, tokens, **options)
    assert pool.first[0] == pool.shapes[0]  # the largest
    pool.capture(pool.first, None)
    every.capture(every.shapes, None)
    assert every.next_due(idle=True) is None
    for shape in pool.shapes:
        best, found = every.find(shape), pool.find(shape)
        assert found is not None
        assert best.num_tokens <= found.num_tokens < 2 * best.num_tokens
    if (seqs, tokens) == (512, 8192) and not options:
        assert len(pool.first) * 7 < len(pool.shapes)


@pytest.mark.usefixtures("no_device")
def test_what_no_server_begins_with_is_captured_decodes_first_while_it_is_idle():
    pool = serving()
    left = [shape for shape in pool.shapes if shape not in pool.first]
    assert pool.next_due(idle=False) is None
    order = []
    while (shape := pool.next_due(idle=True)) is not None:
        pool.capture_late(shape, None)
        order.append(shape)
    assert sorted(map(repr, order)) == sorted(map(repr, left))
    assert order == sorted(order, key=lambda shape: (not shape.uniform, shape.num_tokens, shape.num_rows))
    assert not pool.has_more
    assert pool.find(StepShape(24, 24, True)) == StepShape(24, 24, True)


@pytest.mark.usefixtures("no_device")
def test_a_shape_that_many_steps_went_without_is_captured_before_others_and_while_steps_run():
    pool, wanted = serving(), StepShape(90, 90, True)
    for _ in range(graph_pool._STEPS_WITHOUT):
        assert pool.next_due(idle=False) is None
        assert pool.find(wanted) == StepShape(128, 128, True)
    shape = pool.next_due(idle=False)
    assert shape == StepShape(96, 96, True)
    assert pool.next_due(idle=False) is None
    pool.find(wanted)  # as a step does that is launched before it is captured
    pool.capture_late(shape, None)
    assert pool.find(wanted) == shape
    assert pool.next_due(idle=False) is None


@pytest.mark.usefixtures("no_device")
def test_where_a_capture_fails_no_other_is_tried_and_steps_go_on_as_they_did():
    pool, wanted = serving(), StepShape(90, 90, True)
    shape = pool.refused = pool.next_due(idle=True)
    with pytest.raises(RuntimeError, match="not this one"):
        pool.capture_late(shape, None)
    assert pool.next_due(idle=True) is None
    for _ in range(2 * graph_pool._STEPS_WITHOUT):
        assert pool.find(wanted) == StepShape(128, 128, True)
    assert pool.next_due(idle=False) is None


@pytest.mark.gpu
def test_what_is_captured_late_lies_in_the_memory_of_those_before_it():
    pool = GraphPool(64, 512)
    source = torch.arange(512, dtype=torch.int64, device="cuda")

    def compute(shape: StepShape) -> tuple[Captured, None]:
        ids = source[: shape.num_rows] + shape.num_tokens
        logits = ids[:, None].repeat(1, 50_000).to(torch.bfloat16)
        return Captured(Sampled(ids, logits, ids), Hidden(None, source[: shape.num_tokens] + 1)), None

    pool.capture(pool.first, compute)
    taken = torch.cuda.memory_reserved()
    while (shape := pool.next_due(idle=True)) is not None:
        pool.capture_late(shape, compute)
    assert torch.cuda.memory_reserved() - taken <= 64 << 20
    for shape in pool.shapes:
        assert pool.replay(shape).sampled.ids.tolist() == [i + shape.num_tokens for i in range(shape.num_rows)]
