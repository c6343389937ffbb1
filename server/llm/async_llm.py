"""AsyncLLM: the engine on the caller's own event loop, with the methods of vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from runtime.api import PoolingTask
from server.config.server_config import ServerConfig
from server.llm import pooling, prepare
from server.llm.core import Core
from server.llm.engine_args import EngineArgs, program_config
from server.llm.lora_request import LoRARequest
from server.llm.metrics import Metric
from server.llm.outputs import RequestOutput, RequestOutputKind
from server.llm.pooling import PoolingParams
from server.llm.prepare import Conversation, PreparedInput, SamplingParams
from server.llm.prompts import Prompt
from server.llm.tokenizer import as_transformers


class AsyncLLM:
    """Model whose engine runs on the caller's event loop: tokens reach the caller without another thread or process. The
    constructor has the arguments of `LLM`.

    The first call loads the model. `async with AsyncLLM(…) as llm:` also loads it, and closes it at the end. Every call must be
    made on the event loop of the first call, from any task. The constructor raises ValueError for an unknown or unsupported
    option. The first call raises LoadError if the model cannot be served."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        self._prepare(program_config(model, options))

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, start_engine_loop: bool = True, usage_context: object = None
    ) -> Self:
        """Create an AsyncLLM with the options of `engine_args`. The other arguments have no effect, for compatibility with vLLM."""
        return cls(**engine_args.given())

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Create an AsyncLLM with the options of a server."""
        llm = cls.__new__(cls)
        llm._prepare(config)
        return llm

    def _prepare(self, config: ServerConfig) -> None:
        self._config = config
        self._cancel = threading.Event()
        self._loading: asyncio.Task[Core] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def core(self) -> Core:
        """Return the Core; the first call loads it. Raises LoadError, or RuntimeError after `shutdown` and on another event
        loop."""
        if self._closing is not None or self._cancel.is_set():
            raise RuntimeError("this AsyncLLM is shut down")
        if self._loading is None:
            self._loading = asyncio.create_task(Core.load(self._config, self._cancel), name="load")
        if self._loading.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncLLM belongs to another event loop, on which its model was loaded")
        return await asyncio.shield(self._loading)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt. Each output contains the whole answer so far, unless `sampling_params.output_kind` requests
        another kind. Leaving the iteration, or cancelling its task, aborts the request. After `abort`, the last output has the
        finish reason "abort". Raises ValueError: immediately for invalid arguments, at the first iteration for a request that
        does not fit the model."""
        params = sampling_params or SamplingParams()
        return self._outputs(prepare.of_prompt(prompt, params, lora_request), params, request_id)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation. `options`: as in `LLM.chat`. Other arguments, outputs and errors are those of `generate`."""
        prepare.check_chat_options(options)
        params = sampling_params or SamplingParams()
        ask = prepare.of_conversation(messages, params, options, lora_request, chat_template)
        return self._outputs(ask, params, request_id)

    async def _outputs(
        self, ask: PreparedInput, params: SamplingParams, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        kind = params.output_kind or RequestOutputKind.CUMULATIVE
        async with aclosing((await self.core()).outputs(ask, kind, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: PoolingTask | None = None,
    ) -> AsyncGenerator[pooling.PoolingRequestOutput, None]:
        """Pool one prompt, and yield one output with its array. `pooling_task` None: the task in `pooling_params`, or the
        model's default. Raises ValueError as `generate` does, and if the model is not served for pooling."""
        _, ask = pooling.ask_to_pool([prompt], pooling_params, pooling_task)
        core = await self.core()
        (result,) = await core.pooler.pooled(ask, pooling_task or "embed", lambda result: None)
        output = pooling.pooling_output(result)
        yield output if request_id is None else replace(output, request_id=request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort the requests with these ids. Unknown ids are ignored."""
        core = await self.core()
        for id in (request_id,) if isinstance(request_id, str) else request_id:
            core.abort(id)

    async def get_tokenizer(self) -> Any:
        """Return a new copy of the model's tokenizer as transformers' PreTrainedTokenizerFast, with its chat template."""
        return as_transformers((await self.core()).tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the model's default sampling parameters, which the caller may change."""
        return (await self.core()).default_params

    async def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics; see `LLM.get_metrics`."""
        return await (await self.core()).metrics()

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed."""
        health = (await self.core()).loaded.engines.health()
        if not health.ok:
            raise RuntimeError(f"the engine has failed: {health.reason}")

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return True when done."""
        return await (await self.core()).reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Release the memory of weights and KV cache; see `LLM.sleep`."""
        await (await self.core()).sleep(level)

    async def wake_up(self) -> None:
        """Reload weights and KV cache after `sleep`. Raises SleepError if that is no longer possible."""
        await (await self.core()).wake_up()

    async def is_sleeping(self) -> bool:
        return bool((await self.core()).loaded.engines.health().sleep_level)

    def shutdown(self) -> asyncio.Task[None] | None:
        """Close the engine. Requests in flight end with a RuntimeError. The returned task ends when the memory is free. It is
        None if there is nothing to close or the event loop has ended. Closing again does nothing."""
        self._cancel.set()  # ends a download
        if self._closing is None and self._loading is not None and not self._loading.get_loop().is_closed():
            self._closing = self._loading.get_loop().create_task(_close(self._loading), name="close")
        return self._closing

    async def __aenter__(self) -> Self:
        await self.core()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (closing := self.shutdown()) is not None:
            await closing


async def _close(loading: asyncio.Task[Core]) -> None:
    try:
        core = await loading
    except Exception:  # nothing was loaded, and the waiting caller got the error
        return
    await core.close()
