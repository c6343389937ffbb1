"""Pictures by every API: the same picture is the same item, whoever sends it; refusals come in the API's shape."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from runtime.api import PoolerInfo
from server.media.fetch import AllowedHosts, Fetcher
from server.media.reader import NoMedia
from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from tests.server.media.pictures import data_url, drawn, png, stored
from tests.server.media.processors import written
from tests.server.media.reading import reader
from tests.server.test_refusals import error_of
from tests.server.test_refused_bodies import SIZE, refused

PICTURE = stored(drawn())
URL, BASE64 = data_url(PICTURE), base64.b64encode(PICTURE).decode()
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return written("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def serve_seeing(serve, tiny):
    """A server whose model sees, by LLaVA's processor."""

    async def start(pooler=None, **options):
        spoken = Tokenizer.from_folder(tiny.folder)
        template = ChatTemplate(spoken.chat_template, spoken.named_tokens)
        media = options.pop("media", None) or reader(tiny, **options)
        return await serve("Yes", speaks=spoken, template=template, media=media, pooler=pooler, **options)

    return start


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "What?"}
REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": user(OPENAI, TEXT)}),
    "chat, a plain URL": ("/v1/chat/completions", {"messages": user({"type": "image_url", "image_url": URL}, TEXT)}),
    "chat, as Responses": ("/v1/chat/completions", {"messages": user({"type": "input_image", "image_url": URL}, TEXT)}),
    "chat, a file": (
        "/v1/chat/completions",
        {"messages": user({"type": "file", "file": {"file_data": URL, "filename": "a.png"}}, TEXT)},
    ),
    "responses": (
        "/v1/responses",
        {"input": user({"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What?"})},
    ),
    "responses, a file": (
        "/v1/responses",
        {"input": user({"type": "input_file", "file_data": URL}, {"type": "input_text", "text": "What?"})},
    ),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": user(ANTHROPIC, TEXT)}),
    "messages, a URL": (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 9,
            "messages": user({"type": "image", "source": {"type": "url", "url": URL}}, TEXT),
        },
    ),
    "messages, in a document": (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 9,
            "messages": user({"type": "document", "source": {"type": "content", "content": [ANTHROPIC]}}, TEXT),
        },
    ),
    "ollama's chat": (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "What?", "images": [BASE64]}]},
    ),
    "ollama's generate": ("/api/generate", {"model": "tiny", "prompt": "What?", "images": [BASE64]}),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_same_picture_is_the_same_item_by_every_api(serve_seeing, tiny, name):
    server = await serve_seeing()
    path, body = REQUESTS[name]
    answer = await server.post(path, body)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.submitted
    expected = tiny.processor(text=["[user] <image>What?"], images=[drawn()], return_tensors="pt")
    assert request.prompt_ids == expected["input_ids"][0].tolist()
    [item] = request.media
    assert np.array_equal(item.inputs["pixel_values"], expected["pixel_values"].numpy())
    assert item.positions.tolist() == [7, 8, 9, 10]


async def test_pictures_of_earlier_turns_are_still_there(serve_seeing):
    server = await serve_seeing()
    other = {"type": "image_url", "image_url": {"url": data_url(stored(drawn(seed=5)))}}
    messages = [*user(OPENAI, TEXT), {"role": "assistant", "content": "A cat."}, *user(TEXT, other)]
    assert (await server.chat(messages=messages)).status_code == 200
    first, second = server.engine.submitted[0].media
    assert first.digest != second.digest
    assert first.positions[-1] < second.positions[0]


