"""A whole server on a loopback port in the test's own event loop, over a FakeEngine: nothing below HTTP is left out."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from runtime.api import PoolerInfo, SamplingParams
from runtime.parallel.replicas import Replicas
from server.api.service import Service
from server.config.server_config import ServerConfig
from server.generate.structured import compiler
from server.http.clients import Clients
from server.media.reader import MediaReader, NoMedia
from server.models.chat_format import ChatFormat
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from server.models.pooling import PoolerConfig, Prompts, ServedPooling
from server.models.prompt import ChatTemplate
from server.models.score_template import ScoreTemplate
from server.models.tokenizer import Tokenizer
from server.process.listening import listen
from server.process.serve import HttpServer, http_server
from tests.fakes import FakeEngine, fake_model
from tests.server.swapping import TOKENIZER, Turns
from tests.server.tiny import EOS, chatml, loaded_model, tiny_tokenizer

if TYPE_CHECKING:
    import anthropic
    import ollama

MESSAGES = [{"role": "user", "content": "Hi"}]
# Nobody speaks TLS here, and every client would read all the authorities of the web first: 24 ms, half of what most tests take.
NO_TLS: dict[str, Any] = {"verify": False}


@pytest.fixture(autouse=True)
def _no_limit_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take as long as a slow machine needs; tests of these limits set their own."""
    monkeypatch.setattr(compiler, "MAX_COMPILE_S", 3600.0)
    monkeypatch.setattr(compiler, "MAX_FIRST_MASK_S", 3600.0)


class Running:
    """A server that runs, and ways to talk to it."""

    def __init__(
        self, service: Service, engine: FakeEngine, tokenizer: Tokenizer, port: int, clients: Clients | None = None
    ) -> None:
        self.service = service
        self._clients = clients
        self.engine = engine
        self.tokenizer = tokenizer
        self.port = port
        # A hang is the test's to end.
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, **NO_TLS)
        self._writers: list[asyncio.StreamWriter] = []
        self._official: list[openai.AsyncOpenAI | anthropic.AsyncAnthropic | ollama.AsyncClient] = []

    async def leave(self) -> None:
        """Close what the test has opened, as far as it has not itself."""
        await self.http.aclose()
        for client in self._official:
            await client.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def clients(self) -> Clients:
        assert self._clients is not None
        return self._clients

    async def raw(self) -> RawClient:
        """A connection on which nothing was sent yet."""
        return RawClient(*await self._connect(2**24))

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def while_it_waits(self, path: str, body: Any, act: Callable[[], object]) -> httpx.Response:
        """The answer to a request that the paused engine has when `act` is called."""
        answer = asyncio.create_task(self.post(path, body))
        await self.engine.until(lambda: bool(self.engine.live))
        act()
        return await answer

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": MESSAGES, **fields})

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "Hi", **fields})

    async def respond(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/responses", {"input": "Hi", **fields})

    async def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The JSON of a whole stream's events, which has to end as streams do."""
        response = await self.post(path, {"stream": True, **fields})
        assert response.status_code == 200, response.text
        events = response.text.split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def openai(self, api_key: str = "none") -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(**NO_TLS)
        base = f"http://127.0.0.1:{self.port}/v1"
        self._official.append(openai.AsyncOpenAI(base_url=base, api_key=api_key, max_retries=0, http_client=http))
        return self._official[-1]

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        import anthropic  # two seconds, for few tests

        base = f"http://127.0.0.1:{self.port}"
        http = anthropic.DefaultAsyncHttpxClient(**NO_TLS)
        client = anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0, http_client=http, **options)
        self._official.append(client)
        return client

    def ollama(self, **options: Any) -> ollama.AsyncClient:
        import ollama

        client = ollama.AsyncClient(host=f"http://127.0.0.1:{self.port}", **options, **NO_TLS)
        self._official.append(client)
        return client

    async def open_stream(self, path: str, **fields: Any) -> RawAnswer:
        """A connection on which `fields` were posted, to be read (or not) byte by byte."""
        payload = json.dumps(fields).encode()
        reader, writer = await self._connect(2**20)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        return RawAnswer(reader, writer)

    async def _connect(self, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        self._writers.append(writer)
        return reader, writer


class RawClient:
    """A client that sends what it likes, and reads answers whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def port(self) -> int:
        """This end's own."""
        found: int = self._writer.get_extra_info("sockname")[1]
        return found

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer, which has a Content-Length."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *fields = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        return int(status.split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    async def rest(self) -> bytes:
        """All until the server closes."""
        return await self._reader.read()

    def leave(self) -> None:
        self._writer.transport.abort()


class RawAnswer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self) -> str:
        return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" is the end."""
        size = int(await self._reader.readline(), 16)
        body = await self._reader.readexactly(size)
        await self._reader.readexactly(2)
        return body

    async def chunks(self) -> list[bytes]:
        found = []
        while body := await self.chunk():
            found.append(body)
        return found

    def leave(self) -> None:
        self._writer.transport.abort()


Start = Callable[..., Awaitable[Running]]


@asynccontextmanager
async def running(
    engine: FakeEngine, tokenizer: Tokenizer, lifecycle: Lifecycle, config: ServerConfig
) -> AsyncIterator[Running]:
    service = Service(config, lifecycle)
    server = http_server(service)
    sock = listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    running = Running(service, engine, tokenizer, sock.getsockname()[1], server.clients)
    try:
        yield running
    finally:
        await running.leave()
        await stop_batches(service)
        await engine.close()
        await close(server, task)
        service.offload.close()


async def stop_batches(service: Service) -> None:
    """Leave unfinished batches to the next server on their folder, as the end of a process does."""
    if service.batches is not None and service.batch_folder is not None:
        await service.batches.close()
        service.batch_folder.close()


