"""Adapters over HTTP: a request's model picks one; they come from one folder alone, and only for who runs the server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.api import MediaItem
from server.__main__ import check_early
from server.config.parse import parse
from server.config.server_options import ConfigError
from server.generate import plain_prompts
from server.http.auth import OPERATOR_PATHS
from server.http.errors import InvalidRequest
from server.models.adapters import AdapterModule, Resolver, folder_below
from server.process.load import _load_adapters
from tests.fake_adapters import FakeAdapters
from tests.server.media.pictures import data_url, drawn, stored
from tests.server.media.processors import written
from tests.server.media.reading import seeing

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def folder(root: Path, name: str, *, bad: bool = False) -> Path:
    made = root / name
    made.mkdir(parents=True)
    (made / "adapter_config.json").write_text("{}")
    if bad:
        (made / "bad").touch()
    return made


@pytest.fixture
async def server(serve, tmp_path):
    root = tmp_path / "adapters"
    folder(root, "mine")
    folder(root, "org/theirs")
    folder(root, "broken", bad=True)
    running = await serve(enable_lora=True, lora_dir=str(root))
    running.engine.adapters = FakeAdapters("first", "second")
    return running


def with_resolver(server, root: Path) -> None:
    loaded = server.service.lifecycle.loaded
    server.service.lifecycle._loaded = dataclasses.replace(loaded, resolver=Resolver(root, server.engine.adapters))


async def test_the_model_of_a_request_picks_an_adapter(server):
    for name, key in (("first", 1), ("second", 2), ("tiny", None)):
        for answer in (
            await server.chat(model=name),
            await server.complete(model=name),
            await server.respond(model=name),
        ):
            assert answer.status_code == 200
            assert answer.json()["model"] == name
            adapter = server.engine.submitted[-1].adapter
            assert (None if adapter is None else adapter.key) == key
    answer = await server.post(
        "/v1/messages", {"model": "first", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert answer.json()["model"] == "first"
    await server.post(
        "/api/chat", {"model": "second:latest", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    )
    assert server.engine.submitted[-1].adapter.name == "second"
    missing = await server.chat(model="third")
    assert missing.status_code == 404
    assert "'first', 'second'" in missing.json()["error"]["message"]


async def test_a_long_prompt_is_prepared_for_its_adapter(server, monkeypatch):
    monkeypatch.setattr(plain_prompts, "LONG_PROMPT", 0)
    await server.complete(model="second")
    (request,) = server.engine.submitted
    assert request.prepared.cache_root == request.cache_root == (None, 2)


async def test_adapters_are_listed_with_their_parent(server):
    cards = (await server.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("first", "tiny"), ("second", "tiny")]
    card = (await server.http.get("/v1/models/second")).json()
    assert (card["id"], card["created"], card["root"]) == ("second", 5, "tiny")


async def test_an_adapter_is_loaded_replaced_and_unloaded(server, tmp_path):
    body = {"lora_name": "third", "lora_path": "mine"}
    assert (await server.post(LOAD, body)).json() == {"success": True, "id": "third", "rank": 4, "num_parameters": 9}
    assert server.engine.adapters.loaded == [("third", str(tmp_path / "adapters/mine"))]
    again = await server.post(LOAD, body)
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "lora_name"
    assert (await server.post(LOAD, body | {"load_inplace": True})).status_code == 200
    assert (await server.chat(model="third")).status_code == 200
    assert (await server.post(UNLOAD, {"lora_name": "third"})).json() == {"success": True, "id": "third"}
    assert (await server.chat(model="third")).status_code == 404
    assert (await server.post(UNLOAD, {"lora_name": "third"})).status_code == 404


async def test_unloading_answers_when_the_last_request_is_over(server):
    adapters = server.engine.adapters
    adapters.unused.clear()
    answer = asyncio.create_task(server.post(UNLOAD, {"lora_name": "first"}))
    await adapters.waited_for.wait()
    assert not answer.done()
    adapters.unused.set()
    assert (await answer).status_code == 200


@pytest.mark.parametrize("path", ["..", ".", "/", "/etc", "mine/../..", "nowhere", "link", "inner", "a\0b", "x" * 4000])
async def test_nothing_is_loaded_from_elsewhere(server, tmp_path, path):
    root = tmp_path / "adapters"
    outside = folder(tmp_path, "outside")
    (root / "link").symlink_to(outside)
    (folder(root, "inner") / "adapter_model.safetensors").symlink_to(outside / "adapter_config.json")
    refused = await server.post(LOAD, {"lora_name": "third", "lora_path": path})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert not server.engine.adapters.loaded


def test_links_within_the_folder_are_followed(tmp_path):
    made = folder(tmp_path, "blobs/one")
    (tmp_path / "named").symlink_to(made)
    assert folder_below(tmp_path, "named") == made
    assert folder_below(tmp_path, str(made)) == made


async def test_what_is_wrong_with_an_adapter_is_said(server):
    refused = await server.post(LOAD, {"lora_name": "third", "lora_path": "broken"})
    assert refused.status_code == 400
    assert "q_proj is of another shape" in refused.json()["error"]["message"]
    taken = await server.post(LOAD, {"lora_name": "tiny", "lora_path": "mine"})
    assert "a name of the model" in taken.json()["error"]["message"]


async def test_without_a_folder_or_the_option_nothing_is_loaded(serve):
    server = await serve()
    off = await server.post(LOAD, {"lora_name": "a", "lora_path": "b"})
    assert (off.status_code, off.json()["error"]["code"]) == (403, "adapters_off")
    assert (await server.post(UNLOAD, {"lora_name": "a"})).status_code == 403
    server.engine.adapters = FakeAdapters()
    nowhere = await server.post(LOAD, {"lora_name": "a", "lora_path": "b"})
    assert nowhere.status_code == 400
    assert "--lora-dir" in nowhere.json()["error"]["message"]


def test_only_who_runs_the_server_loads_adapters():
    assert {LOAD, UNLOAD} <= OPERATOR_PATHS


async def test_the_first_request_for_a_folder_loads_it(server, tmp_path):
    with_resolver(server, tmp_path / "adapters")
    answers = await asyncio.gather(*(server.chat(model=name) for name in ("mine", "mine", "org/theirs")))
    assert [answer.json()["model"] for answer in answers] == ["mine", "mine", "org/theirs"]
    assert sorted(name for name, _ in server.engine.adapters.loaded) == ["mine", "org/theirs"]
    broken = await server.chat(model="broken")
    assert broken.status_code == 400
    message = broken.json()["error"]["message"]
    assert "broken: q_proj is of another shape" in message
    assert str(tmp_path) not in message
    for name in ("..", "../adapters/mine", "/etc", "org", ".", "mine/", "./mine", "nowhere", "m" * 999):
        assert (await server.chat(model=name)).status_code == 404


def test_modules_are_named_by_text_or_json():
    assert AdapterModule.all_of(["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "m"}']) == [
        AdapterModule("a", "/x=y"), AdapterModule("b", "/z"),
    ]  # fmt: skip
    for wrong in ("a", "=x", "a=", '{"name"', '{"name": "a"}', '{"name": "a", "path": "b", "rank": 3}'):
        with pytest.raises(ValueError, match="name"):
            AdapterModule.parse(wrong)
    with pytest.raises(ValueError, match="two adapters are called 'a'"):
        AdapterModule.all_of(["a=b", "a=c"])


def test_options_of_adapters(tmp_path):
    config = parse(["--enable-lora", "--lora-modules", "a=b", "c=d", "--lora-modules", "e=f", "--port", "1"], {})
    assert config.lora_modules == ("a=b", "c=d", "e=f")
    with pytest.raises(ConfigError, match="--lora-modules needs --enable-lora"):
        parse(["--lora-modules", "a=b"], {})
    with pytest.raises(ConfigError, match="no such folder"):
        parse(["--enable-lora", "--lora-dir", str(tmp_path / "none")], {})
    with pytest.raises(ConfigError, match="not name=path"):
        check_early(parse(["--enable-lora", "--lora-modules", "a"], {}))


# --- of requests with pictures and sounds ---------------------------------------------------------------------------


async def test_a_prompt_with_pictures_has_the_adapter_that_is_for_them(serve, tmp_path):
    eyes = seeing(written("llava", tmp_path))
    server = await serve("Yes", speaks=eyes.tokenizer, template=eyes.chat_template, media=eyes.media)
    server.engine.adapters = FakeAdapters("first", "sight")
    lifecycle = server.service.lifecycle
    lifecycle._loaded = dataclasses.replace(lifecycle.loaded, mm_adapters={"image": "sight"})
    picture = {"type": "image_url", "image_url": {"url": data_url(stored(drawn()))}}
    for content, model, adapter in (
        ([picture], "tiny", "sight"),
        ([picture], "first", "first"),
        ("Hi", "tiny", None),
    ):
        answer = await server.chat(model=model, messages=[{"role": "user", "content": content}])
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        found = server.engine.submitted[-1].adapter
        assert (found and found.name) == adapter


def test_items_that_want_different_adapters_are_refused(tmp_path):
    loaded = seeing(written("llava", tmp_path))
    loaded.engine.adapters = FakeAdapters("sight", "hearing")
    loaded = dataclasses.replace(loaded, mm_adapters={"image": "sight", "audio": "hearing"})
    items = [MediaItem(modality, b"", np.array([0], np.int32), {}) for modality in ("image", "audio", "image")]
    assert loaded.adapter_for(items[::2]).name == "sight"
    with pytest.raises(InvalidRequest, match="select the adapters hearing, sight: name one as the model"):
        loaded.adapter_for(items)


async def test_adapters_for_pictures_are_named_or_stand_in_a_folder(tmp_path):
    model = SimpleNamespace(modalities=frozenset({"image", "audio"}), architecture="Some")
    engine = SimpleNamespace(adapters=FakeAdapters("sight"), model=model)
    voice = str(folder(tmp_path, "voice"))

    async def loaded(given: str) -> dict[str, str]:
        return await _load_adapters(parse(["--enable-lora", "--default-mm-loras", given], {}), engine)

    assert await loaded(json.dumps({"image": "sight", "audio": voice})) == {"image": "sight", "audio": "audio"}
    assert engine.adapters.loaded == [("audio", voice)]
    with pytest.raises(ValueError, match="--default-mm-loras: Some does not accept video"):
        await loaded('{"video": "sight"}')


@pytest.mark.parametrize(("given", "reason"), [
    ("audio=speech", "is not JSON"), ('{"smell": "a"}', "'smell' is not one of image, audio, video"),
    ('{"audio": 1}', "audio: 1 is neither a name nor a folder"),
])  # fmt: skip
def test_what_says_nothing_of_adapters_for_pictures(given, reason):
    with pytest.raises(ConfigError, match=f"--default-mm-loras: .*{reason}"):
        check_early(parse(["--enable-lora", "--default-mm-loras", given], {}))
    with pytest.raises(ConfigError, match="--default-mm-loras needs --enable-lora"):
        parse(["--default-mm-loras", given], {})
