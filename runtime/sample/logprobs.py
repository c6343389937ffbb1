"""Log-probabilities of sampled tokens, for rows that request them, computed on the device.

They are the model's own probabilities: they are computed from the raw logits, before the sampler changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ops.transfer import index_on, to_host
from runtime.api import TokenLogprobs
from runtime.batch import RowBinding, ScheduledRow


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Log-probabilities of n tokens. own [n, 2] float32: log-probability and rank of the token itself. top [n, k] float32, top_ids
    [n, k] int64: log-probabilities and ids of the k most likely tokens."""

    own: Tensor
    top: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor, count: int, token_ids: Tensor | None = None) -> TokenStats:
        """Return statistics of ids [n] int64 in logits [n, V]. `top` has the `count` most likely tokens, followed by `token_ids`
        [n, m]."""
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        own = logprobs.gather(1, ids[:, None])
        # Compared into floats: on a CPU summing booleans takes five times as long.
        above = torch.gt(logprobs, own, out=torch.empty_like(logprobs))
        top, top_ids = torch.topk(logprobs, min(count, logprobs.shape[1]), dim=-1)
        if token_ids is not None:
            top = torch.cat([top, logprobs.gather(1, token_ids)], dim=1)
            top_ids = torch.cat([top_ids, token_ids], dim=1)
        return cls(torch.cat([own, above.sum(dim=-1, keepdim=True) + 1], dim=1), top, top_ids)

    @classmethod
    def joined(cls, pieces: Sequence[TokenStats]) -> TokenStats:
        return cls(*(torch.cat(parts) for parts in zip(*((p.own, p.top, p.top_ids) for p in pieces), strict=True)))

    def to_host(self) -> TokenStats:
        """Return a copy whose transfer to the host is enqueued. Read the copy only after the work enqueued so far has completed."""
        return TokenStats(to_host(self.own), to_host(self.top), to_host(self.top_ids))

    def read(self, shown: Sequence[slice]) -> list[TokenLogprobs]:
        """Return the statistics of each token as Python values. `shown`: for each token, which of its top-k entries are returned.
        The tensors must be on the host."""
        own, top, top_ids = self.own.tolist(), self.top.tolist(), self.top_ids.tolist()
        return [
            TokenLogprobs(own[i][0], int(own[i][1]), tuple(zip(top_ids[i][which], top[i][which], strict=True)))
            for i, which in enumerate(shown)
        ]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of the tokens sampled in a step. For each token, `rows` has its row, and `shown` its requested top-k
    entries. Tokens of a row are contiguous and in order."""

    rows: tuple[int, ...]
    shown: tuple[slice, ...]
    stats: TokenStats

    def to_host(self) -> StepLogprobs:
        return StepLogprobs(self.rows, self.shown, self.stats.to_host())

    def by_row(self) -> dict[int, list[TokenLogprobs]]:
        """Return the log-probabilities of each row's tokens, by row number. The tensors must be on the host."""
        found: dict[int, list[TokenLogprobs]] = {}
        for row, entry in zip(self.rows, self.stats.read(self.shown), strict=True):
            found.setdefault(row, []).append(entry)
        return found


class LogprobsState:
    """Requests for log-probabilities, by row: the number of top tokens, or their ids."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[int, tuple[int, ...]]] = {}

    def bind(self, row: int, binding: RowBinding) -> None:
        self._by_row.pop(row, None)
        params = binding.params
        if params.logprobs is not None:
            self._by_row[row] = (0 if params.logprob_token_ids else params.logprobs, params.logprob_token_ids)

    def compute(
        self, logits: Tensor, ids: Tensor, rows: Sequence[ScheduledRow], starts: Sequence[int], stops: Sequence[int]
    ) -> StepLogprobs | None:
        """Return the log-probabilities of ids [S] int64, sampled from logits [S, V]; None if no row requested them.

        `starts`, `stops`: range of logits rows of each row in `rows`. Without requests the cost is one check per row."""
        if not self._by_row:
            return None
        asked = [index for index, row in enumerate(rows) if row.row in self._by_row and row.samples]
        if not asked:
            return None
        chosen = [(rows[index].row, logits_row) for index in asked for logits_row in range(starts[index], stops[index])]
        requested = [self._by_row[row] for row, _ in chosen]
        count = min(max(count for count, _ in requested), logits.shape[1])
        max_ids = max(len(ids) for _, ids in requested)
        shown = tuple(slice(count, count + len(ids)) if ids else slice(own) for own, ids in requested)
        token_ids = None
        if max_ids:
            token_ids = index_on(logits.device, [[*ids, *[0] * (max_ids - len(ids))] for _, ids in requested])
        index = index_on(logits.device, [logits_row for _, logits_row in chosen])
        stats = TokenStats.of(logits[index], ids[index].clamp(min=0), count, token_ids)
        return StepLogprobs(tuple(row for row, _ in chosen), shown, stats)
