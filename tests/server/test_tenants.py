"""The prefix cache is divided by key: what one has prompted helps no other, and tells no other anything."""

from __future__ import annotations

import itertools

import pytest

from runtime.engine import Engine
from tests.fake_runner import FakeRunner, make_engine, model_info
from tests.server.conftest import MESSAGES

KEYS = ("first-key", "second-key")
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
    "/completion": {"prompt": "Hi"},
}


async def salt_of(server, key: str | None, path: str = "/v1/completions", **fields) -> str | None:
    headers = {} if key is None else {"x-api-key": key}
    body = {**BODIES[path], **fields}
    assert (await server.post(path, body, headers=headers)).status_code == 200
    return server.engine.submitted[-1].cache_salt


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_salts_by_key(serve, path):
    server = await serve(api_key=KEYS, admin_api_key="admin-key")
    first, again, second, admin = [await salt_of(server, key, path) for key in (KEYS[0], *KEYS, "admin-key")]
    assert first == again
    assert len({first, second, admin}) == 3
    assert not any(key in salt for key, salt in itertools.product(KEYS, (first, second)))


async def test_salts_of_clients_divide_what_is_theirs(serve):
    server = await serve(api_key=KEYS)
    salts = [await salt_of(server, key, cache_salt=own) for key in KEYS for own in ("a", "b")]
    assert len(set(salts)) == 4
    assert salts[0] == await salt_of(server, KEYS[0], cache_salt="a")


async def test_it_may_be_shared_and_without_keys_it_is(serve):
    shared = await serve(api_key=KEYS, shared_prefix_cache=True)
    assert [await salt_of(shared, key) for key in KEYS] == [None, None]
    assert await salt_of(shared, KEYS[0], cache_salt="a") == "a"
    assert await salt_of(await serve(), None) is None


async def test_cached_tokens_tell_nothing_of_another_key(serve):
    server = await serve(api_key=KEYS)
    model = model_info(vocab_size=server.tokenizer.vocab_size, max_model_len=512, eos_token_ids=frozenset())
    engine = make_engine(FakeRunner(lambda row: 65), num_blocks=256, budget=512, model=model)
    assert isinstance(engine, Engine)
    object.__setattr__(server.service.lifecycle.loaded, "engine", engine)
    cached = []
    for key in (KEYS[0], KEYS[1], KEYS[0]):
        body = {"prompt": "a secret that somebody may guess " * 3, "max_tokens": 1}
        answer = (await server.post("/v1/completions", body, headers={"x-api-key": key})).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    await engine.close()
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0
