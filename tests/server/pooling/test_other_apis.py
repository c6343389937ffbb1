"""Vectors as clients of Ollama, by its own package, and of llama.cpp ask for them."""

from __future__ import annotations

import msgspec
import ollama
import pytest

from server.api.llamacpp.api_types import LlamaEmbedding
from server.api.ollama.api_types import OllamaEmbed, OllamaEmbedding
from tests.server.pooling.embedders import (
    CLASSIFIER,
    CLS,
    EMBEDDER,
    MATRYOSHKA,
    SEP,
    bytes_of,
    framing_tokenizer,
    means_of,
    normalised,
)
from tests.server.test_refusals import error_of

CLOSE = 1e-6
HI = means_of(bytes_of("Hi"), 8)


# --- Ollama -------------------------------------------------------------------------------------------------------


async def test_ollamas_client_gets_normalised_vectors(serve):
    server = await serve(pooler=EMBEDDER)
    one, several = (
        await server.ollama().embed("tiny", "Hi"),
        await server.ollama().embed("tiny:latest", ["Hi", "Hi"]),
    )
    assert one.embeddings == [pytest.approx(normalised(HI), abs=CLOSE)]
    assert len(several.embeddings) == 2
    assert several.prompt_eval_count == 4
    assert several.total_duration >= several.load_duration >= 0
    answer = (await server.post("/api/embed", {"model": "tiny", "input": "Hi"})).json()
    assert msgspec.to_builtins(msgspec.convert(answer, OllamaEmbed)) == answer


async def test_its_older_form_is_one_vector_as_the_model_makes_it(serve):
    server = await serve(pooler=EMBEDDER)
    assert (await server.ollama().embeddings("tiny", "Hi")).embedding == pytest.approx(HI, rel=CLOSE)
    answer = (await server.post("/api/embeddings", {"model": "tiny", "prompt": "Hi"})).json()
    assert msgspec.to_builtins(msgspec.convert(answer, OllamaEmbedding)) == answer


async def test_what_is_too_long_is_cut_unless_that_is_not_wanted(serve):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer(), max_model_len=8)
    await server.ollama().embed("tiny", "abcdefghij")
    await server.ollama().embeddings("tiny", "abcdefghij")
    assert [each.prompt_ids for each in server.engine.submitted] == [[CLS, *bytes_of("abcdef"), SEP]] * 2
    with pytest.raises(ollama.ResponseError, match="maximum context length is 8") as raised:
        await server.ollama().embed("tiny", ["a", "abcdefghij"], truncate=False)
    assert (raised.value.status_code, "input[1]" in raised.value.error) == (400, True)


async def test_options_change_no_vector_and_dimensions_do(serve):
    server = await serve(pooler=MATRYOSHKA)
    answer = await server.post(
        "/api/embed", {"model": "tiny", "input": "Hi", "options": {"num_ctx": 5}, "dimensions": 4}
    )
    assert answer.headers["x-ignored-fields"] == "options"
    assert len(answer.json()["embeddings"][0]) == 4


async def test_a_model_says_what_it_is_for(serve):
    assert (await (await serve(pooler=EMBEDDER)).ollama().show("tiny")).capabilities == ["embedding"]
    classifier = await serve(pooler=CLASSIFIER)
    assert (await classifier.ollama().show("tiny")).capabilities == []
    with pytest.raises(ollama.ResponseError, match="does not support the task embed"):
        await classifier.ollama().embed("tiny", "Hi")


# --- llama.cpp ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("name", ["content", "input"])
async def test_llamacpps_answer_is_a_list_of_lists_of_vectors(serve, path, name):
    server = await serve(pooler=EMBEDDER)
    answer = (await server.post(path, {name: ["Hi", "Ho"]})).json()
    assert msgspec.to_builtins(msgspec.convert(answer, list[LlamaEmbedding])) == answer
    assert [each["index"] for each in answer] == [0, 1]
    assert answer[0]["embedding"] == [pytest.approx(normalised(HI), abs=CLOSE)]


async def test_vectors_that_are_not_normalised_and_those_of_all_tokens(serve):
    server = await serve(pooler=EMBEDDER)
    (raw,) = (await server.post("/embedding", {"content": "Hi", "embd_normalize": -1})).json()
    assert raw["embedding"] == [pytest.approx(HI, rel=CLOSE)]
    late = await serve(pooler=EMBEDDER, pooler_config='{"pooling_type": "ALL"}')
    (all_tokens,) = (await late.post("/embedding", {"content": "Hi"})).json()
    assert len(all_tokens["embedding"]) == 2


@pytest.mark.parametrize(
    "body", [{}, {"content": "a", "input": "b"}, {"content": "a", "embd_normalize": 0}, {"content": [""]}]
)
async def test_what_cannot_be_honoured_is_refused(serve, body):
    server = await serve(pooler=EMBEDDER)
    assert error_of(await server.post("/embedding", body), 400)["param"]
