"""What crosses the border between `server` and `runtime`: requests in, token ids and reasons out.

Standard library only, so the HTTP layer can be imported, typed and tested without torch. Nothing here knows text."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

from runtime.api.media import EMBEDS as EMBEDS
from runtime.api.media import MediaItem as MediaItem
from runtime.api.media import beside_pictures as beside_pictures
from runtime.api.media import check_media

# --- requests -----------------------------------------------------------------------------------------------------

Bitmask = bytes | bytearray | memoryview


class TokenMatcher(Protocol):
    """What one sequence may draw next, where that depends on what it has drawn: a grammar, forbidden words, a budget.

    Made for one sequence and used by nobody else; on any thread, but never in two calls at once. What a call raises ends that
    sequence and touches no other: ConstraintError with INVALID, anything else with ERROR."""

    def allowed(self) -> Bitmask | None:
        """None: anything. Otherwise little-endian 32-bit words, for `ModelInfo.vocab_size` tokens at most: bit t % 32 of word
        t // 32 says that token t may be drawn; tokens beyond the last word may not. Not one bit: the sequence is complete and
        ends here."""
        ...

    def accept(self, token_id: int) -> None:
        """The sequence has drawn `token_id`, one of `allowed`, and goes on; its prompt is never shown."""
        ...

    def checkpoint(self) -> Callable[[], None]:
        """Remember how far it is: called once, the result takes it back there from whatever it has accepted meanwhile. Guesses
        are shown to it in between, of which the sequence may draw others."""
        ...


MatcherFactory = Callable[[], TokenMatcher]


class ConstraintError(Exception):
    """What a sequence is to be held to cannot be kept: whoever asked for it is at fault, and may read why."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one sequence. Validated by the server at parse; the engine takes it at its word.

    max_tokens 0 computes the prompt and generates nothing. temperature 0 is greedy. top_k 0 and top_p 1.0 switch their
    filters off. `logit_bias` maps token id to an additive bias. `logprobs` k: with each token its log-probability and the k
    most likely ones, or those of `logprob_token_ids` where there are any; `prompt_logprobs` k: the same for the prompt's
    tokens, with the k most likely. `seed` None draws a fresh one per request; with a seed the draw for output position p
    depends on (seed, p) only.
    `stop_token_ids` are the client's; the model's own end-of-sequence ids come from `ModelInfo`.
    `matchers`: each makes a fresh matcher for a sequence, off the event loop; a token must please all of them. `min_tokens`
    gives way to a matcher that wants nothing but the end."""

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
    """What is made of a prompt's hidden states, and no tokens: `Output.pooled`.

    `task`: "embed", one vector [D]; "token_embed", one for each token [T, D]; "classify", one number for each class [C];
    "token_classify", the same for each token [T, C]. What is left None is as the model's own files say (`PoolerInfo`).
    `pooling`: which tokens an "embed" is of: the first, the mean of all, the last; a classifier reads what it was trained to.
    `use_activation`: embeddings are normalised to length 1; of what a head gives softmax or sigmoid is taken.
    `dimensions`: an embedding's first ones alone, taken before it is normalised (Matryoshka).
    `label_token_ids`: "classify" without a head: the classes are these tokens as what may follow the prompt, and the softmax is
    over them alone; a reranker that answers yes or no gives [P(no), P(yes)] for (no, yes).
    `token_type_ids`: one for each token of the prompt, for models that tell the texts of a pair apart by them; None: all 0.

    A pooled prompt shares steps, budget and fairness with all others; many in one `submit` are spread over steps. A causal
    model takes what is cached of it where only the last token is read (`reads_all_tokens`)."""

    task: PoolingTask = "embed"
    pooling: SequencePooling | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    label_token_ids: tuple[int, ...] = ()
    token_type_ids: Sequence[int] | None = field(default=None, repr=False)

    @property
    def reads_all_tokens(self) -> bool:
        """Whether hidden states before the last token are wanted, so that none of it may come out of a cache."""
        return self.task.startswith("token_") or self.pooling != "last"


@dataclass(frozen=True, slots=True)
class PoolerInfo:
    """What a model makes of pooled prompts where `PoolingParams` leave it open, and what they may ask of it.

    `embedding_size`: D, of "embed" and "token_embed". `matryoshka_dimensions`: those that the model was trained to be cut to, ()
    for any, None where its files say nothing. `labels`: the names of its head's classes, by index, none without a head, which
    one that classifies tokens has in place of one for whole texts: `labels_tokens`. `activation`: of what the head gives.
    `num_token_types`: 0 where there are none. `label_token_ids`: tokens by whose logits a model that generates was trained to judge
    a text, the last of which says yes."""

    embedding_size: int
    pooling: SequencePooling = "last"
    normalize: bool = True
    matryoshka_dimensions: tuple[int, ...] | None = None
    labels: tuple[str, ...] = ()
    labels_tokens: bool = False
    activation: Literal["softmax", "sigmoid", "none"] = "none"
    num_token_types: int = 0
    label_token_ids: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """Those that the model itself has; a causal one has "classify" by `label_token_ids` too."""
        head: tuple[PoolingTask, ...] = ("token_classify" if self.labels_tokens else "classify",) if self.labels else ()
        return ("embed", "token_embed", *head)


CacheRoot = tuple[str | None, int]


def cache_root(cache_salt: str | None, adapter: Adapter | None) -> CacheRoot:
    """What a prefix-cache chain begins with: only requests with the same share blocks."""
    return cache_salt, 0 if adapter is None else adapter.key


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """What an engine must know of a prompt beside its ids, made by `EngineClient.prepare`: that these very `token_ids` are tokens
    of its model, and `block_hashes`, what its prefix cache calls their full blocks for that tenant and with these very `media`, or
    the first of them. For any number of requests."""

    token_ids: Sequence[int]
    cache_root: CacheRoot
    block_hashes: Sequence[bytes] = field(repr=False)
    media: tuple[MediaItem, ...] = field(default=(), repr=False)

    def extended(self, token_ids: Sequence[int]) -> PreparedPrompt:
        """The prepared prompt for `token_ids`, which begin with these and go on with what the same engine gave: nothing is
        checked or hashed anew."""
        return PreparedPrompt(token_ids, self.cache_root, self.block_hashes, self.media)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `key`: of this version of it, by which blocks in the prefix cache are its own: what is loaded later under the
    same name has another. `path`: its folder; `base`: the model that its author says it was trained on; `max_rank`: of its
    matrices, which hold `num_parameters` numbers. `created`: seconds since the epoch."""

    name: str
    key: int
    path: str = ""
    base: str = ""
    max_rank: int = 0
    num_parameters: int = 0
    created: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, or a prompt to be made a vector of. `prompt_ids` is never written to by anyone after
    construction.

    `priority`: lower runs first (only under the priority policy). `cache_salt` keeps prefix-cache hits within its own tenants.
    `caller`: who asks, for whoever shares among callers; opaque, and None where nobody is told from others. At `deadline_s`, by
    `time.monotonic()`, it is ended if it has not ended before. `arrival_s` is
    `time.monotonic()` when the request reached the server: queue time and TTFT count from it. `prepared`: of `prompt_ids` and
    `cache_salt`; the engine takes it at its word. A prompt without it is prepared on the event loop when it is submitted, which
    takes some 150 ns a token. `speculative`: whether several tokens of it may be guessed and checked in one step, where the engine
    does that; `prediction`: what its answer may be like, for those guesses. Neither changes a token. `parent_id`: of
    what it is a part, as whoever asks knows it; `trace_headers`: of which trace, by the W3C's headers. `adapter`: beside the model,
    one that `EngineClient.adapters` has given."""

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
        """By which it may be aborted: its own; that of the answer of which it is a choice, `answer-number`; its parent's."""
        return frozenset((self.id, self.id.rpartition("-")[0] or None, self.parent_id))

    @property
    def cache_root(self) -> CacheRoot:
        """Whose blocks of the prefix cache it may share."""
        return cache_root(self.cache_salt, self.adapter)

    @property
    def sampling(self) -> SamplingParams:
        """The params of a request to generate. Raises TypeError for one that is pooled."""
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"request {self.id} is pooled, not sampled")
        return self.params


