"""/api/tags, /api/show, /api/ps and /api/version: what Ollama's client and the programs built on it look for."""

from __future__ import annotations

import dataclasses

import ollama
import pytest

from server.api.ollama.models import _count
from tests.server.test_infill import QWEN
from tests.server.tiny import tiny_tokenizer


async def test_every_name_is_listed_with_a_tag_and_may_be_used_with_and_without(serve):
    server = await serve(served_model_name=("tiny", "org/other", "mine:7b"))
    listed = (await server.ollama().list()).models
    assert [model.model for model in listed] == ["tiny:latest", "org/other:latest", "mine:7b"]
    assert listed[0].size == 540_000_000
    assert len(listed[0].digest) == 64
    assert listed[0].details.family == "fake"
    assert listed[0].details.parameter_size == "135.0M"
    for name in ("tiny", "tiny:latest", "org/other:latest", "mine:7b"):
        assert (await server.ollama().generate(name, "Hi")).model == name
    for name in ("tiny:7b", "mine", "other"):
        with pytest.raises(ollama.ResponseError) as raised:
            await server.ollama().generate(name, "Hi")
        assert raised.value.status_code == 404


async def test_a_model_is_shown_with_its_template_context_and_capabilities(serve):
    server = await serve(
        max_model_len=777, tool_parser="hermes", reasoning_parser="qwen3", speaks=tiny_tokenizer(*QWEN)
    )
    shown = await server.ollama().show("tiny")
    assert "<|im_start|>" in shown.template
    assert shown.modelinfo["general.architecture"] == "fake"
    assert shown.modelinfo["fake.context_length"] == 777
    assert shown.modelinfo["general.parameter_count"] == 135_000_000
    assert shown.capabilities == ["completion", "tools", "insert", "thinking"]
    assert "temperature" in shown.parameters
    assert (await server.post("/api/show", {"name": "tiny:latest"})).status_code == 200
    assert (await server.post("/api/show", {"name": "other"})).status_code == 404
    assert (await server.post("/api/show", {})).status_code == 400


async def test_a_model_shows_no_capability_it_lacks(serve):
    server = await serve(chat=False, tool_parser="none")
    shown = await server.ollama().show("tiny")
    assert (shown.capabilities, shown.template) == (["completion"], "")


async def test_what_runs_is_what_is_loaded(serve):
    server = await serve(served_model_name=("tiny", "alias"), max_model_len=777)
    (running,) = (await server.ollama().ps()).models
    assert (running.model, running.context_length, running.size_vram) == ("tiny:latest", 777, 0)
    assert (await (await serve(loaded=False)).ollama().ps()).models == []


async def test_there_is_a_version_while_the_model_loads(serve):
    server = await serve(loaded=False)
    version = (await server.http.get("/api/version")).json()["version"]
    assert [part.isdigit() for part in version.split(".")] == [True] * 3
    response = await server.http.get("/api/tags")
    assert response.status_code == 503
    assert list(response.json()) == ["error"]


async def test_weights_of_another_type_than_they_are_computed_in_have_no_level(serve):
    server = await serve()
    assert (await server.ollama().show("tiny")).details.quantization_level == "F32"
    server.engine.model = dataclasses.replace(server.engine.model, weights_bytes=80_000_000)
    assert (await server.ollama().show("tiny")).details.quantization_level == "unknown"


async def test_the_format_is_that_of_the_file(serve):
    server = await serve()
    assert (await server.ollama().list()).models[0].details.format == "safetensors"
    object.__setattr__(server.service.lifecycle.loaded, "gguf_quantization", "Q4_K_M")
    details = (await server.ollama().list()).models[0].details
    assert (details.format, details.quantization_level) == ("gguf", "Q4_K_M")


def test_counts_as_people_say_them():
    assert [_count(number) for number in (7, 1500, 135_000_000, 7_600_000_000)] == ["7", "1.5K", "135.0M", "7.6B"]
