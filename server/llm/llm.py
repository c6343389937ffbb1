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
import os
import sys
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from runtime.api import EngineError, PoolingTask, SleepLevel
from server.api.pooling.pooled import ranked
from server.api.pooling.run import Pooled
from server.api.service import Service
from server.config.parse import from_keywords
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.generate.generation import EngineFailed
from server.generate.request import Chat
from server.generate.start import start
from server.generate.transcript import Transcript
from server.http.call import Call
from server.http.errors import ApiError, UnsupportedParameter
from server.http.offload import Offload
from server.http.watch import gather_or_cancel
from server.llm import pooling, prepare
from server.llm.loop_thread import LoopThread
from server.llm.lora_request import LoraNames, LoRARequest, each_lora
from server.llm.outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    beams_of,
    best_first,
    increment,
    prompt_logprobs,
)
from server.llm.pooling import PoolingParams
from server.llm.prepare import Conversation, Prepared, SamplingParams
from server.llm.progress import Progress
from server.llm.prompts import Prompt, as_value_error, several
from server.llm.tokenizer import as_transformers
from server.media.limits import UNBOUNDED_GB
from server.models.lifecycle import Lifecycle
from server.models.model import LoadedModel
from server.models.tokenizer import Tokenizer
from server.process.load import load
from server.process.terminal import StartupDisplay

T = TypeVar("T")


UNBOUNDED = 2**31 - 1  # the queue's limit: `_Window` is what bounds it here


