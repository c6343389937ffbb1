"""/api/pull and /api/delete with Ollama's official client: a library of the test takes the disk's place."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import ollama
import pytest

from runtime.api import LoadProgress
from server.config.parse import parse
from server.config.server_options import ConfigError

ON = {"enable_model_management": True}


class Shelf:
    """A library that has `here`. A pull reports, then waits until `may_end` is set; without one, until it is cancelled."""

    def __init__(self, *here: str, may_end: threading.Event | None = None) -> None:
        self.here = {*here}
        self.may_end = may_end
        self.began, self.was_cancelled = threading.Event(), threading.Event()

    def pull(self, name, revision, report, cancel) -> Path:
        if name == "typo":
            raise ValueError("'typo' is neither a name; did you mean b?")
        report(LoadProgress("download", 4, 10, "B"))
        self.began.set()
        if self.may_end is None:
            cancel.wait()
            self.was_cancelled.set()
            raise ValueError("the download was cancelled")
        self.may_end.wait()
        self.here.add(name)
        return Path("/")

    def kept(self):
        return [{"name": name} for name in self.here]

    def remove(self, name):
        if name not in self.here:
            raise ValueError(f"{name} is not on this disk")
        self.here.remove(name)


async def start(several, shelf: Shelf, **options):
    server, turns = await several("a", **{**ON, **options})
    server.service.library = shelf
    return server, turns


async def test_a_pull_shows_its_progress_and_serves_the_model(several):
    shelf = Shelf(may_end=threading.Event())
    server, _ = await start(several, shelf)
    seen = []
    async for part in await server.ollama().pull("b", stream=True):
        seen.append((part.status, part.completed, part.total))
        if part.status == "pulling":
            shelf.may_end.set()
    assert seen[0] == ("pulling manifest", None, None)
    assert seen[1] == ("pulling", 4, 10)
    assert seen[-1] == ("success", None, None)
    assert [model.model for model in (await server.ollama().list()).models] == ["a:latest", "b:latest"]
    answer = await server.ollama().chat("b", [{"role": "user", "content": "Hi"}])
    assert answer.model == "b"


async def test_a_pull_without_a_stream_is_one_answer(several):
    shelf = Shelf(may_end=threading.Event())
    shelf.may_end.set()
    server, _ = await start(several, shelf)
    assert (await server.ollama().pull("b")).status == "success"
    assert (await server.ollama().pull("b:latest")).status == "success"
    assert [model.model for model in (await server.ollama().list()).models] == ["a:latest", "b:latest"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_pull_that_fails_says_why(several, stream):
    server, _ = await start(several, Shelf())

    async def pull() -> None:
        parts = await server.ollama().pull("typo", stream=stream)
        async for _ in parts:
            continue

    with pytest.raises(ollama.ResponseError, match="did you mean b"):
        await pull()
    assert len((await server.ollama().list()).models) == 1


async def test_a_client_that_leaves_cancels_its_pull(several):
    shelf = Shelf()
    server, _ = await start(several, shelf)
    stream = await server.open_stream("/api/pull", model="b")
    await stream.head()
    await asyncio.to_thread(shelf.began.wait)
    stream.leave()
    await asyncio.to_thread(shelf.was_cancelled.wait)
    assert shelf.here == set()


async def test_a_model_that_nobody_has_used_is_deleted(several):
    shelf = Shelf("b")
    server, turns = await start(several, shelf)
    turns.add("b")
    await server.ollama().delete("b")
    assert shelf.here == set()
    assert [model.model for model in (await server.ollama().list()).models] == ["a:latest"]
    with pytest.raises(ollama.ResponseError) as raised:
        await server.ollama().delete("b")
    assert raised.value.status_code == 404


async def test_a_model_that_is_or_was_loaded_is_not_deleted(several):
    shelf = Shelf("a", "b")
    server, turns = await start(several, shelf)
    turns.add("b")
    await server.ollama().chat("b", [{"role": "user", "content": "Hi"}])
    for name in ("a", "b"):
        with pytest.raises(ollama.ResponseError, match="is loaded; restart the server without it") as raised:
            await server.ollama().delete(name)
        assert raised.value.status_code == 400
    assert shelf.here == {"a", "b"}


async def test_without_the_option_nothing_is_changed(several):
    shelf = Shelf("b")
    server, _ = await start(several, shelf, enable_model_management=False)
    for call in (server.ollama().pull("b"), server.ollama().delete("b")):
        with pytest.raises(ollama.ResponseError, match="--enable-model-management") as raised:
            await call
        assert raised.value.status_code == 400
    assert shelf.here == {"b"}


async def test_a_users_key_may_not_change_models(several):
    server, _ = await start(several, Shelf("b"), api_key=("user",), admin_api_key="admin")
    body = {"model": "b"}
    for key, status in (("user", 403), ("admin", 404)):
        headers = {"Authorization": f"Bearer {key}"}
        response = await server.http.request("DELETE", "/api/delete", json={"model": "c"}, headers=headers)
        assert response.status_code == status
    refused = await server.post("/api/pull", body, headers={"Authorization": "Bearer user"})
    assert refused.status_code == 403


def test_options_of_one_model_contradict_the_management_of_several():
    assert parse(["--enable-model-management"], {}).enable_model_management
    with pytest.raises(
        ConfigError, match="--revision applies to one model, but --enable-model-management serves several"
    ):
        parse(["--enable-model-management", "--model", "a/b", "--revision", "x"], {})