async def test_a_stored_response_keeps_its_picture(serve_seeing):
    server = await serve_seeing()
    first = (await server.respond(input=user({"type": "input_image", "image_url": URL}))).json()
    answer = await server.respond(input="And now?", previous_response_id=first["id"])
    assert answer.status_code == 200, answer.text
    before, after = server.engine.submitted
    assert before.media[0].digest == after.media[0].digest
    items = (await server.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    assert items[0]["content"] == [{"type": "input_image", "image_url": URL}]


async def test_a_picture_as_a_tools_result_is_refused_where_results_are_told_as_text(serve_seeing):
    server = await serve_seeing()
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [ANTHROPIC]}
    body = {"model": "tiny", "max_tokens": 9, "messages": [*user(TEXT), called, *user(result)]}
    message = error_of_messages(await server.post("/v1/messages", body))
    assert message.startswith(
        "messages[2].content[0].content[0].source.data: this model's chat template does not support image"
    )


def error_of_messages(answer) -> str:
    assert answer.status_code == 400
    return answer.json()["error"]["message"]


async def test_tokenize_shows_placeholders(serve_seeing):
    server = await serve_seeing()
    answer = (await server.post("/tokenize", {"messages": user(OPENAI, TEXT), "return_token_strs": True})).json()
    assert answer["token_strs"].count("<image>") == 4
    counted = await server.post("/v1/messages/count_tokens", {"model": "tiny", "messages": user(ANTHROPIC, TEXT)})
    assert counted.json()["input_tokens"] == answer["count"]


@pytest.mark.parametrize("name", ["chat", "responses"])
async def test_how_pictures_are_processed_has_bounds(serve_seeing, name):
    server = await serve_seeing()
    path, body = REQUESTS[name]
    answer = await server.post(path, body | {"mm_processor_kwargs": {"min_pixels": 1 << 40}})
    error = error_of(answer, 400)
    assert error["param"] == "mm_processor_kwargs"
    assert "is not a count from 1 to 16777216" in error["message"]
    assert (await server.post(path, body | {"mm_processor_kwargs": {"max_pixels": 4096}})).status_code == 200


async def test_several_answers_share_a_picture(serve_seeing):
    server = await serve_seeing()
    await server.chat(messages=user(OPENAI, TEXT), n=3)
    first, *others = server.engine.submitted
    assert all(other.media is first.media for other in others)
    assert len(others) == 2


# --- refusals -----------------------------------------------------------------------------------------------------

BOMB = data_url(png(30_000, 30_000))
HOSTILE = {
    "chat": (
        "/v1/chat/completions",
        {"messages": user({"type": "image_url", "image_url": {"url": BOMB}})},
        "messages[0].content[0].image_url.url",
    ),
    "chat, later": (
        "/v1/chat/completions",
        {"messages": [*user(TEXT), {"role": "assistant", "content": "x"}, *user(TEXT, {"type": "image_url", "image_url": BOMB})]},
        "messages[2].content[1].image_url",
    ),
    "responses": (
        "/v1/responses",
        {"input": [*user({"type": "input_text", "text": "x"}), *user({"type": "input_image", "image_url": BOMB})]},
        "input[1].content[0].image_url",
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 9,
            "messages": user({**ANTHROPIC, "source": {**ANTHROPIC["source"], "data": "AAAA"}}),
        },
        "messages[0].content[0].source.data",
    ),
    "ollama": (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "x", "images": [BASE64, "AAAA"]}]},
        "messages[0].images[1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_picture_is_refused_by_its_place_in_the_apis_own_shape(serve_seeing, name):
    server = await serve_seeing()
    path, body, place = HOSTILE[name]
    answer = await server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert place in answer.text
    assert "cannot be read" in answer.text
    assert not server.engine.submitted


@pytest.mark.parametrize("part", [
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
])  # fmt: skip
async def test_what_this_model_does_not_read_is_refused_by_name(serve_seeing, part):
    server = await serve_seeing()
    error = error_of(await server.chat(messages=user(part)), 400)
    assert "the model accepts text and image only" in error["message"]
    assert error["param"].startswith("messages[0].content[0].")


