"""The longest that the event loop is busy at a time while hostile pictures are sent, eight at once: processor time of its
thread, which other processes do not show in, beside the same with small pictures.

    python -m tests.benches.hostile_media"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import tempfile
import time
from asyncio import events
from pathlib import Path

import httpx

from server.config.server_config import ServerConfig
from server.models.chat_format import ChatFormat
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from tests.fakes import FakeEngine, fake_model
from tests.server.conftest import running
from tests.server.media import test_images
from tests.server.media.pictures import drawn, png, stored
from tests.server.media.processors import written
from tests.server.media.reading import reader
from tests.server.tiny import loaded_model

HOSTILE = [data for data, _ in test_images.HOSTILE.values()] + [
    png(8000, 8000),
    stored(drawn(4000, 4000)),
    bytes(20 << 20),
]
GOOD = [stored(drawn(64, 64))] * len(HOSTILE)


async def longest(tiny, files: list[bytes]) -> tuple[float, float, list[int]]:
    """Seconds of the longest callback, and of all, of the loop's thread; and what was answered."""
    spoken, media = Tokenizer.from_folder(tiny.folder), reader(tiny)
    model = fake_model(vocab_size=spoken.vocab_size, modalities=media.modalities)
    template = ChatTemplate(spoken.chat_template, spoken.named_tokens)
    engine = FakeEngine(model=model)
    loaded = loaded_model(engine, spoken, template, sampling_defaults(), ("tiny",), ChatFormat())
    loaded = dataclasses.replace(loaded, media=media)
    lifecycle = Lifecycle()
    lifecycle.ready(loaded)
    took: list[float] = []
    run = events.Handle._run

    def timed(handle: events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        took.append(time.thread_time() - began)

    async with running(engine, spoken, lifecycle, ServerConfig(access_log=False)) as server:
        gate = asyncio.Semaphore(8)
        bodies = [
            {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}
            ]}]}
            for data in files
        ]  # fmt: skip
        sent = [
            httpx.Request("POST", f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body) for body in bodies
        ]

        def post(request: httpx.Request) -> int:
            with httpx.Client(timeout=300) as client:
                return client.send(request).status_code

        async def one(request: httpx.Request) -> int:
            async with gate:
                return await asyncio.to_thread(post, request)

        await one(sent[0])
        events.Handle._run = timed
        try:
            codes = await asyncio.gather(*[one(request) for request in sent])
        finally:
            events.Handle._run = run
    return max(took), sum(took), codes


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny = written("llava", Path(folder))
        for name, files in (("small pictures", GOOD), ("hostile ones", HOSTILE)) * 2:
            most, total, codes = asyncio.run(longest(tiny, files))
            answers = ", ".join(str(code) for code in sorted(set(codes)))
            print(f"{name}: longest {1000 * most:.1f} ms, {1000 * total:.0f} in all, {len(files)} requests: {answers}")


if __name__ == "__main__":
    main()
