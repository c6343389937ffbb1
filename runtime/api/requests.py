"""Requests: the input that `server` passes to `runtime`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtime.api.media import MediaItem

Bitmask = bytes | bytearray | memoryview


class TokenMatcher(Protocol):
    """Matcher of one sequence: restricts the next token depending on earlier tokens (a grammar, banned words, a budget).

    Used for one sequence, on any thread, never by two threads at once. An exception ends that sequence only: ConstraintError
    with INVALID, any other with ERROR."""

    def allowed(self) -> Bitmask | None:
        """Return the allowed tokens, or None for all. Little-endian 32-bit words, at most for `ModelInfo.vocab_size` tokens:
        bit t % 32 of word t // 32 allows token t; tokens beyond the last word are not allowed. No bit set: the sequence is
        complete and ends."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by `token_id`, a sampled token that `allowed` permits. Called for output tokens only, not for the prompt."""
        ...

    def checkpoint(self) -> Callable[[], None]:
        """Save the matcher's state. Return a function that restores it and may be called once. It undoes the acceptance of
        draft tokens that the sequence did not sample."""
        ...


MatcherFactory = Callable[[], TokenMatcher]


class ConstraintError(Exception):
    """Error: a constraint cannot be satisfied. The message is for the client."""


@dataclass(frozen=True, slots=True)
class TranscriptRules:
    """Token rules of a speech model's output (Whisper, Radford et al. 2022). Log-probabilities are computed after the rules.

    `suppressed_ids` are never sampled, `first_suppressed_ids` not as the first token. `timestamp_begin`: id of timestamp 0.
    All higher ids are timestamps: they start the text, come in pairs, and never decrease. None: the output has no
    timestamps. `text_end`: ids below it are text. `max_initial_timestamp`: number of the last timestamp that may be the
    first token."""

    suppressed_ids: frozenset[int] = frozenset()
    first_suppressed_ids: frozenset[int] = frozenset()
    timestamp_begin: int | None = None
    text_end: int = 0
    max_initial_timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence. The server validates them; the engine does not.

    `max_tokens` 0 computes the prompt only. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 disable the filters.
    `logit_bias` maps token ids to additive biases. `logprobs` k: log-probabilities of each token and of the k most likely
    tokens, or of `logprob_token_ids`; `prompt_logprobs` k: the same for the prompt. `seed` None uses a random seed; with a
    seed, the sample at output position p depends on (seed, p) only. `stop_token_ids` are the client's; the model's own are
    in `ModelInfo`. `matchers`: factories, called off the event loop, of a matcher per sequence; a token must satisfy all. A
    matcher that allows only the end overrides `min_tokens`. `transcript`: only for models with `ModelInfo.speech`; disables
    draft tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # only together with `logprobs`
    prompt_logprobs: int | None = None
    allowed_token_ids: frozenset[int] | None = None  # not empty; None allows all
    matchers: tuple[MatcherFactory, ...] = ()
    transcript: TranscriptRules | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]

SequencePooling = Literal["cls", "mean", "last"]


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of pooling a prompt's hidden states. No tokens are generated; the result is `Output.pooled`.

    `task`: "embed", one vector [D]; "token_embed", one for each token [T, D]; "classify", one number for each class [C];
    "token_classify", the same for each token [T, C]. None selects the model's default (`PoolerInfo`). `pooling`: the first
    token, the mean, or the last token. `use_activation`: normalise embeddings to length 1; apply softmax or sigmoid to a head's
    output. `dimensions`: keep the first ones, before normalising (Matryoshka). `label_token_ids`: for "classify" without a
    head, softmax over the logits of these tokens after the prompt. `token_type_ids`: one for each token, None for all 0.

    A causal model reuses cached prefixes unless `reads_all_tokens`."""

    task: PoolingTask = "embed"
    pooling: SequencePooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    label_token_ids: tuple[int, ...] = ()
    token_type_ids: Sequence[int] | None = field(default=None, repr=False)

    @property
    def reads_all_tokens(self) -> bool:
        """True if hidden states before the last token are needed, so the prompt must not come from the prefix cache."""
        return self.task.startswith("token_") or self.pooling != "last"


CacheRoot = tuple[str | None, int]


def cache_root(cache_salt: str | None, adapter: Adapter | None) -> CacheRoot:
    """Return the root of a prefix-cache chain. Requests share blocks only if their roots are equal."""
    return cache_salt, 0 if adapter is None else adapter.key


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Result of `EngineClient.prepare` for a prompt, reusable for any number of requests.

    `token_ids` were checked against the vocabulary. `block_hashes` name its full blocks in the prefix cache, for this
    `cache_root` and `media`."""

    token_ids: Sequence[int]
    cache_root: CacheRoot
    block_hashes: Sequence[bytes] = field(repr=False)
    media: tuple[MediaItem, ...] = field(default=(), repr=False)

    def extended(self, token_ids: Sequence[int]) -> PreparedPrompt:
        """Return the prepared prompt of `token_ids`, which extend this prompt by outputs of the same engine. Nothing is
        checked or hashed again."""
        return PreparedPrompt(token_ids, self.cache_root, self.block_hashes, self.media)


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA adapter.

    `key`: identifies this version, also in the prefix cache; reloading under the same name creates another key. `path`: its
    folder. `base`: the base model, by its author. `max_rank`: the largest rank of its matrices. `num_parameters`: their
    total size. `created`: seconds since the epoch."""

    name: str
    key: int
    path: str = ""
    base: str = ""
    max_rank: int = 0
    num_parameters: int = 0
    created: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, or one prompt to pool into a vector. `prompt_ids` must not be changed after construction.

    `priority`: lower runs first, under the priority policy only. `cache_salt`: requests share prefix-cache blocks only if their
    salts are equal. `caller`: opaque key of the client, for fair scheduling; None if callers are not distinguished.
    `deadline_s`: the request is ended at this time of `time.monotonic()`. `arrival_s`: when the request reached the server, by
    `time.monotonic()`; queue time and TTFT count from it.

    `prepared`: hashes of `prompt_ids` and `cache_salt`, which the engine trusts. A prompt without them is prepared on the
    event loop at submission, at about 150 ns a token. `speculative`: allow draft tokens, if the engine has a draft method.
    `prediction`: expected output, as a source of drafts. Neither changes the output. `parent_id`: caller's id of the larger
    request that contains this one. `trace_headers`: W3C trace context. `adapter`: a LoRA adapter from
    `EngineClient.adapters`."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival_s: float = field(default_factory=time.monotonic)
    prepared: PreparedPrompt | None = field(default=None, repr=False)
    is_probe: bool = False
    caller: bytes | None = field(default=None, repr=False)
    deadline_s: float | None = None
    speculative: bool = True
    prediction: Sequence[int] = field(default=(), repr=False)
    parent_id: str | None = None
    trace_headers: Sequence[tuple[str, str]] = field(default=(), repr=False)
    adapter: Adapter | None = None
    media: tuple[MediaItem, ...] = field(default=(), repr=False)

    @property
    def names(self) -> frozenset[str | None]:
        """Ids by which the request can be aborted: its own, its parent's, and for a choice "id-number" of a response, the
        response's id."""
        return frozenset((self.id, self.id.rpartition("-")[0] or None, self.parent_id))

    @property
    def cache_root(self) -> CacheRoot:
        """Start of the prefix-cache chain whose blocks the request may share."""
        return cache_root(self.cache_salt, self.adapter)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the request. Raises TypeError if it is a pooling request."""
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"request {self.id} is pooled, not sampled")
        return self.params
