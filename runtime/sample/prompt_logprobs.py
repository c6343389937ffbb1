"""Log-probabilities of prompt tokens, each given the tokens before it.

They need the logits of nearly all prompt tokens. Long prompts are computed in slices, so the memory does not grow with the
prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.api import TokenLogprobs
from runtime.batch import PromptLogprobsSpan, ScheduledRow
from runtime.sample.logprobs import TokenStats

SLICE_BYTES = 32 << 20  # maximum size of float32 logits in memory


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of several `spans`, concatenated. `rows`: row of each span."""

    rows: tuple[int, ...]
    spans: tuple[PromptLogprobsSpan, ...]
    stats: TokenStats

    @classmethod
    def compute(
        cls, rows: Sequence[ScheduledRow], vocab_size: int, device: torch.device, logits_of: Callable[[Tensor], Tensor]
    ) -> PromptLogprobs | None:
        """Return the log-probabilities that `rows` requested; None if no row requested any.

        `rows` are in the order of the step's tokens. `logits_of` returns logits [n, vocab_size] of token indices [n] int64."""
        wanted = [(index, row.prompt_logprobs) for index, row in enumerate(rows) if row.prompt_logprobs is not None]
        if not wanted:
            return None
        firsts = list(accumulate((row.num_tokens for row in rows), initial=0))
        spans = tuple(span for _, span in wanted)
        tokens: list[int] = []
        for index, span in wanted:
            before = firsts[index] + span.start - 1 - rows[index].start  # its logits predict the next token
            tokens.extend(range(before, before + len(span.token_ids)))
        token_index = index_on(device, tokens)
        targets = index_on(device, [id for span in spans for id in span.token_ids])
        count = min(max(span.count for span in spans), vocab_size)
        size = max(1, SLICE_BYTES // (4 * vocab_size))
        pieces = [
            TokenStats.of(logits_of(some), ids, count)
            for some, ids in zip(torch.split(token_index, size), torch.split(targets, size), strict=True)
        ]
        return cls(tuple(rows[index].row for index, _ in wanted), spans, TokenStats.joined(pieces))

    def to_host(self) -> PromptLogprobs:
        return PromptLogprobs(self.rows, self.spans, self.stats.to_host())

    def by_row(self) -> dict[int, list[TokenLogprobs] | None]:
        """Return the log-probabilities of each row's tokens, by row number; None if its logits were not finite. The tensors must be
        on the host."""
        found = self.stats.read([slice(span.count) for span in self.spans for _ in span.token_ids])
        by_row: dict[int, list[TokenLogprobs] | None] = {}
        for row, span in zip(self.rows, self.spans, strict=True):
            entries, found = found[: len(span.token_ids)], found[len(span.token_ids) :]
            by_row[row] = None if any(entry.logprob != entry.logprob for entry in entries) else entries  # NaN
        return by_row
