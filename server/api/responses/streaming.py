"""A response streamed to the client who asked for it: its events as they happen, the first ones before there is a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from runtime.api import Output, Take, TokenStream, WriterOf
from server.api.frames import named_event
from server.api.responses.events import ResponseEvents


class AnnouncedStream(TokenStream):
    """A TokenStream before whose first Outputs comes an empty batch, so that the first events go out before there is a token."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._announced = False

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Output]:
        if not self._announced:
            self._announced = True
            return ()
        return await self._stream.__anext__()

    async def hand_to(self, take: Take, writer_of: WriterOf | None = None) -> None:
        self._announced = True
        if (rest := take(())) is not None:
            await rest()
        await self._stream.hand_to(take, writer_of)

    def stop(self, index: int) -> None:
        self._stream.stop(index)


class EventFrames:
    """Renders events; `finished` is called once, after the last one, unless the client has left before."""

    def __init__(self, response_events: ResponseEvents, finished: Callable[[], object]) -> None:
        self._response_events = response_events
        self._finished = finished

    def feed(self, outputs: Sequence[Output]) -> bytes:
        if not outputs:
            return b"".join(map(named_event, self._response_events.begin()))
        return b"".join(named_event(event) for output in outputs for event in self._response_events.feed(output))

    def end(self) -> bytes:
        last = b"".join(map(named_event, self._response_events.end()))
        self._finished()
        return last

    def fail(self, error: Exception) -> bytes:
        last = b"".join(map(named_event, self._response_events.fail(error)))
        self._finished()
        return last
