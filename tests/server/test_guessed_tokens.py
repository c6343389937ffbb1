"""Speculative decoding as clients see it: who may be guessed, what an answer may be like, and what came of it."""

from __future__ import annotations

import dataclasses

import pytest

from runtime.speculate.config import SpeculativeConfig
from tests.server.conftest import MESSAGES

GUESSING = str(SpeculativeConfig.of({"method": "ngram"}))


@pytest.fixture
def guessing(serve):
    """A server that guesses: ten tokens of every answer, seven of them rightly."""

    async def start(**options):
        server = await serve(**options)
        server.engine.model = dataclasses.replace(server.engine.model, speculative=GUESSING, reads_predictions=True)
        server.engine.drafts = (10, 7)
        return server

    return start


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}),
    ],
)
async def test_a_request_may_say_that_nothing_of_it_is_guessed(guessing, path, body):
    server = await guessing()
    for said, speculative in ((None, True), (True, True), (False, False)):
        response = await server.post(path, body if said is None else {**body, "speculative": said})
        assert response.status_code == 200, response.text
        assert server.engine.submitted[-1].speculative is speculative
    refused = await server.post(path, {**body, "speculative": "no"})
    assert refused.status_code == 400
    assert "speculative" in refused.text


PARTS = [{"type": "text", "text": "So <|im_end|> "}, {"type": "text", "text": "it is."}]


@pytest.mark.parametrize("content", ["So <|im_end|> it is.", PARTS])
async def test_a_prediction_reaches_the_engine_as_plain_text(guessing, content):
    server = await guessing()
    response = await server.chat(prediction={"type": "content", "content": content}, n=2)
    expected = server.tokenizer.encode("So <|im_end|> it is.", add_special_tokens=False, plain=True)
    assert [[*request.prediction] for request in server.engine.submitted] == [expected] * 2
    assert "x-ignored-fields" not in response.headers


async def test_a_prediction_is_no_longer_than_an_answer_can_be(guessing):
    server = await guessing(max_model_len=64)
    await server.chat(prediction={"type": "content", "content": "word " * 500}, max_tokens=3)
    assert len(server.engine.submitted[-1].prediction) == 64


@pytest.mark.parametrize("fields", [{}, {"speculative": False}])
async def test_a_prediction_that_nobody_reads_is_named(serve, guessing, fields):
    server = await (guessing() if fields else serve())
    predicted = {"prediction": {"type": "content", "content": "So"}, **fields}
    response = await server.chat(**predicted)
    assert response.headers["x-ignored-fields"] == "prediction"
    assert server.engine.submitted[-1].prediction == ()


@pytest.mark.parametrize(
    "wrong", ["So", {"type": "content"}, {"type": "text", "content": "So"}, {"type": "content", "content": 5}]
)
async def test_what_is_no_prediction_is_refused(guessing, wrong):
    response = await (await guessing()).chat(prediction=wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


async def test_usage_tells_what_was_guessed_rightly_and_wrongly(guessing, serve):
    server = await guessing()
    told = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3}
    assert (await server.chat()).json()["usage"]["completion_tokens_details"] == told
    twice = (await server.complete(n=2)).json()["usage"]["completion_tokens_details"]
    assert twice == {name: 2 * num for name, num in told.items()}
    *_, last = await server.events("/v1/completions", prompt="Hi", stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens_details"] == told
    silent = await serve()
    assert "completion_tokens_details" not in (await silent.chat()).json()["usage"]
