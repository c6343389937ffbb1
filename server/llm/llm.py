"""LLM: the engine inside the caller's own program, `from oneloop import LLM, SamplingParams`.

Parameters and outputs are those of /v1/completions and /v1/chat/completions. The same wire types validate them and the same
Generation computes them, without HTTP. Engine and event loop run on one background thread that the LLM owns. Synchronous methods
therefore work in scripts, and in notebooks, which already run a loop. `agenerate` and `achat` pass results to the caller's loop.
`AsyncLLM` runs the engine on the caller's loop itself."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from runtime.api import PoolingTask
from server.api.pooling.pooled import ranked
from server.api.pooling.run import PooledInput
from server.config.server_config import ServerConfig
from server.generate.speech.request import FALLBACK, Thresholds, TranscribeRequest
from server.llm import pooling, prepare
from server.llm.core import Core
from server.llm.engine_args import EngineArgs, program_config, unbounded
from server.llm.loop_thread import LoopThread
from server.llm.lora_request import LoRARequest, each_lora
from server.llm.metrics import Metric
from server.llm.outputs import BeamSearchOutput, BeamSearchParams, RequestOutput, RequestOutputKind, beams_of
from server.llm.pooling import PoolingParams
from server.llm.prepare import Conversation, PreparedInput, SamplingParams
from server.llm.progress import Progress
from server.llm.prompts import Prompt, several
from server.llm.speech import Audio, Transcribed, is_samples
from server.llm.tokenizer import as_transformers
from server.models.speech import Task


class LLM:
    """Model in the caller's program: `LLM("Qwen/Qwen3-0.6B", max_model_len=4096)` loads it and returns when it is ready. `model`:
    value of `--model`. `options`: the model, engine and media options of `oneloop serve`, with underscores.

    Every method may be called from any thread. `with LLM() as llm:`, `close()` or dropping the last reference frees the memory.
    A program that ends without `close()` ends cleanly. Ctrl-C cancels the call and leaves the LLM usable. Raises ValueError for
    an unknown or unsupported option, LoadError if the model cannot be served."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._load(program_config(model, options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Create an LLM with the options of `engine_args`. Raises the errors of the constructor."""
        return cls(**engine_args.given())

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Create an LLM with the options `config`, read from a command line. Raises LoadError."""
        llm = cls.__new__(cls)
        llm._load(unbounded(config))
        return llm

    def _load(self, config: ServerConfig) -> None:
        cancel = threading.Event()
        background = LoopThread("oneloop-llm")
        try:
            self._core: Core | None = background.run(Core.load(config, cancel))
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
        """Continue each prompt, and return the outputs in the order of the prompts. A prompt is text, token ids, or vLLM's dict
        with `prompt` or `prompt_token_ids`. `lora_request`: one adapter for all prompts, or one for each. Raises ValueError that
        names the prompt and the field; no prompt is then answered."""
        return self._answers("prompt", several(prompts), prepare.of_prompt, sampling_params, lora_request, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. A conversation is a list of {"role": …, "content": …}. `chat_template`: template
        text that replaces the model's. `options`: CHAT_FIELDS, as in the HTTP API (`tools` …). Other arguments and errors are
        those of `generate`."""
        prepare.check_chat_options(options)
        make = partial(prepare.of_conversation, options=options, chat_template=chat_template)
        return self._answers("messages", prepare.conversations(messages), make, sampling_params, lora_request, use_tqdm)

    def agenerate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, lora_request: LoRARequest | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield increments of the answer to one prompt, on the caller's running loop. Several calls run at the same time.
        Leaving the iteration aborts the request. To abort it immediately, leave through `contextlib.aclosing`. Raises
        ValueError: immediately for invalid arguments, at the first iteration for a request that does not fit the model."""
        params = sampling_params or SamplingParams()
        return self._iterate(prepare.of_prompt(prompt, params, lora_request), params)

    def achat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield increments of the answer to one conversation. See `agenerate` for errors and `chat` for `options`."""
        prepare.check_chat_options(options)
        params = sampling_params or SamplingParams()
        return self._iterate(prepare.of_conversation(messages, params, options, lora_request), params)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Return the `params.beam_width` most likely continuations of each prompt, best first, as vLLM's `beam_search` does.
        Raises ValueError as `generate` does."""
        answers = self.generate(prompts, SamplingParams(**params.fields), use_tqdm)
        decode = self._open_core().tokenizer.decode
        return [beams_of(answer, lambda ids: decode(ids, skip_special_tokens=True)) for answer in answers]

    def get_tokenizer(self) -> Any:
        """Return a new copy of the model's tokenizer as transformers' PreTrainedTokenizerFast, with its chat template."""
        return as_transformers(self._open_core().tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the model's default sampling parameters, which the caller may change."""
        return self._open_core().default_params

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics: one Counter, Gauge or Histogram for each sample of /metrics."""
        return self._background.run(self._open_core().metrics())

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return True when done."""
        return self._background.run(self._open_core().reset_prefix_cache())

    def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache once all requests have ended. The next prompt, or `wake_up`, reloads them.
        Level 1 keeps the weight files in the system's page cache as far as possible; level 2 does not. Raises ValueError for
        another level."""
        self._background.run(self._open_core().sleep(level))

    def wake_up(self) -> None:
        """Reload weights and KV cache after `sleep`. Raises SleepError if that is no longer possible."""
        self._background.run(self._open_core().wake_up())

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str | None = None,
        timestamps: bool = False,
        temperature: float | Sequence[float] = FALLBACK,
        compression_ratio_threshold: float | None = 2.4,
        logprob_threshold: float | None = -1.0,
        no_speech_threshold: float | None = 0.6,
        max_tokens: int | None = None,
        condition_on_previous_text: bool = False,
        return_exceptions: bool = False,
        use_tqdm: bool | None = True,
    ) -> list[Transcribed]:
        """Return the transcript of speech. `audio`: a path, bytes of a file, samples, a pair of samples and their rate, or a
        list of these. `language`: language code, None to detect it. `task`: "transcribe", or "translate" into English.
        `timestamps`: return sentences with their times as segments. `temperature`: values, tried in order until a window passes
        the thresholds. The thresholds have the same meaning as in transformers; None disables a threshold. `max_tokens`: limit
        for each window. All other behaviour is that of /v1/audio/transcriptions. Raises ValueError that names the audio. With
        `return_exceptions`, the error is returned instead of the transcript."""
        given = list(audio) if isinstance(audio, list | tuple) and not is_samples(audio) else [audio]
        request = TranscribeRequest(
            task=task,
            language=language,
            prompt=prompt,
            temperatures=(temperature,) if isinstance(temperature, int | float) else tuple(temperature),
            thresholds=Thresholds(compression_ratio_threshold, logprob_threshold, no_speech_threshold),
            timestamps=timestamps,
            in_order=condition_on_previous_text,
            after_text=condition_on_previous_text,
            max_tokens=max_tokens,
        )
        with self._progress(len(given), "file", use_tqdm) as (core, progress):
            work = core.transcriber.outputs(given, request, progress, return_exceptions=return_exceptions)
            return self._background.run(work)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[pooling.EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order. Raises ValueError as `generate` does, and for a model that cannot
        embed."""
        return [pooling.embedding_output(each) for each in self._pool(prompts, pooling_params, "embed", use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[pooling.ClassificationRequestOutput]:
        """Return the probability of each class for each prompt. Raises ValueError as `embed` does."""
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
        """Pool each prompt to an array. `pooling_task` None: the model's default task. Raises ValueError as `embed` does."""
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
        """Return similarity scores of text pairs. If `data_1` is one text, it is paired with each text of `data_2`. Raises
        ValueError as `embed` does."""
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
        """Return the documents with their scores for `query`, best first. `top_n`: number of documents to return; None returns
        all."""
        scores, _ = self._compare(len(documents), pooling.ask_to_rerank(query, documents, pooling_params), use_tqdm)
        found = ranked(scores, None, top_n)
        return [pooling.RerankOutput(each.index, documents[each.index], each.relevance_score) for each in found]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        use_tqdm: bool,
    ) -> list[PooledInput]:
        num, ask = pooling.ask_to_pool(prompts, params, task)
        if not num:
            return []
        with self._progress(num, "prompt", use_tqdm) as (core, progress):
            work = core.pooler.pooled(ask, task or "embed", lambda result: progress.done(result.num_tokens))
            return self._background.run(work)

    def _compare(
        self, num: int, compare: pooling.Compare, use_tqdm: bool
    ) -> tuple[list[float], list[tuple[PooledInput, ...]]]:
        with self._progress(num, "text", use_tqdm) as (core, progress):
            return self._background.run(core.pooler.compared(compare, lambda result: progress.done(result.num_tokens)))

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise AttributeError(f"LLM has no {name}: {_NOT_HERE[name]}")
        raise AttributeError(f"'LLM' object has no attribute {name!r}")

    def close(self) -> None:
        """Close the engine. Requests in flight end with a RuntimeError. Closing again does nothing.

        When this method returns, the memory of model and cache is free, even if the LLM is still referenced."""
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
        make: Callable[..., PreparedInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Return the outputs of several requests. `make`: creates a request from an item of `given`, its parameters and its
        adapter. `field`: name of the items in errors."""
        params, adapters = prepare.one_each(sampling_params, len(given)), each_lora(lora_request, len(given))
        asks = []
        for number, (each, its_params, adapter) in enumerate(zip(given, params, adapters, strict=True)):
            with prepare.naming(field, number, len(given)):
                asks.append(make(each, its_params, lora=adapter))
        with self._progress(len(asks), "prompt", use_tqdm) as (core, progress):
            return self._background.run(core.answers(asks, progress))

    @contextlib.contextmanager
    def _progress(self, total: int, unit: str, shown: bool | None) -> Iterator[tuple[Core, Progress]]:
        core, progress = self._open_core(), Progress(total, unit, shown=shown)
        try:
            yield core, progress
        finally:
            progress.close()

    def _iterate(self, ask: PreparedInput, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        kind = params.output_kind or RequestOutputKind.DELTA
        return self._background.iterate(self._open_core().outputs(ask, kind))

    def _open_core(self) -> Core:
        core = self._core
        if core is None or not self._close.alive:
            raise RuntimeError("this LLM is closed")
        return core


# Of vLLM's LLM, for programs that were written for it.
_NOT_HERE: Mapping[str, str] = {
    "llm_engine": "the engine is this LLM itself, without steps to be made by hand; requests come and go in AsyncLLM",
    "collective_rpc": "there are no worker processes",
    "apply_model": "there are no worker processes",
    "start_profile": "profiles are the server's: oneloop serve --profile-dir",
    "stop_profile": "profiles are the server's: oneloop serve --profile-dir",
    "reward": "encode(…, pooling_task='token_classify') gives the scores of tokens",
    "preprocess_chat": "get_tokenizer().apply_chat_template(…) gives the prompt of a conversation",
    "init_weight_transfer_engine": "weights are not exchanged while a model serves",
    "update_weights": "weights are not exchanged while a model serves",
}


def _give_memory_back() -> None:
    """Collect reference cycles, then return free heap memory to the system. malloc would keep some of it for each thread."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _close(background: LoopThread, core: Core) -> None:
    try:
        # At the end of the program threads are gone that the engine would end with; nothing is left to free then either.
        if threading.main_thread().is_alive() and not background.is_here():
            background.run(core.close())
    finally:
        background.close()