# --- answers ------------------------------------------------------------------------------------------------------


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence id or a stop token id; or the vector is there
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # the client left, or the server is shutting down
    TIMEOUT = "timeout"  # its deadline has passed, or it has waited too long; `Output.retry_after_s` says which
    ERROR = "error"  # the engine failed on it; `Output.error` says how
    INVALID = "invalid"  # its constraints cannot be kept; `Output.error` tells the client how


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model itself found a token, before temperature, penalties and filters; natural logarithms.

    `rank` counts from 1, the most likely. `top`: (id, log-probability) of the most likely tokens, as many as were asked for, or
    of those that were asked for by id, in that order."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Output:
    """What one request of a `TokenStream` produced since the last read. Complete when it is read, and nobody writes to it
    afterwards; not frozen, since one is made per token and a frozen dataclass takes four times as long to make.

    `index`: which request of the `submit` call. `token_ids` includes the token that ended it (EOS or stop token), unless the
    sequence is `complete`: a matcher had nothing to add, and the reason is STOP without a token that says so.
    `stop_token_id`: the id of `SamplingParams.stop_token_ids` that ended it, None for EOS and other reasons.
    `num_cached_tokens`: prompt tokens served by the prefix cache. `logprobs`: one for each of `token_ids`, None if not asked.
    `prompt_logprobs`: if asked, with the request's first Output, one for each token of the prompt but the first.
    `pooled`: for a request with PoolingParams, with its only Output: contiguous float32 numbers (format "f") of the shape that its
    task gives, which nobody writes to; `.tolist()` gives (nested) lists, `bytes(…)` what base64 is made of, `numpy.asarray(…)` an
    array without a copy. `retry_after_s`: for one that waited too long to start, when another try would probably fare better;
    for no other. `num_draft_tokens`: tokens of it that were guessed and checked so far; `num_accepted_tokens`: those of them that
    were right."""

    index: int
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    complete: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: memoryview | None = None
    retry_after_s: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class TokenStream(Protocol):
    """Outputs of the requests of one `submit`, in the order they settle.

    Use: `async with engine.submit([request]) as stream: async for outputs in stream: ...`. Every request ends with
    exactly one Output whose `finish` is set; the iteration ends after the last. A slow reader finds several tokens
    in one Output and slows nobody. Leaving the block aborts whatever is unfinished."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Sequence[Output]:
        """Wait for at least one Output, at most one per index."""
        ...

    def stop(self, index: int) -> None:
        """End one request now, as complete: a stop string was found. Its blocks are free at once; no further Output for it."""
        ...


Take = Callable[[Sequence[Output]], Callable[[], Awaitable[None]] | None]


class TokenWriter(Protocol):
    """Takes the ids of one request where a step brings nothing else of it, without an Output.

    Open until it cannot take any at once; who gave it ids then hands them over as an Output, and opens it again behind that."""

    is_open: bool

    @staticmethod
    def write_all(work: list[Any]) -> list[tuple[Any, Exception | None]]:
        """Each of `work` is a tuple: a writer of this kind, a list of ids, and whatever. Gives those that took none, and why."""
        ...


WriterOf = Callable[[int], TokenWriter | None]  # by a request's index


@runtime_checkable
class Pushing(Protocol):
    """A TokenStream that hands over what settles, in place of being iterated: a call for each step, and no task that wakes."""

    async def hand_to(self, take: Take, writer_of: WriterOf | None = None) -> None:
        """Call `take` with what an iteration would give; return behind the last. Where it cannot deal with it at once it gives what
        is to be awaited, and what comes meanwhile is kept. Raises what `take` raises. `writer_of` is asked behind the first Output
        of a request, and what its writer takes is not given to `take`."""
        ...


# --- errors -------------------------------------------------------------------------------------------------------
#
# EngineError
# ├── ContextTooLong     the prompt and one token do not fit: the client's doing
# ├── Busy               try again later
# │   ├── QueueFull
# │   └── CallerLimit    this caller has as much as he may
# ├── EngineStopped      draining, or dead
# ├── AdapterGone        it was unloaded between being found and being used
# ├── AdapterRefused     of `AdapterClient` alone: it cannot be served, for a reason its owner can act on
# ├── ProbeFailed        of `probe` alone: a token could not be computed
# ├── ProfileError       of the two about profiles: there is one already, or none, or it cannot be recorded
# └── SleepError         of `sleep` and `wake_up`: it cannot, or could not


class EngineError(Exception):
    """Raised by `submit`; nothing of the call was admitted."""


class ContextTooLong(EngineError):
    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; the context holds {limit}, those to be generated included"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class Busy(EngineError):
    """`reason`: which limit, as metrics have it. `retry_after_s`: when it would probably be taken."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class QueueFull(Busy):
    def __init__(self, waiting: int, limit: int, *, unit: str = "requests", retry_after_s: float = 1.0) -> None:
        reason = "max_num_queued_reqs" if unit == "requests" else "max_num_queued_tokens"
        super().__init__(f"{waiting} {unit} are waiting; the limit is {limit}", reason, retry_after_s)


