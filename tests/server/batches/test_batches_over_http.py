"""/v1/files and /v1/batches with OpenAI's own client: uploads, batches in the background, restarts, owners and limits."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections import Counter
from pathlib import Path

import openai
import pytest

from runtime.api import EngineHealth
from server.batches import runner as batch_runner
from server.batches.files import FileStore, Shares
from server.batches.store import BatchStore
from server.config.server_options import ConfigError
from tests.server.conftest import MESSAGES, stop_batches
from tests.server.pooling.embedders import EMBEDDER

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
BODIES = {
    CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}, EMBEDDINGS: {"input": ["Hi", "Ho"]},
    SCORE: {"text_1": "Hi", "text_2": "Ho"}, RERANK: {"query": "Hi", "documents": ["Ho"]},
}  # fmt: skip


def line(custom_id: str | None, url: str = COMPLETIONS, **body) -> dict:
    made = {"method": "POST", "url": url, "body": {**BODIES[url], **body}}
    return made if custom_id is None else {"custom_id": custom_id, **made}


def jsonl(*lines: dict | str) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


async def upload(client, *lines, name: str = "in.jsonl"):
    return await client.files.create(file=(name, io.BytesIO(jsonl(*lines))), purpose="batch")


async def submit(client, *lines, endpoint: str = COMPLETIONS, **more):
    file = await upload(client, *lines)
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(client, id: str):
    """Every look is a request, so there is nothing to sleep for."""
    while True:
        batch = await client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch


async def records(client, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return sorted((json.loads(each) for each in content.text.splitlines()), key=lambda each: each["custom_id"] or "")


def cut_off(folder: str) -> None:
    """Takes the end of the one file of records, as a process that is killed may leave it."""
    (output,) = Path(folder).glob("batches/*.output.jsonl")
    output.write_bytes(output.read_bytes()[:-10])


def files_in(folder: str) -> list[str]:
    return [path.name for path in Path(folder).glob("files/*")]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "batches")


# --- batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("endpoint", "results"), [(EMBEDDINGS, "data"), (SCORE, "data"), (RERANK, "results")])
async def test_a_file_of_texts_is_embedded_and_compared(serve, folder, endpoint, results):
    server = await serve(batch_dir=folder, pooler=EMBEDDER)
    async with server.openai() as client:
        lines = [line(str(number), endpoint) for number in range(3)]
        batch = await ended(client, (await submit(client, *lines, endpoint=endpoint)).id)
        found = await records(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == ["0", "1", "2"]
    direct = (await server.post(endpoint, BODIES[endpoint])).json()
    assert all(each["response"]["body"][results] == direct[results] for each in found)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
async def test_a_file_of_requests_is_answered(serve, folder, endpoint):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        lines = [line(f"id-{number}", endpoint) for number in range(20)]
        begun = await submit(client, *lines, endpoint=endpoint, metadata={"for": "a test"})
        assert (begun.status, begun.endpoint, begun.metadata) == ("validating", endpoint, {"for": "a test"})
        batch = await ended(client, begun.id)
        assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        found = await records(client, batch.output_file_id)
        assert [each["custom_id"] for each in found] == sorted(each["custom_id"] for each in lines)
        assert {each["response"]["status_code"] for each in found} == {200}
        assert "Hello there" in json.dumps(found[0]["response"]["body"])
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_bad_lines_disturb_no_other_and_are_told_in_a_file_of_their_own(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        batch = await submit(
            client, line("good"), line("bad", temperature=9), line("other", CHAT), "no json", line(None),
            line("also good", stream=False), line("unknown", tempratur=1),
        )  # fmt: skip
        batch = await ended(client, batch.id)
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 2, 5)
        assert [each["custom_id"] for each in await records(client, batch.output_file_id)] == ["also good", "good"]
        errors = {each["custom_id"]: each for each in await records(client, batch.error_file_id)}
        assert errors["bad"]["response"]["status_code"] == 400
        assert errors["unknown"]["response"]["status_code"] == 400
        assert errors["other"]["error"]["param"] == "url"
        assert errors[None]["error"]["code"] == "invalid_line"


@pytest.mark.parametrize(
    ("lines", "code"),
    [([], "empty_file"), ([line("a"), line("b"), line("a")], "duplicate_custom_id")],
)
async def test_a_file_that_cannot_be_worked_on_fails_before_anything_starts(serve, folder, lines, code):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        batch = await ended(client, (await submit(client, *lines)).id)
        assert (batch.status, batch.errors.data[0].code, batch.output_file_id) == ("failed", code, None)
        assert not server.engine.submitted


async def test_lists_come_in_pages_with_the_newest_first(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        begun = [(await ended(client, (await submit(client, line("a"))).id)).id for _ in range(3)]
        assert sorted([batch.id async for batch in client.batches.list(limit=2)]) == sorted(begun)
        files = [file async for file in client.files.list()]
        assert len([file for file in files if file.purpose == "batch"]) == 3
        only = [file.id async for file in client.files.list(purpose="batch_output", order="asc")]
        assert len(only) == 3
        assert (await server.http.get("/v1/batches?after=nothing")).status_code == 400


async def test_cancelling_keeps_what_is_answered(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=2)
    async with server.openai() as client:
        batch = await submit(client, *(line(str(number)) for number in range(5)))
        await server.engine.until(lambda: len(server.engine.live) == 2)
        first = server.engine.live[0]
        server.engine.step(20)  # the two end, and two more begin
        await server.engine.until(lambda: len(server.engine.submitted) == 4)
        cancelling = await client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 2)
        assert batch.cancelled_at is not None
        assert len(await records(client, batch.output_file_id)) == 2
        assert first not in server.engine.live
        await server.engine.until(lambda: not server.engine.live)
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(batch.id)


async def test_a_batch_gives_way_to_whoever_waits(serve, folder, monkeypatch):
    monkeypatch.setattr(batch_runner, "PAUSE_S", 0)
    server = await serve(batch_dir=folder)
    looked, healthy = [], server.engine.health

    def busy() -> EngineHealth:
        looked.append(len(server.engine.submitted))
        return EngineHealth(True, None, 0, 1)

    server.engine.health = busy
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b"))
        while len(looked) < 10:
            await client.batches.retrieve(batch.id)
        assert set(looked) == {0}
        assert (await client.completions.create(model="tiny", prompt="Hi")).choices  # who does not wait for the batch
        server.engine.health = healthy
        assert (await ended(client, batch.id)).status == "completed"


async def test_a_batch_leaves_a_place_for_who_comes_next(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=3)
    async with server.openai() as client:
        await submit(client, *(line(str(number)) for number in range(9)))
        await submit(client, *(line(str(number)) for number in range(9)))
        await server.engine.until(lambda: len(server.engine.live) == 3)
        answer = await server.open_stream(COMPLETIONS, prompt="Hi", stream=True)
        await server.engine.until(lambda: len(server.engine.live) == 4)
        assert len(server.engine.submitted) == 4
        callers = {request.caller for request in server.engine.submitted}
        assert len(callers) == 2  # all batches are one caller among others
        answer.leave()


async def test_the_time_of_those_who_wait_does_not_bind_lines(serve, folder):
    server = await serve(batch_dir=folder, request_timeout=5.0)
    async with server.openai() as client:
        await ended(client, (await submit(client, line("a"), line("b", timeout=60))).id)
        deadlines = [request.deadline_s for request in server.engine.submitted]
        assert deadlines.count(None) == 1
        await client.completions.create(model="tiny", prompt="Hi")
        assert server.engine.submitted[-1].deadline_s is not None


async def test_lines_are_behind_others_where_the_engine_goes_by_priority(serve, folder):
    server = await serve(batch_dir=folder, scheduling_policy="priority")
    async with server.openai() as client:
        await ended(client, (await submit(client, line("a"), line("b", priority=3))).id)
        assert sorted(request.priority for request in server.engine.submitted) == [3, 1000]


# --- restarts -----------------------------------------------------------------------------------------------------


async def test_after_a_restart_only_what_is_missing_is_done(serve, folder):
    lines = [line(str(number)) for number in range(6)] + ["no json"]
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=2)
    async with server.openai() as client:
        batch = await submit(client, *lines)
        await server.engine.until(lambda: len(server.engine.live) == 2)
        server.engine.step(20)
        await server.engine.until(lambda: len(server.engine.submitted) == 4)
    await stop_batches(server.service)
    done = len(server.engine.submitted) - 2
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        batch = await ended(client, batch.id)
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 6, 1)
        found = await records(client, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [str(number) for number in range(6)]
    assert len(again.engine.submitted) == 6 - done


async def test_a_record_that_was_cut_off_is_done_again(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b"))
        await server.engine.until(lambda: len(server.engine.live) == 1)
        server.engine.step(20)
        await server.engine.until(lambda: len(server.engine.submitted) == 2)
    await stop_batches(server.service)
    cut_off(folder)
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        batch = await ended(client, batch.id)
        assert [each["custom_id"] for each in await records(client, batch.output_file_id)] == ["a", "b"]
        assert batch.request_counts.completed == 2


async def test_a_process_that_ends_while_files_are_made_of_records_makes_them_once(serve, folder, monkeypatch):
    server = await serve(batch_dir=folder)
    real = BatchStore.save

    def save(store, batch) -> None:
        real(store, batch)
        if batch.status == "finalizing":
            raise OSError("the plug was pulled")

    monkeypatch.setattr(BatchStore, "save", save)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b", temperature=9))
        while batch.status != "finalizing":
            batch = await client.batches.retrieve(batch.id)
    await stop_batches(server.service)
    monkeypatch.undo()
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
        assert len(await records(client, batch.output_file_id)) == len(await records(client, batch.error_file_id)) == 1
    assert not again.engine.submitted


async def test_a_server_that_drains_leaves_the_rest_for_the_next(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        batch = await submit(client, line("a"), line("b"))
        await server.engine.until(lambda: len(server.engine.live) == 1)
        server.service.lifecycle.drain()
        await server.engine.until(lambda: not server.engine.live)  # who waits for nobody keeps nobody waiting
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 0
    await stop_batches(server.service)
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        assert (await ended(client, batch.id)).request_counts.completed == 2


async def test_an_engine_that_fails_costs_no_line_its_answer(serve, folder):
    server = await serve(batch_dir=folder, paused=True, max_batch_requests=1)
    async with server.openai() as client:
        batch = await submit(client, line("a"))
        await server.engine.until(lambda: len(server.engine.live) == 1)
        server.engine.unhealthy = "a step has been running for 130 s"
        server.engine.fail("it died")
        assert (await client.batches.retrieve(batch.id)).request_counts.failed == 0
    await stop_batches(server.service)
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        batch = await ended(client, batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


async def test_batches_wait_until_the_model_is_loaded(serve, folder):
    server = await serve(batch_dir=folder, paused=True)
    async with server.openai() as client:
        batch = await submit(client, line("a"))
    await stop_batches(server.service)
    loading = await serve(batch_dir=folder, loaded=False)
    async with loading.openai() as client:
        assert (await client.batches.retrieve(batch.id)).status in ("validating", "in_progress")
        assert (await client.files.content(batch.input_file_id)).text


async def test_one_process_at_a_time(serve, folder):
    await serve(batch_dir=folder)
    with pytest.raises(ConfigError, match="another process"):
        await serve(batch_dir=folder)


# --- files --------------------------------------------------------------------------------------------------------


async def test_a_file_can_be_read_and_deleted(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        file = await upload(client, line("a"), name="../../etc/passwd")
        assert (file.filename, file.purpose, file.bytes) == ("passwd", "batch", len(jsonl(line("a"))))
        assert (await client.files.content(file.id)).read() == jsonl(line("a"))
        assert (await client.files.retrieve(file.id)) == file
        assert (await client.files.delete(file.id)).deleted
        for call in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert files_in(folder) == []


async def test_files_are_there_after_a_restart_and_halves_of_them_are_not(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        file = await upload(client, line("a"))
    await stop_batches(server.service)
    (Path(folder) / "files" / "file-half.data").write_bytes(b"x")
    (Path(folder) / "files" / "file-odd.json").write_bytes(b"{")
    again = await serve(batch_dir=folder)
    async with again.openai() as client:
        assert [each.id async for each in client.files.list()] == [file.id]
    assert not (Path(folder) / "files" / "file-half.data").exists()


async def test_a_file_that_a_batch_needs_stays(serve, folder):
    server = await serve(batch_dir=folder, paused=True)
    async with server.openai() as client:
        batch = await submit(client, line("a"))
        with pytest.raises(openai.BadRequestError, match=batch.id):
            await client.files.delete(batch.input_file_id)


@pytest.mark.parametrize("length", [2000, 200_000])
async def test_a_file_too_large_is_refused(serve, folder, length):
    server = await serve(batch_dir=folder, max_batch_file_size=1024)
    async with server.openai() as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await upload(client, "x" * length)
    assert raised.value.status_code == 413
    assert files_in(folder) == []


async def test_number_and_size_of_all_files_are_bounded(serve, folder):
    server = await serve(batch_dir=folder, max_batch_files=2, max_batch_bytes=5000)
    async with server.openai() as client:
        await upload(client, "x" * 3000)
        with pytest.raises(openai.BadRequestError, match="bytes"):
            await upload(client, "x" * 3000)
        await upload(client, "x")
        with pytest.raises(openai.BadRequestError, match="at most 2 files"):
            await upload(client, "x")


async def test_what_is_being_uploaded_counts_too(serve, folder):
    server = await serve(batch_dir=folder, max_batch_bytes=5000)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        "Content-Length: 4000\r\n\r\n--b"
    )
    writer.write(head.encode())
    store = server.service.batch_folder.files
    async with server.openai() as client:
        while store.num_bytes < 4000:
            await client.files.list()
        with pytest.raises(openai.BadRequestError, match="bytes"):
            await upload(client, "x" * 3000)
        writer.transport.abort()
        while store.num_bytes:
            await client.files.list()
        await upload(client, "x" * 3000)
    assert store.num_bytes == 3000


async def test_the_document_says_that_an_upload_is_a_form(serve):
    server = await serve()
    described = (await server.http.get("/openapi.json")).json()["paths"]["/v1/files"]["post"]["requestBody"]
    assert list(described["content"]) == ["multipart/form-data"]


async def test_a_batch_without_room_for_its_answers_fails_and_says_so(serve, folder):
    server = await serve(batch_dir=folder, max_batch_bytes=1500, max_batch_requests=1)
    async with server.openai() as client:
        batch = await ended(client, (await submit(client, *(line(str(number)) for number in range(9)))).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
        assert 0 < batch.request_counts.completed < 9
        assert len(await records(client, batch.output_file_id)) == batch.request_counts.completed


async def test_forms_that_are_none_are_refused(serve, folder):
    server = await serve(batch_dir=folder)
    post = server.http.post
    for response, status in (
        (await post("/v1/files", json={"file": "x"}), 415),
        (await post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"}), 400),
        (await post("/v1/files", files={"file": b"x"}), 400),
        (await post("/v1/files", data={"purpose": "vision"}, files={"file": b"x"}), 400),
        (await post("/v1/files", data={"purpose": "batch", "x": "y" * 10_000}, files={"file": b"x"}), 400),
        (await post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400),
        (await post("/v1/files", data={"purpose": "batch"}, files=[("file", b"x"), ("file", b"y")]), 400),
    ):
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "charset", ["undefined", "punycode", "idna", "base64", "utf-7", "no such", "a" * 1000, 'utf-8"; charset="undefined']
)
async def test_a_form_in_an_unknown_charset_is_refused(serve, folder, charset):
    server = await serve(batch_dir=folder)
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xff"\r\n\r\nx\r\n--b--\r\n'
    kind = f'multipart/form-data; boundary=b; charset="{charset}"'.encode("latin-1")
    response = await server.http.post("/v1/files", content=body, headers={b"content-type": kind})
    assert response.status_code == 400, response.text
    assert "charset" in response.json()["error"]["message"]


async def test_pages_of_other_origins_send_no_forms(serve, folder):
    server = await serve(batch_dir=folder)
    form = {"data": {"purpose": "batch"}, "files": {"file": b"x"}}
    for origin, status in (("https://example.com", 403), (f"http://127.0.0.1:{server.port}", 200)):
        assert (await server.http.post("/v1/files", headers={"origin": origin}, **form)).status_code == status


# --- keys, and the option -----------------------------------------------------------------------------------------


async def test_files_and_batches_belong_to_their_key_after_a_restart_too(serve, folder):
    async def look(server, key: str) -> list[int]:
        headers = {"authorization": f"Bearer {key}"}
        paths = [f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"]
        found = [(await server.http.get(path, headers=headers)).status_code for path in paths]
        lists = [(await server.http.get(path, headers=headers)).json()["data"] for path in ("/v1/files", "/v1/batches")]
        return [*found, *(min(1, len(each)) for each in lists)]

    keys = {"api_key": ("one", "two"), "admin_api_key": "admin"}
    server = await serve(batch_dir=folder, **keys)
    client = server.openai("one")
    batch = await submit(client, line("a"))
    file_id, batch_id = batch.input_file_id, batch.id
    await ended(client, batch.id)
    await client.close()
    assert (await server.http.get("/v1/files")).status_code == 401
    other = {"authorization": "Bearer two"}
    assert (await server.http.post(f"/v1/batches/{batch_id}/cancel", headers=other)).status_code == 404
    assert (await server.http.delete(f"/v1/files/{file_id}", headers=other)).status_code == 404
    theirs = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert (await server.post("/v1/batches", theirs, headers=other)).status_code == 404
    for running in (server, None):
        if running is None:
            await stop_batches(server.service)
            running = await serve(batch_dir=folder, **keys)
        assert await look(running, "one") == [200, 200, 200, 1, 1]
        assert await look(running, "two") == [404, 404, 404, 0, 0]
        assert await look(running, "admin") == [200, 200, 200, 1, 1]


@pytest.mark.parametrize("bounds", [{"max_batch_bytes": 10_000}, {"max_batch_files": 4}])
async def test_a_key_cannot_fill_the_files_of_others(serve, folder, bounds):
    server = await serve(batch_dir=folder, api_key=("one", "two"), **bounds)
    async with server.openai("one") as one, server.openai("two") as two:
        for _ in range(3):  # half the limit, and the key's own share
            await upload(one, "x" * 2400)
        with pytest.raises(openai.BadRequestError, match="a share for each key"):
            await upload(one, "x" * 2400)
        await upload(two, "x" * 2400)
        with pytest.raises(openai.BadRequestError, match="a share for each key"):
            await upload(two, "x" * 2400)


async def test_files_of_a_key_that_is_no_longer_taken_use_up_no_share(serve, folder):
    server = await serve(batch_dir=folder, api_key=("old",), max_batch_files=8)
    async with server.openai("old") as old:
        for _ in range(2):
            await upload(old, line("a"))
    await stop_batches(server.service)
    server = await serve(batch_dir=folder, api_key=("one", "two"), max_batch_files=8)
    async with server.openai("one") as one, server.openai("two") as two:
        for _ in range(4):
            await upload(one, line("a"))
        with pytest.raises(openai.BadRequestError, match="a share for each key"):
            await upload(one, line("a"))
        for _ in range(2):
            await upload(two, line("a"))


async def test_a_key_cannot_fill_the_unfinished_batches_of_others(serve, folder, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_UNFINISHED", 2)
    server = await serve(batch_dir=folder, api_key=("one", "two"), paused=True)
    async with server.openai("one") as one, server.openai("two") as two:
        await submit(one, line("a"))
        with pytest.raises(openai.RateLimitError):
            await submit(one, line("a"))
        await submit(two, line("a"))


@pytest.mark.parametrize(("num_keys", "limit"), [(1, 10), (2, 10), (3, 100), (7, 1000), (40, 10)])
def test_keys_that_take_all_they_can_leave_each_other_a_share(num_keys, limit):
    waiting = [str(key) for key in range(num_keys)]
    made, shares, used = random.Random(35), Shares(waiting), Counter()
    while waiting:  # the first takes most
        key = waiting[min(made.randrange(len(waiting)), made.randrange(len(waiting)))]
        if shares.has_room(limit, used, key, 1):
            used[key] += 1
        else:
            waiting.remove(key)
    assert used.total() == limit
    served = sorted(used.values())[-min(num_keys, limit // 2) :]
    assert served[0] >= max(1, limit // (2 * num_keys))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/x"), ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/x"),
        ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/x"), ("POST", "/v1/batches/x/cancel"),
    ],
)  # fmt: skip
async def test_without_the_option_there_are_none_and_the_answer_names_it(serve, method, path):
    server = await serve()
    response = await server.http.request(method, path)
    assert response.status_code == 404
    assert "--batch-dir" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_file_id": "file-x"},
        {"endpoint": "/v1/moderations"},
        {"completion_window": "1 hour"},
        {"completion_window": "0h"},
        {"completion_window": "31d"},
        {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
        {"output_expires_after": {"anchor": "now", "seconds": 3600}},
        {"metadata": {"a": "x" * 1000}},
    ],
)
async def test_batches_that_cannot_be_are_refused(serve, folder, fields):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        file = await upload(client, line("a"))
    good = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    response = await server.post("/v1/batches", {**good, **fields})
    assert response.status_code in (400, 404)


async def test_answers_cannot_be_asked_again(serve, folder):
    server = await serve(batch_dir=folder)
    async with server.openai() as client:
        batch = await ended(client, (await submit(client, line("a"))).id)
        with pytest.raises(openai.BadRequestError, match="batch_output"):
            await client.batches.create(
                input_file_id=batch.output_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )


async def test_unfinished_batches_are_bounded(serve, folder, monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_UNFINISHED", 1)
    server = await serve(batch_dir=folder, paused=True)
    async with server.openai() as client:
        await submit(client, line("a"))
        with pytest.raises(openai.RateLimitError):
            await submit(client, line("a"))


def test_a_store_forgets_nothing_that_it_reserved(tmp_path):
    store = FileStore(tmp_path, max_files=9, max_bytes=100)
    store.reserve("key", 60)
    store.account("key", -20)
    assert store.num_bytes == 40
