"""/load, /ping, /tokenizer_info and /invocations, as vLLM has them: for load balancers, SageMaker and lm-eval."""

from __future__ import annotations

import threading

import jinja2
import pytest

from server.api.operations import invocations
from tests.server.conftest import MESSAGES
from tests.server.tiny import EOS


async def test_the_load_is_what_the_engine_has(serve):
    server = await serve(paused=True)
    assert (await server.http.get("/load")).json() == {"server_load": 0}
    stream = await server.open_stream("/v1/completions", prompt="Hi", stream=True)
    await stream.head()
    assert (await server.http.get("/load")).json() == {"server_load": 1}
    stream.leave()
    assert (await (await serve(loaded=False)).http.get("/load")).status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health_and_open(serve, method):
    server = await serve(api_key=("sk",))
    response = await server.http.request(method, "/ping")
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    loading = await serve(api_key=("sk",), loaded=False)
    assert (await loading.http.request(method, "/ping")).status_code == 503
    assert (await server.http.get("/load")).status_code == 401


# --- lm-eval ------------------------------------------------------------------------------------------------------


async def test_lm_evals_remote_tokenizer_finds_what_it_asks_for(serve):
    """The calls of `lm_eval.models.utils.RemoteTokenizer` (0.4.13), in its order, and what it reads of the answers."""
    server = await serve()
    response = await server.http.get("/tokenizer_info", headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    info = response.json()
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= info.keys()
    assert info["bos_token"] is None
    for text in (info["eos_token"], "Grüße", "x" * 1000):
        body = (await server.post("/tokenize", {"prompt": text, "add_special_tokens": False})).json()
        assert isinstance(body["tokens"], list)
        assert (await server.post("/detokenize", {"tokens": body["tokens"]})).json()["prompt"] == text
    assert (await server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})).json()[
        "tokens"
    ] == [EOS]
    prompt = (
        jinja2.Environment().from_string(info["chat_template"]).render(messages=MESSAGES, add_generation_prompt=True)
    )
    await server.chat()
    ids = (await server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False})).json()["tokens"]
    assert ids == list(server.engine.submitted[0].prompt_ids)


async def test_a_model_without_a_template_has_none(serve):
    server = await serve(chat=False)
    assert (await server.http.get("/tokenizer_info")).json()["chat_template"] is None


# --- SageMaker ----------------------------------------------------------------------------------------------------


async def test_an_invocation_is_a_chat_or_a_completion(serve):
    server = await serve()
    chat = (await server.post("/invocations", {"messages": MESSAGES})).json()
    assert chat["choices"][0]["message"]["content"] == "Hello there"
    text = (await server.post("/invocations", {"prompt": "Hi", "max_tokens": 3})).json()
    assert text["choices"][0]["text"] == "Hel"


async def test_what_a_long_invocation_is_is_found_out_off_the_loop(serve, monkeypatch):
    server = await serve(max_model_len=10_000)
    threads: list[bool] = []

    def noted(body: bytes) -> bool:
        threads.append(threading.current_thread() is threading.main_thread())
        return looked_at(body)

    looked_at = invocations._is_chat
    monkeypatch.setattr(invocations, "_is_chat", noted)
    for prompt in ("Hi", "Hi " * 9_000):
        body = {"prompt": prompt, "max_tokens": 1, "truncate_prompt_tokens": 9}
        assert (await server.post("/invocations", body)).status_code == 200
    assert threads == [True, False]


async def test_an_invocation_streams_and_its_client_may_leave(serve):
    server = await serve(paused=True)
    answer = await server.open_stream("/invocations", messages=MESSAGES, stream=True)
    assert "text/event-stream" in await answer.head()
    answer.leave()
    await server.engine.until(lambda: not server.engine.live)
    whole = await server.open_stream("/invocations", prompt="Hi")
    await server.engine.until(lambda: bool(server.engine.live))
    whole.leave()
    await server.engine.until(lambda: not server.engine.live)


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{}", 400, None),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, None),
        (b'{"messages": []}', 400, None),
        (b'{"prompt": 5}', 400, None),
        (b'{"prompt": "' + b"x" * 5000 + b'"}', 413, "request_too_large"),
    ],
)
async def test_what_is_neither_is_refused(serve, content, status, code):
    server = await serve(max_body_size=4096)
    response = await server.http.post("/invocations", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert code is None or response.json()["error"]["code"] == code


async def test_an_invocation_needs_the_key(serve):
    server = await serve(api_key=("sk",))
    assert (await server.post("/invocations", {"messages": MESSAGES})).status_code == 401
