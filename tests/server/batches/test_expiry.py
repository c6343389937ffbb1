"""What ends by itself on /v1/files and /v1/batches: files and batches whose time is over; and what a batch has used by then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.server.batches.test_batches_over_http import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ended,
    files_in,
    folder,
    jsonl,
    line,
    records,
    submit,
    upload,
)
from tests.server.conftest import stop_batches
from tests.server.test_refusals import error_of

__all__ = ["folder"]  # the fixture
HOUR_S = 3600
LATER = {"anchor": "created_at", "seconds": HOUR_S}


async def upload_until(client, *lines):
    return await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch", expires_after=LATER)


def pass_time(server, seconds: float) -> None:
    """Moves the clock of files, and has it looked at."""
    files = server.service.batch_folder.files
    now = files.clock() + seconds
    files.clock = lambda: now
    server.service.batches.expiry.look_again()


async def until_deleted(server, folder: str, id: str) -> None:
    """Every look is a request, so there is nothing to sleep for."""
    while any(name.startswith(id) for name in files_in(folder)):
        await server.http.get("/health")


def change(folder: str, kind: str, how: Callable[[dict], dict]) -> None:
    """What is known of the one file or batch that a folder has."""
    (path,) = Path(folder).glob(f"{kind}/*.json")
    path.write_text(json.dumps(how(json.loads(path.read_text()))))


# --- files --------------------------------------------------------------------------------------------------------


async def test_a_file_that_expires_says_when_and_is_deleted_then(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        kept = await upload(client, line("a"))
        file = await upload_until(client, line("b"))
        assert (kept.expires_at, file.expires_at) == (None, file.created_at + HOUR_S)
        assert (await client.files.retrieve(file.id)).expires_at == file.expires_at
        pass_time(server, HOUR_S + 1)
        for call in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [each.id async for each in client.files.list()] == [kept.id]
        await until_deleted(server, folder, file.id)
        assert len(files_in(folder)) == 2  # those of the other


async def test_it_is_deleted_after_a_restart_too(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        file = await upload_until(client, line("a"))
    await stop_batches(server.service)
    change(folder, "files", lambda kept: kept | {"expires_at": file.created_at - 1})
    again = await serve(batch_dir=folder)
    await until_deleted(again, folder, file.id)


async def test_a_batch_reads_its_file_to_the_end_which_then_goes(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        file = await upload_until(client, line("a"), line("b"))
        batch = await client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        await server.engine.until(lambda: bool(server.engine.live))
        pass_time(server, HOUR_S + 1)
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        assert any(name.startswith(file.id) for name in files_in(folder))
        server.engine.step(20)
        await server.engine.until(lambda: len(server.engine.submitted) == 2)
        server.engine.step(20)
        assert (await ended(client, batch.id)).request_counts.completed == 2
        await until_deleted(server, folder, file.id)


async def test_the_answers_of_a_batch_may_expire(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b", temperature=9), output_expires_after=LATER)
        batch = await ended(client, batch.id)
        for id in (batch.output_file_id, batch.error_file_id):
            file = await client.files.retrieve(id)
            assert file.expires_at == file.created_at + HOUR_S
        pass_time(server, HOUR_S + 2)
        await until_deleted(server, folder, batch.output_file_id)
        assert (await client.batches.retrieve(batch.id)).status == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "last_used", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[days]": "1"}, "expires_after.days"),
    ],
)
async def test_an_expiry_that_cannot_be_is_refused(serve, folder, fields, param):
    server = await serve(batch_dir=folder)
    response = await server.http.post("/v1/files", data={"purpose": "batch", **fields}, files={"file": b"x"})
    assert error_of(response, 400)["param"] == param
    assert files_in(folder) == []


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86_400), ("1h", 3600), ("7d", 604_800)])
async def test_a_batch_says_until_when_it_is_worked_on(serve, folder, window, seconds):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        file = await upload(client, line("a"))
        batch = await client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window=window)
        batch = await ended(client, batch.id)
        assert (batch.completion_window, batch.expires_at - batch.created_at) == (window, seconds)
        assert (batch.status, batch.expired_at) == ("completed", None)


async def check_expired(client, id: str, *, answered: list[str], given_up: list[str]) -> None:
    batch = await ended(client, id)
    assert batch.status == "expired"
    assert batch.expired_at >= batch.created_at
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(answered), len(given_up))
    assert [each["custom_id"] for each in await records(client, batch.output_file_id)] == answered
    errors = await records(client, batch.error_file_id)
    assert [each["custom_id"] for each in errors] == given_up
    assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, "batch_expired")}


async def test_what_is_not_answered_when_the_time_is_over_is_given_up(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b"), line("c"))
        await server.engine.until(lambda: len(server.engine.live) == 1)
        server.engine.step(20)
        await server.engine.until(lambda: len(server.engine.submitted) == 2)
        server.service.batches.expire(batch.id)
        await check_expired(client, batch.id, answered=["a"], given_up=["b", "c"])
        assert not server.engine.live


async def test_a_batch_whose_time_was_over_while_no_process_ran_is_given_up_at_the_start(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b"))
        await server.engine.until(lambda: len(server.engine.live) == 1)
        server.engine.step(20)
        await server.engine.until(lambda: len(server.engine.submitted) == 2)
    await stop_batches(server.service)
    change(folder, "batches", lambda kept: kept | {"times": {name: at - 86_401 for name, at in kept["times"].items()}})
    again = await serve(batch_dir=folder, paused=True)
    async with again.openai() as client:
        await check_expired(client, batch.id, answered=["a"], given_up=["b"])


async def test_a_batch_that_has_ended_does_not_expire(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        batch = await ended(client, (await submit(client, line("a"))).id)
        server.service.batches.expire(batch.id)
        assert (await client.batches.retrieve(batch.id)).status == "completed"


# --- usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
async def test_a_batch_adds_up_what_its_answers_used(serve, folder, endpoint):
    server = await serve(batch_dir=folder)
    server.engine.num_cached_tokens = 1
    async with server.openai() as client:
        lines = [*(line(str(number), endpoint) for number in range(3)), line("bad", endpoint, temperature=9)]
        batch = await ended(client, (await submit(client, *lines, endpoint=endpoint)).id)
        used = [each["response"]["body"]["usage"] for each in await records(client, batch.output_file_id)]
        names = ("input_tokens", "output_tokens") if endpoint == RESPONSES else ("prompt_tokens", "completion_tokens")
        sums = [sum(each[name] for each in used) for name in names]
        assert [batch.usage.input_tokens, batch.usage.output_tokens] == sums
        assert min(sums) > 0
        assert batch.usage.total_tokens == sum(sums)
        assert batch.usage.input_tokens_details.cached_tokens == 3
        assert batch.usage.output_tokens_details.reasoning_tokens == 0


async def test_the_usage_is_the_same_over_a_restart(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b"))
        await server.engine.until(lambda: len(server.engine.live) == 1)
        server.engine.step(20)
        await server.engine.until(lambda: len(server.engine.submitted) == 2)
        half = (await client.batches.retrieve(batch.id)).usage
    await stop_batches(server.service)
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        batch = await ended(client, batch.id)
        assert batch.usage.total_tokens == 2 * half.total_tokens > 0
    await stop_batches(again.service)
    third = await serve(batch_dir=folder)
    async with third.openai() as client:
        assert (await client.batches.retrieve(batch.id)).usage == batch.usage


# --- keys ---------------------------------------------------------------------------------------------------------


async def test_lines_find_what_the_key_that_made_the_batch_has_prompted_and_no_other_does(serve, folder):
    async def salt_of_batch(key: str) -> str | None:
        async with server.openai(key) as client:
            await ended(client, (await submit(client, line("a"))).id)
        return server.engine.submitted[-1].cache_salt

    async def salt_of_request(key: str) -> str | None:
        body = {"prompt": "Hi"}
        answer = await server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        return server.engine.submitted[-1].cache_salt

    server = await serve(batch_dir=folder, api_key=("one", "two"), admin_api_key="admin")
    salts = {key: await salt_of_batch(key) for key in ("one", "two", "admin")}
    assert len(set(salts.values())) == 3
    assert None not in salts.values()
    assert salts == {key: await salt_of_request(key) for key in salts}