class CallerLimit(Busy):
    pass


class EngineStopped(EngineError):
    pass


class AdapterGone(EngineError):
    pass


class AdapterRefused(EngineError):
    pass


class ProbeFailed(EngineError):
    pass


class ProfileError(EngineError):
    pass


class SleepError(EngineError):
    pass


# --- the engine as seen from above --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What the files of a model say of it, whether it is loaded or not, in ModelInfo's words. `max_model_len`: what it will be,
    unless memory allows less."""

    architecture: str
    max_model_len: int
    pooler: PoolerInfo
    generates: bool
    modalities: frozenset[str]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model that the server needs to check requests and to describe itself.

    `pooler`: what pooled requests get of it; any model can be pooled. `generates`: whether it has a head that samples tokens, which
    encoders have not: their requests all have PoolingParams, and their `max_model_len` is the longest text, special tokens
    included, that the model's own files let through."""

    architecture: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    num_parameters: int
    weights_bytes: int
    num_kv_blocks: int
    kv_block_size: int  # tokens
    kv_cache_bytes: int
    max_concurrency: float  # of max_model_len tokens, that the KV cache holds at a time
    prefix_caching: bool
    max_num_seqs: int
    pooler: PoolerInfo
    generates: bool = True
    kv_cache_note: str = ""  # what the KV cache is kept in, and what that gains, for people; empty where it is `dtype`
    speculative: str = ""  # how tokens are guessed, for people; empty where they are not
    reads_predictions: bool = False  # guesses are looked for in what a request predicts
    modalities: frozenset[str] = frozenset()  # "image", "audio", "video": what it takes beside text
    takes_embeds: bool = False  # prompts may be embeddings
    topology: str = ""  # how its devices are connected, for people; empty where there is nothing to tell

    def check(self, request: Request) -> None:
        """What `Engine.submit` checks of a request's params first, and takes a millisecond for nobody.

        Raises ValueError, whose message is for people, where this model cannot do what is asked."""
        params = request.params
        if request.media:
            takes = self.modalities | ({EMBEDS} if self.takes_embeds else set())
            check_media(request.media, takes, len(request.prompt_ids), self.architecture)
        if isinstance(params, PoolingParams):
            self.resolve(params, len(request.prompt_ids))
        elif not self.generates:
            raise ValueError(f"{self.architecture} generates no tokens; it can {', '.join(self.pooler.tasks)}")

    def resolve(self, params: PoolingParams, num_tokens: int) -> PoolingParams:
        """`params` with nothing left open, for a prompt of `num_tokens`; themselves where nothing was.

        Raises ValueError, whose message is for people, where this model cannot do what is asked."""
        pooler, task, pooling = self.pooler, params.task, params.pooling
        by_tokens = task == "classify" and bool(params.label_token_ids)
        if by_tokens and not self.generates:
            raise ValueError(f"label_token_ids: {self.architecture} generates no tokens")
        if not by_tokens:
            if params.label_token_ids:
                raise ValueError(f"label_token_ids are for the task classify, not {task}")
            if task not in pooler.tasks:
                raise ValueError(f"{self.architecture} cannot {task}; it can {', '.join(pooler.tasks)}")
        elif not 0 <= min(params.label_token_ids) <= max(params.label_token_ids) < self.vocab_size:
            raise ValueError(f"label_token_ids: token ids go from 0 to {self.vocab_size - 1}")
        embeds = task.endswith("embed")
        if pooling is not None and task != "embed":
            raise ValueError(f"pooling is for the task embed, not {task}")
        if params.dimensions is not None and not (embeds and 0 < params.dimensions <= pooler.embedding_size):
            raise ValueError(f"dimensions: embeddings have from 1 to {pooler.embedding_size}")
        types = params.token_type_ids
        if types is not None:
            if len(types) != num_tokens:
                raise ValueError(f"there are {len(types)} token_type_ids for {num_tokens} tokens")
            if types and not 0 <= min(types) <= max(types) < max(1, pooler.num_token_types):
                raise ValueError(f"token_type_ids go from 0 to {max(1, pooler.num_token_types) - 1}")
        pooling = "last" if by_tokens else pooling or pooler.pooling
        activates = params.use_activation
        if activates is None:
            activates = pooler.normalize if embeds else True
        if pooling == params.pooling and activates is params.use_activation:
            return params
        return replace(params, pooling=pooling, use_activation=activates)


