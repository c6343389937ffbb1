"""oneloop.asgi: the server's application in somebody's own, on uvicorn with either of its event loops."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx
import openai
import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import oneloop
from tests.server.conftest import NO_TLS
from tests.server.test_llm import fake  # noqa: F401

MESSAGES = [{"role": "user", "content": "Hi"}]
LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


class Server(uvicorn.Server):
    """uvicorn in the test's loop, without its signals."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(app):
    """The URL of `app`, behind uvicorn with its own settings."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started and not task.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="secret", max_retries=0, http_client=httpx.AsyncClient(**NO_TLS)
    )


async def text_of(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


def run(work, loop_factory=None):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(work)


@LOOPS
def test_a_mounted_application_streams_to_the_official_client(fake, loop_factory):  # noqa: F811
    llm = oneloop.asgi(model="tiny")

    async def own(request):
        params = oneloop.SamplingParams(output_kind=oneloop.RequestOutputKind.FINAL_ONLY)
        output = await anext(llm.llm.generate("own", params))
        return PlainTextResponse(output.outputs[0].text)

    async def program():
        app = Starlette(routes=[Route("/own", own), Mount("/llm", llm)], lifespan=llm.lifespan)
        async with serving(app) as url, client_of(f"{url}/llm") as client, httpx.AsyncClient(**NO_TLS) as http:
            assert await asyncio.gather(text_of(client), text_of(client)) == ["USER\nHI\nASSISTANT\n"] * 2
            assert (await http.get(f"{url}/own")).text == "OWN"
            page = await http.get(f"{url}/llm/")
            assert page.headers["content-type"].startswith("text/html")
            assert (await http.get(f"{url}/llm/health")).json()["status"] == "ok"
            with pytest.raises(openai.NotFoundError, match="nowhere"):
                await client.get("/nowhere", cast_to=object)
            assert (await http.get(f"{url}/v1/models")).status_code == 404
            assert not fake.engine.closed
        assert fake.engine.closed

    run(program(), loop_factory)


def test_by_itself_it_needs_no_other_application(fake):  # noqa: F811
    async def program():
        async with serving(oneloop.asgi(model="tiny", api_key="secret")) as url, client_of(url) as client:
            assert await text_of(client) == "USER\nHI\nASSISTANT\n"
            assert (await client.models.list()).data[0].id == "tiny"
            async with httpx.AsyncClient(**NO_TLS) as http:
                assert (await http.get(f"{url}/v1/models")).status_code == 401
        assert fake.engine.closed

    run(program())


def test_a_client_that_leaves_frees_its_sequence(fake):  # noqa: F811
    fake.paused = True
    llm = oneloop.asgi(model="tiny")

    async def program():
        app = Starlette(routes=[Mount("/llm", llm)], lifespan=llm.lifespan)
        async with serving(app) as url, client_of(f"{url}/llm") as client:
            asked = asyncio.create_task(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
            await fake.engine.until(lambda: len(fake.engine.live) == 1)
            fake.engine.step()
            async with await asked as chunks:
                await anext(aiter(chunks))
            await fake.engine.until(lambda: not fake.engine.live)

    run(program())


def test_an_operators_route_needs_a_key(fake):  # noqa: F811
    async def program():
        async with serving(oneloop.asgi(model="tiny")) as url, httpx.AsyncClient(**NO_TLS) as http:
            assert (await http.post(f"{url}/reset_prefix_cache")).status_code == 403
            assert fake.engine.num_resets == 0

    run(program())


def test_mounted_without_its_lifespan_it_says_what_is_missing(fake):  # noqa: F811
    async def program():
        app = Starlette(routes=[Mount("/llm", oneloop.asgi(model="tiny"))])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            with pytest.raises(RuntimeError, match=r"lifespan=app\.lifespan"):
                await http.get("/llm/v1/models")

    run(program())


def test_a_model_that_cannot_load_ends_the_start(fake, caplog):  # noqa: F811
    async def program():
        await Server(uvicorn.Config(oneloop.asgi(model="broken"), log_config=None, lifespan="on")).serve(sockets=[])

    with pytest.raises(SystemExit):
        run(program())
    assert "model.safetensors is truncated" in caplog.text


def test_it_starts_again_after_its_end(fake):  # noqa: F811
    app = oneloop.asgi(model="tiny")

    async def program():
        for _ in range(2):
            async with app.lifespan():
                assert (await anext(app.llm.generate("a"))).outputs[0].text == "A"
            assert fake.engine.closed

    run(program())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 80}, "unknown option 'port'"),
        ({"api_keys": "a"}, r"unknown option 'api_keys' \(did you mean api_key\?\)"),
        ({"drain_timeout": "soon"}, "drain_timeout"),
        ({"embedding_model": "tiny"}, "--embedding-model tiny is also a name of --model"),
    ],
)
def test_options_are_those_of_serve_but_for_the_process(options, words):
    with pytest.raises(ValueError, match=words):
        oneloop.asgi(model="tiny", **options)
