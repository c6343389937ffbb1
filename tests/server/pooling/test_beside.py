"""A model that is pooled beside one that generates: which of them a request is for, and what is told of both."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from runtime.api import Busy
from server.__main__ import main
from server.config.parse import from_keywords, parse
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError
from server.models.defaults import sampling_defaults
from server.models.lifecycle import Lifecycle
from server.models.model import Engines
from server.models.pooling import PoolerConfig, Prompts, ServedPooling
from server.process.load import embedding_config
from tests.fakes import FakeEngine, fake_model
from tests.server.pooling.embedders import EMBEDDER, framing_tokenizer
from tests.server.tiny import chatml, loaded_model


@pytest.fixture
def both(serve):
    """A server of "tiny", which chats, and "embedder"; and the engine of that."""

    async def start(**options):
        server, tokenizer = await serve(**options), framing_tokenizer()
        model = fake_model(pooler=EMBEDDER, generates=False, architecture="FakeEncoder", max_model_len=64)
        engine = FakeEngine(model=model)
        pooling = ServedPooling.of(model, tokenizer, PoolerConfig(), "auto", Prompts())
        loaded = loaded_model(engine, tokenizer, chatml(tokenizer), sampling_defaults(), ("embedder",))
        lifecycle = server.service.lifecycle
        lifecycle.ready(dataclasses.replace(lifecycle.loaded, beside=dataclasses.replace(loaded, pooling=pooling)))
        return server, engine

    return start


POOLED = {
    "/v1/embeddings": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"]},
    "/v1/rerank": {"query": "Hi", "documents": ["a", "b"]},
    "/score": {"text_1": "Hi", "text_2": "a"},
    "/pooling": {"input": "Hi"},
    "/embedding": {"content": "Hi"},
}


@pytest.mark.parametrize("path", POOLED)
@pytest.mark.parametrize("named", [{}, {"model": "embedder"}])
async def test_what_is_pooled_goes_to_the_one(both, path, named):
    server, embedder = await both()
    answer = await server.post(path, POOLED[path] | named)
    assert answer.status_code == 200, answer.text
    assert embedder.submitted
    assert not server.engine.submitted
    if isinstance(answer.json(), dict) and "model" in answer.json():
        assert answer.json()["model"] == "embedder"


@pytest.mark.parametrize("named", [{}, {"model": "tiny"}])
async def test_chats_go_to_the_other(both, named):
    server, embedder = await both()
    answer = await server.chat(**named)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    assert not embedder.submitted


async def test_ollama_names_them_with_its_tag(both):
    server, embedder = await both()
    answer = await server.post("/api/embed", {"model": "embedder:latest", "input": "Hi"})
    assert (answer.status_code, len(embedder.submitted)) == (200, 1)
    answer = await server.post("/api/chat", {"model": "embedder", "messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 400
    names = [
        model["name"] for path in ("tags", "ps") for model in (await server.http.get(f"/api/{path}")).json()["models"]
    ]
    assert names == ["tiny:latest", "embedder:latest"] * 2
    shown = await server.post("/api/show", {"model": "embedder"})
    assert (shown.status_code, "embedding" in shown.json()["capabilities"]) == (200, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "model": "embedder"}, 400, "task_not_supported"),
        ("/v1/completions", {"prompt": "Hi", "model": "embedder"}, 400, "task_not_supported"),
        ("/v1/embeddings", {"input": "Hi", "model": "tiny"}, 400, "task_not_supported"),
        ("/v1/embeddings", {"input": "Hi", "model": "large"}, 404, "model_not_found"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "model": "large"}, 404, "model_not_found"),
    ],
)  # fmt: skip
async def test_the_wrong_one_is_refused_by_name(both, path, body, status, code):
    server, _ = await both()
    answer = await server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, "model")
    assert "embed" in error["message"]


async def test_both_are_listed_and_each_counts_its_own_tokens(both):
    server, _ = await both()
    listed = (await server.http.get("/v1/models")).json()
    assert [(card["id"], card["tasks"][0], card["max_model_len"]) for card in listed["data"]] == [
        ("tiny", "generate", 512), ("embedder", "embed", 64),
    ]  # fmt: skip
    assert (listed["first_id"], listed["last_id"]) == ("tiny", "embedder")
    assert (await server.http.get("/v1/models/embedder")).json()["id"] == "embedder"
    counts = [
        (await server.post("/tokenize", {"prompt": "Hi", **named})).json()["count"]
        for named in ({}, {"model": "embedder"})
    ]
    assert counts == [2, 4]  # [CLS] and [SEP] are the other's


async def test_metrics_and_load_tell_of_both(both):
    server, _ = await both()
    await server.post("/v1/embeddings", {"input": "Hi"})
    text = (await server.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("oneloop:num_requests_running{")]
    assert [name for line in lines for name in ("tiny", "embedder") if f'model_name="{name}"' in line] == [
        "tiny",
        "embedder",
    ]
    assert text.count("# HELP oneloop:num_requests_running") == 1
    assert (await server.http.get("/load")).json() == {"server_load": 0}


async def test_the_server_is_as_well_as_the_worse_of_them(both):
    server, embedder = await both()
    assert (await server.http.get("/health")).status_code == 200
    embedder.unhealthy = "a step has been running for 6 s"
    sick = await server.http.get("/health")
    assert (sick.status_code, sick.json()["reason"]) == (503, embedder.unhealthy)
    assert (await server.http.get("/health/live")).status_code == 200
    embedder.hopeless = True
    assert (await server.http.get("/health/live")).status_code == 503


async def test_a_full_queue_of_one_keeps_nobody_from_the_other(both, monkeypatch):
    server, _ = await both()

    def full(caller):
        raise Busy("full", 1.0, "queue_full")

    monkeypatch.setattr(server.engine, "check_room", full)
    assert (await server.post("/v1/embeddings", {"input": "Hi"})).status_code == 200


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_the_first_that_dies_ends_both_and_all_are_drained_and_closed():
    one, other = FakeEngine(), FakeEngine()
    tokenizer, lifecycle = framing_tokenizer(), Lifecycle()
    beside, loaded = (
        loaded_model(engine, tokenizer, chatml(tokenizer), sampling_defaults(), (name,))
        for engine, name in ((other, "other"), (one, "one"))
    )
    lifecycle.ready(dataclasses.replace(loaded, beside=beside))
    dying = asyncio.create_task(lifecycle.death())
    await asyncio.sleep(0)
    assert not dying.done()
    other.die("lost its device")
    assert "lost its device" in await dying
    assert await Engines([one, other]).drain(1.0) == 0
    assert await Engines([one, other]).close()
    assert one.closed
    assert other.closed


# --- options --------------------------------------------------------------------------------------------------------


def test_the_other_model_has_the_machines_options_and_none_of_the_models():
    config = ServerConfig(
        models=("chat",), embedding_model="mini", num_threads=3, max_model_len=99, kv_cache_bytes=1 << 20, quantization="int8",
        chat_template=None, convert="embed", pooler_config='{"pooling_type": "CLS"}', max_queue=7, load_format="dummy",
    )  # fmt: skip
    other = embedding_config(config, "mini")
    assert (other.model, other.runner, other.num_threads, other.max_queue) == ("mini", "pooling", 3, 7)
    assert (other.convert, other.pooler_config, other.load_format) == ("embed", '{"pooling_type": "CLS"}', "dummy")
    assert (other.max_model_len, other.kv_cache_bytes, other.quantization, other.embedding_model) == (
        None,
        None,
        "auto",
        None,
    )
    assert other.served_names == ("mini",)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--model", "all-minilm-l6-v2"], "is also a name of --model"),
        (["--served-model-name", "all-minilm-l6-v2"], "is also a name of --model"),
        (["--runner", "pooling"], "contradicts --embedding-model"),
    ],
)
def test_what_contradicts_a_second_model_is_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(["--embedding-model", "all-minilm-l6-v2", *flags], {})


def test_a_program_makes_an_object_for_each_model():
    with pytest.raises(ConfigError, match="unknown option 'embedding_model'"):
        from_keywords({"embedding_model": "all-minilm-l6-v2"})


def test_a_plan_is_of_one_model(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["oneloop", "--dry-run", "--embedding-model", "all-minilm-l6-v2"])
    assert main() == 2
    assert "supports one model only" in capsys.readouterr().err
