"""TokenStream: where the engine puts what it settled and a handler picks it up.

One per `submit` call, for one or several requests. Nothing queues per token: a slow reader finds everything since its last
read as one Output per request, so its cost is its own and memory is bounded by max_tokens. Leaving the `async with` block
aborts what is unfinished; that is the only clean-up there is, and it cannot be forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from runtime.api import FinishReason, Output


class _Pending:
    """What has settled for one request since the last read."""

    __slots__ = ("cached", "error", "finish", "ids", "stop_token_id")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.cached = 0
        self.error: str | None = None


class EngineTokenStream:
    """`abort(index)` is the engine's way to end request `index` early."""

    def __init__(self, num_requests: int, abort: Callable[[int], None]) -> None:
        self._abort = abort
        self._open = set(range(num_requests))  # not finished, as the reader knows
        self._fresh: dict[int, _Pending] = {}
        self._reader: asyncio.Future[None] | None = None

    # --- the engine's side ----------------------------------------------------------------------------------------

    def put(
        self,
        index: int,
        token_id: int | None,
        num_cached_tokens: int,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        if index not in self._open:
            return
        pending = self._fresh.get(index)
        if pending is None:
            pending = self._fresh[index] = _Pending()
        if token_id is not None:
            pending.ids.append(token_id)
        pending.cached = num_cached_tokens
        if finish is not None:
            pending.finish, pending.stop_token_id, pending.error = finish, stop_token_id, error
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- the reader's side ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in tuple(self._open):
            self.abort(index)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        while not self._fresh:
            if not self._open:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        fresh, self._fresh = self._fresh, {}
        outputs = []
        for index, pending in fresh.items():
            if pending.finish is not None:
                self._open.discard(index)
            outputs.append(
                Output(index, pending.ids, pending.finish, pending.stop_token_id, pending.cached, pending.error)
            )
        return outputs

    def abort(self, index: int) -> None:
        if index in self._open:
            self._open.discard(index)
            self._fresh.pop(index, None)
            self._abort(index)
            if not self._open and self._reader is not None and not self._reader.done():
                self._reader.set_result(None)
