"""Attention within chunks: what kernels that know of none compute of pieces, against a mask; and pieces of a padded step."""

from __future__ import annotations

import random

import pytest
import torch

import ops
from ops.attention import triton_paged
from tests.ops.places import DEVICES

BLOCK, CHUNK, HEADS, KV_HEADS, SIZE = 16, 48, 2, 1, 64
STEPS = {
    "prompts": [(0, 60), (0, 48), (0, 47), (0, 1)],
    "chunks of prompts and decodes": [(40, 70), (96, 1), (95, 1), (47, 2), (144, 48), (10, 1)],
    "decodes": [(0, 1), (47, 1), (48, 1), (49, 1), (190, 1)],
}


@pytest.mark.parametrize("padding", [0, 5], ids=["as it is", "padded"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_query_sees_its_own_chunk_up_to_itself(device, step, padding):
    """Rows of a table each: in a captured step those of `rows`, behind which come empty requests and tokens of nobody."""
    torch.manual_seed(1)
    spans = STEPS[step]
    num_blocks = -(-max(start + length for start, length in spans) // BLOCK)
    ids = random.Random(1).sample(range(num_blocks * 8), num_blocks * 8)
    tables = torch.tensor(ids, dtype=torch.int32).view(8, num_blocks)
    rows = random.Random(2).sample(range(8), len(spans)) if padding else list(range(len(spans)))
    lens = [length for _, length in spans]
    num_tokens = sum(lens)
    q = torch.randn(num_tokens + padding, HEADS, SIZE)
    keys, values = (torch.randn(len(ids), KV_HEADS, BLOCK, SIZE) for _ in range(2))
    positions = torch.tensor([at for start, length in spans for at in range(start, start + length)] + [7] * padding)
    empty = [0] * padding
    meta = ops.AttentionMeta(
        query_start_loc=torch.tensor([0, *lens, *empty]).cumsum(0).int(),
        seq_lens=torch.tensor([start + length for start, length in spans] + empty).int(),
        block_tables=tables,
        max_query_len=max(lens),
        max_seq_len=num_blocks * BLOCK,
        rows=torch.tensor(rows + [-1] * padding, dtype=torch.int32) if padding else None,
    )
    cut = sum(at % CHUNK == 0 for start, length in spans for at in range(start + 1, start + length))
    if padding:
        most = ops.max_pieces(num_tokens + padding, len(spans) + padding, CHUNK)
        assert most >= len(spans) + cut
    else:
        most = len(spans) + cut
    (pieces,) = ops.in_chunks([_on(meta, device)], positions.to(device), CHUNK, BLOCK, most)
    attend = triton_paged.paged_attention if padding else ops.paged_attention  # nothing is padded on a CPU
    out = attend(q.to(device), keys.to(device), values.to(device), pieces, SIZE**-0.5).cpu()
    first = 0
    for (start, length), row in zip(spans, rows, strict=True):
        k, v = (
            each[tables[row].long()]
            .transpose(1, 2)
            .flatten(0, 1)[: start + length]
            .repeat_interleave(HEADS // KV_HEADS, 1)
            for each in (keys, values)
        )
        at, seen = torch.arange(start, start + length)[:, None], torch.arange(start + length)
        hidden = (seen > at) | (seen // CHUNK != at // CHUNK)
        scores = torch.einsum("nhd,shd->hns", q[first : first + length], k) * SIZE**-0.5
        expected = torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(out[first : first + length], expected, rtol=1e-4, atol=1e-5)
        first += length


def test_positions_that_nobody_has_written_yet_do_no_harm():
    """What `ops.compile_together` runs where another model has compiled the kernel of the rows, and none that of the positions."""
    num_tokens, num_rows = 640, 8
    starts = torch.arange(0, num_tokens + 1, num_tokens // num_rows).int()
    tables = torch.zeros(num_rows, 8, dtype=torch.int32)
    rows = torch.arange(num_rows, dtype=torch.int32)
    meta = ops.AttentionMeta(starts, starts[1:], tables, num_tokens, 128, rows)
    most = ops.max_pieces(num_tokens, num_rows, CHUNK)
    (pieces,) = ops.in_chunks([meta], torch.zeros(num_tokens, dtype=torch.int64), CHUNK, BLOCK, most)
    assert pieces.query_start_loc.shape == (most + 1,)
    assert (pieces.query_start_loc.diff() >= 0).all()


def _on(meta: ops.AttentionMeta, device: str) -> ops.AttentionMeta:
    return ops.AttentionMeta(
        *(each.to(device) for each in (meta.query_start_loc, meta.seq_lens, meta.block_tables)), meta.max_query_len,
        meta.max_seq_len, None if meta.rows is None else meta.rows.to(device),
    )  # fmt: skip