class SleepLevel(IntEnum):
    """What an engine that sleeps has given back: its KV cache and its weights, which come again from the model's files. HOST leaves
    those in the host's memory, as far as the system has room for them; DROPPED does not."""

    AWAKE = 0
    HOST = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`ok` only while steps settle, in about the time that they usually take. `reason` says what is wrong, for people. `hopeless`:
    and nothing suggests that it will be right again. `failing`: step after step failed, and only one that settles can tell that it
    is over; `EngineClient.probe` is one. `sleep_level`: the next request wakes it."""

    ok: bool
    reason: str | None
    num_running: int
    num_waiting: int
    hopeless: bool = False
    failing: bool = False
    sleep_level: SleepLevel = SleepLevel.AWAKE

    @classmethod
    def of_all(cls, found: Sequence[EngineHealth]) -> EngineHealth:
        """Of several engines: the one that is least well has the say, what runs and waits is counted together, and they sleep once
        all do."""
        worst = min(found, key=lambda each: (each.ok, not each.hopeless))
        return replace(
            worst,
            num_running=sum(each.num_running for each in found),
            num_waiting=sum(each.num_waiting for each in found),
            failing=any(each.failing for each in found),
            sleep_level=min(each.sleep_level for each in found),
        )


@dataclass(frozen=True, slots=True)
class HistogramData:
    """`bounds` ascending upper bounds; `counts` has one more entry (the +Inf bucket), not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family without prefix, unit suffix included, `_total` left out: `samples` maps label pairs to values."""

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"]
    samples: Mapping[tuple[tuple[str, str], ...], float | HistogramData]


class StepRecord(NamedTuple):
    """A step that has settled. `number`: counted from 1. `num_prompt_tokens`: of chunks; `num_decodes`: rows that only decode.
    `was_captured`: it was replayed as a graph. `idle_s`: the device's pause before it, None where nobody knows."""

    number: int
    launched_s: float
    settled_s: float
    num_prompt_tokens: int
    num_decodes: int
    num_preempted: int
    was_captured: bool
    idle_s: float | None


