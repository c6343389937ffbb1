"""LLM: the engine for a program in the same process, `from server import LLM, SamplingParams`.

What a prompt may ask, and what it is answered, is what /v1/completions and /v1/chat/completions have: the same wire types
check it, the same Generation produces it; only HTTP is left out. The engine and its event loop live on one background
thread that the LLM owns. So the sync methods work in scripts and in notebooks, where a loop is running already, and
`agenerate` and `achat` bring what settles over to the caller's own loop. However many prompts are given, a bounded number
of sequences is with the engine at a time: its rows, and some ahead."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import inspect
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from runtime.api import EngineError, Output, PoolingTask, SleepLevel, TokenLogprobs
from server.config.option import did_you_mean
from server.config.options import ConfigError
from server.config.parse import from_keywords
from server.config.server_config import ServerConfig
from server.context.arrival import Arrival
from server.context.offload import Offload
from server.generate.generation import EngineFailed, Generation, PromptChoice
from server.generate.request import Chat, GenerateRequest
from server.generate.start import start
from server.generate.transcript import Call, Transcript
from server.loaded.lifecycle import Lifecycle
from server.loaded.model import LoadedModel
from server.loaded.tokenizer import Tokenizer
from server.offline.beams import BeamSearchOutput, BeamSearchParams, beams_of
from server.offline.loop_thread import LoopThread
from server.offline.pooling import (
    ClassificationRequestOutput,
    Compare,
    EmbeddingRequestOutput,
    Pooler,
    PoolingParams,
    PoolingRequestOutput,
    RerankOutput,
    ScoringRequestOutput,
    ask_to_pool,
    ask_to_rerank,
    ask_to_score,
    classification_output,
    embedding_output,
    pooling_output,
    scoring_output,
)
from server.offline.progress import Progress
from server.offline.prompts import Prompt, plain, several
from server.offline.refusals import as_value_error, decoded
from server.offline.tokenizer import as_transformers
from server.openai import requests, wire
from server.pooling.answers import ranked
from server.pooling.run import Pooled
from server.process.load import load
from server.process.terminal import StartupDisplay
from server.routes.service import Service
from server.text.events import Malformed, Reasoning, Text
from server.wire.errors import ApiError, UnsupportedParameter

T = TypeVar("T")

Conversation = Sequence[Mapping[str, Any]]

# The wire's fields that say how tokens are chosen and where text ends: the others are about HTTP, or change an answer's form.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias", "n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "add_special_tokens", "allowed_token_ids", "truncate_prompt_tokens", "truncation_side", "priority",
    "cache_salt", "logprobs", "prompt_logprobs", "logprob_token_ids", "best_of", "use_beam_search", "length_penalty",
    "early_stopping", "bad_words", "response_format", "structured_outputs", "speculative",
)  # fmt: skip
# Those that say what a prompt is made of beside messages, and what may be in an answer.
CHAT_FIELDS = (
    "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "documents", "reasoning_effort", "include_reasoning", "thinking_token_budget", "prediction",
)  # fmt: skip
UNBOUNDED = 2**31 - 1  # the queue's limit: `_Window` is what bounds it here


# --- asked --------------------------------------------------------------------------------------------------------


class SamplingParams:
    """How to choose tokens and where to stop: the fields of the HTTP API, by the same names, with the same limits.

    What is not given is as the model's authors advise; `max_tokens` is then 16 for `generate` and the rest of the context
    for `chat`. Raises ValueError naming the field."""

    __slots__ = ("fields",)
    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in SAMPLING_FIELDS]
    )

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            if name not in SAMPLING_FIELDS:
                raise ValueError(f"SamplingParams has no field {name!r}{did_you_mean(name, SAMPLING_FIELDS)}")
            _check_finite(name, value)
        self.fields: Mapping[str, Any] = {name: value for name, value in fields.items() if value is not None}
        decoded(wire.COMPLETION, {"prompt": "", **self.fields})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingParams) and self.fields == other.fields

    __hash__ = None  # type: ignore[assignment]  # logit_bias is a dict

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in CHAT_FIELDS:
            raise ValueError(f"chat has no option {name!r}{did_you_mean(name, CHAT_FIELDS)}")


def _check_finite(name: str, value: Any) -> None:
    """JSON, in which the rules are written, has no word for these."""
    for number in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(number, float) and not abs(number) < float("inf"):
            raise ValueError(f"Invalid {name!r}: {number} is not a finite number")


@contextlib.contextmanager
def _naming(param: str, number: int, total: int) -> Iterator[None]:
    """A complaint inside the block tells which of `total` prompts it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{param} {number}: {error}" if total > 1 else str(error)) from None


