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
class Facts:
    """Of n tokens: `own` [n, 2] float32, each one's log-probability and rank; `top` [n, k] float32 and `top_ids` [n, k] int64:
    others that may be shown beside it."""

    own: Tensor
    top: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor, count: int, asked: Tensor | None = None) -> Facts:
        """logits [n, V], ids [n] int64: with the `count` most likely tokens, and behind them those `asked` for, [n, m] int64."""
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        own = logprobs.gather(1, ids[:, None])
        # Compared into floats: on a CPU the sum of as many booleans takes five times as long.
        above = torch.gt(logprobs, own, out=torch.empty_like(logprobs))
        top, top_ids = torch.topk(logprobs, min(count, logprobs.shape[1]), dim=-1)
        if asked is not None:
            top, top_ids = torch.cat([top, logprobs.gather(1, asked)], dim=1), torch.cat([top_ids, asked], dim=1)
        return cls(torch.cat([own, above.sum(dim=-1, keepdim=True) + 1], dim=1), top, top_ids)

    @classmethod
    def joined(cls, pieces: Sequence[Facts]) -> Facts:
        return cls(*(torch.cat(parts) for parts in zip(*((p.own, p.top, p.top_ids) for p in pieces), strict=True)))

    def to_host(self) -> Facts:
        """The same, on its way to pinned memory: to be read once the work enqueued before has run."""
        return Facts(
            *(
                torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t, non_blocking=True)
                for t in (self.own, self.top, self.top_ids)
            )
        )

    def read(self, shown: Sequence[slice]) -> list[TokenLogprobs]:
        """`shown`: which of its k each token shows. Reads the tensors, so they must be there."""
        own, top, top_ids = self.own.tolist(), self.top.tolist(), self.top_ids.tolist()
        return [
            TokenLogprobs(own[i][0], int(own[i][1]), tuple(zip(top_ids[i][which], top[i][which], strict=True)))
            for i, which in enumerate(shown)
        ]


def index_on(device: torch.device, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """int64, without waiting for the device."""
    index = torch.tensor(values, dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Facts of the tokens sampled in some of a step's lines. `lines` and `shown`: whose, and which of the facts each asked for."""

    lines: tuple[int, ...]
    shown: tuple[slice, ...]
    facts: Facts

    def to_host(self) -> StepLogprobs:
        return StepLogprobs(self.lines, self.shown, self.facts.to_host())

    def by_line(self) -> dict[int, TokenLogprobs]:
        """Reads the tensors, so they must be there."""
        return dict(zip(self.lines, self.facts.read(self.shown), strict=True))


class LogprobWishes:
    """Which rows want log-probabilities, and of how many or of which tokens."""

    def __init__(self) -> None:
        self._wishes: dict[int, tuple[int, tuple[int, ...]]] = {}

    def bind(self, row: int, binding: RowBinding) -> None:
        self._wishes.pop(row, None)
        params = binding.params
        if params.logprobs is not None:
            self._wishes[row] = (0 if params.logprob_token_ids else params.logprobs, params.logprob_token_ids)

    def compute(self, logits: Tensor, ids: Tensor, rows: Sequence[ScheduledRow]) -> StepLogprobs | None:
        """logits [S, V], ids [S] int64 sampled from them, the scheduled row of each line.

        None where nobody asks, which costs a look at each row at most."""
        if not self._wishes:
            return None
        lines = tuple(line for line, row in enumerate(rows) if row.samples and row.row in self._wishes)
        if not lines:
            return None
        wishes = [self._wishes[rows[line].row] for line in lines]
        count = min(max(count for count, _ in wishes), logits.shape[1])
        most_asked = max(len(asked) for _, asked in wishes)
        shown = tuple(slice(count, count + len(asked)) if asked else slice(own) for own, asked in wishes)
        asked_ids = None
        if most_asked:
            asked_ids = index_on(logits.device, [[*asked, *[0] * (most_asked - len(asked))] for _, asked in wishes])
        chosen = index_on(logits.device, lines)
        return StepLogprobs(lines, shown, Facts.of(logits[chosen], ids[chosen].clamp(min=0), count, asked_ids))
