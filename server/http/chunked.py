"""ChunkedJson: a JSON answer that is there in chunks, each sent when the one before it has gone: a large body is never copied
whole, and no write takes long."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send


class ChunkedJson:
    """A plain ASGI response of `chunks`, whose length is known."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = str(sum(map(len, self._chunks))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = len(self._chunks) - 1
        for number, chunk in enumerate(self._chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": number < last})
