"""Core: a loaded model with the operations that `LLM` and `AsyncLLM` offer, on the event loop that runs the engine.

`LLM` runs a Core on a background thread. `AsyncLLM` and `asgi` run it on the caller's own event loop. For any number of prompts,
only a bounded number of sequences is in the engine at a time: as many as fit in a step, and some more."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial

from runtime.api import EngineError, FinishReason, SleepLevel
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.generate.generation import EngineFailed
from server.generate.request import Chat
from server.generate.start import start
from server.generate.transcript import Transcript
from server.http.call import Call
from server.http.errors import ApiError, UnsupportedParameter
from server.http.offload import MAX_WAITING, Offload
from server.http.watch import gather_or_cancel
from server.http.wire_fields import AdvisedFields
from server.llm import pooling, prepare
from server.llm.lora_request import LoraNames
from server.llm.metrics import Metric, read_metrics
from server.llm.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    best_first,
    increment,
    prompt_logprobs,
)
from server.llm.prepare import PreparedInput, SamplingParams
from server.llm.progress import Progress
from server.llm.prompts import as_value_error
from server.llm.sequence_limit import SequenceLimit
from server.llm.speech import Transcriber
from server.models.chat_format import ChatFormat
from server.models.lifecycle import Lifecycle
from server.models.lifecycle import LoadError as LoadError
from server.models.model import LoadedModel
from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from server.process.load import load
from server.process.terminal import StartupDisplay

TEMPLATE_CHARS = 100_000  # to compile a chat template takes as long as to tokenise so many: some milliseconds


class Core:
    """Loaded model with the operations that `LLM` and `AsyncLLM` offer. All methods run on the event loop that loaded the model."""

    def __init__(self, config: ServerConfig, loaded: LoadedModel) -> None:
        self.lifecycle = Lifecycle()
        self.lifecycle.ready(loaded)
        self.service = Service(config, self.lifecycle, Offload(max_waiting=max(MAX_WAITING, config.max_queue)))
        self.loaded = loaded
        self._names = LoraNames(loaded)
        self.pooler = pooling.Pooler(self.service, loaded)
        rows = loaded.engine.model.max_num_seqs
        self._limit = SequenceLimit(rows + max(4, rows // 4))
        self.transcriber = Transcriber(self.service, loaded, self._limit)
        self._templates: dict[str, tuple[ChatTemplate, ChatFormat]] = {}  # templates given with chats, by their text
        self._at_work: dict[str, bool] = {}  # ids of requests; True once they are to be aborted

    @classmethod
    async def load(cls, config: ServerConfig, cancel: threading.Event) -> Core:
        """Load the model and return its Core. `cancel`: ends a download when it is set. Raises LoadError."""
        display = StartupDisplay(sys.stderr)
        try:
            return cls(config, await load(config, display.report, cancel))
        finally:
            display.finish()

    async def outputs(
        self, ask: PreparedInput, kind: RequestOutputKind, id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of the request `ask`, of the given `kind`. Raises the errors of `increments`."""
        wholes = [CompletionOutput(index) for index in range(ask.request.n)]
        async with contextlib.aclosing(self.increments(ask, id)) as increments:
            async for output in increments:
                if kind is RequestOutputKind.DELTA:
                    yield output
                    continue
                for more in output.outputs:
                    wholes[more.index].add(more)
                if kind is RequestOutputKind.CUMULATIVE or output.finished:
                    yield dataclasses.replace(output, outputs=[whole.copy() for whole in wholes])

    async def increments(self, ask: PreparedInput, id: str | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Yield the new parts of the answers to the request `ask`. `id`: its id; None creates one. Raises ValueError if the
        request does not fit the model or the id is in use, RuntimeError if the engine fails or is closed."""
        id = id or uuid.uuid4().hex
        call = Call(id=id, offload=self.service.offload)
        async with self._named(id), self._limit.room_for(ask.request.num_candidates):
            try:
                generation, ignored = await start(
                    self.service.config,
                    call,
                    await self._model(call, ask),
                    ask.request,
                    id=id,
                )
                if ignored:
                    raise UnsupportedParameter(ignored[0])
                if self._at_work[id]:
                    yield _aborted(id, ask, generation.requests[0].prompt_ids)
                    return
                opened = generation.open()
            except ApiError as error:
                raise as_value_error(error) from None
            except EngineError as error:
                raise RuntimeError(f"the engine does not accept requests: {error}") from None
            text = ask.text
            if isinstance(ask.request.prompt, Chat):
                text = self.loaded.tokenizer.decode(generation.requests[0].prompt_ids, skip_special_tokens=False)
            transcripts = [Transcript() for _ in generation.choices]
            ids = list(generation.requests[0].prompt_ids)  # cut, if so asked
            competing = [CompletionOutput(index) for index in range(len(generation.choices))]
            try:
                async with opened as stream:
                    async for outputs in stream:
                        moved = [increment(generation, output, transcripts[output.index]) for output in outputs]
                        finished = all(choice.finish_reason is not None for choice in generation.choices)
                        if generation.aborted and not self._at_work[id]:
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

    async def _model(self, call: Call, ask: PreparedInput) -> LoadedModel:
        """Return the model with the adapter and the chat template that `ask` requests. Raises ValueError."""
        model, source = await self._names.model(call, ask.lora), ask.chat_template
        if source is None:
            return model
        if source not in self._templates:
            self._templates[source] = await call.run(TEMPLATE_CHARS, partial(self._read_template, source))
        return model.with_template(*self._templates[source])

    def _read_template(self, source: str) -> tuple[ChatTemplate, ChatFormat]:
        config, tokenizer = self.service.config, self.loaded.tokenizer
        template = ChatTemplate(source, tokenizer.named_tokens)
        parsers = {"tool_parser": config.tool_parser, "reasoning_parser": config.reasoning_parser}
        return template, ChatFormat.choose(source, template, tokenizer, **parsers)

    async def answers(self, asks: Sequence[PreparedInput], progress: Progress) -> list[RequestOutput]:
        """Return the final outputs in the order of `asks`. The first failure cancels the other requests."""
        found: list[RequestOutput | None] = [None] * len(asks)
        todo = iter(enumerate(asks))

        async def work() -> None:
            for number, ask in todo:
                with prepare.naming(ask.param, number, len(asks)):
                    answer = found[number] = await self._whole(ask)
                progress.done(sum(len(output.token_ids) for output in answer.outputs))

        await gather_or_cancel(work() for _ in range(min(len(asks), self._limit.limit)))
        return [answer for answer in found if answer is not None]

    async def _whole(self, ask: PreparedInput) -> RequestOutput:
        async with contextlib.aclosing(self.outputs(ask, RequestOutputKind.FINAL_ONLY)) as outputs:
            return await anext(outputs)

    @contextlib.asynccontextmanager
    async def _named(self, id: str) -> AsyncIterator[None]:
        """Context in which `id` is reserved for one request. Raises ValueError if the id is in use."""
        if id in self._at_work:
            raise ValueError(f"request_id {id!r}: another request with this id is in flight")
        self._at_work[id] = False
        try:
            yield
        finally:
            del self._at_work[id]

    def abort(self, id: str) -> None:
        """Abort the request `id`, if it is in flight. Its last output has the finish reason "abort"."""
        if id in self._at_work:
            self._at_work[id] = True
            self.loaded.engine.abort({id})

    async def metrics(self) -> list[Metric]:
        return read_metrics(self.loaded.engine.metrics())

    @property
    def default_params(self) -> SamplingParams:
        """Default sampling parameters of the model."""
        defaults = self.loaded.defaults
        return SamplingParams(**{name: getattr(defaults, name) for name in AdvisedFields.__struct_fields__})

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    async def reset_prefix_cache(self) -> bool:
        self.loaded.engine.reset_prefix_cache()
        return True

    async def sleep(self, level: int) -> None:
        await self.loaded.engine.sleep(SleepLevel(level))

    async def wake_up(self) -> None:
        await self.loaded.engine.wake_up()

    async def close(self) -> None:
        """End requests in flight, and free the memory of model and cache."""
        self.service.offload.close()
        await self.loaded.engines.close()


def _aborted(id: str, ask: PreparedInput, prompt_ids: Sequence[int]) -> RequestOutput:
    """Return the last output of request `id`, which was aborted before it entered the engine."""
    reason = FinishReason.ABORT.value
    choices = [CompletionOutput(index, finish_reason=reason) for index in range(ask.request.n)]
    return RequestOutput(id, ask.text, list(prompt_ids), choices, finished=True)
