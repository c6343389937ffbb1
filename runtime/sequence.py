"""Sequence: mutable state of a Request: token ids, counts, and its row in the device tables. Only the Scheduler changes it.

Counts: `num_known_tokens` are the ids of the prompt and the output on the host. Steps in flight add at most `num_in_flight`
ids: one for each sample and one for each draft token. `num_computed_tokens` advances when a step is scheduled, as if all draft
tokens were accepted. `settle` corrects both counts. The number of tokens left to compute is `num_tokens - num_computed_tokens`,
for a prompt, a chunk, a decode or a resumed sequence. It is 0 only while a fully computed sequence waits for a late mask or for
its pooled vector."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, cast

from runtime.api import FinishReason, PoolingParams, Request, SamplingParams
from runtime.batch import SAMPLE, SAMPLE_MASKED, Pool, Sample
from runtime.kv.block_table import BlockTable
from runtime.kv.prefix_cache import BlockHash

if TYPE_CHECKING:
    from runtime.api.media import Int32s
    from runtime.feature import Claim

_NOTHING = SamplingParams(max_tokens=0, temperature=0.0)


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Forced(NamedTuple):
    """Forced output tokens. From output token number `start` on, only `ids` are allowed, in order."""

    start: int
    ids: tuple[int, ...]


class Sequence:
    __slots__ = (
        "block_hashes",
        "chunk_work",
        "claims",
        "ending_ids",
        "events",
        "finish",
        "first_scheduled_s",
        "first_token_s",
        "first_unfollowed",
        "forced",
        "group",
        "has_matchers",
        "has_new_blocks",
        "is_paused",
        "is_resumed",
        "last_step",
        "last_token_s",
        "last_turn",
        "learns",
        "max_tokens_total",
        "needs_bind",
        "next_prompt_logprob",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_in_flight",
        "num_known_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_proposed",
        "num_registered_blocks",
        "num_slots",
        "number",
        "output_ids",
        "prompt_ids",
        "request",
        "rewound_to",
        "rope_positions",
        "row",
        "sampling",
        "seed",
        "status",
        "tables",
        "takes_drafts",
        "work",
    )  # fmt: skip

    def __init__(
        self, request: Request, *, number: int, max_model_len: int, seed: int, group: int | None = None
    ) -> None:
        params = request.params
        self.request = request
        self.number = number  # order of arrival
        self.group = number if group is None else group  # number of the first sequence of the same call
        self.last_step = 0  # last step in which it decoded, for pipeline stages
        self.last_turn = 0  # last step, of those too small for all sequences, in which it decoded
        self.seed = seed
        self.sampling = _NOTHING if isinstance(params, PoolingParams) else params
        self.has_matchers = bool(self.sampling.matchers)
        self.takes_drafts = request.speculative
        # Work of the row that computes its last known token.
        self.work: Sample | Pool = SAMPLE_MASKED if self.has_matchers else SAMPLE
        self.chunk_work: Pool | None = None  # work of the rows before that one
        if isinstance(params, PoolingParams):
            self.work = Pool(params)
            self.chunk_work = Pool(params, is_last=False) if params.reads_all_tokens else None
        self.prompt_ids = request.prompt_ids  # not a copy: it is never modified
        self.output_ids: list[int] = []
        self.num_prompt_tokens = len(self.prompt_ids)
        max_tokens = self.sampling.max_tokens
        # A prompt that is only computed may fill the context. It ends with a sampled token, which is dropped.
        self.max_tokens_total = (
            min(self.num_prompt_tokens + max_tokens, max_model_len) if max_tokens else 1 + self.num_prompt_tokens
        )
        self.num_known_tokens = self.num_prompt_tokens  # prompt and output tokens; a counter, since it is read often
        self.num_computed_tokens = 0
        # First prompt token whose log-probability is requested and not yet scheduled.
        self.next_prompt_logprob = self.num_prompt_tokens if self.sampling.prompt_logprobs is None else 1
        self.num_in_flight = 0
        self.ending_ids: frozenset[int] = frozenset()  # the sequence ends once it samples one of these
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.is_resumed = False  # it had a row before, and is computed again
        self.num_draft_tokens = 0  # draft tokens that steps have verified, and accepted ones
        self.num_accepted_tokens = 0
        self.is_paused = False  # not scheduled until its steps in flight have settled
        self.rewound_to = -1  # where its next step restarts, after tokens that do not count; -1: no restart
        self.forced: Forced | None = None  # tokens that its matchers forced with their last masks
        self.num_proposed = 0  # draft tokens that the device makes after its last step
        self.first_unfollowed = -1  # first token that the drafter has not computed, while the sequence has a row
        self.status = SequenceStatus.WAITING
        self.finish: FinishReason | None = None
        self.row: int | None = None
        self.claims: tuple[Claim, ...] = ()  # claims of features on the sequence
        self.learns = False  # whether a claim must get every settled token
        self.rope_positions: Int32s | None = (
            None  # [3, num_prompt_tokens + 1], the next token's included, where an embedding of three axes has them elsewhere
        )
        self.tables: tuple[BlockTable, ...] = ()  # while it has a row: one for each group of layers
        self.num_slots = 0  # tokens that fit in all tables without another block
        self.has_new_blocks = False  # blocks that have not been sent to the device
        # Hashes of full blocks of known tokens, computed as needed.
        self.block_hashes = (
            [] if request.prepared is None else cast("list[BlockHash]", [*request.prepared.block_hashes])
        )
        self.num_registered_blocks = 0  # entries of the tables already offered to the prefix cache
        self.needs_bind = False  # the row is new: its next batch must contain its binding
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.events: list[tuple[str, float, int]] = []  # timeline of the sequence: see `RequestEvent`

    @property
    def token_ids(self) -> list[int]:
        """New list of all known token ids: the prompt's, then the output's."""
        return [*self.prompt_ids, *self.output_ids]

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known ids among tokens [start, end) of prompt and output."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return tuple(self.output_ids[start - num_prompt : end - num_prompt])
        if end <= num_prompt:
            return tuple(self.prompt_ids[start:end])
        return (*self.prompt_ids[start:], *self.output_ids[: end - num_prompt])

    @property
    def rope_delta(self) -> int:
        """Offset between rotary positions and sequence positions for tokens after the prompt."""
        positions = self.rope_positions
        return 0 if positions is None else int(positions[0, -1]) - self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens after all steps in flight: `num_known_tokens + num_in_flight`."""
        return self.num_known_tokens + self.num_in_flight

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of prompt tokens remain to be computed."""
        return self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def num_reusable(self) -> int:
        """Maximum number of leading tokens that may come from the prefix cache. Later tokens must be computed, because their
        logits or hidden states are needed."""
        if self.chunk_work is not None:
            return 0
        return self.next_prompt_logprob - 1 if self.scores_prompt else self.num_tokens - 1
