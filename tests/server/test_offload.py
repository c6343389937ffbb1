"""Long texts leave the loop, short ones do not pay for the trip."""

from __future__ import annotations

import threading

import pytest

from server.generate import preprocess
from server.generate.sampling import check_token_ids
from server.offload import SHORT_CHARS, Offload


@pytest.fixture
def offload():
    made = Offload()
    yield made
    made.close()


@pytest.mark.parametrize(("num_chars", "leaves"), [(0, False), (SHORT_CHARS, False), (SHORT_CHARS + 1, True)])
async def test_work_leaves_the_loop_by_its_size(offload, num_chars, leaves):
    thread = await offload.run(num_chars, threading.current_thread)
    assert (thread is not threading.main_thread()) == leaves


@pytest.mark.parametrize("num_chars", [0, 10**6])
async def test_what_work_raises_arrives(offload, num_chars):
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await offload.run(num_chars, fail)


async def test_long_prompts_and_conversations_are_tokenised_in_the_pool(serve, monkeypatch):
    server = await serve("ok", max_model_len=100_000)
    threads = []
    encode = type(server.tokenizer).encode

    def noted(self, text, **more):
        threads.append(threading.current_thread().name.startswith("oneloop-text"))
        return encode(self, text, **more)

    monkeypatch.setattr(type(server.tokenizer), "encode", noted)
    await server.complete(prompt="short")
    await server.complete(prompt="x" * 10_000)
    await server.chat(messages=[{"role": "user", "content": "x" * 10_000}])
    assert threads == [False, True, True]


async def test_ids_of_a_long_prompt_are_checked_in_the_pool_piece_by_piece(serve, monkeypatch):
    server = await serve("ok", max_model_len=100_000)
    checked = []

    def noted(ids, vocab_size, param):
        checked.append((threading.current_thread().name.startswith("oneloop-text"), len(ids)))
        check_token_ids(ids, vocab_size, param)

    monkeypatch.setattr(preprocess, "check_token_ids", noted)
    await server.complete(prompt=[5] * 100)
    await server.complete(prompt=[5] * 20_000)
    assert checked == [
        (False, 100),
        (True, preprocess.PIECE),
        (True, preprocess.PIECE),
        (True, 20_000 - 2 * preprocess.PIECE),
    ]
    refused = await server.complete(prompt=[5] * 20_000 + [10**9])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("token id 1000000000 is outside the vocabulary")
