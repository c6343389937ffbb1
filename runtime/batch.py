"""ScheduledBatch: immutable plain data that describes one scheduled step: its rows, their token ranges, KV blocks and sampling.

A row contains the number of its sequence instead of the object, so a batch can be sent to another process."""

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
    """State of a sequence that has just been assigned a row. The runner writes it to the device tables.

    `num_computed`: number of tokens whose keys and values are already in the sequence's blocks; the first step starts there.
    `params`: sampling parameters without matchers. `masked`: the sequence has matchers, so each of its samples requires a mask.
    `adapter_slot`: slot of its adapter on the device, or -1. `rope_delta`: rotary position minus token position after the
    prompt, for rotary embeddings of three axes."""

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]  # the request's own list, not a copy
    output_ids: tuple[int, ...]
    num_computed: int = 0
    masked: bool = False
    adapter_slot: int = -1
    rope_delta: int = 0


class MediaSpan(NamedTuple):
    """Placeholder tokens of one media item in a step. `positions`: their ascending positions in the sequence. Their embeddings
    are replaced by encoder outputs: those stored under `key`, beginning with output number `first`."""

    key: bytes
    first: int
    positions: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class RowMedia:
    """Media of a row. `rope_positions` [3, num_tokens]: M-RoPE positions, or None. `prompt_len`: length of the prompt if it
    starts in this step and all its tokens attend to each other; otherwise 0. `crossed`: key of the encoder outputs whose keys
    and values this step stores for cross-attention, or None."""

    spans: tuple[MediaSpan, ...]
    rope_positions: Int32s | None = None
    prompt_len: int = 0
    crossed: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpan:
    """Prompt tokens [start, start + len(token_ids)) whose log-probabilities are requested. `count`: number of most likely
    alternatives to return for each. The logits for token i are those at token i - 1, computed in the same step."""

    start: int
    token_ids: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampling of a row: one token after its last token, and one after each of the `num_drafts` tokens before it. `num_drafts`:
    number of draft tokens at the row's end. `masked`: sampling must wait for the masks of the matchers."""

    num_drafts: int = 0
    masked: bool = False

    @property
    def num_ids(self) -> int:
        """Maximum number of token ids that the step can add to the row's sequence."""
        return 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class Pool:
    """Pooling of the row's hidden states. `params`: result of `ModelInfo.resolve`. `is_last` is False for an earlier chunk of a
    prompt whose pooling reads all tokens. Partial results are then kept until the last chunk."""

    params: PoolingParams
    is_last: bool = True


Work = Sample | Pool | None  # None: a chunk of a prompt, which only fills the KV cache
SAMPLE, SAMPLE_MASKED = Sample(), Sample(masked=True)
_made = tuple.__new__


class ScheduledRow(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence in a step. A tuple, because a frozen dataclass takes four times as long
    to create.

    `number`: the sequence's number. `row`: its row in every device table. `start`: the first token's position if all draft tokens
    in flight are accepted; the device computes the exact position. `draft_ids`: draft tokens, or ON_DEVICE if the row's previous
    step made them on the device.

    The row computes `token_ids`, then `draft_ids`. If both together have one token less than `num_tokens`, the token between
    them is the row's last sampled token, which is only on the device. `new_blocks`: blocks to append to the row's block tables.
    `binding`: set if the row has a new sequence. `num_proposed`: number of draft tokens to make after this step; blocks for
    them are reserved. `restart`: exact position at which the device must continue, or -1."""

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
        """Return the row without its draft tokens. The new row ends at token `end` and has `work` (a Sample, a Pool or None)."""
        num_tokens = self.num_tokens - len(self.draft_ids)
        return self._replace(start=end - num_tokens, num_tokens=num_tokens, draft_ids=(), work=work)


def decode_row(
    number: int, row: int, start: int, token_ids: tuple[int, ...], new_blocks: tuple[NewBlocks, ...]
) -> ScheduledRow:
    """Return a row that computes one token and samples the next; other fields have their defaults. Three times as fast as the
    constructor."""
    return _made(ScheduledRow, (number, row, start, 1, token_ids, (), new_blocks, SAMPLE, None, None, 0, -1, None))


def columns(rows: Sequence[ScheduledRow]) -> Any:
    """Return a ScheduledRow whose fields are tuples: each contains the values of all `rows` for that field."""
    return ScheduledRow._make(zip(*rows, strict=True) if rows else ((),) * len(ScheduledRow._fields))


class BlockCopy(NamedTuple):
    """Copy of KV block `source` to block `target` in all layers, made before the step writes to the KV cache."""

    source: int
    target: int


class AdapterLoad(NamedTuple):
    """Copy of adapter `key` from host memory to `slot` of the device, made before the step."""

    slot: int
    key: int


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """Request to encode the media `item` of sequence `number`, in parallel with steps. The output is stored under `key` for a
    later batch. A runner without an encoder rejects batches with encoder work."""

    number: int
    key: bytes
    item: MediaItem


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A scheduled step. `encoder_drops`: keys of encoder outputs to drop before `encoder_work`. `follows`: after the step, the
    draft model runs on the same tokens; otherwise no draft tokens are made. `decodes_only`: True if each row samples one token
    without mask, draft tokens or binding; False is always valid. `number`: step number, used by features that count steps."""

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
        """Rows that produce a pooled result. A prompt in several chunks produces one with its last chunk."""
        if self.decodes_only:
            return ()
        return tuple([row for row in self.rows if type(row.work) is Pool and row.work.is_last])

    @property
    def prompt_logprobs_rows(self) -> tuple[ScheduledRow, ...]:
        if self.decodes_only:
            return ()
        return tuple([row for row in self.rows if row.prompt_logprobs is not None])

    def split(self, late: Collection[int]) -> tuple[ScheduledBatch, ScheduledBatch]:
        """Return two batches: this step without sampling for the device rows in `late`, and a batch that only samples the
        device rows in `late`."""
        rest = tuple(row._replace(work=None) if row.row in late else row for row in self.rows)
        sampling = tuple(row._replace(prompt_logprobs=None) for row in self.rows if row.row in late)
        return (
            replace(self, rows=rest, decodes_only=False),
            ScheduledBatch(sampling, 0, 0),
        )

    def sampled_by(self, rows: tuple[ScheduledRow, ...]) -> tuple[ScheduledRow, ...]:
        """Return `rows` with `work` None for rows that this batch does not sample. `rows` may include rows of other batches."""
        sampled = {row.row for row in self.sampling_rows}
        return tuple(row if row.row in sampled or not row.samples else row._replace(work=None) for row in rows)
