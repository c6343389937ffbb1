"""One step, decided: which rows, which spans, which blocks, which of them sample. Born complete, frozen after."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from runtime.api import SamplingParams
from runtime.kv.block_table import NewBlocks
from runtime.sequence import Sequence

NOT_FINITE = -1  # in place of a sampled id: this row's logits were NaN or infinite, its neighbours' were not


@dataclass(frozen=True, slots=True)
class RowBinding:
    """Everything the device tables must know about the sequence that has just taken a row."""

    params: SamplingParams
    seed: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Tokens [start, start + len(token_ids)) of a prompt: how likely the model finds each of them behind those before it, and
    which `count` it finds most likely there. What tells is the logits of tokens start - 1 and on, computed in the same step."""

    start: int
    token_ids: tuple[int, ...]
    count: int


class ScheduledRow(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence. A tuple, since one is made per token and a frozen dataclass takes four
    times as long to make.

    `token_ids` are the known ids of that span; where it is one short, the last id is what this row sampled in an earlier
    step and lies on the device. `new_blocks`: what its block tables have gained.
    `masked`: it samples, but only once its matchers have said from which tokens."""

    sequence: Sequence
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[NewBlocks, ...]
    samples: bool
    binding: RowBinding | None
    masked: bool = False
    scored: ScoredSpan | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    num_preempted: int

    @property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        return tuple(row for row in self.rows if row.samples)

    @property
    def masked_rows(self) -> tuple[ScheduledRow, ...]:
        return tuple(row for row in self.rows if row.masked)

    @property
    def scoring_rows(self) -> tuple[ScheduledRow, ...]:
        return tuple(row for row in self.rows if row.scored is not None)

    def split(self, late: Collection[int]) -> tuple[ScheduledBatch, ScheduledBatch]:
        """This step without the draws of the device rows `late`, and these draws alone."""
        rest = tuple(row._replace(samples=False, masked=False) if row.row in late else row for row in self.rows)
        draws = tuple(row._replace(scored=None) for row in self.rows if row.row in late)
        return ScheduledBatch(rest, self.num_tokens, self.num_preempted), ScheduledBatch(draws, 0, 0)

    def drawn(self, lines: tuple[ScheduledRow, ...]) -> tuple[ScheduledRow, ...]:
        """`lines`, computed for this batch and perhaps more, of which only those sample that it draws."""
        rows = {row.row for row in self.sampling_rows}
        return tuple(line if line.row in rows or not line.samples else line._replace(samples=False) for line in lines)
