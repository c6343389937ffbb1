"""Requests and their parameters, which `server` passes to `runtime`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtime.api.media import MediaItem

Bitmask = bytes | bytearray | memoryview


class TokenMatcher(Protocol):
    """Matcher of one sequence: restricts its next token depending on earlier tokens. Examples: a grammar, banned words.

    A matcher is used on any thread, but never by two at once. If it raises, only its sequence ends: a ConstraintError with the
    reason INVALID, any other exception with ERROR."""

    def allowed(self) -> Bitmask | None:
        """Return a bit mask of the allowed tokens, or None for all tokens. It consists of little-endian 32-bit words: bit t %
        32 of word t // 32 allows token t. Tokens beyond the last word are not allowed. If no bit is set, the sequence is
        complete and ends. The mask covers at most `ModelInfo.vocab_size` tokens."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by output token `token_id`, which `allowed` permits. Not called for prompt tokens."""
        ...

    def checkpoint(self) -> Callable[[], None]:
        """Save the matcher's state. Return a function that restores the state; it may be called once. This undoes the `accept`
        of draft tokens that were rejected."""
        ...


MatcherFactory = Callable[[], TokenMatcher]


class ConstraintError(Exception):
    """Error: a constraint, such as a grammar, cannot be satisfied. The message is for the client."""


@dataclass(frozen=True, slots=True)
class TranscriptRules:
    """Token rules of a speech model's output (Whisper, Radford et al. 2022). Log-probabilities are computed after the rules.

    `suppressed_ids` are never sampled, and `first_suppressed_ids` not as the first token. `timestamp_begin`: id of the first
    timestamp token; None if the output has no timestamps. All ids from there are timestamps. They start the text, come in pairs
    and never decrease. `text_end`: ids below it are text. `max_initial_timestamp`: highest timestamp that may be the first
    token, counted from `timestamp_begin`."""

    suppressed_ids: frozenset[int] = frozenset()
    first_suppressed_ids: frozenset[int] = frozenset()
    timestamp_begin: int | None = None
    text_end: int = 0
    max_initial_timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence. The server validates them; the engine does not.

    `max_tokens` 0 computes the prompt only. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 disable the filters.
    `logit_bias` maps token ids to additive biases. `logprobs` k requests log-probabilities of each output token and of the k
    most likely tokens, or of `logprob_token_ids`; `prompt_logprobs` requests them for the prompt. `seed` None uses a random
    seed. With a seed, the sample at output position p depends on (seed, p) only. `stop_token_ids`: the client's additional stop
    tokens. `matchers`: functions that create a matcher for the sequence, off the event loop; a token must satisfy all matchers.
    A matcher that allows only the end overrides `min_tokens`. `transcript`: rules for models with `ModelInfo.speech`; they
    disable draft tokens."""

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

    `task`: "embed" (one vector [D]), "token_embed" (one vector per token [T, D]), "classify" (one score per class [C]) or
    "token_classify" (scores per token [T, C]). `pooling`: "cls" (first token), "mean" or "last" (last token); None: the model's
    default in `PoolerInfo`. `use_activation`: normalise embeddings to length 1, or apply softmax or sigmoid to a head's output.
    `dimensions`: number of leading embedding values to keep, before normalising (Matryoshka). `label_token_ids`: for "classify"
    without a head, softmax over the logits of these tokens after the prompt. `token_type_ids`: token type of each prompt token;
    None: all 0.

    A causal model reuses cached prefixes unless `reads_all_tokens`."""

    task: PoolingTask = "embed"
    pooling: SequencePooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    label_token_ids: tuple[int, ...] = ()
    token_type_ids: Sequence[int] | None = field(default=None, repr=False)

    @property
    def reads_all_tokens(self) -> bool:
        """True if hidden states of tokens before the last are needed. The prompt must then not come from the prefix cache."""
        return self.task.startswith("token_") or self.pooling != "last"


CacheRoot = tuple[str | None, int]


def cache_root(cache_salt: str | None, adapter: Adapter | None) -> CacheRoot:
    """Return the root of the prefix cache's hash chain. Requests share KV blocks only if their roots are equal."""
    return cache_salt, 0 if adapter is None else adapter.key


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Result of `EngineClient.prepare` for a prompt, reusable for any number of requests.

    `token_ids` have been checked against the vocabulary. `block_hashes`: prefix-cache keys of the prompt's full blocks, which
    depend on `cache_root` and `media`."""

    token_ids: Sequence[int]
    cache_root: CacheRoot
    block_hashes: Sequence[bytes] = field(repr=False)
    media: tuple[MediaItem, ...] = field(default=(), repr=False)

    def extended(self, token_ids: Sequence[int]) -> PreparedPrompt:
        """Return a prepared prompt of `token_ids`, which must be this prompt followed by tokens that the same engine has
        generated. Nothing is checked or hashed again."""
        return PreparedPrompt(token_ids, self.cache_root, self.block_hashes, self.media)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of a LoRA adapter, as loaded under `name`.

    `key`: unique number of this version, also in the prefix cache; reloading under the same name creates another key. `path`:
    the adapter's folder. `base`: name of the base model, from the adapter's files. `max_rank`: largest rank of its matrices.
    `num_parameters`: total number of elements. `created`: time in seconds since the epoch."""

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

    `priority`: a lower number runs first; used by the priority policy only. `cache_salt`: requests share prefix-cache blocks only
    if their salts are equal. `caller`: opaque key of the client, for fair scheduling; None if callers are not distinguished.
    `deadline_s`: time at which the request is ended. `arrival_s`: time at which the request reached the server; queue time and
    TTFT count from it. Both are times of `time.monotonic()`.

    `prepared`: result of `EngineClient.prepare`, which the engine trusts. Without it, the prompt is prepared on the event loop
    at submission, in about 150 ns per token. `speculative`: allow draft tokens. `prediction`: expected output, used as draft
    tokens. Neither option changes the output. `parent_id`: id of the larger request to which this one belongs. `trace_headers`:
    W3C trace context. `adapter`: a LoRA adapter from `EngineClient.adapters`."""

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
        """Ids with which the request can be aborted: its own, its parent's, and the response's id. A choice of a response has
        the id "<response id>-<number>"."""
        return frozenset((self.id, self.id.rpartition("-")[0] or None, self.parent_id))

    @property
    def cache_root(self) -> CacheRoot:
        """Root of the prefix cache's hash chain: requests share KV blocks only if their roots are equal."""
        return cache_root(self.cache_salt, self.adapter)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the request. Raises TypeError if it is a pooling request."""
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"request {self.id} is pooled, not sampled")
        return self.params
