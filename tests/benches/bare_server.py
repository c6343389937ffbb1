"""What the HTTP layer is measured against: a bare Starlette StreamingResponse with orjson per chunk, and nothing else.

`python -m tests.benches.bare_server` prints its port. Every open request gets a token from an asyncio.Queue of its own in each
round of the event loop; no tokenizer, no stop strings, no disconnect race, no error shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from server.process.listening import listen

queues: set[asyncio.Queue[str | None]] = set()
tasks: list[asyncio.Task[None]] = []


async def produce() -> None:
    produced: dict[asyncio.Queue[str | None], int] = {}
    while queues:
        for queue in tuple(queues):
            done = produced[queue] = produced.get(queue, 0) + 1
            queue.put_nowait(" token")
            if done == queue.limit:  # type: ignore[attr-defined]
                queue.put_nowait(None)
                queues.discard(queue)
                del produced[queue]
        await asyncio.sleep(0)
    tasks.clear()


async def completions(request: Request) -> StreamingResponse:
    wanted = orjson.loads(await request.body())
    queue: asyncio.Queue[str | None] = asyncio.Queue()
    queue.limit = wanted["max_tokens"]  # type: ignore[attr-defined]
    queues.add(queue)
    if not tasks:
        tasks.append(asyncio.create_task(produce()))

    async def body() -> AsyncIterator[bytes]:
        while (text := await queue.get()) is not None:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
            chunk = {
                "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion",
                "created": 1700000000, "model": "smollm2-135m-instruct", "choices": [choice],
            }  # fmt: skip
            yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


async def main() -> None:
    sock = listen("127.0.0.1", 0)
    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", log_config=None, access_log=False))
    print(sock.getsockname()[1], flush=True)
    await server.serve(sockets=[sock])


if __name__ == "__main__":
    uvloop.run(main())