async def test_what_is_not_installed_is_said_with_how_to_get_it(serve_seeing):
    server = await serve_seeing(media=NoMedia("Pillow is not installed: pip install 'oneloop[media]'"))
    error = error_of(await server.chat(messages=user(OPENAI)), 400)
    assert "pip install 'oneloop[media]'" in error["message"]
    assert error["code"] == "media_not_installed"


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
async def test_only_users_and_tools_show_pictures(serve_seeing, role):
    server = await serve_seeing()
    error = error_of(await server.chat(messages=[{"role": role, "content": [OPENAI]}, *user(TEXT)]), 400)
    assert error["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("part", [
    {"type": "file", "file": {"file_id": "file-1"}}, {"type": "file", "file": {}}, {"type": "input_image", "file_id": "file-1"},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": ""}}, {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
])  # fmt: skip
async def test_what_cannot_be_had(serve_seeing, part):
    server = await serve_seeing()
    assert error_of(await server.chat(messages=user(part)), 400)["param"].startswith("messages[0].content[0]")


MALFORMED = (f"http://{'a' * 64}.test/", "http://a..b/", "http://[", "file://[", "data:,é")


@pytest.mark.parametrize("name", ["chat", "chat, a plain URL", "chat, as Responses", "responses", "messages, a URL"])
async def test_a_malformed_url_is_a_400_without_a_traceback_in_the_log(serve_seeing, tiny, tmp_path, caplog, name):
    fetcher = Fetcher(AllowedHosts(["*"]), max_bytes=10, timeout_s=3600)
    server = await serve_seeing(media=reader(tiny, fetcher, allowed_local_media_path=str(tmp_path)))
    path, body = REQUESTS[name]
    for url in MALFORMED:
        answer = await server.post(path, json.loads(json.dumps(body).replace(URL, url)))
        assert answer.status_code == 400, answer.text
        assert "cannot be read" in answer.json()["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_is_pooled_is_text(serve_seeing):
    server = await serve_seeing(pooler=PoolerInfo(embedding_size=4))
    error = error_of(await server.post("/v1/embeddings", {"messages": user(OPENAI, TEXT)}), 400)
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert not server.engine.submitted


async def test_a_prompt_with_pictures_is_not_cut(serve_seeing):
    server = await serve_seeing()
    error = error_of(await server.chat(messages=user(OPENAI, TEXT), truncate_prompt_tokens=5), 400)
    assert error["param"] == "truncate_prompt_tokens"


async def test_a_bomb_beside_a_stream_costs_it_nothing(serve_seeing):
    """The stream's tokens come while its neighbour's picture is looked at, and after it."""
    server = await serve_seeing()
    server.engine.paused = True
    stream = await server.open_stream("/v1/chat/completions", messages=user(TEXT), stream=True)
    await stream.head()
    await server.engine.until(lambda: bool(server.engine.live))
    error_of(await server.chat(messages=user({"type": "image_url", "image_url": {"url": BOMB}})), 400)
    server.engine.step()
    assert b"data: " in await stream.chunk()


async def test_nothing_is_left_of_media_that_cannot_be_read(serve_seeing, tmp_path):
    server = await serve_seeing(allowed_local_media_path=str(tmp_path), limit_mm_per_prompt='{"image": 4}')
    (tmp_path / "folder").mkdir()
    broken = {"type": "image_url", "image_url": {"url": data_url(PICTURE[:-100] * 100)}}
    urls = (
        data_url(b"x" * SIZE),
        "data:image/png;base64,?" + "A" * SIZE,
        "ftp://" + "a" * SIZE,
        f"file://{tmp_path}/none",
    )
    urls += (f"file://{tmp_path}/folder", f"file://{tmp_path}/../other", BOMB)
    for url in urls:
        bad = {"type": "image_url", "image_url": {"url": url}}
        more = {"type": "text", "text": "x " * (SIZE // 2)}
        await refused(server, ("/v1/chat/completions", {"messages": user(broken, OPENAI, bad, more)}))