async def close(server: HttpServer, serving: asyncio.Task[None]) -> None:
    """As its own shutdown does, but without the tenths of a second that uvicorn sleeps there, which every test would wait for."""
    serving.cancel()
    await asyncio.wait({serving})
    for listener in server.servers:
        listener.close()
    for connection in [*server.server_state.connections]:
        connection.shutdown()
    await asyncio.gather(*server.server_state.tasks)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


Lasting = tuple[asyncio.Runner, Running]


@pytest.fixture(scope="module")
def lasting(tokenizer: Tokenizer) -> Iterator[Lasting]:
    """One server for many examples, in a loop that turns only while the runner runs something: for tests that are no coroutines,
    as hypothesis' are."""
    with lasting_server(tokenizer) as server:
        yield server


@contextmanager
def lasting_server(tokenizer: Tokenizer, pooler: PoolerInfo | None = None) -> Iterator[Lasting]:
    ids = [*tokenizer.encode("Hello there"), EOS]
    facts = {} if pooler is None else {"pooler": pooler, "generates": False}
    model = fake_model(vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset({EOS}), max_model_len=512, **facts)
    engine, lifecycle, template = FakeEngine(lambda request: ids, model=model), Lifecycle(), chatml(tokenizer)
    config = ServerConfig(served_model_name=("tiny",), access_log=False)
    chat_format = ChatFormat.choose(
        tokenizer.chat_template, template, tokenizer, tool_parser="auto", reasoning_parser="auto"
    )
    loaded = loaded_model(engine, tokenizer, template, sampling_defaults(), ("tiny",), chat_format)
    pooling = None if pooler is None else ServedPooling.of(model, tokenizer, PoolerConfig(), "auto", Prompts())
    lifecycle.ready(dataclasses.replace(loaded, pooling=pooling))
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield runner, runner.run(stack.enter_async_context(running(engine, tokenizer, lifecycle, config)))
        runner.run(stack.aclose())


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Start]:
    """`await serve(says="...")`: a server whose model says that and ends. `script` for more, `loaded=False` for less, `speaks`
    for another tokenizer and its chat template, `template` for another one of these, `pooler` for a model that is pooled,
    `score_template` for its prompt of pairs, `media` for a model that sees, `more_engines` for replicas beside the
    one that it has; other options are the server's."""
    async with AsyncExitStack() as stack:

        async def start(
            says: str | None = "Hello there",
            *,
            script: Any = None,
            paused: bool = False,
            loaded: bool = True,
            defaults: SamplingParams | None = None,
            max_model_len: int = 512,
            chat: bool = True,
            pooler: PoolerInfo | None = None,
            generates: bool = False,
            prompts: Prompts | None = None,
            speaks: Tokenizer | None = None,
            template: ChatTemplate | None = None,
            score_template: ScoreTemplate | None = None,
            media: MediaReader | NoMedia | None = None,
            more_engines: tuple[FakeEngine, ...] = (),
            **options: Any,
        ) -> Running:
            spoken = speaks or tokenizer
            ids = [*spoken.encode(says or ""), EOS]
            facts = {} if pooler is None else {"pooler": pooler, "generates": generates, "architecture": "FakeModel"}
            media = media or NoMedia()
            facts["modalities"] = media.modalities
            facts["takes_embeds"] = bool(options.get("enable_prompt_embeds"))
            model = fake_model(
                vocab_size=spoken.vocab_size, eos_token_ids=frozenset({EOS}), max_model_len=max_model_len, **facts
            )
            engine = FakeEngine(script or (lambda request: ids), model=model, paused=paused)
            lifecycle = Lifecycle()
            template = template or (chatml(spoken) if chat else ChatTemplate(None))
            names = options.pop("served_model_name", ("tiny",))
            config = ServerConfig(served_model_name=names, **options)
            chat_format = ChatFormat.choose(
                spoken.chat_template, template, spoken,
                tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser,
            )  # fmt: skip
            if loaded:
                served = Replicas([engine, *more_engines]) if more_engines else engine
                loaded = loaded_model(
                    served, spoken, template, defaults or sampling_defaults(), config.served_names, chat_format
                )
                allowed = config.allow_special_tokens
                pooling = None
                if pooler is not None:
                    asked = PoolerConfig.read(config.pooler_config)
                    pooling = ServedPooling.of(
                        model, spoken, asked, config.convert, prompts or Prompts(), score_template
                    )
                lifecycle.ready(
                    dataclasses.replace(
                        loaded,
                        allow_special_tokens=allowed,
                        pooling=pooling,
                        media=media,
                        takes_any_name=config.takes_any_name,
                    )
                )
            return await stack.enter_async_context(running(engine, spoken, lifecycle, config))

        yield start


@pytest.fixture
async def several() -> AsyncIterator[Callable[..., Awaitable[tuple[Running, Turns]]]]:
    """`await several("abc")`: a server of models called so, the first of which is loaded, and what a test holds of them."""
    async with AsyncExitStack() as stack:

        async def start(letters: str = "ab", *, paused: bool = False, **options: Any) -> tuple[Running, Turns]:
            turns = Turns(letters, paused=paused)
            lifecycle = Lifecycle()
            lifecycle.ready(dataclasses.replace(await turns.begin(), add=turns.add))
            config = ServerConfig(models=tuple(letters), **options)
            engine = turns.sources["a"].engine
            server = await stack.enter_async_context(running(engine, TOKENIZER, lifecycle, config))
            stack.push_async_callback(turns.close_engines)
            stack.callback(turns.swaps.close)
            return server, turns

        yield start
