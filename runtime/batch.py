"""ScheduledBatch: plain data that describes one scheduled step: its rows, token ranges, KV blocks and work. It is frozen.

A row refers to its sequence by number and nothing here holds a live object, so a batch can be sent to another process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.api import PoolingParams, SamplingParams
from runtime.api.media import MediaItem
from runtime.kv.block_table import NewBlocks

if TYPE_CHECKING:
    from runtime.api.media import Int32s

ON_DEVICE = -2  # placeholder of a draft token id that only the device has
NOT_FINITE = -1  # replaces a sampled id if the row's logits were NaN or infinite; other rows are unaffected


@dataclass(frozen=True, slots=True)
class RowBinding:
    """State of a sequence that has just been assigned a row, for the device tables.

    `num_computed`: tokens whose keys and values are already in its blocks; the row's first span starts there. `params`:
    sampling parameters without matchers. `masked`: the sequence has matchers, so each of its samples comes with a mask.
    `adapter_slot`: slot of its adapter on the device, or -1. `rope_delta`: offset between positions and rotary positions
    after the prompt, for rotary embeddings of three axes."""

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]  # the request's own list, not a copy
    output_ids: tuple[int, ...]
    num_computed: int = 0
    masked: bool = False
    adapter_slot: int = -1
    rope_delta: int = 0


class MediaSpan(NamedTuple):
    """Placeholders of one media item in a step. The outputs that an encoder stored under `key`, from number `first` on,
    replace the token embeddings at `positions` of a sequence, which are ascending."""

    key: bytes
    first: int
    positions: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class RowMedia:
    """Media of a row. `rope_positions` [3, num_tokens]: M-RoPE positions, or None. `prompt_len`: length of a prompt that
    starts in this step and whose tokens all attend to each other; otherwise 0. `crossed`: key of the encoder outputs whose
    keys and values cross-attention stores in this step, or None."""

    spans: tuple[MediaSpan, ...]
    rope_positions: Int32s | None = None
    prompt_len: int = 0
    crossed: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpan:
    """Tokens [start, start + len(token_ids)) of a prompt whose log-probabilities are requested, with the `count` most likely
    tokens of each. They come from the logits of tokens start - 1 and on, computed in the same step."""

    start: int
    token_ids: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampling of a row: at its last token, and also at the `num_drafts` tokens before it if the row ends with draft tokens.
    `masked`: the sampling must wait for the masks of the sequence's matchers."""

    num_drafts: int = 0
    masked: bool = False

    @property
    def num_ids(self) -> int:
        """Maximum number of token ids that the row can gain in the step."""
        return 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class Pool:
    """Pooling of the row's hidden states by `params`, which are fully resolved. `is_last` False: this is a chunk of a prompt
    whose pooling reads all tokens, and partial results are kept until its last chunk."""

    params: PoolingParams
    is_last: bool = True


Work = Sample | Pool | None  # None: a chunk of a prompt, which only fills the KV cache
SAMPLE, SAMPLE_MASKED = Sample(), Sample(masked=True)
_made = tuple.__new__


