"""A picture, from the clients of OpenAI and Anthropic to the model's encoder and back: the answer is transformers' own."""

from __future__ import annotations

import asyncio
import base64
import threading

import pytest

from server.config.server_config import ServerConfig
from server.models.lifecycle import Lifecycle
from server.process.load import load
from tests.server.conftest import running
from tests.server.media import models
from tests.server.media.pictures import data_url, drawn, stored

MAX_TOKENS = 8
ONE, TWO = drawn(24, 16, 1), drawn(40, 70, 2)


@pytest.fixture(scope="module", params=models.CONFIGS)
def seeing(request, tmp_path_factory):
    return models.drawn(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def server(seeing):
    config = ServerConfig(
        models=(str(seeing.tiny.folder),), device="cpu", dtype="float32", max_model_len=512, num_kv_blocks=128,
        served_model_name=("tiny",), access_log=False,
    )  # fmt: skip
    loaded = await load(config, lambda progress: None, threading.Event())
    lifecycle = Lifecycle()
    lifecycle.ready(loaded)
    async with running(loaded.engine, loaded.tokenizer, lifecycle, config) as found:
        yield found


def image(picture):
    return {"type": "image_url", "image_url": {"url": data_url(stored(picture))}}


def text_of(seeing, question) -> str:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in question]
    return seeing.tiny.processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)


QUESTIONS = {
    "one": ["What is ", ONE, "?"],
    "first": [TWO, "What is it?"],
    "last": ["What is it?", ONE],
    "two": [ONE, "and", TWO, "What?"],
    "none": ["What is it?"],
}


async def asked(server, question, **fields):
    content = [image(each) if not isinstance(each, str) else {"type": "text", "text": each} for each in question]
    return await server.openai().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=MAX_TOKENS,
        extra_body={"return_token_ids": True, **fields},
    )  # fmt: skip


async def test_answers_are_transformers_own(seeing, server):
    expected, found = {}, {}
    for name, question in QUESTIONS.items():
        pictures = [each for each in question if not isinstance(each, str)]
        expected[name] = seeing.answer(text_of(seeing, question), pictures, MAX_TOKENS)
        found[name] = (await asked(server, question)).choices[0].token_ids
    assert found == expected
    assert expected["one"] != expected["none"]
    together = await asyncio.gather(*(asked(server, question) for question in QUESTIONS.values()))
    assert [answer.choices[0].token_ids for answer in together] == [*expected.values()]


async def test_usage_counts_pictures_and_the_cache_knows_them(server):
    question = ["What is ", ONE, "? " + "Look closely. " * 5]
    first, again = await asked(server, question), await asked(server, question)
    other = await asked(server, [question[0], TWO, question[2]])
    details = [answer.usage.prompt_tokens_details for answer in (first, again, other)]
    assert all(each.image_tokens > 0 for each in details)
    assert details[0].cached_tokens == 0
    assert details[1].cached_tokens > details[1].image_tokens
    assert details[2].cached_tokens < 16 * 2
    assert first.choices[0].token_ids == again.choices[0].token_ids


async def test_anthropics_client_gets_the_same_answer(server):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(stored(ONE)).decode()}
    content = [{"type": "text", "text": "What is "}, {"type": "image", "source": source}, {"type": "text", "text": "?"}]
    answer = await server.anthropic().messages.create(
        model="tiny",
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )
    expected = await asked(server, QUESTIONS["one"])
    assert answer.content[0].text == expected.choices[0].message.content
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == expected.usage.prompt_tokens


async def test_openais_client_reads_responses_too(server):
    shown = {"type": "input_image", "image_url": data_url(stored(ONE)), "detail": "auto"}
    content = [{"type": "input_text", "text": "What is "}, shown, {"type": "input_text", "text": "?"}]
    answer = await server.openai().responses.create(
        model="tiny", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=MAX_TOKENS
    )
    expected = await asked(server, QUESTIONS["one"])
    assert answer.output_text == expected.choices[0].message.content


async def test_the_model_says_that_it_sees(server):
    assert (await server.http.get("/v1/models/tiny")).json()["modalities"] == ["text", "image"]
    assert "vision" in (await server.post("/api/show", {"model": "tiny"})).json()["capabilities"]