class RequestEvent(NamedTuple):
    """`kind`: "chunk" of its prompt, launched; "preempted"; "resumed"; "deferred", since its mask was late."""

    kind: str
    at_s: float
    num_tokens: int


class RequestRecord(NamedTuple):
    """The life of a sequence. `number`: of those that have ended and were read, from 1; 0 of one that has not. Times: the monotonic
    clock's. `delivered_s`: when its reader was done with all of it; `held_s`: how long what had settled waited for a reader that
    was busy with what came before (its text, its socket), in all; of requests that were submitted together the same."""

    number: int
    id: str
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish: FinishReason | None
    events: tuple[RequestEvent, ...]
    delivered_s: float | None = None
    held_s: float = 0.0


class Finished(NamedTuple):
    """A request that has ended, and all that it generated."""

    request: Request
    record: RequestRecord
    output_ids: Sequence[int]


class KVMap(NamedTuple):
    """The KV blocks in the order of their ids. `cells`: for each `blocks_per_cell` of them three bytes: how many of 255 parts are
    used by one sequence, shared by several, and free but cached; the rest is blank."""

    num_blocks: int
    blocks_per_cell: int
    num_reserved: int  # free blocks that running sequences have been promised
    cells: bytes


class Activity(NamedTuple):
    """What an engine does and did lately. `num_steps` and `num_requests`: the numbers of the last of all. `live`: requests that
    have not ended, or whose readers are behind."""

    now_s: float
    num_steps: int
    num_requests: int
    steps: Sequence[StepRecord]
    requests: Sequence[RequestRecord]
    live: Sequence[RequestRecord]
    kv: KVMap


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One moment of start-up: phase such as "download", "weights", "warmup"; `done` of `total` in `unit` ("B", "tensors")."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""


