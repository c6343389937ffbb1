"""Sequence: the mutable life of a Request: its ids, its counts, its place in the device tables. Written by the Scheduler only.

Counts: the prompt's and the output's ids are known; steps that have not settled will bring `num_in_flight` more at most, whose
ids are still on the device: one for each time it samples, and one for each draft. `num_computed_tokens` advances when a step is
scheduled, as if all its drafts were right; `settle` corrects both. What is left to compute is always `num_tokens -
num_computed_tokens`: a fresh prompt, a chunk of it, one decode or a resumed sequence alike. Nothing is left only where all is
computed and the next token, whose mask is late, has not been sampled, or where a pooled vector is awaited."""

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


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Forced(NamedTuple):
    """Forced tokens: from the answer's token number `start` on, only `ids` are allowed."""

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
        self.group = number if group is None else group  # of those that were asked for at once: the first one's number
        self.last_step = 0  # in which it decoded, where a model has several stages
        self.last_turn = 0  # when it decoded last of the steps that had no room for all
        self.seed = seed
        self.sampling = _NOTHING if isinstance(params, PoolingParams) else params
        self.has_matchers = bool(self.sampling.matchers)
        self.takes_drafts = request.speculative
        # What the row that computes its last known token is for.
        self.work: Sample | Pool = SAMPLE_MASKED if self.has_matchers else SAMPLE
        self.chunk_work: Pool | None = None  # what the rows before that one are for
        if isinstance(params, PoolingParams):
            self.work = Pool(params)
            self.chunk_work = Pool(params, is_last=False) if params.reads_all_tokens else None
        self.prompt_ids = request.prompt_ids  # not a copy: nobody writes to it
        self.output_ids: list[int] = []
        self.num_prompt_tokens = len(self.prompt_ids)
        max_tokens = self.sampling.max_tokens
        # A prompt that is only computed may fill the context; it ends with the token it would be followed by, which is dropped.
        self.max_tokens_total = (
            min(self.num_prompt_tokens + max_tokens, max_model_len) if max_tokens else 1 + self.num_prompt_tokens
        )
        self.num_known_tokens = (
            self.num_prompt_tokens
        )  # with those of the output: counted, since it is asked for all the time
        self.num_computed_tokens = 0
        # The first token of the prompt whose log-probability is wanted and which no step has been asked for.
        self.next_prompt_logprob = self.num_prompt_tokens if self.sampling.prompt_logprobs is None else 1
        self.num_in_flight = 0
        self.ending_ids: frozenset[int] = frozenset()  # it has ended once it samples one of these
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.is_resumed = False  # it has had a row before, and is computed again
        self.num_draft_tokens = 0  # that steps have checked, and those that were right
        self.num_accepted_tokens = 0
        self.is_paused = False  # in no step until those under way have settled
        self.rewound_to = -1  # where its next step begins again, since a step computed tokens that do not count
        self.forced: Forced | None = None  # by its matchers, as their last masks told
        self.num_proposed = 0  # drafts that the device makes behind its last step
        self.first_unfollowed = (
            -1
        )  # the first of its tokens that what makes drafts has not computed, while it has a row
        self.status = Status.WAITING
        self.finish: FinishReason | None = None
        self.row: int | None = None
        self.claims: tuple[Claim, ...] = ()  # of the features that concern it
        self.learns = False  # whether one of them learns from every token
        self.rope_positions: Int32s | None = (
            None  # [3, num_prompt_tokens + 1], the next token's included, where an embedding of three axes has them elsewhere
        )
        self.tables: tuple[BlockTable, ...] = ()  # while it has a row: one for each group of layers
        self.num_slots = 0  # tokens that fit in all of these without another block
        self.has_new_blocks = False  # that the device has not been told of
        # Hashes of the full blocks of what is known, as far as they were needed.
        self.block_hashes = (
            [] if request.prepared is None else cast("list[BlockHash]", [*request.prepared.block_hashes])
        )
        self.num_registered_blocks = 0  # entries of the tables already offered to the prefix cache
        self.needs_bind = False  # the row is new: its next batch must carry everything about it
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.events: list[tuple[str, float, int]] = []  # its life: see `RequestEvent`

    @property
    def token_ids(self) -> list[int]:
        """All that are known, copied."""
        return [*self.prompt_ids, *self.output_ids]

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known ids among tokens [start, end)."""
        num_prompt = self.num_prompt_tokens
        if start >= num_prompt:
            return tuple(self.output_ids[start - num_prompt : end - num_prompt])
        if end <= num_prompt:
            return tuple(self.prompt_ids[start:end])
        return (*self.prompt_ids[start:], *self.output_ids[: end - num_prompt])

    @property
    def rope_delta(self) -> int:
        """Offset of the rotary positions of tokens behind the prompt from their positions in the sequence."""
        positions = self.rope_positions
        return 0 if positions is None else int(positions[0, -1]) - self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight: the maximum number once all steps have settled."""
        return self.num_known_tokens + self.num_in_flight

    @property
    def scores_prompt(self) -> bool:
        """True while log-probabilities of its prompt are to be computed."""
        return self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def num_reusable(self) -> int:
        """Tokens that may come out of a cache: those behind them must be computed, since their logits, or they, are wanted."""
        if self.chunk_work is not None:
            return 0
        return self.next_prompt_logprob - 1 if self.scores_prompt else self.num_tokens - 1
