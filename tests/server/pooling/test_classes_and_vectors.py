"""/classify and /pooling: a head's numbers, and vectors of one token or of all."""

from __future__ import annotations

import base64
import struct

import msgspec
import pytest

from server.api.pooling.api_types import Classifications, PooledList
from tests.server.pooling.embedders import CLASSIFIER, EMBEDDER, bytes_of, means_of, normalised
from tests.server.test_refusals import error_of

CLOSE = 1e-6


async def test_the_likeliest_label_and_what_all_are_given(serve):
    server = await serve(pooler=CLASSIFIER)
    answer = (await server.post("/classify", {"input": ["Hi", "Ho"]})).json()
    assert msgspec.to_builtins(msgspec.convert(answer, Classifications)) == answer
    assert answer["id"].startswith("classify-")
    for item, text in zip(answer["data"], ("Hi", "Ho"), strict=True):
        numbers = means_of(bytes_of(text), 3)
        assert item["probs"] == pytest.approx([number / sum(numbers) for number in numbers], abs=CLOSE)
        assert item["label"] == CLASSIFIER.labels[numbers.index(max(numbers))]
        assert item["num_classes"] == 3


async def test_a_heads_numbers_as_they_are(serve):
    server = await serve(pooler=CLASSIFIER)
    (item,) = (await server.post("/classify", {"input": "Hi", "use_activation": False})).json()["data"]
    assert item["probs"] == pytest.approx(means_of(bytes_of("Hi"), 3), rel=CLOSE)


async def test_pooling_is_what_the_model_is_served_for_unless_the_request_says(serve):
    server = await serve(pooler=EMBEDDER)
    (one,) = (await server.post("/pooling", {"input": "Hi"})).json()["data"]
    assert one["data"] == pytest.approx(normalised(means_of(bytes_of("Hi"), 8)), abs=CLOSE)
    answer = (await server.post("/pooling", {"input": "Hi", "task": "token_embed"})).json()
    assert msgspec.to_builtins(msgspec.convert(answer, PooledList)) == answer
    (all_tokens,) = answer["data"]
    assert [len(row) for row in all_tokens["data"]] == [8, 8]
    packed = (await server.post("/pooling", {"input": "Hi", "task": "token_embed", "encoding_format": "base64"})).json()
    numbers = struct.unpack("<16f", base64.b64decode(packed["data"][0]["data"]))
    assert [*numbers[:8]] == pytest.approx(all_tokens["data"][0], abs=CLOSE)


async def test_a_classifier_pools_to_its_classes_and_to_nothing_else(serve):
    server = await serve(pooler=CLASSIFIER)
    (one,) = (await server.post("/pooling", {"input": "Hi"})).json()["data"]
    assert len(one["data"]) == 3
    refused = error_of(await server.post("/pooling", {"input": "Hi", "task": "embed"}), 400)
    assert (refused["code"], refused["param"]) == ("task_not_supported", "model")
    assert error_of(await server.post("/pooling", {"input": "Hi", "dimensions": 4}), 400)["param"] == "dimensions"
    assert error_of(await server.post("/v1/embeddings", {"input": "Hi"}), 400)["code"] == "task_not_supported"


async def test_converted_to_embed_it_does(serve):
    server = await serve(pooler=CLASSIFIER, convert="embed")
    assert (await server.post("/v1/embeddings", {"input": "Hi"})).status_code == 200
    assert error_of(await server.post("/classify", {"input": "Hi"}), 400)["code"] == "task_not_supported"