class _Window:
    """Limit of sequences in the engine, in order. A request that needs more than `limit` goes alone."""

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
    """Core of an `LLM`. Everything here happens on the background loop."""

    def __init__(self, config: ServerConfig, loaded: LoadedModel) -> None:
        lifecycle = Lifecycle()
        lifecycle.ready(loaded)
        self._service = Service(config, lifecycle, Offload(max_waiting=sys.maxsize))
        self._loaded = loaded
        self._names = LoraNames(loaded)
        self.pooler = pooling.Pooler(self._service, loaded)
        rows = loaded.engine.model.max_num_seqs
        self._window = _Window(rows + max(4, rows // 4))

    @classmethod
    async def load(cls, config: ServerConfig, cancel: threading.Event) -> _Core:
        display = StartupDisplay(sys.stderr)
        try:
            return cls(config, await load(config, display.report, cancel))
        finally:
            display.finish()

    async def increments(self, ask: Prepared) -> AsyncGenerator[RequestOutput, None]:
        """Raises ValueError where the request does not fit the model, RuntimeError where the engine fails or is closed."""
        id, call = uuid.uuid4().hex, Call(offload=self._service.offload)
        async with self._window.room_for(ask.request.num_candidates):
            try:
                generation, ignored = await start(
                    self._service.config,
                    call,
                    await self._names.model(call, ask.lora),
                    ask.request,
                    id=id,
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
                        moved = [increment(generation, output, transcripts[output.index]) for output in outputs]
                        finished = all(choice.finish_reason is not None for choice in generation.choices)
                        if generation.aborted:
                            raise RuntimeError("the LLM was closed before the answer was complete")
                        if generation.competes:
                            for more in moved:
                                competing[more.index].add(more)
                            if not finished:
                                continue
                            moved = best_first(generation, competing)
                        of_prompt_ids = prompt_logprobs(generation) if finished else None
                        yield RequestOutput(id, text, ids, moved, finished, generation.num_cached_tokens, of_prompt_ids)
            except ApiError as error:
                raise as_value_error(error) from None
            except EngineFailed as error:
                raise RuntimeError(f"the engine failed on this request: {error}") from None
            except EngineError as error:
                raise RuntimeError(f"the LLM was closed before the answer was complete: {error}") from None

    async def answers(self, asks: Sequence[Prepared], progress: Progress) -> list[RequestOutput]:
        """Return the outputs in the order of `asks`. The first failure ends the others."""
        found: list[RequestOutput | None] = [None] * len(asks)
        todo = iter(enumerate(asks))

        async def work() -> None:
            for number, ask in todo:
                with prepare.naming(ask.param, number, len(asks)):
                    answer = found[number] = await self._whole(ask)
                progress.done(sum(len(output.token_ids) for output in answer.outputs))

        await gather_or_cancel(work() for _ in range(min(len(asks), self._window.limit)))
        return [answer for answer in found if answer is not None]

    async def _whole(self, ask: Prepared) -> RequestOutput:
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


# --- for users -----------------------------------------------------------------------------------------------------


class LLM:
    """Model for programs: `LLM("Qwen/Qwen3-0.6B", max_model_len=4096)` loads it and is ready when it returns. `model` as
    `--model` takes it; `options` are those of `oneloop serve` for model, engine and media, with underscores.

    Every method may be called from any thread. `with LLM() as llm:`, `close()` or dropping the last reference frees the memory.
    A program that ends without closing ends cleanly. Ctrl-C cancels the call and leaves the LLM usable.

    Raises ValueError for an unknown or unsupported option, LoadError if the model cannot be served."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        path = None if model is None else os.fspath(model)
        try:
            config = from_keywords({"enable_mm_embeds": True, **options, "model": path})
        except ConfigError as error:
            raise ValueError(str(error)) from None
        self._load(config)

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Create an LLM with options from a command line. Raises LoadError."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: ServerConfig) -> None:
        cancel = threading.Event()
        background = LoopThread("oneloop-llm")
        try:
            unbounded = dataclasses.replace(config, max_queue=UNBOUNDED, max_media_memory_gb=UNBOUNDED_GB)
            self._core: _Core | None = background.run(_Core.load(unbounded, cancel))
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt: text, token ids, or vLLM's dict of either (`prompt`, `prompt_token_ids`). The answers are in the
        prompts' order. `lora_request`: with which adapter, all or each.

        Raises ValueError, naming the prompt and the field, and then nothing is answered."""
        return self._answers("prompt", several(prompts), prepare.of_prompt, sampling_params, lora_request, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several: lists of {"role": …, "content": …}. `options`: CHAT_FIELDS, as the HTTP API has
        them (`tools` …). Otherwise as `generate`."""
        prepare.check_chat_options(options)
        make = partial(prepare.of_conversation, options=options)
        return self._answers("messages", prepare.conversations(messages), make, sampling_params, lora_request, use_tqdm)

    def agenerate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, lora_request: LoRARequest | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Increments of the answer to one prompt, as they settle, on the caller's running loop. For several prompts,
        several calls: they run together. Leaving the iteration takes the request back; where that has to happen at once,
        leave through `contextlib.aclosing`.

        Raises ValueError: for what is wrong in itself here, for what does not fit the model at the first step."""
        return self._iterate(prepare.of_prompt(prompt, sampling_params or SamplingParams(), lora_request))

    def achat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Increments of the answer to one conversation. See `agenerate`."""
        prepare.check_chat_options(options)
        return self._iterate(
            prepare.of_conversation(messages, sampling_params or SamplingParams(), options, lora_request)
        )

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
    ) -> list[pooling.EmbeddingRequestOutput]:
        """The vector of each prompt, in order. Raises ValueError as `generate`, and where the model is not served to embed."""
        return [pooling.embedding_output(each) for each in self._pool(prompts, pooling_params, "embed", use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[pooling.ClassificationRequestOutput]:
        """Return the probability of each class for each prompt. Raises ValueError as `embed`."""
        return [
            pooling.classification_output(each) for each in self._pool(prompts, pooling_params, "classify", use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: PoolingTask | None = None,
    ) -> list[pooling.PoolingRequestOutput]:
        """Pool each prompt to an array. `pooling_task` None: the model's default task. Raises ValueError as `embed`."""
        return [pooling.pooling_output(each) for each in self._pool(prompts, pooling_params, pooling_task, use_tqdm)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[pooling.ScoringRequestOutput]:
        """Return how well texts match: pairs of equal numbers, or one text with all of the second argument. Raises
        ValueError as `embed`."""
        num, compare = pooling.ask_to_score(data_1, data_2, pooling_params)
        scores, sides = self._compare(num, compare, use_tqdm)
        return [pooling.scoring_output(score, pair) for score, pair in zip(scores, sides, strict=True)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[pooling.RerankOutput]:
        """The documents, best first. Raises ValueError as `embed`."""
        scores, _ = self._compare(len(documents), pooling.ask_to_rerank(query, documents, pooling_params), use_tqdm)
        found = ranked(scores, None, top_n)
        return [pooling.RerankOutput(each.index, documents[each.index], each.relevance_score) for each in found]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        use_tqdm: bool,
    ) -> list[Pooled]:
        num, ask = pooling.ask_to_pool(prompts, params, task)
        if not num:
            return []
        with self._progress(num, "prompt", use_tqdm) as (core, progress):
            work = core.pooler.pooled(ask, task or "embed", lambda result: progress.done(result.num_tokens))
            return self._background.run(work)

    def _compare(
        self, num: int, compare: pooling.Compare, use_tqdm: bool
    ) -> tuple[list[float], list[tuple[Pooled, ...]]]:
        with self._progress(num, "text", use_tqdm) as (core, progress):
            return self._background.run(core.pooler.compared(compare, lambda result: progress.done(result.num_tokens)))

    def close(self) -> None:
        """Close. Requests in flight end with a RuntimeError. Closing again does nothing.

        The memory of model and cache is freed when it returns, even if the LLM is still referenced."""
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

    def _answers(
        self,
        field: str,
        given: Sequence[Any],
        make: Callable[..., Prepared],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Answer what `make` makes of each of `given` with its params and its adapter. `field`: names them in errors."""
        params, adapters = prepare.one_each(sampling_params, len(given)), each_lora(lora_request, len(given))
        asks = []
        for number, (each, its_params, adapter) in enumerate(zip(given, params, adapters, strict=True)):
            with prepare.naming(field, number, len(given)):
                asks.append(make(each, its_params, lora=adapter))
        with self._progress(len(asks), "prompt", use_tqdm) as (core, progress):
            return self._background.run(core.answers(asks, progress))

    @contextlib.contextmanager
    def _progress(self, total: int, unit: str, shown: bool) -> Iterator[tuple[_Core, Progress]]:
        core, progress = self._open_core(), Progress(total, unit, shown=shown)
        try:
            yield core, progress
        finally:
            progress.close()

    def _iterate(self, ask: Prepared) -> AsyncIterator[RequestOutput]:
        return self._background.iterate(self._open_core().increments(ask))

    def _open_core(self) -> _Core:
        core = self._core
        if core is None or not self._close.alive:
            raise RuntimeError("this LLM is closed")
        return core


def _give_memory_back() -> None:
    """Collect reference cycles now, then return free pages of malloc to the system, which would keep some for each thread."""
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
