"""POST /v2/embed: Cohere's words, its kinds of numbers, and its cuts."""

from __future__ import annotations

import base64
import struct
from array import array

import msgspec
import pytest

from server.api.pooling.api_types import CohereEmbeddings
from server.api.pooling.vectors import binary_of, int8_of, ubinary_of, uint8_of
from server.models.pooling import Prompts
from tests.server.pooling.embedders import CLS, EMBEDDER, MATRYOSHKA, SEP, bytes_of, framing_tokenizer
from tests.server.test_refusals import error_of

EVERY = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


async def embed(server, **body):
    answer = await server.post("/v2/embed", {"model": "tiny", "input_type": "search_document", **body})
    assert answer.status_code == 200, answer.text
    assert msgspec.to_builtins(msgspec.convert(answer.json(), CohereEmbeddings)) == answer.json()
    return answer


def of(*numbers: float) -> memoryview:
    return memoryview(array("f", numbers))


def test_small_integers_are_a_normalised_vectors_numbers_times_127():
    for length in (1, 20):
        numbers = of(0.6 * length, 0, -0.8 * length, 0.001 * length)
        assert int8_of(numbers) == b"[76,0,-102,0]"
        assert uint8_of(numbers) == b"[204,128,26,128]"
    assert int8_of(of(0, -3)) == b"[0,-127]"
    assert int8_of(of(0, 0)) == b"[0,0]"


def test_bits_say_which_numbers_are_at_least_nought():
    numbers = of(-1, 0, 1, 0.5, -0.004, 0.004, -2, 2)
    assert ubinary_of(numbers) == b"[%d]" % 0b01110101
    assert binary_of(numbers) == b"[%d]" % (0b01110101 - 128)


async def test_every_kind_that_is_asked_for_is_there(serve):
    server = await serve(pooler=EMBEDDER)
    answer = (await embed(server, texts=["Hi", "Ho"], embedding_types=EVERY)).json()
    found = answer["embeddings"]
    assert [*found] == EVERY
    assert [len(each) for each in found.values()] == [2] * 6
    assert struct.unpack("<8f", base64.b64decode(found["base64"][1])) == pytest.approx(found["float"][1], abs=1e-6)
    assert found["int8"][0] == pytest.approx([127 * number for number in found["float"][0]], abs=0.5)
    assert answer["texts"] == ["Hi", "Ho"]
    assert answer["meta"]["billed_units"] == {"input_tokens": 4}
    assert [*(await embed(server, texts=["Hi"])).json()["embeddings"]] == ["float"]


async def test_older_clients_get_a_list_unless_they_ask_for_types(serve):
    server = await serve(pooler=EMBEDDER)
    wanted = (await embed(server, texts=["Hi"])).json()["embeddings"]["float"]
    body = {"model": "tiny", "texts": ["Hi"], "input_type": "search_query"}
    plain = (await server.post("/v1/embed", body)).json()
    assert msgspec.to_builtins(msgspec.convert(plain, CohereEmbeddings)) == plain
    assert plain["response_type"] == "embeddings_floats"
    assert (plain["embeddings"], plain["meta"]["api_version"]) == (wanted, {"version": "1"})
    by_type = (await server.post("/v1/embed", {**body, "embedding_types": ["float"]})).json()
    assert by_type["embeddings"] == {"float": wanted}


async def test_inputs_of_parts_are_lines_of_one_text(serve):
    server = await serve(pooler=EMBEDDER)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "texts" not in (await embed(server, inputs=[{"content": parts}])).json()
    assert server.engine.submitted[0].prompt_ids == bytes_of("a\nb")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "abcdef"),
        ({"truncate": "END"}, "abcdef"),
        ({"truncate": "START"}, "efghij"),
        ({"truncate": "START", "max_tokens": 4}, "ij"),
        ({"max_tokens": 100}, "abcdef"),
    ],
)
async def test_a_text_that_is_too_long_is_cut_unless_that_is_not_wanted(serve, fields, kept):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer(), max_model_len=8)
    await embed(server, texts=["abcdefghij"], **fields)
    assert server.engine.submitted[0].prompt_ids == [CLS, *bytes_of(kept), SEP]
    for limit in ({}, {"max_tokens": 5}):
        body = {"texts": ["a", "abcdef" if limit else "abcdefghij"], "truncate": "NONE", **limit}
        assert error_of(await server.post("/v2/embed", body), 400)["param"] == "texts[1]"


async def test_what_a_text_is_chooses_the_models_prompt(serve):
    prompts = Prompts({"query": "q: ", "passage": "p: ", "haiku": "h: "})
    server = await serve(pooler=EMBEDDER, prompts=prompts)
    for kind in ("search_query", "search_document", "haiku"):
        answer = await embed(server, texts=["a"], input_type=kind)
        assert "x-ignored-fields" not in answer.headers
    assert [each.prompt_ids for each in server.engine.submitted] == [
        bytes_of(text) for text in ("q: a", "p: a", "h: a")
    ]
    answer = await embed(server, texts=["a"], input_type="clustering")
    assert answer.headers["x-ignored-fields"] == "input_type"
    assert server.engine.submitted[-1].prompt_ids == bytes_of("a")


async def test_dimensions_are_cut_as_elsewhere(serve):
    server = await serve(pooler=MATRYOSHKA)
    assert len((await embed(server, texts=["a"], output_dimension=4)).json()["embeddings"]["float"][0]) == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": []}, "texts"),
        ({"texts": ["a"], "input_type": "poem"}, "input_type"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "inputs[0].content[0]"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 4}, "embedding_types"),
        ({"texts": ["a"], "output_dimension": 3}, "output_dimension"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["abc"], "max_tokens": 2}, "max_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_its_field(serve, body, param):
    server = await serve(pooler=MATRYOSHKA, speaks=framing_tokenizer())
    refused = error_of(await server.post("/v2/embed", body), 400)
    assert refused["param"].startswith(param)