class AdapterClient(Protocol):
    """The adapters that requests may name. On the event loop; files are read on threads."""

    def all(self) -> Sequence[Adapter]:
        """In the order in which their names came."""
        ...

    def find(self, name: str) -> Adapter | None: ...

    async def load(self, name: str, path: str) -> Adapter:
        """Read an adapter and give it this name. One that has the name already has lost it when this returns: who runs with it goes
        on with it.

        Raises AdapterRefused, and nothing has changed."""
        ...

    async def unload(self, name: str) -> bool:
        """Take the name away and wait for the last request that has the adapter. False where there is no such name."""
        ...


class EngineClient(Protocol):
    """The engine as handlers see it. All calls but `prepare` happen on the event loop that owns it; none of them blocks."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """The engines that requests are shared out to; itself alone where there is one."""
        ...

    @property
    def adapters(self) -> AdapterClient | None:
        """None where none are served."""
        ...

    def prepare(
        self, prompt_ids: Sequence[int], cache_salt: str | None = None, adapter: Adapter | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> PreparedPrompt:  # fmt: skip
        """The part of `submit` that grows with a prompt, for `Request.prepared`. May be called on any thread, and should be on
        another than the loop's where the prompt is long.

        Raises ValueError for ids that are no tokens of the model."""
        ...

    def submit(self, requests: Sequence[Request], *, continues: bool = False) -> TokenStream:
        """Admit all of them or none. `continues`: they are the next part of what was admitted before, so they are not refused for
        a full queue.

        Raises ContextTooLong, Busy or EngineStopped."""
        ...

    def check_room(self, caller: bytes | None) -> None:
        """Raise Busy where `submit` would take nothing of `caller` now, whatever it were: so that nobody sends it in vain."""
        ...

    def health(self) -> EngineHealth: ...

    def metrics(self) -> Sequence[Metric]: ...

    def activity(self, *, after_step: int = 0, after_request: int = 0, num_cells: int = 1024) -> Activity:
        """The steps and requests behind those numbers, as far as they are remembered; `num_cells`: of the map, at most."""
        ...

    def when_finished(self, call: Callable[[Finished], None]) -> None:
        """`call` is made for each request that ends from now on, probes excepted."""
        ...

    def abort(self, ids: Collection[str] | None = None) -> int:
        """End requests that have one of these names, or all, with ABORT, which their readers get; how many there were."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what prompts have left for others to share. Who is running goes on, and leaves its own from now on."""
        ...

    async def sleep(self, level: SleepLevel = SleepLevel.HOST) -> None:
        """Give memory back once nothing is left to do, and return then. The next request wakes it.

        Raises SleepError."""
        ...

    async def wake_up(self) -> None:
        """Return when it does not sleep any more. Raises SleepError where its model cannot be loaded again."""
        ...

    async def start_profile(self, path: Path, *, delay_steps: int = 0, num_steps: int | None = None) -> None:
        """Record what is computed, and what the event loop does, into a trace of Chrome's format, gzipped: from now, or when
        `delay_steps` have settled, until `num_steps` more have or `stop_profile` is called. Returns when it has begun, unless it is
        delayed.

        Raises ProfileError."""
        ...

    async def stop_profile(self) -> Path:
        """Return when the profile was written: the one that is recorded, which ends, or that has ended by itself.

        Raises ProfileError."""
        ...

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, wait for the admitted ones, abort what is left after `timeout_s`; how many were aborted."""
        ...

    async def probe(self) -> None:
        """Return when a step has settled from now on: others', where there is work, else one of a single token of its own.

        Raises ProbeFailed or EngineStopped. As slow as the device is: the caller sets a limit."""
        ...

    async def death(self) -> str:
        """Return when the engine can never serve again, and say why. All its requests have been told then."""
        ...

    async def close(self, limit_s: float = ...) -> bool:
        """Abort what is left and end, within about `limit_s`. False where something did not let go: a step that hangs."""
        ...
