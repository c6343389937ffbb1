"""A paged cache by hand: scattered blocks, and steps of any mix of spans, without scheduler or runner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch

import ops
from runtime.kv.kinds import Chunk, Full, State, Window
from runtime.kv.kv_cache import LayerKV
from runtime.models.forward_step import ForwardStep
from runtime.models.model import Model

BLOCK = 16
STATES = 1  # the table of recurrent layers: a row is its own slot
CHUNKS = 2  # the same blocks as in table 0, for layers that see chunks


class Paged:
    """Rows of tokens over one model. A row's blocks are drawn at random, and full of NaN before they are written."""

    def __init__(self, model: Model, num_rows: int, max_tokens: int) -> None:
        self.model = model
        per_row = -(-max_tokens // BLOCK)
        ids = list(range(num_rows * per_row))
        random.Random(4).shuffle(ids)
        self.tables = [ids[row * per_row : (row + 1) * per_row] for row in range(num_rows)]
        self.lengths = [0] * num_rows
        dtype = getattr(torch, model.dtype)
        self.kv_caches = []
        self.chunk: int | None = None
        for kind in model.spec.memory_kinds():
            match kind:
                case State(state):
                    states = tuple(torch.full((num_rows, *shape), torch.nan) for shape in state.shapes)
                    self.kv_caches.append(LayerKV(states, STATES))
                case Full(kv) | Window(kv):
                    keys = torch.full((len(ids), kv.num_kv_heads, BLOCK, kv.head_size), torch.nan, dtype=dtype)
                    table = CHUNKS if isinstance(kind, Chunk) else 0
                    self.chunk = kind.window if table else self.chunk
                    self.kv_caches.append(LayerKV((keys, keys if kv.latent else keys.clone()), table))

    @torch.inference_mode()
    def step(self, spans: dict[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Append each row's token ids to it; logits of all of them, [span, V] by row."""
        logits = self.model.compute_logits(self.model.forward(self.next(spans)))
        ends = accumulate(map(len, spans.values()))
        return {row: logits[end - len(span) : end] for (row, span), end in zip(spans.items(), ends, strict=True)}

    def next(self, spans: dict[int, Sequence[int]]) -> ForwardStep:
        """Append each row's token ids to it; the step that computes them."""
        ids, positions, slots, starts = [], [], [], [0]
        for row, span in spans.items():
            for position in range(self.lengths[row], self.lengths[row] + len(span)):
                positions.append(position)
                slots.append(self.tables[row][position // BLOCK] * BLOCK + position % BLOCK)
            ids += span
            self.lengths[row] += len(span)
            starts.append(len(ids))
        meta = ops.AttentionMeta(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([self.lengths[row] for row in spans], dtype=torch.int32),
            torch.tensor([self.tables[row] for row in spans], dtype=torch.int32),
            max(map(len, spans.values())),
            max(self.lengths[row] for row in spans),
        )
        by_table = (torch.tensor(slots), torch.tensor(list(spans)), torch.tensor(slots))
        metas = (meta, meta, meta if self.chunk is None else _in_chunks(meta, positions, self.chunk))
        return ForwardStep(torch.tensor(ids), torch.tensor(positions), by_table, metas, self.kv_caches)


def _in_chunks(meta: ops.AttentionMeta, positions: list[int], chunk: int) -> ops.AttentionMeta:
    starts = [positions[start] for start in meta.query_start_loc[:-1].tolist()]
    num_pieces = len(starts) + sum(each % chunk == 0 for each in positions) - sum(each % chunk == 0 for each in starts)
    (pieces,) = ops.in_chunks([meta], torch.tensor(positions), chunk, BLOCK, num_pieces)
    return pieces
