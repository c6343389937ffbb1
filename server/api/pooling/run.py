"""Execution of a pooling request: its inputs are submitted to the engine in ranges of consecutive inputs (spans).

Several spans are in flight: while one span is computed, the next are encoded and submitted. The engine is therefore never idle.
A request with thousands of inputs does not fill the queue, so other requests are admitted in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from runtime import api
from runtime.api import FinishReason, TokenStream
from server.api.pooling.encode import EncodedInput, InputEncoder, cost_of
from server.api.pooling.request import MAX_NUMBERS, PoolRequest
from server.config.server_config import ServerConfig
from server.generate.generation import FAILED, failure_of
from server.generate.plain_prompts import all_prepared
from server.generate.start import Terms
from server.http.call import Call
from server.http.errors import Aborted, InvalidRequest
from server.http.watch import gather_or_cancel
from server.models.model import LoadedModel

LANES = 8
# To submit a request takes the loop some 30 us, and 50 ns for each of its tokens: a span stays near a millisecond.
SPAN_INPUTS = 32
SPAN_CHARS = 16_384  # some 4 thousand tokens


class PooledInput(NamedTuple):
    """Pooling result of one input. `id`: id of the engine's request. `numbers`: float32, in the shape of the task. `prompt_ids`:
    empty unless requested."""

    id: str
    numbers: memoryview
    num_tokens: int
    num_cached_tokens: int
    prompt_ids: Sequence[int] = ()


async def pooled(
    config: ServerConfig,
    call: Call,
    loaded: LoadedModel,
    request: PoolRequest,
    *,
    id: str,
    note: Callable[[PooledInput], object] = lambda result: None,
    max_numbers: int | None = None,
    with_ids: bool = False,
) -> list[PooledInput]:
    """Pool all inputs and return the results in order. `note`: called with each result when it is complete. `max_numbers`: maximum
    number of floats of all results, MAX_NUMBERS by default. `with_ids`: results contain `prompt_ids`.

    Raises ApiError, whose `param` is a Field of the request, EngineError if the engine accepts no request, or EngineFailed."""
    run = _Run(config, call, loaded, request, id, note, max_numbers, with_ids=with_ids)
    return await run.results()


class _Run:
    def __init__(
        self, config: ServerConfig, call: Call, loaded: LoadedModel, request: PoolRequest, id: str,
        note: Callable[[PooledInput], object], max_numbers: int | None, *, with_ids: bool,
    ) -> None:  # fmt: skip
        self._terms = Terms.of(
            config, call, priority=request.priority, timeout_s=request.timeout_s, cache_salt=request.cache_salt
        )
        self._call = call
        self._loaded = loaded
        self._served = loaded.require_pooling(request.params.task)
        self._request = request
        self._encoder = InputEncoder(loaded, request)
        self._with_ids = with_ids
        self._id = id
        # All lanes together stay within what one client may have.
        at_once = min(LANES * SPAN_INPUTS, config.max_num_seqs_per_key or LANES * SPAN_INPUTS)
        self._num_lanes = min(LANES, at_once)
        self._span_inputs = at_once // self._num_lanes
        self._found: list[PooledInput | None] = [None] * len(request.inputs)
        self._note = note
        self._max_numbers = MAX_NUMBERS if max_numbers is None else max_numbers
        self._num_numbers = 0
        self._is_admitted = False

    async def results(self) -> list[PooledInput]:
        await self._loaded.enter(self._call, self._terms.deadline_s)
        spans = self._spans()
        first = next(spans)
        if first.stop == len(self._found):  # the usual case needs no tasks
            await self._run(first)
        else:
            await self._run_all(chain([first], spans))
        return [found for found in self._found if found is not None]

    async def _run_all(self, spans: Iterator[range]) -> None:
        async def lane() -> None:
            for span in spans:
                await self._run(span)

        await gather_or_cancel(lane() for _ in range(self._num_lanes))

    def _spans(self) -> Iterator[range]:
        """Yield ranges of input indices, each small enough for one `submit`."""
        inputs = self._request.inputs
        start = num_chars = 0
        for number, given in enumerate(inputs):
            cost = cost_of(given)
            if number > start and (number - start >= self._span_inputs or num_chars + cost > SPAN_CHARS):
                yield range(start, number)
                start, num_chars = number, 0
            num_chars += cost
        yield range(start, len(inputs))

    async def _run(self, span: range) -> None:
        prompts = await self._encoder.encoded(self._call, self._request.inputs[span.start : span.stop])
        self._count(prompts)
        requests = [await self._engine_request(number, prompt) for number, prompt in zip(span, prompts, strict=True)]
        async with self._submit(requests) as stream:
            async for outputs in stream:
                for output in outputs:
                    self._settle(span[output.index], requests[output.index], output)

    def _count(self, prompts: Sequence[EncodedInput]) -> None:
        """Add up the number of floats in the response. Raises InvalidRequest if it exceeds the maximum."""
        params = self._request.params
        self._num_numbers += sum(self._served.num_numbers(params, len(prompt.ids)) for prompt in prompts)
        if self._num_numbers > self._max_numbers:
            raise InvalidRequest(
                f"the answer would have more than {self._max_numbers} numbers; send fewer inputs at a time",
                param=self._request.field,
            )

    async def _engine_request(self, number: int, prompt: EncodedInput) -> api.Request:
        params, types = self._request.params, prompt.token_type_ids
        (prepared,) = await all_prepared(self._loaded, self._call, [prompt.ids], self._terms.cache_salt)
        params = params if types is None else replace(params, token_type_ids=types)
        return self._terms.engine_request(
            f"{self._id}-{number}", prompt.ids, params, self._loaded.adapter, prepared=prepared
        )

    def _submit(self, requests: Sequence[api.Request]) -> TokenStream:
        """Submit engine requests. Only the first call can be refused by a full queue, so the request is never half accepted."""
        stream = self._loaded.engine.submit(requests, continues=self._is_admitted)
        self._is_admitted = True
        return stream

    def _settle(self, number: int, request: api.Request, output: api.Output) -> None:
        if output.finish in FAILED:
            raise failure_of(output)
        if output.finish is FinishReason.ABORT:
            raise Aborted
        assert output.pooled is not None, "a pooled request ends with its numbers"
        ids = request.prompt_ids
        found = PooledInput(
            request.id, output.pooled, len(ids), output.num_cached_tokens, ids if self._with_ids else ()
        )
        self._found[number] = found
        self._note(found)