class ScheduledRow(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence in a step. A tuple, because a frozen dataclass takes four times as
    long to create.

    `number`: the sequence's number. `row`: its row in every device table. `start`: the greatest possible start while earlier
    draft tokens have not settled; the device has the exact one. `draft_ids`: draft tokens, or ON_DEVICE for draft tokens that
    the row's previous step made.

    The span consists of `token_ids` and `draft_ids`. If they are one token short, the id that the row sampled last, which is
    on the device, stands between them. `new_blocks`: blocks appended to its block tables. `binding`: set if the row has a
    new sequence. `num_proposed`: draft tokens to make after this step; blocks for them are reserved. `restart`: an explicit
    start, from which the device counts, or -1."""

    number: int
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    work: Work = None
    binding: RowBinding | None = None
    prompt_logprobs: PromptLogprobsSpan | None = None
    num_proposed: int = 0
    restart: int = -1
    media: RowMedia | None = None

    @property
    def guessed_on_device(self) -> bool:
        return bool(self.draft_ids) and self.draft_ids[0] == ON_DEVICE

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        return type(self.work) is Sample

    @property
    def masked(self) -> bool:
        return type(self.work) is Sample and self.work.masked

    def without_extra(self, end: int, work: Work) -> ScheduledRow:
        """Return the row without its draft tokens, which were dropped. The new row ends at token `end` and has `work`."""
        num_tokens = self.num_tokens - len(self.draft_ids)
        return self._replace(start=end - num_tokens, num_tokens=num_tokens, draft_ids=(), work=work)


def decode_row(
    number: int, row: int, start: int, token_ids: tuple[int, ...], new_blocks: tuple[NewBlocks, ...]
) -> ScheduledRow:
    """Return a row that computes and samples one token, with default values elsewhere. Three times as fast as the
    constructor."""
    return _made(ScheduledRow, (number, row, start, 1, token_ids, (), new_blocks, SAMPLE, None, None, 0, -1, None))


def columns(rows: Sequence[ScheduledRow]) -> Any:
    """Return a named tuple with one tuple of all rows' values for each field of ScheduledRow."""
    return ScheduledRow._make(zip(*rows, strict=True) if rows else ((),) * len(ScheduledRow._fields))


class BlockCopy(NamedTuple):
    """Copy of KV block `source` to block `target`, in all layers, before the first write of the step."""

    source: int
    target: int


class AdapterLoad(NamedTuple):
    """Load of adapter `key` into `slot` of the device before the step."""

    slot: int
    key: int


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """Encoding of the media `item` of a prompt of sequence `number`, in parallel with steps. Its output is stored under
    `key` for a later batch. A runner without an encoder rejects batches with encoder work."""

    number: int
    key: bytes
    item: MediaItem


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A scheduled step. `encoder_drops`: keys of encoder outputs to drop before `encoder_work`. `follows`: the draft model
    computes the step too; otherwise no draft tokens are made after it. `decodes_only`: True if each row is one sampled token
    without mask, draft tokens or binding; False means nothing. `number`: set and read by a feature that counts steps."""

    rows: tuple[ScheduledRow, ...]
    num_tokens: int
    num_preempted: int
    copies: tuple[BlockCopy, ...] = ()
    encoder_work: tuple[EncoderWork, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()
    encoder_drops: tuple[bytes, ...] = ()
    follows: bool = True
    decodes_only: bool = False
    number: int = 0

    @property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        if self.decodes_only:
            return self.rows
        return tuple([row for row in self.rows if type(row.work) is Sample])

    @property
    def masked_rows(self) -> tuple[ScheduledRow, ...]:
        if self.decodes_only:
            return ()
        return tuple([row for row in self.rows if type(row.work) is Sample and row.work.masked])

    @property
    def pooling_rows(self) -> tuple[ScheduledRow, ...]:
        """Rows that yield a pooled result. A prompt in several chunks yields it with its last chunk."""
        if self.decodes_only:
            return ()
        return tuple([row for row in self.rows if type(row.work) is Pool and row.work.is_last])

    @property
    def prompt_logprobs_rows(self) -> tuple[ScheduledRow, ...]:
        if self.decodes_only:
            return ()
        return tuple([row for row in self.rows if row.prompt_logprobs is not None])

    def split(self, late: Collection[int]) -> tuple[ScheduledBatch, ScheduledBatch]:
        """Return two batches: this step without sampling for the device rows `late`, and the sampling of the rows `late`
        alone."""
        rest = tuple(row._replace(work=None) if row.row in late else row for row in self.rows)
        sampling = tuple(row._replace(prompt_logprobs=None) for row in self.rows if row.row in late)
        return (
            replace(self, rows=rest, decodes_only=False),
            ScheduledBatch(sampling, 0, 0),
        )

    def sampled_by(self, rows: tuple[ScheduledRow, ...]) -> tuple[ScheduledRow, ...]:
        """Return `rows`, which may include more than this batch, with sampling only for the rows that this batch samples."""
        sampled = {row.row for row in self.sampling_rows}
        return tuple(row if row.row in sampled or not row.samples else row._replace(work=None) for row in rows)
