"""POST /v1/embeddings: what goes to the engine, and what comes back, for every form of an input."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading

import msgspec
import pytest

from server.api.pooling import request as core
from server.api.pooling import run, vectors
from server.api.pooling.api_types import Embeddings
from server.http.answers import ChunkedJson
from server.models.pooling import Prompts
from tests.server.conftest import MESSAGES
from tests.server.pooling.embedders import (
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

# Float32 keeps 24 bits, and seven or eight digits are written of them.
CLOSE = 1e-6


async def embedding(server, given, **fields):
    answer = await server.post("/v1/embeddings", {"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(server) -> list[list[int]]:
    return [list(each.prompt_ids) for each in server.engine.submitted]


# --- inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("Hi", [[CLS, *bytes_of("Hi"), SEP]]),
        (["Hi", "é"], [[CLS, *bytes_of("Hi"), SEP], [CLS, *bytes_of("é"), SEP]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_texts_are_framed_and_ids_are_as_they_are(serve, given, ids):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer())
    answer = await embedding(server, given)
    assert ids_of(server) == ids
    assert [item["index"] for item in answer["data"]] == list(range(len(ids)))
    for item, each in zip(answer["data"], ids, strict=True):
        assert item["object"] == "embedding"
        assert item["embedding"] == pytest.approx(normalised(means_of(each, 8)), abs=CLOSE)
    num_tokens = sum(map(len, ids))
    assert answer["usage"] == {
        "prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["id"].startswith("embd-")
    assert msgspec.to_builtins(msgspec.convert(answer, Embeddings)) == answer


async def test_without_special_tokens_a_text_stands_alone(serve):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer())
    await embedding(server, "Hi", add_special_tokens=False)
    assert ids_of(server) == [bytes_of("Hi")]


async def test_special_tokens_in_a_text_are_meant_unless_they_are_not(serve):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer())
    await embedding(server, "[SEP]")
    await embedding(server, "[SEP]", allow_special_tokens=False)
    assert ids_of(server) == [[CLS, SEP, SEP], [CLS, *bytes_of("[SEP]"), SEP]]


async def test_a_conversation_is_embedded_as_its_template_writes_it(serve):
    server = await serve(pooler=EMBEDDER)
    answer = await server.post("/v1/embeddings", {"messages": MESSAGES})
    assert answer.status_code == 200, answer.text
    wanted = server.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert ids_of(server) == [wanted]


async def test_base64_is_the_same_numbers_as_little_endian_float32(serve):
    server = await serve(pooler=EMBEDDER)
    written = (await embedding(server, "Hi"))["data"][0]["embedding"]
    packed = base64.b64decode((await embedding(server, "Hi", encoding_format="base64"))["data"][0]["embedding"])
    assert struct.unpack("<8f", packed) == pytest.approx(written, abs=CLOSE)


async def test_the_models_own_prompts_stand_before_texts(serve):
    prompts = Prompts({"query": "q: ", "document": "d: "}, default="document")
    server = await serve(pooler=EMBEDDER, prompts=prompts)
    await embedding(server, "a")
    await embedding(server, "a", prompt_name="query")
    assert ids_of(server) == [bytes_of("d: a"), bytes_of("q: a")]
    refused = error_of(await server.post("/v1/embeddings", {"input": "a", "prompt_name": "wish"}), 400)
    assert refused["param"] == "prompt_name"
    assert "'query', 'document'" in refused["message"]


# --- truncation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, "abc"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, "hij"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
        ({"truncate_prompt_tokens": 8, "truncation_side": "right"}, "abcdef"),
    ],
)
async def test_a_text_is_cut_and_its_frame_is_not(serve, fields, kept):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer(), max_model_len=8)
    await embedding(server, "abcdefghij", **fields)
    assert ids_of(server) == [[CLS, *bytes_of(kept), SEP]]


async def test_ids_are_cut_as_they_are(serve):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer())
    await embedding(server, [5, 6, 7], truncate_prompt_tokens=2)
    await embedding(server, [5, 6, 7], truncate_prompt_tokens=2, truncation_side="left")
    assert ids_of(server) == [[5, 6], [6, 7]]


async def test_a_truncation_that_leaves_no_text_or_more_than_there_can_be_is_refused(serve):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer(), max_model_len=8)
    for wanted, word in ((2, "special"), (9, "context of 8"), (0, "no prompt")):
        body = {"input": "abc", "truncate_prompt_tokens": wanted}
        refused = error_of(await server.post("/v1/embeddings", body), 400)
        assert refused["param"] == "truncate_prompt_tokens"
        assert word in refused["message"]


async def test_a_prompt_may_fill_the_context_and_no_more(serve):
    server = await serve(pooler=EMBEDDER, speaks=framing_tokenizer(), max_model_len=8)
    await embedding(server, "abcdef")
    refused = error_of(await server.post("/v1/embeddings", {"input": ["a", "abcdefg"]}), 400)
    assert (refused["param"], refused["code"]) == ("input[1]", "context_length_exceeded")


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [[5], [10_000]]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({}, "input"),
        ({"input": "a", "messages": MESSAGES}, "input"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "dimensions": 16}, "dimensions"),
        ({"input": "a", "normalize": True}, "normalize"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "padding": "max_length"}, "padding"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_its_field(serve, body, param):
    server = await serve(pooler=EMBEDDER)
    assert error_of(await server.post("/v1/embeddings", body), 400)["param"] == param
    assert not server.engine.submitted


async def test_dimensions_are_those_that_the_model_was_trained_for(serve):
    server = await serve(pooler=MATRYOSHKA)
    for wanted in (2, 4, 8):
        assert len((await embedding(server, "Hi", dimensions=wanted))["data"][0]["embedding"]) == wanted
    assert [each.params.dimensions for each in server.engine.submitted] == [2, 4, None]
    message = error_of(await server.post("/v1/embeddings", {"input": "Hi", "dimensions": 3}), 400)["message"]
    assert "2, 4, 8" in message


async def test_fields_that_ask_for_nothing_are_taken(serve):
    server = await serve(pooler=EMBEDDER)
    idle = {
        "user": "me",
        "embed_dtype": "float32",
        "endianness": "little",
        "padding": "do_not_pad",
        "encoding_format": "float",
    }
    await embedding(server, "Hi", **idle, use_activation=False, cache_salt="salt", request_id="mine")
    (request,) = server.engine.submitted
    assert (request.params.use_activation, request.cache_salt, request.id) == (False, "salt", "embd-mine-0")


async def test_an_answer_of_too_many_numbers_is_refused(serve, monkeypatch):
    monkeypatch.setattr(run, "MAX_NUMBERS", 16)
    server = await serve(pooler=EMBEDDER)
    await embedding(server, ["a", "b"])
    refused = error_of(await server.post("/v1/embeddings", {"input": ["a", "b", "c"]}), 400)
    assert refused["param"] == "input"


async def test_so_many_inputs_and_no_more(serve, monkeypatch):
    monkeypatch.setattr(core, "MAX_INPUTS", 3)
    server = await serve(pooler=EMBEDDER)
    await embedding(server, ["a"] * 3)
    assert "at most 3" in error_of(await server.post("/v1/embeddings", {"input": ["a"] * 4}), 400)["message"]
    await embedding(server, [5, 6, 7, 8])  # one prompt


# --- many at once -------------------------------------------------------------------------------------------------


async def test_thousands_of_inputs_are_never_with_the_engine_all_at_once(serve):
    server = await serve(pooler=EMBEDDER, paused=True)
    texts = [f"text {number}" for number in range(1000)]
    answer = asyncio.create_task(embedding(server, texts))
    most = 0
    while len(server.engine.ended) < len(texts):
        await server.engine.until(lambda: bool(server.engine.live))
        most = max(most, len(server.engine.live))
        server.engine.step()
        await asyncio.sleep(0)
    data = (await answer)["data"]
    assert most <= run.LANES * run.SPAN_INPUTS
    assert len(data) == 1000
    for number in (0, 127, 128, 999):
        wanted = normalised(means_of(bytes_of(texts[number]), 8))
        assert data[number]["embedding"] == pytest.approx(wanted, abs=CLOSE)


async def test_a_client_with_a_limit_of_sequences_never_has_more(serve):
    server = await serve(pooler=EMBEDDER, paused=True, max_num_seqs_per_key=4)
    answer = asyncio.create_task(embedding(server, ["a"] * 20))
    while len(server.engine.ended) < 20:
        await server.engine.until(lambda: bool(server.engine.live))
        assert len(server.engine.live) <= 4
        server.engine.step()
        await asyncio.sleep(0)
    assert len((await answer)["data"]) == 20


async def test_one_bad_item_among_many_is_named_and_nothing_is_left_running(serve, monkeypatch):
    monkeypatch.setattr(run, "SPAN_INPUTS", 2)
    server = await serve(pooler=EMBEDDER, paused=True, max_model_len=8)
    answer = asyncio.create_task(server.post("/v1/embeddings", {"input": ["a", "b", "c" * 9, "d", "e", "f"]}))
    assert error_of(await answer, 400)["param"] == "input[2]"
    assert not server.engine.live


async def test_a_client_that_leaves_frees_the_engine(serve):
    server = await serve(pooler=EMBEDDER, paused=True)
    stream = await server.open_stream("/v1/embeddings", input=["a"] * 300)
    await server.engine.until(lambda: len(server.engine.live) == run.LANES * run.SPAN_INPUTS)
    stream.leave()
    await server.engine.until(lambda: not server.engine.live)


async def test_what_fails_in_the_engine_is_a_500_and_what_ends_with_it_a_503(serve):
    server = await serve(pooler=EMBEDDER, paused=True)
    failed = await server.while_it_waits(
        "/v1/embeddings", {"input": "a"}, lambda: server.engine.fail("numbers are lost")
    )
    assert failed.status_code == 500
    assert "numbers are lost" not in failed.text
    late = await server.while_it_waits("/v1/embeddings", {"input": "a"}, server.engine.time_out)
    assert late.status_code == 504


async def test_large_answers_are_written_off_the_loop_and_small_ones_where_they_are(serve, monkeypatch):
    threads = set()
    written = vectors.json_of

    def noted(numbers):
        threads.add(threading.current_thread() is threading.main_thread())
        return written(numbers)

    monkeypatch.setattr("server.api.pooling.routes.json_of", noted)
    server = await serve(pooler=EMBEDDER)
    await embedding(server, "a")
    assert threads == {True}
    threads.clear()
    answer = await embedding(server, ["text"] * 2000)
    assert threads == {False}
    assert len(answer["data"]) == 2000


def test_writing_rests_after_so_many_numbers_and_fills_chunks():
    parts = ((b"x" * 1000, vectors.PIECE_NUMBERS // 2) for _ in range(200))
    rests, made = 0, vectors.chunks(parts)
    while True:
        try:
            next(made)
            rests += 1
        except StopIteration as end:
            chunks = end.value
            break
    assert rests == 100
    assert b"".join(chunks) == b"x" * 200_000
    assert all(len(chunk) >= vectors.CHUNK_BYTES for chunk in chunks[:-1])


async def test_an_answer_of_several_chunks_is_sent_as_several_messages():
    sent = []

    async def send(message):
        sent.append(message)

    await ChunkedJson([b"[1", b",2]"])({}, None, send)
    head, *bodies = sent
    assert dict(head["headers"]) == {b"content-type": b"application/json", b"content-length": b"5"}
    assert [(each["body"], each["more_body"]) for each in bodies] == [(b"[1", True), (b",2]", False)]
