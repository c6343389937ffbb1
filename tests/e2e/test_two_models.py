"""The two built-in models in one process: a chat goes on while thousands of texts are embedded beside it."""

from __future__ import annotations

import threading

import pytest


@pytest.fixture(scope="module")
def sidecar(start_for_module):
    server = start_for_module("--embedding-model", "all-minilm-l6-v2")
    server.wait_until_healthy()
    return server


def test_one_port_serves_both_by_name_and_without(sidecar):
    with sidecar.client() as client:
        names = [model.id for model in client.models.list().data]
        assert names == ["smollm2-135m-instruct", "all-minilm-l6-v2"]
        for name in names[1:]:
            assert len(client.embeddings.create(model=name, input="Hi").data[0].embedding) == 384
        chat = client.chat.completions.create(
            model=names[0], messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert chat.usage.completion_tokens >= 1
    status, answer = sidecar.post("/v1/embeddings", {"input": "Hi"})
    assert (status, answer["model"]) == (200, "all-minilm-l6-v2")


def test_a_chat_is_answered_while_texts_are_embedded(sidecar):
    """Steps take turns: an answer of few tokens waits for few steps of the many that the texts take."""
    texts = ["the quick brown fox jumps over the lazy dog " * 20] * 400  # a text or two a step
    embedded = threading.Event()
    found: list[int] = []

    def embed() -> None:
        try:
            status, answer = sidecar.post("/v1/embeddings", {"input": texts})
            found.append(status)
            found.append(len(answer["data"]))
        finally:
            embedded.set()

    worker = threading.Thread(target=embed)
    worker.start()
    try:
        while sidecar.get("/load")[1]["server_load"] == 0:
            assert not embedded.is_set(), found
        status, answer = sidecar.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        )
        assert not embedded.is_set(), "the chat waited for all the texts"
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    finally:
        worker.join()
    assert found == [200, 400]
