"""Log-probabilities of sampled tokens: which rows want them, and the few tensors that answer, on whatever device computed.

They are the model's own, so they are read from the logits as they came, beside the sampler and not through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.api import TokenLogprobs
from runtime.batch import RowBinding, ScheduledRow


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """For n of a step's lines: `facts` [n, 2] float32, the sampled token's log-probability and its rank; `top` [n, k] float32 and
    `top_ids` [n, k] int64, the most likely. `lines` and `counts`: whose, and how many of the k each asked for."""

    lines: tuple[int, ...]
    counts: tuple[int, ...]
    facts: Tensor
    top: Tensor
    top_ids: Tensor

    def to_host(self) -> StepLogprobs:
        """The same, on its way to pinned memory: to be read once the work enqueued before has run."""
        facts, top, top_ids = (
            torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t, non_blocking=True)
            for t in (self.facts, self.top, self.top_ids)
        )
        return StepLogprobs(self.lines, self.counts, facts, top, top_ids)

    def by_line(self) -> dict[int, TokenLogprobs]:
        """Reads the tensors, so they must be there."""
        facts, top, top_ids = self.facts.tolist(), self.top.tolist(), self.top_ids.tolist()
        return {
            line: TokenLogprobs(
                facts[i][0], int(facts[i][1]), tuple(zip(top_ids[i][:count], top[i][:count], strict=True))
            )
            for i, (line, count) in enumerate(zip(self.lines, self.counts, strict=True))
        }


class LogprobWishes:
    """Which rows want log-probabilities, and of how many tokens."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def bind(self, row: int, binding: RowBinding) -> None:
        self._counts.pop(row, None)
        if binding.params.logprobs is not None:
            self._counts[row] = binding.params.logprobs

    def compute(self, logits: Tensor, ids: Tensor, rows: Sequence[ScheduledRow]) -> StepLogprobs | None:
        """logits [S, V], ids [S] int64 sampled from them, the scheduled row of each line.

        None where nobody asks, which costs a look at each row at most."""
        if not self._counts:
            return None
        lines = tuple(line for line, row in enumerate(rows) if row.samples and row.row in self._counts)
        if not lines:
            return None
        counts = tuple(self._counts[rows[line].row] for line in lines)
        chosen = torch.tensor(lines)
        if logits.is_cuda:
            chosen = chosen.pin_memory().to(logits.device, non_blocking=True)  # else the host would wait for the device
        logprobs = torch.log_softmax(logits[chosen].float(), dim=-1)
        sampled = logprobs.gather(1, ids[chosen].clamp(min=0)[:, None])
        rank = (logprobs > sampled).sum(dim=-1, keepdim=True) + 1
        top = torch.topk(logprobs, min(max(counts), logprobs.shape[1]), dim=-1)
        return StepLogprobs(lines, counts, torch.cat([sampled, rank.float()], dim=1), top.values, top.indices)
