"""Replicas and their ingress in the test's own loop, over FakeEngines: what Ray Serve has in between is a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest

from server.config.server_config import ServerConfig
from server.http.errors import ReplicaLost
from server.models.defaults import sampling_defaults
from server.ray.channel import Delivery, Mailbox
from server.ray.exchange import Exchange, Forwarded, ReplicaAnswer, ResponseHead
from server.ray.ingress import ingress_app
from server.ray.replica import Replica
from tests.fakes import FakeEngine, fake_model
from tests.server.tiny import EOS, VOCAB_SIZE, chatml, loaded_model, tiny_tokenizer


class LocalFleet:
    """All requests go to the first replica. `lost`: set, it is gone, wherever an answer stands."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self.lost = asyncio.Event()
        self.requests: list[Forwarded] = []
        self.mailbox = Mailbox("127.0.0.1")

    async def answer(self, request: Forwarded) -> Delivery:
        self.requests.append(request)
        box = await self.mailbox.open()
        called = asyncio.ensure_future(self.replicas[0].deliver(request, box.reply_to))
        return Delivery(box, self._unless_lost(called), called.cancel)

    async def _unless_lost(self, called: asyncio.Future[None]) -> None:
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({called, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not called.done():
                called.cancel()
                raise ReplicaLost
            called.result()
        finally:
            lost.cancel()

    async def answer_all(self, request: Forwarded) -> list[ReplicaAnswer]:
        return [await each.answer_whole(request) for each in self.replicas]


class Cluster:
    """Two replicas named a and b, whose engines say Hello, and an ingress."""

    def __init__(self, config: ServerConfig, *, paused: bool) -> None:
        tokenizer = tiny_tokenizer()
        ids = [*tokenizer.encode("Hello"), EOS]
        model = fake_model(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
        self.engines = [FakeEngine(lambda request: ids, model=model, paused=paused) for _ in "ab"]
        self._loaded = {
            name: loaded_model(engine, tokenizer, chatml(tokenizer), sampling_defaults(), ("tiny",))
            for name, engine in zip("ab", self.engines, strict=True)
        }
        self.replicas = [Replica(config, self._load_of(name), name) for name in "ab"]
        self.fleet = LocalFleet(self.replicas)
        self.app = ingress_app(config, self.fleet)

    def _load_of(self, name: str):
        async def load(config, report, cancel):
            return self._loaded[name]

        return load

    def exchange(self, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> Exchange:
        raw = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        head = {
            "method": method, "scheme": "http", "http_version": "1.1", "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
        }  # fmt: skip
        return Exchange(self.app, Forwarded(head, raw, body))

    async def ask(
        self, path: str, body: bytes = b"", method: str = "POST", **headers: str
    ) -> tuple[ResponseHead, bytes]:
        """A whole answer."""
        async with aclosing(self.exchange(path, body, method, **headers).pieces()) as pieces:
            head, *rest = [piece async for piece in pieces]
        assert isinstance(head, ResponseHead)
        return head, b"".join(piece for piece in rest if isinstance(piece, bytes))


@pytest.fixture
async def cluster(request) -> AsyncIterator[Cluster]:
    """`@pytest.mark.parametrize("cluster", [{"paused": True, "api_key": ("k",)}], indirect=True)` for other options."""
    options = dict(getattr(request, "param", {}))
    made = Cluster(
        ServerConfig(**{k: v for k, v in options.items() if k != "paused"}), paused=options.get("paused", False)
    )
    for each in made.replicas:
        await each.start()
    yield made
    for each in made.replicas:
        await each.stop()
    await made.fleet.mailbox.close()