@dataclass(frozen=True, slots=True)
class _Ask:
    """One prompt or conversation, checked. `text`: the prompt as given, where it was text."""

    request: GenerateRequest
    text: str | None

    @property
    def param(self) -> str:
        return self.request.prompt_field


def _ask_completion(prompt: Prompt, params: SamplingParams) -> _Ask:
    found = plain(prompt)
    salt = {} if found.cache_salt is None else {"cache_salt": found.cache_salt}
    request = requests.of_completion(decoded(wire.COMPLETION, {"prompt": found.given, **params.fields, **salt}))
    return _Ask(request, found.text)


def _ask_chat(messages: Conversation, params: SamplingParams, options: Mapping[str, Any]) -> _Ask:
    body = {"messages": list(messages), **{name: value for name, value in options.items() if value is not None}}
    fields = dict(params.fields)
    if "logprobs" in fields:  # a chat has its own names for it
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    given = decoded(wire.CHAT, {**body, **fields})
    try:
        return _Ask(requests.of_chat(given), None)
    except ApiError as error:
        raise as_value_error(error) from None


def _conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    conversations: list[Any] = list(given)
    return [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise ValueError(f"sampling_params: {len(params)} for {num} prompts; give one for all or one for each")
    return list(params)


# --- answered -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logprob:
    """`rank` counts from 1, the most likely; None for tokens that were asked for by id."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of n answers. `token_ids` holds the token that ended it, `text` does not. `finish_reason` "stop", "length" or
    "tool_calls", None while it goes on; `stop_reason`: the stop string or id of `stop_token_ids` that ended it. `logprobs`, if
    asked: for each of `token_ids` itself and its alternatives, by id; `cumulative_logprob`: the sum of their own.

    Of a chat, `text` is the answer alone: `reasoning` what the model thought before, `tool_calls` the calls it wants made,
    which come all together once it has ended."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    def add(self, more: CompletionOutput) -> None:
        if more.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *more.logprobs]
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (more.cumulative_logprob or 0.0)
        self.text += more.text
        self.reasoning += more.reasoning
        self.tool_calls += more.tool_calls
        self.token_ids += more.token_ids
        self.finish_reason, self.stop_reason = more.finish_reason, more.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt: `outputs` by index, n of them. From `agenerate` and `achat` an increment: only the choices
    that moved, with the text and ids that are new. `prompt` is None for a prompt of ids, and for a conversation the text
    its template made. `finished`: nothing follows. `num_cached_tokens`: of the prompt, found in the prefix cache.
    `prompt_logprobs`, if asked, when finished: as an answer's, for each token of the prompt; None for the first. Answers that
    compete (`best_of`) come when all are complete."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def _increment(generation: Generation, output: Output, transcript: Transcript) -> CompletionOutput:
    """The choice's part in `output`. `transcript`: of the choice so far; grows."""
    choice = generation.choices[output.index]
    before = choice.num_tokens
    events = choice.events(output)
    transcript.add(events)
    # Ids behind a stop string came from the engine, and belong to nobody.
    ids = list(output.token_ids[: choice.num_tokens - before])
    more = CompletionOutput(
        output.index,
        "".join(event.text for event in events if isinstance(event, Text | Malformed)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        transcript.calls if choice.finish_reason is not None else [],
        ids,
        choice.finish_reason,
        choice.stop_reason,
    )
    if generation.options.logprobs is not None:
        found = list(zip(ids, output.logprobs or (), strict=False))
        by_id = bool(generation.requests[output.index].sampling.logprob_token_ids)
        more.logprobs = [_shown(generation.tokenizer, id, entry, ranked=not by_id) for id, entry in found]
        more.cumulative_logprob = sum(entry.logprob for _, entry in found)
    return more


def _shown(tokenizer: Tokenizer, id: int, found: TokenLogprobs, *, ranked: bool = True) -> dict[int, Logprob]:
    def text(id: int) -> str:
        return tokenizer.token_bytes(id).decode(errors="replace")

    shown = {id: Logprob(found.logprob, found.rank, text(id))}
    for rank, (other, logprob) in enumerate(found.top, start=1):
        shown.setdefault(other, Logprob(logprob, rank if ranked else None, text(other)))
    return shown


def _prompt_logprobs(generation: Generation) -> list[dict[int, Logprob] | None] | None:
    first = generation.choices[0]
    if generation.options.prompt_logprobs is None or not isinstance(first, PromptChoice):
        return None
    return [None if found is None else _shown(generation.tokenizer, id, found) for id, found in first.prompt_logprobs]


def _best(generation: Generation, wholes: Sequence[CompletionOutput]) -> list[CompletionOutput]:
    return [dataclasses.replace(wholes[index], index=place) for place, index in enumerate(generation.best)]


# --- the engine's side, on the background loop --------------------------------------------------------------------


class _Window:
    """At most `limit` sequences are with the engine; a request that wants more than all of them goes alone. In order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = asyncio.Semaphore(limit)
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def room_for(self, num_sequences: int) -> AsyncIterator[None]:
        taken = 0
        try:
            async with self._turn:
                while taken < min(num_sequences, self.limit):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


class _Core:
    """What serves. Everything here happens on the background loop."""

    def __init__(self, config: ServerConfig, loaded: LoadedModel) -> None:
        lifecycle = Lifecycle()
        lifecycle.ready(loaded)
        self._service = Service(config, lifecycle, Offload(max_waiting=sys.maxsize))
        self._loaded = loaded
        self.pooler = Pooler(self._service, loaded)
        rows = loaded.engine.model.max_num_seqs
        self._window = _Window(rows + max(4, rows // 4))

    @classmethod
    async def load(cls, config: ServerConfig, cancel: threading.Event) -> _Core:
        display = StartupDisplay(sys.stderr)
        try:
            return cls(config, await load(config, display.report, cancel))
        finally:
            display.finish()

    async def increments(self, ask: _Ask) -> AsyncGenerator[RequestOutput, None]:
        """Raises ValueError where the request does not fit the model, RuntimeError where the engine fails or is closed."""
        id = uuid.uuid4().hex
        async with self._window.room_for(ask.request.num_candidates):
            try:
                generation, ignored = await start(
                    self._service.config,
                    self._service.offload,
                    self._loaded,
                    ask.request,
                    id=id,
                    arrival=Arrival(time.monotonic()),
                )
                if ignored:
                    raise UnsupportedParameter(ignored[0])
                opened = generation.open()
            except ApiError as error:
                raise as_value_error(error) from None
            except EngineError as error:
                raise RuntimeError(f"the engine takes no requests: {error}") from None
            text = ask.text
            if isinstance(ask.request.prompt, Chat):
                text = self._loaded.tokenizer.decode(generation.requests[0].prompt_ids, skip_special_tokens=False)
            transcripts = [Transcript() for _ in generation.choices]
            ids = list(generation.requests[0].prompt_ids)  # cut, if so asked
            competing = [CompletionOutput(index) for index in range(len(generation.choices))]
            try:
                async with opened as stream:
                    async for outputs in stream:
                        moved = [_increment(generation, output, transcripts[output.index]) for output in outputs]
                        finished = all(choice.finish_reason is not None for choice in generation.choices)
                        if generation.aborted:
                            raise RuntimeError("the LLM was closed before the answer was complete")
                        if generation.competes:
                            for more in moved:
                                competing[more.index].add(more)
                            if not finished:
                                continue
                            moved = _best(generation, competing)
                        prompt_logprobs = _prompt_logprobs(generation) if finished else None
                        yield RequestOutput(
                            id, text, ids, moved, finished, generation.num_cached_tokens, prompt_logprobs
                        )
            except ApiError as error:
                raise as_value_error(error) from None
            except EngineFailed as error:
                raise RuntimeError(f"the engine failed on this request: {error}") from None
            except EngineError as error:
                raise RuntimeError(f"the LLM was closed before the answer was complete: {error}") from None

    async def answers(self, asks: Sequence[_Ask], progress: Progress) -> list[RequestOutput]:
        """In the order of `asks`; the first that fails ends the others."""
        found: list[RequestOutput | None] = [None] * len(asks)
        todo = iter(enumerate(asks))

        async def work() -> None:
            for number, ask in todo:
                with _naming(ask.param, number, len(asks)):
                    answer = found[number] = await self._whole(ask)
                progress.done(sum(len(output.token_ids) for output in answer.outputs))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(asks), self._window.limit)):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer for answer in found if answer is not None]

    async def _whole(self, ask: _Ask) -> RequestOutput:
        outputs = [CompletionOutput(index) for index in range(ask.request.n)]
        async with contextlib.aclosing(self.increments(ask)) as increments:
            async for increment in increments:
                for output in increment.outputs:
                    outputs[output.index].add(output)
        return dataclasses.replace(increment, outputs=outputs)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    async def reset_prefix_cache(self) -> bool:
        self._loaded.engine.reset_prefix_cache()
        return True

    async def sleep(self, level: int) -> None:
        await self._loaded.engine.sleep(SleepLevel(level))

    async def wake_up(self) -> None:
        await self._loaded.engine.wake_up()

    async def close(self) -> None:
        self._service.offload.close()
        await self._loaded.engine.close()


# --- for users ----------------------------------------------------------------------------------------------------


class LLM:
    """`LLM("Qwen/Qwen3-0.6B", max_model_len=4096)`: loads, and is ready when it returns. `model` as `--model` has it;
    `options` are the options of `python -m server` for model and engine, with underscores.

    Every method may be called from any thread. `with LLM() as llm:`, `close()` or dropping the last reference frees the
    memory; a program that ends without ends all the same, quietly. Ctrl-C takes back what was asked and leaves the LLM usable.

    Raises ValueError for an option it does not know or that cannot be honoured, LoadError where the model cannot be served."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        path = None if model is None else os.fspath(model)
        try:
            config = from_keywords({**options, "model": path})
        except ConfigError as error:
            raise ValueError(str(error)) from None
        self._load(config)

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """With options that were read from a command line. Raises LoadError."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: ServerConfig) -> None:
        cancel = threading.Event()
        background = LoopThread("oneloop-llm")
        try:
            self._core: _Core | None = background.run(
                _Core.load(dataclasses.replace(config, max_queue=UNBOUNDED), cancel)
            )
        except BaseException:
            cancel.set()
            background.close()
            raise
        self._background = background
        self._close = weakref.finalize(self, _close, background, self._core)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt: text, token ids, or vLLM's dict of either (`prompt`, `prompt_token_ids`). The answers are in the
        prompts' order.

        Raises ValueError, naming the prompt and the field, and then nothing is answered."""
        given = several(prompts)
        params = _one_each(sampling_params, len(given))
        asks = []
        for number, each in enumerate(zip(given, params, strict=True)):
            with _naming("prompt", number, len(given)):
                asks.append(_ask_completion(*each))
        return self._all(asks, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several: lists of {"role": …, "content": …}. `options`: CHAT_FIELDS, as the HTTP API has
        them (`tools` …). Otherwise as `generate`."""
        given = _conversations(messages)
        params = _one_each(sampling_params, len(given))
        _check_options(options)
        asks = []
        for number, each in enumerate(zip(given, params, strict=True)):
            with _naming("messages", number, len(given)):
                asks.append(_ask_chat(*each, options))
        return self._all(asks, use_tqdm)

    def agenerate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Increments of the answer to one prompt, as they settle, on the caller's running loop. For several prompts,
        several calls: they run together. Leaving the iteration takes the request back; where that has to happen at once,
        leave through `contextlib.aclosing`.

        Raises ValueError: for what is wrong in itself here, for what does not fit the model at the first step."""
        return self._iterate(_ask_completion(prompt, sampling_params or SamplingParams()))

    def achat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Increments of the answer to one conversation. See `agenerate`."""
        _check_options(options)
        return self._iterate(_ask_chat(messages, sampling_params or SamplingParams(), options))

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` most likely continuations of each prompt, best first, as vLLM's `beam_search`.

        Raises ValueError as `generate`."""
        answers = self.generate(prompts, SamplingParams(**params.fields), use_tqdm)
        decode = self._open_core().tokenizer.decode
        return [beams_of(answer, lambda ids: decode(ids, skip_special_tokens=True)) for answer in answers]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers' PreTrainedTokenizerFast, with its chat template; each call makes one."""
        return as_transformers(self._open_core().tokenizer)

    def reset_prefix_cache(self) -> bool:
        """Forget the prompts whose keys and values are kept for others that begin alike. True: it is done."""
        return self._background.run(self._open_core().reset_prefix_cache())

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back, once nothing is left to do; the next prompts, or `wake_up`, load them
        again. Level 1 leaves the weights' files in the system's memory, as far as it has room, 2 does not.

        Raises ValueError for another level."""
        self._background.run(self._open_core().sleep(level))

    def wake_up(self) -> None:
        """Load what `sleep` gave back. Raises SleepError where that cannot be done any more."""
        self._background.run(self._open_core().wake_up())

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in order. Raises ValueError as `generate`, and where the model is not served to embed."""
        return [embedding_output(each) for each in self._pool(prompts, pooling_params, "embed", use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each class is, of each prompt. Raises ValueError as `embed`."""
        return [classification_output(each) for each in self._pool(prompts, pooling_params, "classify", use_tqdm)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput]:
        """What the model pools each prompt to: arrays. `pooling_task` None: what it is served for. Raises ValueError as `embed`."""
        return [pooling_output(each) for each in self._pool(prompts, pooling_params, pooling_task, use_tqdm)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: as many of each, or one of the first with all of the second. Raises ValueError as `embed`."""
        num, compare = ask_to_score(data_1, data_2, pooling_params)
        scores, sides = self._compare(num, compare, use_tqdm)
        return [scoring_output(score, pair) for score, pair in zip(scores, sides, strict=True)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[RerankOutput]:
        """The documents, best first. Raises ValueError as `embed`."""
        scores, _ = self._compare(len(documents), ask_to_rerank(query, documents, pooling_params), use_tqdm)
        found = ranked(scores, lambda index: {"text": documents[index]}, top_n)
        return [RerankOutput(each["index"], each["document"]["text"], each["relevance_score"]) for each in found]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        use_tqdm: bool,
    ) -> list[Pooled]:
        num, ask = ask_to_pool(prompts, params, task)
        if not num:
            return []
        core, progress = self._open_core(), Progress(num, "prompt", shown=use_tqdm)
        try:
            return self._background.run(
                core.pooler.pooled(ask, task or "embed", lambda result: progress.done(result.num_tokens))
            )
        finally:
            progress.close()

    def _compare(self, num: int, compare: Compare, use_tqdm: bool) -> tuple[list[float], list[tuple[Pooled, ...]]]:
        core, progress = self._open_core(), Progress(num, "text", shown=use_tqdm)
        try:
            return self._background.run(core.pooler.compared(compare, lambda result: progress.done(result.num_tokens)))
        finally:
            progress.close()

    def close(self) -> None:
        """What is in flight ends with a RuntimeError. Closing again does nothing.

        When it returns, the memory of model and cache is the system's again, though the closed LLM is still referred to."""
        if self._close.alive:
            self._close()
            self._core = None
            _give_memory_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all(self, asks: Sequence[_Ask], use_tqdm: bool) -> list[RequestOutput]:
        core = self._open_core()
        progress = Progress(len(asks), "prompt", shown=use_tqdm)
        try:
            return self._background.run(core.answers(asks, progress))
        finally:
            progress.close()

    def _iterate(self, ask: _Ask) -> AsyncIterator[RequestOutput]:
        return self._background.iterate(self._open_core().increments(ask))

    def _open_core(self) -> _Core:
        core = self._core
        if core is None or not self._close.alive:
            raise RuntimeError("this LLM is closed")
        return core


def _give_memory_back() -> None:
    """What refers to itself is collected now, and not when it happens; then free pages leave malloc, which would keep some for
    each thread that there ever was."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _close(background: LoopThread, core: _Core) -> None:
    try:
        # At the end of the program threads are gone that the engine would end with; nothing is left to free then either.
        if threading.main_thread().is_alive() and not background.is_here():
            background.run(core.close())
    finally:
        background.close()
